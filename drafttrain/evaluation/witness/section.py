"""What a report says of vLLM: its counters, speeds and speedups beside ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Counters, DecodeStats, PromptResult
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.records import Message
from drafttrain.data.template import Template
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.serving.known import VLLM_METHODS
from drafttrain.evaluation.witness.compare import Ours, compare_with_ours, predict
from drafttrain.evaluation.witness.engine import BatchWitness, EngineMeasurement, Witness, witness
from drafttrain.report.build import row_of
from drafttrain.report.metrics import Resampling, acceptance_length, rows_of, speed, speedup
from drafttrain.report.results import (
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
from drafttrain.report.witness import DEFINITIONS
from drafttrain.target.model import Target
from drafttrain.target.vllm.process import find_python

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


@dataclass(frozen=True)
class ServedDrafter:
    """What vLLM serves: the target's directory, the drafter's (None: it has no weights), how.

    method: vLLM's name, None where the directory says it. lookup: the shortest and the longest
    suffix of prompt lookup. greedy_drafts: the drafter's most likely token is drafted.
    """

    target_dir: Path
    serving_dir: Path | None
    method: str | None
    lookup: tuple[int, int] | None
    greedy_drafts: bool
    python: str


def check_witness(
    *,
    drafter: Drafter,
    drafter_name: str,
    target_dir: Path | None,
    serving_dir: Path | None,
    sampling: Sampling,
    draft_sampling: Sampling,
    lossless: bool,
    stop_strings: Sequence[str],
    vllm_python: str | None,
) -> ServedDrafter:
    """Return what vLLM will serve; ValueError, before anything is decoded, where it cannot."""
    if drafter_name not in VLLM_METHODS:
        raise ValueError(
            f"eval.engine=vllm serves the drafters {', '.join(VLLM_METHODS)}, got {drafter_name}; "
            "evaluate it with eval.engine=drafttrain"
        )
    if target_dir is None:
        raise ValueError(
            "eval.engine=vllm must have a directory with the target's weights, but random weights "
            "are in none; choose a model= that is loaded"
        )
    if not lossless:
        raise ValueError(
            "eval.rule must be lossless with eval.engine=vllm: vLLM has no lossy rule to compare"
        )
    if stop_strings:
        raise ValueError(
            "eval.stop_strings must be empty with eval.engine=vllm, which decodes tokens, not "
            f"text; got {list(stop_strings)}"
        )
    greedy_drafts = draft_sampling.greedy or sampling.greedy or drafter.lookup is not None
    if not greedy_drafts and draft_sampling != sampling:
        raise ValueError(
            "eval.draft_temperature must be null (drafts sampled as the target is) or 0 (the most "
            f"likely token) with eval.engine=vllm, which has no other, got {draft_sampling}"
        )
    if drafter.lookup is not None:
        serving_dir = None
    method = VLLM_METHODS[drafter_name]
    python = find_python(vllm_python)
    return ServedDrafter(target_dir, serving_dir, method, drafter.lookup, greedy_drafts, python)


def asked_of(
    prompts: Sequence[Prompt], results: Sequence[PromptResult], target: Target, template: Template
) -> list[WitnessPrompt]:
    """Return the prompts, token for token, that our loop decoded, later turns too.

    Later turns follow the plain loop's answers, which stand in the results.
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
            answer = target.tokenizer.decode(result.tokens, skip_special_tokens=True)
            messages.append(Message("assistant", answer))
    return asked


