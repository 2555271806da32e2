"""A key-value cache with room to grow: appending a token copies that token, not the whole cache."""

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 64  # positions added when the room is used up, at least


class GrowingLayer(DynamicLayer):
    """`DynamicLayer` whose keys and values are the filled part of larger tensors.

    Transformers appends by concatenation: at batch 128 and 100 positions that copying was two
    fifths of a step of the embedded target.
    """

    def __init__(self) -> None:
        super().__init__()
        self.room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the new positions; return keys and values of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        total = past + key_states.shape[2]
        if self.room is None or self.room[0].shape[2] < total:
            capacity = max(total + ROOM, past + past // 2)
            self.room = (
                grown(self.keys, key_states, capacity),
                grown(self.values, value_states, capacity),
            )
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, past:total] = new
        self.keys, self.values = (room[:, :, :total] for room in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        super().batch_select_indices(indices)
        self.room = None


def grown(filled: Tensor | None, like: Tensor, capacity: int) -> Tensor:
    """Return room for `capacity` positions that begins with what is `filled`."""
    rows, heads, _, width = like.shape
    room = like.new_empty(rows, heads, capacity, width)
    if filled is not None and filled.numel():
        room[:, :, : filled.shape[2]] = filled
    return room


class GrowingCache(DynamicCache):
    """`DynamicCache` with `GrowingLayer`s: every layer keeps every position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer
