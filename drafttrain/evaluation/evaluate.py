"""The whole evaluation: certificate, measurements at every point of the sweep, the report."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from drafttrain.core.ops.packed_weights import pack
from drafttrain.core.types import PromptResult
from drafttrain.data.evaluation_prompts import Prompt, prompts_sha256
from drafttrain.data.template import Template
from drafttrain.decode.loop import describe_rule, is_lossless
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.certify import certify, greedy_check
from drafttrain.evaluation.config import EvalConfig
from drafttrain.evaluation.measure import (
    at_depth,
    first_turn,
    in_tasks,
    measure,
    methods_of,
    spread,
)
from drafttrain.evaluation.measurements import Measurements
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.build import build_report, certified, sweep_point
from drafttrain.report.outputs import examples_of
from drafttrain.report.results import (
    SCHEMA_VERSION,
    Certificate,
    Evaluated,
    ExtraMemory,
    LimitedSampling,
    LosslessCheck,
    Point,
    Report,
    TimingInfo,
    TrainingCurves,
)
from drafttrain.report.tables import certificate_table, sweep_table
from drafttrain.report.totals import FEWEST_PROMPTS, PassTimes
from drafttrain.runtime.hardware import dtype_name
from drafttrain.runtime.settings import AUTO
from drafttrain.runtime.terminal import console, progress
from drafttrain.target.model import Target

PROBE_TOKENS = 8  # tokens of a text that is read only to measure the drafter's cache


@dataclass(frozen=True)
class Parts:
    """The parts of an evaluation: the timed target, the exact one, and the drafters."""

    target: Target
    exact: Target  # the same weights in float32; the timed one itself if that is float32
    drafter: Drafter  # float32
    drafter_name: str
    draft_dtype: torch.dtype
    references: Mapping[str, Drafter]  # drafters to compare it with, such as prompt lookup

    @cached_property
    def timed_drafter(self) -> Drafter:
        """The drafter in the dtype that it is timed in."""
        drafter = copy.deepcopy(self.drafter).to(self.draft_dtype)
        pack(drafter)
        return drafter


@dataclass(frozen=True)
class Setup:
    """Everything that a measurement needs, checked before anything is decoded."""

    folder: Path  # of the run
    settings: EvalConfig
    seed: int
    label: str  # of the target
    parts: Parts
    prompts: list[Prompt]
    template: Template
    checkpoint: Path | None  # of the run that trained the drafter
    origin: str  # identifies the drafter's weights
    weights: str  # names them
    conditions: dict[str, Any]  # what a measurement depends on besides `settings`
    timing: TimingInfo
    about_prompts: dict[str, Any]
    notes: list[str]
    training: TrainingCurves | None  # of the run that trained the drafter

    @property
    def subject(self) -> dict[str, str]:
        """Names of the very weights and prompts: a file's content may change under its name."""
        return {"the drafter": self.weights, "the prompts": prompts_sha256(self.prompts)[:12]}


