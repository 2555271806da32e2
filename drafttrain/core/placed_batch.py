"""A batch on a device, with the host's copy of it: what the host asks of it costs no wait."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from drafttrain.core.ops.layers import document_mask
from drafttrain.core.transfer import send
from drafttrain.core.types import Batch


@dataclass(frozen=True)
class PlacedBatch(Batch):
    """A batch on a device; `host` is the same batch on the CPU."""

    host: Batch


def placed(batch: Batch, device: torch.device) -> Batch:
    """Return a batch of the CPU on `device`, without waiting for its copies."""
    if device.type == "cpu":
        return batch
    sent: dict[str, Any] = {name: send(tensor, device) for name, tensor in vars(batch).items()}
    return PlacedBatch(**sent, host=batch)


def host_of(batch: Batch) -> Batch:
    """Return the batch to ask without a wait: the host's copy, if it has one."""
    return batch.host if isinstance(batch, PlacedBatch) else batch


def attention_mask(batch: Batch, *, pairs: bool = False) -> Bool[Tensor, "batch 1 seq seq"] | None:
    """Return which keys each query of the batch may see, or None where a causal mask is enough.

    pairs: queries and keys are pairs of a feature and the token after it, one less than tokens.
    """
    seen = slice(None, -1 if pairs else None)
    return document_mask(batch.document[:, seen], host_of(batch).document[:, seen])


def positions_to_predict(
    batch: Batch, distance: int
) -> tuple[Int[Tensor, " position"], Int[Tensor, " position"]]:
    """Return (rows, columns) of trained tokens after at least `distance` tokens of their text.

    Depth d, from 0, predicts a token from the feature at its column - (d + 2): distance d + 2.
    """
    host = host_of(batch)
    rows, columns = (host.loss_mask & (host.positions >= distance)).nonzero(as_tuple=True)
    return send(rows, batch.tokens.device), send(columns, batch.tokens.device)


@dataclass(frozen=True)
class Predictions:
    """Which state predicts which token: those of a batch at (rows, columns), at every depth.

    places: the state's row among all states of the depth; -1: none predicts the token there.
    """

    rows: Int[Tensor, " position"]
    columns: Int[Tensor, " position"]
    places: Int[Tensor, "depth position"]


def unrolled_predictions(batch: Batch, depths: int) -> Predictions:
    """Return the predictions of trained tokens by pairs, each depth reading one token further.

    Pair t of a row is of position t and token t + 1, so that a row has one less than it has tokens;
    the pairs of all rows are numbered in order. None predicts from before the start of a text.
    """
    rows, columns = positions_to_predict(batch, 2)
    depth = torch.arange(depths, device=rows.device)[:, None]
    places = rows * (batch.tokens.shape[1] - 1) + columns - 2 - depth
    known = batch.positions[rows, columns] - 2 >= depth
    return Predictions(rows, columns, places.where(known, -1))
