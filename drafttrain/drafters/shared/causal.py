"""Drafters that read the text itself, such as a whole causal language model of Transformers."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.ops.chunked_losses import OutputHead
from drafttrain.core.ops.grouped_attention import share_heads
from drafttrain.core.ops.layer_calls import device_of, dtype_of
from drafttrain.core.ops.ragged_cache import Ragged, RaggedCache, padded_rows, run_decoder
from drafttrain.core.readout import Readout, scaled
from drafttrain.core.transfer import send_numbers
from drafttrain.core.tree import Branches
from drafttrain.core.types import TargetFeatures, TargetSpec
from drafttrain.core.vocab import DraftVocab
from drafttrain.drafters.base import Drafter, DrafterConfig, DraftState, last_of
from drafttrain.target.pretrained.limits import exact_positions


@dataclass
class CausalState(DraftState):
    """The tokens of each row that the model has read and those still unread: observing is free."""

    unread: Int[Tensor, "batch new"]  # in the drafter's own ids, padded right
    counts: list[int]  # how many of `unread` are real
    cache: RaggedCache
    drafted: int = 0  # drafted tokens at the end of the cache, equally many in every row
    level: Branches | None = None  # the newest level of a tree


class TokenDrafter(Drafter[CausalState]):
    """A drafter that reads tokens alone, with a key-value cache; it uses no features.

    A token is read when the next one is drafted. So the last token of a fully accepted chain is not
    in the cache, and is read together with the bonus. After a tree all accepted tokens are read
    again.
    """

    captures = ()
    branches = True

    @abstractmethod
    def after(
        self, state: CausalState, tokens: Int[Tensor, "batch new"], counts: Sequence[int] | None
    ) -> Float[Tensor, "batch width draft_vocab"]:
        """Append own tokens to the cache; return the logits after each row's last real one.

        counts: how many of each row's tokens are real; None: all are, and logits follow each.
        """

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> CausalState:
        """Return a state in which the first token of each row is unread."""
        unread, counts = self._in_own_ids(first_tokens[:, None], [1] * len(first_tokens))
        return CausalState(readout, unread, counts, RaggedCache(rooms=self.rooms))

    def observe(
        self, state: CausalState, tokens: Tensor, counts: Sequence[int], features: TargetFeatures
    ) -> None:
        """Roll back drafted tokens that were not accepted; keep tokens not yet in the cache."""
        kept = [0 if state.level else min(count - 1, state.drafted) for count in counts]
        state.level = None
        if state.drafted:
            lengths = zip(state.cache.lengths, kept, strict=True)
            state.cache.rollback([length - state.drafted + keep for length, keep in lengths])
            state.drafted = 0
        new = self._in_own_ids(*without_first(tokens, counts, kept))
        state.unread, state.counts = joined((state.unread, state.counts), new)

    def expand(
        self, state: CausalState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        """Read the unread tokens, or each row's newest nodes, and return the logits after them."""
        if newest is None:
            assert min(state.counts) > 0, "observe comes before expand"
            tokens, counts = state.unread, state.counts
            state.unread, state.counts = tokens[:, :0], [0] * len(tokens)
            return self.after(state, tokens, counts)
        if parents is not None:
            state.cache.branches = state.level = Branches.level(state.level, parents)
        state.drafted += newest.shape[1]
        return self.after(state, self._drafted(newest), None)

    def _in_own_ids(
        self, tokens: Int[Tensor, "batch new"], counts: Sequence[int]
    ) -> tuple[Int[Tensor, "batch own"], list[int]]:
        """Return committed target ids as the drafter's own ids."""
        return tokens, list(counts)

    def _drafted(self, tokens: Int[Tensor, "batch width"]) -> Int[Tensor, "batch width"]:
        """Return drafted target ids as the drafter's own ids."""
        return tokens


