"""The certificate passes a correct loop on a real (random) target, and names what is broken."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from test_drafters import random_drafter
from test_evaluate import settings

from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.decode import loop, verify
from drafttrain.decode.verify import LOSSLESS, Lenience, Typical
from drafttrain.evaluation.certify import certify, near_tie
from drafttrain.report.build import certified
from drafttrain.report.results import Check
from drafttrain.report.tables import certificate_table
from drafttrain.target.model import Target, load_target

SAMPLED = {"temperature": 1.0, "max_new_tokens": 24, "certify": True}


@pytest.fixture(scope="module")
def prompts() -> list[tuple[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"p{i}", torch.randint(6, 97, (5 + i,), generator=generator).tolist()) for i in range(8)
    ]


def checks_of(
    target: Target, prompts: Any, name: str = "eagle3", **changes: Any
) -> dict[str, Check]:
    config = settings(**{**SAMPLED, **changes})
    drafter = random_drafter(name, target)
    checks = certify(target, drafter, prompts, config, timed=None, seed=1)
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("eagle3", {}),
        ("eagle3", {"top_p": 0.8}),
        ("medusa", {"draft_temperature": 0.3}),
        ("ngram", {}),
        ("eagle3", {"policy": "static_tree"}),
        ("medusa", {"policy": "dynamic_tree", "tree_nodes": 8}),
        pytest.param("two_model", {"policy": "dynamic_tree"}, marks=pytest.mark.slow),
        pytest.param(
            "eagle", {"policy": "static_tree", "tree_replacement": True}, marks=pytest.mark.slow
        ),
        pytest.param("eagle3", {"draft_temperature": 0.3}, marks=pytest.mark.slow),
        pytest.param("medusa", {}, marks=pytest.mark.slow),
        pytest.param("medusa", {"top_p": 0.8}, marks=pytest.mark.slow),
        pytest.param("ngram", {"top_p": 0.8}, marks=pytest.mark.slow),
        pytest.param("ngram", {"draft_temperature": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_a_correct_loop_is_certified(
    name: str, changes: dict[str, Any], target: Target, prompts: Any
) -> None:
    checks = checks_of(target, prompts[:4], name, batch_size=3, **changes)
    assert {
        "greedy output, float32",
        "one-step distribution",
        "cache and positions",
        "batch",
    } <= set(checks)
    assert all(check.passed is not False for check in checks.values()), checks
    section = certified(
        list(checks.values()), rule="r", lossless=True, dtype="float32", num_prompts=4
    )
    assert section.certified
    assert section.statement == "certified: 5 of 5 checks passed on 4 prompts"
    assert checks["one-step distribution"].measured < 1e-6
    assert checks["cache and positions"].measured < 1e-5


def test_resampling_from_the_target_fails_the_one_step_distribution(
    target: Target, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "residual", lambda target_probs, draft_probs: target_probs)
    assert checks_of(target, prompts[:3])["one-step distribution"].passed is False


def test_a_cache_that_is_not_rolled_back_fails_its_check_and_the_greedy_one(
    target: Target, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: RaggedCache, lengths: list[int]) -> None:
        self.lengths = [min(length + 1, old) for length, old in zip(lengths, self.lengths)]  # noqa: B905

    monkeypatch.setattr(RaggedCache, "rollback", forgetful)
    checks = checks_of(target, prompts[:3])
    assert checks["cache and positions"].passed is False
    assert checks["greedy output, float32"].passed is False


def test_block_verification_is_certified_by_its_text(target: Target, prompts: Any) -> None:
    checks = checks_of(target, prompts[:4], rule="block")
    assert checks["one-step distribution"].passed is None
    assert "whole chains" in checks["one-step distribution"].text
    others = [check for name, check in checks.items() if name != "one-step distribution"]
    assert all(check.passed is not False for check in others), checks


@pytest.mark.slow
def test_draft_distributions_that_were_not_drawn_from_fail_the_distribution_of_the_text(
    target: Target, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded is flatter than the truth: every closed form is fine, the text is not."""
    real = loop.draft

    def misrecorded(*arguments: Any) -> Any:
        proposal = real(*arguments)
        if proposal.draft_probs is None:
            return proposal
        flat = torch.full_like(proposal.draft_probs, 1 / proposal.draft_probs.shape[-1])
        return replace(proposal, draft_probs=flat)

    monkeypatch.setattr(loop, "draft", misrecorded)
    checks = checks_of(target, prompts, max_new_tokens=120, draft_temperature=0.3)
    assert checks["one-step distribution"].passed
    assert checks["distribution of the sampled text"].passed is False


