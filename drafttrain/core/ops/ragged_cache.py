"""The key-value cache of decoding, preallocated, with rows of different lengths.

It serves decoders of Transformers, which call it layer by layer, and a drafter's own layer, which
is its layer 0. A pass is `run`, in which every layer calls `update`. Tokens of a tree are appended
like others; `branches` says what the next pass's tokens see, and `keep` moves the accepted ones
together. In fixed rooms, passes after the first are captured (`Graphs`): they write at positions
that the device holds, and read the whole width of the room.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from drafttrain.core.ops.graphs import Outputs
from drafttrain.core.ops.room import Room, Rooms
from drafttrain.core.transfer import send, send_numbers
from drafttrain.core.tree import Branches

BAND = 32  # the band of masks is made for passes of at least this many tokens
ROOM = 64  # positions added, at least, when the room is used up
WIDEST = 128  # tokens of a pass that is captured: wider ones are few, and seldom equally wide


class RaggedLayer(DynamicLayer):
    """`DynamicLayer` that writes after each row's own last position, in preallocated room.

    Transformers appends by concatenation: at batch 128 and 100 positions that copying took two
    fifths of a step of the embedded target. Values past a row's length are garbage, which the row's
    mask hides until they are overwritten.
    """

    def __init__(self, owner: "RaggedCache") -> None:
        super().__init__()
        self.owner = owner
        self.number = len(owner.layers)
        self.room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the new positions of every row; return keys and values of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner, new = self.owner, key_states.shape[2]
        past, spots, total = owner.past, owner.spots, owner.total
        if self.room is None and owner.room is not None:
            self.room = owner.room.layer(self.number, (key_states, value_states))
        elif self.room is None or self.room[0].shape[2] < total:
            capacity = max(total + ROOM, total + total // 2)
            empty = key_states[:, :, :0], value_states[:, :, :0]
            filled = empty if self.room is None else self.room
            self.room = grown(filled[0], capacity), grown(filled[1], capacity)
        if spots is None:
            self.room[0][:, :, past : past + new] = key_states
            self.room[1][:, :, past : past + new] = value_states
        else:
            # Layers of a target that is spread over devices may be on another device.
            rows, places = (spot.to(self.room[0].device) for spot in spots)
            self.room[0][rows, :, places] = key_states.transpose(1, 2)
            self.room[1][rows, :, places] = value_states.transpose(1, 2)
        self.keys, self.values = (room[:, :, :total] for room in self.room)
        return self.keys, self.values

    def move(self, fixed: Room, filled: int) -> None:
        """Go on in another fixed room, with the first `filled` positions of this one."""
        assert self.room is not None, "a pass comes first"
        wider = fixed.layer(self.number, self.room)
        for old, room in zip(self.room, wider, strict=True):
            room[:, :, :filled] = old[:, :, :filled]
        self.room = wider

    def keep(self, rows: Tensor, old: Tensor, new: Tensor) -> None:
        """Copy each row's positions `old` to its positions `new`."""
        for room in self.room or ():
            index, source, place = (part.to(room.device) for part in (rows, old, new))
            room[index, :, place] = room[index, :, source]

    def get_seq_length(self) -> int:
        """Return the length of the longest row."""
        return max(self.owner.lengths, default=0)

    def replace(self, rows: Int[Tensor, " new"], other: "RaggedLayer", length: int) -> None:
        """Copy the first `length` positions of another layer's rows into these rows."""
        assert self.room is not None, "a pass comes first"
        if self.room[0].shape[2] < length:
            self.room = grown(self.room[0], length), grown(self.room[1], length)
        for room, new in zip(self.room, other.room or (), strict=True):
            room[rows, :, :length] = new[:, :, :length]

    def select(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep only these rows."""
        if self.room is not None:
            keys, values = self.room[0][rows], self.room[1][rows]
            if self.owner.room is not None:  # which stays where it is
                keys = self.room[0][: len(rows)].copy_(keys)
                values = self.room[1][: len(rows)].copy_(values)
            self.room = self.keys, self.values = keys, values


def grown(filled: Tensor, capacity: int) -> Tensor:
    """Return room for `capacity` positions, which starts with the content of `filled`."""
    rows, heads, length, width = filled.shape
    # Zeros: garbage in a row is multiplied by a weight of zero, and NaN would stay NaN.
    room = filled.new_zeros(rows, heads, capacity, width)
    room[:, :, :length] = filled
    return room


class RaggedCache(DynamicCache):
    """`DynamicCache` whose rows have lengths of their own; every layer keeps every position.

    rows: their number; 0 takes that of the first pass. rooms: fixed rooms to borrow from, where
    passes are to be captured.
    """

    def __init__(self, rows: int = 0, rooms: Rooms | None = None) -> None:
        # Without a configuration every layer keeps all positions, so all can be rolled back.
        super().__init__()
        self.lengths = [0] * rows
        self.band: Tensor | None = None  # the mask from `reach` positions before each token on
        self.reach = 0
        self.past = 0  # length of the longest row before the current pass
        self.total = 0  # positions that the current pass reads
        self.mask: Tensor | None = None  # of the current pass
        self.starts: Tensor | None = None  # the rows' lengths on the device
        self.spots: tuple[Tensor, Tensor] | None = None  # where uneven rows write in this pass
        self.branches: Branches | None = None  # of the next pass; None: its tokens are in a row
        self.lent = None if rooms is None else rooms.lend(self)
        self.room: Room | None = None  # the fixed one, from the first pass on
        # Transformers calls it without arguments for each new layer. A reference in a circle would
        # keep the cache's memory until Python looks for circles.
        own = weakref.proxy(self)
        self.layer_class_to_replicate = partial(RaggedLayer, own)  # type: ignore[assignment]

    @property
    def even(self) -> bool:
        """Whether all rows are equally long; a captured pass does not know how long they are."""
        return len(set(self.lengths)) < 2 and (self.room is None or not max(self.lengths))

    def run(
        self,
        function: Callable[..., Outputs],
        inputs: Sequence[Tensor],
        counts: Sequence[int] | None = None,
        key: Hashable = None,
    ) -> Outputs:
        """Return function(*inputs), in which every layer appends its tokens under `mask`.

        inputs: the first one is "rows new ..."; what the function reads beside them must stay
        where it is. counts: how many of each row's tokens are real; what follows is garbage. key:
        tells functions apart that take inputs of the same shapes.
        """
        (rows, new), device = inputs[0].shape[:2], inputs[0].device
        self.open(rows, new)
        if self.room is None or not self.past:
            self.mask = self.masked(rows, new, device)
            outputs = function(*inputs)
        else:
            outputs = self._captured(self.room, function, inputs, key)
        self.end_pass([new] * rows if counts is None else counts)
        return outputs

    def _captured(
        self, room: Room, function: Callable[..., Outputs], inputs: Sequence[Tensor], key: Hashable
    ) -> Outputs:
        """Run a pass whose shapes do not depend on the rows' lengths.

        What the layers ask this cache for while it is captured (`mask`, `spots`, `starts`) is
        computed within it, from inputs that the graph holds.
        """
        (rows, new), device = inputs[0].shape[:2], inputs[0].device
        varying = [self._starts(device)]
        if self.branches is not None:
            varying += [self.branches.seen, self.branches.depth]

        def whole(*held: Tensor) -> Outputs:
            self.starts, *tree = held[: len(varying)]
            self.branches = Branches(*tree) if tree else None
            self.mask = self.masked(rows, new, device)
            return function(*held[len(varying) :])

        if new > WIDEST:
            return whole(*varying, *inputs)
        return room.graphs.run((key, len(varying)), whole, [*varying, *inputs])

    def open(self, rows: int, new: int) -> None:
        """Begin a pass over `new` tokens of each row: find room for them."""
        if not self.lengths:
            self.lengths = [0] * rows
        self.past = max(self.lengths)
        self.total = self.past + new
        if self.lent is not None and (self.room is None or self.room.width < self.total):
            self.room = self.lent.room(rows, self.total)
            if self.room is None:  # from now on the layers have room of their own, which grows
                self.lent = None
                return
            for layer in self.layers:
                assert isinstance(layer, RaggedLayer)
                layer.move(self.room, self.past)
        if self.room is not None and self.past:
            self.total = self.room.width

    def masked(self, rows: int, new: int, device: torch.device) -> Tensor | None:
        """Return the mask of the pass that was opened; None for plain causality.

        Even rows share one mask, "1 1 new total"; otherwise it is "batch 1 new total".
        """
        self.spots = None
        if self.even:
            if self.branches is not None:
                return self.of_tree(self.branches)
            return self.causal(new, device) if self.past and new > 1 else None
        places = self._starts(device) + torch.arange(new, device=device)
        self.spots = torch.arange(rows, device=device)[:, None].expand_as(places), places
        return self.visible(places) if self.branches is None else self.of_tree(self.branches)

    def end_pass(self, counts: Sequence[int]) -> None:
        """Add `counts` tokens of the pass to the rows' lengths; what follows them is garbage."""
        self.branches = self.mask = self.starts = self.spots = None
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def positions(self, new: int, device: torch.device) -> Int[Tensor, "rows new"]:
        """Return the positions of the next `new` tokens; even rows share them, if trees do."""
        if self.branches is not None:
            return self._starts(device) - self.branches.num_before + self.branches.depth
        if self.even:
            past = max(self.lengths, default=0)
            return torch.arange(past, past + new, device=device)[None]
        return self._starts(device) + torch.arange(new, device=device)

    def _starts(self, device: torch.device) -> Int[Tensor, "rows 1"]:
        """Return the length of each row; even rows share it."""
        if self.starts is None:
            lengths = self.lengths[:1] or [0]
            self.starts = send_numbers(lengths if self.even else self.lengths, device)[:, None]
        return self.starts

    def causal(self, new: int, device: torch.device) -> Bool[Tensor, "1 1 new total"]:
        """Return the mask of `new` tokens after `past` positions, if rows are even.

        It is a window of a band that is made once, which saves three operations in every pass.
        """
        if self.band is None or self.band.shape[2] < new or self.reach < self.past:
            self.reach = 2 * self.past
            shape = (max(new, BAND), self.reach + max(new, BAND))
            band = torch.ones(shape, dtype=torch.bool, device=device).tril_(self.reach)
            self.band = band[None, None]
        return self.band[:, :, :new, self.reach - self.past : self.reach + new]

    def visible(self, places: Int[Tensor, "batch new"]) -> Bool[Tensor, "batch 1 new total"]:
        """Return the mask of new tokens at `places`: they see their row's past and themselves."""
        return torch.arange(self.total, device=places.device) <= places[:, None, :, None]

    def of_tree(self, branches: Branches) -> Bool[Tensor, "rows 1 new total"]:
        """Return the mask of a tree's tokens: they see what precedes the tree, and their path."""
        seen = branches.seen
        new, in_tree = seen.shape[1:]
        before, total = self._starts(seen.device) - branches.num_before, self.total
        if self.even:
            earlier = torch.ones(1, dtype=torch.bool, device=seen.device)
            return torch.cat([earlier.expand(*seen.shape[:2], total - in_tree), seen], 2)[:, None]
        mask = (torch.arange(total, device=seen.device) < before)[:, None].expand(-1, new, -1)
        places = (before + torch.arange(in_tree, device=seen.device))[:, None].expand(-1, new, -1)
        return mask.scatter(2, places, seen.expand(len(mask), -1, -1))[:, None]

    def keep(self, starts: Sequence[int], path: Int[Tensor, "batch kept"]) -> None:
        """Move each row's tokens start + path[0], start + path[1], ... to start, start + 1, ..."""
        first = send_numbers(starts, path.device)[:, None]
        if self.room is None:
            self._keep(first, path)
        else:
            self.room.graphs.run("keep", self._keep, (first, path))

    def _keep(self, first: Tensor, path: Tensor) -> Outputs:
        rows = torch.arange(len(path), device=path.device)[:, None]
        new = first + torch.arange(path.shape[1], device=path.device)
        for layer in self.layers:
            assert isinstance(layer, RaggedLayer)
            layer.keep(rows, first + path, new)
        return ()

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop the positions past these lengths, one per row."""
        assert all(0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)), (
            f"cannot roll back from {self.lengths} to {list(lengths)}"
        )
        self.lengths, self.starts = list(lengths), None

    def replace(self, rows: Sequence[int], other: "RaggedCache") -> None:
        """Put the rows of another cache in place of these; neither is in a fixed room."""
        assert (self.room, other.room) == (None, None)
        for layer, new in zip(self.layers, other.layers, strict=True):
            assert isinstance(layer, RaggedLayer)
            assert isinstance(new, RaggedLayer)
            layer.replace(send_numbers(rows, layer.device), new, max(other.lengths))
        lengths = dict(enumerate(self.lengths)) | dict(zip(rows, other.lengths, strict=True))
        self.lengths, self.starts = list(lengths.values()), None

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.lengths, self.starts = [self.lengths[row] for row in rows], None
        for layer in self.layers:
            assert isinstance(layer, RaggedLayer)
            layer.select(send_numbers(rows, layer.device))


def run_decoder(
    decode: Callable[..., Outputs],
    cache: RaggedCache,
    tokens: Int[Tensor, "batch new"],
    counts: Sequence[int] | None = None,
    scores: torch.dtype | None = None,
    key: Hashable = None,
) -> Outputs:
    """Append tokens to the cache and return what `decode` returns: it calls a decoder with these.

    Row r has counts[r] real tokens, the rest of the row is padding on the right that nothing sees
    (None: all are real). scores: the dtype of the decoder's scores, if it adds its mask to them
    instead of reading booleans. key: see `RaggedCache.run`.
    """

    def run(tokens: Tensor, positions: Tensor) -> Outputs:
        mask = cache.mask if scores is None or cache.mask is None else additive(cache.mask, scores)
        return decode(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )

    positions = cache.positions(tokens.shape[1], tokens.device)
    return cache.run(run, (tokens, positions), counts, key)


def additive(mask: Bool[Tensor, "rows 1 new total"], dtype: torch.dtype) -> Tensor:
    """Return the mask in additive form, to be added to scores."""
    shape, device = mask.shape, mask.device
    lowest = torch.finfo(dtype).min
    return torch.zeros(shape, dtype=dtype, device=device).masked_fill_(~mask, lowest)


Ragged = tuple[Tensor, list[int]]  # rows padded right, and how many tokens of each are real


def padded_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Ragged:
    """Return rows of tokens padded right, and their lengths."""
    counts = [len(row) for row in rows]
    longest = max(counts)
    filled = [[*row, *[0] * (longest - len(row))] for row in rows]
    return send(torch.tensor(filled, dtype=torch.long), device), counts
