"""What the real loop emits has the target's exact distribution: every drafter and lossless rule.

Not by statistics: `distribution_support` replays the loop over every answer that chance could give.
Lossy rules emit exactly the distribution that their closed form predicts, which is another.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from distribution_replay import EXACT, Replayed, distance, replay
from distribution_support import (
    DRAFTERS,
    PLAIN,
    Case,
    Distribution,
    Small,
    draft_distribution,
    drafter_for,
    next_distributions,
    parts,
    predicted_distribution,
    target_distribution,
)
from pairs import dealt, pairs

from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import TargetFeatures
from drafttrain.decode import adaptive, loop
from drafttrain.decode.adaptive import Adaptive
from drafttrain.decode.costs import Costs
from drafttrain.decode.loop import is_lossless
from drafttrain.decode.policy import DynamicTree, Policy, StaticTree, tree_of_ranks
from drafttrain.decode.verify import (
    LOSSLESS,
    Block,
    Lenience,
    Rejection,
    Rule,
    Typical,
    one_step_distribution,
)
from drafttrain.drafters.base import Drafter


def slow(*values: Any) -> Any:
    """Parameters for `make slow`: each of these costs every drafter a second."""
    return pytest.param(*values, marks=pytest.mark.slow)


TOP_2, TOP_P, COLD = Sampling(1.0, 2, 1.0), Sampling(1.0, 0, 0.7), Sampling(0.6, 3, 1.0)
SAMPLINGS = {
    "plain": PLAIN,
    "cold": slow(COLD),
    "top_k": TOP_2,
    "top_p": TOP_P,
    "all_warpers": Sampling(1.4, 3, 0.9),
    "greedy": GREEDY,
}
LOSSY = {
    "typical": Typical(0.3, 0.6),
    "typical_of_medusa": Typical(0.09, 0.3),
    "lenience_half": Lenience(0.5),
    "lenience_tenth": Lenience(0.1),
}
HAPPENS = {"first rejected", "partly accepted", "all accepted", "rows accept differently"}


@pytest.fixture(scope="module")
def smalls(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Small]:
    """Targets by how many tokens they know."""
    folder = tmp_path_factory.mktemp("distribution")
    return {size: Small.make(folder, size) for size in (3, 4, 5, 6)}


def certify(small: Small, drafter: Drafter | None, case: Case, width: int) -> Replayed:
    """Assert that the loop's distribution is the target's, and no uniform was used twice."""
    says_so = is_lossless(case.rule, case.sampling)
    assert says_so or case.rule == Lenience(1.0)  # exact, but not promised
    replayed = replay(small, drafter, case, width)
    assert sum(replayed.distribution.values()) == pytest.approx(1, abs=EXACT)
    assert distance(replayed.distribution, target_distribution(small, case)) <= EXACT
    assert replayed.num_repeated == 0
    return replayed


# Settings of a chain: every pair of values, of any two of these lists, is tested together.
CHAINS = pairs(
    DRAFTERS,
    [(3, 2), (3, 3), (3, 1), (2, 1), (2, 3), (1, 2)],  # limit and depth
    [PLAIN, TOP_2, TOP_P, Sampling(1.4, 3, 0.9), GREEDY],
    [None, GREEDY, PLAIN, Sampling(1.0, 0, 0.6), TOP_2],  # of drafts; None: as the target's
    [LOSSLESS, Lenience(1.0), Block()],
    [(), ("bb", "ba")],  # stop strings
    [((0, 1, 0, 1, 0),), ((1,),)],  # a prompt; of a single token there is no feature
)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_setting_of_a_chain_has_the_distribution_of_the_target(
    name: str, smalls: dict[int, Small]
) -> None:
    drafter = drafter_for(name, smalls[3])
    seen: set[str] = set()
    for each, (limit, depth), sampling, drawn, rule, stops, prompts in CHAINS:
        if each == name:
            case = Case(prompts, limit, depth, None, sampling, drawn, rule, stops)
            seen |= certify(smalls[3], drafter, case, width=1000).seen
    assert seen >= {"first rejected", "all accepted", "limit inside an accepted run"}


@pytest.mark.parametrize(
    ("name", "sampling"),
    [(name, PLAIN) for name in DRAFTERS] + [slow(name, COLD) for name in DRAFTERS],
)
def test_three_tokens_have_the_distribution_of_the_target(
    name: str, sampling: Sampling, smalls: dict[int, Small]
) -> None:
    drafter = drafter_for(name, smalls[4])
    replayed = certify(smalls[4], drafter, Case(sampling=sampling), width=1000)
    if sampling == PLAIN:
        ends = set() if name == "ngram" else {"end inside an accepted run"}
        assert replayed.seen >= HAPPENS | ends | {"limit inside an accepted run"}
        assert len(replayed.distribution) > 30


@pytest.mark.parametrize(("name", "sampling"), dealt(DRAFTERS, [PLAIN, TOP_2]))
def test_one_prompt_at_a_time_has_the_distribution_of_the_target(
    name: str, sampling: Sampling, smalls: dict[int, Small]
) -> None:
    """One walk after another, each a decoding of its own: no batch takes part."""
    case = Case(sampling=sampling, limit=3 if sampling.top_k else 2, depth=2)
    alone = certify(smalls[3], drafter_for(name, smalls[3]), case, width=1)
    assert alone.num_walks > 5
    together = replay(smalls[3], drafter_for(name, smalls[3]), case, width=1000)
    assert distance(alone.distribution, together.distribution) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "ngram"])
def test_drafts_may_be_hotter_than_the_target(name: str, smalls: dict[int, Small]) -> None:
    case = Case(sampling=Sampling(0.7, 3, 1.0), draft_sampling=Sampling(2.5, 3, 1.0))
    replayed = certify(smalls[4], drafter_for(name, smalls[4]), case, width=1000)
    assert "first rejected" in replayed.seen


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_six_tokens_drafted_three_deep(name: str, smalls: dict[int, Small]) -> None:
    case = Case(limit=2, depth=3, sampling=Sampling(1.0, 4, 1.0))
    certify(smalls[6], drafter_for(name, smalls[6]), case, width=1000)


@pytest.mark.parametrize("name", ["eagle3", "medusa", "ngram", "two_model"])
def test_stop_strings_end_an_accepted_run(name: str, smalls: dict[int, Small]) -> None:
    """Spelled by two tokens, by the end of one and another, and by the beginning of one."""
    small, drafter = smalls[5], drafter_for(name, smalls[5])
    case = Case(sampling=Sampling(1.0, 4, 1.0), stop_strings=("bb", "ba"))
    stopped = certify(small, drafter, case, width=1000).distribution
    shorter = {text for (text,) in stopped if len(text) < 3 and text[-1] != 4}
    assert {(1, 1), (2, 1), (1, 2)} <= shorter  # b b, ab b, b ab
    assert distance(stopped, target_distribution(small, replace(case, stop_strings=()))) > 0.01


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_plain_loop_has_the_distribution_of_the_target(
    sampling: Sampling, smalls: dict[int, Small]
) -> None:
    """The baseline of every speedup samples what the drafted loop samples."""
    certify(smalls[5], None, Case(sampling=sampling, stop_strings=("bb",)), width=1000)
    certify(smalls[3], None, Case(TWO, sampling=sampling, limit=2), width=1)


# --- batches: the joint distribution of two rows ---

TWO = ((0, 1, 0, 1, 0), (1, 1))


@pytest.mark.parametrize(
    "case",
    [
        Case(TWO, limit=2, depth=1, sampling=TOP_2),
        slow(Case(TWO, limit=3, depth=2, sampling=TOP_2, draft_sampling=GREEDY)),
        slow(Case(TWO, limit=2, depth=1)),
        slow(Case(TWO, limit=3, depth=1, sampling=TOP_2)),
    ],
    ids=["top_k", "greedy_drafts", "plain", "two_cycles"],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_two_rows_of_a_batch_are_independent(
    name: str, case: Case, smalls: dict[int, Small]
) -> None:
    """Answers of both rows replayed jointly: the distribution is the product of the rows' own."""
    replayed = certify(smalls[3], drafter_for(name, smalls[3]), case, width=1)
    assert "rows accept differently" in replayed.seen
    assert "a row has left" in replayed.seen


