"""What to do with a drafter, task by task: speculate, marginal or do not; money and memory."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from drafttrain.report import wording
from drafttrain.report.config import VerdictSettings
from drafttrain.report.statistics import DISTURBED
from drafttrain.report.wording import TOO_FEW, between, number, percent

SPECULATE, MARGINAL, DO_NOT, UNKNOWN = "speculate", "marginal", "do not", "unknown"
DECISIONS = (SPECULATE, MARGINAL, DO_NOT, UNKNOWN)
IN_WORDS = {
    SPECULATE: "Speculate",
    MARGINAL: "Marginal",
    DO_NOT: "Do not speculate",
    UNKNOWN: "Undecided",
}
SECONDS_PER_HOUR = 3600
FEWEST_BLOCKS = 3  # to see whether they agree
DISAGREEING = 1.5  # times as fast in one block as in another
FEW_DISTURBED = 0.05  # of the prompts: a share that decides nothing

Verdict = dict[str, Any]


@dataclass(frozen=True)
class ExtraMemory:
    """What the drafter holds besides the target: its own weights and its own KV cache, in bytes."""

    weight_bytes: int
    kv_bytes_per_token: int  # of one row

    def at(self, num_positions: int, batch_size: int) -> dict[str, int]:
        """Return the bytes at a context of so many positions in each row of a batch."""
        kv_bytes = self.kv_bytes_per_token * num_positions * batch_size
        return {
            **asdict(self),
            "num_positions": num_positions,
            "batch_size": batch_size,
            "kv_bytes": kv_bytes,
            "total_bytes": self.weight_bytes + kv_bytes,
        }


def decide(speedup: Mapping[str, Any], marginal_speedup: float) -> str:
    """Return what a speedup and its interval call for.

    speculate: even the interval's lower bound is above `marginal_speedup`; do not: the speedup is
    at most 1, and extra memory buys nothing; marginal: what lies between, or has no interval.
    """
    value, ci95 = speedup["value"], speedup["ci95"]
    if value is None:
        return UNKNOWN
    if value <= 1:
        return DO_NOT
    return SPECULATE if ci95 is not None and ci95[0] > marginal_speedup else MARGINAL


def handicap(row: Mapping[str, Any]) -> str:
    """Return what is wrong with a speedup above the acceptance length, or nothing."""
    ci95, length = row["speedup"]["ci95"], row["acceptance_length"]["micro"]
    if ci95 is None or length is None or ci95[0] <= length:
        return ""
    return (
        f"speedup is at least {number(ci95[0])} but acceptance length is {number(length)}: the "
        f"plain loop was handicapped"
    )


def disturbance(row: Mapping[str, Any]) -> str:
    """Return how many of a row's timings were disturbed, or nothing."""
    num = row["speedup"].get("num_disturbed", 0)
    if not num:
        return ""
    return (
        f"{num} of {row['num_prompts']} prompts took more than {DISTURBED:g} times as long by one "
        "method as by another: something else kept the machine busy; each counts at the pace of "
        "the other methods"
    )


def disagreement(row: Mapping[str, Any]) -> str:
    """Return how far the timing blocks of a row are apart, or nothing where they agree."""
    blocks = [value for value in row["speedup"].get("blocks", []) if value]
    if len(blocks) < FEWEST_BLOCKS or max(blocks) <= DISAGREEING * min(blocks):
        return ""
    return (
        f"the timing blocks disagree, {number(min(blocks))} to {number(max(blocks))} times as fast:"
        " measure again on a quiet machine, or in more blocks (eval.blocks, eval.repeats)"
    )


