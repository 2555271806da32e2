"""Which conversations make up each optimizer step, and the micro batches they are computed in."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from drafttrain.core.types import PAD_DOCUMENT, Batch, Sample, TargetFeatures
from drafttrain.runtime.untrusted_input import MAX_COUNT, shown

# A row of several conversations needs a mask of all pairs of its tokens, which takes longer than
# everything else where rows are long. In rows of up to this length it costs next to nothing.
PACKED_LENGTH = 512
SIMILAR = 0.8  # of the longest row of a micro batch, at least


@dataclass(frozen=True)
class StepGroup:
    """One optimizer step: this rank's micro batches, and counts over all ranks."""

    batches: list[Batch]
    loss_tokens: int  # loss-mask positions of the whole step: the denominator of its loss
    tokens: int
    documents: tuple[int, ...]  # indices of its conversations
    features: tuple[TargetFeatures, ...] = ()  # of each micro batch, if they were read ahead


class Batches:
    """An endless stream of optimizer steps, whose position can be saved.

    The content of a step depends only on the samples, `tokens_per_step` and the seed, never on
    the micro batch or the number of ranks. Every epoch is a new permutation, cut into steps of
    nearly equal size. Within a step, short conversations are packed into rows; a long one has a row
    for itself (PACKED_LENGTH). A micro batch has rows of similar lengths, as many as have the
    tokens of `micro_batch` rows of the longest. All ranks get the same number of micro batches;
    where a step has fewer rows than ranks, some get padding only. A step without a trained token is
    passed over; ValueError if there are no others.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        tokens_per_step: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        # Nothing predicts a first token.
        self.loss_lengths = np.array([int(sample.loss_mask[1:].sum()) for sample in samples])
        if not self.loss_lengths.any():
            raise ValueError(
                "the loss mask of the data must name some token after the first, got none in any "
                "conversation: there is nothing to train on; give conversations with answers"
            )
        self.samples, self.tokens_per_step, self.seed = samples, tokens_per_step, seed
        self.micro_batch, self.rank, self.world_size = micro_batch, rank, world_size
        self.lengths = np.array([len(sample.tokens) for sample in samples])
        # Conversations in another order have their lengths in another order.
        in_order = np.stack([self.lengths, self.loss_lengths]).tobytes()
        self.lengths_digest = hashlib.sha256(in_order).hexdigest()[:16]
        self.epoch = self.step_in_epoch = 0
        self.steps = self._plan(0)

    def _plan(self, epoch: int) -> list[np.ndarray]:
        """Cut an epoch's permutation into steps: a sample goes where its middle token falls.

        Where samples are longer than a step, these are fewer than the tokens alone would make.
        """
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))
        lengths = self.lengths[order]
        total = int(lengths.sum())
        count = max(1, round(total / self.tokens_per_step))
        middles = lengths.cumsum() - lengths / 2
        step_of = np.minimum((middles * count / total).astype(int), count - 1)
        cuts = np.flatnonzero(np.diff(step_of)) + 1
        return np.split(order, cuts)

    def num_steps(self, epochs: float) -> int:
        """Return the optimizer steps, at least 1, that reading the samples `epochs` times takes."""
        count = 0
        for epoch in range(math.ceil(round(epochs, 6))):
            steps = sum(bool(self.loss_lengths[chosen].any()) for chosen in self._plan(epoch))
            # Rounded first: 1.1 * 10 is above 11 in binary.
            count += math.ceil(round(min(1.0, epochs - epoch) * steps, 6))
        return max(1, count)

    def next_group(self) -> StepGroup:
        """Return the next optimizer step."""
        trained = False
        while not trained:  # without a loss, momentum and decay alone would move the weights
            if self.step_in_epoch == len(self.steps):
                self.epoch, self.step_in_epoch = self.epoch + 1, 0
                self.steps = self._plan(self.epoch)
            chosen = self.steps[self.step_in_epoch]
            self.step_in_epoch += 1
            trained = bool(self.loss_lengths[chosen].any())
        # Longest first wastes the least room: the short ones that follow fill the gaps of rows.
        longest_first = chosen[np.lexsort((chosen, -self.lengths[chosen]))]
        samples = [self.samples[place] for place in longest_first]
        micro_batches = cut(rows_of(samples), self.micro_batch, self.world_size)
        least = min(longest(rows) for rows in micro_batches if rows)  # of what is padding alone
        own = micro_batches[self.rank :: self.world_size]
        return StepGroup(
            [_rows(rows or [[]], longest(rows) or least) for rows in own],
            int(self.loss_lengths[chosen].sum()),
            int(self.lengths[chosen].sum()),
            tuple(sorted(sample.index for sample in samples)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the data and settings that it is valid for."""
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "seed": self.seed,
            "tokens_per_step": self.tokens_per_step,
            "num_samples": len(self.samples),
            "num_tokens": int(self.lengths.sum()),
            "lengths_digest": self.lengths_digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; ValueError if the data or the settings differ."""
        for key, value in self.state_dict().items():
            earlier = state.get(key)
            if key in ("epoch", "step_in_epoch"):
                if type(earlier) is not int or not 0 <= earlier <= MAX_COUNT:
                    raise _lost(f"{key} must be an integer of at least 0", shown(earlier))
            elif earlier != value:
                raise ValueError(
                    f"a resumed run must have the data of its checkpoint: {key} was"
                    f" {shown(earlier)}, got {value}; restore data.* and trainer.*, or start a new"
                    " run"
                )
        self.epoch, self.step_in_epoch = state["epoch"], state["step_in_epoch"]
        self.steps = self._plan(self.epoch)
        if self.step_in_epoch > len(self.steps):
            raise _lost(f"step_in_epoch must be at most {len(self.steps)}", self.step_in_epoch)


def _lost(must: str, got: object) -> ValueError:
    return ValueError(
        f"a checkpoint must say where in the data it was: {must}, got {got}; resume from another, "
        "or start anew"
    )


def collate(samples: Sequence[Sample]) -> Batch:
    """Return a batch with one sample a row, padded right with token 0 to the longest."""
    rows = [[sample] for sample in samples]
    return _rows(rows, longest(rows))


def pack(samples: Sequence[Sample], length: int) -> Batch:
    """Return rows of `length` tokens with as many samples as fit, each in the first free row."""
    return _rows(packed_rows(samples, length), length)


def rows_of(longest_first: Sequence[Sample]) -> list[list[Sample]]:
    """Return the rows of a step's conversations: those up to PACKED_LENGTH are packed."""
    length = min(len(longest_first[0].tokens), PACKED_LENGTH)
    long = [[sample] for sample in longest_first if len(sample.tokens) > length]
    return [*long, *packed_rows(longest_first[len(long) :], length)]