class CausalDrafter(TokenDrafter):
    """Drafts a model's continuation of the text."""

    # Buffers, None if all ids are the same in both models: the ids that are drafted, the model's
    # columns for them, and the own id that stands for each target id (-1: several ids).
    target_ids: Tensor | None
    columns: Tensor | None
    reading: Tensor | None

    model: Any
    eager: bool

    def __init__(self, config: DrafterConfig, spec: TargetSpec, model: Any) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.spelled: Mapping[int, list[int]] = {}
        for name in ("target_ids", "columns", "reading"):
            self.register_buffer(name, None, persistent=False)
        if model is not None:
            self.take(model)

    def take(self, model: Any) -> None:
        """Draft with this model; if it has fewer ids than the target, draft only those."""
        if self.rooms is not None:  # graphs read the weights of the one before
            self.use_graphs(self.rooms.capture)
        self.model = model
        self._decoder = (model.get_decoder(),)  # in a tuple, so that weights are not listed twice
        self._head = (model.get_output_embeddings(),)
        text = model.config.get_text_config(decoder=True)
        scale = getattr(text, "logit_scale", None) or 1.0  # Cohere
        self._scale = scale / (getattr(text, "logits_scaling", None) or 1.0)  # Granite
        self._cap = getattr(text, "final_logit_softcapping", None)  # Gemma
        share_heads(model)
        self.eager = model.config._attn_implementation == "eager"
        self._check_head()
        if self.num_ids < self.spec.vocab_size:
            own = torch.arange(self.num_ids)
            self.share(own, own, {})

    @torch.no_grad()
    def _check_head(self) -> None:
        if device_of(self).type == "meta":
            return  # an outline has no values to compare
        # As for targets: an architecture may scale or cap logits in a way of its own.
        tokens = torch.arange(min(8, self.num_ids), device=device_of(self))[None]
        theirs = self.model(input_ids=tokens, use_cache=False).logits.float()
        ours = self.head(self._decoder[0](input_ids=tokens, use_cache=False).last_hidden_state)
        if not (ours.float() - theirs).abs().max() <= 0.02 * theirs.abs().max():
            raise ValueError(
                f"drafter={self.config.name} ({self.model.config.model_type}) computes logits in a "
                "way that drafttrain does not know; it cannot draft yet"
            )

    @property
    def num_ids(self) -> int:
        """The number of ids that the model has logits for, including ids without a token."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def max_positions(self) -> int:
        """The longest text for which the model is exact, however it is split into passes."""
        text = self.model.config.get_text_config(decoder=True)
        return exact_positions(text, f"drafter={self.config.name} cannot draft").positions

    def share(
        self,
        target_ids: Int[Tensor, " shared"],
        draft_ids: Int[Tensor, " shared"],
        spelled: Mapping[int, list[int]],
    ) -> None:
        """Draft only these target ids, in ascending order, with the model's ids for them.

        spelled: the model's ids for target ids that it lacks; all others are read as id 0.
        """
        device, size = device_of(self), self.spec.vocab_size
        self.target_ids, self.columns = target_ids.to(device), draft_ids.to(device)
        self.vocab = DraftVocab.of(self.target_ids, size)
        reading = torch.zeros(size, dtype=torch.long, device=device)
        reading[self.target_ids] = self.columns
        for token, own in spelled.items():
            reading[token] = own[0] if len(own) == 1 else -1
        self.spelled = {token: own for token, own in spelled.items() if len(own) > 1}
        self.reading = reading

    def _apply(self, fn: Any, recurse: bool = True) -> "CausalDrafter":
        # Rotary frequencies keep their dtype: rounded to bfloat16, positions blur.
        wide = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in wide:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> CausalState:
        """Return a state in which the first token of each row is unread."""
        if capacity > self.max_positions:
            raise ValueError(
                f"drafter={self.config.name} was made for {self.max_positions} positions, but "
                f"prompt, output and depth need {capacity}; shorten one of them, or choose a "
                "drafter with a longer context"
            )
        return super().begin(readout, first_tokens, capacity)

    def after(
        self, state: CausalState, tokens: Tensor, counts: Sequence[int] | None
    ) -> Float[Tensor, "batch width draft_vocab"]:
        return self.read(state.cache, tokens, counts)

    def _drafted(self, tokens: Tensor) -> Tensor:
        # Drafted tokens are shared ones, but for draws of a tree after all of these (`without`): of
        # such a token any id may be read, as what is drafted after it is recorded.
        return tokens if self.reading is None else self.reading[tokens].clamp(min=0)

    def read(
        self, cache: RaggedCache, tokens: Int[Tensor, "batch new"], counts: Sequence[int] | None
    ) -> Float[Tensor, "batch width draft_vocab"]:
        """Append own tokens to the cache; return the logits after each row's last real one.

        Without counts, all are real and logits follow each of them.
        """
        scores = dtype_of(self.model) if self.eager else None
        (hidden,) = run_decoder(self._decode, cache, tokens, counts, scores)
        return self.shared_logits(self.head(last_of(hidden, counts)))

    def _decode(self, **told: Any) -> tuple[Tensor, ...]:
        return (self._decoder[0](**told).last_hidden_state,)

    def head(self, hidden: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape own"]:
        """Return the model's logits from its decoder's output, as its own forward does."""
        return scaled(self._head[0](hidden), self._scale, self._cap)

    def output_head(self) -> OutputHead:
        """Return the head that drafts: only the ids that can be drafted, scaled and capped."""
        weight, bias = self._head[0].weight, self._head[0].bias
        if self.columns is not None:
            weight, bias = weight[self.columns], None if bias is None else bias[self.columns]
        elif self.num_ids > self.spec.vocab_size:
            size = self.spec.vocab_size
            weight, bias = weight[:size], None if bias is None else bias[:size]
        return OutputHead(weight, bias, self._scale, self._cap)

    def shared_logits(
        self, logits: Float[Tensor, "*shape own"]
    ) -> Float[Tensor, "*shape draft_vocab"]:
        """Return the logits of the ids that can be drafted: those that the target has too."""
        if self.columns is None:
            return logits[..., : self.spec.vocab_size]
        return logits[..., self.columns]

    def _in_own_ids(
        self, tokens: Int[Tensor, "batch new"], counts: Sequence[int]
    ) -> tuple[Int[Tensor, "batch own"], list[int]]:
        """Return target ids as the model's own ids; one may become several.

        Where that happens with any id of the vocabulary, the host waits to see the tokens.
        """
        if self.reading is None:
            return tokens, list(counts)
        own = self.reading[tokens]
        if not self.spelled:
            return own, list(counts)
        all_theirs, all_mine = torch.stack([tokens, own]).tolist()
        if all(single >= 0 for mine in all_mine for single in mine):
            return own, list(counts)
        rows: list[list[int]] = [[] for _ in counts]
        for row, theirs, mine, count in zip(rows, all_theirs, all_mine, counts, strict=True):
            for token, single in zip(theirs[:count], mine[:count], strict=True):
                row += self.spelled[token] if single < 0 else [single]
        return padded_rows(rows, tokens.device)


def without_first(tokens: Tensor, counts: Sequence[int], dropped: Sequence[int]) -> Ragged:
    """Return each row without its first `dropped` tokens."""
    left = [count - drop for count, drop in zip(counts, dropped, strict=True)]
    width = max(left)
    if min(dropped) == max(dropped):
        return tokens[:, dropped[0] : dropped[0] + width], left
    starts = send_numbers(dropped, tokens.device)
    places = starts[:, None] + torch.arange(width, device=tokens.device)
    return tokens.gather(1, places.clamp(max=tokens.shape[1] - 1)), left


def joined(first: Ragged, second: Ragged) -> Ragged:
    """Return the rows concatenated: the second's tokens after the first's."""
    (tokens, counts), (added, new) = first, second
    if min(counts) == tokens.shape[1]:  # no padding in between; most often the first is empty
        return torch.cat([tokens, added], dim=1), [a + b for a, b in zip(counts, new, strict=True)]
    rows = [
        [*one[:a], *other[:b]]
        for one, a, other, b in zip(tokens.tolist(), counts, added.tolist(), new, strict=True)
    ]
    return padded_rows(rows, tokens.device)
