"""The verdict on a drafter, task by task: speculate, marginal or do not; money and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from drafttrain.report.config import VerdictSettings
from drafttrain.report.phrases import bounds, memory, money, number, percent
from drafttrain.report.results import (
    Estimate,
    ExtraMemory,
    MethodRow,
    MethodRows,
    Money,
    Speeds,
    TaskVerdict,
)

SPECULATE, MARGINAL, DO_NOT, UNKNOWN = "speculate", "marginal", "do not", "unknown"
IN_WORDS = {
    SPECULATE: "Speculate",
    MARGINAL: "Marginal",
    DO_NOT: "Do not speculate",
    UNKNOWN: "Undecided",
}
SECONDS_PER_HOUR = 3600
FEWEST_BLOCKS = 3  # needed to judge whether blocks agree
DISAGREEING = 1.15  # times as fast by the times of one block as by those of another


def decide(speedup: Estimate, marginal_speedup: float) -> str:
    """Return the decision for a speedup and its interval.

    speculate: even the interval's lower bound is above `marginal_speedup`. do not: the speedup is
    at most 1. marginal: anything between, or a speedup without an interval. unknown: no speedup, or
    one of at most 1 without an interval: too few prompts to advise against the drafter.
    """
    if speedup.value is None:
        return UNKNOWN
    if speedup.value <= 1:
        return DO_NOT if speedup.ci95 else UNKNOWN
    sure = speedup.ci95 is not None and speedup.ci95[0] > marginal_speedup
    return SPECULATE if sure else MARGINAL


def handicap(row: MethodRow) -> str:
    """Return what is wrong with a speedup above the acceptance length, "" if nothing."""
    ci95, length = row.speedup.ci95, row.acceptance_length.micro
    if ci95 is None or length is None or ci95[0] <= length:
        return ""
    told = f"speedup is at least {number(ci95[0])} but acceptance length is {number(length)}"
    return f"{told}: the plain loop was handicapped"


def disagreement(row: MethodRow) -> str:
    """Return a sentence on how far a row's timing blocks disagree, "" if they agree."""
    blocks = [value for value in row.speedup.blocks if value]
    if len(blocks) < FEWEST_BLOCKS or max(blocks) <= DISAGREEING * min(blocks):
        return ""
    return (
        f"the timing blocks disagree, {number(min(blocks))} to {number(max(blocks))} times as fast:"
        " measure again on a quiet machine, or more often (eval.repeats)"
    )


def _money(row: MethodRow, settings: VerdictSettings) -> Money | None:
    """Return the price of a million output tokens, plain and drafted, and the share saved."""
    plain, fast = row.tokens_per_second.autoregressive, row.tokens_per_second.speculative
    if settings.price_per_hour is None or not plain or not fast:
        return None
    per_token = settings.price_per_hour / SECONDS_PER_HOUR
    ci95 = row.speedup.ci95
    # A speedup that may be 0 may cost any price: what is saved has no interval then.
    saved = [1 - 1 / bound for bound in ci95] if ci95 is not None and ci95[0] > 0 else None
    return Money(
        settings.currency,
        settings.price_per_hour,
        Speeds(1e6 * per_token / plain, 1e6 * per_token / fast),
        Estimate(1 - plain / fast, saved),
    )


def call(verdict: TaskVerdict) -> str:
    """Return the decision as the start of a sentence: `Speculate at depth 4`."""
    if verdict.acceptance_length is None:
        return f"{IN_WORDS[verdict.decision]} (nothing was drafted)"
    at = "up to" if verdict.adaptive else "at"
    return f"{IN_WORDS[verdict.decision]} {at} {fastest_depth(verdict)}"


def fastest_depth(verdict: TaskVerdict) -> str:
    """Return the depth and those it was chosen from: `depth 4, the fastest of 2, 4`."""
    others = f", the fastest of {', '.join(map(str, verdict.of_depths))}"
    return f"depth {verdict.depth}{others * (len(verdict.of_depths) > 1)}"


