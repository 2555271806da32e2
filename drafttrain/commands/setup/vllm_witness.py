"""A real vLLM next to our own loop: what it is given, and what the report shows of it."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from drafttrain.commands.setup.target_and_drafter import own_layouts
from drafttrain.config.compose import load_choice
from drafttrain.config.sections import EvaluateConfig
from drafttrain.core.types import PromptResult
from drafttrain.evaluation.evaluate import Setup
from drafttrain.evaluation.witness.engine import ServedDrafter
from drafttrain.evaluation.witness.section import asked_of, check_witness, witness_section
from drafttrain.formats.read.admit import AdmittedConfig, recognise
from drafttrain.formats.read.folder import open_folder
from drafttrain.formats.write.export import export_drafter
from drafttrain.report.card import CardData, served_as
from drafttrain.report.results import Report
from drafttrain.report.tables import with_witness
from drafttrain.target.placement import SERVING_SHARE, engine_gpus
from drafttrain.target.pretrained.models import find


def served_by_vllm(config: EvaluateConfig, setup: Setup) -> ServedDrafter:
    """Export the drafter for vLLM and return what it serves; ValueError where it cannot.

    Runs before decoding. A drafter that others trained is served from its own directory.
    """
    settings, parts, drafter = setup.settings, setup.parts, config.drafter
    place = setup.folder / "evaluations" / settings.name / "vllm" / "drafter"
    given, family = drafter.served_from, drafter.name
    if isinstance(drafter, AdmittedConfig):
        directory = open_folder(drafter.served_from, drafter.allow_pickle)
        family = recognise(directory, own_layouts()).layout.kind
    config.model.require_null("eval.engine=vllm", "inflate", "adapter")
    target_dir = find(config.model, weights=True)
    served = check_witness(parts.drafter, family, target_dir, given or place, settings)
    target, asked = parts.target, settings.vllm_tensor_parallel
    spread = engine_gpus(asked, config.model, target.dtype, target.device, SERVING_SHARE)
    served = replace(served, tensor_parallel=spread)
    why = ": counters are compared prompt by prompt; other sizes are swept by eval.batch_sizes"
    settings.require("batch_size", settings.batch_size == 1, "be 1 with eval.engine=vllm", why)
    if place in (served.serving_dir, served.target_dir):
        wanted = replace(
            load_choice("export", "vllm"),
            dtype="float32",
            overwrite=True,
            num_speculative_tokens=settings.depth,
        )
        card = CardData(
            title=f"{family} for {config.model.name}",
            family=family,
            about=parts.drafter.about,
            target=config.model.name,
            base_model=None,
            license="other",
            training={"drafter": asdict(drafter)},
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = parts.target.tokenizer
        export_drafter(
            *(parts.drafter, served_as(config.model), place, wanted, card),
            lambda: tokenizer,
            target_folder=lambda: target_dir,
        )
    return served


def witnessed(
    report: Report,
    results: Sequence[PromptResult],
    config: EvaluateConfig,
    setup: Setup,
    served: ServedDrafter,
    folder: Path,
) -> Report:
    """Return the report with what vLLM decoded, counted and took for the same prompts."""
    settings, parts = setup.settings, setup.parts
    ours = {
        point.batch_size: point.summary
        for point in report.sweep
        if (point.depth, point.temperature) == (settings.depth, settings.temperature)
    }
    section = witness_section(
        parts,
        served,
        asked_of(setup.prompts, results, parts.target, setup.template),
        results,
        settings,
        threads=setup.timing.threads,
        folder=folder,
        seed=config.run.seed,
        ours_by_batch=ours,
    )
    return with_witness(report, section)