def evaluate_drafter(
    setup: Setup, place: Path, record: Mapping[str, Any]
) -> tuple[Report, list[PromptResult], list[Measurements]]:
    """Certify and measure a drafter; return the report, the results at eval.depth, journals.

    place: folder of the journals, which the caller finishes once the report is on the disk; after a
    stop, measurements made under other conditions are not reused. record: provenance.
    """
    parts, prompts, config, seed = setup.parts, setup.prompts, setup.settings, setup.seed
    timing, resampling = setup.timing, Resampling(config.resamples, seed)
    lossless, section = losslessness(setup)
    timed, name = parts.timed_drafter, parts.drafter_name
    methods = methods_of({**parts.references, name: timed}, config)
    choosing = choosing_prompts(prompts, config)
    if choosing:
        depths, left = ", ".join(map(str, config.every_depth)), len(prompts) - len(choosing)
        console.print(
            f"the report is about the fastest of depths {depths}, which is chosen on "
            f"{len(choosing)} prompts; its numbers are of the other {left}"
        )
    elif len(config.every_depth) > 1:
        console.print(
            f"the report is about depth {config.depth}: too few prompts to choose the fastest of "
            "eval.depths on some of them"
        )
    points: list[Point] = []
    base: list[PromptResult] = []  # at the depth of the report, the fastest of a sweep
    asked: list[PromptResult] = []  # at eval.depth, at which a witness drafts
    main_depth, journals = config.depth, []
    told = {
        "setup": setup.conditions,  # by section: a key of one may be a key of the other
        "eval": config.conditions,
        "references": list(parts.references),
    }
    for temperature, batch_size in config.points:
        journal = Measurements(
            place,
            f"temperature{temperature:g}-batch{batch_size}",
            told | {"point": [temperature, batch_size]},
        )
        if journal.known:
            console.print(f"resuming: {len(journal.known)} batches of prompts were measured before")
        elif journal.others:
            console.print(
                f"not reused, measured under other conditions: {journal.others[0]}; to resume "
                "there, set hardware.dtype, hardware.threads and the rest as in its first line"
            )
        journals.append(journal)
        measured = measure(
            parts.target,
            methods,
            prompts,
            setup.template,
            config,
            sampling=config.sampling_at(temperature),
            batch_size=batch_size,
            seed=seed,
            journal=journal,
        )
        results = [one for one in measured.results if one.prompt_id not in choosing]
        if not base:
            if choosing:
                others = [one for one in measured.results if one.prompt_id in choosing]
                main_depth = fastest(others, name, config.every_depth)
            base = at_depth(results, main_depth)
            asked = at_depth(results, config.depth)
            timing = replace(
                timing,
                blocks=len({result.block for result in base}),
                others_cores=measured.load.others_cores,
                stolen=measured.load.stolen,
                delayed=measured.delayed,
            )
        at: dict[str, Any] = {"temperature": temperature, "batch_size": batch_size}
        for depth in config.every_depth if config.sweeps else ():
            here = at_depth(results, depth)
            points.append(sweep_point(here, resampling, drafter=name, depth=depth, **at))
    tables = [certificate_table(section)] if section is not None else []
    if points:
        rules = {
            temperature: describe_rule(
                config.sampling_at(temperature), config.acceptance_rule, config.shape
            )
            for temperature, _ in config.points
        }
        tables.append(sweep_table(points, rules))
    about = Evaluated(
        schema_version=SCHEMA_VERSION,
        target=setup.label,
        drafter=name,
        depth=main_depth,
        tree="" if config.kind == "chain" else config.policy_at(main_depth).describe(),
        sampling=LimitedSampling(**vars(config.sampling), max_new_tokens=config.max_new_tokens),
        draft_sampling=config.draft_sampling,
        batch_size=config.batch_size,
        lossless=lossless,
        certificate=section,
        sweep=points,
        tables=tables,
        timing=timing,
        provenance={
            **record,
            "checkpoint": None if setup.checkpoint is None else str(setup.checkpoint),
            "drafter": setup.origin,
            "target_fingerprint": parts.target.spec.fingerprint,
        },
        prompts=setup.about_prompts,
        notes=setup.notes,
        examples=examples_of(base, name, prompts, parts.target.tokenizer),
        training=setup.training,
        published=list(parts.drafter.published),
    )
    report = build_report(
        base,
        about,
        resampling,
        config.verdict,
        of_depths=config.every_depth if choosing else [],
        adaptive=config.kind == "adaptive",
        memory=extra_memory(parts.target, timed),
    )
    return report, asked, journals


def choosing_prompts(prompts: Sequence[Prompt], config: EvalConfig) -> set[str]:
    """Return the prompts on which the depth of a sweep is chosen: the first of three of each task.

    No number of the report is of them. Empty for one depth, and where too few would be left to
    choose on: the depth is then eval.depth.
    """
    if len(config.every_depth) == 1:
        return set()
    chosen = {prompt.id for members in in_tasks(prompts) for _, prompt in members[::3]}
    return chosen if len(prompts) - len(chosen) >= len(chosen) >= FEWEST_PROMPTS else set()