def doubtful(row: Mapping[str, Any], name: str, settings: VerdictSettings) -> bool:
    """Return whether the timings of a row are too disturbed to say that speculation pays.

    A few prompts of many change little; blocks that disagree may each be above what is worth
    having. The blocks of a single task hold few prompts each: only those of all are compared.
    """
    num, of = row["speedup"].get("num_disturbed", 0), row["num_prompts"]
    blocks = [value for value in row["speedup"].get("blocks", []) if value]
    apart = name == "all" and bool(disagreement(row))
    return num > FEW_DISTURBED * of or (apart and min(blocks) <= settings.marginal_speedup)


def verdict_of(
    row: Mapping[str, Any],
    depth: int,
    settings: VerdictSettings,
    extra_memory: dict[str, int] | None,
    of_depths: list[int],
    name: str = "all",
) -> Verdict:
    """Return the verdict on one row of a report, in numbers and in a sentence.

    of_depths: the depths that were measured, of which this is the fastest.
    A row whose plain loop was handicapped, or whose timings were disturbed, has a speedup that
    cannot be trusted: its verdict is at most marginal.
    """
    flagged, doubted = bool(handicap(row)), doubtful(row, name, settings)
    decision = decide(row["speedup"], settings.marginal_speedup)
    if (flagged or doubted) and decision == SPECULATE:
        decision = MARGINAL
    verdict: Verdict = {
        "decision": decision,
        "depth": depth,
        "of_depths": of_depths,
        "num_prompts": row["num_prompts"],
        "speedup": {key: row["speedup"][key] for key in ("value", "ci95")},
        "acceptance_length": row["acceptance_length"]["micro"],
        "acceptance_rate": row["acceptance_rate"],
        "money": _money(row, settings),
        "extra_memory": extra_memory,
        "flagged": flagged,
        "disturbed": doubted,
    }
    return {**verdict, "statement": _statement(verdict)}


def _money(row: Mapping[str, Any], settings: VerdictSettings) -> dict[str, Any] | None:
    """Return the price of a million output tokens, plain and drafted, and the share saved."""
    plain, fast = (row["tokens_per_second"][key] for key in ("autoregressive", "speculative"))
    if settings.price_per_hour is None or not plain or not fast:
        return None
    per_token = settings.price_per_hour / SECONDS_PER_HOUR
    ci95 = row["speedup"]["ci95"]
    return {
        "currency": settings.currency,
        "price_per_hour": settings.price_per_hour,
        "per_million_tokens": {
            "autoregressive": 1e6 * per_token / plain,
            "speculative": 1e6 * per_token / fast,
        },
        "saving": {
            "value": 1 - plain / fast,
            "ci95": None if ci95 is None else [1 - 1 / bound for bound in ci95],
        },
    }


def call(verdict: Verdict) -> str:
    """Return the decision as words that open a sentence: `Speculate at depth 4`."""
    depth, measured = f"at depth {verdict['depth']}", verdict["of_depths"]
    if len(measured) > 1:
        depth += f", the fastest of {', '.join(map(str, measured))}"
    return f"{IN_WORDS[verdict['decision']]} {depth}"


def _statement(verdict: Verdict) -> str:
    value, ci95 = verdict["speedup"]["value"], verdict["speedup"]["ci95"]
    if value is None:
        return f"{call(verdict)}: no speedup could be computed."
    interval = f"95 % interval {between(ci95)}" if ci95 else TOO_FEW
    clauses = [
        f"{call(verdict)}: {number(value)} times as fast ({interval})",
        f"acceptance rate {number(verdict['acceptance_rate'])}",
        *(line.rstrip(".") for line in bill(verdict)),
    ]
    if verdict["flagged"]:
        clauses.append("but the plain loop was handicapped")
    if verdict["disturbed"]:
        clauses.append("but its timings were disturbed")
    return "; ".join(clauses) + "."


