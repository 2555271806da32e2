"""A drafter in the layouts that serving engines load, and its push to the Hub."""

import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from drafttrain.commands.setup.evaluation import NO_DEPTH_PAYS, chosen_by_tune
from drafttrain.commands.setup.plan import spread_to_serve
from drafttrain.commands.setup.target_and_drafter import (
    expected_spec,
    load_drafter,
    load_target_to_decode,
    own_layouts,
    recorded_spec,
    scaling_lines,
)
from drafttrain.config.compose import load_choice
from drafttrain.config.sections import ExportConfig
from drafttrain.core.types import changed_part
from drafttrain.data.evaluation_prompts import load_prompts
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.serving.engines import CONVERTER
from drafttrain.evaluation.last_validation import validated
from drafttrain.evaluation.measure import (
    acceptance_change,
    change_statement,
    check_depths,
    fitting,
    spread,
)
from drafttrain.evaluation.tune_choice import TUNED, read_tuned
from drafttrain.formats.read.admit import AdmittedConfig, admit
from drafttrain.formats.write.config import ExportSettings
from drafttrain.formats.write.export import export_drafter
from drafttrain.formats.write.hub import check_push, plan_push, push
from drafttrain.report.card import TARGET, CardData, read_run, served_as
from drafttrain.runtime.disk import require_writable, written
from drafttrain.runtime.hardware import choose_device
from drafttrain.runtime.lock import beside, hold
from drafttrain.runtime.settings import AUTO, require
from drafttrain.runtime.terminal import console, working
from drafttrain.target.pretrained.models import find, load_tokenizer


@dataclass(frozen=True)
class _ToExport:
    drafter: Drafter
    place: Path
    settings: ExportSettings  # with the depth that `tune` chose, if it is asked for
    card: CardData


def export(config: ExportConfig) -> None:
    """Write a run's drafter, or one by drafter.path, as engines load it; push it if asked."""
    settings = config.export
    if isinstance(config.drafter, AdmittedConfig):
        wanted = _of_others(config, config.drafter)
    else:
        wanted = _of_run(config)
    place = wanted.place
    spread = spread_to_serve(config.model, config.hardware, settings.tensor_parallel)
    settings = replace(wanted.settings, tensor_parallel=spread)
    name = served_as(config.model)

    def target_folder() -> Path | None:
        config.model.require_null("a drafter that is written with its target", "adapter")
        return find(config.model, weights=True)

    # The folder is replaced as a whole, and a lock inside it would be replaced too.
    with hold(place, "export.dir", "export", console.print, file=beside(place)):
        with written(place, "export.dir"), working("exporting"):
            done = export_drafter(
                wanted.drafter.eval(),
                name,
                place,
                settings,
                wanted.card,
                lambda: load_tokenizer(config.model),
                measure=partial(_measured, config, wanted) if settings.measured_prompts else None,
                target_folder=target_folder,
            )
        for line in [*done.lines(), *scaling_lines(wanted.drafter)]:
            console.print(line)
        if name == TARGET:
            console.print(f"{TARGET}: where you save {config.model.label}, merged by PEFT")
        if settings.push is None:
            return
        files = tuple(done.sizes)
        if settings.dry_run:
            for line in plan_push(place, files, settings.push, settings.private):
                console.print(line)
            return
        console.print(f"pushed to {push(place, files, settings.push, settings.private)}")


def _of_run(config: ExportConfig) -> _ToExport:
    """Return a run's drafter with the weights of its best checkpoint."""
    run, settings = Path(config.run.dir), config.export
    wanted = f"export.num_speculative_tokens={AUTO}"
    no_depth = NO_DEPTH_PAYS.format(file=run / TUNED)
    if settings.num_speculative_tokens == AUTO:
        chosen = chosen_by_tune(run, wanted)
        pays = "be a number for this run"
        require(chosen.speculate, "export.num_speculative_tokens", pays, AUTO, f": {no_depth}")
        settings = replace(settings, num_speculative_tokens=chosen.depth)
    place = _place(settings.dir or str(run / "export"))
    _check_places(config, place)
    drafter, checkpoint = load_drafter(run, config.drafter, recorded_spec(run))
    weights = checkpoint.name if checkpoint else None
    if config.export.num_speculative_tokens == AUTO:  # for these very weights?
        chosen_by_tune(run, wanted, weights=weights)
    elif not _pays(run, weights):
        console.print(f"warning: {no_depth}; on that machine the target is faster alone")
    elif checkpoint and (known := validated(run, checkpoint)) and not known.pays:
        console.print(f"warning: where it was trained, {known.statement}")
    record, reports = read_run(run)
    card = replace(
        _card(config, drafter),
        training={"data": asdict(config.data), "drafter": asdict(config.drafter)},
        provenance=record,
        reports=reports,
    )
    return _ToExport(drafter, place, settings, card)


