"""Compare vLLM's counters with our loop's, prompt by prompt, and its speedup with a prediction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from drafttrain.core.types import Counters
from drafttrain.evaluation.certify import first_difference
from drafttrain.evaluation.witness.engine import BatchWitness, EngineMeasurement
from drafttrain.report.phrases import number
from drafttrain.report.results import EXACT_DTYPES, Agreement, Disagreement, Prediction

# Kernels differ by about 1e-5 in float32 logits; a gap of 3e-6 occurred in 4000 tokens.
TIE_GAP = 1e-3
CALIBRATED = 3  # every third output calibrates, the others test
WANTED = 0.15  # how far a predicted speedup may be from the measured one


@dataclass(frozen=True)
class Ours:
    """One output of our loop: its name for reports, its tokens, its untrimmed counters."""

    name: str
    tokens: tuple[int, ...]
    counters: Counters
    num_passes: int  # of the target, after the prefill


def compare_with_ours(
    ours: Sequence[Ours],
    tokens: Sequence[Sequence[int]],
    counters: Sequence[Counters],
    gap_at: Callable[[int, int], tuple[float, float]],
    dtype: str = "float32",
) -> Agreement:
    """Return how our outputs and untrimmed counters agree with vLLM's, one by one.

    gap_at(output, position): the difference of the target's two best logits after the first
    `position` tokens of our output, and what is a near tie there. dtype: of both; in short ones
    rounding alone changes counters, which are then not compared. Both count accepted tokens past
    the limit or an end token, and neither counts the prefill as a draft.
    """
    found = []
    for place, (mine, theirs, counted) in enumerate(zip(ours, tokens, counters, strict=True)):
        position, gap, most = None, None, 0.0
        if tuple(theirs) != mine.tokens:
            position = first_difference(mine.tokens, theirs)
            if position < min(len(mine.tokens), len(theirs)):  # else one of them ended too early
                gap, most = gap_at(place, position)
        elif dtype not in EXACT_DTYPES or _same(mine.counters, counted):
            continue
        tie = gap is not None and gap <= most
        found.append(Disagreement(mine.name, position, gap, tie, mine.counters, counted))
    ties = sum(one.tie for one in found)
    return Agreement(
        dtype=dtype,
        num_outputs=len(ours),
        num_equal=len(ours) - len(found),
        num_ties=ties,
        holds=ties == len(found),
        ours=sum((one.counters for one in ours), Counters()),
        theirs=sum(counters, Counters()),
        disagreements=found,
        statement=_agreement_statement(len(ours), len(ours) - len(found), ties, dtype),
    )


def _same(ours: Counters, theirs: Counters) -> bool:
    total = ours + Counters(0, 0, 0, [0] * len(theirs.num_accepted_tokens_per_position))
    return total == theirs + Counters(0, 0, 0, [0] * len(ours.num_accepted_tokens_per_position))


def predict(alone: BatchWitness, ours: Sequence[Ours]) -> Prediction | None:
    """Predict vLLM's batch-1 speedup from its times and our acceptance; None for too few outputs.

    Every third output gives vLLM's times of a plain step, of a cycle and of the prefills. On the
    others our loop predicts the number of passes, and vLLM's times are the measurement.
    """
    assert alone.passes is not None, "only batch 1 gives the passes of each output"
    plain, drafted = alone.plain, alone.speculative
    fit = range(0, len(ours), CALIBRATED)
    test = [place for place in range(len(ours)) if place not in fit]
    steps = sum(len(plain.tokens[place]) - 1 for place in fit)
    cycles = sum(alone.passes[place] for place in fit)
    passes = sum(ours[place].num_passes for place in test)
    if not (steps and cycles and passes):
        return None
    t_plain = sum(plain.decode_seconds[place] for place in fit) / steps
    t_cycle = sum(drafted.decode_seconds[place] for place in fit) / cycles
    prefills = [
        sum(engine.seconds[place] - engine.decode_seconds[place] for place in fit) / len(fit)
        for engine in (plain, drafted)
    ]
    tokens = sum(len(ours[place].tokens) - 1 for place in test)
    slow = len(test) * prefills[0] + tokens * t_plain
    fast = len(test) * prefills[1] + passes * t_cycle
    measured = _speed(drafted, test) / _speed(plain, test)
    prediction = Prediction(
        num_calibration=len(fit),
        num_test=len(test),
        tokens_per_pass=tokens / passes,
        t_plain_s=t_plain,
        t_cycle_s=t_cycle,
        predicted=tokens / passes * t_plain / t_cycle,
        predicted_with_prefill=slow / fast,
        measured=measured,
        error=slow / fast / measured - 1,
        statement="",
    )
    return replace(prediction, statement=_prediction_statement(prediction))


def _speed(engine: EngineMeasurement, places: Sequence[int]) -> float:
    tokens = sum(len(engine.tokens[place]) for place in places)
    return tokens / sum(engine.seconds[place] for place in places)


def _agreement_statement(num_outputs: int, num_equal: int, num_ties: int, dtype: str) -> str:
    """Return one sentence on whether vLLM's counts are ours."""
    what = "tokens and counters" if dtype in EXACT_DTYPES else "tokens"
    statement = (
        f"{num_equal} of {num_outputs} greedy outputs in {dtype} have vLLM's {what} and ours alike"
    )
    if others := num_outputs - num_equal:
        statement += f"; {num_ties} of the other {others} part at a near tie of the target"
        if others > num_ties:
            statement += f", {others - num_ties} for another reason"
    return f"{statement}."


def _prediction_statement(found: Prediction) -> str:
    """Return one sentence with vLLM's predicted and measured speedup."""
    off = abs(found.error)
    return (
        f"vLLM's speedup at batch 1 on {found.num_test} outputs: predicted "
        f"{number(found.predicted_with_prefill)} ({number(found.predicted)} without the "
        f"prefill) from our {number(found.tokens_per_pass)} tokens per pass and its own times "
        f"on {found.num_calibration} other outputs ({number(1000 * found.t_plain_s)} ms a "
        f"step, {number(1000 * found.t_cycle_s)} ms a cycle), measured "
        f"{number(found.measured)}: {100 * off:.0f} % off"
        f"{'' if off <= WANTED else f', more than {100 * WANTED:.0f} %'}."
    )
