"""DSpark against the paper's equations: its losses, what a node reads, what it is confident of."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import model_config
from published import dspark_reference
from test_adaptive import costs
from test_drafters import NoChance, as_batch, build, random_drafter

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Batch, TargetFeatures
from drafttrain.decode.adaptive import Adaptive, Pace
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.dspark import DSpark, DSparkState
from drafttrain.target.model import Target, load_target

TEXT = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 4, 30]
SIZE = 4
MARKOVS = ["plain", "gated"]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    with torch.no_grad():
        target.readout.head.mul_(8)  # sharp enough to differ from a drafter
    return target


def dspark(target: Target, **overrides: Any) -> DSpark:
    drafter = random_drafter("dspark", target, **{"block_size": SIZE} | overrides)
    assert isinstance(drafter, DSpark)
    return drafter


def begun(drafter: DSpark, target: Target, text: list[int]) -> DSparkState:
    tokens = torch.tensor([text])
    _, features = target.step(target.begin(), tokens[:, :-1], drafter.captures)
    state = drafter.begin(target.readout, tokens[:, 0], 40)
    drafter.observe(state, tokens[:, 1:], [len(text) - 1], features)
    return state


def reference(drafter: DSpark, confidence: bool) -> Any:
    shape = {**vars(drafter.shape), "eps": drafter.shape.rms_norm_eps, "scaling": None}
    shape |= {"heads": shape["num_attention_heads"], "kv_heads": shape["num_key_value_heads"]}
    shape |= {"theta": shape["rope_theta"]}
    return dspark_reference(shape, 2, SIZE, drafter.mask_token_id, confidence)


@pytest.mark.parametrize("markov", MARKOVS)
@torch.no_grad()
def test_training_is_the_papers_equations_for_every_block(markov: str, target: Target) -> None:
    """Every anchor and place, densely and in float64: cross-entropy, L1 distance, confidence."""
    drafter = dspark(target, markov=markov).double()
    drafts, confidences = reference(drafter, False), reference(drafter, True)
    batch, readout = as_batch(TEXT), target.readout.to(torch.float64)
    features = target.features(batch, drafter.captures)
    captured = torch.stack([features.captured[layer][0] for layer in drafter.captures]).double()
    final = features.final_hidden.double()
    target_probs = (final[0] @ readout.head.T).softmax(-1)
    tensors = dict(drafter.state_dict()) | {"the target's head": readout.head}
    expected, counts = torch.zeros(2, SIZE).double(), [0] * SIZE
    for anchor in range(1, len(TEXT) - 1):
        text = [*TEXT, *[0] * SIZE]
        before = captured[:, :anchor]
        given = (tensors, before, before[0], readout.embedding, text)
        logits, confidence = drafts(*given), confidences(*given)
        for place, token in enumerate(TEXT[anchor + 1 : anchor + 1 + SIZE]):
            probs = logits[place].softmax(-1)
            distance = (probs - target_probs[anchor + place]).abs().sum()
            expected[0, place] += 0.1 * -probs[token].log() + 0.9 * distance
            alpha, sure = 1 - distance / 2, confidence[place]
            expected[1, place] -= alpha * sure.log() + (1 - alpha) * (1 - sure).log()
            counts[place] += 1
    layers = dict(zip(drafter.captures, captured[:, None], strict=True))
    losses = drafter(batch, TargetFeatures(layers, final, readout), NoChance())
    for row, name in enumerate(("depth", "confidence")):
        terms = [losses[f"{name}_{place + 1}"] for place in range(SIZE)]
        found = torch.stack([term.sum for term in terms])
        torch.testing.assert_close(found, expected[row], rtol=1e-5, atol=0)
        assert [int(term.count) for term in terms] == counts
        gamma = drafter.config.gamma
        assert [term.weight for term in terms] == [math.exp(-k / gamma) for k in range(SIZE)]
    assert len(losses) == 2 * SIZE


@pytest.mark.parametrize("markov", MARKOVS)
def test_a_place_reads_the_token_before_it_and_no_other_after_the_anchor(
    markov: str, target: Target
) -> None:
    drafter, anchor, depth = dspark(target, markov=markov), 5, 3
    mask = [[place == anchor + depth for place in range(len(TEXT))]]
    batch = as_batch(TEXT, mask=mask)
    features = target.features(batch, drafter.captures)
    found = []
    for changed in (None, anchor + depth - 2, anchor + depth - 1, anchor + depth + 1):
        text = batch.tokens.clone()
        if changed is not None:
            text[0, changed] = 70
        other = Batch(text, batch.loss_mask, batch.positions, batch.document)
        terms = drafter(other, features, NoChance())
        found.append(
            [float(terms[f"{name}_{depth}"].sum.detach()) for name in ("depth", "confidence")]
        )
    # The token two before is the anchor of another block, which has its term at depth 2.
    assert found[0] == found[1] == found[3]
    assert found[0][0] != found[2][0]
    assert found[0][1] != found[2][1]


@torch.no_grad()
def test_children_depend_on_their_parents_token_alone(target: Target) -> None:
    drafter = dspark(target)
    state = begun(drafter, target, TEXT)
    first = drafter.expand(state, None)
    assert first.shape == (1, 1, target.spec.vocab_size)
    tokens = torch.tensor([[33, 41, 33]])
    logits = drafter.expand(state, tokens, torch.tensor([[0, 0, 0]]))
    assert torch.equal(logits[:, 0], logits[:, 2])
    head = drafter.markov_head
    apart = (head.markov_w1.weight[41] - head.markov_w1.weight[33]) @ head.markov_w2.weight.T
    torch.testing.assert_close(logits[0, 1] - logits[0, 0], apart)
    sure = drafter.confidence(state)
    assert sure.shape == (1, 3)
    assert sure[0, 0] == sure[0, 2] != sure[0, 1]


@torch.no_grad()
def test_confidence_is_that_of_the_reference_before_the_token_is_drawn(target: Target) -> None:
    drafter = dspark(target).double()
    double = Target(target.model.double(), target.tokenizer, target.spec)
    try:
        state = begun(drafter, double, TEXT[:6])
        _, features = double.step(double.begin(), torch.tensor([TEXT[:5]]), drafter.captures)
    finally:
        target.model.float()
    captured = torch.stack([features.captured[layer][0] for layer in drafter.captures])
    tensors = dict(drafter.state_dict())
    expected = reference(drafter, True)(
        tensors, captured, captured[0], double.readout.embedding, TEXT
    )
    newest = None
    for depth in range(SIZE):
        drafter.expand(state, newest)
        torch.testing.assert_close(
            drafter.confidence(state)[0, 0], expected[depth], rtol=1e-5, atol=1e-6
        )
        newest = torch.tensor([[TEXT[6 + depth]]])


def test_confidence_is_trained_towards_the_overlap_with_the_target(target: Target) -> None:
    torch.manual_seed(0)
    drafter = build("dspark", target.spec, block_size=SIZE, losses={"total_variation": 1.0})
    assert isinstance(drafter, DSpark)
    drafter.prepare(torch.arange(target.spec.vocab_size), target.readout)
    batch = as_batch(TEXT, list(range(30, 60)))
    features = target.features(batch, drafter.captures)
    optimizer = torch.optim.Adam(drafter.confidence_head.parameters(), lr=0.1)
    predicted: list[torch.Tensor] = []
    drafter.confidence_head.register_forward_hook(
        lambda _, __, logits: predicted.append(logits.detach().sigmoid())
    )
    told = drafter._blocks(batch, NoChance()).drafted[:, 1:]
    apart, loss = [], []
    for _ in range(200):
        optimizer.zero_grad()
        terms = drafter(batch, features, NoChance())
        confidence = [terms[f"confidence_{k}"].sum for k in range(1, SIZE + 1)]
        sum(confidence).backward()  # type: ignore[union-attr]
        optimizer.step()
        distance = sum(float(terms[f"depth_{k}"].sum.detach()) for k in range(1, SIZE + 1))
        alpha = 1 - distance / int(told.sum())
        apart.append(abs(float(predicted[-1][told].mean()) - alpha))
        loss.append(sum(float(term.detach()) for term in confidence) / int(told.sum()))
    assert apart[-1] < 2e-3 < 0.2 < apart[0]
    # A constant does no better than the entropy of the mean: it tells places apart.
    assert loss[-1] < -0.8 * (alpha * math.log(alpha) + (1 - alpha) * math.log(1 - alpha))


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)], ids=["greedy", "sampled"])
def test_the_adaptive_policy_reads_the_predicted_acceptance(
    sampling: Sampling, goes_on: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, told, read = dspark(target), [], []
    predict = drafter.confidence

    def predicted(state: Any) -> torch.Tensor:
        found = predict(state)
        told.append(found.flatten().tolist())
        return found

    def noted(pace: Pace, confidence: Any) -> bool:
        pace.confidence.append(np.array(confidence))
        read.append(confidence)
        return goes_on

    monkeypatch.setattr(drafter, "confidence", predicted)
    monkeypatch.setattr(Pace, "goes_on", noted)
    decoded = speculative_decode(
        target,
        drafter,
        TEXT,
        policy=Adaptive(SIZE, costs(), (0.9,) * SIZE),
        sampling=sampling,
        max_new_tokens=40,
        chance=SeededChance(0),
        stop_tokens=[],
    )
    assert read == told
    assert len({tuple(each) for each in read}) > 3, "each place and token has its own"
    untrimmed = decoded.stats.untrimmed
    depth = untrimmed.num_draft_tokens / untrimmed.num_drafts
    assert depth == (SIZE if goes_on else 1)


def test_what_cannot_be_is_named(target: Target) -> None:
    for key, value, need in (
        ("markov", "rnn", "be one of plain, gated"),
        ("markov_rank", 0, "be at least 1"),
        ("confidence_weight", 0.0, "be above 0"),
    ):
        with pytest.raises(ValueError, match=rf"drafter\.{key} must {need}"):
            build("dspark", target.spec, **{key: value})
