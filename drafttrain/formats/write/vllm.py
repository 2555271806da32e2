"""Export drafters: files that engines load, and the command that serves them with each engine."""

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.ops.layer_calls import dtype_of
from drafttrain.core.readout import Readout
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import TargetFeatures
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.serving.engines import (
    GREEDY,
    PROBABILISTIC,
    VLLM,
    cannot_serve,
    runners_note,
    serve_commands,
    told_by_path,
)
from drafttrain.drafters.serving.layout import ServedLayout
from drafttrain.formats.write.config import ExportSettings
from drafttrain.formats.write.layout import check, not_finite
from drafttrain.report.card import DRAFTER, MADE_BY, TARGET, CardData, model_card
from drafttrain.report.results import Report
from drafttrain.runtime.hardware import dtype_name

FILES = ("config.json", "model.safetensors", "README.md")
# The other files of a draft model: a tokenizer, as Transformers writes it.
MODEL_FILES = frozenset(
    {"generation_config.json", "chat_template.jinja", "added_tokens.json", "merges.txt"}
    | {"special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
    | {"vocab.json", "vocab.txt"}
)
PROBE_ROWS, PROBE_LENGTH, PROBE_DEPTH, PROBE_IDS = 2, 12, 3, 1024
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Rounding:
    """How much rounding the written weights changes the logits, on a fixed random batch."""

    largest_difference: float  # of a logit
    same_choice: float  # share of positions whose most likely token is the same
    exact: bool  # whether the written files give exactly the same logits when loaded back


@dataclass(frozen=True)
class Exported:
    """The files that an export wrote, and how to serve them."""

    folder: Path
    method: str
    dtype: torch.dtype
    num_parameters: int
    sizes: dict[str, int]  # bytes by file
    rounding: Rounding
    commands: dict[str, str]  # by engine
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the summary that the command prints."""
        name = dtype_name(self.dtype)
        lines = [f"exported {self.method} to {self.folder}"]
        lines += [f"  {file:<18} {size:>14,} bytes" for file, size in self.sizes.items()]
        lines.append(f"  {self.num_parameters:,} parameters in {name}; names and shapes checked")
        rounded = " up to rounding (fc.weight is rescaled)"
        equal = ", bit for bit" if self.rounding.exact else rounded
        lines.append(f"  loaded back: logits equal to those of the same weights{equal}")
        if self.rounding.largest_difference:
            lines.append(
                f"  rounding to {name} moved logits by at most "
                f"{self.rounding.largest_difference:.3g} and kept "
                f"{self.rounding.same_choice:.1%} of first choices (random input)"
            )
        lines += [f"  {note}" for note in self.notes]
        for engine, command in self.commands.items():
            lines += [f"serve with {engine}:", f"  {command}"]
        return lines


def export_vllm(
    drafter: Drafter,
    target: str,
    folder: Path,
    config: ExportSettings,
    card: CardData,
    load_tokenizer: Callable[[], Any] | None = None,
) -> Exported:
    """Write config.json, model.safetensors and README.md into `folder`, all or nothing.

    `target` is the target's name in serve commands: a directory or a Hub repository. A drafter that
    is a language model gets the target's tokenizer too, so that Transformers can load the folder.
    Raises ValueError, with nothing written, if the folder is in use, if an engine would misread the
    weights, or if the written files do not give back the drafter.
    """
    settings, trained = drafter.to_serving()
    layout, spec = drafter.config.layout, drafter.spec
    deepest, depth = drafter.max_depth, config.num_speculative_tokens
    if deepest is not None and depth > deepest:
        raise ValueError(
            f"export.num_speculative_tokens must be at most {deepest} for this "
            f"{drafter.config.name} drafter, got {depth}: "
            "it was made for no more, and engines refuse more"
        )
    dtype = dtype_of(drafter) if config.dtype == "auto" else _DTYPES[config.dtype]
    tensors = {name: _written(tensor, dtype) for name, tensor in trained.items()}
    settings = {**settings, "torch_dtype": dtype_name(dtype)}
    # Engines ignore it; when the export is loaded here again, it reveals a changed target.
    settings["target_fingerprint"] = spec.fingerprint
    commands: dict[str, str] = {}
    published: dict[str, str] = {}
    notes: tuple[str, ...]
    if layout is None:
        name = drafter.config.name
        if complaints := not_finite(tensors):
            raise ValueError(f"this {name} drafter is broken: {'; '.join(complaints)}")
        notes = (
            f"No engine serves drafter={name}: drafttrain decodes with it, from its run folder.",
        )
    else:
        check(settings, tensors, spec, drafter.captures, layout)
        refused = cannot_serve(layout, settings, "embed_tokens.weight" in tensors, spec)
        drawn = drafts_as_measured(card.reports) if layout.samples_drafts else GREEDY
        if "vLLM" not in refused:
            key = "export.dir" if config.push is None else "export.push"
            _check_path(key, config.push or str(folder), layout)

        def told(target: str, model: str) -> dict[str, str]:
            every = serve_commands(layout, target, model, depth, drawn)
            return {engine: line for engine, line in every.items() if engine not in refused}

        commands = told(target, config.push or str(folder))
        # A card is read on other machines: it names no folder of this one.
        published = told(card.base_model or TARGET, config.push or DRAFTER)
        reasons = (f"No {engine} command: {reason}." for engine, reason in refused.items())
        notes = (*layout.notes(settings, spec, bool(commands)), *reasons)
        if "vLLM" in commands:
            notes = (*notes, runners_note(layout), drafts_note(layout, card.reports))
    with _all_or_nothing(folder, config.overwrite) as draft:
        (draft / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        rounding = read_back(draft, drafter, dtype)
        (draft / "README.md").write_text(model_card(card, settings, published, notes))
        if layout is not None and layout.whole_model:
            assert load_tokenizer is not None, "a draft model is exported with a tokenizer"
            load_tokenizer().save_pretrained(draft)
            ends = {"eos_token_id": list(drafter.spec.eos_token_ids)}
            (draft / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
        written = [*FILES, *sorted({file.name for file in draft.iterdir()} - set(FILES))]
        sizes = {file: (draft / file).stat().st_size for file in written}
    count = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    method = drafter.config.name if layout is None else layout.method
    return Exported(folder, method, dtype, count, sizes, rounding, commands, notes)


def _check_path(key: str, path: str, layout: ServedLayout) -> None:
    """Raise ValueError for a path by which vLLM would take the drafter for another kind."""
    part = told_by_path(layout.method, path)
    if part is not None:
        raise ValueError(
            f"{key} must not contain {part!r} for a {layout.method} drafter, got {path}: {VLLM} "
            "would take it for another kind by that, whatever method it is given; choose another"
        )


def drafts_as_measured(reports: Mapping[str, Report]) -> str:
    """Return vLLM's draft_sample_method that drafts as the reports' evaluations did.

    Where none was at a temperature above 0, it is vLLM's own default.
    """
    return PROBABILISTIC if _with_drawn_drafts(reports) else GREEDY


def _with_drawn_drafts(reports: Mapping[str, Report]) -> dict[str, Sampling]:
    """Return how drafts were drawn, by evaluation, where they were not the most likely tokens."""
    sampled = {name: one for name, one in reports.items() if not one.sampling.greedy}
    drawn = {name: one.draft_sampling or one.sampling for name, one in sampled.items()}
    return {name: sampling for name, sampling in drawn.items() if not sampling.greedy}


def drafts_note(layout: ServedLayout, reports: Mapping[str, Report]) -> str:
    """Return a note on how vLLM drafts at a temperature above 0, beside what was measured."""
    drawn = _with_drawn_drafts(reports)
    if not layout.samples_drafts:
        also = f" unlike evaluation {next(iter(drawn))}, which drew drafts" if drawn else ""
        return f"vLLM drafts its most likely tokens at every temperature{also}."
    if not drawn:
        return (
            f"`draft_sample_method` {GREEDY}: vLLM drafts the most likely tokens. No evaluation "
            "here drew drafts; for temperatures above 0, at which drafttrain draws drafts as the "
            f"target draws tokens, that is {PROBABILISTIC}."
        )
    name, sampling = next(iter(drawn.items()))
    keys = [field.name for field in fields(Sampling)]
    own = [f"{key} {getattr(sampling, key)}" for key in keys]
    differs = any(getattr(sampling, key) != getattr(reports[name].sampling, key) for key in keys)
    other = f" (there with settings of its own, {', '.join(own)})" if differs else ""
    return (
        f"`draft_sample_method` {PROBABILISTIC}: vLLM draws drafts as it draws tokens, as "
        f"evaluation {name} did{other}; its default is the most likely tokens."
    )


def _written(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    # A clone: safetensors refuses tensors that share storage, such as views.
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().clone()


@contextmanager
def _all_or_nothing(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` if the block succeeds."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"export.dir must be a folder, got the file {folder}")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    card = folder / "README.md"
    # A model in this folder may be replaced if it is an export; other models never are.
    export = card.is_file() and MADE_BY in card.read_text(encoding="utf-8", errors="replace")
    ours = {*FILES, *(MODEL_FILES if export else ())}
    foreign = [name for name in found if name not in ours]
    if foreign:
        raise ValueError(
            f"export.dir must be empty or hold only an earlier export, but {folder} holds "
            f"{', '.join(foreign[:5])}; choose another folder"
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
            file.chmod(0o644)
        if folder.exists():
            old = draft.with_name(f"{draft.name}.old")
            os.replace(folder, old)
            os.replace(draft, folder)
            shutil.rmtree(old)
        else:
            os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_back(folder: Path, drafter: Drafter, dtype: torch.dtype) -> Rounding:
    """Load a written export into a fresh drafter and compare logits on a fixed random batch.

    ValueError unless they equal, bit for bit in float32, those of `drafter` with its weights
    rounded to `dtype`. Returns how far that rounding itself moved them.
    """
    original = copy.deepcopy(drafter).to("cpu", torch.float32).eval()
    trained = probe(original)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(parameter.to(dtype))
    rounded = probe(original)
    fresh = drafter.config.build(drafter.spec).to("cpu", torch.float32).eval()
    settings = json.loads((folder / "config.json").read_text())
    fresh.from_serving(settings, load_file(folder / "model.safetensors"))
    if fresh.captures != drafter.captures:
        raise ValueError(
            f"the export reads layers {list(fresh.captures)}, "
            f"the drafter was trained on {list(drafter.captures)}"
        )
    loaded = probe(fresh)
    # Rescaled weights (fc.weight) are rounded differently.
    exact = loaded.shape == rounded.shape and torch.equal(loaded, rounded)
    rescaled = drafter.spec.embedding_scale != 1.0 and loaded.shape == rounded.shape
    slack = 4 * torch.finfo(dtype).eps * float(rounded.abs().max())
    if not exact and not (rescaled and float((loaded - rounded).abs().max()) <= slack):
        raise ValueError(
            f"the export in {folder} does not give back the drafter: its logits differ "
            f"from the same weights' in memory; to_serving and from_serving of "
            f"drafter={drafter.config.name} disagree"
        )
    return Rounding(
        float((trained - rounded).abs().max()),
        float((trained.argmax(-1) == rounded.argmax(-1)).float().mean()),
        exact,
    )


class FewRows(Readout):
    """A readout of few ids that embeds any: a drafter's own token, such as a mask, may be large."""

    def embed(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        return super().embed(tokens % len(self.embedding))


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