def _statement(verdict: TaskVerdict) -> str:
    value, ci95, rate = verdict.speedup.value, verdict.speedup.ci95, verdict.acceptance_rate
    length, pays = verdict.acceptance_length, number(verdict.break_even_length)
    if value is None:
        return f"{call(verdict)}: no speedup could be computed."
    clauses = [
        f"{call(verdict)}: {number(value)} times as fast ({bounds(ci95)})",
        *([] if rate is None else [f"acceptance rate {number(rate)}"]),
        *([] if rate is None else [f"acceptance length {number(length)}, it pays from {pays}"]),
        *(line.rstrip(".") for line in bill(verdict)),
    ]
    if verdict.flagged:
        clauses.append("but the plain loop was handicapped")
    if verdict.disturbed:
        clauses.append("but its timing blocks disagree")
    return "; ".join(clauses) + "."


def bill(verdict: TaskVerdict) -> list[str]:
    """Return what speculation costs and saves, as sentences, as far as it is known."""
    lines = []
    cost = verdict.money
    if cost is not None and (share := cost.saving.value) is not None:
        price = cost.per_million_tokens
        prices = f"{money(price.speculative)} instead of {money(price.autoregressive)}"
        change = f"{percent(abs(share))} {'less' if share >= 0 else 'more'}"
        lines.append(f"{cost.currency} {prices} per million output tokens ({change}).")
    if verdict.extra_memory is not None:
        lines.append(f"{memory(verdict.extra_memory.total_bytes)} more memory.")
    return lines


def verdicts_of(
    rows: MethodRows,
    depth: int,
    of_depths: Sequence[int],
    batch_size: int,
    longest: Mapping[str, int],
    settings: VerdictSettings,
    extra: ExtraMemory | None,
    adaptive: bool,
) -> dict[str, TaskVerdict]:
    """Return the verdict on the report's drafter, in all and by task.

    of_depths: those that `depth` was chosen from. longest: the positions of the longest turn, in
    all and by task. adaptive: depths are maxima. A row whose plain loop was handicapped, or whose
    timing blocks disagree on whether it exceeds `marginal_speedup`, has a speedup that cannot be
    trusted: its verdict is at most marginal.
    """
    found = {}
    for name, row in rows.by_name.items():
        disturbed = bool(disagreement(row)) and (
            min(value for value in row.speedup.blocks if value) <= settings.marginal_speedup
        )
        decision = decide(row.speedup, settings.marginal_speedup)
        if (handicap(row) or disturbed) and decision == SPECULATE:
            decision = MARGINAL
        # As fast if drafts were free; without a draft it is the target alone, measured twice.
        possible = 1 + row.num_accepted_tokens / max(row.num_target_passes, 1)
        if row.speedup.value is not None and possible <= min(settings.marginal_speedup, 1.05):
            decision = DO_NOT
        verdict = TaskVerdict(
            decision=decision,
            depth=depth,
            of_depths=list(of_depths),
            adaptive=adaptive,
            num_prompts=row.num_prompts,
            speedup=row.speedup.estimate,
            acceptance_length=row.acceptance_length.micro,
            acceptance_rate=row.acceptance_rate,
            money=_money(row, settings),
            extra_memory=extra.at(longest[name], batch_size) if extra else None,
            flagged=bool(handicap(row)),
            disturbed=disturbed,
            break_even_length=row.break_even_length,
        )
        found[name] = replace(verdict, statement=_statement(verdict))
    return found


def headline(verdict: TaskVerdict, target: str, drafter: str, lossless: bool) -> str:
    """Return the verdict over all tasks as one sentence."""
    ci95 = verdict.speedup.ci95
    if verdict.speedup.value is None:
        return f"No speedup could be computed for {drafter} on {target}."
    gain = f"{number(verdict.speedup.value)} times as fast with {drafter} as alone"
    rule = "" if lossless else ", by a rule that changes what it writes"
    doubt = ", but its timing blocks disagree" if verdict.disturbed else ""
    open_ = ci95 is not None and ci95[0] <= 1 <= ci95[1]
    sure = ", which may be no difference at all" if open_ else ""
    return f"{call(verdict)}: {target} decodes {gain} ({bounds(ci95)}){sure}{doubt}{rule}."


def grouped(verdicts: Mapping[str, TaskVerdict]) -> list[str]:
    """Return one line per decision with the tasks it holds for; no lines for a single task."""
    tasks = {name: verdict for name, verdict in verdicts.items() if name != "all"}
    if len(tasks) < 2:
        return []
    lines = []
    for decision, words in IN_WORDS.items():
        names = [name for name, verdict in tasks.items() if verdict.decision == decision]
        if names:
            listed = "every task" if len(names) == len(tasks) else ", ".join(names)
            lines.append(f"{words}: {listed}.")
    return lines
