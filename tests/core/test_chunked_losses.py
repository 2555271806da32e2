"""Losses in chunks against their plain form, in float64: values, counts, every gradient."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from plain_training import plain_losses
from test_drafters import NoChance, as_batch, build, losses_of, random_drafter
from test_losses import BETA, ETA, TOP, config

from drafttrain.core.losses import REJECTION, TOKEN_LOSSES, total_variation
from drafttrain.core.ops import chunked_losses as chunked
from drafttrain.core.ops.chunked_losses import OutputHead, TargetProbs, loss_terms
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, LossTerm, TargetFeatures, weighted_sum
from drafttrain.core.vocab import DraftVocab
from drafttrain.target.model import Target, load_target

VOCAB = 97
MIXED = {"jsd": 0.5, "hard_cross_entropy": 0.25, "soft_cross_entropy": 1.0}
EVERY = {name: {name: 1.5} for name in TOKEN_LOSSES} | {"mixed": MIXED}
BATCH = as_batch(
    [1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 80, 81, 3], [1, 9, 8, 77, 5, 20, 21], [4, 5],
    mask=[[i % 3 > 0 for i in range(13)], [True] * 7, [False, True]],
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    with torch.no_grad():
        target.readout.head.mul_(8)
    return target


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three positions a chunk, and two depths at a time at most."""
    monkeypatch.setattr(chunked, "FEWEST_POSITIONS", 3)
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", {"cpu": 6 * VOCAB})


def features_of(drafter: Any, target: Target, batch: Batch, **readout: Any) -> TargetFeatures:
    """What the target would say, in float64; some of its positions are outside any vocabulary."""
    features = target.features(batch, drafter.captures)
    return TargetFeatures(
        {layer: hidden.double() for layer, hidden in features.captured.items()},
        features.final_hidden.double(),
        replace(target.readout.to(torch.float64), **readout),
    )


def gradients(drafter: Any, terms: Losses) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    (weighted_sum(terms) * 0.37).backward()
    return {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def assert_same(drafter: Any, batch: Batch, features: TargetFeatures) -> None:
    plain = plain_losses(drafter, batch, features)
    expected = gradients(drafter, plain)
    terms = drafter(batch, features, NoChance())
    found = gradients(drafter, terms)
    assert list(terms) == list(plain)
    for name, term in terms.items():
        torch.testing.assert_close(term.sum, plain[name].sum, rtol=1e-11, atol=1e-11)
        assert term.weight == plain[name].weight
        assert term.count == plain[name].count
        assert term.correct == plain[name].correct
        assert term.uncovered == plain[name].uncovered
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert bool(gradient.any()), name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("family", ["eagle", "eagle3", "medusa", "small_lm"])
def test_chunks_have_the_plain_losses_and_gradients(family: str, kind: str, target: Target) -> None:
    settings = {"jsd_beta": BETA, "lk_eta": ETA, "top_k": TOP}
    drafter = random_drafter(family, target, losses=EVERY[kind], **settings).double()
    features = features_of(drafter, target, BATCH)
    if family == "eagle3":
        assert drafter.vocab is not None
    assert_same(drafter, BATCH, features)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("eagle3", {"draft_vocab_coverage": 1.0, "unroll": 5}),
        ("eagle3", {"norm_output": True, "unroll": 1}),
        ("hass", {}),
        ("hass", {"unroll": 2, "qk_norm": True, "fc_bias": True}),
        ("medusa", {"shared_head": True, "logit_scale": 0.5}),
        ("medusa", {"losses": {"forward_kl": 1.0}, "logit_scale": 3.0}),
        ("small_lm", {"tie_embeddings": True}),
        ("small_lm", {"tie_embeddings": False}),
    ],
)
def test_every_kind_of_head_has_the_plain_gradient(
    family: str, changes: dict[str, Any], target: Target
) -> None:
    drafter = random_drafter(family, target, **changes).double()
    assert_same(drafter, BATCH, features_of(drafter, target, BATCH))


def test_a_target_may_scale_cap_and_bias_its_logits(target: Target) -> None:
    torch.manual_seed(0)
    drafter = random_drafter("eagle", target).double()
    odd = {
        "head_bias": torch.randn(VOCAB, dtype=torch.float64),
        "logit_scale": 0.7,
        "soft_cap": 3.0,
    }
    assert_same(drafter, BATCH, features_of(drafter, target, BATCH, **odd))


