"""Answers from any OpenAI-compatible endpoint, through the `openai` client."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from drafttrain.data.conversations import Conversation
from drafttrain.data.template import Template
from drafttrain.runtime.signals import Stopped, StopRequest
from drafttrain.runtime.terminal import console
from drafttrain.runtime.untrusted_input import Count, UntrustedError, shown, typed
from drafttrain.target.answers.config import RegenerateSettings
from drafttrain.target.answers.dialogue import Dialogue, Failure, Outcome

GIVE_UP_AFTER = 8  # failed conversations in a row: the endpoint is at fault, not the prompts
NONE_OF = 32  # conversations refused before any answer: the settings are at fault
VLLM = "vllm"  # the owner that a vLLM server states for its model
NO_KEY = "none"  # local servers need no key, but the client requires some text
PATIENCE_S = 10.0  # for the list of models, which needs no computation
SILENCE_S = 30.0  # without an answer before a log line says so
CHECK_S = 0.5  # until a request to stop is seen
MAX_REPLY = 8 << 20  # bytes; an answer of 100,000 tokens with their ids has one million
SECRET = 8  # characters of a key that is one: servers of one's own take any word
SHOWN = 300  # characters shown of an endpoint's error


T = TypeVar("T")


@dataclass(frozen=True)
class ListedModel:
    id: str
    owned_by: str | None = None


@dataclass(frozen=True)
class Models:
    data: list[ListedModel]


@dataclass(frozen=True)
class Reply:
    """The model's reply; some servers return its reasoning separately, under either name."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Choice:
    message: Reply
    finish_reason: str | None = None
    token_ids: list[Count] | None = None  # vLLM's


@dataclass(frozen=True)
class Usage:
    completion_tokens: Count


@dataclass(frozen=True)
class Completion:
    choices: list[Choice]
    model: str | None = None  # that answered
    usage: Usage | None = None


@dataclass(frozen=True)
class Served:
    model: str
    owner: str  # "vllm" for a vLLM server, which accepts and returns more fields than others


