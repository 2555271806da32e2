"""An optimizer step is the same conversations however it is cut into micro batches and ranks."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from drafttrain.core.placed_batch import attention_mask
from drafttrain.core.types import PAD_DOCUMENT, Batch, Sample
from drafttrain.data.batches import PACKED_LENGTH, Batches, StepGroup, collate, pack, token_counts


def sample(index: int, length: int, trained_from: int = 1) -> Sample:
    """A sample whose tokens tell which sample and position they are of."""
    tokens = torch.arange(length) + 1000 * (index + 1)
    return Sample(tokens, torch.arange(length) >= trained_from, index)


def samples(count: int = 40) -> list[Sample]:
    return [sample(index, 3 + index * 7 % 23, 1 + index % 3) for index in range(count)]


def contents(batches: list[Batch]) -> Counter[tuple[Any, ...]]:
    """Return each document of the batches with its tokens, mask and positions."""
    found: Counter[tuple[Any, ...]] = Counter()
    for batch in batches:
        for row in range(len(batch.tokens)):
            for document in batch.document[row].unique().tolist():
                here = batch.document[row] == document
                assert document == PAD_DOCUMENT or here.nonzero().diff(dim=0).eq(1).all()
                fields = (batch.tokens, batch.loss_mask, batch.positions)
                if document != PAD_DOCUMENT:
                    found[(document, *(tuple(field[row][here].tolist()) for field in fields))] += 1
                else:
                    assert not any(field[row][here].any() for field in fields)
    return found


def expected(chosen: list[Sample]) -> Counter[tuple[Any, ...]]:
    return Counter(
        (
            item.index,
            tuple(item.tokens.tolist()),
            tuple(item.loss_mask.tolist()),
            tuple(range(len(item.tokens))),
        )
        for item in chosen
    )


def take(count: int, **settings: Any) -> list[StepGroup]:
    batches = Batches(samples(), **{"tokens_per_step": 100, "seed": 3, **settings})
    return [batches.next_group() for _ in range(count)]


@pytest.mark.parametrize(("micro_batch", "world_size"), [(1, 1), (2, 1), (4, 1), (1, 2), (4, 2)])
def test_a_step_is_the_same_for_every_micro_batch_and_number_of_ranks(
    micro_batch: int, world_size: int
) -> None:
    steps = 12  # beyond the first epoch
    reference = take(steps, micro_batch=64)
    ranks = [
        take(steps, micro_batch=micro_batch, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for number, whole in enumerate(reference):
        groups = [rank[number] for rank in ranks]
        assert len({len(group.batches) for group in groups}) == 1
        together = [batch for group in groups for batch in group.batches]
        assert contents(together) == contents(whole.batches)
        assert all(len(batch.tokens) <= micro_batch for batch in together)
        for group in groups:
            assert (group.loss_tokens, group.tokens) == (whole.loss_tokens, whole.tokens)
        assert whole.loss_tokens == sum(int(batch.loss_mask.sum()) for batch in together)
        assert whole.tokens == sum(int((batch.document >= 0).sum()) for batch in together)


def test_every_epoch_has_each_conversation_once_in_another_order() -> None:
    everything = samples()
    batches = Batches(everything, 100, 4, seed=3)
    epochs = []
    for epoch in range(3):
        groups = [batches.next_group() for _ in range(len(batches.steps))]
        assert batches.epoch == epoch
        assert contents([batch for group in groups for batch in group.batches]) == expected(
            everything
        )
        epochs.append([tuple(sorted(contents(group.batches))) for group in groups])
        assert all(60 <= group.tokens <= 140 for group in groups)
        batches.next_group()
        batches.load_state_dict({**batches.state_dict(), "step_in_epoch": 0})
    assert epochs[0] != epochs[1] != epochs[2]
    again = Batches(everything, 100, 4, seed=4)
    assert tuple(sorted(contents(again.next_group().batches))) != epochs[0][0]


def test_rows_are_packed_so_that_little_is_padding() -> None:
    for group in take(5, micro_batch=2):
        cells = sum(batch.tokens.numel() for batch in group.batches)
        longest = max(batch.tokens.shape[1] for batch in group.batches)
        assert all(len(batch.tokens) <= 2 for batch in group.batches)
        assert cells - group.tokens < longest, "no more than one row's worth is padding"


def test_a_saved_position_continues_identically_mid_epoch() -> None:
    batches = Batches(samples(), 100, 4, seed=3)
    for _ in range(len(batches.steps) + 2):
        batches.next_group()
    state = batches.state_dict()
    later = [batches.next_group() for _ in range(12)]
    resumed = Batches(samples(), 100, 4, seed=3)
    resumed.load_state_dict(state)
    for group in later:
        again = resumed.next_group()
        assert again.loss_tokens == group.loss_tokens
        for one, other in zip(again.batches, group.batches, strict=True):
            assert torch.equal(one.tokens, other.tokens)
    assert resumed.state_dict() == batches.state_dict()


@pytest.mark.parametrize(
    ("count", "settings", "key"),
    [
        (39, (100, 4, 3), "num_samples"),
        (40, (99, 4, 3), "tokens_per_step"),
        (40, (100, 4, 2), "seed"),
    ],
)
def test_a_position_in_other_data_is_refused(count: int, settings: Any, key: str) -> None:
    state = Batches(samples(), 100, 4, 3).state_dict()
    with pytest.raises(ValueError, match=rf"must have the data of its checkpoint: .*{key} was"):
        Batches(samples(count), *settings).load_state_dict(state)


def test_a_position_in_the_same_data_in_another_order_is_refused() -> None:
    state = Batches(samples(), 100, 4, 3).state_dict()
    other = Batches(samples()[::-1], 100, 4, 3)
    with pytest.raises(ValueError, match=r"data of its checkpoint: lengths_digest was \w{16}, got"):
        other.load_state_dict(state)


def test_one_conversation_longer_than_a_step_is_a_step() -> None:
    chosen = [sample(0, 90), sample(1, 4), sample(2, 4)]
    batches = Batches(chosen, 10, 4, seed=0)
    groups = [batches.next_group() for _ in range(len(batches.steps))]
    assert contents([batch for group in groups for batch in group.batches]) == expected(chosen)
    assert any(group.tokens == 90 for group in groups)
    assert all(group.batches for group in groups)


def test_a_data_set_smaller_than_a_step_is_one_step_an_epoch() -> None:
    chosen = [sample(0, 5), sample(1, 4)]
    batches = Batches(chosen, 1000, 4, seed=0)
    for _ in range(3):
        assert contents(batches.next_group().batches) == expected(chosen)
    assert batches.epoch == 2


def test_a_rank_with_nothing_to_do_gets_padding() -> None:
    groups = [Batches([sample(0, 5)], 10, 4, 0, rank, 3).next_group() for rank in range(3)]
    assert [len(group.batches) for group in groups] == [1, 1, 1]
    assert sum(contents(group.batches).total() for group in groups) == 1
    assert {group.loss_tokens for group in groups} == {4}
    assert [tuple(group.batches[0].tokens.shape) for group in groups] == [(1, 5)] * 3


def test_collate_pads_right_and_marks_padding() -> None:
    batch = collate([sample(7, 2), sample(9, 4, trained_from=2)])
    assert batch.tokens.tolist() == [[8000, 8001, 0, 0], [10000, 10001, 10002, 10003]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch.document.tolist() == [[7, 7, -1, -1], [9, 9, 9, 9]]


def test_pack_puts_several_documents_in_a_row() -> None:
    chosen = [sample(0, 3), sample(1, 4), sample(2, 3), sample(3, 5)]
    batch = pack(chosen, 6)
    assert batch.document.tolist() == [
        [0, 0, 0, 2, 2, 2],
        [1, 1, 1, 1, -1, -1],
        [3, 3, 3, 3, 3, -1],
    ]
    assert contents([batch]) == expected(chosen)
    with pytest.raises(ValueError, match="a sample of 5 tokens does not fit in rows of 4"):
        pack(chosen, 4)


def test_token_counts_are_of_trained_tokens() -> None:
    one = Sample(torch.tensor([1, 2, 2, 4]), torch.tensor([False, True, True, False]), 0)
    two = Sample(torch.tensor([2, 0]), torch.tensor([False, True]), 1)
    assert token_counts([one, two], 6).tolist() == [1, 0, 2, 0, 0, 0]


def test_a_step_without_a_trained_token_is_no_step() -> None:
    untrained = [sample(index, 60, trained_from=60) for index in range(10)]
    batches = Batches([*untrained, sample(10, 10)], tokens_per_step=60, micro_batch=4, seed=0)
    for _ in range(3):
        group = batches.next_group()
        assert group.loss_tokens == 9
        assert 10 in group.documents
    with pytest.raises(ValueError, match="must name some token after the first, got none"):
        Batches(untrained, tokens_per_step=20, micro_batch=4, seed=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
@pytest.mark.parametrize(
    "lengths",
    [[8192, *[2048] * 4], [8192, *[100] * 50], [3000, 2900, 700, 650, 500, 20], [600], [512, 3]],
    ids=["8k and 2k", "8k and short ones", "every length", "one", "rows of 512"],
)  # fmt: skip
def test_no_long_row_needs_a_mask(lengths: list[int], micro_batch: int, world_size: int) -> None:
    samples = [sample(place, length) for place, length in enumerate(lengths)]
    ranks = [
        Batches(samples, sum(lengths), micro_batch, 0, rank, world_size).next_group()
        for rank in range(world_size)
    ]
    assert len({len(group.batches) for group in ranks}) == 1
    batches = [batch for group in ranks for batch in group.batches]
    assert contents(batches).total() == len(lengths)
    assert contents(batches) == contents([collate([each]) for each in samples])
    for batch in batches:
        rows, length = batch.tokens.shape
        assert rows * length <= max(micro_batch * max(lengths), length)
        if length > PACKED_LENGTH:
            assert attention_mask(batch) is None
            real = (batch.document >= 0).sum()
            assert real == 0 or real >= 0.8 * rows * length, "at most a fifth is padding"


@pytest.mark.parametrize("epochs", [1, 2, 2.5, 0.4, 1e-9])
@pytest.mark.parametrize("lengths", [[12_096] * 7, [2000, *[3] * 40, 900, 900], [50] * 30])
def test_the_steps_of_epochs_are_those_that_are_taken(lengths: list[int], epochs: float) -> None:
    """A conversation longer than a step fills it alone: 7 of 12,096 tokens are 7 steps, not 331."""
    chosen = [sample(index, length) for index, length in enumerate(lengths)]
    chosen[1] = sample(1, lengths[1], trained_from=lengths[1])  # no token of it is trained
    batches, taken = Batches(chosen, 256, 4, seed=0), Counter[int]()
    while batches.epoch < 3:
        batches.next_group()
        taken[batches.epoch] += 1
    whole = int(epochs)
    part = math.ceil(round((epochs - whole) * taken[whole], 6))
    assert batches.num_steps(epochs) == max(1, part + sum(taken[epoch] for epoch in range(whole)))
