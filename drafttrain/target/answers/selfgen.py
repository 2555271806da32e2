"""Conversations written by the target alone: it samples a user turn, then answers it."""

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from drafttrain.core.chance import Purpose, SeededChance, draw_of
from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.tokenizer import text_of, token_ids
from drafttrain.core.types import Sample, TargetSpec
from drafttrain.data.chat import answer_turn
from drafttrain.data.conversations import SelfgenConfig
from drafttrain.data.records import Message
from drafttrain.data.skips import NothingUsable, SkipReport
from drafttrain.data.template import ChatFormat, Template, template_fingerprint
from drafttrain.runtime.disk import digest_of, refuse_links, write_whole
from drafttrain.runtime.journal import append_records
from drafttrain.runtime.lock import hold
from drafttrain.runtime.ranks import ALONE, Ranks
from drafttrain.runtime.terminal import console, progress
from drafttrain.runtime.untrusted_input import Count, shown
from drafttrain.target.answers.answers_file import read_answers
from drafttrain.target.model import Target

FORMAT = 1  # of the cache: a higher number has old caches written anew
CONVERSATIONS = "conversations.jsonl"
EMIT = draw_of(0, Purpose.EMIT)
DROP_FROM = 8  # finished rows are dropped once they are one in this many
USER, ANSWER = range(2)  # what a row is writing


@dataclass(frozen=True)
class Frame:
    """The chat template's tokens around the two turns, and the tokens that end the turns."""

    opening: list[int]
    closing: list[int]  # from the end of the user's turn to the start of the answer
    answer_stops: list[int]
    user_stops: list[int]  # includes the first token of `closing`
    first_forbidden: list[int]  # tokens that cannot begin a user turn: it would be empty
    forbidden: list[int]  # tokens that a user turn cannot contain: special ones that do not end it


@dataclass(frozen=True)
class Written:
    index: Count
    tokens: list[Count]
    num_prompt_tokens: Count
    finished: bool  # False: the answer reached data.max_answer_tokens


def selfgen(
    target: Target, config: SelfgenConfig, show: bool = True, ranks: Ranks = ALONE
) -> tuple[list[Sample], SkipReport]:
    """Return conversations that the target writes, as the tokens that it sampled.

    Given only the chat template's opening, it samples a user turn (never empty, and without special
    tokens), then the answer. An answer that reaches data.max_answer_tokens is kept without an end
    of turn. Conversation i depends on the target, the seed and i, and not on its batch, except for
    rounding. Results go to data.cache_dir batch by batch, under a fingerprint of target and
    settings: an interrupted run resumes, and asking for more conversations writes only those.
    ValueError if they cannot fit, or if nothing usable was written. ranks: they share the batches;
    every rank gets all conversations, and rank 0 alone reads and writes the files.
    """
    frame = frame_of(target, config.text_format)
    check_room(target, config, frame)
    folder = Path(config.cache_dir).expanduser() / fingerprint(target, config, frame)
    count, size, show = config.num_conversations, config.batch_size, show and ranks.is_main
    refuse_links(folder.parent, folder.name)
    written = cached(folder, target.spec, ranks)
    with ExitStack() as stack:
        if not all(index in written for index in range(count)):
            if ranks.is_main:  # wait for another run that writes the same ones, then reuse them
                held = hold(folder, "data.cache_dir", "selfgen", console.print, patience=math.inf)
                stack.enter_context(held)
            written = cached(folder, target.spec, ranks)
        missing = [index for index in range(count) if index not in written]
        if show and not missing:
            console.print(f"selfgen: {count:,} conversations from {folder}")
        elif show:
            console.print(
                f"selfgen: {target.spec.name} writes {len(missing):,} conversations to {folder}"
            )
        if missing and ranks.is_main:
            save_settings(folder, target, config)
        shown = show and bool(missing)
        tick = stack.enter_context(progress("selfgen", count, count - len(missing), shown))
        for first in range(0, len(missing), size * ranks.world_size):
            start = first + size * ranks.rank
            own: list[Written] = []
            with target.in_step():
                if start < len(missing):
                    own = write(target, config, frame, missing[start : start + size], tick)
            found = ranks.gather_objects([vars(one) for one in own])
            batches = [[Written(**one) for one in batch] for batch in found]
            for batch in filter(None, batches):
                if ranks.is_main:
                    append(folder, batch, frame, target.tokenizer, config.text_format)
                written.update({conversation.index: conversation for conversation in batch})
            tick(sum(map(len, batches)) - len(own))
    return to_samples([written[index] for index in range(count)], folder)