def fastest(results: Sequence[PromptResult], drafter: str, depths: Sequence[int]) -> int:
    """Return the depth at which a drafter takes the least time for each token."""
    times = PassTimes(results)

    def per_token(depth: int) -> float:
        mine = [result for result in results if result.key == (drafter, depth)]
        seconds = sum(times.seconds(result).total for result in mine)
        return seconds / max(sum(len(result.tokens) for result in mine), 1)

    return min(depths, key=per_token)


def losslessness(setup: Setup) -> tuple[LosslessCheck, Certificate | None]:
    """Return the greedy check of every report, and the certificate if it is requested.

    A rule that is not lossless at every temperature measured is always certified: its distance from
    the target's distribution must accompany its numbers.
    """
    parts, config = setup.parts, setup.settings
    if config.policy == AUTO:  # which may draft hardly anything, and so check nothing
        config = replace(config, policy="chain")
    rule, exact = config.acceptance_rule, parts.exact
    name = describe_rule(config.sampling, rule, config.shape)
    lossless = is_lossless(rule, config.sampling)
    some, of_tasks = spread(setup.prompts, config.lossless_prompts), config.of_tasks
    chosen = [(prompt.id, first_turn(prompt, exact, setup.template)) for prompt in some]
    own = {prompt.id: of_tasks[prompt.task] for prompt in some if prompt.task in of_tasks}
    if not chosen:
        return LosslessCheck(name, lossless, "not checked", 0, 0, [], ""), None
    dtype, total, section = dtype_name(exact.dtype), len(chosen), None
    if config.certify or config.lossy:
        narrow = None if exact is parts.target else (parts.target, parts.timed_drafter)
        checks = certify(
            exact, parts.drafter, chosen, config, timed=narrow, seed=setup.seed, policies=own
        )
        greedy = checks[0]
        section = certified(checks, rule=name, lossless=lossless, dtype=dtype, num_prompts=total)
    else:
        with progress("losslessness", 2 * total) as tick:
            greedy = greedy_check(exact, parts.drafter, chosen, config, own, tick)
    same, differing = total - len(greedy.divergences), greedy.divergences
    return LosslessCheck(name, lossless, dtype, same, total, differing, ""), section


@torch.inference_mode()
def extra_memory(target: Target, drafter: Drafter) -> ExtraMemory:
    """Return the bytes of the drafter's weights, and of its cache per position of one row.

    Weights that it shares with the target are not counted, nor is memory that it needs only while
    drafting. The cache is measured after reading a few tokens.
    """
    # All different, so that members of an ensemble read them: nothing can be copied.
    tokens = torch.arange(PROBE_TOKENS + 1, device=target.device)[None] % target.spec.vocab_size
    cache = target.begin()
    _, features = target.step(cache, tokens[:, :PROBE_TOKENS], drafter.captures)
    state = drafter.begin(target.readout, tokens[:, 0], PROBE_TOKENS + 1)
    drafter.observe(state, tokens[:, 1:], [PROBE_TOKENS], features)
    if drafter.propose(state, 1) is None:
        drafter.expand(state, None)  # some drafters read observed tokens only here
    shared = {tensor.data_ptr() for tensor in target.model.parameters()}
    tensors = {tensor.data_ptr(): tensor for tensor in (*drafter.parameters(), *drafter.buffers())}
    own = sum(tensor.nbytes for place, tensor in tensors.items() if place not in shared)
    return ExtraMemory(own, sum(bytes_per_position(cache) for cache in caches_of(state)))


def caches_of(state: Any) -> Iterator[DynamicCache]:
    """Yield the caches that a drafter's state holds."""
    if isinstance(state, DynamicCache):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from caches_of(part)
    elif is_dataclass(state):
        for field in fields(state):
            yield from caches_of(getattr(state, field.name))


def bytes_per_position(cache: DynamicCache) -> int:
    """Return the bytes of one position of one row, keys and values of all layers."""
    layers: list[Any] = cache.layers
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return sum(each.shape[1] * each.shape[3] * each.element_size() for each in tensors)
