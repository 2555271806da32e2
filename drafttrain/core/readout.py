"""The target's token embedding and output head, without the target.

It is passed with the features, because stored, sharded and served targets provide no model.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from drafttrain.core.ops.layer_calls import wide_dtype
from drafttrain.core.ops.packed_weights import packed_linear, reorder
from drafttrain.core.ops.products import wide_linear


@dataclass(frozen=True)
class Readout:
    """Frozen weights that drafters share with the target. Tied heads share one tensor.

    The head has a row for every token of the vocabulary, or for those of `with_rows` alone.
    """

    embedding: Float[Tensor, "vocab hidden"]
    head: Float[Tensor, "row hidden"]
    norm: Float[Tensor, " hidden"] | None = None  # of the final norm, which final_hidden is after
    head_bias: Float[Tensor, " row"] | None = None
    embedding_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden)
    logit_scale: float = 1.0  # Cohere and Granite scale logits
    soft_cap: float | None = None  # Gemma: cap * tanh(logits / cap)

    @property
    def nbytes(self) -> int:
        """Bytes in memory; tied tensors count once."""
        tables = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        vectors = [vector for vector in (self.norm, self.head_bias) if vector is not None]
        return sum(tensor.nbytes for tensor in tables + vectors)

    def float32_head(self) -> Float[Tensor, "row hidden"]:
        """Return a copy of the head in float32 at least, which is kept until the head changes.

        For a CPU: making it for every step takes a tenth of a small drafter's step.
        """
        made: tuple[int, Tensor] | None = vars(self).get("_float32_head")
        if made is None or made[0] != self.head._version:
            made = self.head._version, self.head.to(wide_dtype(self.head))
            vars(self)["_float32_head"] = made
        return made[1]

    def with_rows(self, ids: Int[Tensor, " kept"]) -> "Readout":
        """Return the readout whose head has these rows alone: its logits are of these ids.

        The rows are copied once, and again if `ids` is another tensor or the head has changed.
        """
        now = id(ids), 0 if self.head.is_inference() else self.head._version
        made: tuple[tuple[int, int], Tensor, Readout] | None = vars(self).get("_with_rows")
        if made is None or made[0] != now:
            with torch.inference_mode(False):  # validation comes first, and then training
                bias = None if self.head_bias is None else self.head_bias[ids]
                head = self.head[ids]
                if hasattr(self.head, "packed"):
                    reorder(head)
                # `ids` is kept too, so that its id is of no other tensor.
                made = now, ids, replace(self, head=head, head_bias=bias)
            vars(self)["_with_rows"] = made
        return made[2]

    def embed(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Return the embedding that the target's first layer reads."""
        embedded = functional.embedding(tokens, self.embedding)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def logits(self, final_hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape row"]:
        """Return the target's logits from hidden states after its final norm, in its dtype.

        Verification takes these: they are what the target generates from.
        """
        logits = packed_linear(final_hidden, self.head, self.head_bias)
        return scaled(logits, self.logit_scale, self.soft_cap)

    def float32_logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape row"]:
        """Return the logits for a loss: in float32 at least, whatever the head's dtype.

        In bfloat16 they would be rounded to 8 bits, and a good drafter's gradient would be noise.
        """
        flat = hidden.reshape(-1, hidden.shape[-1]).to(self.head.dtype)
        logits = wide_linear(flat, self.head, self.head_bias)
        return scaled(logits, self.logit_scale, self.soft_cap).unflatten(0, hidden.shape[:-1])

    def logits_of(
        self, tokens: Int[Tensor, "*shape token"], final_hidden: Float[Tensor, "*shape hidden"]
    ) -> Float[Tensor, "*shape token"]:
        """Return the logits of a few tokens of each position alone, in float32 at least."""
        wide = wide_dtype(self.head)
        with torch.autocast(final_hidden.device.type, enabled=False):
            logits = (self.head[tokens].to(wide) @ final_hidden.to(wide)[..., None])[..., 0]
        logits = logits if self.head_bias is None else logits + self.head_bias[tokens]
        return scaled(logits, self.logit_scale, self.soft_cap)

    def to(self, place: torch.dtype | torch.device) -> "Readout":
        """Return the readout with its tensors in a dtype or on a device; tied ones stay tied."""
        if place in (self.embedding.dtype, self.embedding.device):
            return self
        embedding = self.embedding.to(place)
        return replace(
            self,
            embedding=embedding,
            head=embedding if self.head is self.embedding else self.head.to(place),
            norm=None if self.norm is None else self.norm.to(place),
            head_bias=None if self.head_bias is None else self.head_bias.to(place),
        )


def scaled(logits: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """Return a head's products as logits: cap * tanh(scale * product / cap), None: without cap."""
    if scale != 1.0:
        logits = logits * scale
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
