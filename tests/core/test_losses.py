"""Each loss against its definition, written a second time in NumPy; and each through a drafter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import model_config
from omegaconf import OmegaConf
from scipy.special import rel_entr, softmax
from test_drafters import NoChance, as_batch, build, losses_of, random_drafter, stepped_logits

from drafttrain.config.compose import compose, typed
from drafttrain.config.overrides import UsageError
from drafttrain.config.sections import TrainConfig
from drafttrain.core import losses
from drafttrain.core.losses import DISTRIBUTION_LOSSES, NOT_A_LABEL, TOKEN_LOSSES, TokenLossConfig
from drafttrain.core.types import weighted_sum
from drafttrain.target.model import Target, load_target

Array = np.ndarray[Any, Any]
BETA, ETA, TOP = 0.3, 3.0, 4
FAMILIES = ["eagle", "eagle3", "medusa"]
LOSS_OF: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "soft_cross_entropy": losses.soft_cross_entropy,
    "forward_kl": losses.forward_kl,
    "reverse_kl": losses.reverse_kl,
    "jsd": lambda logits, target_probs: losses.jsd(logits, target_probs, BETA),
    "total_variation": losses.total_variation,
    "lk_hybrid": lambda logits, target_probs: losses.lk_hybrid(logits, target_probs, ETA),
    "negative_log_acceptance": losses.negative_log_acceptance,
    "top_k": lambda logits, target_probs: losses.top_k(logits, target_probs, TOP),
}
CROSS_ENTROPIES = ("soft_cross_entropy", "top_k")  # not zero for equal distributions
DIVERGENCES = [name for name in DISTRIBUTION_LOSSES if name not in CROSS_ENTROPIES]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    with torch.no_grad():
        target.readout.head.mul_(8)  # random logits are nearly flat, a trained target's are not
    return target


def defined_jsd(p: Array, q: Array) -> Array:
    mix = BETA * p + (1 - BETA) * q
    return BETA * rel_entr(p, mix).sum(-1) + (1 - BETA) * rel_entr(q, mix).sum(-1)


def defined_lk(p: Array, q: Array) -> Array:
    alpha = np.minimum(p, q).sum(-1)
    share = np.exp(-ETA * alpha)
    return share * rel_entr(p, q).sum(-1) + (1 - share) * (1 - alpha)


def defined_top_k(p: Array, q: Array) -> Array:
    rank = (-p).argsort(-1).argsort(-1)
    return -np.where(rank < TOP, p * np.log(q), 0).sum(-1)


DEFINITION: dict[str, Callable[[Array, Array], Array]] = {
    "soft_cross_entropy": lambda p, q: -(p * np.log(q)).sum(-1),
    "forward_kl": lambda p, q: rel_entr(p, q).sum(-1),
    "reverse_kl": lambda p, q: rel_entr(q, p).sum(-1),
    "jsd": defined_jsd,
    "total_variation": lambda p, q: 1 - np.minimum(p, q).sum(-1),
    "lk_hybrid": defined_lk,
    "negative_log_acceptance": lambda p, q: -np.log(np.minimum(p, q).sum(-1)),
    "top_k": defined_top_k,
}


def two_distributions(scale: float = 2.0, positions: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits and a target's distribution over 11 tokens, in float64."""
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(2, positions, 11, generator=generator, dtype=torch.float64) * scale
    return draw[0], draw[1].softmax(-1)


def config(**values: Any) -> TokenLossConfig:
    return TokenLossConfig(
        **({"losses": {}, "jsd_beta": BETA, "lk_eta": ETA, "top_k": TOP} | values)
    )


def test_every_distribution_loss_is_tested_here() -> None:
    assert set(LOSS_OF) == set(DEFINITION) == set(DISTRIBUTION_LOSSES)