def chunked_losses(config: Any, weights: list[float], **given: Any) -> list[LossTerm]:
    return loss_terms(weights, chunked.chunked_losses(config, weights, **given))


def case(positions: int = 7, depths: int = 2) -> dict[str, Any]:
    """A drafter's head with all it may have, two depths, and a target over a larger vocabulary."""
    torch.manual_seed(1)
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    places = torch.stack([torch.randperm(9)[:positions] for _ in range(depths)])
    places[1, 2] = -1
    vocab = DraftVocab.of(torch.arange(0, 13, 2), 13)
    readout = Readout(random(13, 5), random(13, 5))
    return {
        "weights": [1.0, 0.8][:depths],
        "heads": [OutputHead(random(7, 4), random(7), 1.3, 5.0)],
        "states": [random(9, 4) for _ in range(depths)],
        "places": places,
        "labels": torch.tensor([0, 3, -1, 6, 2, 2, 1])[:positions],
        "target_probs": TargetProbs(readout, random(positions, 5), torch.arange(positions), vocab),
    }


@pytest.mark.parametrize("kind", ["soft_cross_entropy", "hard_cross_entropy", "mixed"])
def test_the_gradient_is_that_of_the_value(kind: str) -> None:
    given = case()
    (head,) = given["heads"]

    def value(weight: Any, bias: Any, *states: Any) -> Any:
        heads = [replace(head, weight=weight, bias=bias)]
        terms = chunked_losses(
            config(losses=EVERY[kind]), **{**given, "heads": heads, "states": states}
        )
        return sum(term.weight * term.sum for term in terms)

    tensors = [head.weight, head.bias, *given["states"]]
    assert torch.autograd.gradcheck(value, [t.requires_grad_() for t in tensors], fast_mode=True)
    assert float(value(*tensors).detach()) > 0


def test_a_second_weight_adds_to_what_the_first_one_gives_scaled_and_capped() -> None:
    given = case()
    given |= {name: given[name][:1] for name in ("weights", "states", "places")}
    (head,), (state,) = given["heads"], given["states"]
    added, more = torch.randn(2, 9, 3, dtype=torch.float64).unbind()
    added = added[:7]
    table = torch.randn(7, 5, dtype=torch.float64)
    readout = replace(given["target_probs"].readout, embedding=table, head=table)
    given["target_probs"] = replace(given["target_probs"], readout=readout, vocab=None)
    told = config(losses=MIXED)

    def value(weight: Any, bias: Any, added: Any, *states: Any) -> Any:
        heads = [replace(head, weight=weight, bias=bias, added=added)]
        (term,) = chunked_losses(told, **{**given, "heads": heads, "states": states})
        return term.sum

    tensors = [head.weight, head.bias, added, torch.cat([state, more], dim=1)]
    assert torch.autograd.gradcheck(value, [t.requires_grad_() for t in tensors], fast_mode=True)
    (places,) = given["places"]
    plain = head.scale * (state @ head.weight.T + head.bias)
    logits = (head.soft_cap * torch.tanh(plain / head.soft_cap) + more @ added.T)[places]
    probs = (given["target_probs"].final_hidden @ readout.head.T).softmax(-1)
    expected = told.token_loss(logits, probs, given["labels"]).sum()
    torch.testing.assert_close(value(*tensors), expected)


@pytest.mark.parametrize("asked", [True, False], ids=["with gradients", "without"])
def test_the_overlap_of_each_position_is_what_total_variation_leaves(asked: bool) -> None:
    given = case()
    (head,) = given["heads"]
    table = torch.randn(7, 5, dtype=torch.float64)
    readout = replace(given["target_probs"].readout, embedding=table, head=table)
    given["target_probs"] = replace(given["target_probs"], readout=readout, vocab=None)
    told = config(losses={"hard_cross_entropy": 1.0})  # which asks for no distribution itself
    with torch.set_grad_enabled(asked):
        *_, overlap = chunked.chunked_losses(told, **given, overlap=True)
    probs = (given["target_probs"].final_hidden @ readout.head.T).softmax(-1)
    for found, places, state in zip(overlap, given["places"], given["states"], strict=True):
        plain = head.scale * (state[places] @ head.weight.T + head.bias)
        logits = head.soft_cap * torch.tanh(plain / head.soft_cap)
        expected = 1 - total_variation(logits, probs)
        torch.testing.assert_close(found, torch.where(places >= 0, expected, 0))
    assert not overlap.requires_grad