def test_three_rows_of_a_batch_are_independent(smalls: dict[int, Small]) -> None:
    case = Case(((0, 1, 0, 1, 0), (1, 1), (0, 0, 1)), limit=2, depth=1, sampling=TOP_2)
    replayed = certify(smalls[3], drafter_for("ngram", smalls[3]), case, width=1)
    assert replayed.num_walks > 20


# --- trees ---

BRANCHING = [name for name in DRAFTERS if name != "ngram"]  # whose shape is not the text's
TWO_LEVELS = tree_of_ranks([(0,), (1,), (0, 0), (1, 0)])
LOPSIDED = tree_of_ranks([(0,), (1,), (1, 0), (1, 1)])  # the first child has no children
SHARP = DynamicTree(depth=2, width=2, num_nodes=4, temperature=0.3)
SHAPES = {
    "without_replacement": (TWO_LEVELS, PLAIN),
    "with_replacement": (replace(TWO_LEVELS, replacement=True), PLAIN),
    "chosen": (TWO_LEVELS, GREEDY),
    "lopsided": (LOPSIDED, PLAIN),
    "warped": (LOPSIDED, Sampling(1.0, 2, 1.0)),  # two tokens can be drawn: then any other
    "dynamic": (DynamicTree(depth=2, width=2, num_nodes=4), GREEDY),
}


