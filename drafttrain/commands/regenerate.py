"""Prompts in, the target's own answers out."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drafttrain import __version__
from drafttrain.commands.setup.target_and_drafter import load_alone
from drafttrain.config.groups import follow_up, told_target
from drafttrain.config.sections import RegenerateConfig
from drafttrain.data.conversations import read_asked
from drafttrain.data.template import require_template, template_fingerprint
from drafttrain.decode.autoregressive import autoregressive_queue
from drafttrain.runtime.disk import require_writable
from drafttrain.runtime.hardware import TORCH_DTYPES, choose_device, choose_train_dtype, dtype_name
from drafttrain.runtime.lock import of_answers, require_free
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import console
from drafttrain.target.answers.answers_file import Backend, open_answers
from drafttrain.target.answers.answers_file import regenerate as answer_all
from drafttrain.target.answers.config import OPENAI, VLLM
from drafttrain.target.answers.dialogue import ChatTokens, by_transformers, by_vllm
from drafttrain.target.answers.endpoint import by_endpoint, served_by
from drafttrain.target.describe import open_target
from drafttrain.target.pretrained.models import fingerprint
from drafttrain.target.served import start_engine
from drafttrain.target.vllm.process import require_vllm

Opened = AbstractContextManager[Backend]


def regenerate(config: RegenerateConfig) -> None:
    """Have the target answer prompts in its own words, and write conversations for data=jsonl."""
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
    with StopRequest(": what is answered stays, and the same command resumes").listening() as stop:
        chat = None if settings.backend == OPENAI else chat_tokens(config)
        asked, skipped = read_asked(config.data, settings.turns)
        for line in skipped.lines():
            console.print(line)
        identity, backend = remote(config, stop) if chat is None else local(config, chat)
        with open_answers(out, settings.identity() | identity) as answers:
            answer_all(asked, answers, backend, stop)
            report = answers.report(len(asked))
            if not answers.rows:
                raise ValueError(
                    f"regenerate.out={out} has no conversation with an answer "
                    f"({report.sentence()}); change the settings or the prompts, and name another "
                    "file"
                )
            for line in report.lines():
                console.print(line)
            console.print(f"answers: {out}, {len(answers.rows):,} conversations")
    trained = ("data=jsonl", f"data.path={out}", *told_target(config.model))
    console.print(f"next: {follow_up('train', *trained)}")


def chat_tokens(config: RegenerateConfig) -> ChatTokens:
    """Return how prompts become tokens; ValueError if an answer would leave no room for one."""
    settings, data = config.regenerate, config.data
    _, tokenizer, spec = open_target(config.model)
    require_template(tokenizer)
    room = min(data.max_length, spec.max_positions)
    if settings.max_new_tokens >= room:
        limit, remedy = f"data.max_length={room}", "lower it, or raise data.max_length"
        if room < data.max_length:
            limit, remedy = f"the {room} positions of {spec.name}", "lower it"
        raise ValueError(
            f"regenerate.max_new_tokens must be less than {limit}, which prompt and answer share, "
            f"got {settings.max_new_tokens}; {remedy}"
        )
    return ChatTokens(settings, data.text_format, tokenizer, spec, room)


def remote(config: RegenerateConfig, stop: StopRequest) -> tuple[dict[str, Any], Opened]:
    """Return what an endpoint's answers depend on besides the settings, and the endpoint."""
    settings, template = config.regenerate, config.data.text_format
    console.print(f"asking {settings.base_url} for its models")
    model = served_by(settings).model
    console.print(
        f"endpoint: {model}; an answer may take regenerate.timeout={settings.timeout:g} s, with "
        f"at most {settings.max_retries} more requests for it"
    )
    extra = {"data.template_kwargs": template.kwargs} if template.kwargs else {}
    return {"model": model, **extra}, nullcontext(
        partial(by_endpoint, config=settings, template=template, stop=stop)
    )


def local(config: RegenerateConfig, chat: ChatTokens) -> tuple[dict[str, Any], Opened]:
    """Return what a target's answers depend on besides the settings, and the target, not loaded."""
    model, name = config.model, choose_device(config.hardware)
    # Not measured: answers begun in one dtype must be continued in it. auto: as in training.
    device, hardware = torch.device(name), config.hardware
    dtype = TORCH_DTYPES.get(hardware.dtype) or choose_train_dtype(hardware, device)
    identity = {
        "model": model.label,
        "target": fingerprint(model, dtype, name),
        "dtype": dtype_name(dtype),
        "data.max_length": config.data.max_length,
        "chat template": template_fingerprint(chat.tokenizer, chat.template),
    }
    return identity, opened(config, chat, dtype, device)


@contextmanager
def opened(
    config: RegenerateConfig, chat: ChatTokens, dtype: torch.dtype, device: torch.device
) -> Iterator[Backend]:
    """Yield what answers: the target in this process, or an engine with it."""
    if config.regenerate.backend != VLLM:
        target = load_alone(config.model, config.hardware, dtype, device)
        yield partial(by_transformers, target=target, chat=chat, decode=autoregressive_queue)
        return
    console.print("starting vLLM")
    with start_engine(
        config.model,
        config.vllm,
        dtype,
        device,
        longest=chat.room,
        folder=Path(config.regenerate.out).expanduser().with_suffix(".vllm"),
        asked="regenerate.backend=vllm",
    ) as engine:
        in_flight = 2 * config.vllm.max_num_seqs  # the engine never waits for a prompt
        yield partial(by_vllm, engine=engine, chat=chat, in_flight=in_flight)
