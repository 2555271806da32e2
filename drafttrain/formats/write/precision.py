"""In how many bits an export writes which weights, and what rounding them changes."""

import copy
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.readout import Readout
from drafttrain.core.types import TargetFeatures
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.serving.layout import Config, Layout, Unfit
from drafttrain.formats import eight_bits
from drafttrain.formats.eight_bits import PlainView
from drafttrain.formats.read.folder import open_folder
from drafttrain.formats.write.config import FP8
from drafttrain.runtime.hardware import dtype_name

PROBE_ROWS, PROBE_LENGTH, PROBE_DEPTH, PROBE_IDS = 2, 12, 3, 1024


@dataclass(frozen=True)
class Precision:
    """How weights are rounded: those of `eight_bits` (None: none) to 8 bits, others to `dtype`."""

    dtype: torch.dtype
    eight_bits: re.Pattern[str] | None = None

    @property
    def name(self) -> str:
        """The name of it, for people."""
        return dtype_name(self.dtype) if self.eight_bits is None else FP8

    def describe(self) -> str:
        """Return which weights are in how many bits."""
        if self.eight_bits is None:
            return self.name
        return f"{FP8} (fc and the decoder layers' products) and {dtype_name(self.dtype)}"

    @property
    def notes(self) -> list[str]:
        """The notes of a card on it."""
        if self.eight_bits is None:
            return []
        return [
            "The weights of fc and of the decoder layers' products are in 8 bits (float8_e4m3fn "
            "with a scale for each row, by compressed-tensors), which vLLM reads from config.json; "
            "it rounds what they multiply to 8 bits too, token by token."
        ]

    @property
    def eps(self) -> float:
        """The largest relative step between two numbers."""
        return torch.finfo(self.dtype if self.eight_bits is None else eight_bits.FP8).eps

    @property
    def config(self) -> Config:
        """What config.json says of it."""
        own = {} if self.eight_bits is None else {eight_bits.KEY: eight_bits.WRITTEN}
        return {"torch_dtype": dtype_name(self.dtype), **own}

    def takes(self, name: str) -> bool:
        """Return whether a weight, by its name in the files, is written in 8 bits."""
        return self.eight_bits is not None and self.eight_bits.fullmatch(name) is not None

    def rounded(self, name: str, weight: Tensor) -> Tensor:
        """Return what a weight is worth once it is written."""
        if self.takes(name):
            return eight_bits.worth(*eight_bits.quantised(weight))
        return weight.to(self.dtype)

    def stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as files hold them, contiguous copies on the CPU."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            tensor = tensor.detach().cpu()
            if self.takes(name):
                found[name], found[name + eight_bits.SCALE] = eight_bits.quantised(tensor)
            else:
                tensor = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                # A clone: safetensors refuses tensors that share storage, such as views.
                found[name] = tensor.contiguous().clone()
        return found

    def as_engines_compute(self, drafter: Drafter) -> Drafter:
        """Let a drafter round what its weights of 8 bits read, and return it."""
        for name, _ in drafter.named_parameters():
            if self.takes(name):
                module = drafter.get_submodule(name.removesuffix(".weight"))
                module.register_forward_pre_hook(
                    lambda _, given: (eight_bits.rounded_by_token(given[0]), *given[1:])
                )
        return drafter


