"""Load a drafter that others trained so that it drafts as in training, or list why it cannot."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from drafttrain.core.types import TargetSpec
from drafttrain.drafters.base import Drafter, DrafterConfig
from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.drafters.serving.layout import (
    Layout,
    Reading,
    ServedLayout,
    Unfit,
    UnknownKind,
    architectures_of,
)
from drafttrain.drafters.serving.speculators_layout import refuse_other_types
from drafttrain.drafters.shared.model_source import in_drafters_words
from drafttrain.drafters.shared.vocabularies import tokens_by_id
from drafttrain.formats.eight_bits import KEY, PlainView
from drafttrain.formats.read.folder import Folder, open_folder
from drafttrain.runtime.run_folder import is_repo
from drafttrain.runtime.settings import require
from drafttrain.runtime.untrusted_input import shown
from drafttrain.target.pretrained import files, hub

SHOWN_TOKENS = 3  # that differ between two tokenizers
SHOWN = 5  # tensors named per kind of complaint


@dataclass(frozen=True, kw_only=True)
class AdmittedConfig(DrafterConfig):
    """Where the directory of a drafter that others trained is."""

    path: str
    revision: str | None
    layers: list[int] | None
    allow_pickle: bool

    trainable: ClassVar[bool] = False

    @property
    def served_from(self) -> Path:
        """The directory itself, or the local copy of a repository of the Hub, downloaded if needed.

        ValueError for a repository that cannot be read.
        """
        repo, version = self.path, self.revision
        if not is_repo(repo):
            require(version is None, "drafter.revision", f"be null for the folder {repo}", version)
            return Path(repo).expanduser()
        try:
            return hub.download(self.name, repo, version, True, False, self.allow_pickle)
        except ValueError as error:
            raise ValueError(in_drafters_words(str(error), self.name)) from error

    def build(self, spec: TargetSpec) -> Drafter:
        """Raise ValueError: the files determine the drafter; see `admit`."""
        raise ValueError(
            f"drafter={self.name} was trained elsewhere: measure it, python -m drafttrain evaluate "
            f"drafter.path={self.path}, or train it further, run.init_from={self.path}"
        )


@dataclass(frozen=True)
class Recognised:
    """The layout of a drafter's directory, and the sign by which it was recognised."""

    layout: Layout
    because: str

    def __str__(self) -> str:
        return f"{self.layout.title}, by {self.because}"


def recognise(folder: Folder, own: Sequence[ServedLayout] = ()) -> Recognised:
    """Return the layout of a directory, by the strongest sign that any layout finds in it.

    own: of a user's drafters. One whose architecture config.json names comes before the package's,
    which may find signs of their own in it.
    Raises ValueError, naming its content, if this package cannot draft with it.
    """
    named = architectures_of(folder.config)
    layouts = [*(layout for layout in own if layout.architectures[0] in named), *LAYOUTS]
    try:
        refuse_other_types(folder, layouts)
        signs = [(layout.recognises(folder), layout) for layout in layouts]
    except UnknownKind as error:
        raise _unknown(folder, str(error), own) from None
    found = [(sign, layout) for sign, layout in signs if sign is not None]
    if found:
        sign, layout = max(found, key=lambda pair: pair[0].strength)
        return Recognised(layout, sign.because)
    what = f"model_type={shown(folder.config.get('model_type'))}"
    if named:
        what = f"architectures={named}"
    names = shown(", ".join(sorted(folder.names)[:3]))
    raise _unknown(folder, f"{what} and tensors such as {names}", own)


def _unknown(folder: Folder, what: str, own: Sequence[ServedLayout]) -> ValueError:
    known = "; ".join(layout.title for layout in (*own, *LAYOUTS))
    return ValueError(
        f"drafter.path={folder.path} has {what}: not a known drafter; it must be one of: {known}"
    )


@dataclass(frozen=True)
class Admitted:
    """A drafter that others trained, in float32 on the CPU, with what is known about it."""

    drafter: Drafter
    recognised: Recognised
    notes: tuple[str, ...]
    origin: str  # where it is, and the fingerprint of its files
    target_fingerprint: str | None = None  # of the target it was trained on, if it is recorded

    @property
    def family(self) -> str:
        """The entry of conf/drafter that it belongs to."""
        return self.recognised.layout.family

    def require_whole(self, key: str) -> None:
        """Raise ValueError if its layers see less of a text than those that we train and write.

        key: the setting that names the directory.
        """
        if self.drafter.longest is not None:
            raise ValueError(
                f"{key} must hold layers that see all of a text, got {self.recognised} with "
                "sliding windows: engines serve the directory as it is, and evaluate measures it, "
                "drafter.path=DIR"
            )

    def rebuilt(self, spec: TargetSpec) -> Drafter:
        """Return it built for this target; `drafter` has sizes that its directory declares."""
        drafter = replace(self.drafter.config, name=self.family).build(spec)
        drafter.load_weights(self.drafter.state_dict())
        return drafter

    def lines(self) -> list[str]:
        """Return lines for the user."""
        return [f"drafter: {self.recognised}", *(f"  {note}" for note in self.notes)]


