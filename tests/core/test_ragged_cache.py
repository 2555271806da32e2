"""A cache with room to grow holds what Transformers' own cache holds, bit for bit."""

from pathlib import Path

import torch
from builders import model_config
from transformers import DynamicCache

from drafttrain.core.ops.ragged_cache import ROOM
from drafttrain.target.model import load_target


def test_steps_rollbacks_and_selections_give_the_logits_of_the_plain_cache(
    tiny_target_dir: Path,
) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    plain, ragged = DynamicCache(), target.begin()
    generator = torch.Generator().manual_seed(0)
    rows, capacities = 4, set()
    for step in range(ROOM + 20):
        new = 1 if step % 5 else 3
        tokens = torch.randint(6, 97, (rows, new), generator=generator)
        past = plain.get_seq_length()
        mask = torch.ones(new, past + new, dtype=torch.bool).tril_(past)[None, None]
        with torch.no_grad():
            expected = target.model(
                tokens,
                past_key_values=plain,
                attention_mask=mask if past and new > 1 else None,
                position_ids=torch.arange(past, past + new)[None],
            ).logits
        logits, _ = target.step(ragged, tokens)
        assert torch.equal(logits, expected)
        capacities.add(ragged.layers[0].room[0].shape[2])
        if step % 7 == 3:
            plain.crop(-2)
            target.rollback(ragged, [length - 2 for length in ragged.lengths])
        if step == 40:
            plain.batch_select_indices(torch.tensor([3, 0, 2]))
            target.select(ragged, [3, 0, 2])
        rows = 3 if step >= 40 else 4
    assert plain.get_seq_length() == ragged.get_seq_length() > ROOM
    assert 2 <= len(capacities) <= 4  # it grew, but not at every step