def cached(folder: Path, spec: TargetSpec, ranks: Ranks) -> dict[int, Written]:
    plain = [vars(one) for one in load(folder, spec).values()] if ranks.is_main else []
    return {one["index"]: Written(**one) for one in ranks.broadcast_object(plain)}


def frame_of(target: Target, template: Template) -> Frame:
    """Return the frame that the chat template gives, tokenised as a prompt is."""
    tokenizer, size = target.tokenizer, target.spec.vocab_size
    form = ChatFormat(tokenizer, template)

    def need(holds: bool, what: str, got: str) -> None:
        if not holds:
            raise ValueError(
                f"data=selfgen needs a chat template that {what}, and that of "
                f"model={target.spec.name} {got}; use data=jsonl data.path=FILE"
            )

    def ids(text: str) -> list[int]:
        return token_ids(tokenizer, text, special=False)

    need(not form.problem, "writes a question and an answer", f"does not: {shown(form.problem)}")
    opening, closing, tail = ids(form.opening), ids(form.prompt_closing), ids(form.tail)
    need(bool(opening), "opens with some token", "opens with the user's words")
    largest = max([*opening, *closing, *tail], default=0)
    need(largest < size, f"has tokens of its model, which has {size:,}", f"has token {largest:,}")
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    specials = {token for token in added if token < size}  # the head has no more
    stops = {*target.spec.eos_token_ids, *specials.intersection(tail[:1])}
    user_stops = {*stops, closing[0]}
    return Frame(
        opening,
        closing,
        sorted(stops),
        sorted(user_stops),
        sorted(specials | user_stops),
        sorted(specials - user_stops),
    )


def check_room(target: Target, config: SelfgenConfig, frame: Frame) -> None:
    around = len(frame.opening) + len(frame.closing)
    longest = around + config.max_user_tokens + config.max_answer_tokens
    for name, limit in (
        ("data.max_length", config.max_length),
        ("the target's positions", target.spec.max_positions),
    ):
        if longest > limit:
            raise ValueError(
                f"data.max_user_tokens + data.max_answer_tokens + {around} of the chat template"
                f" must fit in {name}, got {longest} > {limit}; lower them"
            )


def write(
    target: Target,
    config: SelfgenConfig,
    frame: Frame,
    indices: list[int],
    tick: Callable[..., None],
) -> list[Written]:
    """Write a batch of conversations in lock step: every pass adds one token to every row.

    No padding is needed: all rows begin alike, and forced tokens are fed like sampled ones.
    """
    chance, keys, closing = SeededChance(config.seed), np.array(indices), np.array(frame.closing)
    start = len(frame.opening)
    capacity = start + config.max_user_tokens + len(closing) + config.max_answer_tokens
    tokens = np.zeros((len(indices), capacity), dtype=np.int64)
    tokens[:, :start] = frame.opening
    closes = np.full(len(indices), capacity)  # where the closing begins, once the user's turn ends
    length = np.zeros(len(indices), dtype=np.int64)  # 0 until the answer ends
    rows = np.arange(len(indices))  # those still in the target's batch
    cache = target.begin()
    began, num_written = time.monotonic(), 0
    fed = tokens[:, :start]
    for position in range(start, capacity):
        logits, _ = target.step(cache, torch.from_numpy(fed).to(target.device), last_only=True)
        asks = position < closes[rows]
        answers = (position >= closes[rows] + len(closing)) & (length[rows] == 0)
        for kind, writes in ((USER, asks), (ANSWER, answers)):
            here = np.flatnonzero(writes)
            if len(here):
                scored = logits[torch.from_numpy(here).to(target.device), 0]
                probs = distribution(scored, kind, position == start, config, frame)
                where = [position] * len(here)
                chosen = chance.choose(probs, keys[rows[here]].tolist(), where, EMIT)
                tokens[rows[here], position] = chosen.cpu().numpy()
        num_written += len(rows)
        new = tokens[rows, position]
        # A user turn ends by itself or at its limit; either way the closing begins here.
        ends = np.isin(new, frame.user_stops) | (position - start == config.max_user_tokens)
        closes[rows[asks & ends]] = position
        offset = position - closes[rows]  # in the closing, and then in the answer
        forced = (offset >= 0) & (offset < len(closing))
        tokens[rows[forced], position] = closing[offset[forced]]
        ends = np.isin(new, frame.answer_stops)
        ends |= offset == len(closing) + config.max_answer_tokens - 1
        over = rows[answers & ends]
        length[over] = position + 1
        if len(over):
            speed = num_written / (time.monotonic() - began)
            tick(len(over), f"{speed:,.0f} tokens/s")
        active = length[rows] == 0
        if not active.any():
            break
        if (~active).sum() * DROP_FROM >= len(rows):
            target.select(cache, np.flatnonzero(active).tolist())
            rows = rows[active]
        fed = tokens[rows, position : position + 1]
    return [
        Written(
            index,
            tokens[row, : length[row]].tolist(),
            int(closes[row]) + len(closing),
            bool(tokens[row, length[row] - 1] in frame.answer_stops),
        )
        for row, index in enumerate(indices)
    ]


