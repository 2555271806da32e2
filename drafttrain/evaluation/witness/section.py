"""The report's section on vLLM: its counters, speeds and speedups, compared with ours."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Counters, Decoded, DecodeStats, PromptResult
from drafttrain.data.chat import answer_turn, prompt_tokens
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.records import Message
from drafttrain.data.template import Template
from drafttrain.decode.loop import is_lossless, speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.serving.engines import told_by_path
from drafttrain.drafters.serving.known import VLLM_METHODS, VLLM_PARALLEL, VLLM_WITHIN
from drafttrain.evaluation.certify import ROUNDING_MARGIN, near_tie
from drafttrain.evaluation.config import EvalConfig
from drafttrain.evaluation.evaluate import Parts
from drafttrain.evaluation.witness.compare import TIE_GAP, Ours, compare_with_ours, predict
from drafttrain.evaluation.witness.engine import BatchWitness, ServedDrafter, Witness, witness
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.build import row_of
from drafttrain.report.metrics import acceptance_length, ratio, rows_of, speed, speedup
from drafttrain.report.results import (
    EXACT_DTYPES,
    PLAIN,
    BothSeconds,
    Estimate,
    LimitedSampling,
    MethodRow,
    OursBeside,
    Speeds,
    WitnessRow,
    WitnessSection,
)
from drafttrain.report.totals import collect
from drafttrain.runtime.hardware import dtype_name
from drafttrain.target.model import Target
from drafttrain.target.vllm.process import find_python

REPEATS = 5  # of every timed batch
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
LOOKUP_NOTE = (
    "vLLM's prompt lookup copies what followed the earliest occurrence of the longest suffix, ours "
    "what followed the latest: the text is the same, drafts and counters need not be."
)


@dataclass(frozen=True)
class WitnessPrompt:
    """One prompt as our loop decoded it: one turn, every token."""

    prompt_id: str
    turn: int
    task: str
    tokens: tuple[int, ...]

    def output(self, decoded: PromptResult | Decoded) -> Ours:
        """Return our loop's output for it."""
        name = self.prompt_id if self.turn == 0 else f"{self.prompt_id}, turn {self.turn}"
        stats = decoded.stats
        return Ours(name, decoded.tokens, stats.untrimmed, stats.num_target_passes)


def check_witness(
    drafter: Drafter,
    drafter_name: str,
    target_dir: Path | None,
    serving_dir: Path | None,
    config: EvalConfig,
) -> ServedDrafter:
    """Return what vLLM will serve; ValueError, before anything is decoded, if it cannot."""
    sampling, draft_sampling = config.sampling, config.draft_sampling
    if drafter_name not in VLLM_METHODS:
        raise ValueError(
            f"eval.engine=vllm serves the drafters {', '.join(VLLM_METHODS)}, got {drafter_name}; "
            "evaluate it with eval.engine=drafttrain"
        )
    if target_dir is None:
        raise ValueError(
            "eval.engine=vllm must have a directory with the target's weights, but random weights "
            "have none; choose a model= that is loaded"
        )
    if not is_lossless(config.acceptance_rule, sampling):
        raise ValueError(
            "eval.rule must be lossless with eval.engine=vllm: vLLM has no lossy rule to compare"
        )
    if config.stop_strings:
        raise ValueError(
            "eval.stop_strings must be empty with eval.engine=vllm, which decodes tokens, not "
            f"text; got {list(config.stop_strings)}"
        )
    method = VLLM_METHODS[drafter_name]
    part = None if drafter.lookup is not None else told_by_path(method, serving_dir or "")
    if part is not None:
        raise ValueError(
            f"eval.engine=vllm cannot serve a {method} drafter from {serving_dir}: vLLM takes it "
            f"for another kind, because its path contains {part!r}; rename the folder"
        )
    greedy_drafts = draft_sampling.greedy or sampling.greedy or drafter.lookup is not None
    if not greedy_drafts and draft_sampling != sampling:
        raise ValueError(
            "eval.draft_temperature must be null (drafts sampled as the target is) or 0 (the most "
            f"likely token) with eval.engine=vllm, which has no other, got {draft_sampling}"
        )
    within = drafter_name in VLLM_WITHIN
    if within:
        target_dir = serving_dir or target_dir  # which holds both
    return ServedDrafter(
        target_dir,
        None if within or drafter.lookup is not None else serving_dir,
        method,
        drafter.lookup,
        greedy_drafts,
        find_python(config.vllm_python),
        drafter_name in VLLM_PARALLEL,
    )


