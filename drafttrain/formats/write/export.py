"""Export drafters: files that engines load, and the command that serves them with each engine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.ops.layer_calls import dtype_of
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.serving.engines import (
    CONVERTER,
    DRAFTED_TOKENS,
    GGUF,
    LLAMA_CPP,
    TOKEN_MAP,
    convert_command,
)
from drafttrain.drafters.serving.layout import Config, ServedLayout, check_tensors
from drafttrain.formats.write.config import AS_NATIVE, FP8, NATIVE, ExportSettings
from drafttrain.formats.write.directory import (
    CARD,
    CONFIG,
    add_to_target,
    all_or_nothing,
    config_within,
    sizes_of,
    write_weights,
)
from drafttrain.formats.write.precision import Precision, Rounding, read_back
from drafttrain.formats.write.serving import EngineCommands, layout_to_write, serving
from drafttrain.report.card import CardData, model_card
from drafttrain.runtime.hardware import TORCH_DTYPES
from drafttrain.runtime.settings import require
from drafttrain.target.vllm.process import environment_without_secrets

BY_HAND = "leave export.converter out, and run the printed command in the converter's environment"


@dataclass(frozen=True)
class Exported:
    """The files that an export wrote, and how to serve them."""

    folder: Path
    method: str
    format: str
    precision: Precision
    num_parameters: int
    sizes: dict[str, int]  # bytes by file
    rounding: Rounding
    commands: dict[str, str]  # by engine
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the summary that the command prints."""
        name = self.precision.name
        layout = "" if self.format in AS_NATIVE else f" in the {self.format} format"
        lines = [f"exported {self.method}{layout} to {self.folder}"]
        lines += [f"  {file:<18} {size:>14,} bytes" for file, size in self.sizes.items()]
        written = self.precision.describe()
        lines.append(f"  {self.num_parameters:,} parameters in {written}; names and shapes checked")
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


