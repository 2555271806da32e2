"""What the parts of a decoding take: equal shares of the rows, nothing lost, no wait to read it."""

import time

import torch

from drafttrain.decode.clock import Clock
from drafttrain.decode.rows import Row


def test_rows_are_charged_in_equal_shares_that_add_up_to_the_time_between_the_moments() -> None:
    clock, rows = Clock(torch.device("cpu")), [Row(0, 5), Row(1, 7)]
    begun = time.perf_counter()
    first = clock.now()
    time.sleep(0.02)
    second = clock.now()
    time.sleep(0.01)
    third = clock.now()
    whole = time.perf_counter() - begun
    clock.charge(rows, prefill_s=[(first, second)])
    clock.charge(rows[:1], draft_s=[(first, second), (second, third)], other_s=[(third, third)])
    assert rows[0].stats.total_s == 0, "nothing is read before the end"
    clock.settle()
    clock.settle()
    assert rows[0].stats.prefill_s == rows[1].stats.prefill_s
    assert 0.02 <= 2 * rows[0].stats.prefill_s <= whole
    assert 0.03 <= rows[0].stats.draft_s <= whole
    assert rows[0].stats.other_s == rows[1].stats.draft_s == 0