def witness_section(
    target: Target,
    exact: Target,
    drafter: Drafter,
    served: ServedDrafter,
    asked: Sequence[WitnessPrompt],
    results: Sequence[PromptResult],
    *,
    drafter_name: str,
    draft_dtype: torch.dtype,
    depth: int,
    sampling: Sampling,
    max_new_tokens: int,
    threads: int,
    folder: Path,
    resamples: int,
    seed: int,
    batch_sizes: Sequence[int] = (1, 4, 16),
    repeats: int = 5,
    ours_by_batch: Mapping[int, MethodRow] | None = None,
    show: bool = True,
) -> WitnessSection:
    """Run vLLM on what our loop decoded and return what the report says of it.

    exact: the target in float32 (`target` itself where that is float32), in which, greedily,
    counters are compared one by one. drafter: in float32; draft_dtype: what it was timed in.
    results: our measurements, at batch 1.
    ours_by_batch: our summary rows at other batch sizes, of a sweep. Request and log of vLLM stay
    in `folder`. ValueError as `witness` raises it.
    """
    resampling = Resampling(resamples, seed)
    mine = {(r.prompt_id, r.turn): r for r in reversed(results) if r.method == drafter_name}

    def run(
        dtype: torch.dtype,
        law: Sampling,
        sizes: Sequence[int],
        asked: Sequence[WitnessPrompt],
        name: str,
    ) -> Witness:
        return witness(
            served.target_dir,
            served.serving_dir,
            served.method,
            [one.tokens for one in asked],
            depth=depth,
            sampling=law,
            max_new_tokens=max_new_tokens,
            dtype=str(dtype).removeprefix("torch."),
            eos_ids=target.spec.eos_token_ids,
            threads=threads,
            folder=folder / name,
            python=served.python,
            batch_sizes=sizes,
            repeats=repeats if law == sampling else 1,
            lookup=served.lookup,
            greedy_drafts=served.greedy_drafts,
            device=target.device.type,
            max_positions=target.spec.max_positions,
            show=show,
        )

    measured = run(target.dtype, sampling, batch_sizes, asked, "timed")
    ours = [_ours(one, mine[one.prompt_id, one.turn]) for one in asked]
    alone, compared = measured.at(1), ours
    exactly = sampling.greedy and target.dtype == draft_dtype == torch.float32
    if alone is None or not exactly:
        # Sampled text is never the same twice, and rounding of bfloat16 flips drafts by itself.
        alone = run(torch.float32, GREEDY, (1,), asked, "compared").at(1)
        compared = [_decoded(exact, drafter, one, depth, max_new_tokens, seed) for one in asked]
    assert alone is not None
    assert alone.by_prompt is not None
    agreement = compare_with_ours(
        compared, alone.speculative.tokens, alone.by_prompt, _gap(exact, asked, compared)
    )
    timed_alone = measured.at(1)
    totals = {name: of for name, of in collect(results).items() if name in (drafter_name, PLAIN)}
    beside = {1: row_of(totals, drafter_name, depth, resampling), **(ours_by_batch or {})}
    return WitnessSection(
        vllm=measured.vllm,
        drafter=drafter_name,
        method=served.method,
        draft_sampling="most likely token" if served.greedy_drafts else "as the target",
        depth=depth,
        sampling=LimitedSampling(**asdict(sampling), max_new_tokens=max_new_tokens),
        dtype=str(target.dtype).removeprefix("torch."),
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


def _ours(asked: WitnessPrompt, result: PromptResult) -> Ours:
    name = asked.prompt_id if asked.turn == 0 else f"{asked.prompt_id}, turn {asked.turn}"
    return Ours(name, result.tokens, result.stats.untrimmed, result.stats.num_target_passes)


def _decoded(
    target: Target,
    drafter: Drafter,
    asked: WitnessPrompt,
    depth: int,
    max_new_tokens: int,
    seed: int,
) -> Ours:
    decoded = speculative_decode(
        target,
        drafter,
        asked.tokens,
        depth=depth,
        sampling=GREEDY,
        max_new_tokens=max_new_tokens,
        chance=SeededChance(seed),
    )
    stats = decoded.stats
    name = asked.prompt_id if asked.turn == 0 else f"{asked.prompt_id}, turn {asked.turn}"
    return Ours(name, decoded.tokens, stats.untrimmed, stats.num_target_passes)


def _gap(
    target: Target, asked: Sequence[WitnessPrompt], ours: Sequence[Ours]
) -> Callable[[int, int], float]:
    @torch.inference_mode()
    def gap_at(place: int, position: int) -> float:
        text = [*asked[place].tokens, *ours[place].tokens[:position]]
        tokens = torch.tensor([text], device=target.device)
        logits, _ = target.step(target.begin(), tokens, last_only=True)
        best = logits[0, -1].float().topk(2).values
        return float(best[0] - best[1])

    return gap_at


def _row(
    batch: BatchWitness,
    asked: Sequence[WitnessPrompt],
    resampling: Resampling,
    ours: MethodRow | None,
) -> WitnessRow:
    """Return one batch size's numbers of vLLM, by the arithmetic of every report."""
    counters = batch.counters
    totals = collect(
        [
            *_as_results(PLAIN, batch.plain, None, asked),
            *_as_results("vllm", batch.speculative, batch.by_prompt, asked),
        ]
    )
    plain, drafted = (list(totals[method].values()) for method in (PLAIN, "vllm"))
    drafts = counters.num_drafts
    length = 1 + counters.num_accepted_tokens / drafts if drafts else None
    alone = acceptance_length(rows_of(drafted), resampling) if batch.by_prompt else None
    pairs = zip(batch.plain.tokens, batch.speculative.tokens, strict=True)
    return WitnessRow(
        batch_size=batch.batch_size,
        **asdict(counters),
        acceptance_length=Estimate(length, alone.ci95 if alone else None),
        acceptance_per_position=[
            accepted / drafts if drafts else None
            for accepted in counters.num_accepted_tokens_per_position
        ],
        seconds=BothSeconds(sum(batch.plain.seconds), sum(batch.speculative.seconds)),
        num_output_tokens=sum(len(said) for said in batch.speculative.tokens),
        tokens_per_second=Speeds(speed(rows_of(plain)), speed(rows_of(drafted))),
        speedup=speedup(drafted, plain, resampling),
        outputs_differing=sum(a != b for a, b in pairs),
        num_unstable=batch.plain.num_unstable + batch.speculative.num_unstable,
        ours=OursBeside(ours.untrimmed.acceptance_length, ours.tokens_per_second, ours.speedup)
        if ours
        else None,
    )


def _as_results(
    method: str,
    measured: EngineMeasurement,
    counters: Sequence[Counters] | None,
    asked: Sequence[WitnessPrompt],
) -> list[PromptResult]:
    results = []
    for place, one in enumerate(asked):
        counted = counters[place] if counters else Counters()
        stats = DecodeStats(trimmed=counted, untrimmed=counted, verify_s=measured.seconds[place])
        tokens, length = measured.tokens[place], len(one.tokens)
        results.append(
            PromptResult(one.prompt_id, one.turn, one.task, method, 0, length, tokens, stats)
        )
    return results
