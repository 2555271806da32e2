"""The certificate as reports and model cards carry it: rule, checks, dtype, bounds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One check: what was measured, what bounds it, and a sentence that says so.

    passed: None where there is nothing to pass, because the rule is not lossless or the number is
    only reported. Each divergence is a plain mapping (prompt, position, gap, noise, tie).
    """

    name: str
    passed: bool | None
    measured: float
    bound: str
    text: str
    divergences: list[dict[str, Any]]


def certificate(
    checks: Sequence[Check], *, rule: str, lossless: bool, dtype: str, num_prompts: int
) -> dict[str, Any]:
    """Return the certificate's section of a report."""
    judged = [check for check in checks if check.passed is not None]
    failed = [check.name for check in judged if not check.passed]
    if not lossless:
        statement = f"the rule, {rule}, changes the target's law; its distance stands below"
    elif failed:
        statement = f"NOT certified: {', '.join(failed)} failed"
    else:
        statement = (
            f"certified: {len(judged)} of {len(judged)} checks passed on {num_prompts} prompts"
        )
    return {
        "statement": statement,
        "rule": rule,
        "lossless": lossless,
        "certified": lossless and not failed,
        "dtype": dtype,
        "num_prompts": num_prompts,
        "checks": [asdict(check) for check in checks],
    }


def certificate_rows(section: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return a row per check: name, outcome, what was measured, bound."""
    outcome = {True: "passed", False: "FAILED", None: "reported"}
    return [
        (check["name"], outcome[check["passed"]], check["text"], check["bound"])
        for check in section["checks"]
    ]
