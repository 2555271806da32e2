"""A target that answers with a drafter, for `chat`, `generate` and the Python API."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drafttrain.commands.setup.evaluation import NO_DEPTH_PAYS, as_tuned, load
from drafttrain.commands.setup.target_and_drafter import GivenDrafter, changed_target, inflate_as
from drafttrain.config.sections import ChatConfig
from drafttrain.core.ops.packed_weights import pack
from drafttrain.data.chat import answer_turn, prompt_tokens
from drafttrain.data.records import Message, Unusable
from drafttrain.data.template import Template
from drafttrain.decode.loop import describe_rule, is_lossless
from drafttrain.decode.policy import Policy
from drafttrain.decode.rows import check_room, check_tokens, context_of
from drafttrain.decode.stream import Stream
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.config import EvalConfig
from drafttrain.evaluation.measure import DraftMethod, decoders
from drafttrain.evaluation.tune_choice import TUNED
from drafttrain.runtime.hardware import choose_draft_dtype, dtype_name
from drafttrain.runtime.terminal import console
from drafttrain.target.model import Target
from drafttrain.target.pretrained.inflate import count_parameters

PLAIN_STEPS = 8  # of the target alone, which the drafter's speed is compared with


@dataclass(frozen=True)
class Talk:
    """What answers, and how."""

    target: Target
    drafter: Drafter | None  # None: the target decodes alone
    how: EvalConfig
    template: Template
    seed: int
    cut: bool  # whether an answer that does not fit ends with the context, or is refused

    @property
    def policy(self) -> Policy:
        """How proposals grow."""
        return self.how.policy_at(int(self.how.depth))

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt; ValueError if the chat template, or the target, cannot take it."""
        try:
            tokens = prompt_tokens(messages, self.target.tokenizer, self.template)
        except Unusable as error:
            raise ValueError(f"{error.reason} {error.detail}".strip()) from error
        check_tokens(self.target.spec, [tokens])
        return tokens

    def stream(self, messages: Sequence[Message], row: int = 0) -> Stream:
        """Return the answer to a conversation; decoding begins when its first piece is asked for.

        row: the number of the conversation, so that equal ones have answers of their own.
        ValueError for one that leaves no room for an answer.
        """
        target, drafter, how, tokens = self.target, self.drafter, self.how, self.tokens(messages)
        depth = 0 if drafter is None else self.policy.depth
        limit = how.max_new_tokens
        if self.cut:
            limit = min(limit, self.room_after(len(tokens), depth))
        check_room(target, [tokens], limit, drafter, depth)
        methods = [] if drafter is None else [DraftMethod("", depth, drafter, self.policy)]
        for method in methods:
            method.policy.check(method.drafter, how.draft_sampling)
        limited = replace(how, max_new_tokens=limit)
        *_, decode = decoders(target, methods, limited, how.sampling, self.seed).values()
        stream = Stream(decode([tokens], rows=[row]), target.tokenizer, limit)
        about = {"tokenizer": target.tokenizer, "template": self.template}
        stream.turn_of = partial(answer_turn, list(messages), **about)
        return stream

    def room_after(self, num_tokens: int, depth: int) -> int:
        """Return how many tokens an answer to so many may have; ValueError if none fits."""
        spec, drafters = self.target.spec, [] if self.drafter is None else [self.drafter]
        positions, owner = context_of(spec, drafters)
        room = positions - num_tokens - depth
        if room < 1:
            context = spec.context if owner == spec.name else f"{positions:,} positions of {owner}"
            raise ValueError(
                f"the text so far has {num_tokens:,} tokens and leaves no room for an answer in "
                f"the {context}; shorten it, or begin anew"
            )
        return room

    def plain_tokens_per_second(self, messages: Sequence[Message]) -> float | None:
        """Return the speed of the target alone after a prompt, from a few steps, warmed up."""
        few = replace(self.how, max_new_tokens=PLAIN_STEPS + 1)
        plain = replace(self, drafter=None, how=few)
        return [plain.stream(messages).rest().tokens_per_second for _ in range(2)][-1]


def check_alone(how: EvalConfig) -> None:
    """Raise ValueError for settings that mean nothing to a single answer."""
    how.require("engine", how.engine == "drafttrain", "be drafttrain for an answer")
    how.require("batch_size", how.batch_size == 1, "be 1 for an answer")
    for key in ("depths", "temperatures", "batch_sizes"):
        how.require(key, not getattr(how, key), "be empty for an answer")


def ready_to_talk(config: ChatConfig) -> tuple[Talk, GivenDrafter]:
    """Load what answers, and print notes on it: to stderr where answers go to a pipe.

    ValueError for whatever does not fit.
    """
    check_alone(config.eval)
    with nullcontext() if console.is_terminal else console.capture() as notes:
        talk, given = _ready(config)
    if notes is not None and sys.stdin.isatty():  # somebody is there who waits
        sys.stderr.write(notes.get())
    elif notes is not None:  # a script is only warned
        warning = changed_target(given, config.model, talk.target.spec)
        sys.stderr.writelines(f"{line}\n" for line in warning)
    return talk, given


def _ready(config: ChatConfig) -> tuple[Talk, GivenDrafter]:
    folder = config.run.dir
    how = as_tuned(config.eval, folder)
    loaded = load(config, replace(how, max_new_tokens=1))  # an answer is cut where it must be
    given, target, device, how = loaded.given, loaded.target, loaded.device, loaded.settings
    as_tuned(config.eval, folder, given.weights)  # for these very weights?
    if widened := inflate_as(config.model, target, [given.drafter]):
        console.print(widened)
    size = count_parameters(given.drafter)
    dtype = choose_draft_dtype(config.hardware, device, loaded.choice.dtype, size)
    drafter = given.drafter.to(device, dtype)
    pack(drafter)
    how = replace(how, max_new_tokens=config.chat.max_new_tokens)
    drafts = how.drafts("")  # not where `tune` chose not to speculate
    template, seed = config.data.text_format, config.run.seed
    talk = Talk(target, drafter if drafts else None, how, template, seed, cut=True)
    talk.policy.check(drafter, how.draft_sampling)
    name = Path(folder).name if given.checkpoint else drafter.config.name
    rule = ""
    if not is_lossless(how.acceptance_rule, how.sampling):
        rule = f", by {describe_rule(how.sampling, how.acceptance_rule)}"
    drafting = f"with {name}, {talk.policy.describe()}{rule}"
    if not drafts:
        drafting = f"alone: {NO_DEPTH_PAYS.format(file=Path(folder) / TUNED)}"
    console.print(
        f"{target.spec.name} answers {drafting}, "
        f"{dtype_name(loaded.choice.dtype)}, {loaded.choice.threads} threads on {device}"
    )
    return talk, given
