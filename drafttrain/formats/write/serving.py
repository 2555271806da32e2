"""What engines are told of an export: the command that serves it with each, and notes."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import TargetSpec
from drafttrain.drafters.serving.engines import (
    DRAFTED_TOKENS,
    GREEDY,
    PROBABILISTIC,
    SCALED,
    SGLANG,
    SPREADING,
    TOKEN_MAP,
    VLLM,
    cannot_serve,
    convert_command,
    llama_cpp_command,
    llama_cpp_refuses,
    runners_note,
    serve_commands,
    told_by_path,
)
from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.drafters.serving.layout import Config, DerivedLayout, ServedLayout
from drafttrain.formats.write.config import FP8, GGUF_FORMAT, NATIVE, SGLANG_FORMAT, ExportSettings
from drafttrain.report.card import DRAFTER, TARGET, CardData
from drafttrain.report.results import Report
from drafttrain.runtime.settings import AUTO, require


@dataclass(frozen=True)
class EngineCommands:
    """Commands by engine, as they are printed and as a card has them, and notes."""

    commands: dict[str, str]
    published: dict[str, str]
    notes: tuple[str, ...]


def layout_to_write(
    name: str, layout: ServedLayout | None, config: Config, spec: TargetSpec, wanted: str
) -> DerivedLayout | None:
    """Return the layout of export.format, None for the native one.

    name: of the drafter's family. config: its native config.json. ValueError where the family has
    no such layout, or the layout cannot hold this drafter.
    """
    if wanted == NATIVE:
        return None
    found = None if layout is None else layout.derived.get(wanted)
    asked = f"export.format={wanted}"
    if wanted == GGUF_FORMAT:  # llama.cpp's converter reads the native layout
        reason = "no engine serves it"
        if layout is not None:
            reason = llama_cpp_refuses(layout, config, spec)
            reason += "; give export=vllm" if reason else ""
        if reason:
            raise ValueError(f"{asked} cannot hold this {name} drafter: {reason}")
        return None
    if found is None and wanted == SGLANG_FORMAT:  # it reads the native layout
        if layout is None or layout.sglang is None:
            raise ValueError(f"{asked} must be of a drafter that {SGLANG} serves, got {name}")
        return None
    if found is None:
        has = sorted({one.family for one in LAYOUTS if isinstance(one, DerivedLayout)})
        raise ValueError(f"{asked} must be one of {', '.join(has)}, got {name}; give export=vllm")
    if reason := found.refuses(config, spec):
        raise ValueError(f"{asked} cannot hold this {name} drafter: {reason}; give export=vllm")
    return found


def serving(
    layout: ServedLayout,
    derived: DerivedLayout | None,
    native: Config,
    own_embedding: bool,
    spec: TargetSpec,
    target: str,
    place: str,
    dtype: torch.dtype,
    depth: int,
    config: ExportSettings,
    card: CardData,
) -> EngineCommands:
    """Return what engines are told of an export to `place`.

    native: its native config.json. target: the target's name in commands. dtype: of the weights.
    depth: drafted tokens per step. ValueError for a place by whose name vLLM would take it for
    another kind.
    """
    if config.format == GGUF_FORMAT:

        def converted(target: str, model: str) -> dict[str, str]:
            words = convert_command(layout, "LLAMA_CPP", target, model, dtype)
            # The converter's command comes first, unless it was called already.
            first = "" if config.converter is not None else f"{shlex.join(words)} && "
            return {"llama.cpp": first + llama_cpp_command(layout, model, depth)}

        printed, published = converted(target, place), converted(TARGET, DRAFTER)
        alone = "TARGET.gguf is the target, by the same converter; LLAMA_CPP a checkout."
        return EngineCommands(printed, published, (*layout.notes(native, spec, True), alone))
    refused = cannot_serve(layout, native, own_embedding, spec)
    if config.dtype == FP8:
        refused.setdefault("SGLang", f"{SGLANG} was not tried with weights of 8 bits")
    if config.format == SGLANG_FORMAT:
        if reason := refused.get("SGLang"):
            asked = f"export.format={SGLANG_FORMAT}"
            raise ValueError(
                f"{asked} cannot hold this {layout.family} drafter: {reason}; give export=vllm"
            )
        refused["vLLM"] = f"export=vllm writes the same files, and says what {VLLM} makes of them"
    model = config.push or place
    greedy = _only_greedy(layout, native, spec)
    drawn = {} if greedy else _with_drawn_drafts(card.reports)
    if "vLLM" not in refused:
        _check_path("export.dir" if config.push is None else "export.push", model, layout)

    def told(target: str, model: str) -> dict[str, str]:
        if derived is None:
            how = PROBABILISTIC if drawn else GREEDY
            every = serve_commands(layout, target, model, depth, how)
        else:
            every = derived.commands(target, model, depth, PROBABILISTIC if drawn else None)
        if DRAFTED_TOKENS in native and "SGLang" in every:
            every["SGLang"] += f" --speculative-token-map {shlex.quote(f'{model}/{TOKEN_MAP}')}"
        if gpus > 1:
            every = {engine: f"{line} {SPREADING[engine]} {gpus}" for engine, line in every.items()}
        return {engine: line for engine, line in every.items() if engine not in refused}

    gpus = 1 if config.tensor_parallel == AUTO else config.tensor_parallel
    commands = told(target, model)
    notes = [*_sharing(layout, native, own_embedding), *layout.notes(native, spec, bool(commands))]
    notes += [f"No {engine} command: {reason}." for engine, reason in refused.items()]
    if derived is not None:
        notes += derived.notes(target, refused)
    if commands and gpus > 1:
        notes.append(f"The target is spread over {gpus} GPUs; export.tensor_parallel changes that.")
    if "vLLM" in commands:
        notes += [runners_note(layout), *layout.vllm_notes(native)]
        notes.append(_drafts_note(greedy, card.reports))
        if known := native.get(DRAFTED_TOKENS):
            notes.append(
                f"{VLLM} drafts from the target's whole vocabulary, not from the {known:,} tokens "
                "that this drafter was measured with: it drafts slower and may accept another "
                "number; its output is the same."
            )
    # A card is read on other machines: it names no folder of this one.
    published = told(card.base_model or TARGET, config.push or DRAFTER)
    return EngineCommands(commands, published, tuple(notes))


def _sharing(layout: ServedLayout, native: Config, own_embedding: bool) -> list[str]:
    """Return a note on whose embedding and head engines take, if the drafter embeds tokens."""
    names = layout.expected_tensors(native)
    own_head = "lm_head.weight" in names
    if layout.whole_model:
        return ["Embedding and head are its own" + ("." if own_head else ": one matrix (tied).")]
    if not layout.within_target and "embed_tokens.weight" not in names:
        return []
    if own_embedding:
        own = "Its embedding is its own; it reads the target's head."
        return ["Embedding and head are its own." if own_head else own]
    if own_head:
        return ["It reads the target's embedding; its head is its own."]
    return ["It reads the target's embedding and head."]


def _check_path(key: str, path: str, layout: ServedLayout) -> None:
    """Raise ValueError for a path by which vLLM would take the drafter for another kind."""
    part = told_by_path(layout.method, path)
    need = f"not contain {part!r} for a {layout.method} drafter"
    why = f": {VLLM} would take it for another kind by that, whatever method it is given"
    require(part is None, key, need, path, f"{why}; choose another")


def _with_drawn_drafts(reports: Mapping[str, Report]) -> dict[str, Sampling]:
    """Return how drafts were drawn, by evaluation, where they were not the most likely tokens."""
    sampled = {name: one for name, one in reports.items() if not one.sampling.greedy}
    drawn = {name: one.draft_sampling or one.sampling for name, one in sampled.items()}
    return {name: sampling for name, sampling in drawn.items() if not sampling.greedy}


def _only_greedy(layout: ServedLayout, native: Config, spec: TargetSpec) -> str:
    """Return that vLLM must draft the most likely tokens, and why; "" if it can draw drafts."""
    if not layout.samples_drafts:
        return "vLLM drafts its most likely tokens at every temperature"
    own_head = layout.whole_model or "lm_head.weight" in layout.expected_tensors(native)
    if own_head or spec.architecture not in SCALED:
        return ""
    return (
        f"`draft_sample_method` {GREEDY}: vLLM drafts the most likely tokens, and does not scale a "
        f"drafter's logits as {spec.architecture} targets do, so that {PROBABILISTIC} would draw "
        "drafts at another temperature"
    )


def _drafts_note(greedy: str, reports: Mapping[str, Report]) -> str:
    """Return a note on how vLLM drafts at a temperature above 0, beside what was measured.

    greedy: why it can only draft the most likely tokens, if so.
    """
    drawn = _with_drawn_drafts(reports)
    if greedy:
        also = f" unlike evaluation {next(iter(drawn))}, which drew drafts" if drawn else ""
        return f"{greedy}{also}."
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
