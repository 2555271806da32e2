"""The interface of every drafter: a loss over target features, and logits for the next level.

Which hidden state is paired with which token embedding, and predicts what (x: tokens, f: the
target's hidden states; the target itself reads x_t at position t, gives f_t, and from it x_{t+1}):

    position            t-1     t       t+1     t+2
    token               x_t-1   x_t     x_t+1   x_t+2
    target              f_t-1   f_t     f_t+1
                                 |     .'
    EAGLE, EAGLE-3      pair t: (f_t, x_t+1)          -> logits for x_t+2   (compare: target at t+1)
                        next:   (own g_t, x_t+2)      -> logits for x_t+3   one depth further
    Medusa head k        f_t                          -> logits for x_t+2+k (head 0 skips x_t+1)

While decoding, x_t+1 is the last token: committed, chosen by the target, but not yet read by it. So
the first drafted token is always two positions after the newest feature.

The token at column c of a batch is compared with the target's distribution one position before it:
the softmax of `readout.float32_logits(features.final_hidden[rows, c - 1])`. Features and readout
have the target's dtype, which need not be the drafter's: convert what you read
(`features.final_hidden.to(dtype_of(self))`, from core/ops/layer_calls.py, which knows of autocast)
and what you give to the readout in `expand` (`readout.logits(states.to(readout.head.dtype))`); for
a loss `readout.float32_logits(states)`, which bfloat16 does not round.

What there is for your own: core/types.py has what batches, features and loss terms hold,
core/readout.py what a readout does, core/losses.py losses to take: `class C(TokenLossConfig,
DrafterConfig)` has them as settings (losses, jsd_beta, lk_eta and top_k in the yaml).
`positions_to_predict` (core/placed_batch.py) finds the tokens that a depth trains; a packed row
holds several documents: what mixes positions otherwise must compare `batch.document`. For a large
vocabulary `losses_along_text` (drafters/shared/text_losses.py) takes the losses in chunks. Norms
are in core/ops/layers.py. `call_layer` (core/ops/layer_calls.py) around a layer lets the settings
`hardware.compile` and `hardware.gradient_checkpointing` reach it. optimizer=muon, the default,
takes matrices, but for those of a side as long as the vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from drafttrain.core.chance import Chance, SeededChance
from drafttrain.core.ops.graphs import Capture
from drafttrain.core.ops.layer_calls import device_of
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.ops.room import Rooms
from drafttrain.core.readout import Readout
from drafttrain.core.transfer import send_numbers
from drafttrain.core.types import Batch, Losses, Proposal, TargetFeatures, TargetSpec
from drafttrain.core.vocab import DraftVocab
from drafttrain.drafters.serving.layout import Expected, ServedLayout, check_tensors
from drafttrain.drafters.shared.publications import About, Published
from drafttrain.runtime.settings import Settings
from drafttrain.target.pretrained.config import ModelConfig

LOOKUP = "ngram"  # decoded beside every drafter: an entry of conf/drafter, a method of a report


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(Settings):
    """The configuration common to all drafters; each family's subclass is in its own file.

    A subclass has this decorator too. A command line can set the fields that the yaml lists; `name`
    is that of the yaml's file.
    """

    name: str
    lr: float = 4.0e-3  # that suits its training beside a target as wide as the embedded one

    section = "drafter"
    trainable: ClassVar[bool] = True
    layout: ClassVar[ServedLayout | None] = None  # of its files; None: no engine serves it

    @property
    def served_from(self) -> Path | None:
        """The directory that an engine loads as it is; None: an export is needed."""
        return None

    @property
    def draft_model(self) -> ModelConfig | None:
        """The language model that drafts as it is; None: the drafter is a module of its own."""
        return None

    def build(self, spec: TargetSpec) -> "Drafter":
        """Return the drafter for a target, with initial weights."""
        raise NotImplementedError(f"{type(self).__name__} must define build(spec)")


@dataclass
class DraftState:
    """A drafter's state for the rows it is decoding; each family has its own subclass."""

    readout: Readout