def test_sums_may_be_weighed_otherwise_and_differentiated_again() -> None:
    """Then the chunks are computed a second time: one term alone, another ratio, another pass."""
    given = case()
    states = [state.requires_grad_() for state in given["states"]]
    one, two = chunked_losses(config(losses=MIXED), **given)
    alone = torch.autograd.grad(two.sum, states, retain_graph=True)
    assert not bool(alone[0].any())
    assert bool(alone[1].any())
    first = torch.autograd.grad(one.sum, states, retain_graph=True)
    again = torch.autograd.grad(3 * one.sum - two.sum, states, retain_graph=True)
    for a, b, c in zip(first, alone, again, strict=True):
        torch.testing.assert_close(c, 3 * a - b)
    usual = torch.autograd.grad(weighted_sum({"one": one, "two": two}), states)
    torch.testing.assert_close(usual[1], 0.8 * alone[1])


def test_what_is_not_asked_for_is_not_differentiated() -> None:
    given = case()
    with torch.no_grad():
        plain = chunked_losses(config(losses=MIXED), **given)
    (head,) = given["heads"]
    frozen = replace(head, weight=head.weight.detach(), bias=None)
    states = [state.requires_grad_() for state in given["states"]]
    same = chunked_losses(config(losses=MIXED), **{**given, "states": states})
    assert [float(term.sum.detach()) for term in same] == [float(term.sum) for term in plain]
    (one, _) = chunked_losses(
        config(losses=MIXED),
        **{**given, "heads": [frozen], "states": [states[0], states[1].detach()]},
    )
    one.sum.backward()
    assert head.weight.grad is None
    assert bool(states[0].grad.any())


@pytest.mark.parametrize("kind", TOKEN_LOSSES)
@pytest.mark.parametrize("where", ["state", "head", "target_probs"])
def test_a_nan_reaches_the_loss_and_the_gradient(kind: str, where: str) -> None:
    if where == "target_probs" and kind == "hard_cross_entropy":
        pytest.skip("it reads no distribution")
    given = case()
    with torch.no_grad():
        {
            "state": given["states"][0],
            "head": given["heads"][0].weight,
            "target_probs": given["target_probs"].final_hidden[1],
        }[where].fill_(torch.nan)
    states = [state.requires_grad_() for state in given["states"]]
    terms = chunked_losses(config(losses={kind: 1.0}), **given)
    assert bool(terms[0].sum.isnan())
    weighted_sum({"one": terms[0], "two": terms[1]}).backward()
    if (where, kind) != (
        "target_probs",
        "total_variation",
    ):  # whose slope is a sign, and NaN has none
        assert bool(states[0].grad.isnan().any())


@pytest.mark.parametrize("kind", TOKEN_LOSSES)
def test_tokens_that_a_head_cannot_say_count_as_the_plain_loss_has_them(kind: str) -> None:
    """A bias of minus infinity: infinite where the definition is, and a finite gradient."""
    given = case()
    (head,) = given["heads"]
    bias = torch.zeros(7, dtype=torch.float64)
    bias[3] = -torch.inf
    heads = [OutputHead(head.weight.requires_grad_(), bias)]
    readout = given["target_probs"].readout
    silent = torch.zeros(13, dtype=torch.float64)
    for possible in (True, False):
        silent[6] = 0.0 if possible else -torch.inf  # draft id 3
        target_probs = replace(given["target_probs"], readout=replace(readout, head_bias=silent))
        labels = torch.full_like(given["labels"], 2)
        terms = chunked_losses(
            config(losses={kind: 1.0}),
            **{**given, "heads": heads, "target_probs": target_probs, "labels": labels},
        )
        needs_support = ("soft_cross_entropy", "forward_kl", "lk_hybrid", "top_k")
        infinite = possible and kind in needs_support
        assert bool(terms[0].sum.isinf()) == infinite
        (gradient,) = torch.autograd.grad(
            weighted_sum({"one": terms[0], "two": terms[1]}), head.weight
        )
        assert bool(gradient.isfinite().all())