def admit(
    config: AdmittedConfig,
    spec: TargetSpec,
    tokenizer: Any,
    choice: Callable[[str], DrafterConfig],
    own: Sequence[ServedLayout] = (),
) -> Admitted:
    """Load the drafter that `config` names, for a target described by `spec` and `tokenizer`.

    choice: returns the entry of conf/drafter of a family, for values that the directory lacks.
    own: layouts of a user's drafters.
    Raises one ValueError that names everything that does not fit: unknown, missing and misshapen
    tensors, vocabulary, tokenizer, hidden size, captured layers, unsupported settings.
    """
    folder = open_folder(config.served_from, config.allow_pickle)
    recognised = recognise(folder, own)
    origin = f"{config.path} (fingerprint {files.fingerprint(folder.path, folder.files)})"
    layout = recognised.layout
    base = replace(choice(layout.family), name=config.name)
    if layout.whole_model:
        # The drafter itself compares or intersects its tokenizer with the target's.
        changes: dict[str, Any] = {"path": str(folder.path)}
        return Admitted(replace(base, **changes).build(spec), recognised, (), origin)
    complaints, notes = compare_tokenizers(folder.path, tokenizer)
    if config.layers is not None and not layout.names_layers:
        complaints.append(f"drafter.layers must be null, got {config.layers}: it captures none")
    # First by the headers, so that nothing is loaded that does not fit, then with the weights.
    for held in (folder.outline(), folder):
        try:
            reading = layout.read(PlainView(held), base, spec, config.layers)
            drafter, wrong = _describe(reading)
            complaints += reading.complaints + wrong
        except Unfit as unfit:
            complaints += unfit.complaints
        except ValueError as error:  # settings that exclude each other
            complaints.append(str(error))
        if complaints:
            raise ValueError(
                f"drafter.path={config.path} ({recognised}) does not fit {spec.name}: "
                f"{'; '.join(complaints)}"
            )
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in reading.tensors.items()
    }
    drafter.to_empty(device="cpu")
    drafter.load_weights(tensors)
    notes = [*reading.notes, *notes, *_origin(folder.config)]
    if folder.config.get(KEY):
        notes.append(
            "its weights of 8 bits are computed with as numbers, and activations are not rounded; "
            "engines round both"
        )
    if reading.longest is not None and reading.longest < spec.max_positions:
        drafter.longest = reading.longest
        notes.append(
            "its layers have sliding windows, which ours have not: prompt and output can have "
            f"{reading.longest:,} tokens together, of which each sees all before it either way"
        )
    target = folder.config.get("target_fingerprint")
    known = target if isinstance(target, str) else None
    return Admitted(drafter.eval(), recognised, tuple(notes), origin, known)


def _describe(reading: Reading) -> tuple[Drafter, list[str]]:
    """Return the drafter on the meta device, and which tensors would not fit it."""
    try:
        with torch.device("meta"):
            drafter = reading.config.build(reading.declared)
    except ValueError as error:
        raise Unfit([*reading.complaints, str(error)]) from error
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    ids = reading.tensors.get("target_ids")
    if ids is not None:  # the heads shrink when they are loaded
        for name, shape in expected.items():
            if name.startswith("lm_head"):
                expected[name] = (len(ids), *shape[1:])
        expected["target_ids"] = (len(ids),)
    return drafter, _check_tensors(reading, expected)


def _check_tensors(reading: Reading, expected: dict[str, tuple[int, ...]]) -> list[str]:
    found, name_of = reading.tensors, reading.name_in_file
    both = {name: found[name] for name in expected if name in found}
    wrong = {
        "missing": [name_of(name) for name in expected if name not in found],
        "unknown": [name_of(name) for name in found if name not in expected],
        "misshapen": [
            f"{name_of(name)} {list(tensor.shape)} instead of {list(expected[name])}"
            for name, tensor in both.items()
            if tuple(tensor.shape) != expected[name]
        ],
        "not finite": [
            n for n, t in both.items() if not t.is_meta and not bool(t.isfinite().all())
        ],
        "not of real numbers": [
            name_of(n) for n, t in both.items() if n != "target_ids" and not t.is_floating_point()
        ],
    }
    return [_listed(what, names) for what, names in wrong.items() if names]


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what}: {', '.join(shown(name) for name in names[:SHOWN])}{more}"


def _origin(config: dict[str, Any]) -> list[str]:
    """Return a note on the target that the directory names, which cannot be verified here."""
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    named = named or config.get("base_model_name_or_path")
    return [f"its config.json says that it was trained for {shown(named)}"] if named else []


def compare_tokenizers(folder: Path, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Return (complaints, notes): where the tokenizer that a directory ships differs.

    Ids that only one of them has do not count: a fine-tune adds tokens at free ids.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        if any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
            return [], ["its tokenizer was not compared: it comes without tokenizer.json"]
        return [], []
    from tokenizers import Tokenizer

    try:
        theirs = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        return [f"tokenizer.json cannot be read ({shown(error)})"], []
    mine = tokens_by_id(tokenizer)
    differing = sorted(
        (index, token) for token, index in theirs.items() if mine.get(index, token) != token
    )
    if not differing:
        return [], []
    first = ", ".join(
        f"id {index} is {json.dumps(token)} to the drafter and {json.dumps(mine[index])} to the "
        "target"
        for index, token in differing[:SHOWN_TOKENS]
    )
    return [f"its tokenizer differs in {len(differing):,} tokens: {first}"], []