# A drafter sees the tree, not how its tokens are drawn: each drafts a tree of its own choice and
# one that is given, drawn in one of the ways.
GIVEN = [shape for shape in SHAPES if shape != "dynamic"]


@pytest.mark.parametrize(
    ("name", "shape"), [(name, "dynamic") for name in BRANCHING] + dealt(BRANCHING, GIVEN)
)
def test_trees_have_the_distribution_of_the_target(
    name: str, shape: str, smalls: dict[int, Small]
) -> None:
    policy, drawn = SHAPES[shape]
    case = Case(limit=3, policy=policy, sampling=TOP_2, draft_sampling=drawn)
    replayed = certify(smalls[3], drafter_for(name, smalls[3]), case, width=1000)
    assert replayed.seen >= {"first rejected", "partly accepted", "another child accepted"}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["eagle3", slow("medusa"), slow("two_model"), slow("eagle")])
def test_trees_of_two_rows_are_independent(
    name: str, shape: tuple[Policy, Sampling], smalls: dict[int, Small]
) -> None:
    """One walk at a time: each row has a tree of its own, and accepts a path of its own."""
    policy, drawn = shape
    if isinstance(policy, StaticTree):
        policy = replace(policy, parents=(-1, -1))
    drawn = drawn if drawn.greedy else TOP_2
    case = Case(TWO, limit=2, policy=policy, sampling=TOP_2, draft_sampling=drawn)
    replayed = certify(smalls[3], drafter_for(name, smalls[3]), case, width=1)
    assert replayed.seen >= {"rows accept differently", "a row has left"}


