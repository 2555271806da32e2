"""Embeddings made as large as the hidden states that a drafter reads them beside."""

import math

import torch
from torch import Tensor, nn

from drafttrain.core.readout import Readout


class EmbeddingScale(nn.Module):
    """A factor of the target's embeddings, for drafters that read them beside its final states.

    Those states have the size of its final norm, often twenty times an embedding's or more, and a
    step of an optimizer moves all columns of a matrix alike: beside them, embeddings are hardly
    read. A matrix W that reads factor * embedding is factor * W that reads the embedding: the
    factor changes how fast what can be learned. As a power of two it rounds nothing when it is
    multiplied into the matrix.
    """

    factor: Tensor | None  # None: embeddings are read as they are, which published drafters do

    def __init__(self, wanted: bool) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()) if wanted else None)

    def prepare(self, readout: Readout) -> None:
        """Choose the factor: the power of two nearest to the ratio of the two sizes."""
        if self.factor is None or readout.norm is None:
            return
        embedded = _size(readout.embedding) * abs(readout.embedding_scale)
        ratio = _size(readout.norm) / embedded if embedded else 0.0
        if math.isfinite(ratio) and ratio > 0:
            self.factor.fill_(2.0 ** round(math.log2(ratio)))

    def forward(self, embedded: Tensor) -> Tensor:
        return embedded if self.factor is None else embedded * self.factor

    def value(self) -> float:
        """Return the factor; 1 without one."""
        return 1.0 if self.factor is None else float(self.factor)


def _size(values: Tensor) -> float:
    """Return the root of the mean square, without a copy in float32."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return float(torch.linalg.vector_norm(values, dtype=wide)) / math.sqrt(values.numel())
