"""What adapting a drafter brought: acceptance before and after, on the same prompts, paired."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from drafttrain.report.pairs import QUANTITIES, measured_of
from drafttrain.report.statistics import Key, Resampling
from drafttrain.report.tables import Table
from drafttrain.report.wording import TOO_FEW, change, estimate, number

BEFORE = "before"  # the method that decodes with what training started from
DEFINITION = (
    "A drafter that started from another one (run.init_from), beside that one as it was: the same "
    "prompts, decoded by the same target in the same timing blocks. difference: after minus "
    "before; ci95: bootstrap over prompts, paired, so that a prompt is drawn with both."
)


def adaptation(report: Mapping[str, Any], resampling: Resampling) -> dict[str, Any] | None:
    """Return acceptance and speedup before and after, by task and in all, None where not measured.

    Each of "all" and the tasks has, of `acceptance_length` and `speedup`, `before`, `after` and
    their paired `difference` (value and ci95, which is None for too few prompts).
    """
    measured = measured_of(report)
    if BEFORE not in measured:
        return None
    old, new = measured[BEFORE], measured[report["drafter"]]
    scopes: dict[str, list[Key]] = {"all": list(new.drafted)}
    for key in new.drafted:
        scopes.setdefault(key[0], []).append(key)
    rows: dict[str, Any] = {}
    for scope, keys in scopes.items():
        columns = {"before": [old.on(keys)], "after": [new.on(keys)]}
        rows[scope] = {"num_prompts": len(keys)}
        for name, quantity in QUANTITIES.items():
            sides = {side: quantity.mean(runs, resampling) for side, runs in columns.items()}
            rows[scope][name] = {
                **{side: {k: found[k] for k in ("value", "ci95")} for side, found in sides.items()},
                "difference": quantity.difference(columns["after"], columns["before"], resampling),
            }
    return {"rows": rows, "statement": _statement(rows["all"]), "definition": DEFINITION}


def _statement(row: Mapping[str, Any]) -> str:
    length = row["acceptance_length"]
    difference = length["difference"]
    said = (
        f"acceptance length {number(length['before']['value'])} before, "
        f"{number(length['after']['value'])} after adapting, on {row['num_prompts']} prompts"
    )
    low, high = difference["ci95"] or (None, None)
    if low is None or high is None:
        return f"{said}; {TOO_FEW}"
    answer = "better" if low > 0 else "worse" if high < 0 else "not decided"
    return f"{said}: {answer} ({change(difference)}, 95 %)"


def adaptation_table(section: Mapping[str, Any]) -> Table:
    """Return the section as a table: a row for all prompts and one per task."""
    columns = ["task", "prompts"]
    for what in ("acceptance length", "speedup"):
        columns += [f"{what} before", "after", "difference [95 %]"]
    cells = []
    for task, row in section["rows"].items():
        line = [task, str(row["num_prompts"])]
        for name in QUANTITIES:
            one = row[name]
            line += [estimate(one["before"]), estimate(one["after"]), change(one["difference"])]
        cells.append(line)
    return Table(
        "Before and after adapting",
        f"{section['statement'][0].upper()}{section['statement'][1:]}. {section['definition']}",
        columns,
        cells,
        [],
    )


def with_adaptation(report: Mapping[str, Any], resampling: Resampling) -> dict[str, Any]:
    """Return the report with the section and its table, as it was where nothing was adapted."""
    section = adaptation(report, resampling)
    if section is None:
        return {**report, "adaptation": None}
    tables = [*report["tables"], asdict(adaptation_table(section))]
    return {**report, "adaptation": section, "tables": tables}
