"""A target and a drafter that are ready to be talked to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafttrain.commands.setup.api import stream_of
from drafttrain.commands.setup.evaluation import Loaded, as_tuned, capture_as, load
from drafttrain.commands.setup.target_and_drafter import inflate_as
from drafttrain.config.sections import ChatConfig
from drafttrain.core.chance import SeededChance
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.records import Message
from drafttrain.data.template import Template
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.stream import Stream
from drafttrain.evaluation.config import EvalConfig
from drafttrain.runtime.hardware import choose_draft_dtype, dtype_name
from drafttrain.runtime.terminal import console

PLAIN_STEPS = 8  # of the target alone, which the drafter's speed is compared with


@dataclass(frozen=True)
class Talk:
    """What answers, and how."""

    loaded: Loaded
    how: EvalConfig
    template: Template
    seed: int

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt; ValueError if the target has no chat template."""
        return prompt_tokens(messages, self.loaded.target.tokenizer, self.template)

    def stream(self, tokens: Sequence[int]) -> Stream:
        """Return the answer to a prompt, not begun; it is cut where the context ends.

        ValueError for a prompt that leaves no room for an answer.
        """
        target, how, depth = self.loaded.target, self.how, int(self.how.depth)
        room = target.spec.max_positions - len(tokens) - how.policy_at(depth).depth
        if room < 1:
            raise ValueError(
                f"the text so far has {len(tokens):,} tokens and leaves no room for an answer in "
                f"the {target.spec.context}"
            )
        most = min(how.max_new_tokens, room)
        drafter = self.loaded.given.drafter
        return stream_of(target, drafter, tokens, how, depth, self.seed, most)

    def plain_tokens_per_second(self, tokens: Sequence[int]) -> float:
        """Return the speed of the target alone after a prompt, from a few steps."""
        target = self.loaded.target
        room = target.spec.max_positions - len(tokens)
        stats = autoregressive_decode(
            target,
            tokens,
            sampling=self.how.sampling,
            max_new_tokens=max(1, min(PLAIN_STEPS + 1, room)),
            chance=SeededChance(self.seed),
            stop_tokens=(),
        ).stats
        taken = stats.verify_s + stats.other_s
        return stats.num_target_passes / taken if taken else 0.0


def ready_to_talk(config: ChatConfig) -> Talk:
    """Load what answers, and print notes on it. ValueError for whatever does not fit."""
    folder = config.run.dir
    how = as_tuned(config.eval, folder)
    loaded = load(config, how)
    given, target, device = loaded.given, loaded.target, loaded.device
    as_tuned(config.eval, folder, given.weights)  # for these very weights?
    dtype = choose_draft_dtype(config.hardware, device, loaded.choice.dtype)
    drafter = given.drafter.to(device, dtype)
    capture_as(target, [drafter])
    if widened := inflate_as(config.model, target, [drafter]):
        console.print(widened)
    how.policy_at(int(how.depth)).check(drafter, how.draft_sampling)
    name = Path(folder).name if given.checkpoint else drafter.config.name
    console.print(
        f"{target.spec.name} answers with {name}, {how.policy_at(int(how.depth)).describe()}, "
        f"{dtype_name(loaded.choice.dtype)}, {loaded.choice.threads} threads on {device}"
    )
    return Talk(loaded, how, config.data.text_format, config.run.seed)
