"""The whole evaluation: certificate, measurements at every point of the sweep, the report."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import PromptResult
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.template import Template
from drafttrain.decode.loop import is_lossless, rule_of
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.certify import certify, greedy_check
from drafttrain.evaluation.config import EvalConfig
from drafttrain.evaluation.footprint import extra_memory
from drafttrain.evaluation.measure import (
    at_depth,
    first_turn,
    measure,
    methods_of,
    spread,
)
from drafttrain.evaluation.measurements import Measurements
from drafttrain.report.build import build_report, certified, sweep_point
from drafttrain.report.results import (
    Certificate,
    Check,
    LosslessCheck,
    Point,
    Report,
    TimingInfo,
)
from drafttrain.report.tables import certificate_table, sweep_table
from drafttrain.runtime.terminal import console
from drafttrain.target.model import Target


@dataclass(frozen=True)
class Parts:
    """What an evaluation is made of: the timed target, the exact one, and who drafts for them."""

    target: Target
    exact: Target  # the same weights in float32; the timed one itself where that is float32
    drafter: Drafter  # float32
    drafter_name: str
    draft_dtype: torch.dtype
    references: Mapping[str, Drafter]  # drafters that stand beside it, such as prompt lookup

    @cached_property
    def timed_drafter(self) -> Drafter:
        """The drafter in the dtype that it is timed in."""
        return copy.deepcopy(self.drafter).to(self.draft_dtype)


def evaluate_drafter(
    parts: Parts,
    prompts: Sequence[Prompt],
    template: Template,
    config: EvalConfig,
    *,
    folder: Path,
    conditions: Mapping[str, Any],
    timing: TimingInfo,
    report_settings: Mapping[str, Any],
    seed: int,
) -> tuple[Report, list[PromptResult], list[Measurements]]:
    """Certify and measure what `check_settings` let pass; return report, results and journals.

    The results are those behind the headline; the journals are to be finished when the report is on
    the disk.

    conditions: what a measurement depends on besides `config`; measurements that were made under
    others are not taken up again after a stop. report_settings: what goes to `build_report` as it
    is.
    """
    rule = config.acceptance_rule
    lossless, section = losslessness(parts, prompts, template, config, seed)
    timed = parts.timed_drafter
    drafters = {**parts.references, parts.drafter_name: timed}
    methods = methods_of(drafters, config.every_depth, config.depth)
    points: list[Point] = []
    base: list[PromptResult] = []
    journals = []
    for temperature, batch_size in config.points:
        sampling = Sampling(temperature, config.top_k, config.top_p)
        journal = Measurements(
            folder,
            f"temperature{temperature:g}-batch{batch_size}",
            {
                **conditions,
                **config.conditions,
                "references": list(parts.references),
                "point": [temperature, batch_size],
            },
        )
        if journal.num_known:
            console.print(f"going on: {journal.num_known} batches of prompts were measured before")
        elif journal.others:
            console.print(
                f"not taken up, measured under other conditions: {journal.others[0]}; to go on "
                "there, set hardware.dtype, hardware.threads and the rest as its first line says"
            )
        journals.append(journal)
        results = measure(
            parts.target,
            methods,
            prompts,
            template,
            config,
            sampling=sampling,
            batch_size=batch_size,
            seed=seed,
            journal=journal,
        )
        for depth in config.every_depth:
            here = at_depth(results, methods, parts.drafter_name, depth)
            if not base and depth == config.depth:
                base = here
            if config.sweeps:
                points.append(
                    sweep_point(
                        here,
                        drafter=parts.drafter_name,
                        depth=depth,
                        temperature=temperature,
                        batch_size=batch_size,
                        resamples=config.resamples,
                        seed=seed,
                    )
                )
    timing = replace(timing, blocks=len({result.block for result in base}))
    tables = []
    if section is not None:
        tables.append(certificate_table(section))
    if points:
        rules = {
            temperature: rule_of(Sampling(temperature, config.top_k, config.top_p), rule)
            for temperature, _ in config.points
        }
        tables.append(sweep_table(points, rules))
    report = build_report(
        base,
        drafter=parts.drafter_name,
        depth=config.depth,
        sampling=config.sampling,
        draft_sampling=config.draft_sampling,
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        lossless=lossless,
        certificate=section,
        sweep=points,
        tables=tables,
        timing=timing,
        resamples=config.resamples,
        seed=seed,
        verdict=config.verdict,
        memory=extra_memory(parts.target, timed),
        **report_settings,
    )
    return report, base, journals


def losslessness(
    parts: Parts, prompts: Sequence[Prompt], template: Template, config: EvalConfig, seed: int
) -> tuple[LosslessCheck, Certificate | None]:
    """Return the greedy check of every report, and the certificate where it is wanted.

    A rule that is not lossless at every temperature measured is always certified: its distance from
    the target's law belongs beside its numbers.
    """
    rule, sampling = config.acceptance_rule, config.sampling
    name, lossless = rule_of(sampling, rule), is_lossless(rule, sampling)
    chosen = [
        (prompt.id, first_turn(prompt, parts.exact, template))
        for prompt in spread(prompts, config.lossless_prompts)
    ]
    if not chosen:
        return LosslessCheck(name, lossless, "not checked", 0, 0, []), None
    if config.certify or config.lossy:
        narrow = None if parts.exact is parts.target else (parts.target, parts.timed_drafter)
        checks = certify(parts.exact, parts.drafter, chosen, config, timed=narrow, seed=seed)
        dtype = str(parts.exact.dtype).removeprefix("torch.")
        section = certified(
            checks, rule=name, lossless=lossless, dtype=dtype, num_prompts=len(chosen)
        )
    else:
        checks = [greedy_check(parts.exact, parts.drafter, chosen, config)]
        section = None
    return _greedy_summary(checks[0], name, lossless, len(chosen), parts.exact.dtype), section


def _greedy_summary(
    check: Check, rule: str, lossless: bool, total: int, dtype: torch.dtype
) -> LosslessCheck:
    return LosslessCheck(
        rule=rule,
        lossless=lossless,
        dtype=str(dtype).removeprefix("torch."),
        greedy_identical=total - len(check.divergences),
        greedy_total=total,
        divergences=check.divergences,
    )
