"""The section of a report that sets vLLM's numbers beside ours."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from drafttrain.report.tables import Table
from drafttrain.report.wording import estimate, number, positions, speed

WANTED = 0.15  # how far a predicted speedup may be from the measured one

DEFINITIONS = {
    "vllm": "The same prompts, token for token, decoded by a real vLLM with and without the "
    "drafter, prefill included; batch: requests handed in together, the next when all are done.",
    "acceptance_length": "1 + accepted / drafts by vLLM's own counters, which count accepted "
    "tokens past the end token and the limit; ours beside it is counted so too. ci95: bootstrap "
    "over prompts, at batch 1 alone, where each prompt's counters can be told apart.",
    "speedup": "vLLM's tokens per second with the drafter over its own without; ours over ours. "
    "Batches of prompts went through both engines in turns, unless it says one after the other.",
    "agreement": "Greedily in float32 at batch 1, every output's tokens and counters (drafts, "
    "drafted, accepted, accepted by position) are vLLM's and ours alike; or the outputs part where "
    "the target's two best logits are a near tie (a gap of at most 0.001, audited by our target).",
    "prediction": "tokens_per_pass * t_plain / t_cycle. t_plain, t_cycle: vLLM's time of a plain "
    "step and of one cycle of draft and verification, after the prefill, on every third output; "
    "tokens_per_pass: our loop's, on the others; measured: vLLM's speedup on the others. "
    "predicted_with_prefill adds each engine's mean prefill.",
}


def agreement_statement(section: Mapping[str, Any]) -> str:
    """Say in one sentence whether vLLM counted what we counted."""
    found = section["agreement"]
    total, equal, ties = (found[key] for key in ("num_outputs", "num_equal", "num_ties"))
    said = (
        f"{equal} of {total} greedy outputs in {found['dtype']} have vLLM's tokens and counters "
        "and ours alike"
    )
    if equal == total:
        return f"{said}."
    said += f"; {ties} of the other {total - equal} part at a near tie of the target"
    unexplained = total - equal - ties
    return f"{said}, {unexplained} for another reason." if unexplained else f"{said}."


def prediction_statement(section: Mapping[str, Any]) -> str:
    """Say in one sentence what was predicted and what vLLM then did."""
    found = section["prediction"]
    off = abs(found["error"])
    return (
        f"vLLM's speedup at batch 1 on {found['num_test']} outputs: predicted "
        f"{number(found['predicted_with_prefill'])} ({number(found['predicted'])} without the "
        f"prefill) from our {number(found['tokens_per_pass'])} tokens per pass and its own times "
        f"on {found['num_calibration']} other outputs ({number(1000 * found['t_plain_s'])} ms a "
        f"step, {number(1000 * found['t_cycle_s'])} ms a cycle), measured "
        f"{number(found['measured'])}: {100 * off:.0f} % off"
        f"{'' if off <= WANTED else f', more than {100 * WANTED:.0f} %'}."
    )


def witness_table(section: Mapping[str, Any]) -> Table:
    """Return vLLM's numbers beside ours as a table: a row per batch size."""
    columns = ["batch", "acceptance length, vLLM", "ours", "per position, vLLM", "tokens/s plain"]
    columns += ["tokens/s drafted", "speedup, vLLM, 95 %", "ours, 95 %"]
    law = section["sampling"]
    how = "greedy" if law["temperature"] == 0 else f"temperature {law['temperature']:g}"
    turns = "in turns" if section["interleaved"] else "one after the other: memory holds but one"
    notes = [section["agreement"]["statement"]]
    notes += [_part(one) for one in section["agreement"]["disagreements"]]
    if section["prediction"] is not None:
        notes.append(section["prediction"]["statement"])
    return Table(
        "vLLM beside our loop",
        f"vLLM {section['vllm']} with {section['drafter']} at depth {section['depth']}, {how}, "
        f"{section['dtype']} on {section['device']}, {section['threads']} thread"
        f"{'s' if section['threads'] != 1 else ''}; {section['num_outputs']} outputs, both engines "
        f"{turns}; drafts: {section['draft_sampling']}. Tokens per second are vLLM's.",
        columns,
        [_cells(row) for row in section["batches"]],
        [*notes, *section["notes"]],
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    ours = row["ours"]
    return [
        str(row["batch_size"]),
        estimate(row["acceptance_length"]),
        number(ours["acceptance_length"] if ours else None),
        positions(row["acceptance_per_position"]),
        speed(row["tokens_per_second"]["autoregressive"]),
        speed(row["tokens_per_second"]["speculative"]),
        estimate(row["speedup"]),
        estimate(ours["speedup"]) if ours else number(None),
    ]


def _part(one: Mapping[str, Any]) -> str:
    if one["position"] is None:
        return f"{one['name']}: the same text, other counters ({_counted(one)})"
    gap = "" if one["gap"] is None else f", where the target's two best logits are {one['gap']:.2g}"
    judged = "a near tie" if one["tie"] else "no tie"
    return f"{one['name']}: other text from token {one['position']}{gap} apart: {judged}"


def _counted(one: Mapping[str, Any]) -> str:
    sides: Sequence[tuple[str, Mapping[str, Any]]] = (
        ("ours", one["ours"]),
        ("vLLM", one["theirs"]),
    )
    return "; ".join(
        f"{name}: {found['num_drafts']} drafts, {found['num_accepted_tokens']} accepted"
        for name, found in sides
    )


def with_witness(report: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report that has the section, its table and its definitions as well."""
    return {
        **report,
        "vllm": dict(section),
        "tables": [*report["tables"], asdict(witness_table(section))],
    }
