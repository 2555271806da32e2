"""Answers by any OpenAI-compatible endpoint, through the `openai` client."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.data.asked import LAST, Asked
from drafttrain.regenerate.config import RegenerateConfig
from drafttrain.regenerate.dialogue import Dialogue, Failure, Outcome, Row

GIVE_UP_AFTER = 8  # failed conversations in a row: then it is the endpoint, not the prompts
VLLM = "vllm"  # how a vLLM server says whose model it serves
NO_KEY = "none"  # local servers ask for none, and the client wants some text


@dataclass(frozen=True)
class Served:
    """What the endpoint serves."""

    model: str
    owner: str  # "vllm" for a vLLM server, which takes and tells more than others

    def extra(self, config: RegenerateConfig) -> dict[str, Any]:
        """Return what is asked beyond the protocol: nothing, unless it is needed or known."""
        if self.owner == VLLM:
            # The model's generation_config would set what is not said; 0 is off. The tokens come
            # back as they were chosen: a text tokenises to others.
            return {
                "top_k": config.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "return_token_ids": True,
            }
        return {"top_k": config.top_k} if config.top_k else {}


def by_endpoint(asked: Sequence[Asked], config: RegenerateConfig) -> Iterator[list[Outcome]]:
    """Yield outcomes as they come, with `concurrency` conversations under way at a time.

    The client tries again after what passes (no connection, timeouts, 408, 409, 429, 5xx), with
    growing, jittered pauses or the one that the endpoint asks for. A conversation that still fails
    is an outcome too, asked again by the next run; ValueError after several in a row, since then it
    is the endpoint.
    """
    with asyncio.Runner() as runner:
        client = open_client(config)
        tasks: set[asyncio.Task[Outcome]] = set()
        try:
            served = runner.run(find_model(client, config))
            rest, failed = iter(asked), 0
            while True:
                while len(tasks) < config.concurrency and (one := next(rest, None)) is not None:
                    talk = converse(client, served, Dialogue(one, config.turns == LAST), config)
                    tasks.add(runner.get_loop().create_task(talk))
                if not tasks:
                    return
                done, tasks = runner.run(_first(tasks))
                outcomes = [task.result() for task in done]
                yield outcomes
                for outcome in outcomes:
                    failed = 0 if isinstance(outcome, Row) else failed + (not outcome.final)
                    if failed >= GIVE_UP_AFTER and isinstance(outcome, Failure):
                        raise ValueError(
                            f"regenerate.base_url={config.base_url} failed {failed} conversations "
                            f"in a row, the last with: {outcome.reason}: {outcome.detail}; what is "
                            "answered stays, and the same command goes on from there"
                        )
        finally:
            for task in tasks:
                task.cancel()
            runner.run(_close(client, tasks))


def served_by(config: RegenerateConfig) -> Served:
    """Return what the endpoint serves; ValueError if it cannot be asked, or must be told which."""

    async def ask() -> Served:
        client = open_client(config)
        try:
            return await find_model(client, config)
        finally:
            await client.close()

    return asyncio.run(ask())


def open_client(config: RegenerateConfig) -> Any:
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
        api_key=os.environ.get(config.api_key_variable) or NO_KEY,
        timeout=config.timeout,
        max_retries=config.max_retries,
    )


async def find_model(client: Any, config: RegenerateConfig) -> Served:
    """Ask the endpoint for its models and return the one to use."""
    import openai

    try:
        served = {model.id: model.owned_by async for model in client.models.list()}
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        given = "is set" if os.environ.get(config.api_key_variable) else "is not set"
        raise ValueError(
            f"regenerate.base_url={config.base_url} must accept the key in "
            f"{config.api_key_variable} (regenerate.api_key_variable), which {given}: "
            f"{describe(error)}"
        ) from None
    except openai.APIStatusError as error:
        if config.served_model is None:
            raise ValueError(
                f"regenerate.served_model must name the model, because {config.base_url} does not "
                f"list its own ({describe(error)})"
            ) from None
        return Served(config.served_model, "")
    except openai.APIError as error:
        raise ValueError(
            f"regenerate.base_url={config.base_url} must be the address of an OpenAI-compatible "
            f"endpoint, ending in /v1 for most, which cannot be reached: {describe(error)}"
        ) from None
    names = ", ".join(served) or "none"
    if config.served_model is None and len(served) != 1:
        raise ValueError(
            f"regenerate.served_model must name one of the models of {config.base_url}: {names}"
        )
    model = config.served_model or next(iter(served))
    if model not in served:
        raise ValueError(
            f"regenerate.served_model must be a model of {config.base_url} ({names}), got {model}"
        )
    return Served(model, str(served[model]))


async def converse(
    client: Any, served: Served, dialogue: Dialogue, config: RegenerateConfig
) -> Outcome:
    """Ask every turn of a conversation in order and return what it has become."""
    import openai

    while dialogue.outcome is None:
        try:
            completion = await client.chat.completions.create(
                model=served.model,
                messages=[{"role": m.role, "content": m.content} for m in dialogue.messages],
                temperature=config.temperature,
                top_p=config.top_p,
                max_tokens=config.max_new_tokens,
                seed=dialogue.seed(config.seed),
                extra_body=served.extra(config),
            )
        except openai.BadRequestError as error:  # this prompt: too long, or refused
            dialogue.stop("refused by the endpoint", describe(error), final=True)
        except openai.APIError as error:
            dialogue.stop("the endpoint failed", describe(error), final=False)
        else:
            take(dialogue, completion)
    return dialogue.outcome


def take(dialogue: Dialogue, completion: Any) -> None:
    """Take in a completion."""
    if not completion.choices:
        return dialogue.stop("the endpoint failed", "no choices", final=False)
    choice = completion.choices[0]
    if choice.finish_reason not in ("stop", "length"):
        return dialogue.stop(f"ended by {choice.finish_reason}", "", final=True)
    tokens = (choice.model_extra or {}).get("token_ids")
    count = completion.usage.completion_tokens if completion.usage else len(tokens or [])
    return dialogue.take(
        choice.message.content or "", tokens, count, choice.finish_reason == "stop"
    )


def describe(error: Exception) -> str:
    """Return what an error of the client says, in one line."""
    status = getattr(error, "status_code", None)
    body = getattr(error, "body", None)
    text = body.get("message") if isinstance(body, dict) else None
    said = " ".join(str(text or error).split())[:300]
    return f"{status}: {said}" if status else f"{type(error).__name__}: {said}"


async def _first(
    tasks: set["asyncio.Task[Outcome]"],
) -> tuple[set["asyncio.Task[Outcome]"], set["asyncio.Task[Outcome]"]]:
    return await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _close(client: Any, tasks: set["asyncio.Task[Outcome]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
