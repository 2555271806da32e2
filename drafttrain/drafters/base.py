"""What every drafter is: a loss over target features, and logits for the next drafted level.

Which hidden state meets which token embedding, and predicts what (x: tokens, f: the target's
hidden states; the target itself reads x_t at position t, gives f_t, and from it x_{t+1}):

    position            t-1     t       t+1     t+2
    token               x_t-1   x_t     x_t+1   x_t+2
    target              f_t-1   f_t     f_t+1
                                 |     .'
    EAGLE, EAGLE-3      pair t: (f_t, x_t+1)          -> logits for x_t+2   (compare: target at t+1)
                        next:   (own g_t, x_t+2)      -> logits for x_t+3   one depth further
    Medusa head k        f_t                          -> logits for x_t+2+k (head 0 skips x_t+1)

While decoding, x_t+1 is the last token: committed, chosen by the target, but not yet read by it. So
the first drafted token always stands two positions after the newest feature.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafttrain.core.chance import Chance, SeededChance
from drafttrain.core.ops.layer_calls import device_of
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, Proposal, TargetFeatures, TargetSpec
from drafttrain.core.vocab import DraftVocab
from drafttrain.drafters.serving.layout import Expected, ServedLayout, check_tensors
from drafttrain.runtime.settings import require


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Common to every drafter; subclasses head their own files."""

    name: str

    trainable: ClassVar[bool] = True
    layout: ClassVar[ServedLayout | None] = None  # of its files; None: no engine serves them

    @property
    def served_from(self) -> Path | None:
        """What an engine loads as it is; None: what an export writes."""
        return None

    def require(self, key: str, holds: bool, need: str, remedy: str = "") -> None:
        """Raise ValueError unless a setting holds what it needs."""
        require(holds, f"drafter.{key}", need, getattr(self, key), remedy)

    def build(self, spec: TargetSpec) -> "Drafter":
        """Make the drafter for a target, weights at their initial values."""
        raise AssertionError(f"{type(self).__name__} does not say which drafter it builds")


@dataclass(frozen=True)
class About:
    """What a model card says of a family: data, no code."""

    kind: str  # with its article: "An EAGLE-3"
    paper: str  # its number on arXiv


@dataclass
class DraftState:
    """What a drafter remembers of the rows it is decoding; each family has its own subclass."""

    readout: Readout


