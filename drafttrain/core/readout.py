"""The target's token embedding and output head, without the target.

It travels with the features, because stored, sharded and served targets hand over no model.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Readout:
    """Frozen weights that drafters share with the target. Tied heads share one tensor."""

    embedding: Float[Tensor, "vocab hidden"]
    head: Float[Tensor, "vocab hidden"]
    norm: Float[Tensor, " hidden"] | None = None  # the final norm's weight, a good initial value
    head_bias: Float[Tensor, " vocab"] | None = None
    embedding_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden)
    logit_scale: float = 1.0  # Cohere and Granite scale logits
    soft_cap: float | None = None  # Gemma: cap * tanh(logits / cap)

    @property
    def nbytes(self) -> int:
        """Bytes in memory; tied tensors count once."""
        tables = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        vectors = [vector for vector in (self.norm, self.head_bias) if vector is not None]
        return sum(tensor.nbytes for tensor in tables + vectors)

    def embed(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Return the embedding that the target's first layer reads."""
        embedded = functional.embedding(tokens, self.embedding)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def logits(self, final_hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:
        """Return the target's logits from hidden states after its final norm."""
        logits = functional.linear(final_hidden, self.head, self.head_bias)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def to(self, dtype: torch.dtype) -> "Readout":
        """Return the readout with its tensors in `dtype`; tied tensors stay tied."""
        if self.embedding.dtype == dtype:
            return self
        embedding = self.embedding.to(dtype)
        tied = self.head is self.embedding
        return Readout(
            embedding,
            embedding if tied else self.head.to(dtype),
            None if self.norm is None else self.norm.to(dtype),
            None if self.head_bias is None else self.head_bias.to(dtype),
            self.embedding_scale,
            self.logit_scale,
            self.soft_cap,
        )

    def on(self, device: torch.device) -> "Readout":
        """Return the readout with its tensors on `device`; tied tensors stay tied."""
        if self.embedding.device == device:
            return self
        embedding = self.embedding.to(device)
        tied = self.head is self.embedding
        return Readout(
            embedding,
            embedding if tied else self.head.to(device),
            None if self.norm is None else self.norm.to(device),
            None if self.head_bias is None else self.head_bias.to(device),
            self.embedding_scale,
            self.logit_scale,
            self.soft_cap,
        )
