"""The section of a report that compares vLLM with our loop."""

from dataclasses import replace

from drafttrain.report.phrases import number
from drafttrain.report.results import EXACT_DTYPES, Prediction, Report, WitnessSection
from drafttrain.report.tables import witness_table

WANTED = 0.15  # how far a predicted speedup may be from the measured one

DEFINITIONS = {
    "vllm": "The same prompts, token for token, decoded by a real vLLM with and without the "
    "drafter, prefill included; batch: requests handed in together, the next when all are done.",
    "mean_acceptance_length": "1 + accepted / drafts by vLLM's own counters, which count accepted "
    "tokens past the end token and the limit; ours beside it is counted so too. ci95: bootstrap "
    "over prompts, at batch 1 alone, where each prompt's counters can be told apart.",
    "speedup": "vLLM's tokens per second with the drafter over its own without; ours over ours. "
    "Batches of prompts went through both engines in turns, unless it says one after the other.",
    "agreement": "Greedily in float32 at batch 1, every output's tokens and counters (drafts, "
    "drafted, accepted, accepted by position) are vLLM's and ours alike; or the outputs part where "
    "the target's two best logits are a near tie (a gap of at most 0.001, audited by our target). "
    "Without room for float32: tokens alone, in the served dtype, where a near tie is a gap of at "
    "most twice the rounding noise.",
    "prediction": "tokens_per_pass * t_plain / t_cycle. t_plain, t_cycle: vLLM's time of a plain "
    "step and of one cycle of draft and verification, after the prefill, on every third output; "
    "tokens_per_pass: our loop's, on the others; measured: vLLM's speedup on the others. "
    "predicted_with_prefill adds each engine's mean prefill.",
}


def agreement_statement(num_outputs: int, num_equal: int, num_ties: int, dtype: str) -> str:
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


def prediction_statement(found: Prediction) -> str:
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


def with_witness(report: Report, section: WitnessSection) -> Report:
    """Return the report with the section and its table added."""
    return replace(report, vllm=section, tables=[*report.tables, witness_table(section)])
