"""A cache with room to grow holds what Transformers' own cache holds, bit for bit."""

from pathlib import Path

import torch
from tests_support import model_config
from transformers import DynamicCache

from drafttrain.target.growing import ROOM, GrowingCache
from drafttrain.target.target import load_target


def test_steps_rollbacks_and_selections_give_the_logits_of_the_plain_cache(
    tiny_target_dir: Path,
) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    plain, growing = DynamicCache(), GrowingCache()
    generator = torch.Generator().manual_seed(0)
    rows, capacities = 4, set()
    for step in range(ROOM + 20):
        tokens = torch.randint(6, 97, (rows, 1 if step % 5 else 3), generator=generator)
        expected, _ = target.step(plain, tokens)
        logits, _ = target.step(growing, tokens)
        assert torch.equal(logits, expected)
        capacities.add(growing.layers[0].room[0].shape[2])
        for cache in (plain, growing):
            if step % 7 == 3:
                target.rollback(cache, 2)
            if step == 40:
                target.select(cache, torch.tensor([3, 0, 2]))
        rows = 3 if step >= 40 else 4
    assert plain.get_seq_length() == growing.get_seq_length() > ROOM
    assert 2 <= len(capacities) <= 4  # it grew, but not at every step
