"""A target and a drafter that are ready to be talked to."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drafttrain.commands.setup.api import check_alone, stream_of
from drafttrain.commands.setup.evaluation import NO_DEPTH_PAYS, Loaded, as_tuned, load
from drafttrain.commands.setup.target_and_drafter import changed_target, inflate_as
from drafttrain.config.sections import ChatConfig
from drafttrain.data.chat import answer_turn, prompt_tokens
from drafttrain.data.records import Message, Unusable
from drafttrain.decode.loop import describe_rule, is_lossless
from drafttrain.decode.policy import Policy
from drafttrain.decode.rows import context_of
from drafttrain.decode.stream import Stream
from drafttrain.evaluation.tune_choice import TUNED
from drafttrain.runtime.hardware import choose_draft_dtype, dtype_name
from drafttrain.runtime.terminal import console
from drafttrain.target.pretrained.inflate import count_parameters

PLAIN_STEPS = 8  # of the target alone, which the drafter's speed is compared with
# Settings of `eval` that say how to decode; the others are of measurements.
DECODING = (
    *("policy", "tree", "tree_replacement", "tree_nodes", "tree_width", "tree_temperature"),
    *("latency_ms", "depth"),
    *("temperature", "top_k", "top_p", "draft_temperature", "draft_top_k", "draft_top_p", "rule"),
    *("typical_epsilon", "typical_delta", "lenience", "stop_strings", "from_tune"),
)


@dataclass(frozen=True)
class Talk:
    """What answers, and how."""

    loaded: Loaded
    config: ChatConfig  # with what `tune` chose

    @property
    def policy(self) -> Policy:
        """How proposals grow."""
        return self.config.eval.policy_at(int(self.config.eval.depth))

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted: not where `tune` chose not to speculate."""
        return self.config.eval.drafts("")

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt; ValueError if the target has no chat template, or that refuses it."""
        try:
            template = self.config.data.text_format
            return prompt_tokens(messages, self.loaded.target.tokenizer, template)
        except Unusable as error:
            raise ValueError(f"{error.reason} {error.detail}".strip()) from error

    def stream(self, tokens: Sequence[int], row: int = 0) -> Stream:
        """Return the answer to a prompt, not begun; it is cut where the shorter context ends.

        row: the number of the prompt, so that equal ones have answers of their own. ValueError for
        a prompt that leaves no room for an answer.
        """
        target, drafter = self.loaded.target, self.loaded.given.drafter
        positions, owner = context_of(target.spec, [drafter])
        room = positions - len(tokens) - self.policy.depth
        if room < 1:
            own = owner == target.spec.name
            place = target.spec.context if own else f"{positions:,} positions of {owner}"
            raise ValueError(
                f"the text so far has {len(tokens):,} tokens and leaves no room for an answer in "
                f"the {place}; shorten it, or begin anew"
            )
        how, most = self.config.eval, min(self.config.chat.max_new_tokens, room)
        drafting = drafter if self.drafts else None
        return stream_of(target, drafting, tokens, how, self.config.run.seed, most, row)

    def answer(self, messages: Sequence[Message], stream: Stream) -> Message:
        """Return an answer to `messages` as the turn that follows them."""
        template = self.config.data.text_format
        return answer_turn(messages, stream.tokens, self.loaded.target.tokenizer, template)

    def plain_tokens_per_second(self, tokens: Sequence[int]) -> float | None:
        """Return the speed of the target alone after a prompt, from a few steps, warmed up."""
        how, seed = self.config.eval, self.config.run.seed
        most = min(PLAIN_STEPS + 1, self.loaded.target.spec.max_positions - len(tokens))
        told = self.loaded.target, None, tokens, how, seed, most
        return [stream_of(*told).rest().tokens_per_second for _ in range(2)][-1]

    @property
    def conditions(self) -> dict[str, Any]:
        """What an answer depends on, beside the prompt."""
        config, loaded = self.config, self.loaded
        return {
            "drafter": [loaded.given.weights, asdict(config.drafter)],
            "target": [loaded.target.spec.fingerprint, config.model.inflate],
            "dtype": dtype_name(loaded.choice.dtype),
            "seed": config.run.seed,
            "chat": [config.chat.system, config.chat.max_new_tokens],
            "eval": {key: getattr(config.eval, key) for key in DECODING},
            "template": asdict(config.data.text_format),
        }


def ready_to_talk(config: ChatConfig) -> Talk:
    """Load what answers, and print notes on it: to stderr where answers go to a pipe.

    ValueError for whatever does not fit.
    """
    check_alone(config.eval)
    if console.is_terminal:
        return _ready(config)
    with console.capture() as notes:
        talk = _ready(config)
    if sys.stdin.isatty():  # somebody is there who waits
        sys.stderr.write(notes.get())
    else:  # a script is only warned
        told = talk.loaded.given, config.model, talk.loaded.target.spec
        sys.stderr.writelines(f"{line}\n" for line in changed_target(*told))
    return talk


def _ready(config: ChatConfig) -> Talk:
    folder = config.run.dir
    how = as_tuned(config.eval, folder)
    loaded = load(config, replace(how, max_new_tokens=1))  # an answer is cut where it must be
    given, target, device = loaded.given, loaded.target, loaded.device
    as_tuned(config.eval, folder, given.weights)  # for these very weights?
    if widened := inflate_as(config.model, target, [given.drafter]):
        console.print(widened)
    size = count_parameters(given.drafter)
    dtype = choose_draft_dtype(config.hardware, device, loaded.choice.dtype, size)
    drafter = given.drafter.to(device, dtype)
    talk = Talk(loaded, replace(config, eval=how))
    talk.policy.check(drafter, how.draft_sampling)
    name = Path(folder).name if given.checkpoint else drafter.config.name
    rule = ""
    if not is_lossless(how.acceptance_rule, how.sampling):
        rule = f", by {describe_rule(how.sampling, how.acceptance_rule)}"
    drafting = f"with {name}, {talk.policy.describe()}{rule}"
    if not talk.drafts:
        drafting = f"alone: {NO_DEPTH_PAYS.format(file=Path(folder) / TUNED)}"
    console.print(
        f"{target.spec.name} answers {drafting}, "
        f"{dtype_name(loaded.choice.dtype)}, {loaded.choice.threads} threads on {device}"
    )
    return talk