def cut(
    rows: Sequence[list[Sample]], micro_batch: int, world_size: int
) -> list[Sequence[list[Sample]]]:
    """Return micro batches of rows of similar lengths, as many for each rank; some may be empty.

    Each has at most the tokens of `micro_batch` rows of the longest. No row of a long conversation
    has more than a fifth of padding.
    """
    sizes = [longest([row]) for row in rows]
    starts = [0]
    for place, size in enumerate(sizes):
        if PACKED_LENGTH < sizes[starts[-1]] and size < SIMILAR * sizes[starts[-1]]:
            starts.append(place)
    runs = list(itertools.pairwise([*starts, len(rows)]))  # of similar rows
    most = [max(1, micro_batch * sizes[0] // max(sizes[a:b])) for a, b in runs]
    counts = [-(-(b - a) // rows_at_most) for (a, b), rows_at_most in zip(runs, most, strict=True)]
    while sum(counts) % world_size:  # some run gives a micro batch to every rank
        left = [i for i, (a, b) in enumerate(runs) if counts[i] < b - a]
        if not left:
            break
        counts[max(left, key=lambda i: sum(sizes[slice(*runs[i])]) / counts[i])] += 1
    found: list[Sequence[list[Sample]]] = []
    for (start, stop), count in zip(runs, counts, strict=True):
        bounds = np.linspace(start, stop, count + 1).round().astype(int)
        found += [rows[a:b] for a, b in itertools.pairwise(bounds)]
    return [*found, *[[]] * (-len(found) % world_size)]


def packed_rows(samples: Sequence[Sample], length: int) -> list[list[Sample]]:
    """Put samples into rows of at most `length` tokens, each into the first with room."""
    rows: list[list[Sample]] = []
    free: list[int] = []
    for sample in samples:
        size = len(sample.tokens)
        if size > length:
            raise ValueError(f"a sample of {size} tokens does not fit in rows of {length}")
        row = next((row for row, room in enumerate(free) if room >= size), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(length)
        rows[row].append(sample)
        free[row] -= size
    return rows


def longest(rows: Sequence[Sequence[Sample]]) -> int:
    """Return the tokens of the longest row."""
    return max((sum(len(sample.tokens) for sample in row) for row in rows), default=0)


def _rows(rows: Sequence[Sequence[Sample]], length: int) -> Batch:
    shape = (len(rows), length)
    tokens = torch.zeros(shape, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    positions = torch.zeros(shape, dtype=torch.long)
    document = torch.full(shape, PAD_DOCUMENT)
    for row, samples in enumerate(rows):
        start = 0
        for sample in samples:
            stop = start + len(sample.tokens)
            tokens[row, start:stop] = sample.tokens
            loss_mask[row, start:stop] = sample.loss_mask
            positions[row, start:stop] = torch.arange(stop - start)
            document[row, start:stop] = sample.index
            start = stop
    return Batch(tokens, loss_mask, positions, document)


def token_counts(samples: Sequence[Sample], vocab_size: int) -> Int[Tensor, " vocab"]:
    """Count each token id among those whose prediction is trained."""
    trained = torch.cat([sample.tokens[sample.loss_mask] for sample in samples])
    return torch.bincount(trained, minlength=vocab_size)


def documents_of(batch: Batch) -> list[tuple[int, int, int, int, int]]:
    """Return (row, start, stop, document, position of its start) of each document of a batch."""
    found = []
    edges: Int[Tensor, "batch less"] = batch.document.diff(dim=1)
    for row, changes in enumerate(edges):
        cuts = [0, *(changes.nonzero().squeeze(1) + 1).tolist(), batch.tokens.shape[1]]
        for start, stop in itertools.pairwise(cuts):
            document = int(batch.document[row, start])
            if document != PAD_DOCUMENT:
                found.append((row, start, stop, document, int(batch.positions[row, start])))
    return found
