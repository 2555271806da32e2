"""Conversations to tokens and loss mask: each one is tokenised once, as a whole."""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from drafttrain.core.tokenizer import encoded as tokenise
from drafttrain.core.tokenizer import text_of, token_ids
from drafttrain.core.types import Sample, TargetSpec
from drafttrain.data.conversations import (
    ANSWERS,
    Conversation,
    Conversations,
    DataConfig,
    PlainText,
)
from drafttrain.data.records import Message, Recorded, Unusable
from drafttrain.data.skips import NothingUsable, SkipReport
from drafttrain.data.template import (
    ANSWER,
    NONE,
    USER,
    ChatFormat,
    Located,
    Span,
    Template,
    TemplateLimitError,
    render,
)
from drafttrain.data.thoughts import after_thought, marks_of
from drafttrain.runtime.settings import require
from drafttrain.runtime.terminal import progress

CHUNK = 512  # conversations tokenised at a time
SHOW_FROM = 4096  # conversations from which a progress bar is worth it
PLAIN_PROMPT = 32  # tokens of plain text that serve as a prompt
CUT_CHARACTER = "\ufffd"  # what decoding gives for the first bytes of one
REWRITTEN = "earlier answers are context only: later turns have them in other words or tokens"
FOREIGN = "recorded answers have another target's tokens: their text is trained"
REPEATED = "conversations repeat another, token for token: equal ones are held out or trained alike"


