"""The interface of a file layout: recognise it, read it, and state what engines assume."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from drafttrain.core.types import TargetSpec
from drafttrain.runtime.untrusted_input import shown

Config = dict[str, Any]  # the content of a config.json
Tensors = Mapping[str, Tensor]
V1, V2 = "V1", "V2"  # vLLM's model runners: V2 wherever Triton works and it knows the method
FLOATS = (torch.float32, torch.bfloat16)


@runtime_checkable
class Files(Protocol):
    """The files of a drafter's directory: config.json, and tensors by name.

    The tensors are on the CPU, or on the meta device.
    """

    @property
    def config(self) -> Config: ...

    @property
    def names(self) -> frozenset[str]: ...

    def tensors(self, prefix: str = "") -> dict[str, Tensor]: ...


class Sign(NamedTuple):
    """The evidence for a layout; the strongest sign decides, of equals the first layout's."""

    strength: int
    because: str


DECLARED = 3  # config.json states it
SPECIFIC = 2  # files of other families do not have it
GENERAL = 1  # files of several families have it


def tensor_sign(files: Files, *wanted: str) -> Sign | None:
    """Return the first wanted tensor that exists as a sign, None if there is none."""
    found = next((name for name in wanted if name in files.names), None)
    return None if found is None else Sign(SPECIFIC, f"the tensor {found}")


class UnknownKind(Exception):
    """Files that state a kind of drafter which this package cannot read."""


class Unfit(Exception):
    """Files that cannot be read as a drafter; holds every reason."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__("; ".join(complaints))
        self.complaints = complaints


@dataclass
class Reading:
    """Files in this package's terms. `declared` is the target that the files state."""

    config: Any  # of the family's drafter
    declared: TargetSpec
    tensors: dict[str, Tensor]  # by the drafter's own names
    spelled: dict[str, str]  # prefixes of own names -> those in the files
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    longest: int | None = None  # text that all its layers see whole; None: any

    def name_in_file(self, own: str) -> str:
        """Return the name of a tensor in the files."""
        for mine, theirs in self.spelled.items():
            if own.startswith(mine):
                return theirs + own.removeprefix(mine)
        return own


@dataclass(frozen=True)
class Expected:
    """One tensor of a layout: its shape, and whether it is a weight, an index or a mask."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS  # none: any
    required: bool = True


class Layout(ABC):
    """A file layout of a family's drafters, which can be read whoever wrote them."""

    kind: ClassVar[str]  # its own short name
    family: ClassVar[str]  # the entry of conf/drafter that its drafters become
    title: ClassVar[str]  # for messages
    method: ClassVar[str | None] = None  # vLLM's name for such a drafter; None: its files state it
    parallel: ClassVar[bool] = False  # whether vLLM must be told that one pass drafts all tokens
    weight_files: ClassVar[tuple[str, ...]] = ()  # besides model.safetensors, without suffix
    names_layers: ClassVar[bool] = False  # drafter.layers may correct which layers it captures
    whole_model: ClassVar[bool] = False  # a model with its tokenizer, loaded from drafter.path
    trained_as: ClassVar[str | None] = None  # the entry of conf/drafter that trains a whole model

    @abstractmethod
    def recognises(self, files: Files) -> Sign | None:
        """Return the sign that the files have this layout, None if they do not."""

    @abstractmethod
    def read(self, files: Files, base: Any, spec: TargetSpec, layers: list[int] | None) -> Reading:
        """Return the reading of the files; Unfit holds every reason why they cannot be read.

        base: the family's configuration, for values that the files lack. layers: the captured
        layers, in place of those that the files name.
        """


class DerivedLayout(Layout):
    """Another layout of a family, which exports write from the native one."""

    def refuses(self, native: Config, spec: TargetSpec) -> str:
        """Return why it cannot hold a drafter of this native config.json; "" if it can."""
        return ""

    @abstractmethod
    def write(
        self, native: Config, tensors: Tensors, spec: TargetSpec, target: str, depth: int
    ) -> tuple[Config, dict[str, Tensor]]:
        """Return config.json and tensors, from the native ones.

        target: its name in commands, a directory or a repository. depth: drafted tokens per step.
        """

    @abstractmethod
    def commands(
        self, target: str, model: str, depth: int, draft_sample_method: str | None
    ) -> dict[str, str]:
        """Return the command lines that serve it, by engine, as `engines.serve_commands` does.

        draft_sample_method: None where it is vLLM's own default.
        """

    def notes(self, target: str, refused: Mapping[str, str]) -> list[str]:
        """Return the notes of a card on these files; refused: why engines cannot serve any."""
        return []