@pytest.mark.parametrize("name", DISTRIBUTION_LOSSES)
def test_the_value_is_the_definitions(name: str) -> None:
    logits, target_probs = two_distributions()
    expected = DEFINITION[name](target_probs.numpy(), softmax(logits.numpy(), -1))
    value = LOSS_OF[name](logits, target_probs)
    assert value.dtype == torch.float64
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    # Half-precision logits are compared in float32, not where they are.
    half = LOSS_OF[name](logits.bfloat16(), target_probs.float())
    assert half.dtype == torch.float32
    rounded = DEFINITION[name](
        target_probs.numpy(), softmax(logits.bfloat16().double().numpy(), -1)
    )
    np.testing.assert_allclose(half, rounded, rtol=1e-5)


def test_hard_cross_entropy_reads_the_label_and_skips_what_is_none() -> None:
    logits, _ = two_distributions(positions=4)
    labels = torch.tensor([3, NOT_A_LABEL, 0, 10])
    value = losses.hard_cross_entropy(logits, labels)
    probs = softmax(logits.numpy(), -1)
    np.testing.assert_allclose(value, [-np.log(probs[0, 3]), 0, *-np.log(probs[[2, 3], [0, 10]])])


@pytest.mark.parametrize("name", [name for name in DISTRIBUTION_LOSSES if name != "lk_hybrid"])
def test_the_gradient_is_the_values(name: str) -> None:
    logits, target_probs = two_distributions(positions=3)
    assert torch.autograd.gradcheck(
        lambda given: LOSS_OF[name](given, target_probs), (logits.requires_grad_(),)
    )


def test_the_gradient_of_lk_hybrid_holds_its_weight_fixed() -> None:
    logits, target_probs = two_distributions(positions=3)
    share = (-ETA * (1 - losses.total_variation(logits, target_probs))).exp()

    def held(given: torch.Tensor) -> torch.Tensor:
        tv = losses.total_variation(given, target_probs)
        return share * losses.forward_kl(given, target_probs) + (1 - share) * tv

    assert torch.autograd.gradcheck(held, (logits.requires_grad_(),))
    (expected,) = torch.autograd.grad(held(logits).sum(), logits)
    (found,) = torch.autograd.grad(losses.lk_hybrid(logits, target_probs, ETA).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_zero_for_equal_distributions_only_and_has_no_gradient_there(
    name: str,
) -> None:
    logits, target_probs = two_distributions()
    assert bool((LOSS_OF[name](logits, target_probs) > 0.01).all())
    logits.requires_grad_()
    equal = LOSS_OF[name](logits, logits.detach().softmax(-1))
    assert float(equal.detach().abs().max()) < 1e-12
    kinked = ("total_variation", "lk_hybrid", "negative_log_acceptance")
    if name not in kinked:
        (gradient,) = torch.autograd.grad(equal.sum(), logits)
        assert float(gradient.abs().max()) < 1e-12


def test_cross_entropy_is_forward_kl_and_the_targets_entropy() -> None:
    logits, target_probs = two_distributions()
    entropy = -(target_probs * target_probs.log()).sum(-1)
    expected = losses.forward_kl(logits, target_probs) + entropy
    torch.testing.assert_close(losses.soft_cross_entropy(logits, target_probs), expected)


def test_jsd_is_symmetric_at_one_half_bounded_and_tends_to_both_kls() -> None:
    logits, target_probs = two_distributions()
    there = losses.jsd(logits, target_probs, 0.5)
    back = losses.jsd(target_probs.log(), logits.softmax(-1), 0.5)
    torch.testing.assert_close(there, back)
    other = losses.jsd(target_probs.log(), logits.softmax(-1), BETA)
    assert not torch.allclose(losses.jsd(logits, target_probs, BETA), other), "elsewhere it is not"
    torch.testing.assert_close(
        losses.jsd(target_probs.log(), logits.softmax(-1), 1 - BETA),
        LOSS_OF["jsd"](logits, target_probs),
    )
    apart = losses.jsd(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.0, 1.0]]), 0.5)
    assert float(apart) == pytest.approx(np.log(2))
    tiny = 1e-7
    forward = losses.jsd(logits, target_probs, tiny) / tiny
    torch.testing.assert_close(forward, losses.forward_kl(logits, target_probs), rtol=1e-4, atol=0)
    reverse = losses.jsd(logits, target_probs, 1 - tiny) / tiny
    torch.testing.assert_close(reverse, losses.reverse_kl(logits, target_probs), rtol=1e-4, atol=0)


