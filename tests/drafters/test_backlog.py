"""A drafter that reads late drafts what it would have drafted had it read at once."""

from collections.abc import Sequence

import pytest
import torch
from test_drafters import ALL, PROMPTS, random_drafter

from drafttrain.core.ops.ragged_cache import padded_rows
from drafttrain.core.types import TargetFeatures
from drafttrain.drafters.base import Drafter, DraftState
from drafttrain.drafters.shared.backlog import Backlog
from drafttrain.target.model import Target

FIRST = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
Part = tuple[torch.Tensor, Sequence[int], TargetFeatures]


def parts_of(target: Target, drafter: Drafter) -> tuple[torch.Tensor, list[Part]]:
    """The first tokens, and what four passes of the target decode: the prompts, three steps."""
    tokens, counts = padded_rows(FIRST, target.device)
    cache = target.begin()
    logits, features = target.step(cache, tokens, drafter.captures, counts, last_only=True)
    newest = logits[:, -1].argmax(-1)
    following = torch.cat([tokens[:, 1:], newest[:, None]], dim=1)
    following.scatter_(1, torch.tensor(counts)[:, None] - 1, newest[:, None])
    parts: list[Part] = [(following, counts, features)]
    for _ in range(3):
        logits, features = target.step(cache, newest[:, None], drafter.captures)
        newest = logits[:, -1].argmax(-1)
        parts.append((newest[:, None], [1] * len(FIRST), features))
    return tokens[:, 0], parts


@torch.inference_mode()
def drafted(drafter: Drafter, state: DraftState) -> torch.Tensor:
    whole = drafter.propose(state, 3)
    return drafter.expand(state, None) if whole is None else whole.tokens.double()


@pytest.mark.parametrize("kept", [[0, 1, 2], [2, 0], [1]], ids=str)
@pytest.mark.parametrize("family", ALL)
@torch.inference_mode()
def test_what_is_read_late_is_read_whole(family: str, kept: list[int], target: Target) -> None:
    drafter = random_drafter(family, target)
    first, parts = parts_of(target, drafter)
    states = [drafter.begin(target.readout, first, 64) for _ in range(2)]
    for tokens, counts, features in parts[:3]:
        drafter.observe(states[0], tokens, counts, features)
    drafter.select(states[0], kept)
    late = Backlog(drafter, states[1])
    for part in parts[:3]:
        late.add(*part)
    late.select(kept)  # rows leave before the drafter has read anything
    tokens, _, features = parts[3]
    left = tokens[kept], [1] * len(kept), features.rows(kept)
    drafter.observe(states[0], *left)
    late.add(*left)
    late.read()
    late.read()  # nothing is left to read
    torch.testing.assert_close(drafted(drafter, states[1]), drafted(drafter, states[0]))