def asked_of(
    prompts: Sequence[Prompt], results: Sequence[PromptResult], target: Target, template: Template
) -> list[WitnessPrompt]:
    """Return the prompts, token for token, that our loop decoded, later turns too.

    Later turns follow the plain loop's answers, which are in the results.
    """
    plain = {(r.prompt_id, r.turn): r for r in reversed(results) if r.method == PLAIN}
    asked = []
    for prompt in prompts:
        messages: list[Message] = []
        for turn, text in enumerate(prompt.turns):
            result = plain.get((prompt.id, turn))
            if result is None:
                break
            messages.append(Message("user", text))
            tokens = tuple(prompt_tokens(messages, target.tokenizer, template))
            assert len(tokens) == result.num_prompt_tokens, (prompt.id, turn)
            asked.append(WitnessPrompt(prompt.id, turn, prompt.task, tokens))
            messages.append(answer_turn(messages, result.tokens, target.tokenizer, template))
    return asked


def witness_section(
    parts: Parts,
    served: ServedDrafter,
    asked: Sequence[WitnessPrompt],
    results: Sequence[PromptResult],
    config: EvalConfig,
    *,
    threads: int,
    folder: Path,
    seed: int,
    ours_by_batch: Mapping[int, MethodRow],
) -> WitnessSection:
    """Run vLLM on the prompts that our loop decoded, and return the section of the report.

    Counters are compared one by one, greedily and in the dtype of parts.exact. results: our
    measurements at batch 1. ours_by_batch: our summary rows at a sweep's other batch sizes. vLLM's
    request and log stay in `folder`. ValueError as raised by `witness`.
    """
    target, exact, name = parts.target, parts.exact, parts.drafter_name
    depth, sampling, limit = config.depth, config.sampling, config.max_new_tokens
    resampling = Resampling(config.resamples, seed)
    mine = {(r.prompt_id, r.turn): r for r in reversed(results) if r.method == name}

    def run(dtype: torch.dtype, drawn: Sampling, sizes: Sequence[int], place: str) -> Witness:
        return witness(
            served,
            [one.tokens for one in asked],
            depth=depth,
            sampling=drawn,
            max_new_tokens=limit,
            dtype=dtype_name(dtype),
            eos_ids=target.spec.eos_token_ids,
            threads=threads,
            folder=folder / place,
            batch_sizes=sizes,
            repeats=REPEATS if drawn == sampling else 1,
            device=target.device.type,
            max_positions=target.spec.max_positions,
            vocab_size=target.spec.vocab_size,
        )

    def decoded(one: WitnessPrompt) -> Decoded:
        settings: dict[str, Any] = {"policy": depth, "max_new_tokens": limit, "sampling": GREEDY}
        chance = SeededChance(seed)
        return speculative_decode(exact, parts.drafter, one.tokens, chance=chance, **settings)

    measured = run(target.dtype, sampling, config.vllm_batch_sizes, "timed")
    ours = [one.output(mine[one.prompt_id, one.turn]) for one in asked]
    timed_alone = measured.at(1)
    alone, compared = timed_alone, ours
    drafts_alike = parts.draft_dtype == torch.float32 or exact.dtype != torch.float32
    exactly = sampling.greedy and target.dtype == exact.dtype and drafts_alike
    if alone is None or not exactly:
        # Sampled text is never the same twice, and bfloat16 rounding alone flips drafts.
        alone = run(exact.dtype, GREEDY, (1,), "compared").at(1)
        compared = [one.output(decoded(one)) for one in asked]
    assert alone is not None
    assert alone.by_prompt is not None

    def gap_at(place: int, position: int) -> tuple[float, float]:
        gap, noise = near_tie(exact, [*asked[place].tokens, *compared[place].tokens[:position]])
        short = dtype_name(exact.dtype) not in EXACT_DTYPES
        return gap, ROUNDING_MARGIN * noise if short else TIE_GAP

    agreement = compare_with_ours(
        *(compared, alone.speculative.tokens, alone.by_prompt, gap_at, dtype_name(exact.dtype))
    )
    every = collect(results)
    totals = {method: every[method] for method in (name, PLAIN)}
    beside = {1: row_of(totals, name, depth, resampling), **ours_by_batch}
    return WitnessSection(
        vllm=measured.vllm,
        drafter=name,
        method=served.method,
        draft_sampling="most likely token" if served.greedy_drafts else "as the target",
        depth=depth,
        sampling=LimitedSampling(**asdict(sampling), max_new_tokens=limit),
        dtype=dtype_name(target.dtype),
        device=target.device.type,
        threads=threads,
        interleaved=measured.interleaved,
        repeats=measured.repeats,
        num_outputs=len(asked),
        batches=[
            _row(batch, asked, resampling, beside.get(batch.batch_size))
            for batch in measured.batches
        ],
        agreement=agreement,
        prediction=predict(timed_alone, ours) if timed_alone is not None else None,
        notes=[LOOKUP_NOTE] if served.lookup else [],
        definitions=dict(DEFINITIONS),
    )