def distribution(
    logits: Float[Tensor, "rows vocab"], kind: int, first: bool, config: SelfgenConfig, frame: Frame
) -> Float[Tensor, "rows vocab"]:
    """Return the distribution of a turn's next token; `logits` is overwritten."""
    temperature = config.answer_temperature
    if kind == USER:
        temperature = config.user_temperature
        logits[:, frame.first_forbidden if first else frame.forbidden] = -torch.inf
    return probabilities(logits, Sampling(temperature, config.top_k, config.top_p))


def to_samples(written: list[Written], folder: Path) -> tuple[list[Sample], SkipReport]:
    report = SkipReport(len(written))
    samples = []
    for conversation in written:
        if conversation.finished and len(conversation.tokens) == conversation.num_prompt_tokens + 1:
            report.skip("empty answer", f"conversation {conversation.index}")
            continue
        tokens = torch.tensor(conversation.tokens)
        mask = torch.arange(len(tokens)) >= conversation.num_prompt_tokens
        samples.append(Sample(tokens, mask, conversation.index))
    if not samples:
        what = "data=selfgen must give usable conversations, got none"
        raise NothingUsable(what, report, f"look into {folder}, or use data=jsonl data.path=FILE")
    return samples, report


def fingerprint(target: Target, config: SelfgenConfig, frame: Frame) -> str:
    """Return a hash of what conversation i depends on; their number and batch size do not count."""
    settings = settings_of(target, config) | {"frame": vars(frame), "format": FORMAT}
    return digest_of(settings)[:16]


def settings_of(target: Target, config: SelfgenConfig) -> dict[str, Any]:
    """Return the target and the settings that the conversations depend on."""
    keys = ("seed", "user_temperature", "answer_temperature", "top_k", "top_p")
    return {
        "target": target.spec.fingerprint,
        "dtype": str(target.dtype),
        **{key: getattr(config, key) for key in (*keys, "max_user_tokens", "max_answer_tokens")},
    }


def save_settings(folder: Path, target: Target, config: SelfgenConfig) -> None:
    """Write the settings behind the fingerprint, for people to read."""
    about = {
        "chat template": template_fingerprint(target.tokenizer, config.text_format),
        "template_kwargs": config.template_kwargs,
        "template_date": config.template_date,
    }
    settings = {"model": target.spec.name, **settings_of(target, config), **about}
    write_whole(folder / "settings.json", json.dumps(settings, indent=2) + "\n")


def append(
    folder: Path, batch: list[Written], frame: Frame, tokenizer: Any, template: Template
) -> None:
    """Add a batch to the cache: tokens for training, and messages that data=jsonl can read too."""
    records = []
    for one in batch:
        user = one.tokens[len(frame.opening) : one.num_prompt_tokens - len(frame.closing)]
        answer = one.tokens[one.num_prompt_tokens : len(one.tokens) - one.finished]
        asked = Message("user", text_of(tokenizer, user))
        turns = [asked, answer_turn([asked], answer, tokenizer, template)]
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        records.append({"messages": messages, **vars(one)})
    append_records(folder / CONVERSATIONS, records)


def load(folder: Path, spec: TargetSpec) -> dict[int, Written]:
    """Read the cache; a torn last line is left out, and the next writer removes it."""
    file, written = folder / CONVERSATIONS, {}
    for found in read_answers(file, Written, "selfgen") if file.is_file() else ():
        whole = 0 < found.num_prompt_tokens < len(found.tokens)
        if not whole or max(found.tokens) >= spec.vocab_size:
            raise ValueError(
                f"{file}: conversation {found.index} must have tokens of {spec.name}, a prompt and "
                f"an answer, and has not; remove its line, or {folder}, and it is written again"
            )
        written[found.index] = found
    return written