def encode(
    conversations: Conversations, tokenizer: Any, config: DataConfig
) -> tuple[list[Sample], SkipReport]:
    """Return tokens and loss mask of each conversation, and what was skipped.

    The mask covers what the assistant writes, with the token that ends its turn; with
    data.template=none, every token. A token that begins before an answer belongs to the header,
    and the first token is never trained. Recorded answers are trained with their tokens. Nothing
    is truncated: what is longer than data.max_length is skipped. ValueError if the tokenizer has
    no chat template, or if nothing can be used.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} must be a fast one (tokenizer.json), which"
            " tells where tokens stand in the text; convert it with Transformers and save it"
        )
    plain = config.template == NONE
    form = None if plain else ChatFormat(tokenizer, config.text_format)
    longest = config.max_length * max(map(len, tokenizer.get_vocab()))  # characters, at the most
    report = SkipReport(len(conversations))
    samples: list[Sample] = []
    shown = len(conversations) >= SHOW_FROM
    with progress("tokenising", len(conversations), show=shown) as tick:
        for first in range(0, len(conversations), CHUNK):
            chunk = conversations[first : first + CHUNK]
            kept: list[tuple[Conversation | PlainText, Located]] = []
            for conversation in chunk:
                with report.skipping(conversation.source):
                    located = located_of(conversation, form)
                    if len(located.text) > longest:
                        raise too_long(config, f"{len(located.text)} characters")
                    kept.append((conversation, located))
            # Tokenised together, on several cores. A template writes its own special tokens.
            encoded: Any = kept and tokenise(
                tokenizer,
                [located.text for _, located in kept],
                add_special_tokens=plain,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
            for place, (conversation, located) in enumerate(kept):
                # An empty text gives an empty list: the reshape keeps it two-dimensional.
                offsets = np.array(encoded["offset_mapping"][place]).reshape(-1, 2)
                text = Tokenized(located.text, encoded["input_ids"][place], offsets)
                with report.skipping(conversation.source):
                    tokens, mask = sample_of(located, text, tokenizer, config, report)
                    trained = torch.from_numpy(mask)
                    samples.append(Sample(torch.tensor(tokens), trained, conversation.index))
            tick(len(chunk))
    if not samples:
        advice = "see what was skipped"
        raise NothingUsable("data must hold conversations that fit, got none", report, advice)
    return samples, report


def located_of(conversation: Conversation | PlainText, form: ChatFormat | None) -> Located:
    """Return a conversation as text, and which parts are trained: all of a plain text."""
    if form is None:
        assert isinstance(conversation, PlainText), "data.template=none reads plain text"
        return Located(conversation.text, [Span(0, len(conversation.text), 0)])
    assert isinstance(conversation, Conversation), "a chat template is for turns"
    answers = [turn.content for turn in conversation.messages if turn.role == "assistant"]
    pairs = list(zip(conversation.recorded, answers, strict=False))
    own = [own_words(recorded, content, form.tokenizer) for recorded, content in pairs]
    try:
        located = form.locate(conversation.messages, own)
    except TemplateLimitError as error:
        raise ValueError(f"{conversation.source}: {error}") from None
    num_foreign = sum(ours != recorded for ours, (recorded, _) in zip(own, pairs, strict=True))
    return replace(located, num_foreign=num_foreign)


def own_words(recorded: Recorded | None, content: str, tokenizer: Any) -> Recorded | None:
    """Return a recorded answer, without its tokens where they are another target's.

    The text may be a part of the tokens: without reasoning, or what the template writes around it.
    """
    if recorded is None or recorded.tokens is None:
        return recorded
    text = text_of(tokenizer, recorded.tokens, skip_special_tokens=True)
    ours = content.rstrip(CUT_CHARACTER).strip() in text
    return recorded if ours else Recorded(None, recorded.finished)


@dataclass(frozen=True)
class Tokenized:
    """A text as tokens, and the characters at which each begins and ends."""

    text: str
    ids: list[int]
    offsets: np.ndarray  # (tokens, 2)

    def is_cut(self, at: int, tokenizer: Any) -> bool:
        """Return whether the tokens before this character are those of the text before it."""
        starts, ends = self.offsets.T
        if ((starts < at) & (ends > at)).any():
            return False
        if " " not in self.text[max(at - 1, 0) : at + 1]:
            return True
        # Some tokenizers leave the spaces of a token out of its offsets.
        before = tokenise(tokenizer, [self.text[:at]], add_special_tokens=False, verbose=False)
        ids = before["input_ids"][0]
        return self.ids[: len(ids)] == list(ids)

    def cut(self, places: list[int], tokenizer: Any) -> "Tokenized":
        """Return the text with its parts between these characters tokenised apart."""
        ids: list[int] = []
        offsets = [np.zeros((0, 2), dtype=int)]
        bounds = list(itertools.pairwise([0, *sorted(places), len(self.text)]))
        pieces = tokenise(
            tokenizer,
            [self.text[begin:end] for begin, end in bounds],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        for place, (begin, _) in enumerate(bounds):
            ids += pieces["input_ids"][place]
            found = np.array(pieces["offset_mapping"][place], dtype=int)
            offsets.append(found.reshape(-1, 2) + begin)
        return Tokenized(self.text, ids, np.concatenate(offsets))


def sample_of(
    located: Located, text: Tokenized, tokenizer: Any, config: DataConfig, report: SkipReport
) -> tuple[list[int], np.ndarray]:
    """Return a conversation's tokens and loss mask; Unusable for one that cannot be trained on.

    No token spans the end of the last prompt or the last answer: the target never has such a one.
    An earlier answer is context where a token spans its beginning.
    """
    recorded, spans, rewritten = located.recorded, located.spans, located.num_rewritten
    if recorded is None and config.template != NONE:
        last = spans[-1]
        edges = {last.prompt, last.start, last.end}
        spanned = [at for at in edges if not text.is_cut(at, tokenizer)]
        text = text.cut(spanned, tokenizer) if spanned else text
    (starts, ends), mask = text.offsets.T, np.zeros(len(text.ids), dtype=bool)
    for place, span in enumerate(spans):
        inside = (starts >= span.start) & (starts < span.end) & (ends <= span.end)
        own = None if span.recorded is None else span.recorded.tokens
        earlier = recorded is not None or place < len(spans) - 1
        whole = not earlier or all(text.is_cut(at, tokenizer) for at in {span.prompt, span.start})
        # For later turns the text is tokenised anew: it is trained where that changes no token.
        if not whole or (own is not None and np.array(text.ids)[inside].tolist() != list(own)):
            rewritten += 1
            continue
        mask |= inside
    tokens = text.ids
    if recorded is not None:
        assert recorded.tokens is not None
        if recorded.prompt is not None:
            tokens, mask = list(recorded.prompt), np.zeros(len(recorded.prompt), dtype=bool)
        tokens = [*tokens, *recorded.tokens]
        mask = np.append(mask, np.ones(len(recorded.tokens), dtype=bool))
    mask[:1] = False
    if len(tokens) > config.max_length:
        raise too_long(config, f"{len(tokens)} tokens")
    if not mask.any():
        raise Unusable("no token to train on")
    report.note(REWRITTEN, rewritten)
    report.note(FOREIGN, located.num_foreign)
    return tokens, mask


def too_long(config: DataConfig, detail: str) -> Unusable:
    """Return the error for a conversation that does not fit."""
    return Unusable(f"longer than data.max_length={config.max_length} tokens", detail)


def within_limits(
    samples: list[Sample], spec: TargetSpec, sources: Mapping[int, str]
) -> tuple[list[Sample], SkipReport]:
    """Return the samples that the target can read, and what was skipped.

    A tokenizer may have more tokens than the model, and recorded tokens may be another target's.
    sources: file and line of each sample, by its index.
    """
    report, kept = SkipReport(len(samples)), []
    for sample in samples:
        source, length = sources[sample.index], len(sample.tokens)
        largest = int(sample.tokens.max())
        if largest >= spec.vocab_size:
            reason = f"a token beyond the {spec.vocab_size:,} of {spec.name}"
            report.skip(reason, source, f"token {largest:,}")
        elif length > spec.max_positions:
            report.skip(f"longer than the {spec.context}", source, f"{length} tokens")
        else:
            kept.append(sample)
    if not kept:
        must = "data must hold conversations that fit the target, got none"
        advice = "shorten them, or leave out recorded tokens of another target"
        raise NothingUsable(must, report, advice)
    return kept, report


def prompt_tokens(messages: Sequence[Message], tokenizer: Any, template: Template) -> list[int]:
    """Return the prompt that asks for the next answer: for validation, evaluation and chat.

    With template "none" it is the concatenated contents.
    """
    if template.kind == NONE:
        text = "\n\n".join(turn.content for turn in messages)
        return token_ids(tokenizer, text)
    text = render(messages, tokenizer, template, for_answer=True)
    return token_ids(tokenizer, text, special=False)


def answer_turn(
    history: Sequence[Message], tokens: Sequence[int], tokenizer: Any, template: Template
) -> Message:
    """Return a generated answer as the turn that follows `history` in later prompts.

    Its content is the text without special tokens, and without what the chat template writes around
    a content by itself, such as gpt-oss's `<|channel|>final<|message|>`. A thought stays where the
    template drops it from later prompts, or repeats it as it was generated; elsewhere it is cut.
    """
    content = text_of(tokenizer, tokens, skip_special_tokens=True)
    if template.kind == NONE:
        return Message("assistant", content)
    words = {each.content for each in tokenizer.added_tokens_decoder.values() if each.special}
    special = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")

    def later(content: str) -> str:
        turns = [*history, Message("assistant", content), Message("user", USER)]
        return render(turns, tokenizer, template).partition(USER)[0]

    try:
        prompt = render(history, tokenizer, template, for_answer=True)
        body, _, tail = later(ANSWER).partition(ANSWER)
        header = body[len(prompt) :] if body.startswith(prompt) else ""
        text = text_of(tokenizer, tokens, skip_special_tokens=False)
        for found in special.finditer(tail):
            text = text.removesuffix(tail[: found.end()])
        answer = text.removeprefix(header)
        if special.search(header) and not marks_of(header):  # a thought may precede it
            answer = text.rpartition(header)[2]
        content, without = special.sub("", answer), special.sub("", after_thought(answer))
        if marks_of(answer):
            texts = later(content), later(without), prompt + text
            kept, cut, generated = ("".join(each.split()) for each in texts)
            content = content if kept == cut or kept.startswith(generated) else without
    except Unusable:  # the template refuses an answer, or another turn, here
        pass
    return Message("assistant", content)


def prompt_of(sample: Sample) -> list[int]:
    """Return the first prompt of a sample: all tokens before the first trained one.

    Plain text has no turns: its first tokens are the prompt, at most half of it.
    """
    first = int(sample.loss_mask.int().argmax())
    if first == 1:
        first = max(1, min(PLAIN_PROMPT, len(sample.tokens) // 2))
    return sample.tokens[:first].tolist()


def check_holdout(available: int, count: int) -> None:
    """Raise ValueError if holding out `count` conversations leaves none to train on."""
    need = f"be less than the {available} usable conversations"
    require(count < available, "data.holdout", need, count, "; lower it, or give more data")


def split_holdout(
    samples: Sequence[Sample], count: int, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples for training and the `count` held out, both in their old order.

    Equal samples stay on one side: a set of them that would exceed `count` is trained on, unless
    there is no smaller set; then it is held out whole.
    """
    check_holdout(len(samples), count)
    sets: dict[bytes, list[int]] = {}
    for place, sample in enumerate(samples):
        sets.setdefault(_content(sample), []).append(place)
    chosen: set[int] = set()
    drawn = np.random.default_rng(seed).permutation(len(samples)).tolist()
    for place in drawn:
        if len(chosen) == count:
            break
        alike = sets[_content(samples[place])]
        if place not in chosen and len(chosen) + len(alike) <= count:
            chosen.update(alike)
    if count and not chosen:
        need = "be 0 where all conversations are the same"
        require(len(sets) > 1, "data.holdout", need, count, "; give others too")
        chosen.update(sets[_content(samples[drawn[0]])])
    kept = [sample for place, sample in enumerate(samples) if place not in chosen]
    return kept, [sample for place, sample in enumerate(samples) if place in chosen]


def as_trained(samples: Sequence[Sample], train_on: str) -> list[Sample]:
    """Return the samples with the tokens trained that data.train_on names.

    all: every token but the first, which nothing predicts. Held-out samples stay as they are: where
    their answers begin, their prompts end.
    """
    if train_on == ANSWERS:
        return list(samples)
    return [replace(sample, loss_mask=torch.arange(len(sample.tokens)) > 0) for sample in samples]


def num_repeated(samples: Sequence[Sample]) -> int:
    """Return how many samples are equal to one before them."""
    return len(samples) - len({_content(sample) for sample in samples})


def _content(sample: Sample) -> bytes:
    return hashlib.sha256(sample.tokens.numpy().tobytes()).digest()
