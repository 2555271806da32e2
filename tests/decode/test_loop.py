"""The decode loop: stops, limits, counters, the rules; what it emits is in test_distribution.py."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Proposal
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.decode.verify import LOSSLESS, residual, verify_draws, verify_greedy
from drafttrain.drafters.base import Drafter, DraftState
from drafttrain.drafters.ngram import NgramConfig
from drafttrain.target.model import Target

PROMPT = [1, 3, 6, 20, 33, 41, 20]
FULL = Sampling(1.0, 0, 1.0)


class Oracle(Drafter):
    """Drafts a text given beforehand, whatever the target says."""

    captures = ()

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self.config = NgramConfig(name="oracle", max_ngram=1, min_ngram=1)
        self.text = list(text)
        self.seen = 0

    def forward(self, *inputs: Any) -> Any:
        raise AssertionError("not trained")

    def begin(self, access: Any, first_tokens: Tensor, capacity: int) -> Any:
        self.seen = 1
        return DraftState(access)

    def observe(self, state: Any, tokens: Tensor, counts: Any, features: Any) -> None:
        assert features.final_hidden.shape[1] == tokens.shape[1]
        self.seen += counts[0]

    def expand(self, state: Any, nodes: Any) -> Any:
        raise AssertionError("proposes whole chains")

    def select(self, state: Any, rows: Any) -> None:
        raise AssertionError("decodes one row")

    def propose(self, state: Any, depth: int) -> Proposal:
        tokens = torch.tensor([self.text[self.seen : self.seen + depth]], dtype=torch.long)
        return Proposal(tokens, torch.tensor([tokens.shape[1]]), None)


def plain_text(target: Target, length: int) -> list[int]:
    decoded = autoregressive_decode(
        target,
        PROMPT,
        sampling=GREEDY,
        max_new_tokens=length,
        chance=SeededChance(0),
        stop_tokens=[],
    )
    return list(decoded.tokens)


def decode(target: Target, drafter: Drafter, **settings: Any) -> Any:
    values = {"policy": 4, "sampling": GREEDY, "max_new_tokens": 21, "chance": SeededChance(0)}
    return speculative_decode(target, drafter, PROMPT, **{**values, "stop_tokens": [], **settings})


def test_full_acceptance_emits_depth_plus_one_tokens_a_pass(target: Target) -> None:
    text = plain_text(target, 40)
    decoded = decode(target, Oracle([*PROMPT, *text]))
    assert list(decoded.tokens) == text[:21]
    counters = decoded.stats.trimmed
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (
        4,
        16,
        16,
    )
    assert counters == decoded.stats.untrimmed
    assert counters.acceptance_length == 5
    assert decoded.stats.num_target_passes == 4
    assert [passed[:3] for passed in decoded.stats.passes] == [(1, 4, 4)] * 4
    assert sum(decoded.stats.pass_s) == pytest.approx(
        decoded.stats.total_s - decoded.stats.prefill_s
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7])
def test_the_limit_cuts_an_accepted_run(target: Target, limit: int) -> None:
    text = plain_text(target, 40)
    decoded = decode(target, Oracle([*PROMPT, *text]), max_new_tokens=limit)
    assert list(decoded.tokens) == text[:limit]
    drafts = -(-(limit - 1) // 5)
    assert decoded.stats.untrimmed.num_accepted_tokens == 4 * drafts
    cut = 5 * drafts - (limit - 1)  # tokens past the limit; the bonus is the first to go
    assert decoded.stats.trimmed.num_accepted_tokens == 4 * drafts - max(cut - 1, 0)
    assert decoded.stats.trimmed.num_cut_drafts == (cut > 0)
    assert decoded.stats.untrimmed.num_cut_drafts == 0
    # Every token but the prefill's comes from a draft, so the lengths add up to the output.
    assert limit - 1 == drafts * (decoded.stats.trimmed.acceptance_length or 0)


def test_a_stop_token_ends_the_output_inside_an_accepted_run(target: Target) -> None:
    text = plain_text(target, 40)
    for place in range(1, 12):
        stop = text[place]
        end = text.index(stop) + 1
        decoded = decode(target, Oracle([*PROMPT, *text]), stop_tokens=[stop])
        assert list(decoded.tokens) == text[:end]
        plain = autoregressive_decode(
            target,
            PROMPT,
            sampling=GREEDY,
            max_new_tokens=21,
            chance=SeededChance(0),
            stop_tokens=[stop],
        )
        assert decoded.tokens == plain.tokens


def test_wrong_drafts_cost_a_pass_each_and_change_nothing(target: Target) -> None:
    text = plain_text(target, 40)
    wrong = [(token + 1) % 97 for token in text]
    decoded = decode(target, Oracle([*PROMPT, *wrong]))
    assert list(decoded.tokens) == text[:21]
    assert decoded.stats.trimmed.num_accepted_tokens == 0
    assert decoded.stats.num_target_passes == 20


def test_an_empty_proposal_is_a_plain_step_and_no_draft(target: Target) -> None:
    decoded = decode(target, Oracle([]))
    assert list(decoded.tokens) == plain_text(target, 21)
    assert decoded.stats.untrimmed.num_drafts == 0
    assert decoded.stats.num_target_passes == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": 0}, r"depth must be at least 1, got 0"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 5000}, r"must fit in the 512 positions"),
    ],
)
def test_what_cannot_be_decoded_is_refused_before_it_starts(
    target: Target, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode(target, Oracle([]), **settings)


def test_an_empty_prompt_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        autoregressive_decode(target, [], sampling=GREEDY, max_new_tokens=4, chance=SeededChance(0))


# --- the rules themselves ---


def distributions(count: int, vocab: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.rand(vocab, generator=generator, dtype=torch.float64) ** 4


def test_acceptance_and_residual_together_give_the_target_distribution() -> None:
    for raw_target, raw_draft in zip(
        distributions(200, 6), list(distributions(201, 6))[1:], strict=True
    ):
        raw_target[raw_target < raw_target.median()] = 0
        distribution, draft = raw_target / raw_target.sum(), raw_draft / raw_draft.sum()
        accept = torch.minimum(distribution, draft)
        rest = residual(distribution[None], draft[None])[0]
        torch.testing.assert_close(
            accept + (1 - accept.sum()) * rest, distribution, atol=1e-14, rtol=0
        )


def test_greedy_rule_equals_rejection_with_point_masses() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(3, 4, 5, generator=generator)
        tokens = torch.randint(5, (3, 3), generator=generator)
        agreeing = logits.argmax(-1)[:, :3]
        tokens = torch.where(torch.rand(3, 3, generator=generator) < 0.7, agreeing, tokens)
        proposal = Proposal(tokens, torch.tensor([3, 2, 3]), None)
        greedy = verify_greedy(proposal, logits.argmax(-1))
        sampled = verify_draws(
            LOSSLESS, proposal, probabilities(logits, GREEDY), SeededChance(0), [0, 1, 2], [7, 7, 7]
        )
        assert torch.equal(greedy.num_accepted, sampled.num_accepted)
        assert torch.equal(greedy.bonus, sampled.bonus)


def test_chance_answers_by_key_and_not_by_order() -> None:
    chance, probs = SeededChance(3), torch.full((3, 50), 0.02)
    together = chance.choose(probs, [4, 5, 6], [10, 11, 12], 7)
    alone = [
        chance.choose(probs[:1], [row], [start], 7) for row, start in [(6, 12), (4, 10), (5, 11)]
    ]
    assert together.tolist() == [int(alone[1]), int(alone[2]), int(alone[0])]
    assert together.tolist() != chance.choose(probs, [4, 5, 6], [10, 11, 12], 8).tolist()


def test_chance_never_chooses_what_has_no_probability() -> None:
    probs = torch.zeros(1, 8)
    probs[0, [2, 5]] = 0.5
    chosen = {int(SeededChance(seed).choose(probs, [0], [0], 0)) for seed in range(200)}
    assert chosen == {2, 5}
    assert not any(bool(SeededChance(s).accept(torch.zeros(1), [0], [0], 0)) for s in range(50))
    assert all(bool(SeededChance(s).accept(torch.ones(1), [0], [0], 0)) for s in range(50))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-0.1, 0, 1.0), r"temperature must be 0 \(greedy\) or in \[0.0001, 10\], got -0.1"),
        ((1.0, -1, 1.0), r"top_k must be at least 0"),
        ((1.0, 0, 0.0), r"top_p must be in \(0, 1\], got 0.0"),
        ((1.0, 0, 1.5), r"top_p must be in \(0, 1\], got 1.5"),
    ],
)
def test_absurd_sampling_is_refused(values: tuple[float, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(*values)


def test_top_k_and_top_p_keep_what_they_say() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert probabilities(logits, Sampling(1.0, 2, 1.0)).tolist() == pytest.approx(
        [0.625, 0.375, 0, 0]
    )
    assert probabilities(logits, Sampling(1.0, 0, 0.6)).tolist() == pytest.approx(
        [0.625, 0.375, 0, 0]
    )
    assert probabilities(logits, Sampling(1.0, 0, 0.5)).tolist() == pytest.approx([1, 0, 0, 0])
    assert probabilities(logits, GREEDY).tolist() == [1, 0, 0, 0]
    assert probabilities(logits, Sampling(0.5, 0, 1.0))[0] == pytest.approx(0.25 / 0.365)