def bill(verdict: Verdict) -> list[str]:
    """Return what speculation costs and saves, as sentences: none of what is not known."""
    lines = []
    cost = verdict["money"]
    if cost is not None:
        plain, fast = cost["per_million_tokens"].values()
        share = cost["saving"]["value"]
        change = f"{percent(abs(share))} {'less' if share >= 0 else 'more'}"
        lines.append(
            f"{cost['currency']} {wording.money(fast)} instead of {wording.money(plain)} per "
            f"million output tokens ({change})."
        )
    if verdict["extra_memory"] is not None:
        lines.append(f"{wording.memory(verdict['extra_memory']['total_bytes'])} more memory.")
    return lines


def verdicts_of(
    report: Mapping[str, Any],
    longest: Mapping[str, int],
    settings: VerdictSettings,
    memory: ExtraMemory | None,
) -> dict[str, Verdict]:
    """Return the verdict on the report's drafter, in all and by task.

    longest: the positions of the longest turn, in all and by task. Where the report's sweep has
    other depths at its own temperature and batch size, each verdict is on the fastest of them.
    """
    measured = rows_by_depth(report)
    depths = sorted(measured)

    def best(name: str) -> Verdict:
        rows = {depth: measured[depth][name] for depth in depths}
        depth = max(rows, key=lambda depth: rows[depth]["speedup"]["value"] or 0.0)
        size = None if memory is None else memory.at(longest[name], report["batch_size"])
        return verdict_of(rows[depth], depth, settings, size, depths, name)

    return {name: best(name) for name in measured[report["depth"]]}


def rows_by_depth(report: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the rows of the report's drafter, "all" first, at every depth that was measured.

    At the report's own temperature and batch size.
    """
    point = report["sampling"]["temperature"], report["batch_size"]
    found = {
        other["depth"]: {"all": other["summary"], **other["tasks"]}
        for other in report["sweep"]
        if (other["temperature"], other["batch_size"]) == point
    }
    return {**found, report["depth"]: {"all": report["summary"], **report["tasks"]}}


def main_depth(report: Mapping[str, Any]) -> int:
    """Return the depth that the headline is of: every page shows the drafter at that depth."""
    return int(report["verdicts"]["all"]["depth"])


def headline(report: Mapping[str, Any]) -> str:
    """Return the verdict over all tasks as one sentence."""
    verdict, drafter = report["verdicts"]["all"], report["drafter"]
    value, ci95 = verdict["speedup"]["value"], verdict["speedup"]["ci95"]
    if verdict["decision"] == UNKNOWN:
        return f"No speedup could be computed for {drafter} on {report['target']}."
    times = f"{report['target']} decodes {number(value)} times as fast with {drafter} as alone"
    law = "" if report["lossless"]["lossless"] else ", by a rule that changes what it writes"
    doubt = ", but its timings were disturbed" if verdict.get("disturbed") else ""
    if ci95 is None:
        return f"{call(verdict)}: {times} ({TOO_FEW}){doubt}{law}."
    sure = "" if ci95[0] > 1 or ci95[1] < 1 else ", which may be no difference at all"
    return f"{call(verdict)}: {times} (95 % interval {between(ci95)}){sure}{doubt}{law}."


def is_serious(flag: Mapping[str, str], report: Mapping[str, Any]) -> bool:
    """Return whether a flag puts a report's numbers in doubt.

    Few timing blocks, and greedy outputs that rounding changed in a narrow dtype where the rule is
    lossless and the check found no difference, do not.
    """
    check = report["lossless"]
    sound = check["lossless"] and check["greedy_identical"] == check["greedy_total"]
    return not (flag["kind"] == "timing" or (flag["kind"] == "outputs_differing" and sound))


def grouped(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return one line per decision with the tasks it holds for; none where there is one task."""
    tasks = {name: verdict for name, verdict in verdicts.items() if name != "all"}
    if len(tasks) < 2:
        return []
    lines = []
    for decision in DECISIONS:
        names = [name for name, verdict in tasks.items() if verdict["decision"] == decision]
        if names:
            listed = "every task" if len(names) == len(tasks) else ", ".join(names)
            lines.append(f"{IN_WORDS[decision]}: {listed}.")
    return lines