class FewRows(Readout):
    """A readout of few ids that embeds any: a drafter's own token, such as a mask, may be large."""

    def embed(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        return super().embed(tokens % len(self.embedding))

    def with_rows(self, ids: Int[Tensor, " kept"]) -> Readout:
        return super().with_rows(ids % len(self.head))


@dataclass(frozen=True)
class Rounding:
    """How much rounding the written weights changes the logits, on a fixed random batch."""

    largest_difference: float  # of a logit
    same_choice: float  # share of positions whose most likely token is the same
    exact: bool  # whether the written files give exactly the same logits when loaded back
    written: Drafter  # what they give, in float32 on the CPU


def read_back(
    folder: Path, drafter: Drafter, precision: Precision, layout: Layout | None
) -> Rounding:
    """Load a written export into a fresh drafter and compare logits on a fixed random batch.

    layout: that of the files, by which they are read as those of others are; None: they hold a
    drafter that no engine serves. ValueError unless they equal, bit for bit in float32, those of
    `drafter` with its weights rounded to `precision`. Returns how far that rounding moved them.
    """
    original = copy.deepcopy(drafter).to("cpu", torch.float32).eval()
    trained = probe(original)
    with torch.no_grad():
        for name, tensor in original.state_dict().items():  # frozen copies of the target's too
            if tensor.is_floating_point():
                tensor.copy_(precision.rounded(name, tensor))
    rounded = probe(original)
    fresh = _loaded(folder, original, layout).to("cpu", torch.float32).eval()
    if fresh.captures != drafter.captures:
        raise ValueError(
            f"the export reads layers {list(fresh.captures)}, "
            f"the drafter was trained on {list(drafter.captures)}"
        )
    loaded = probe(fresh)
    exact = loaded.shape == rounded.shape and torch.equal(loaded, rounded)
    rescaled = not exact and loaded.shape == rounded.shape and _rescaled(drafter)
    slack = 4 * precision.eps * moved(rounded, torch.zeros_like(rounded))
    if not exact and not (rescaled and moved(loaded, rounded) <= slack):
        raise ValueError(
            f"the export in {folder} does not give back the drafter: its logits differ "
            f"from the same weights' in memory; to_serving of drafter={drafter.config.name} and "
            "what reads it disagree"
        )
    return Rounding(
        moved(trained, rounded),
        float((trained.argmax(-1) == rounded.argmax(-1)).float().mean()),
        exact,
        fresh,
    )


def _rescaled(drafter: Drafter) -> bool:
    """Return whether weights are written times a factor (fc.weight): they round differently."""
    own, (_, written) = drafter.state_dict(), drafter.to_serving()
    shared = [name for name, tensor in written.items() if name in own and tensor.dim() > 1]
    return any(not torch.equal(written[name], own[name]) for name in shared)


def moved(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of a logit; a token that is not drafted has none (-inf)."""
    apart = (one - other).abs()
    return float(apart[apart.isfinite()].max())


def _loaded(folder: Path, drafter: Drafter, layout: Layout | None) -> Drafter:
    files = open_folder(folder, allow_pickle=False)
    if layout is None or layout.whole_model:
        fresh = drafter.config.build(drafter.spec)
        fresh.from_serving(files.config, files.tensors())
        return fresh
    try:
        reading = layout.read(PlainView(files), drafter.config, drafter.spec, None)
    except Unfit as unfit:
        raise ValueError(f"the export in {folder} cannot be read back: {unfit}") from unfit
    if reading.complaints:
        raise ValueError(
            f"the export in {folder} cannot be read back: {'; '.join(reading.complaints)}"
        )
    fresh = reading.config.build(reading.declared)
    fresh.load_weights(reading.tensors)
    if fresh.vocab is None and drafter.vocab is not None:  # files without a head hold no map
        fresh.reduce(drafter.vocab)
    return fresh


@torch.no_grad()
def probe(drafter: Drafter) -> Tensor:
    """Return the logits of a chain drafted after a fixed random prompt: "batch depth vocab"."""
    generator = torch.Generator().manual_seed(0)
    spec = drafter.spec
    ids = min(PROBE_IDS, spec.vocab_size)  # few ids, so that a large target needs no large readout

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    readout = FewRows(normal(ids, spec.hidden_size), normal(ids, spec.hidden_size))
    shape = (PROBE_ROWS, PROBE_LENGTH, spec.hidden_size)
    captured = {layer: normal(*shape) for layer in drafter.captures}
    features = TargetFeatures(captured, normal(*shape), readout)
    tokens = torch.randint(ids, (PROBE_ROWS, PROBE_LENGTH + 1 + PROBE_DEPTH), generator=generator)
    state = drafter.begin(readout, tokens[:, 0], PROBE_LENGTH + PROBE_DEPTH + 1)
    counts = [PROBE_LENGTH] * PROBE_ROWS
    drafter.observe(state, tokens[:, 1 : PROBE_LENGTH + 1], counts, features)
    logits, drafted = [], None
    for depth in range(min(PROBE_DEPTH, drafter.max_depth or PROBE_DEPTH)):
        logits.append(drafter.expand(state, drafted))
        drafted = tokens[:, PROBE_LENGTH + 1 + depth, None]
    return torch.cat(logits, dim=1)
