"""Conversations to tokens and loss mask: each one is tokenised once, as a whole."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from drafttrain.data.conversations import Conversation, Conversations, DataConfig, PlainText
from drafttrain.data.records import Message, Unusable
from drafttrain.data.skips import NothingUsable, SkipReport
from drafttrain.data.template import assistant_spans, chat_format, render, require_template
from drafttrain.terminal import progress
from drafttrain.types import Sample

CHUNK = 512  # conversations tokenised at a time
SHOW_FROM = 4096  # conversations from which a progress bar is worth it
PLAIN_PROMPT = 32  # tokens of plain text that serve as a prompt

Spans = list[tuple[int, int]]
Item = TypeVar("Item")


def encode(
    conversations: Conversations, tokenizer: Any, config: DataConfig, show: bool = False
) -> tuple[list[Sample], SkipReport]:
    """Return tokens and loss mask of each conversation, and what was skipped.

    The mask covers what the assistant writes, the token that ends its turn included, in every
    turn; with data.template=none, every token. The first token has nothing before it to be
    predicted from and is never trained. Nothing is truncated: what is longer than data.max_length
    is skipped. ValueError if the tokenizer has no chat template, or if nothing can be used.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} must be a fast one (tokenizer.json), which"
            " tells where tokens stand in the text; convert it with Transformers and save it"
        )
    locate = chat_locator(tokenizer) if config.template == "chat" else plain_locator
    report = SkipReport(len(conversations))
    samples: list[Sample] = []
    shown = show and len(conversations) >= SHOW_FROM
    with progress("tokenising", len(conversations), show=shown) as tick:
        for first in range(0, len(conversations), CHUNK):
            chunk = conversations[first : first + CHUNK]
            texts: list[str] = []
            spans: list[Spans] = []
            kept: list[Conversation | PlainText] = []
            for conversation in chunk:
                try:
                    text, where = locate(conversation)
                except Unusable as error:
                    report.skip(error.reason, conversation.source, error.detail)
                    continue
                texts.append(text)
                spans.append(where)
                kept.append(conversation)
            encoded = tokenize(texts, tokenizer, add_special_tokens=config.template == "none")
            for conversation, where, (tokens, starts) in zip(kept, spans, encoded, strict=True):
                if len(tokens) > config.max_length:
                    reason = f"longer than data.max_length={config.max_length} tokens"
                    report.skip(reason, conversation.source, f"{len(tokens)} tokens")
                    continue
                mask = mask_of(starts, where)
                if not mask.any():
                    report.skip("no token to train on", conversation.source)
                    continue
                samples.append(
                    Sample(torch.tensor(tokens), torch.from_numpy(mask), conversation.index)
                )
            tick(len(chunk))
    if not samples:
        advice = "see what was skipped"
        raise NothingUsable("data must hold conversations that fit, got none", report, advice)
    return samples, report


def chat_locator(tokenizer: Any) -> Any:
    """Return the function that renders a conversation and finds the assistant's spans."""
    form = chat_format(tokenizer)
    words = {token.content for token in tokenizer.added_tokens_decoder.values()}
    words.update(tokenizer.all_special_tokens)
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    specials = re.compile(rf"\s*(?:{'|'.join(map(re.escape, longest_first))})")

    def locate(conversation: Conversation | PlainText) -> tuple[str, Spans]:
        if isinstance(conversation, PlainText):
            raise Unusable("text without turns, which needs data.template=none")
        return assistant_spans(conversation.messages, tokenizer, form, specials)

    return locate


def plain_locator(conversation: Conversation | PlainText) -> tuple[str, Spans]:
    """Return plain text, all of which is trained."""
    if isinstance(conversation, Conversation):
        raise Unusable('conversation where data.template=none takes {"text": ...}')
    return conversation.text, [(0, len(conversation.text))]


def tokenize(
    texts: list[str], tokenizer: Any, add_special_tokens: bool
) -> list[tuple[list[int], np.ndarray]]:
    """Return ids of each text, and at which character each id begins."""
    if not texts:
        return []
    encoded = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,  # a template writes its own
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    # An empty text gives an empty list: the reshape keeps it two-dimensional.
    starts = [np.array(offsets).reshape(-1, 2)[:, 0] for offsets in encoded["offset_mapping"]]
    return list(zip(encoded["input_ids"], starts, strict=True))


def mask_of(starts: np.ndarray, spans: Spans) -> np.ndarray:
    """Return which tokens begin in a span; the first one never counts.

    A token that begins before its span is the header's: text that runs into it (an answer that
    begins with a newline, say) cannot be told apart from it when generating.
    """
    mask = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        mask |= (starts >= start) & (starts < end)
    mask[:1] = False
    return mask


def prompt_tokens(
    messages: Sequence[Message | dict[str, str]], tokenizer: Any, template: str
) -> list[int]:
    """Return the prompt that asks for the next answer: for validation, evaluation and chat.

    `messages` are turns, as `Message` or as {"role", "content"}. The template writes its own
    special tokens, so none is doubled; with template "none" the contents follow one another.
    """
    turns = [
        turn if isinstance(turn, Message) else Message(turn["role"], turn["content"])
        for turn in messages
    ]
    if template == "none":
        text = "\n\n".join(turn.content for turn in turns)
        return list(tokenizer(text)["input_ids"])
    require_template(tokenizer)
    text = render(turns, tokenizer, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_of(sample: Sample) -> list[int]:
    """Return the first prompt of a sample: all before the first trained token.

    Plain text has no turns: its first tokens serve, at most half of it.
    """
    first = int(sample.loss_mask.int().argmax())
    if first == 1:
        first = max(1, min(PLAIN_PROMPT, len(sample.tokens) // 2))
    return sample.tokens[:first].tolist()


def check_holdout(available: int, count: int) -> None:
    """Raise ValueError if holding out `count` conversations leaves none to train on."""
    if count >= available:
        raise ValueError(
            f"data.holdout must be less than the {available} usable conversations, got {count};"
            " lower it, or give more data"
        )


def split_holdout(items: Sequence[Item], count: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Return the items for training and the `count` held out, both in their old order."""
    check_holdout(len(items), count)
    chosen = set(np.random.default_rng(seed).permutation(len(items))[:count].tolist())
    kept = [item for place, item in enumerate(items) if place not in chosen]
    return kept, [item for place, item in enumerate(items) if place in chosen]
