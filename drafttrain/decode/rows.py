"""The rows of a decoding batch: their outputs, when they end, and what they cost."""

from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from drafttrain.core.tokenizer import text_of
from drafttrain.core.types import Decoded, DecodeStats, TargetSpec
from drafttrain.drafters.base import Drafter
from drafttrain.target.model import Target

Key = TypeVar("Key", bound=Hashable)


class Stops:
    """What ends an output: a stop token, a stop string once it is complete, or the limit."""

    def __init__(
        self, target: Target, limit: int, tokens: Collection[int] | None, strings: Sequence[str]
    ) -> None:
        self.limit = limit
        self.tokens = frozenset(target.spec.eos_token_ids if tokens is None else tokens)
        self.strings = tuple(strings)
        if not all(self.strings):
            raise ValueError("a stop string must not be empty")
        self.tokenizer = target.tokenizer
        # Each token adds at least one byte of text, so a string is within as many last tokens as it
        # has bytes; the 4 more are there because a text's first token may lose its space.
        self.window = max((len(text.encode()) for text in self.strings), default=0) + 4

    def cut(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, bool]:
        """Return how many of the new tokens reach the output, and whether it ends with them."""
        room = self.limit - len(output)
        for index, token in enumerate(new[:room]):
            if token in self.tokens or (self.strings and self._spelled(output, new[: index + 1])):
                return index + 1, True
        return min(len(new), room), len(new) >= room

    def stopped(self, output: Sequence[int]) -> bool:
        """Whether an output that has ended did so by a stop, perhaps just at the limit."""
        return output[-1] in self.tokens or (bool(self.strings) and self._spelled(output, []))

    def _spelled(self, output: Sequence[int], new: Sequence[int]) -> bool:
        tail = [*output[-self.window :], *new][-self.window :]
        text = text_of(self.tokenizer, tail, skip_special_tokens=False)
        return any(string in text for string in self.strings)


@dataclass
class Row:
    """One row: its name (the key of its chance), its output, and what it cost."""

    name: int
    num_prompt_tokens: int
    output: list[int] = field(default_factory=list)
    stats: DecodeStats = field(default_factory=DecodeStats)
    depth: int = 0  # of its last proposal
    cut: bool = False  # whether it ended at the limit, without a stop


class Rows:
    """All rows of a batch, and those still active."""

    def __init__(self, prompts: Sequence[Sequence[int]], names: Sequence[int]) -> None:
        self.all = [
            Row(name, len(prompt)) for name, prompt in zip(names, prompts, strict=True)
        ]  # fmt: skip
        self.active = list(self.all)

    @property
    def names(self) -> list[int]:
        """The names of the active rows."""
        return [row.name for row in self.active]

    @property
    def starts(self) -> list[int]:
        """How many tokens each active row has committed, prompt included."""
        return [row.num_prompt_tokens + len(row.output) for row in self.active]

    def commit(self, new: Sequence[Sequence[int]], stops: Stops) -> tuple[list[int], list[int]]:
        """Commit each row's new tokens; return how many were kept, and the places of active rows.

        The other rows have ended.
        """
        num_kept, kept = [], []
        for place, (row, tokens) in enumerate(zip(self.active, new, strict=True)):
            count, ended = stops.cut(row.output, tokens)
            row.output.extend(tokens[:count])
            row.cut = ended and not stops.stopped(row.output)
            num_kept.append(count)
            if not ended:
                kept.append(place)
        self.active = [self.active[place] for place in kept]
        return num_kept, kept

    def decoded(self) -> list[Decoded]:
        """Return every row's output, in the order of the prompts."""
        return [Decoded(tuple(row.output), row.stats) for row in self.all]


# A decoding pass by pass: it yields the rows of each pass, once their new tokens are in their
# outputs, and returns what was decoded. Seconds of the rows are counted at its end. Who takes the
# passes does so in torch's inference mode, which a generator would leave on where it is used.
Passes = Generator[list[Row], None, list[Decoded]]
Told = ParamSpec("Told")


@torch.inference_mode()
def at_once(passes: Passes) -> list[Decoded]:
    """Decode to the end."""
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


def in_turns(decoding: Mapping[Key, Passes], num_tokens: int) -> dict[Key, list[Decoded]]:
    """Decode by several methods in turns: that which has written least goes on, for `num_tokens`.

    So all of them are at the same place of the output at nearly the same time.
    """
    decoded: dict[Key, list[Decoded]] = {}
    with torch.inference_mode():
        rows = {name: list(next(passes)) for name, passes in decoding.items()}
        while len(decoded) < len(decoding):
            written = {
                name: sum(len(row.output) for row in rows[name])
                for name in decoding
                if name not in decoded
            }
            name = min(written, key=lambda each: written[each])
            while sum(len(row.output) for row in rows[name]) < written[name] + num_tokens:
                try:
                    next(decoding[name])
                except StopIteration as end:
                    decoded[name] = end.value
                    break
    return decoded


def to_the_end(decode: Callable[Told, Passes]) -> Callable[Told, list[Decoded]]:
    """Return the function that decodes at once."""

    @wraps(decode)
    def whole(*args: Told.args, **kwargs: Told.kwargs) -> list[Decoded]:
        return at_once(decode(*args, **kwargs))

    whole.__annotations__ = {**decode.__annotations__, "return": list[Decoded]}
    return whole


def context_of(spec: TargetSpec, drafters: Sequence[Drafter]) -> tuple[int, str]:
    """Return the shortest context of a target and its drafters, in positions, and its owner."""
    theirs = [(each.max_positions, f"drafter={each.config.name}") for each in drafters]
    stated = [(positions, who) for positions, who in theirs if positions is not None]
    return min([(spec.max_positions, spec.name), *stated])


def check_tokens(spec: TargetSpec, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError for a prompt without tokens, or with one that the target does not have."""
    if not all(prompts):
        raise ValueError("the prompt is empty: it must hold at least one token")
    size, largest = spec.vocab_size, max(map(max, prompts))
    if largest >= size:
        raise ValueError(
            f"the prompt must hold tokens that {spec.name} has, which has {size:,}, got "
            f"token {largest:,}: its tokenizer has more than the model; leave that text out"
        )


def check_room(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    drafter: Drafter | None = None,
    depth: int = 0,
) -> int:
    """Return the positions that decoding may need; ValueError if a context is too short."""
    check_tokens(target.spec, prompts)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    longest = max(len(prompt) for prompt in prompts)
    needed = longest + max_new_tokens + depth
    positions, owner = context_of(target.spec, [] if drafter is None else [drafter])
    if needed > positions:
        place = target.spec.context
        if positions < target.spec.max_positions:
            place = f"{positions} positions of {owner}"
        raise ValueError(
            f"prompt and output must fit in the {place}: the prompt has {longest}, "
            f"max_new_tokens is {max_new_tokens}, the depth {depth}; shorten one of them"
        )
    return needed
