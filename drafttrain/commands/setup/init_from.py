"""Training that starts from an existing drafter, and the record of that drafter."""

import json
from dataclasses import fields, replace
from pathlib import Path

from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.commands.setup.target_and_drafter import (
    GivenDrafter,
    best_of,
    expected_spec,
    own_layouts,
    require_family,
    target_of,
)
from drafttrain.config.compose import load_choice
from drafttrain.config.groups import content_of
from drafttrain.config.overrides import ADMITTED, UsageError
from drafttrain.config.resume import check_resumed
from drafttrain.config.sections import TrainConfig
from drafttrain.config.values import build
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.base import Drafter, DrafterConfig, draft_vocab_size
from drafttrain.formats.read.admit import AdmittedConfig, admit
from drafttrain.runtime.disk import replacing, write_whole, writing
from drafttrain.runtime.run_folder import CONFIG, has_checkpoints
from drafttrain.runtime.untrusted_input import read_object
from drafttrain.target.pretrained.models import load_tokenizer

FOLDER = "initial"  # in the run folder: what training started from
WEIGHTS, RECORD = "drafter.safetensors", "record.json"


def starting_point(config: TrainConfig) -> GivenDrafter | None:
    """Return the drafter that run.init_from names, None where training starts anew.

    A run that is resumed has kept it. ValueError where it does not fit the target, whose weights
    are not read yet.
    """
    if config.run.init_from is None:
        return None
    folder, run = Path(config.run.init_from).expanduser(), Path(config.run.dir)
    spec = expected_spec(config.model)
    if config.run.resume and has_checkpoints(run) and (run / FOLDER / RECORD).is_file():
        check_resumed(config)  # before weights are loaded into another drafter
        drafter = drafter_before(run, config.drafter, spec)
        assert drafter is not None
        record = read_object(run / FOLDER / RECORD)
        origin, fingerprint = record["origin"], record["target_fingerprint"]
        lines = (f"start: {origin}, as kept in {run / FOLDER}",)
        return GivenDrafter(drafter.train(), None, origin, lines, fingerprint)
    if (folder / CONFIG).is_file():
        return _of_run(folder, config.drafter, spec)
    return _of_serving(folder, config, spec)


def _of_run(folder: Path, config: DrafterConfig, spec: TargetSpec) -> GivenDrafter:
    checkpoint, state, weights = best_of(folder, "run.init_from")
    require_family(folder, "run.init_from", config)
    drafter = config.build(spec)
    try:
        drafter.load_weights(weights)
    except ValueError as error:
        raise ValueError(
            f"run.init_from={folder} must fit drafter={config.name} and a target shaped as "
            f"{spec.name}: {error}"
        ) from error
    line = f"start: {checkpoint}, trained on {state.tokens:,} tokens"
    return GivenDrafter(
        drafter, checkpoint, str(checkpoint), (line,), state.fingerprint, target_of(folder)
    )


def _of_serving(folder: Path, config: TrainConfig, spec: TargetSpec) -> GivenDrafter:
    given, name = config.drafter, config.drafter.name

    def own(family: str) -> DrafterConfig:
        if isinstance(given, AdmittedConfig):
            return load_choice("drafter", family)
        if family != name and given.layout is not None and given.layout.within_target:
            raise ValueError(
                f"run.init_from={folder} must hold {given.layout.title}, and holds none; leave out "
                f"run.init_from to train a new {name} drafter"
            )
        if family != name:  # a family was named, with its training settings
            raise ValueError(
                f"run.init_from={folder} holds a drafter of the family {family}, got "
                f"drafter={name}; leave out drafter= or give drafter={family}"
            )
        return given

    named = {"name": name, "path": str(folder)}
    if isinstance(given, AdmittedConfig):
        source = replace(given, path=str(folder))
    else:
        source = build("drafter", content_of("drafter", ADMITTED) | named)
    try:
        found = admit(source, spec, load_tokenizer(config.model), own, own_layouts())
    except ValueError as error:  # the directory was given under this name
        raise ValueError(str(error).replace("drafter.path", "run.init_from")) from error
    if not found.drafter.config.trainable:
        raise UsageError(
            f"run.init_from={folder} is {found.recognised}, a whole model: train it further as "
            f"drafter={found.recognised.layout.trained_as} drafter.path={folder}"
        )
    found.require_whole(f"run.init_from={folder}")
    if not isinstance(given, AdmittedConfig):
        _require_given_shape(folder, given, found.drafter)
    lines = tuple(found.lines())
    return GivenDrafter(found.rebuilt(spec), None, found.origin, lines, found.target_fingerprint)


def _require_given_shape(folder: Path, given: DrafterConfig, drafter: Drafter) -> None:
    """Raise ValueError for a setting that was asked for, and that the files contradict."""
    usual = load_choice("drafter", given.name)
    for key in (field.name for field in fields(given)):
        asked, value = getattr(given, key), getattr(drafter.config, key)
        if asked == getattr(usual, key):
            continue
        if key == "draft_vocab_size":  # at most so many: fewer are kept where fewer occur
            value = draft_vocab_size(drafter)
            differs = asked is not None and asked < value
        elif key == "layers":  # captured in their order, however they were listed
            differs = sorted(asked or ()) != value
        else:
            differs = asked != value
        if differs:
            raise ValueError(
                f"drafter.{key} must be left out, or {value} as in run.init_from={folder}, got "
                f"{asked}; leave out run.init_from to train a drafter of another shape"
            )


def coverage(drafter: Drafter, token_counts: Int[Tensor, " vocab"]) -> str:
    """Return a note on the share of trained tokens in a reduced vocabulary, empty without one."""
    if drafter.vocab is None:
        return ""
    share = float(token_counts[drafter.vocab.target_ids.cpu()].sum() / token_counts.sum())
    return f" (its vocabulary stays, and holds {share:.1%} of the tokens to train on)"


def keep_start(run: Path, start: GivenDrafter | None) -> None:
    """Write the drafter that training starts from to the run folder, unless it has checkpoints.

    Call it before an engine has the drafter: engines may shard or round its weights.
    """
    if has_checkpoints(run):
        return
    folder = run / FOLDER
    (folder / RECORD).unlink(missing_ok=True)
    if start is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in start.drafter.state_dict().items()}
    with writing(folder / WEIGHTS), replacing(folder / WEIGHTS) as beside:
        save_file(tensors, beside)
    record = {"origin": start.origin, "target_fingerprint": start.fingerprint}
    write_whole(folder / RECORD, json.dumps(record, indent=1) + "\n")


def drafter_before(run: Path, config: DrafterConfig, spec: TargetSpec) -> Drafter | None:
    """Return the drafter that a run's training started from, None where it started anew."""
    folder = run / FOLDER
    if not (folder / RECORD).is_file():
        return None
    drafter = config.build(spec)
    drafter.load_weights(load_file(folder / WEIGHTS))
    return drafter.eval()
