"""The directory of an export: written whole or not at all, weights in one file or in shards."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.types import changed_part
from drafttrain.drafters.serving.engines import GGUF, TOKEN_MAP
from drafttrain.drafters.serving.layout import Config, ServedLayout, Unfit
from drafttrain.report.card import MADE_BY
from drafttrain.runtime.disk import put_folder, remove
from drafttrain.runtime.untrusted_input import read_object
from drafttrain.target.pretrained import files
from drafttrain.target.pretrained.models import fingerprint_of

CONFIG, WEIGHTS, CARD = FILES = ("config.json", "model.safetensors", "README.md")
INDEX = f"{WEIGHTS}.index.json"
ADDED = "drafter.safetensors"  # a drafter's tensors beside those of its target
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
CODE = ".py"  # of a model that brings its own
# The other files of a draft model: a tokenizer, as Transformers writes it.
MODEL_FILES = frozenset(
    {"generation_config.json", "chat_template.jinja", "added_tokens.json", "merges.txt"}
    | {"special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
    | {"vocab.json", "vocab.txt"}
)


def write_weights(folder: Path, tensors: dict[str, Tensor], max_shard_size: str) -> None:
    """Write model.safetensors, or shards of at most that size and an index, as Transformers does.

    A tensor that is larger than a shard has one of its own.
    """
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the bytes of each file: configuration, weights, card, and the rest by name."""

    def place(file: Path) -> tuple[int, str]:
        if file.name == INDEX or SHARD.fullmatch(file.name):
            return 1, file.name
        return (FILES.index(file.name) if file.name in FILES else len(FILES)), file.name

    return {file.name: file.stat().st_size for file in sorted(folder.iterdir(), key=place)}


@contextmanager
def all_or_nothing(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` if the block succeeds.

    ValueError if `folder` holds anything but an earlier export, or that and not `overwrite`.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"export.dir must be a folder, got the file {folder}")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    card = folder / CARD
    # A model in this folder may be replaced if its card says it is an export; others never are.
    own = card.is_file() and not card.is_symlink()
    export = own and MADE_BY in card.read_text(encoding="utf-8", errors="replace")
    ours = {*FILES, *MODEL_FILES, INDEX, ADDED, GGUF, TOKEN_MAP, *filter(SHARD.fullmatch, found)}
    ours |= {name for name in found if name.endswith(CODE)}
    foreign = [name for name in found if not export or name not in ours]
    if foreign:
        why = "" if export else f", and no {CARD} that says it is drafttrain's export"
        raise ValueError(
            f"export.dir must be empty or hold only an earlier export, but {folder} holds "
            f"{', '.join(foreign[:5])}{why}; choose another folder"
        )
    if found and not overwrite:
        raise ValueError(
            f"export.dir must be empty, but {folder} holds {', '.join(found)}; "
            "set export.overwrite=true to replace that export, or choose another folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield draft
        # mkdtemp's 0700 and safetensors' 0600 would lock out a server run by another user.
        draft.chmod(0o755)
        for file in draft.iterdir():
            if file.stat().st_nlink == 1:  # else it is the target's own too
                file.chmod(0o644)
        put_folder(draft, folder)
    finally:
        with suppress(OSError):  # it has its name by now, or the disk fails
            remove(draft, folder.parent)


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
            try:
                os.link(file.resolve(), draft / file.name)  # the Hub's cache holds links
            except OSError:
                shutil.copyfile(file, draft / file.name)
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