def test_draft_distributions_that_are_no_distributions_fail_the_one_step_distribution(
    target: Target, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are drawn from what is normalised once; acceptance goes by what was recorded."""
    real = loop.draft

    def halved(*arguments: Any) -> Any:
        proposal = real(*arguments)
        distributions = proposal.draft_probs
        return replace(proposal, draft_probs=None if distributions is None else distributions / 2)

    monkeypatch.setattr(loop, "draft", halved)
    assert checks_of(target, prompts[:3])["one-step distribution"].passed is False


def test_what_was_not_looked_at_is_not_certified(target: Target, prompts: Any) -> None:
    checks = checks_of(target, prompts[:1], max_new_tokens=1, batch_size=3)
    for name in ("one-step distribution", "cache and positions", "batch"):
        assert checks[name].passed is None, name


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"rule": "typical"}, Typical(0.09, 0.3)),
        ({"rule": "lenience", "lenience": 0.3}, Lenience(0.3)),
    ],
)
def test_a_lossy_rule_is_measured_and_not_certified(
    changes: dict[str, Any], rule: Any, target: Target, prompts: Any
) -> None:
    assert settings(**changes).acceptance_rule == rule
    checks = checks_of(target, prompts[:4], draft_temperature=0.5, **changes)
    distribution = checks["one-step distribution"]
    assert distribution.passed is None
    assert distribution.measured > 0.01
    assert "not lossless" in distribution.bound
    assert checks["distribution of the sampled text"].passed is None
    section = certified(
        list(checks.values()), rule="lenience", lossless=False, dtype="float32", num_prompts=4
    )
    assert not section.certified
    assert "changes the target's distribution" in section.statement
    outcomes = {name: outcome for name, outcome, _, _ in certificate_table(section).rows}
    assert outcomes["one-step distribution"] == "reported"
    assert outcomes["cache and positions"] == "passed"


def test_lenience_of_one_is_called_lossless() -> None:
    lossless = settings(rule="lenience", lenience=1.0, temperature=1.0, lossless_prompts=0)
    assert lossless.acceptance_rule.lossless
    assert not lossless.lossy
    assert not Lenience(0.99).lossless


def test_no_token_gains_more_than_lenience_allows() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        distribution, draft = (
            torch.rand(1, 6, generator=generator, dtype=torch.float64) ** 4 for _ in range(2)
        )
        distribution, draft = distribution / distribution.sum(), draft / draft.sum()
        emitted = verify.one_step_distribution(Lenience(0.4), distribution, draft)
        assert float(emitted.sum()) == pytest.approx(1, abs=1e-12)
        assert bool((emitted <= distribution / 0.4 + 1e-12).all())
        exact = verify.one_step_distribution(Lenience(1.0), distribution, draft)
        torch.testing.assert_close(
            exact, verify.one_step_distribution(LOSSLESS, distribution, draft)
        )
        torch.testing.assert_close(exact, distribution)


def test_the_rounding_noise_of_bfloat16_is_larger_than_that_of_float32(
    tiny_target_dir: Path, target: Target
) -> None:
    narrow = load_target(model_config(tiny_target_dir), torch.bfloat16, "cpu")
    text = list(range(20, 40))
    gap, noise = near_tie(target, text)
    narrow_gap, narrow_noise = near_tie(narrow, text)
    assert 0 <= noise < 1e-4 < narrow_noise
    assert abs(gap - narrow_gap) < 0.5


def test_a_planted_tie_is_told_from_a_real_difference(
    target: Target, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafttrain.evaluation import certify as module

    decode = module._decoded

    def differing(how: Any, prompts: Any, *policies: Any) -> Any:
        (decoded,) = decode(how, prompts, *policies)
        if not policies:  # decoded plainly
            return [decoded]
        return [type(decoded)((*decoded.tokens[:3], 96, *decoded.tokens[4:]), decoded.stats)]

    monkeypatch.setattr(module, "_decoded", differing)
    target_bf16 = Target(target.model, target.tokenizer, target.spec)
    monkeypatch.setattr(module, "near_tie", lambda *_: (0.01, 0.02))
    config = settings(**SAMPLED)
    drafter = random_drafter("eagle3", target)
    check = module.greedy_check(target_bf16, drafter, prompts[:2], config)
    assert check.passed is False  # in float32 nothing excuses a difference
    assert all(d.tie for d in check.divergences)
