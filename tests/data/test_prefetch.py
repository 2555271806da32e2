"""Steps come early, in order, and the position saved is that of the steps handed out."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from test_training import random_samples

from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, TargetFeatures
from drafttrain.data.batches import Batches, StepGroup
from drafttrain.data.prefetch import Prefetcher


def batches() -> Batches:
    return Batches(random_samples(), tokens_per_step=90, micro_batch=4, seed=3)


def prints(group: StepGroup) -> list[list[int]]:
    return [[*batch.tokens.flatten().tolist(), group.loss_tokens] for batch in group.batches]


def features_of(batch: Batch) -> TargetFeatures:
    hidden = batch.tokens[..., None].float()
    return TargetFeatures({}, hidden, Readout(torch.zeros(2, 1), torch.zeros(2, 1)))


def prefetching() -> bool:
    return any(thread.name.startswith("prefetch") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not prefetching()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_steps_and_positions_are_those_of_the_batches_alone(ahead: int) -> None:
    plain = batches()
    with Prefetcher(batches(), ahead, features_of) as early:
        assert early.state_dict() == plain.state_dict()
        for _ in range(2 * len(plain.steps) + 1):  # past the end of an epoch, twice
            expected, group = plain.next_group(), early.next_group()
            assert prints(group) == prints(expected)
            assert early.state_dict() == plain.state_dict()
            for batch, features in zip(group.batches, group.features, strict=True):
                assert torch.equal(features.final_hidden, features_of(batch).final_hidden)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_saved_position_goes_on_with_the_very_next_step(ahead: int) -> None:
    plain = batches()
    steps = [prints(plain.next_group()) for _ in range(9)]
    with Prefetcher(batches(), ahead) as early:
        for _ in range(4):
            early.next_group()
        _wait_until_full(early)
        saved = early.state_dict()
    with Prefetcher(batches(), ahead) as resumed:
        resumed.next_group()  # to be dropped, with what the thread has made
        resumed.load_state_dict(saved)
        assert [prints(resumed.next_group()) for _ in range(5)] == steps[4:]


def test_closed_it_goes_on_where_it_was() -> None:
    plain, early = batches(), Prefetcher(batches(), 3)
    for _ in range(3):
        assert prints(early.next_group()) == prints(plain.next_group())
        _wait_until_full(early)
        early.close()


def test_as_many_steps_are_made_ahead_as_asked_for_and_no_more() -> None:
    read: list[Batch] = []

    def slow(batch: Batch) -> TargetFeatures:
        read.append(batch)
        return features_of(batch)

    plain = batches()
    sizes = [len(plain.next_group().batches) for _ in range(8)]
    with Prefetcher(batches(), 2, slow) as early:
        assert not read, "nothing is made before the first step is asked for"
        early.next_group()
        # Two wait in the queue, and one in the thread's hands for room in it.
        _wait_for(lambda: len(read) == sum(sizes[:4]))
        time.sleep(0.05)
        assert len(read) == sum(sizes[:4])
        assert not threading.current_thread().name.startswith("prefetch")


def test_an_error_is_raised_where_its_step_is_asked_for_and_ends_the_thread() -> None:
    calls = 0

    def fails_later(batch: Batch) -> TargetFeatures:
        nonlocal calls
        calls += 1
        if calls > sizes[0] + sizes[1]:
            raise ValueError("shard-00002 is damaged")
        return features_of(batch)

    plain = batches()
    sizes = [len(plain.next_group().batches) for _ in range(3)]
    early = Prefetcher(batches(), 4, fails_later)
    early.next_group()
    time.sleep(0.05)  # it has failed by now, but that is of a later step
    early.next_group()
    position = early.state_dict()
    with pytest.raises(ValueError, match="shard-00002 is damaged"):
        early.next_group()
    assert early.state_dict() == position
    assert not prefetching()


def test_what_happens_while_a_step_is_computed_costs_no_waiting() -> None:
    def slow(batch: Batch) -> TargetFeatures:
        time.sleep(0.01)
        return features_of(batch)

    def waited(ahead: int) -> float:
        with Prefetcher(batches(), ahead, slow) as early:
            early.next_group()
            total = 0.0
            for _ in range(4):
                time.sleep(0.1)  # the step
                asked = time.monotonic()
                early.next_group()
                total += time.monotonic() - asked
        return total

    assert waited(2) < waited(0) / 4


def _wait_until_full(early: Prefetcher) -> None:
    _wait_for(lambda: early.ahead == 0 or all(made.done() for made in early._ready))


def _wait_for(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
