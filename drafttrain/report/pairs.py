"""Methods on shared prompts: means over training seeds, and differences paired by prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafttrain.report.bootstrap import Resampling, Values
from drafttrain.report.metrics import ACCEPTANCE_LENGTH, SPEEDUP, Columns, Quantity, columns_of
from drafttrain.report.phrases import bounds, cell, number
from drafttrain.report.results import (
    PLAIN,
    Adaptation,
    AdaptationRow,
    BeforeAfter,
    Measurement,
)
from drafttrain.report.totals import Key

BEFORE = "before"  # the method that decodes with the drafter that training started from
ADAPTATION = (
    "A drafter that started from another one (run.init_from), beside that one as it was: the same "
    "prompts, decoded by the same target in the same timing blocks. difference: after minus "
    "before; ci95: bootstrap over prompts, paired, so that a prompt is drawn with both."
)


@dataclass(frozen=True)
class Measured:
    """One drafting method of one report, and the plain loop measured with it."""

    drafted: dict[Key, Measurement]
    plain: dict[Key, Measurement]

    def on(self, keys: Sequence[Key]) -> Columns:
        """Return the columns of these prompts, in their order."""
        return columns_of([self.drafted[key] for key in keys], [self.plain[key] for key in keys])


def measured_of(rows: Iterable[Measurement]) -> dict[str, Measured]:
    """Return the measurements of a report by drafting method.

    Raises ValueError if a prompt occurs twice, or a method lacks prompts of the plain loop.
    """
    by_method: dict[str, dict[Key, Measurement]] = {PLAIN: {}}
    for row in rows:
        prompts = by_method.setdefault(row.method, {})
        if (row.task, row.prompt_id) in prompts:
            raise ValueError(
                f"prompt {row.prompt_id} of {row.task} is measured twice with {row.method}"
            )
        prompts[row.task, row.prompt_id] = row
    plain = by_method.pop(PLAIN)
    for method, prompts in by_method.items():
        if set(prompts) != set(plain):
            raise ValueError(f"{method} and {PLAIN} have different prompts")
    return {method: Measured(prompts, plain) for method, prompts in by_method.items()}


def by_scope(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """Return the prompts of all tasks, under "all", and of each."""
    tasks: dict[str, list[Key]] = {}
    for key in (every := list(keys)):
        tasks.setdefault(key[0], []).append(key)
    return {"all": every, **tasks}


def at_pass_time(seconds: float) -> Quantity:
    """Return the speedup beside a target whose every pass takes this long, drafting as measured.

    A pass that checks a draft is taken to last as long as a plain one; the prefill and the loop's
    own time are left out.
    """

    def statistic(plain_passes: Values, passes: Values, draft_seconds: Values) -> Values:
        return plain_passes / (passes + draft_seconds / seconds)

    columns = ("plain_passes", "passes", "draft_seconds")
    # An answer of a single token takes no pass after the prefill.
    return Quantity(columns, statistic, ("plain_passes", "passes"), every_prompt=False, least=0.0)


def adaptation(
    rows: Iterable[Measurement], drafter: str, resampling: Resampling
) -> Adaptation | None:
    """Return acceptance and speedup before and after adapting, None where not measured."""
    measured = measured_of(rows)
    if BEFORE not in measured:
        return None
    found = {}
    for scope, keys in by_scope(measured[drafter].drafted).items():
        old, new = [measured[BEFORE].on(keys)], [measured[drafter].on(keys)]
        length, speedup = (
            BeforeAfter(
                quantity.mean(old, resampling).estimate,
                quantity.mean(new, resampling).estimate,
                quantity.difference(new, old, resampling),
            )
            for quantity in (ACCEPTANCE_LENGTH, SPEEDUP)
        )
        found[scope] = AdaptationRow(len(keys), length, speedup)
    length = found["all"].acceptance_length
    statement = (
        f"acceptance length {number(length.before.value)} before, {number(length.after.value)} "
        f"after adapting, on {found['all'].num_prompts} prompts"
    )
    answer = length.difference.decides("better", "worse", "not decided")
    told = f": {answer} ({cell(length.difference)}, 95 %)" if answer else f"; {bounds(None)}"
    return Adaptation(found, statement + told, ADAPTATION)
