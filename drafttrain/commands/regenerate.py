"""Prompts in, the target's own answers out."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drafttrain import __version__
from drafttrain.commands.setup.target_and_drafter import load_alone
from drafttrain.config.groups import follow_up, told_target
from drafttrain.config.sections import RegenerateConfig
from drafttrain.core.types import TargetSpec
from drafttrain.data.prompts_to_answer import read_asked
from drafttrain.data.template import require_template, template_fingerprint
from drafttrain.decode.autoregressive import autoregressive_decode_batch
from drafttrain.runtime.disk import require_writable
from drafttrain.runtime.hardware import TORCH_DTYPES, choose_device, dtype_name
from drafttrain.runtime.lock import of_answers, require_free
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import console
from drafttrain.target.answers.answers_file import Answers, Backend
from drafttrain.target.answers.answers_file import regenerate as answer_all
from drafttrain.target.answers.config import OPENAI, VLLM
from drafttrain.target.answers.endpoint import by_endpoint, served_by
from drafttrain.target.answers.local import by_transformers, by_vllm
from drafttrain.target.describe import open_target
from drafttrain.target.placement import SERVING_SHARE, engine_gpus
from drafttrain.target.pretrained.ends import directory
from drafttrain.target.pretrained.models import fingerprint, load_tokenizer
from drafttrain.target.vllm.engine import VllmEngine
from drafttrain.target.vllm.process import require_vllm


def regenerate(config: RegenerateConfig) -> None:
    """Have the target answer prompts in its own words, and write conversations for data=jsonl."""
    with StopRequest(": what is answered stays, and the same command resumes").listening() as stop:
        regenerate_until(stop, config)


def regenerate_until(stop: StopRequest, config: RegenerateConfig) -> None:
    """Answer the prompts without an answer, until all have one or a scheduler asks to stop."""
    settings = config.regenerate
    out = Path(settings.out).expanduser()
    console.print(
        f"drafttrain {__version__}: regenerate by {settings.backend}  data={config.data.name}  "
        f"temperature={settings.temperature:g}  to {out}"
    )
    require_writable(out.parent, "regenerate.out")
    require_free(out, "regenerate.out", file=of_answers(out))
    if settings.backend == VLLM:
        require_vllm(config.vllm.python, "regenerate.backend=vllm")
    if settings.backend != OPENAI and settings.max_new_tokens >= config.data.max_length:
        raise ValueError(
            "regenerate.max_new_tokens must be less than data.max_length="
            f"{config.data.max_length}, which prompt and answer share, got "
            f"{settings.max_new_tokens}; lower it, or raise data.max_length"
        )
    asked, skipped = read_asked(config.data, settings.turns)
    for line in skipped.lines():
        console.print(line)
    identity, opened = prepare(config, stop)
    with Answers(out, settings.identity() | identity) as answers:
        num_missing = len(answers.missing(asked))
        console.print(
            f"data: {len(asked):,} conversations, {len(asked) - num_missing:,} answered before"
        )
        if num_missing:
            with opened as backend:
                work = answer_all(asked, answers, backend, stop)
            console.print(
                f"answered {work.num_answered:,} conversations with {work.num_tokens:,} tokens in "
                f"{work.seconds:,.1f} s ({work.speed:,.0f} tokens/s)"
            )
        else:
            answers.finish()
        failed = answers.report(len(asked))
        if not answers.rows:
            raise ValueError(
                f"regenerate.out={out} has no conversation with an answer ({failed.sentence()}); "
                "change the settings or the prompts, and name another file"
            )
        for line in failed.lines():
            console.print(line)
        cut = sum(row.cut is not None for row in answers.rows.values())
        if cut:
            console.print(f"{cut:,} conversations were cut after an answer: see `cut` in {out}")
        num_answers = sum(row.num_answers for row in answers.rows.values())
        num_unfinished = sum(row.num_unfinished for row in answers.rows.values())
        if num_unfinished:
            console.print(
                f"{num_unfinished:,} of {num_answers:,} answers reached the limit, "
                f"regenerate.max_new_tokens={settings.max_new_tokens}, and are trained without an "
                "end; raise it, with another regenerate.out, to have them finished"
            )
        console.print(f"answers: {out}, {len(answers.rows):,} conversations")
    trained = ("data=jsonl", f"data.path={out}", *told_target(config.model))
    console.print(f"next: {follow_up('train', *trained)}")


def prepare(
    config: RegenerateConfig, stop: StopRequest
) -> tuple[dict[str, Any], AbstractContextManager[Backend]]:
    """Return what the answers depend on besides the settings, and the backend, not yet opened."""
    settings, model, template = config.regenerate, config.model, config.data.text_format
    if settings.backend == OPENAI:
        console.print(f"asking {settings.base_url} for its models")
        served = served_by(settings)
        console.print(
            f"endpoint: {served.model}; an answer may take regenerate.timeout="
            f"{settings.timeout:g} s, with at most {settings.max_retries} more requests for it"
        )
        backend: Backend = partial(by_endpoint, config=settings, template=template, stop=stop)
        told = {"data.template_kwargs": template.kwargs} if template.kwargs else {}
        return {"model": served.model, **told}, nullcontext(backend)
    device = choose_device(config.hardware)
    # Not measured: answers begun in one dtype must be continued in it.
    auto = "bfloat16" if device.startswith("cuda") else "float32"
    dtype = TORCH_DTYPES[auto if config.hardware.dtype == "auto" else config.hardware.dtype]
    identity = {
        "model": model.label,
        "target": fingerprint(model, dtype, device),
        "dtype": dtype_name(dtype),
        "data.max_length": config.data.max_length,
        "chat template": template_fingerprint(load_tokenizer(model), template),
    }
    if settings.backend == VLLM:
        return identity, _engine(config, dtype, device)
    return identity, _target(config, dtype, device)


@contextmanager
def _target(config: RegenerateConfig, dtype: torch.dtype, device: str) -> Iterator[Backend]:
    target = load_alone(config.model, config.hardware, dtype, torch.device(device))
    require_template(target.tokenizer)
    yield partial(
        by_transformers,
        target,
        config=config.regenerate,
        template=config.data.text_format,
        room=room_of(config, target.spec),
        decode=autoregressive_decode_batch,
    )


def room_of(config: RegenerateConfig, spec: TargetSpec) -> int:
    """Return how many tokens prompt and answer may have; ValueError if no prompt would fit."""
    room = min(config.data.max_length, spec.max_positions)
    if config.regenerate.max_new_tokens >= room:
        raise ValueError(
            f"regenerate.max_new_tokens must leave room for a prompt in the {room} positions of "
            f"{spec.name}, got {config.regenerate.max_new_tokens}; lower it"
        )
    return room


@contextmanager
def _engine(config: RegenerateConfig, dtype: torch.dtype, device: str) -> Iterator[Backend]:
    model, settings = config.model, config.regenerate
    _, tokenizer, spec = open_target(model)
    require_template(tokenizer)
    room = room_of(config, spec)
    console.print("starting vLLM")
    vllm, where = config.vllm, torch.device(device)
    asked, share = vllm.tensor_parallel, SERVING_SHARE * vllm.memory
    spread = engine_gpus(asked, model, dtype, where, share, vllm.devices)
    with VllmEngine(
        directory(model),
        replace(vllm, tensor_parallel=spread),
        dtype=dtype_name(dtype),
        device=where.type,
        longest=room,
        folder=Path(settings.dir) / f"{Path(settings.out).stem}.vllm",
        trust_remote_code=model.trust_remote_code,
    ) as engine:
        yield partial(
            by_vllm,
            engine,
            spec,
            tokenizer,
            config=settings,
            template=config.data.text_format,
            room=room,
            in_flight=2 * config.vllm.max_num_seqs,  # the engine never waits for a prompt
        )