def _row(
    batch: BatchWitness,
    asked: Sequence[WitnessPrompt],
    resampling: Resampling,
    ours: MethodRow | None,
) -> WitnessRow:
    """Return vLLM's numbers at one batch size, computed as in every report."""
    counters = batch.counters
    engines = {PLAIN: (batch.plain, None), "vllm": (batch.speculative, batch.by_prompt)}
    results = []
    for method, (measured, by_prompt) in engines.items():
        for place, one in enumerate(asked):
            counted = by_prompt[place] if by_prompt else Counters()
            stats = DecodeStats(counted, counted, verify_s=measured.seconds[place])
            about = (one.prompt_id, one.turn, one.task, method, 0, len(one.tokens))
            results.append(PromptResult(*about, measured.tokens[place], stats))
    totals = collect(results)
    plain, drafted = (list(totals[method].values()) for method in engines)
    drafts = counters.num_drafts
    length = 1 + counters.num_accepted_tokens / drafts if drafts else None
    alone = acceptance_length(rows_of(drafted), resampling) if batch.by_prompt else None
    pairs = zip(batch.plain.tokens, batch.speculative.tokens, strict=True)
    return WitnessRow(
        batch_size=batch.batch_size,
        **counters.of_vllm,
        mean_acceptance_length=Estimate(length, alone.ci95 if alone else None),
        acceptance_per_position=[
            ratio(accepted, drafts) for accepted in counters.num_accepted_tokens_per_position
        ],
        seconds=BothSeconds(sum(batch.plain.seconds), sum(batch.speculative.seconds)),
        num_output_tokens=sum(len(output) for output in batch.speculative.tokens),
        tokens_per_second=Speeds(speed(rows_of(plain)), speed(rows_of(drafted))),
        speedup=speedup(drafted, plain, resampling),
        outputs_differing=sum(a != b for a, b in pairs),
        num_unstable=batch.plain.num_unstable + batch.speculative.num_unstable,
        ours=OursBeside(ours.tokens_per_second, ours.speedup, ours.untrimmed.mean_acceptance_length)
        if ours
        else None,
    )