class ServedLayout(Layout):
    """A layout that exports write, with its own table of what engines assume.

    The table is derived from config.json alone, independent of the drafter: engines load a file
    with a missing tensor, a dropped bias or a wrong layer id silently, and draft badly.
    """

    method: ClassVar[str]
    vllm_runners: ClassVar[tuple[str, ...]] = (V1, V2)  # those of vLLM that serve it
    samples_drafts: ClassVar[bool] = True  # vLLM can sample its drafts, as draft_sample_method asks
    sglang: ClassVar[str | None] = None  # SGLang's algorithm; None: it has none
    llama_cpp: ClassVar[str | None] = None  # llama.cpp's --spec-type; None: no GGUF of it
    architectures: ClassVar[tuple[str, ...]] = ()  # in config.json; the first is its own
    derived: ClassVar[Mapping[str, DerivedLayout]] = {}  # its other layouts, by export.format
    false_by_default: ClassVar[tuple[str, ...]] = ()  # keys that engines take for false if absent
    settings: ClassVar[Mapping[str, str]] = {}  # by keys of config.json, the drafter's own of them
    # The names of weights that vLLM computes with in 8 bits where config.json says so; None: none.
    eight_bits: ClassVar[re.Pattern[str] | None] = None
    within_target: ClassVar[bool] = False  # its tensors lie in the target's checkpoint
    held: ClassVar[tuple[str, ...]] = ()  # what their names begin with there

    @abstractmethod
    def expected_tensors(self, config: Config) -> dict[str, Expected]:
        """Return every tensor that a serving configuration implies."""

    def required_keys(self, config: Config, spec: TargetSpec) -> Config:
        """Return the config.json values that engines assume: others draft badly, or not at all."""
        return {}

    def misread(
        self, config: Config, tensors: Tensors, spec: TargetSpec, captures: tuple[int, ...]
    ) -> list[str]:
        """Return what else engines would misread in files that have every tensor and key.

        captures: the layers that the drafter was trained on.
        """
        return []

    def within(self, config: Config, target: Config) -> Config:
        """Return the config.json of a target that holds the drafter, from both; if `within_target`.

        Unfit where the target cannot hold it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define within(config, target)")

    def block(self, config: Config) -> int | None:
        """Return how many tokens engines must draft at once to draft as in training.

        None: any number, the first of which are the same.
        """
        return None

    def vllm_refuses(self, spec: TargetSpec) -> str:
        """Return why vLLM cannot serve it with a target that vLLM knows; "" if it can."""
        return ""

    def vllm_notes(self, config: Config) -> tuple[str, ...]:
        """Return what vLLM computes otherwise than was measured here."""
        return ()

    def sglang_refuses(self, config: Config, own_embedding: bool, spec: TargetSpec) -> str:
        """Return why SGLang cannot serve it with a target; "" if it can."""
        return ""

    def llama_cpp_refuses(self, config: Config, spec: TargetSpec) -> str:
        """Return why llama.cpp cannot draft with it, for a target that it knows; "" if it can."""
        return ""

    def notes(self, config: Config, spec: TargetSpec, served: bool) -> tuple[str, ...]:
        """Return the notes of a card on these files. served: whether any engine serves them."""
        return ()


def architectures_of(config: Config) -> list[str]:
    """Return the architectures that config.json names, safe to show."""
    listed = config.get("architectures")
    return [shown(name) for name in listed[:8]] if isinstance(listed, list) else []


def misfits(
    spec: TargetSpec, vocab_size: int, hidden_size: int, layers: Sequence[int] = ()
) -> list[str]:
    """Return how the target that a drafter was made for, and reads layers of, differs from this."""
    complaints = []
    if vocab_size != spec.vocab_size:
        complaints.append(
            f"it is for a vocabulary of {vocab_size:,} tokens, {spec.name} has {spec.vocab_size:,}"
        )
    if hidden_size != spec.hidden_size:
        complaints.append(
            f"it reads hidden states {hidden_size:,} wide, {spec.name}'s are {spec.hidden_size:,}"
        )
    return complaints + [
        f"layer {layer} is not one of {spec.name}'s 0..{spec.num_layers}"
        for layer in layers
        if not 0 <= layer <= spec.num_layers
    ]


def check_tensors(table: Mapping[str, Expected], tensors: Tensors) -> list[str]:
    """Return which tensors are missing, unknown, misshapen or of another dtype."""
    complaints = [
        f"missing {name} of shape {list(expected.shape)}"
        for name, expected in table.items()
        if expected.required and name not in tensors
    ]
    complaints += [f"unknown {name}" for name in tensors if name not in table]
    for name, tensor in tensors.items():
        expected = table.get(name)
        if expected is None:
            continue
        if tuple(tensor.shape) != expected.shape:
            complaints.append(f"{name} must be {list(expected.shape)}, got {list(tensor.shape)}")
        if expected.dtypes and tensor.dtype not in expected.dtypes:
            names = " or ".join(str(dtype) for dtype in expected.dtypes)
            complaints.append(f"{name} must be {names}, got {tensor.dtype}")
    return complaints