def test_a_batch_without_trained_positions_has_losses_of_zero(target: Target) -> None:
    empty = replace(BATCH, loss_mask=torch.zeros_like(BATCH.loss_mask))
    for family in ("eagle", "eagle3", "medusa", "small_lm"):
        drafter = random_drafter(family, target)
        terms = losses_of(drafter, target, empty)
        assert all(
            float(term.sum.detach()) == 0 and int(term.count) == 0 for term in terms.values()
        )
        weighted_sum(terms).backward()


@pytest.mark.parametrize("family", ["eagle", "hass", "eagle3", "medusa", "small_lm"])
def test_half_precision_products_give_what_the_plain_form_gives(
    family: str, target: Target
) -> None:
    drafter = random_drafter(family, target)
    features = target.features(BATCH, drafter.captures)
    with torch.autocast("cpu", torch.bfloat16):
        plain = plain_losses(drafter, BATCH, features)
        terms = drafter(BATCH, features, NoChance())
    for name, term in terms.items():
        assert term.sum.dtype == torch.float32
        torch.testing.assert_close(term.sum, plain[name].sum, rtol=2e-2, atol=2e-2)
    expected, found = gradients(drafter, plain), gradients(drafter, terms)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        near = torch.nn.functional.cosine_similarity(
            gradient.flatten(), expected[name].flatten(), dim=0
        )
        assert float(near) > 0.995, name


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that any tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *[(family, "jsd") for family in ("eagle", "medusa", "small_lm")],
        *[("eagle3", kind) for kind in TOKEN_LOSSES],
    ],
)
def test_no_tensor_is_as_large_as_the_logits_of_a_batch(family: str, kind: str) -> None:
    from test_golden_losses import features_like, spec_of

    vocab, length = 997, 100
    spec = spec_of(vocab)
    shape = {"hidden_size": 16, "intermediate_size": 32} if family == "small_lm" else {}
    torch.manual_seed(0)
    drafter = build(family, spec, losses={kind: 1.0}, **shape)
    batch = as_batch(list(range(length)))
    features = features_like(batch, spec, drafter.captures)
    drafter.prepare(torch.arange(vocab), features.readout)
    with _Largest() as seen:
        weighted_sum(drafter(batch, features, NoChance())).backward()
    assert vocab * 4 < seen.elements < (length - 2) * 700, seen.elements


def test_what_a_reduced_vocabulary_lacks_is_rejected() -> None:
    """Target (0.5, 0.3, 0.2), drafter (5/8, 3/8) of the first two: 0.8 of drafts are accepted."""
    readout = Readout(torch.ones(3, 1), torch.tensor([[0.5], [0.3], [0.2]]).log())
    vocab = DraftVocab.of(torch.tensor([0, 1]), 3)
    target_probs = TargetProbs(readout, torch.ones(2, 1), torch.tensor([0, 1]), vocab)
    heads = [OutputHead(torch.tensor([[0.5], [0.3]]).log())]
    places, labels = torch.tensor([[0, 1]]), torch.tensor([0, -1])
    states, told = [torch.ones(2, 1)], config(losses=REJECTION)
    (term,) = loss_terms(
        [1.0], chunked.chunked_losses(told, [1.0], heads, states, places, labels, target_probs)
    )
    assert float(1 - term.sum / term.count) == pytest.approx(0.8)
    assert int(term.count) == 2
    assert int(term.uncovered or 0) == 0, "what is missing is in the sum"


def test_a_token_that_the_drafter_lacks_is_rejected_wherever_the_target_prefers_it() -> None:
    readout = Readout(torch.ones(3, 1), torch.tensor([[0.2], [0.1], [0.7]]).log())
    target_probs = TargetProbs(
        readout, torch.ones(1, 1), torch.tensor([0]), DraftVocab.of(torch.tensor([0, 1]), 3)
    )
    head = OutputHead(torch.tensor([[0.6], [0.4]]).log())
    sums = chunked.chunked_losses(
        config(losses=REJECTION), [1.0], [head], [torch.ones(1, 1)],
        torch.tensor([[0]]), torch.tensor([-1]), target_probs,
    )  # fmt: skip
    (term,) = loss_terms([1.0], sums)
    assert float(1 - term.sum) == pytest.approx(0.3)
    assert int(term.correct or 0) == 0