# The model's generation_config would set what is left out; 0 is off. The token ids are asked for,
# because the text may tokenise to others.
TOLD_VLLM = {"min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}


def by_endpoint(
    asked: Sequence[Conversation],
    config: RegenerateSettings,
    template: Template,
    stop: StopRequest,
) -> Iterator[list[Outcome]]:
    """Yield outcomes as they come, with `concurrency` conversations in flight at a time.

    A list may be empty: after each the caller obeys a request to stop, which is deferred meanwhile,
    since raised within asyncio it would leave coroutines that nobody awaits.

    The client retries transient errors (no connection, 408, 409, 429, 5xx) within
    regenerate.timeout per answer. A conversation that still fails is an outcome too, and the next
    run asks it again. ValueError after several failures in a row, which mean that the endpoint is
    at fault, and where the endpoint refuses every conversation.
    """
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_tell)
        client = open_client(config)
        tasks: set[asyncio.Task[Outcome]] = set()
        try:
            served = runner.run(find_model(client, config))
            rest, failed, refused, answered = iter(asked), 0, 0, False
            last = told = time.monotonic()
            while True:
                with stop.deferred():
                    while len(tasks) < config.concurrency and (one := next(rest, None)) is not None:
                        talk = converse(client, served, Dialogue(one), config, template)
                        tasks.add(runner.get_loop().create_task(talk))
                    if not tasks:
                        return
                    waiting = asyncio.wait(
                        tasks, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    done, tasks = runner.run(waiting)
                now = time.monotonic()
                if not done:
                    if now - told >= SILENCE_S:
                        told = now
                        console.print(
                            f"no answer from {config.base_url} for {now - last:.0f} s; after "
                            f"regenerate.timeout={config.timeout:g} s a request is given up"
                        )
                    yield []
                    continue
                last = told = now
                outcomes = [task.result() for task in done]
                yield outcomes
                for outcome in outcomes:
                    if isinstance(outcome, Failure):
                        failed += not outcome.final
                        refused += outcome.final
                        give_up(outcome, failed, 0 if answered else refused, config)
                    else:
                        answered, failed = True, 0
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                runner.run(asyncio.wait(tasks))
            runner.run(client.close())


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error in a callback, except a request to stop, which is handled elsewhere."""
    if not isinstance(context.get("exception"), Stopped):
        loop.default_exception_handler(context)


def give_up(last: Failure, failed: int, refused: int, config: RegenerateSettings) -> None:
    """Raise ValueError where further requests would fail in the same way.

    failed: conversations in a row that could be asked again. refused: those that could not, while
    none has been answered.
    """
    why = f"{last.reason}: {last.detail}" if last.detail else last.reason
    if failed >= GIVE_UP_AFTER:
        raise ValueError(
            f"regenerate.base_url={config.base_url} failed {failed} conversations in a row, the "
            f"last with: {why}; what is answered stays, and the same command resumes there"
        )
    if refused >= NONE_OF:
        raise ValueError(
            f"regenerate.base_url={config.base_url} answered none of {refused} conversations, the "
            f"last: {why}; change the settings (regenerate.max_new_tokens, "
            "regenerate.served_model) or the prompts, and name another regenerate.out"
        )


def served_by(config: RegenerateSettings) -> Served:
    """Return the served model; ValueError if the endpoint fails or a model must be named."""

    async def ask() -> Served:
        async with open_client(config) as client:
            return await find_model(client, config)

    return asyncio.run(ask())


def open_client(config: RegenerateSettings) -> Any:
    """Return the client; ValueError where the package is not installed."""
    try:
        import openai
    except ImportError:
        raise ValueError(
            "regenerate.backend=openai needs the package openai, an extra of drafttrain: "
            "pip install 'drafttrain[openai]'"
        ) from None
    return openai.AsyncOpenAI(
        base_url=config.base_url,
        api_key=_key(config) or NO_KEY,
        timeout=config.timeout,
        max_retries=config.max_retries,
        http_client=openai.DefaultAsyncHttpxClient(
            headers={"Accept-Encoding": "identity"},
            event_hooks={"response": [_bound]},
            follow_redirects=False,  # prompts and key go to the address that was given, only
        ),
    )


def _key(config: RegenerateSettings) -> str | None:
    return os.environ.get(config.api_key_variable)


async def _bound(response: Any) -> None:
    """Limit the size of a response to MAX_REPLY bytes, whatever its headers state."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise OSError("the reply is compressed, which was not asked for")
    # Older clients use httpx, newer ones httpx2: each needs its own kind of stream.
    stream = response.stream
    kind: Any = next(kind for kind in type(stream).__mro__ if kind.__name__ == "AsyncByteStream")

    class Bounded(kind):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in stream:
                size += len(chunk)
                if size > MAX_REPLY:
                    raise OSError(f"the reply has more than {MAX_REPLY >> 20} MB")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    response.stream = Bounded()


async def find_model(client: Any, config: RegenerateSettings) -> Served:
    """Ask the endpoint for its models and return the one to use; this takes seconds at most."""
    import openai

    quick = client.with_options(max_retries=1, timeout=PATIENCE_S)
    must = "must be the address of an OpenAI-compatible endpoint, ending in /v1 for most"
    try:
        async with asyncio.timeout(PATIENCE_S):
            response = await quick.models.with_raw_response.list()
        listed = _read(Models, response.content, "its list of models", config)
    except Exception as error:  # clients raise many kinds of error for bad replies
        fault, status = describe(error, config), getattr(error, "status_code", 0)
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            given = "is set" if _key(config) else "is not set"
            problem = (
                f"must accept the key in {config.api_key_variable} "
                f"(regenerate.api_key_variable), which {given}: {fault}"
            )
        elif status == 429 or (status >= 500 and status != 501):
            problem = f"is there, but cannot answer now: {fault}; try again when it can"
        elif 300 <= status < 400:
            problem = f"{must}, got one that {fault}"
        elif isinstance(error, openai.APIStatusError):
            if config.served_model is not None:  # an endpoint need not list its models
                return Served(config.served_model, "")
            problem = (
                f"{must}, and lists no models: {fault}; correct it, or name the model with "
                "regenerate.served_model"
            )
        elif isinstance(error, TimeoutError):
            problem = (
                f"did not list its models within {PATIENCE_S:g} s; see that it runs, and is not "
                "behind something that takes the request and does not answer"
            )
        else:
            reached = isinstance(error, openai.APIConnectionError)
            why = "which cannot be reached" if reached else "got"
            problem = f"{must}, {why}: {describe(error.__cause__ or error, config)}"
        raise ValueError(f"regenerate.base_url={config.base_url} {problem}") from None
    models = {model.id: model.owned_by for model in listed.data}
    names = shown(", ".join(models) or "none", SHOWN)
    if config.served_model is None and len(models) != 1:
        raise ValueError(
            f"regenerate.served_model must name one of the models of {config.base_url}: {names}"
        )
    model = config.served_model or next(iter(models))
    if model not in models:
        raise ValueError(
            f"regenerate.served_model must be a model of {config.base_url} ({names}), got {model}"
        )
    return Served(model, str(models[model]))


async def converse(
    client: Any,
    served: Served,
    dialogue: Dialogue,
    config: RegenerateSettings,
    template: Template,
) -> Outcome:
    """Ask every turn of a conversation in order and return its outcome."""
    import openai

    extra: dict[str, Any] = TOLD_VLLM if served.owner == VLLM else {}
    if config.top_k or extra:
        extra = {"top_k": config.top_k, **extra}
    if template.kwargs:
        extra = {"chat_template_kwargs": template.kwargs, **extra}
    while dialogue.outcome is None:
        try:
            async with asyncio.timeout(config.timeout):  # retries included
                response = await client.chat.completions.with_raw_response.create(
                    model=served.model,
                    messages=[{"role": m.role, "content": m.content} for m in dialogue.messages],
                    temperature=config.temperature,
                    top_p=config.top_p,
                    max_tokens=config.max_new_tokens,
                    seed=dialogue.seed(config.seed),
                    extra_body=extra,
                )
            completion = _read(Completion, response.content, "the reply", config)
        except openai.BadRequestError as error:  # this prompt: too long, or refused
            dialogue.stop("refused by the endpoint", describe(error, config), final=True)
        except TimeoutError:
            waited = f"no answer within regenerate.timeout={config.timeout:g} s"
            dialogue.stop("the endpoint failed", waited, final=False)
        except UntrustedError as error:
            dialogue.stop("a reply that cannot be read", describe(error, config), final=False)
        except Exception as error:  # as in `find_model`
            dialogue.stop("the endpoint failed", describe(error, config), final=False)
        else:
            take(dialogue, completion, served.model)
    return dialogue.outcome


def _read(kind: type[T], content: bytes, name: str, config: RegenerateSettings) -> T:
    """Parse a reply; UntrustedError where it repeats the key, which would be written to files."""
    parsed, key = typed(kind, content, name), _key(config) or ""
    if len(key) >= SECRET and key in repr(parsed):
        raise UntrustedError(f"{name} repeats the key in {config.api_key_variable}")
    return parsed


def take(dialogue: Dialogue, completion: Completion, model: str) -> None:
    """Add a reply to a conversation, or end it there."""
    by = completion.model or model
    # A name may stand for a dated version, or for a folder: gpt-4o for gpt-4o-2024-08-06.
    if by not in model and model not in by:
        told = f"{shown(by, 100)} instead of {shown(model, 100)}"
        return dialogue.stop("answered by another model", told, final=False)
    if not completion.choices:
        return dialogue.stop("a reply that cannot be read", "no choices", final=False)
    choice = completion.choices[0]
    if choice.finish_reason not in ("stop", "length"):
        return dialogue.stop(f"ended by {shown(choice.finish_reason, 40)}", "", final=True)
    message, tokens = choice.message, choice.token_ids
    if tokens is None and (message.reasoning_content or message.reasoning):
        return dialogue.stop(
            "reasoning kept apart from the answer, and no tokens",
            "serve without a reasoning parser, or by vLLM, which gives the tokens too",
            final=True,
        )
    count = completion.usage.completion_tokens if completion.usage else len(tokens or [])
    finished = choice.finish_reason == "stop"
    return dialogue.take(message.content or "", tokens or None, count, finished)


def describe(error: BaseException, config: RegenerateSettings) -> str:
    """Return what is wrong with the endpoint's reply, in one line, with the key hidden."""
    status, body = getattr(error, "status_code", None), getattr(error, "body", None)
    text = str((isinstance(body, dict) and body.get("message")) or error)
    if redirects := 300 <= (status or 0) < 400:
        response: Any = getattr(error, "response", None)
        text = str(response.headers.get("Location"))
    if key := _key(config):
        text = text.replace(key, "[the key]")
    text = shown(" ".join(text.split()), SHOWN)
    if redirects:
        return f"sends requests on to {text}, which is not followed ({status})"
    if isinstance(error, UntrustedError):
        return text
    return f"{status}: {text}" if status else f"{type(error).__name__}: {text}"