def _pays(run: Path, weights: str | None) -> bool:
    """Return whether `tune` found that drafts pay at batch 1, or nothing for these weights."""
    try:
        chosen = read_tuned(run, 1, weights=weights)
    except ValueError:  # of other weights or another policy, or not readable
        return True
    return chosen is None or chosen.speculate


def _of_others(config: ExportConfig, source: AdmittedConfig) -> _ToExport:
    """Return the drafter of a directory, to be written in another layout of its family."""
    settings = config.export
    if settings.dir is None:
        raise ValueError("export.dir must be given with drafter.path, which names no run; got null")
    why = ", which takes what `tune` chose for a run"
    known = settings.num_speculative_tokens != AUTO
    settings.require("num_speculative_tokens", known, "be a number with drafter.path", why)
    place = _place(settings.dir)
    _check_places(config, place)
    own = partial(load_choice, "drafter")
    spec = expected_spec(config.model)
    found = admit(source, spec, load_tokenizer(config.model), own, own_layouts())
    if found.recognised.layout.whole_model:
        raise ValueError(
            f"drafter.path={source.path} is {found.recognised}: engines serve it as it is, it has "
            f"no other layout, and llama.cpp's {CONVERTER} makes its GGUF of the directory itself"
        )
    found.require_whole(f"drafter.path={source.path}")
    for line in found.lines():
        console.print(line)
    drafter = found.rebuilt(replace(spec, fingerprint=found.target_fingerprint or ""))
    return _ToExport(drafter, place, settings, _card(config, drafter))


def _measured(config: ExportConfig, wanted: _ToExport, written_drafter: Drafter, depth: int) -> str:
    """Return what the weights as written cost in acceptance, on held-out prompts.

    Both drafters compute in float32, whatever the target does. ValueError for prompts that do not
    fit, and for another target than the drafter was trained on.
    """
    settings = replace(config.eval, depth=depth)
    device, template = torch.device(choose_device(config.hardware)), config.data.text_format
    prompts, skipped = load_prompts(settings.source, config.data.known_roles)
    target, _ = load_target_to_decode(config.model, config.hardware, device)
    trained_on, given = wanted.drafter.spec.fingerprint, target.spec.fingerprint
    same = "be the target that the drafter was trained on"
    require(trained_on in ("", given), "model", same, changed_part(trained_on, given))
    trained = copy.deepcopy(wanted.drafter)
    for drafter in (trained, written_drafter):
        drafter.attach(target.tokenizer)
        drafter.to(device, torch.float32).eval()
    check_depths(trained, settings)
    prompts = fitting(prompts, skipped, target, template, settings, [trained])
    prompts = spread(prompts, wanted.settings.measured_prompts)
    seed = config.run.seed
    found = acceptance_change(target, trained, written_drafter, prompts, template, settings, seed)
    return change_statement(found, len(prompts), settings)


def _place(folder: str) -> Path:
    """Return where an export goes, which is renamed into place: a link to a folder is followed."""
    given = Path(folder)
    if given.is_symlink() or given.name in ("", ".."):
        given = given.resolve()
    if given.resolve() == Path.cwd():
        raise ValueError(
            "export.dir must be another folder than the one that the command runs in, which would "
            f"be replaced under it, got {folder}"
        )
    return given


def _check_places(config: ExportConfig, place: Path) -> None:
    require_writable(place.parent, "export.dir")
    if config.export.push is not None and not config.export.dry_run:
        check_push(config.export.push, config.export.private)


def _card(config: ExportConfig, drafter: Drafter) -> CardData:
    return CardData(
        title=f"{drafter.config.name} for {config.model.label}",
        family=drafter.config.name,
        about=drafter.about,
        target=config.model.label,
        base_model=None if config.model.path or config.model.adapter else config.model.repo,
        license=config.export.license,
    )