class TrainingChance(ABC):
    """Randomness of the training forward (feature noise), keyed by conversation and step."""

    @abstractmethod
    def uniform_like(
        self, values: Float[Tensor, "batch seq hidden"], document: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return uniforms in [0, 1) that depend on the conversation, not on how it is batched."""

    def decoding(self) -> Chance:
        """Return the chance for text that a drafter samples; rows are named by conversation."""
        return SeededChance(0)


class TextSource(Protocol):
    """A source of training text, for drafters that do not train on the data's text alone."""

    def rewrite(self, drafter: Any, batch: Batch, chance: TrainingChance) -> Batch:
        """Return the batch to train on in place of this micro batch, before the target reads it.

        Each conversation keeps its place and its own chance, however it is batched or sharded.
        """


State = TypeVar("State", bound=DraftState)


class Drafter(nn.Module, ABC, Generic[State]):
    """A drafter: a model, and its interface to the decode loop.

    A subclass must set `config`, `spec` and `captures` (`()` reads the final hidden state alone),
    and define `forward` for training; `begin`, `observe` and `expand` for decoding.
    Everything else has a default. Weights that it shares with the target (embedding, head) are read
    from the readout.
    """

    about: ClassVar[About | None] = None  # None: a card uses its configuration's name
    published: ClassVar[tuple[Published, ...]] = ()  # to read a report's numbers beside
    config: DrafterConfig
    spec: TargetSpec
    captures: tuple[int, ...]  # target layers it reads; final_hidden is always included
    vocab: DraftVocab | None = None  # None: drafts over the target's whole vocabulary
    # Whether its reduced vocabulary is rows of the target's head, which it copies.
    copies_head = False
    # How many positions before a trained token its loss reads features of (None: all of them). A
    # store may leave out the others.
    reach: int | None = None
    # Names of the terms of `forward` on drafted tokens, in order of depth: the contract suite
    # compares them with decoding. If the configuration is a TokenLossConfig, validation without the
    # target computes them with the loss `rejection`; else it drafts along the stored text. Of a
    # drafter outside the package each must be the sum of the configuration's `token_loss`, or else
    # of cross-entropies with the target's distribution or with the text; name none if they are
    # another loss: then only the contract's other tests look for pairs that are off by one.
    depth_terms: tuple[str, ...] = ()
    max_depth: int | None = None  # of a proposal; None: no limit
    branches = False  # whether `expand` takes levels of several nodes, for trees
    unroll = 1  # depths that `forward` trains; the contract suite compares decoding with them
    begins_from_target = False  # whether `initialise` needs the target's own model and tokenizer
    text_source: TextSource | None = None  # None: it trains on the data's text
    lookup: tuple[int, int] | None = None  # shortest and longest suffix that it looks up, if any
    longest: int | None = None  # text that it drafts for as others trained it; None: any
    rooms: Rooms | None = None  # where its passes are captured, in place; None: they are not

    def use_graphs(self, capture: Capture) -> None:
        """Capture the passes over its caches from now on; nothing else about them changes."""
        self.rooms = Rooms(capture)

    @property
    def max_positions(self) -> int | None:
        """The longest text that it can draft for; None: as long as the target's context."""
        return self.longest

    def initialise(self, model: Any, tokenizer: Any) -> None:
        """Load weights from elsewhere, once, before `prepare`; both arguments are the target's."""

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Set initial values from the training data and the target, once, before training.

        token_counts: how often each id occurs among the tokens whose prediction is trained.
        """

    def outline(self, target: Callable[[], Any]) -> None:
        """Take the largest sizes that `initialise` and `prepare` can give, for a plan.

        On the meta device, without values. target: returns the target's Transformers configuration.
        """

    def attach(self, tokenizer: Any) -> None:
        """Check the target's tokenizer, once, before decoding; ValueError if it does not fit."""

    @abstractmethod
    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the loss terms of a batch, each the sum over its positions (`LossTerm`).

        The training loop divides by the trained tokens of the whole step, whatever a term counts.
        """

    @abstractmethod
    def begin(self, readout: Readout, first_tokens: Int[Tensor, " batch"], capacity: int) -> State:
        """Return the state of new rows with these first tokens; `capacity` bounds their length."""

    @abstractmethod
    def observe(
        self,
        state: State,
        tokens: Int[Tensor, "batch new"],
        counts: Sequence[int],
        features: TargetFeatures,
    ) -> None:
        """Read committed tokens: tokens[:, i] is at the position right after that of feature i.

        The first call has the features of the prompt x_0 .. x_n-1 and the tokens x_1 .. x_n, where
        the target chose x_n; each later one has the accepted tokens and the bonus of a
        verification, or the tokens of several plain steps. Row r has counts[r] >= 1 tokens, then
        padding. What the drafter wrote for its own proposal is rolled back here.
        """

    @abstractmethod
    def expand(
        self,
        state: State,
        newest: Int[Tensor, "batch width"] | None,
        parents: Int[Tensor, "batch width"] | None = None,
    ) -> Float[Tensor, "batch width draft_vocab"]:
        """Return logits for the tokens after the newest drafted ones, which are target ids.

        newest: one level of the proposal; None: the level is the last token, right after `observe`
        (width 1). parents: which node of the level before each of them follows; None: a chain,
        whose width is always 1. Only a drafter with `branches` gets parents.
        """

    def confidence(self, state: State) -> Float[Tensor, "batch width"] | None:
        """Return the predicted acceptance of the tokens that the last `expand` gave logits of.

        An adaptive policy ends a chain by it. It must be known before those tokens are drawn, from
        what precedes them: then no token is kept for what it turned out to be. None: the drafter
        predicts none, and the probability that it gave to its token stands for it.
        """
        return None

    def select(self, state: State, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; the others have finished.

        It may come before the first `observe`. As it is here, every tensor, list and cache of the
        state is by row; the rest of it stays.
        """
        for name, value in vars(state).items():
            if isinstance(value, Tensor):
                setattr(state, name, value[send_numbers(rows, value.device)])
            elif isinstance(value, list):
                setattr(state, name, [value[row] for row in rows])
            elif isinstance(value, RaggedCache) and value.lengths:  # else nothing was read yet
                value.select(rows)

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config.json and tensors as engines expect them, in the layout `config.layout`.

        Without a layout: the settings, and every weight under its own name.
        """
        if not self.config.trainable:
            raise ValueError(f"drafter={self.config.name} has no serving format: it has no weights")
        settings = {"architectures": [type(self).__name__], "drafter": asdict(self.config)}
        return settings, dict(self.state_dict())

    def from_serving(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Load what `to_serving` gives; ValueError names missing, unknown or misshapen tensors.

        Files in a layout that engines serve are read by the layout, whoever wrote them.
        """
        self.load_weights(tensors)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Moving the module must move the vocabulary's maps, which are not parameters.
        super()._apply(fn, recurse)
        if self.vocab is not None:
            self.vocab = DraftVocab.of(self.get_buffer("target_ids"), self.spec.vocab_size)
        if self.rooms is not None:  # graphs read the weights where they were
            self.use_graphs(self.rooms.capture)
        return self

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Load a state dict of this drafter, with the sizes that training chose."""
        ids = tensors.get("target_ids")
        if ids is not None and type(self).reduce is not Drafter.reduce:
            self.reduce(DraftVocab.of(ids.to(device_of(self)), self.spec.vocab_size))
        load_exactly(self, tensors)

    def reduce(self, vocab: DraftVocab) -> None:
        """Draft only the tokens of a reduced vocabulary; its map `target_ids` is among the weights.

        For drafters whose heads can be reduced after they are built.
        """
        raise NotImplementedError

    def propose(
        self, state: State, depth: int, width: int = 1, num_nodes: int = 0
    ) -> Proposal | None:
        """Return a whole proposal at once (retrieval); None: `decode.draft` grows one.

        width: how many children a node may have; 1 is a chain. num_nodes: of a tree, at most. Only
        a drafter with `branches` gets these two.
        """
        return None


def load_exactly(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load tensors by name; ValueError names every missing, unknown or misshapen one."""
    own = module.state_dict()
    table = {name: Expected(tuple(tensor.shape), dtypes=()) for name, tensor in own.items()}
    if complaints := check_tensors(table, tensors):
        raise ValueError(
            f"these weights do not fit the drafter: {'; '.join(complaints)}; "
            "they must come from the same drafter configuration and a target of the same shape"
        )
    module.load_state_dict(tensors)


@torch.no_grad()
def start_with(module: nn.Module, weight: Tensor | None) -> None:
    """Copy a weight of the target's into a module; None: the target has none, it keeps its own."""
    if weight is not None:
        module.get_parameter("weight").copy_(weight)


def last_of(
    values: Shaped[Tensor, "batch new width"], counts: Sequence[int] | None
) -> Shaped[Tensor, "batch last width"]:
    """Return the values at each row's last real position; without counts, at all of them."""
    if counts is None:
        return values
    if min(counts) == values.shape[1]:
        return values[:, -1:]
    return rows_at(values, send_numbers(counts, values.device) - 1)


def rows_at(
    values: Shaped[Tensor, "batch new width"], places: Int[Tensor, " batch"] | None
) -> Shaped[Tensor, "batch last width"]:
    """Return each row's value at its place; None: all of them."""
    if places is None:
        return values
    return values[torch.arange(len(values), device=values.device), places][:, None]


def draft_vocab_size(drafter: Drafter) -> int:
    """Return how many of the target's tokens a drafter can draft."""
    return drafter.vocab.size if drafter.vocab else drafter.spec.vocab_size


@dataclass(frozen=True, kw_only=True)
class JoinedConfig(DrafterConfig):
    """The configuration of a drafter that others draft for; a command loads these and joins them.

    members: folders, or entries of conf/drafter. settings: of those entries, by name.
    """

    members: list[str]
    settings: dict[str, Any]

    trainable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        distinct = len({*self.members}) == len(self.members) >= 2
        self.require("members", distinct, "name at least two drafters, each once")
        given = all(isinstance(each, dict) for each in self.settings.values())
        given = given and self.settings.keys() <= {*self.members}
        self.require("settings", given, "be of drafters in drafter.members, as in {NAME: {a: 1}}")

    def build(self, spec: TargetSpec) -> Drafter:
        """Raise ValueError: its members must be loaded; see `join`."""
        raise ValueError(
            f"drafter={self.name} has no weights of its own, and no engine drafts so: it is for "
            "evaluate, tune, generate and chat; everything else is done with its members"
        )

    def join(self, spec: TargetSpec, members: Sequence[Drafter]) -> Drafter:
        """Return the drafter of these members; ValueError if they cannot draft together."""
        raise NotImplementedError(f"{type(self).__name__} must define join(spec, members)")


def beside_every(draft_model: str | None) -> dict[str, dict[str, Any]]:
    """Return entries of conf/drafter, and the settings changed in each.

    draft_model: a smaller language model, None for none.
    """
    return {LOOKUP: {}} | ({"two_model": {"path": draft_model}} if draft_model else {})