def test_lk_hybrid_runs_from_forward_kl_to_total_variation() -> None:
    logits, target_probs = two_distributions()
    torch.testing.assert_close(
        losses.lk_hybrid(logits, target_probs, 0.0), losses.forward_kl(logits, target_probs)
    )
    far = losses.lk_hybrid(logits, target_probs, 1e4)
    torch.testing.assert_close(far, losses.total_variation(logits, target_probs))


def test_the_negative_log_acceptance_is_cross_entropy_where_the_target_is_certain() -> None:
    logits, _ = two_distributions(positions=3)
    labels = torch.tensor([3, 0, 10])
    certain = torch.nn.functional.one_hot(labels, 11).double()
    torch.testing.assert_close(
        losses.negative_log_acceptance(logits, certain), losses.hard_cross_entropy(logits, labels)
    )


def test_the_negative_log_acceptance_has_total_variations_slope_over_the_overlap() -> None:
    logits, target_probs = two_distributions()
    logits.requires_grad_()
    distance = losses.total_variation(logits, target_probs)
    (slope,) = torch.autograd.grad(distance.sum(), logits)
    found = losses.negative_log_acceptance(logits, target_probs)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, slope / (1 - distance.detach())[:, None])


@pytest.mark.parametrize("gap", [120.0, 500.0])
def test_an_overlap_of_zero_to_rounding_has_the_exact_logarithm_and_slope(gap: float) -> None:
    """In float32 exp(-120) is zero; the same numbers in float64, by finite differences."""
    raw, probs = [gap, 0.0, 1.0, -1.0], [0.0, 0.5, 0.3, 0.2]
    logits = torch.tensor([raw], requires_grad=True)
    loss = losses.negative_log_acceptance(logits, torch.tensor([probs]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    q = lambda wide: np.exp(wide - np.logaddexp.reduce(wide))  # noqa: E731
    wide, p = np.array(raw), np.array(probs)
    defined = lambda wide: -np.log(np.minimum(p, q(wide)).sum())  # noqa: E731
    assert loss.item() == pytest.approx(defined(wide), rel=1e-6)
    steps = 1e-6 * np.eye(4)
    slope = [(defined(wide + step) - defined(wide - step)) / 2e-6 for step in steps]
    # A float32 of 500 is exact to 3e-5, and so is the logarithm's exponential.
    np.testing.assert_allclose(gradient[0], slope, rtol=1e-4)
    assert gradient[0, 0] == pytest.approx(1, rel=1e-4), "away from what the target never says"


def test_top_k_of_all_tokens_is_soft_cross_entropy_and_of_few_is_less() -> None:
    logits, target_probs = two_distributions()
    whole = losses.soft_cross_entropy(logits, target_probs)
    for k in (11, 500):
        torch.testing.assert_close(losses.top_k(logits, target_probs, k), whole)
    first = losses.top_k(logits, target_probs, 1)
    best = target_probs.max(-1)
    expected = best.values * losses.hard_cross_entropy(logits, best.indices)
    torch.testing.assert_close(first, expected)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(losses.top_k(logits, target_probs, 2).sum(), logits)
    two = torch.zeros_like(target_probs).scatter(-1, target_probs.topk(2).indices, 1) * target_probs
    torch.testing.assert_close(gradient, two.sum(-1, keepdim=True) * logits.softmax(-1) - two)


IMPOSSIBLE = {
    "neither says the first": ([-torch.inf, 0.3, 1.0, -0.2], [0.0, 0.5, 0.3, 0.2]),
    "the drafter cannot": ([-torch.inf, 0.3, 1.0, -0.2], [0.4, 0.3, 0.2, 0.1]),
    "the target never does": ([0.7, 0.3, 1.0, -0.2], [0.0, 0.5, 0.3, 0.2]),
    "each is certain, of another": (
        [0.0, -torch.inf, -torch.inf, -torch.inf],
        [0.0, 1.0, 0.0, 0.0],
    ),
    "the drafter's underflows": ([-800.0, 0.3, 1.0, -0.2], [0.0, 0.5, 0.3, 0.2]),
    "the target's is subnormal": ([0.7, 0.3, 1.0, -0.2], [1e-42, 0.5, 0.3, 0.2]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.parametrize("name", DISTRIBUTION_LOSSES)
def test_zero_probabilities_give_no_nan_and_a_finite_gradient(
    name: str, case: str, dtype: torch.dtype
) -> None:
    raw, probs = IMPOSSIBLE[case]
    logits = torch.tensor([raw], dtype=dtype, requires_grad=True)
    target_probs = torch.tensor([probs], dtype=dtype)
    loss = LOSS_OF[name](logits, target_probs)
    value = loss.detach()
    infinite = bool(((logits == -torch.inf) & (target_probs > 0)).any())
    needs_support = name in ("soft_cross_entropy", "forward_kl", "lk_hybrid", "top_k")
    if name == "negative_log_acceptance":
        needs_support = case == "each is certain, of another"
    assert bool(value.isinf()) == (infinite and needs_support), "infinite where its definition is"
    assert not bool(value.isnan())
    (gradient,) = torch.autograd.grad(5 * loss.sum(), logits)  # weights above one overflow first
    assert bool(gradient.isfinite().all())
    if not infinite and case != "the target never does":
        with np.errstate(divide="ignore", invalid="ignore"):
            p, q = target_probs.double().numpy(), softmax(logits.detach().double().numpy(), -1)
            expected = DEFINITION[name](p[:, q[0] > 0], q[:, q[0] > 0])
        if name != "reverse_kl" or case != "the target's is subnormal":
            np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_reverse_kl_floors_what_the_target_never_says() -> None:
    logits, target_probs = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
    floor = np.log(np.finfo(np.float32).tiny)
    assert float(losses.reverse_kl(logits, target_probs)) == pytest.approx(
        np.log(0.5) - 0.5 * floor
    )


@pytest.mark.parametrize("name", DISTRIBUTION_LOSSES)
@pytest.mark.parametrize("where", ["logits", "distribution"])
def test_a_nan_is_not_hidden(name: str, where: str) -> None:
    logits, target_probs = two_distributions()
    {"logits": logits, "distribution": target_probs}[where][2, 0] = torch.nan
    assert LOSS_OF[name](logits, target_probs).isnan().tolist() == [i == 2 for i in range(7)]


def test_positions_do_not_meet() -> None:
    """Chunks of positions give what the whole gives: nothing is averaged or shared over them."""
    logits, target_probs = two_distributions()
    labels = torch.arange(7)
    every = config(losses=dict.fromkeys(TOKEN_LOSSES, 0.5))
    whole = every.token_loss(logits, target_probs, labels)
    chunks = zip(logits.split(3), target_probs.split(3), labels.split(3), strict=True)
    torch.testing.assert_close(torch.cat([every.token_loss(*chunk) for chunk in chunks]), whole)


def test_losses_are_summed_by_weight() -> None:
    logits, target_probs = two_distributions()
    labels = torch.arange(7)
    mixed = config(
        losses={"jsd": 2.0, "hard_cross_entropy": 0.5, "lk_hybrid": 1.0, "forward_kl": 0}
    )
    expected = (
        2 * LOSS_OF["jsd"](logits, target_probs)
        + 0.5 * losses.hard_cross_entropy(logits, labels)
        + LOSS_OF["lk_hybrid"](logits, target_probs)
    )
    torch.testing.assert_close(mixed.token_loss(logits, target_probs, labels), expected)
    for name in DISTRIBUTION_LOSSES:
        one = config(losses={name: 1.0})
        assert one.needs_target_probs
        assert torch.equal(
            one.token_loss(logits, target_probs, labels), LOSS_OF[name](logits, target_probs)
        ), name
    hard = config(losses={"hard_cross_entropy": 1.0, "jsd": 0.0})
    assert not hard.needs_target_probs
    assert torch.equal(
        hard.token_loss(logits, None, labels), losses.hard_cross_entropy(logits, labels)
    )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"losses": {"forward_kll": 1.0}}, r"drafter\.losses must be one of .*; did you mean for"),
        ({"losses": {"xyz": 1.0}}, r"drafter\.losses must be one of .*, got xyz$"),
        ({"losses": {"jsd": -1.0}}, r"drafter\.losses must be weights of at least 0, got jsd: -1"),
        ({"losses": {"jsd": float("nan")}}, r"weights of at least 0, got jsd: nan"),
        ({"losses": {"jsd": float("inf")}}, r"weights of at least 0, got jsd: inf"),
        ({"losses": {"jsd": 0.0}}, r"drafter\.losses must have a weight above 0"),
        ({"losses": {}}, r"drafter\.losses must have a weight above 0, got none"),
        ({"losses": {"jsd": 1.0}, "jsd_beta": 0.0}, r"drafter\.jsd_beta must be between 0 and 1"),
        ({"losses": {"jsd": 1.0}, "jsd_beta": 1.0}, r"drafter\.jsd_beta must be between 0 and 1"),
        ({"losses": {"jsd": 1.0}, "lk_eta": -1.0}, r"drafter\.lk_eta must be at least 0, got -1"),
        ({"losses": {"top_k": 1.0}, "top_k": 0}, r"drafter\.top_k must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_a_loss_is_refused_in_one_line(
    values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        config(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_line_replaces_the_losses(family: str) -> None:
    def told(*overrides: str) -> Any:
        return typed(compose("train", [f"drafter={family}", *overrides]), TrainConfig).drafter

    given = told("drafter.losses={forward_kl: 0.5, total_variation: 0.5}", "drafter.lk_eta=2")
    assert given.losses == {"forward_kl": 0.5, "total_variation": 0.5}
    assert given.lk_eta == 2.0
    (default,) = told().losses
    assert default == ("hard_cross_entropy" if family == "medusa" else "soft_cross_entropy")
    assert told(f"drafter.losses.{default}=0.25").losses == {default: 0.25}


def test_losses_that_are_mistyped_are_answered() -> None:
    def told(*overrides: str) -> Any:
        return typed(compose("train", [*overrides]), TrainConfig)

    with pytest.raises(ValueError, match=r"drafter\.losses must be one of .*did you mean jsd\?"):
        told("drafter.losses={jsdd: 1}")
    with pytest.raises(UsageError, match=r"drafter\.losses\.jsd must be a number, got x"):
        told("drafter.losses={jsd: x}")
    with pytest.raises(UsageError, match=r"replaces it: drafter\.losses='\{jsd: \.\.\.\}'"):
        told("drafter.losses.jsd=1")
    saved = OmegaConf.to_yaml(compose("train", ["drafter.losses={jsd: 1}"]).drafter)
    assert OmegaConf.create(saved).losses == {"jsd": 1}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_learns_a_batch_by_every_loss(family: str, name: str, target: Target) -> None:
    torch.manual_seed(0)
    weights = {"feature_weight": 0.0, "token_weight": 1.0} if family == "eagle" else {}
    drafter = build(family, target.spec, losses={name: 1.0}, **weights)
    drafter.prepare(torch.arange(target.spec.vocab_size), target.readout)
    batch = as_batch([1, 20, 33, 41, 20, 52, 60, 7, 9, 12], [1, 9, 8, 30, 31, 77, 5, 20])
    features = target.features(batch, drafter.captures)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    history = []
    for _ in range(20):
        loss = weighted_sum(drafter(batch, features, NoChance()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.9 * history[0], history  # TV learns least: its gradient starts small


@pytest.mark.parametrize("name", DISTRIBUTION_LOSSES)
@torch.no_grad()
def test_a_medusa_head_meets_the_distribution_of_the_token_that_it_predicts(
    name: str, target: Target
) -> None:
    drafter = random_drafter(
        "medusa", target, losses={name: 1.0}, jsd_beta=BETA, lk_eta=ETA, top_k=TOP, head_decay=0.8
    )
    tokens = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12]
    batch = as_batch(tokens)
    features = target.features(batch, ())
    terms = drafter(batch, features, NoChance())
    for k in range(4):
        expected = torch.tensor(0.0)
        for t in range(len(tokens) - 2 - k):  # the head at t predicts token t + 2 + k
            # The target says that token having read the text up to the one before it.
            prefix = torch.tensor([tokens[: t + 2 + k]])
            logits, _ = target.step(target.begin(), prefix, ())
            head = drafter.lm_heads[k](drafter.blocks[k](features.final_hidden[:, t]))
            expected += LOSS_OF[name](head, logits[:, -1].softmax(-1)).sum()
        term = terms[f"head_{k + 1}"]
        torch.testing.assert_close(term.sum, expected, rtol=1e-4, atol=1e-4)
        assert term.weight == 0.8**k
        assert term.count == len(tokens) - 2 - k


@torch.no_grad()
def test_eagle3_reads_hard_labels_in_its_own_vocabulary(target: Target) -> None:
    """Tokens outside it contribute zero; where it has them, they are renumbered."""
    drafter = random_drafter(
        "eagle3",
        target,
        losses={"hard_cross_entropy": 1.0},
        unroll=1,
        draft_vocab_coverage=0.5,
    )
    assert drafter.vocab is not None
    batch = as_batch(list(range(1, 97, 2)))
    features = target.features(batch, drafter.captures)
    target_probs = target.readout.logits(features.final_hidden[0])
    says = drafter.vocab.draft_ids.tolist()
    covered = [t for t in range(2, 48) if says[int(target_probs[t - 1].argmax())] >= 0]
    labels = [says[int(batch.tokens[0, t])] for t in covered]
    logits = captured_logits(drafter, target, batch)
    assert len(logits) == len(labels) < 46, "some of the target's choices must lie outside"
    assert min(labels) < 0, "some of the text must lie outside"
    own = [
        row[label] for row, label in zip(logits.log_softmax(-1), labels, strict=True) if label >= 0
    ]
    term = losses_of(drafter, target, batch)["depth_1"]
    torch.testing.assert_close(term.sum, -torch.stack(own).sum())


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_training_compares_what_decoding_drafts_with_what_the_target_says(
    family: str, name: str, target: Target
) -> None:
    values: dict[str, Any] = {"losses": {name: 1.0}, "jsd_beta": BETA, "lk_eta": ETA, "top_k": TOP}
    whole = {"draft_vocab_coverage": 1.0} if family == "eagle3" else {}
    drafter = random_drafter(family, target, **values, **whole)
    tokens = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12]
    for ahead in (2, 7):
        mask = [[index == ahead for index in range(len(tokens))]]
        terms = losses_of(drafter, target, as_batch(tokens, mask=mask))
        term = terms["head_1" if family == "medusa" else "depth_1"]
        logits = stepped_logits(drafter, target, tokens, ahead - 1, 1)
        target_probs, _ = target.step(target.begin(), torch.tensor([tokens[:ahead]]), ())
        labels = torch.tensor([tokens[ahead]])
        expected = config(**values).token_loss(logits, target_probs[:, -1].softmax(-1), labels)
        torch.testing.assert_close(term.sum, expected.sum(), rtol=1e-4, atol=1e-4)


def captured_logits(drafter: Any, target: Target, batch: Any) -> torch.Tensor:
    """The logits that a drafter's training forward compares, of one chunk."""
    seen: list[torch.Tensor] = []
    plain = TokenLossConfig.token_loss
    with pytest.MonkeyPatch.context() as patch:

        def watch(self: Any, logits: torch.Tensor, probs: Any, labels: Any) -> torch.Tensor:
            seen.append(logits)
            return plain(self, logits, probs, labels)

        patch.setattr(TokenLossConfig, "token_loss", watch)
        losses_of(drafter, target, batch)
    return seen[0]