def export_drafter(
    drafter: Drafter,
    target: str,
    folder: Path,
    config: ExportSettings,
    card: CardData,
    load_tokenizer: Callable[[], Any] | None = None,
    measure: Callable[[Drafter, int], str] | None = None,
    target_folder: Callable[[], Path | None] | None = None,
) -> Exported:
    """Write config.json, weights and README.md into `folder`, all or nothing.

    `target` is the target's name in serve commands: a directory or a Hub repository. A drafter that
    is a language model gets the target's tokenizer too, so that Transformers can load the folder.
    measure: returns a note on the drafter that the written files give, drafting so many tokens, for
    the output and the card.
    One that engines read from within its target is added to a copy of the target's own folder.
    Raises ValueError, with nothing written, if the folder is in use, if the format cannot hold the
    drafter, if an engine would misread the weights, or if the written files do not give it back.
    """
    native, trained = drafter.to_serving()
    layout, spec, name = drafter.config.layout, drafter.spec, drafter.config.name
    deepest, block = drafter.max_depth, None if layout is None else layout.block(native)
    depth = config.depth(block, deepest)
    fits = deepest is None or depth <= deepest
    need = f"be at most {deepest} for this {name} drafter"
    why = ": it was made for no more, and engines refuse more"
    require(fits, "export.num_speculative_tokens", need, depth, why)
    derived = layout_to_write(name, layout, native, spec, config.format)
    precision = _precision(drafter, layout, config)
    tensors = dict(trained)
    there = config.converter is None or (Path(config.converter) / CONVERTER).is_file()
    need = f"be a checkout of llama.cpp, with {CONVERTER}"
    require(there, "export.converter", need, config.converter)
    if layout is None:
        if complaints := not_finite(tensors):
            raise ValueError(f"this {name} drafter is broken: {'; '.join(complaints)}")
        served = (
            f"No engine serves drafter={name}: drafttrain decodes with it, from its run folder."
        )
        told = EngineCommands({}, {}, (served,))
    else:
        check(native, tensors, spec, drafter.captures, layout)
        own = "embed_tokens.weight" in tensors
        told = serving(
            *(layout, derived, native, own, spec, target, str(folder), precision.dtype, depth),
            *(config, card),
        )
    settings = native
    if derived is not None:
        settings, tensors = derived.write(native, tensors, spec, target, depth)
    notes = [*told.notes, *precision.notes]
    count = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    of_target = None
    if layout is not None and (layout.within_target or config.converter is not None):
        of_target = target_folder() if target_folder is not None else None
        if of_target is None:
            why = "whose GGUF holds its target's tokenizer"
            if layout.within_target:
                why = "which engines read from within its target's checkpoint"
            raise ValueError(
                f"model must be a directory or a repository for a {name} drafter, {why}; {target} "
                "has no files"
            )
    inside = of_target if layout is not None and layout.within_target else None
    if layout is not None and inside is not None:
        settings = config_within(layout, native, inside, spec.fingerprint)
    else:
        settings = {**settings, **precision.config}
        if spec.fingerprint:
            # Engines ignore it; when the export is loaded here again, it reveals a changed target.
            settings["target_fingerprint"] = spec.fingerprint
    with all_or_nothing(folder, config.overwrite) as draft:
        (draft / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        if layout is not None and inside is not None:
            add_to_target(draft, inside, precision.stored(tensors), layout.held)
        else:
            write_weights(draft, precision.stored(tensors), config.max_shard_size)
        rounding = read_back(draft, drafter, precision, derived or layout)
        if measure is not None:
            notes.append(measure(precision.as_engines_compute(rounding.written), depth))
        elif rounding.largest_difference:
            notes.append(
                "What the rounding costs in acceptance was not measured: "
                "export.measured_prompts=16 measures it on so many prompts."
            )
        (draft / CARD).write_text(model_card(card, settings, told.published, tuple(notes)))
        if DRAFTED_TOKENS in settings and drafter.vocab is not None:
            torch.save(drafter.vocab.target_ids.tolist(), draft / TOKEN_MAP)
        if layout is not None and layout.whole_model:
            assert load_tokenizer is not None, "a draft model is exported with a tokenizer"
            load_tokenizer().save_pretrained(draft)
            ends = {"eos_token_id": list(drafter.spec.eos_token_ids)}
            (draft / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
        if config.converter is not None:
            assert layout is not None
            assert of_target is not None
            convert(layout, config.converter, of_target, draft, folder.name, precision.dtype)
        sizes = sizes_of(draft)
    method = name if layout is None else layout.method
    return Exported(
        folder,
        method,
        config.format,
        precision,
        count,
        sizes,
        rounding,
        told.commands,
        tuple(notes),
    )


def _precision(drafter: Drafter, layout: ServedLayout | None, config: ExportSettings) -> Precision:
    """Return how weights are rounded. ValueError for 8 bits where no engine reads them."""
    if config.dtype != FP8:
        return Precision(
            dtype_of(drafter) if config.dtype == "auto" else TORCH_DTYPES[config.dtype]
        )
    asked, name = f"export.dtype={FP8}", drafter.config.name
    if layout is None or layout.eight_bits is None:
        raise ValueError(
            f"{asked} must be of a drafter that vLLM serves in 8 bits, got {name}: its class there "
            "reads no quantization_config; give export.dtype=bfloat16"
        )
    why = ", in which engines read no quantization_config of a drafter"
    need = f"come with export.format={NATIVE}"
    require(config.format in AS_NATIVE, asked, need, config.format, why)
    return Precision(torch.bfloat16, layout.eight_bits)


def check(
    config: Config,
    tensors: dict[str, Tensor],
    spec: TargetSpec,
    captures: tuple[int, ...],
    layout: ServedLayout,
) -> None:
    """Raise ValueError naming everything that an engine would misread, not only the first.

    captures: the layers that the drafter was trained on.
    """
    complaints = _check_config(config, layout, spec)
    if not complaints:
        try:
            complaints = check_tensors(layout.expected_tensors(config), tensors)
        except KeyError as error:  # a key that the table needs
            complaints = [f"config.json must hold {error.args[0]}"]
    if not complaints:
        complaints = [*not_finite(tensors), *layout.misread(config, tensors, spec, captures)]
    if complaints:
        raise ValueError(f"this {layout.method} drafter cannot be served: {'; '.join(complaints)}")


def _check_config(config: Config, layout: ServedLayout, spec: TargetSpec) -> list[str]:
    required = layout.required_keys(config, spec)
    absent = dict.fromkeys(layout.false_by_default, False)
    held = {key: config.get(key, absent.get(key)) for key in required}
    own = {key: f" (drafter.{name} of its training)" for key, name in layout.settings.items()}
    return [
        f"config.json's {key} must be {wanted}, got {held[key]}{own.get(key, '')}"
        for key, wanted in required.items()
        if held[key] != wanted
    ]


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Return which tensors hold values that are not finite, and how many."""
    return [
        f"{name} holds {int((~tensor.isfinite()).sum())} values that are not finite"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]


def convert(
    layout: ServedLayout, converter: str, target: Path, folder: Path, name: str, dtype: torch.dtype
) -> None:
    """Write `GGUF` into a drafter's directory.

    converter: a checkout of llama.cpp. target: the target's directory. name: the GGUF's own. dtype:
    of the weights; norms are float32 in any GGUF. ValueError with the converter's last line where
    it fails.
    """
    words = convert_command(layout, converter, str(target), str(folder), dtype)
    words += ["--model-name", name]
    # A program of others gets none of the user's tokens.
    given = {
        **environment_without_secrets(os.environ),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    done = subprocess.run(
        [sys.executable, *words[1:]], capture_output=True, text=True, check=False, env=given
    )
    if done.returncode != 0 or not (folder / GGUF).is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise ValueError(
            f"export.converter={converter} must convert this drafter (export.dir keeps nothing), "
            f"got: {said}; {_advice(said)}"
        )


def _advice(said: str) -> str:
    """Return what to do about the converter's last line."""
    if "pre-tokenizer was not recognized" in said:
        return (
            "it knows tokenizers by a hash, and not this target's: a checkout that knows it is "
            f"needed ({LLAMA_CPP} was tried)"
        )
    if said.startswith("ModuleNotFoundError"):
        return f"install that module beside drafttrain, or {BY_HAND}"
    return BY_HAND