@pytest.mark.parametrize("rule", [LOSSLESS, Lenience(1.0)], ids=["choices", "draws"])
@pytest.mark.parametrize("sampling", [PLAIN, TOP_2, GREEDY], ids=str)
def test_trees_of_what_followed_before_have_the_distribution_of_the_target(
    sampling: Sampling, rule: Rule, smalls: dict[int, Small]
) -> None:
    """The suffix 0 1 was followed by 0, and before that by 1; the rows' trees differ."""
    prompts = ((0, 1, 1, 0, 1, 0, 0, 1), (1, 0, 1))
    policy = DynamicTree(depth=2, width=2, num_nodes=4)
    for chosen in (prompts[:1], prompts):
        case = Case(chosen, 2, 2, policy, sampling, GREEDY, rule)
        replayed = certify(smalls[3], drafter_for("ngram", smalls[3]), case, width=len(chosen))
        if sampling == PLAIN:
            assert "another child accepted" in replayed.seen


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, LOPSIDED) for name in BRANCHING] + dealt(BRANCHING, [SHAPES["dynamic"][0], SHARP]),
    ids=lambda value: value.describe() if isinstance(value, Policy) else None,
)
def test_at_temperature_zero_a_tree_gives_the_targets_own_text(
    name: str, policy: Policy, smalls: dict[int, Small]
) -> None:
    case = Case(TWO, limit=8, policy=policy, sampling=GREEDY)
    certify(smalls[6], drafter_for(name, smalls[6]), case, width=1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", BRANCHING)
def test_trees_over_every_token_have_the_distribution_of_the_target(
    name: str, shape: tuple[Policy, Sampling], smalls: dict[int, Small]
) -> None:
    policy, drawn = shape
    case = Case(limit=2, policy=policy, sampling=PLAIN, draft_sampling=drawn)
    certify(smalls[4], drafter_for(name, smalls[4]), case, width=1000)


# --- depth while drafting ---


def passes(level: float, read: float = 0.0) -> Costs:
    """Target passes of a second, whatever their width; a drafted token costs `level` of it."""
    table: dict[Any, float] = {(depth, 1, 8): level * depth for depth in (1, 2, 3)}
    return Costs([1], [8], {(1, 8): 1.0}, dict.fromkeys(table, 1.0), table, {(1, 8): read})


PACES = {
    "by_confidence": (Adaptive(3, passes(0.2), (0.6,)), 4),
    "by_acceptance": (Adaptive(2, passes(0.45), (0.5,)), 4),
    "never": (Adaptive(2, passes(0.9), (0.1,)), 3),
}


# Each drafter by its confidence and, with the other rule, by its acceptance or never.
PACED = [
    (name, pace, rule)
    for i, name in enumerate(DRAFTERS)
    for pace, rule in zip(
        ("by_confidence", ("by_acceptance", "never")[i % 2]),
        (LOSSLESS, Block()) if i // 2 % 2 else (Block(), LOSSLESS),
        strict=True,
    )
]


@pytest.mark.parametrize(("name", "pace", "rule"), PACED)
def test_an_adaptive_depth_leaves_the_distribution_of_the_target(
    name: str,
    pace: str,
    rule: Rule,
    smalls: dict[int, Small],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One walk at a time, as rows that are decoded together decide together."""
    monkeypatch.setattr(adaptive, "PRIOR", 0.5)  # a single draft changes the depth of the next
    monkeypatch.setattr(adaptive, "TRIES", 0.5)
    policy, limit = PACES[pace]
    depths: set[int] = set()

    def noted(row: Any, proposal: Any, *others: Any) -> None:
        depths.add(proposal.tokens.shape[1])
        count(row, proposal, *others)

    count = loop._count
    monkeypatch.setattr(loop, "_count", noted)
    case = Case(limit=limit, policy=policy, sampling=TOP_2, rule=rule)
    certify(smalls[3], drafter_for(name, smalls[3]), case, width=1)
    if name not in ("ngram", "ensemble"):  # which propose whole chains
        assert depths >= {"by_confidence": {1, 2}, "by_acceptance": {0, 1}, "never": {0}}[pace]


@pytest.mark.parametrize("name", ["eagle3", slow("medusa"), slow("two_model"), slow("ngram")])
def test_rows_that_choose_a_depth_together_are_independent(
    name: str, smalls: dict[int, Small], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "PRIOR", 0.5)
    policy = Adaptive(2, passes(0.4), (0.6,))
    case = Case(TWO, limit=3, policy=policy, sampling=TOP_2, draft_sampling=GREEDY)
    certify(smalls[3], drafter_for(name, smalls[3]), case, width=1)


# --- rules that say they are lossy ---


@pytest.mark.parametrize("rule", LOSSY.values(), ids=LOSSY)
def test_lossy_rules_do_what_their_papers_say(rule: Rule) -> None:
    """Token by token, in plain numbers: Medusa 2.3.1; Leviathan et al., appendix A.5."""
    generator = torch.Generator().manual_seed(0)
    both = torch.rand(2, 40, 5, generator=generator, dtype=torch.float64) ** 3
    both = both / both.sum(-1, keepdim=True)
    every = torch.arange(5).expand(40, 5)
    accepted, corrected = rule.acceptance(*both, every), rule.correction(*both)
    for p, q, yes, after in zip(*both.tolist(), accepted.tolist(), corrected.tolist(), strict=True):
        if isinstance(rule, Typical):
            entropy = -sum(x * math.log(x) for x in p)
            bound = min(rule.epsilon, rule.delta * math.exp(-entropy))
            assert yes == [float(x > bound) for x in p]
            assert after == p
        else:
            assert isinstance(rule, Lenience)
            lower = [rule.lenience * y for y in q]
            assert yes == pytest.approx([min(1, x / y) for x, y in zip(p, lower, strict=True)])
            left = [max(0, x - y) for x, y in zip(p, lower, strict=True)]
            assert after == pytest.approx([x / sum(left) for x in left])


@pytest.mark.parametrize(
    ("name", "lossy"),
    [
        *dealt(DRAFTERS, ["typical", "typical_of_medusa"]),
        *dealt(DRAFTERS, ["lenience_half", "lenience_tenth"]),
    ],
)
def test_a_lossy_rule_emits_the_distribution_that_its_closed_form_predicts(
    name: str, lossy: str, smalls: dict[int, Small]
) -> None:
    rule = LOSSY[lossy]
    small, drafter = smalls[3], drafter_for(name, smalls[3])
    case = Case(rule=rule)
    emitted = replay(small, drafter, case, width=1000).distribution
    assert distance(emitted, predicted_distribution(small, drafter, case)) <= EXACT
    assert not is_lossless(rule, case.sampling)
    assert total_variation(emitted, target_distribution(small, case)) > 0.01


def total_variation(one: Distribution, other: Distribution) -> float:
    """Half the sum of the differences."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one | other) / 2


@pytest.mark.parametrize(("name", "rule"), dealt(DRAFTERS, [Rejection(), *LOSSY.values()]))
def test_the_token_after_the_root_has_the_one_step_distribution(
    name: str, rule: Rule, smalls: dict[int, Small]
) -> None:
    """The closed form that certificates are made of, against the loop itself."""
    small, drafter = smalls[4], drafter_for(name, smalls[4])
    case = Case(limit=2, depth=1, rule=rule)
    (prompt,) = case.prompts
    emitted = replay(small, drafter, case, width=1000).distribution
    roots = next_distributions(small, [prompt], case.sampling)[0].tolist()
    for root, probability in enumerate(roots[:-1]):
        text = (*prompt, root)
        target_probs = next_distributions(small, [text], case.sampling)
        draft_probs = draft_distribution(small, drafter, case, text, ())
        distribution = target_probs
        if draft_probs is not None:
            distribution = one_step_distribution(rule, target_probs, draft_probs)
            torch.testing.assert_close(sum(parts(rule, target_probs, draft_probs)), distribution)
        for token, p in enumerate(distribution[0].tolist()):
            assert emitted.get(((root, token),), 0.0) == pytest.approx(probability * p, abs=EXACT)


ZERO = pairs(list(LOSSY.values()), [GREEDY, PLAIN])


@pytest.mark.parametrize(("name", "settings"), dealt(DRAFTERS, ZERO))
def test_at_temperature_zero_every_rule_is_lossless(
    name: str, settings: tuple[Rule, Sampling], smalls: dict[int, Small]
) -> None:
    rule, drafts = settings
    case = Case(sampling=GREEDY, draft_sampling=drafts, rule=rule)
    assert is_lossless(rule, case.sampling)
    certify(smalls[4], drafter_for(name, smalls[4]), case, width=1000)


# --- what a drafter does wrong costs acceptance, never the distribution ---


class Misled(Drafter):
    """A drafter that is shown the wrong features, and whose own cache forgets to roll back."""

    def __init__(self, inner: Drafter, mistake: str) -> None:
        super().__init__()
        self.inner, self.mistake = inner, mistake
        self.config, self.spec, self.vocab = inner.config, inner.spec, inner.vocab
        self.captures, self.max_depth = inner.captures, inner.max_depth

    def forward(self, *inputs: Any) -> Any:
        raise AssertionError("not trained")

    def begin(self, *inputs: Any) -> Any:
        state = self.inner.begin(*inputs)
        if self.mistake == "own nodes never forgotten":
            state.cache.rollback = lambda lengths: None
        return state

    def observe(self, state: Any, tokens: Any, counts: Any, features: TargetFeatures) -> None:
        if self.mistake == "features a position late":
            late = (torch.arange(tokens.shape[1]) - 1).clamp(min=0)
            captured = {i: hidden[:, late] for i, hidden in features.captured.items()}
            hidden = features.final_hidden[:, late]
            features = TargetFeatures(captured, hidden, features.readout)
        self.inner.observe(state, tokens, counts, features)

    def expand(self, state: Any, newest: Any, parents: Any = None) -> Any:
        return self.inner.expand(state, newest, parents)

    def select(self, state: Any, rows: Any) -> None:
        self.inner.select(state, rows)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("eagle", "features a position late"),
        ("eagle3", "features a position late"),
        ("medusa", "features a position late"),
        ("eagle", "own nodes never forgotten"),
        ("eagle3", "own nodes never forgotten"),
    ],
)
def test_a_broken_drafter_is_still_lossless(
    name: str, mistake: str, smalls: dict[int, Small]
) -> None:
    small, case = smalls[3], Case()
    whole, broken = drafter_for(name, small), Misled(drafter_for(name, small), mistake)
    certify(small, broken, case, width=1000)
    # A lossy rule shows that the mistake does reach the drafts.
    lossy = replace(case, rule=Lenience(0.5))
    distributions = [
        replay(small, drafter, lossy, width=1000).distribution for drafter in (whole, broken)
    ]
    assert distance(*distributions) > 1e-4
