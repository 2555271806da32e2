"""A drafter's tensors in a copy of its target's checkpoint, for engines that read both from one."""

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.types import changed_part
from drafttrain.drafters.serving.layout import Config, ServedLayout, Unfit
from drafttrain.formats.write.directory import ADDED, CODE, CONFIG, INDEX, MODEL_FILES
from drafttrain.runtime.untrusted_input import read_object
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.models import fingerprint_of


def config_within(layout: ServedLayout, native: Config, target: Path, fingerprint: str) -> Config:
    """Return config.json of a target with the drafter in it.

    fingerprint: of the target that the drafter was trained on; "" if it is not known. ValueError
    where the directory holds another, or cannot hold the drafter.
    """
    now = fingerprint_of(target)
    if fingerprint not in ("", now):
        raise ValueError(
            f"model must be the target that the drafter was trained on, got {target}: "
            f"{changed_part(fingerprint, now)}"
        )
    if any(file.suffix != ".safetensors" for file in files.weight_files(target)):
        raise ValueError(
            f"model must hold its weights as safetensors for a {layout.family} drafter to be added "
            f"to them, got pickled ones in {target}; convert them"
        )
    try:
        return layout.within(native, read_object(target / CONFIG))
    except Unfit as unfit:
        raise ValueError(f"{target} cannot hold this {layout.family} drafter: {unfit}") from unfit


def add_to_target(
    draft: Path, target: Path, tensors: dict[str, Tensor], held: tuple[str, ...]
) -> None:
    """Write the target's weights, tokenizer and code, and the tensors in a file of their own.

    The target's files are linked, or copied to another file system. One that holds tensors whose
    names begin as in `held`, of an earlier drafter, is rewritten without them.
    """
    places: dict[str, str] = {}
    for file in files.weight_files(target):
        names = files.tensors_in(file, str(target))
        kept = [name for name in names if not name.startswith(held)]
        if len(kept) == len(names):
            _link(file, draft / file.name)
        elif kept:
            own = load_file(file)
            save_file({n: own[n] for n in kept}, draft / file.name, metadata={"format": "pt"})
        places |= dict.fromkeys(kept, file.name)
    save_file(tensors, draft / ADDED, metadata={"format": "pt"})
    places |= dict.fromkeys(tensors, ADDED)
    size = sum((draft / name).stat().st_size for name in {*places.values()})
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (draft / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for file in target.iterdir():
        if (file.name in MODEL_FILES or file.suffix == CODE) and file.is_file():
            shutil.copyfile(file, draft / file.name)


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file.resolve(), place)  # the Hub's cache holds links to its files
    except OSError:
        shutil.copyfile(file, place)
