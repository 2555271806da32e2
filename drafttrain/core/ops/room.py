"""Room for keys and values that stays where it is, so that passes over it can be captured."""

import weakref
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.ops.graphs import Capture, Graphs

NARROWEST = 256  # positions; each wider room has twice as many
# Passes read whole rooms, and rooms are kept: longer texts, or more of them, lose more by that than
# they gain by graphs, as their passes take longer than their launches.
WIDEST = 4096
MOST_ROWS = 8


class Room:
    """Keys and values of every layer for `rows` texts of at most `width` tokens, and its graphs.

    Passes read all of it, so that their shapes do not depend on how long the texts are.
    """

    def __init__(self, rows: int, width: int, capture: Capture) -> None:
        self.rows, self.width = rows, width
        self.layers: list[tuple[Tensor, Tensor]] = []  # "rows kv_head width head_dim"
        self.graphs = Graphs(capture)

    def layer(self, number: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer for as many rows as `like` has.

        A layer that has none yet gets them, made like these.
        """
        if number == len(self.layers):
            with torch.inference_mode(False):  # written to in either mode
                keys, values = (
                    part.new_zeros(self.rows, part.shape[1], self.width, part.shape[3])
                    for part in like
                )
            self.layers.append((keys, values))
        keys, values = self.layers[number]
        return keys[: len(like[0])], values[: len(like[1])]

    def clear(self) -> None:
        """Forget what it holds: NaN of another text would stay NaN at a weight of zero."""
        for layer in self.layers:
            for part in layer:
                part.zero_()


class Lent:
    """Rooms that one cache uses, a wider one once the text has grown."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.rooms: dict[int, Room] = {}
        self.rows = 0  # the most that were asked for: fewer are left when a text has grown

    def room(self, rows: int, length: int) -> Room | None:
        """Return the narrowest room for texts of this length, empty; None if they are too large."""
        if rows > MOST_ROWS or length > WIDEST:
            return None
        self.rows, width = max(self.rows, rows), NARROWEST
        while width < length:
            width *= 2
        room = self.rooms.get(width)
        if room is None or room.rows < self.rows:
            room = self.rooms[width] = Room(self.rows, width, self.capture)
        room.clear()
        return room


class Rooms:
    """Rooms for one cache after another, which keep their graphs."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.idle: list[Lent] = []

    def lend(self, borrower: Any) -> Lent:
        """Return rooms that no other uses until `borrower` is gone."""
        lent = self.idle.pop() if self.idle else Lent(self.capture)
        weakref.finalize(borrower, self._take_back, lent)
        return lent

    def _take_back(self, lent: Lent) -> None:
        self.idle[:] = [lent]  # of several at once, the one that was used last

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rooms":
        return Rooms(self.capture)  # graphs read the weights of the drafter that was copied