class TrainingChance(ABC):
    """Randomness of the training forward (feature noise), keyed by conversation and step."""

    @abstractmethod
    def uniform_like(
        self, values: Float[Tensor, "batch seq hidden"], document: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return uniforms in [0, 1): the same for a conversation however it is batched."""

    def decoding(self) -> Chance:
        """Return the chance of what a drafter says itself: rows are named by conversation."""
        return SeededChance(0)


class TextSource(Protocol):
    """What a drafter trains on in place of the data's text, where that is not the data's alone."""

    def rewrite(self, drafter: Any, batch: Batch, chance: TrainingChance) -> Batch:
        """Return what is trained on in place of this micro batch, before the target reads it.

        Each conversation keeps its place and its own chance, however it is batched or sharded.
        """


State = TypeVar("State", bound=DraftState)


class Drafter(nn.Module, ABC, Generic[State]):
    """A drafter: a model, and its conversation with the decode loop.

    What it must have: `captures`; for training `forward`; for decoding `begin`,
    `observe`, `expand`, `select`. All else has a default. Weights that it shares with the target
    (embedding, head) are read from the readout.
    """

    about: ClassVar[About | None] = None  # None: a card calls it by its configuration's name
    config: DrafterConfig
    spec: TargetSpec
    captures: tuple[int, ...]  # target layers it reads; final_hidden always comes along
    vocab: DraftVocab | None = None  # None: drafts over the target's whole vocabulary
    # How many positions before a trained token its loss reads features (None: all before it). A
    # store may then leave out the others.
    reach: int | None = None
    # Names of the terms of `forward` on drafted tokens, the first depth first, of a drafter whose
    # configuration is a TokenLossConfig: validation without the target then computes them with the
    # loss `rejection`. That of others drafts along the stored text.
    depth_terms: tuple[str, ...] = ()
    max_depth: int | None = None  # of a proposal; None: no limit
    unroll = 1  # depths whose logits the training forward produces, for train/decode agreement
    begins_from_target = False  # whether `initialise` needs the target's own model and tokenizer
    text_source: TextSource | None = None  # None: it trains on the data's text
    lookup: tuple[int, int] | None = None  # shortest and longest suffix that it looks up, if so

    @property
    def max_positions(self) -> int | None:
        """How long a text it can draft for; None: as long as the target's context."""
        return None

    def initialise(self, model: Any, tokenizer: Any) -> None:
        """Take weights from elsewhere, once, before `prepare`; both arguments are the target's."""

    def prepare(self, token_counts: Int[Tensor, " vocab"], readout: Readout) -> None:
        """Take initial values from the training data and the target, once, before training.

        token_counts: how often each id occurs among the tokens whose prediction is trained.
        """

    def outline(self, target: Callable[[], Any]) -> None:
        """Take on the sizes that `initialise` and `prepare` give, at most: a plan has no values.

        On the meta device. target: gives Transformers' configuration of the target.
        """

    def attach(self, tokenizer: Any) -> None:
        """Meet the target's tokenizer, once, before decoding; ValueError where it does not fit."""

    @abstractmethod
    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        """Return the loss terms of a batch, as sums."""

    @abstractmethod
    def begin(self, readout: Readout, first_tokens: Int[Tensor, " batch"], capacity: int) -> State:
        """Start decoding rows whose first token is given; `capacity` bounds their length."""

    @abstractmethod
    def observe(
        self,
        state: State,
        tokens: Int[Tensor, "batch new"],
        counts: Sequence[int],
        features: TargetFeatures,
    ) -> None:
        """Take in committed tokens: tokens[:, i] stands right after the position of feature i.

        The prompt comes first, less its first token and with the last token; then, after each
        verification, the accepted tokens and the bonus. Row r has counts[r] of them, the rest of it
        is padding on the right. What the drafter wrote for its own proposal is rolled back here.
        """

    @abstractmethod
    def expand(
        self, state: State, newest: Int[Tensor, " batch"] | None
    ) -> Float[Tensor, "batch draft_vocab"]:
        """Return logits for what follows the newest drafted token.

        None: for what follows the last token, right after `observe`.
        """

    @abstractmethod
    def select(self, state: State, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; the others have finished."""

    def to_serving(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config.json and tensors as engines expect them: as `config.layout` says.

        Without a layout: every weight under its own name, beside the settings.
        """
        if not self.config.trainable:
            raise ValueError(f"drafter={self.config.name} has no serving format: it has no weights")
        settings = {"architectures": [type(self).__name__], "drafter": asdict(self.config)}
        return settings, dict(self.state_dict())

    def from_serving(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Load what `to_serving` gives; ValueError names missing, unknown or misshapen tensors."""
        self.load_weights(tensors)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Moving the module must move the vocabulary's maps, which are no parameters.
        super()._apply(fn, recurse)
        if self.vocab is not None:
            self.vocab = DraftVocab.of(self.get_buffer("target_ids"), self.spec.vocab_size)
        return self

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Load a state dict of this drafter, taking sizes that training chose from it."""
        ids = tensors.get("target_ids")
        if ids is not None:
            self.reduce(DraftVocab.of(ids.to(device_of(self)), self.spec.vocab_size))
        load_exactly(self, tensors)

    def reduce(self, vocab: DraftVocab) -> None:
        """Draft the tokens of a reduced vocabulary alone; its map, `target_ids`, is of the weights.

        ValueError where the drafter has no heads that could shrink.
        """
        raise ValueError(
            f"drafter={self.config.name} drafts over the target's whole vocabulary, got weights "
            "with target_ids; they must come from the same drafter configuration"
        )

    def propose(self, state: State, depth: int) -> Proposal | None:
        """Offer a whole proposal at once (retrieval); None: `decode.draft` grows one."""
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


def last_of(
    values: Float[Tensor, "batch new width"], counts: Sequence[int]
) -> Float[Tensor, "batch 1 width"]:
    """Return what stands at each row's last real position."""
    if min(counts) == values.shape[1]:
        return values[:, -1:]
    last = torch.tensor(counts, device=values.device) - 1
    return values[torch.arange(len(values), device=values.device), last][:, None]


def positions_to_predict(
    batch: Batch, distance: int
) -> tuple[Int[Tensor, " position"], Int[Tensor, " position"]]:
    """Return (rows, positions) of trained tokens with `distance` tokens of their text before."""
    wanted = batch.loss_mask & (batch.positions >= distance)
    rows, positions = wanted.nonzero(as_tuple=True)
    return rows, positions
