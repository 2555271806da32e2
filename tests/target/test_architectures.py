"""Every architecture is exact or capped, in the real loop; what is refused: test_limits.py."""

import dataclasses
from typing import Any

import pytest
import torch
from architectures import CAPPED, EXACT, POSITIONS, RARE, VOCAB, build, model_config_of
from builders import drafter_config
from test_loop import Oracle
from torch import Tensor

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Batch, Sample
from drafttrain.data.chat import within_limits
from drafttrain.data.skips import NothingUsable
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode, speculative_decode_batch
from drafttrain.target.model import Target

DEPTH = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in RARE]


def draw(count: int) -> list[int]:
    return torch.randint(6, VOCAB, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.no_grad()
def check_text(target: Target, prompt: list[int], text: tuple[int, ...]) -> None:
    """A greedy text is that of the model's own forward: no cache, no mask, nothing of ours."""
    whole = torch.tensor([[*prompt, *text]])
    logits = target.model(input_ids=whole, use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(text)


def settings(count: int) -> dict[str, Any]:
    return {
        "sampling": GREEDY,
        "max_new_tokens": count,
        "chance": SeededChance(0),
        "stop_tokens": (),
    }


def check_decoding(target: Target) -> None:
    """Greedy text is the model's own up to the last position, whatever is drafted."""
    count = target.spec.max_positions - DEPTH - 6
    prompt = draw(6)
    plain = autoregressive_decode(target, prompt, **settings(count)).tokens
    check_text(target, prompt, plain)
    # Every third draft is wrong: what follows it is rolled back.
    drafts = [(token + (place % 3 == 0)) % VOCAB for place, token in enumerate(plain)]
    oracle = Oracle(prompt + drafts)
    found = speculative_decode(target, oracle, prompt, policy=DEPTH, **settings(count))
    assert found.tokens == plain
    assert found.stats.trimmed.num_accepted_tokens > 0
    torch.manual_seed(0)
    drafter = drafter_config("eagle3").build(target.spec).eval()
    drafter.prepare(torch.ones(VOCAB, dtype=torch.long), target.readout)
    prompts = [prompt, prompt[:3]]
    rows = speculative_decode_batch(
        target, drafter, prompts, rows=[0, 1], policy=DEPTH, **settings(count)
    )
    assert rows[0].tokens == plain
    check_text(target, prompts[1], rows[1].tokens)


@torch.no_grad()
def check_features(target: Target) -> None:
    """Hidden states are Transformers' own, of rows alone and of rows of several documents."""
    length, last = target.spec.max_positions // 2, target.spec.num_layers
    first, second = torch.tensor(draw(length)), torch.tensor(draw(2 * length)[length:])
    captures = tuple(range(last + 1))
    apart = target.features(batch_of([[first], [second]]), captures)
    packed = target.features(batch_of([[first, second]]), captures)
    for row, tokens in enumerate((first, second)):
        output = target.model(
            input_ids=tokens[None], output_hidden_states=True, use_cache=False
        ).hidden_states
        place = slice(row * length, (row + 1) * length)
        for layer in range(last):
            torch.testing.assert_close(apart.captured[layer][row], output[layer][0], **CLOSE)
            torch.testing.assert_close(packed.captured[layer][0, place], output[layer][0], **CLOSE)
        torch.testing.assert_close(apart.final_hidden[row], output[last][0], **CLOSE)
        torch.testing.assert_close(packed.final_hidden[0, place], output[last][0], **CLOSE)
        normed = target.final_norm(apart.captured[last][row])
        torch.testing.assert_close(normed, output[last][0], **CLOSE)


def batch_of(rows: list[list[Tensor]]) -> Batch:
    tokens = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(len(d)) for d in row]) for row in rows])
    document = torch.stack(
        [torch.cat([torch.full((len(d),), i) for i, d in enumerate(row)]) for row in rows]
    )
    return Batch(tokens, tokens >= 0, positions, document)


@pytest.mark.parametrize("name", [*EXACT, *SLOW])
def test_an_accepted_architecture_is_exact(name: str) -> None:
    target = build(*(EXACT | RARE)[name])
    assert (target.spec.max_positions, target.spec.limited_by) == (POSITIONS, "")
    check_decoding(target)
    check_features(target)


@pytest.mark.parametrize("name", CAPPED)
def test_a_capped_architecture_is_exact_up_to_its_cap_and_refused_past_it(name: str) -> None:
    kind, changes, cap, reason = CAPPED[name]
    target = build(kind, changes)
    assert target.spec.max_positions == cap
    assert reason in target.spec.limited_by
    check_decoding(target)
    check_features(target)
    with pytest.raises(ValueError, match=rf"must fit in the {cap} positions of .*{reason}"):
        autoregressive_decode(target, draw(6), **settings(cap))
    with pytest.raises(ValueError, match=rf"must fit in the {cap} positions of .*{reason}"):
        target.features(batch_of([[torch.tensor(draw(cap + 1))]]), (0,))
    with pytest.raises(
        ValueError, match=rf"model.max_positions must be at most {cap} \(.*{reason}"
    ):
        build(kind, changes, model_config_of(max_positions=cap + 1))
    less = build(kind, changes, model_config_of(max_positions=cap - 1))
    assert less.spec.max_positions == cap - 1


@pytest.mark.parametrize("name", ["longrope", "a window in all layers"])
def test_a_cap_is_needed(name: str) -> None:
    """Past it the loop does not say what the model says."""
    kind, changes, *_ = CAPPED[name]
    target = build(kind, changes)
    target.spec = dataclasses.replace(target.spec, max_positions=POSITIONS)
    with pytest.raises(AssertionError):
        check_decoding(target)


def test_conversations_past_the_targets_positions_are_skipped_and_counted() -> None:
    target = build(*CAPPED["a window in all layers"][:2])
    samples = [
        Sample(torch.arange(length), torch.ones(length, dtype=torch.bool), length)
        for length in (15, 16)
    ]
    sources = {sample.index: "a.jsonl" for sample in samples}
    kept, report = within_limits(samples, target.spec, sources)
    assert [len(sample.tokens) for sample in kept] == [15]
    assert report.num_skipped == 1
    assert "longer than the 15 positions of model=tiny_test (sliding_window=15" in report.lines()[1]
    with pytest.raises(NothingUsable, match="that fit the target, got none"):
        within_limits(samples[1:], target.spec, sources)
