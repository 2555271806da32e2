"""The data passed between stations: plain dataclasses, no behaviour beyond what fields imply.

Shapes are words: batch (rows), seq (positions), hidden (the target's width), vocab (the target's
vocabulary), draft_vocab (the drafter's), node (one drafted token of a proposal), depth (drafted
tokens along one path).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from drafttrain.core.readout import Readout
from drafttrain.core.transfer import send_numbers
from drafttrain.core.tree import Branches, Tree

PAD_DOCUMENT = -1


@dataclass(frozen=True)
class Sample:
    """One conversation as tokens; `index` is its place in the data set and its name everywhere."""

    tokens: Int[Tensor, " seq"]
    loss_mask: Bool[Tensor, " seq"]  # tokens the assistant wrote, end of turn included
    index: int


@dataclass(frozen=True)
class Batch:
    """Rows of conversations, padded right; a packed row holds several documents.

    `document` is the index of the conversation that a token belongs to (PAD_DOCUMENT for padding);
    attention never crosses documents. `positions` count from 0 within a document. `loss_mask` is
    true for tokens that the assistant wrote: the tokens whose *prediction* is trained.
    """

    tokens: Int[Tensor, "batch seq"]
    loss_mask: Bool[Tensor, "batch seq"]
    positions: Int[Tensor, "batch seq"]
    document: Int[Tensor, "batch seq"]


def changed_part(before: str, now: str) -> str:
    """Return, for a message, in which part of a target two unequal fingerprints differ."""
    if ("-" in before) != ("-" in now):
        return (
            f"fingerprints {before[:16]} and {now[:16]} cannot be compared: one of them was made "
            "by an older version of drafttrain, or is of random weights"
        )
    kinds = ("configuration", "weights", "adapter")
    pairs = zip_longest(kinds, before.split("-", 2), now.split("-", 2))
    parts = [str(kind) for kind, was, new in pairs if was != new]
    verb = "differ" if len(parts) > 1 or parts == ["weights"] else "differs"
    told = f"fingerprint {brief(before)}, now {brief(now)}"
    return f"the {' and '.join(parts)} {verb}: {told}"


def brief(fingerprint: str) -> str:
    """Return a target's fingerprint as messages show it: the beginning of each of its parts."""
    return "-".join([fingerprint[:16], *(part[:8] for part in fingerprint.split("-", 2)[2:])])


@dataclass(frozen=True)
class TargetSpec:
    """The properties of a target that are known before any weight is loaded."""

    name: str
    fingerprint: str  # of the configuration and the weights: features and drafters are bound to it
    architecture: str  # Transformers' model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    embedding_scale: float = 1.0  # the factor that it multiplies embeddings by
    rope_scaling: dict[str, Any] | None = None  # of its rotary positions, as Transformers has it
    unused_token_id: int | None = None  # one that the tokenizer never writes, if there is any
    limited_by: str = ""  # why max_positions is less than the model was made for; "" if it is not

    @property
    def context(self) -> str:
        """The number of positions, and why there are no more, for messages."""
        why = f" ({self.limited_by})" if self.limited_by else ""
        return f"{self.max_positions} positions of model={self.name}{why}"

    def check_layers(self, captures: Sequence[int]) -> None:
        """Raise ValueError for a layer that the target does not have; see `TargetFeatures`."""
        for layer in captures:
            if not 0 <= layer <= self.num_layers:
                raise ValueError(
                    f"captured layers must be in 0..{self.num_layers} for model={self.name}, got "
                    f"{layer}"
                )


