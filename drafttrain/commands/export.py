"""A drafter in the layouts that serving engines load, and its push to the Hub."""

from dataclasses import asdict, replace
from pathlib import Path

from drafttrain.commands.setup.evaluation import chosen_by_tune
from drafttrain.commands.setup.target_and_drafter import load_drafter, recorded_spec
from drafttrain.config.sections import ExportConfig
from drafttrain.formats.write.hub import check_push, plan_push, push
from drafttrain.formats.write.vllm import export_vllm
from drafttrain.report.card import CardData, read_run, served_as
from drafttrain.runtime.disk import require_writable, written
from drafttrain.runtime.lock import beside, hold
from drafttrain.runtime.settings import AUTO
from drafttrain.runtime.terminal import console, working
from drafttrain.target.pretrained.models import load_tokenizer


def export(config: ExportConfig) -> None:
    """Write a run's drafter as serving engines load it, check it, and push it if asked."""
    run = Path(config.run.dir)
    settings, wanted = config.export, f"export.num_speculative_tokens={AUTO}"
    if settings.num_speculative_tokens == AUTO:
        depth = chosen_by_tune(run, wanted).depth
        settings = replace(settings, num_speculative_tokens=depth)
    place = Path(settings.dir or run / "export")
    require_writable(place.parent, "export.dir")
    if settings.push is not None and not settings.dry_run:
        check_push(settings.push, settings.private)
    drafter, checkpoint = load_drafter(run, config.drafter, recorded_spec(run))
    if config.export.num_speculative_tokens == AUTO:  # for these very weights?
        chosen_by_tune(run, wanted, weights=checkpoint.name if checkpoint else None)
    record, reports = read_run(run)
    name = served_as(config.model)
    card = CardData(
        title=f"{config.drafter.name} for {config.model.name}",
        family=config.drafter.name,
        about=drafter.about,
        target=config.model.name,
        base_model=None if config.model.path else config.model.repo,
        license=settings.license,
        training={"data": asdict(config.data), "drafter": asdict(config.drafter)},
        provenance=record,
        reports=reports,
    )
    # The folder is replaced as a whole, and a lock inside it would be replaced too.
    with hold(place, "export.dir", "export", console.print, file=beside(place)):
        with written(place, "export.dir"), working("exporting"):
            done = export_vllm(
                drafter.eval(), name, place, settings, card, lambda: load_tokenizer(config.model)
            )
        for line in done.lines():
            console.print(line)
        if settings.push is None:
            return
        files = tuple(done.sizes)
        if settings.dry_run:
            for line in plan_push(place, files, settings.push, settings.private):
                console.print(line)
            return
        console.print(f"pushed to {push(place, files, settings.push, settings.private)}")