@dataclass(frozen=True)
class TargetFeatures:
    """Hidden states of the target: the same from an online, a stored or a served target.

    `captured[i]` is Transformers' `hidden_states[i]`: the *input* of layer i, before any norm
    (i = num_layers: the last layer's output before the final norm). `final_hidden` is after the
    final norm: what the output head reads.
    """

    captured: dict[int, Float[Tensor, "batch seq hidden"]]
    final_hidden: Float[Tensor, "batch seq hidden"]
    readout: Readout

    def slice(self, start: int, stop: int) -> "TargetFeatures":
        """Return the features of positions start..stop-1, without a copy."""
        return self._each(lambda hidden: hidden[:, start:stop])

    def rows(self, kept: Sequence[int]) -> "TargetFeatures":
        """Return the features of these rows."""
        index = send_numbers(kept, self.final_hidden.device)
        return self._each(lambda hidden: hidden[index])

    @classmethod
    def joined(cls, parts: "Sequence[TargetFeatures]") -> "TargetFeatures":
        """Return the features of parts that follow each other along the text."""
        if len(parts) == 1:
            return parts[0]
        captured = {
            layer: torch.cat([part.captured[layer] for part in parts], dim=1)
            for layer in parts[0].captured
        }
        final = torch.cat([part.final_hidden for part in parts], dim=1)
        return cls(captured, final, parts[0].readout)

    def take(self, places: Int[Tensor, "batch new"]) -> "TargetFeatures":
        """Return the features of these positions of each row."""
        rows = torch.arange(len(places), device=places.device)[:, None]
        return self._each(lambda hidden: hidden[rows, places])

    def to(self, device: torch.device) -> "TargetFeatures":
        """Return the features on `device`; copies from pinned memory are asynchronous."""
        if self.final_hidden.device == device:
            return self
        return self._each(lambda hidden: hidden.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TargetFeatures":
        captured = {i: change(hidden) for i, hidden in self.captured.items()}
        return TargetFeatures(captured, change(self.final_hidden), self.readout)


@runtime_checkable
class FeatureSource(Protocol):
    """A source of features in training: the target itself, or a store."""

    spec: TargetSpec
    readout: Readout

    def features(self, batch: Batch, captures: tuple[int, ...]) -> TargetFeatures:
        """Return the target's features of a batch."""


@dataclass(frozen=True)
class LossTerm:
    """One term of a loss as a sum: the caller divides by the step's denominator, once.

    `count` is how many positions contributed; `uncovered` how many the reduced vocabulary left out.
    `correct` counts positions where the drafter's first choice was the target's, or the text's
    where the loss is on the text.
    """

    weight: float
    sum: Float[Tensor, ""]
    count: Int[Tensor, ""]
    correct: Int[Tensor, ""] | None = None
    uncovered: Int[Tensor, ""] | None = None


Losses = dict[str, LossTerm]


def weighted_sum(losses: Losses) -> Float[Tensor, ""]:
    """Return the sum over terms of weight * sum: the loss before the step's denominator."""
    return torch.stack([term.weight * term.sum for term in losses.values()]).sum()


Members = Sequence[Mapping[tuple[int, ...], str]]  # by row, see `Proposal`


@dataclass(frozen=True)
class Proposal:
    """A drafter's proposal for verification: drafted tokens after the last committed one.

    tree: the shape; None is a chain. Rows are padded to the longest; num_nodes counts the real
    ones, on the CPU: the host must know them without asking. `draft_probs[:, j]` is a distribution
    that children were *really* drawn from (after temperature, top-k and top-p, over target ids, in
    the precision of the draw): the first child of its node, and the others with or without
    replacement. `sources[k]` is the j of the children of place k (0: the last token; k: node
    k - 1); None: k itself, as in a chain. draft_probs None: all tokens were chosen
    deterministically, and the children of a node differ. `members[row]` names the member of
    an ensemble that drafted a node, which is given by the tokens on the path to it.
    """

    tokens: Int[Tensor, "batch node"]
    num_nodes: Int[Tensor, " batch"]
    draft_probs: Float[Tensor, "batch source vocab"] | None
    tree: Tree | None = None
    sources: Int[Tensor, " place"] | None = None
    replacement: bool = False
    members: Members | None = None

    @property
    def branches(self) -> Branches | None:
        """What the tokens of its verification see; None: each follows the one before."""
        return None if self.tree is None else self.tree.with_root

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return self.tokens.shape[1] if self.tree is None else self.tree.deepest


@dataclass(frozen=True)
class Verdict:
    """The result of verification: the path of accepted nodes, and the bonus.

    path: the accepted nodes, then padding; None: the first num_accepted nodes (of a chain).
    `bonus` is the token that the target adds: the corrected token after a rejection, a new one
    after full acceptance.
    """

    num_accepted: Int[Tensor, " batch"]
    bonus: Int[Tensor, " batch"]
    path: Int[Tensor, "batch depth"] | None = None


class Drafted:
    """Counts of drafts, from which their yield follows."""

    num_drafts: int
    num_accepted_tokens: int
    num_cut_drafts: int

    @property
    def yielded(self) -> int:
        """The tokens that the drafts yielded: those accepted, and a bonus of each not cut."""
        return self.num_accepted_tokens + self.num_drafts - self.num_cut_drafts


@dataclass
class Counters(Drafted):
    """Counts of speculative decoding, in vLLM's terms; the prefill is not a draft."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = field(default_factory=list)
    num_cut_drafts: int = 0  # those whose bonus did not reach the output

    def add(
        self,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        depth: int | None = None,
        cut: bool = False,
    ) -> None:
        """Add one draft to the counts; depth: of its longest path (None: it is a chain)."""
        depth = num_draft_tokens if depth is None else depth
        self.num_drafts += 1
        self.num_cut_drafts += cut
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        per_position = self.num_accepted_tokens_per_position
        per_position.extend([0] * (depth - len(per_position)))
        for position in range(num_accepted_tokens):
            per_position[position] += 1

    def __add__(self, other: "Counters") -> "Counters":
        mine, theirs = self.num_accepted_tokens_per_position, other.num_accepted_tokens_per_position
        return Counters(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)],
            self.num_cut_drafts + other.num_cut_drafts,
        )

    @property
    def of_vllm(self) -> dict[str, Any]:
        """The counts that vLLM has too: it cuts no draft."""
        return {name: count for name, count in vars(self).items() if name != "num_cut_drafts"}

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a draft yields, its bonus included; None without a draft."""
        return self.yielded / self.num_drafts if self.num_drafts else None


@dataclass
class DecodeStats:
    """Counters and seconds of one decoded prompt.

    `trimmed` counts tokens that reached the output; `untrimmed` also those past EOS or the limit,
    as vLLM counts. For plain decoding the counters stay zero and `verify_s` is the target's time.
    `other_s` is the loop's own time; prefill is not part of the other three. The seconds of a batch
    are divided among its rows.
    """

    trimmed: Counters = field(default_factory=Counters)
    untrimmed: Counters = field(default_factory=Counters)
    num_target_passes: int = 0  # after the prefill
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    # Each cycle's first output position, and its drafted and accepted tokens, trimmed.
    cycles: list[tuple[int, int, int]] = field(default_factory=list)
    # Each pass after the prefill: the rows in it, the depth and the nodes of their proposals, and
    # this row's share of its seconds: draft, verify, other.
    passes: list[tuple[int, int, int, float, float, float]] = field(default_factory=list)
    # Of an ensemble: each member's part of `trimmed`, and who drafted in each cycle with a draft.
    by_member: dict[str, Counters] = field(default_factory=dict)
    drafters: list[str] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        """Seconds from the first prompt token to the last output token."""
        return self.prefill_s + self.draft_s + self.verify_s + self.other_s

    @property
    def pass_s(self) -> list[float]:
        """Seconds of each pass after the prefill."""
        return [draft + verify + other for *_, draft, verify, other in self.passes]


@dataclass(frozen=True)
class Decoded:
    """The output of one decoding: new tokens, trimmed at EOS (kept) and at the limit."""

    tokens: tuple[int, ...]
    stats: DecodeStats


MethodKey = tuple[str, int]  # a method's name, and the depth that it is asked for


@dataclass(frozen=True)
class PromptResult:
    """One prompt decoded by one method in one timing block: a row of the raw measurements."""

    prompt_id: str  # the unit of the bootstrap: turns of one prompt share it
    turn: int
    task: str
    method: str  # "autoregressive", or a drafter's name
    block: int
    num_prompt_tokens: int
    tokens: tuple[int, ...]
    stats: DecodeStats
    depth: int = 0  # of the proposals, as it was asked for; 0: the plain loop

    @property
    def key(self) -> MethodKey:
        """What tells the results of one method from those of others."""
        return self.method, self.depth
