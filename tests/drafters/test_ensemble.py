"""Several drafters in one tree: how votes merge what they draft, and what each one reads.

The contract suite and tests/decode take an ensemble like any other drafter.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders import drafter_config
from test_drafters import MEMBERS, PROMPTS, as_batch, build, random_drafter
from torch import Tensor

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Proposal, TargetFeatures
from drafttrain.decode.draft import draft
from drafttrain.decode.loop import Cycle, speculative_decode_batch
from drafttrain.decode.policy import DynamicTree, Policy, chain, tree_of_widths
from drafttrain.drafters import ensemble
from drafttrain.drafters.base import Drafter, DraftState, JoinedConfig
from drafttrain.drafters.ensemble import (
    COPIED,
    PRIOR_TESTS,
    TOGETHER,
    Acceptance,
    Ensemble,
    EnsembleState,
)
from drafttrain.drafters.ngram import Ngram, NgramState
from drafttrain.drafters.shared import merge
from drafttrain.drafters.shared.merge import merged, nodes_of
from drafttrain.target.model import Target

Node = tuple[int, ...]
# Three voters have 1; two of them 1 2, of which one goes on with 3; two have 5; one each 6, 7, 1 4.
VOTERS: list[list[Node]] = [
    [(1,), (1, 2), (5,), (1, 2, 3)],
    [(6,), (5,), (1,), (1, 4)],
    [(1,), (1, 2), (7,)],
]


@pytest.mark.parametrize(
    ("temperature", "nodes"),
    [
        (1.0, [(0,), (1,), (0, 0)]),  # 0.6, 0.4, 0.36; then 0.24 and, three deep, 0.216
        (0.25, [(0,), (0, 0), (0, 0, 0)]),  # 0.835, 0.697, 0.582; the other first token 0.165
    ],
)
def test_a_temperature_says_how_sure_a_drafter_is_held_to_be(
    temperature: float, nodes: list[Node], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 0 has six times in ten and token 1 four times, whatever was drafted before."""
    drafter = random_drafter("medusa", target)

    def expand(state: DraftState, newest: Tensor | None, parents: Tensor | None = None) -> Tensor:
        probs = torch.zeros(1, 1 if newest is None else newest.shape[1], target.spec.vocab_size)
        probs[..., 0], probs[..., 1] = 0.6, 0.4
        return probs.log()

    monkeypatch.setattr(drafter, "expand", expand)
    policy = DynamicTree(depth=3, width=2, num_nodes=3, temperature=temperature)
    state, rows = DraftState(target.readout), [0]
    proposal = draft(policy, drafter, state, GREEDY, SeededChance(0), rows, rows)
    assert nodes_of(proposal) == [nodes]


def tree(opinions: Sequence[Sequence[Node]], width: int, most: int) -> list[Node]:
    """The kept nodes, in order."""
    nodes = merged(opinions, width, most)
    for place, node in enumerate(nodes):
        assert node[:-1] in [(), *nodes[:place]], "a node's parent comes first"
    return nodes


def test_common_beginnings_are_one_and_votes_come_first() -> None:
    """By hand: 3 votes, 2 votes, 1 vote; of equal votes the earlier place, then the first voter."""
    whole = [(1,), (1, 2), (5,), (6,), (7,), (1, 2, 3), (1, 4)]
    assert tree(VOTERS, width=9, most=9) == whole
    for most in range(1, 8):
        assert tree(VOTERS, width=9, most=most) == whole[:most]
    assert tree(VOTERS, width=2, most=9) == [(1,), (1, 2), (5,), (1, 2, 3), (1, 4)]


def test_a_chain_is_the_most_voted_path_and_the_first_member_wins_ties() -> None:
    chains = [[(1,), (1, 2), (1, 2, 3)], [(4,), (4, 5)], [(4,), (4, 6), (4, 6, 7)]]
    assert tree(chains, width=1, most=3) == [(4,), (4, 5)]
    assert tree(chains[:2], width=1, most=3) == [(1,), (1, 2), (1, 2, 3)]
    assert tree([chains[2], chains[1]], width=1, most=2) == [(4,), (4, 6)]
    assert tree([[], []], width=1, most=3) == []


def test_votes_that_are_counted_wrongly_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One vote for each node, however many have it: the tests above must fail."""

    class OneEach(Counter[Node]):
        def __init__(self, nodes: Any = ()) -> None:
            super().__init__(set(nodes))

    monkeypatch.setattr(merge, "Counter", OneEach)
    with pytest.raises(AssertionError):
        test_common_beginnings_are_one_and_votes_come_first()
    with pytest.raises(AssertionError):
        test_a_chain_is_the_most_voted_path_and_the_first_member_wins_ties()


def state_after(
    drafter: Drafter, target: Target, text: Sequence[int], at_once: int, *shape: int
) -> DraftState:
    """The state of one row that has read this text, the first so many tokens as its prompt.

    shape: of what it proposes before it reads the others, in two cycles.
    """
    tokens = torch.tensor([text])
    _, features = target.step(target.begin(), tokens[:, :-1], drafter.captures)
    state = drafter.begin(target.readout, tokens[:, 0], 128)
    drafter.observe(state, tokens[:, 1:at_once], [at_once - 1], features.slice(0, at_once - 1))
    for first, last in [(at_once, at_once + 2), (at_once + 2, len(text))]:
        if first < len(text):
            drafter.propose(state, *shape)
            new, seen = tokens[:, first:last], features.slice(first - 1, last - 1)
            drafter.observe(state, new, [last - first], seen)
    return state


@pytest.mark.parametrize("shape", [(3,), (3, 2, 7)], ids=["chain", "tree"])
@torch.inference_mode()
def test_no_member_keeps_what_it_drafted_where_others_were_accepted(
    shape: tuple[int, ...], target: Target
) -> None:
    """After cycles whose tokens no member drafted, all draft what they draft of the whole text."""
    drafter = random_drafter("ensemble", target, members=["small_lm", *MEMBERS, "eagle"])
    text = [1, 3, 6, 20, 33, 41, 20, 9, 60, 7]
    stepped, fresh = (state_after(drafter, target, text, n, *shape) for n in (5, len(text)))
    one, other = (drafter.propose(state, *shape) for state in (stepped, fresh))
    assert one is not None
    assert other is not None
    assert nodes_of(one) == nodes_of(other)


def test_each_member_reads_the_layers_that_it_asked_for(target: Target) -> None:
    drafter = random_drafter("ensemble", target, members=["eagle3", "medusa"])
    first, second = drafter.members  # type: ignore[attr-defined]
    first.captures, second.captures = (0, 2), (1, 2)
    drafter = drafter.config.join(target.spec, [first, second])  # type: ignore[attr-defined]
    assert drafter.captures == (0, 1, 2)
    read: list[tuple[int, ...]] = []

    def noted(state: Any, tokens: Tensor, counts: Any, features: TargetFeatures) -> None:
        read.append(tuple(features.captured))

    first.observe = second.observe = noted
    state = state_after(drafter, target, [1, 3, 6], 3)
    assert isinstance(state, EnsembleState)
    for unread in state.unread:
        unread.read()
    assert read == [(0, 2), (1, 2)]


POLICIES = [chain(3), tree_of_widths([3, 2, 1]), tree_of_widths([2, 1]), DynamicTree(4, 3, 6)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
def test_trees_of_rows_differ_and_keep_the_policys_limits(policy: Policy, target: Target) -> None:
    drafter = random_drafter("ensemble", target)
    cycles: list[Cycle] = []
    speculative_decode_batch(
        target,
        drafter,
        [prompt * 2 for prompt in PROMPTS],
        rows=range(len(PROMPTS)),
        policy=policy,
        sampling=GREEDY,
        max_new_tokens=12,
        chance=SeededChance(0),
        record=cycles.append,
    )
    shapes = set()
    for cycle in cycles:
        assert cycle.proposal.draft_probs is None, "nodes are chosen, never drawn"
        for nodes in nodes_of(cycle.proposal):
            if not nodes:
                continue  # a plain step
            assert len(nodes) <= policy.num_nodes
            assert max(map(len, nodes)) <= policy.depth
            children = Counter(node[:-1] for node in nodes)
            assert len({*nodes}) == len(nodes)
            assert max(children.values()) <= policy.width
            assert {node[:-1] for node in nodes} <= {(), *nodes}
            shapes.add(tuple(children.values()))
    assert len(shapes) > 1


@torch.inference_mode()
def test_a_tree_holds_what_its_members_draft_alone(target: Target) -> None:
    policy, text = DynamicTree(3, 2, 6), [1, 3, 6, 20, 33, 41, 20]
    names = ["eagle3", "medusa", "ngram"]
    together = random_drafter("ensemble", target, members=names)
    alone = []
    for name in names:
        drafter = random_drafter(name, target)
        state = state_after(drafter, target, text, len(text))
        chosen = draft(policy, drafter, state, GREEDY, SeededChance(0), [0], [len(text)])
        alone.append(nodes_of(chosen)[0])
    found = together.propose(state_after(together, target, text, len(text)), 3, 2, 6)
    assert isinstance(found, Proposal)
    assert nodes_of(found)[0] == tree(alone, 2, 6)


def test_limits_are_those_of_the_members(target: Target) -> None:
    join = lambda *names: random_drafter("ensemble", target, members=[*names])  # noqa: E731
    assert join("medusa", "ngram").max_depth is None
    limited = join("medusa", "ngram").members[0]  # type: ignore[attr-defined]
    config = drafter_config("ensemble", members=["a", "b"])
    assert isinstance(config, JoinedConfig)
    shallower = build("medusa", target.spec, num_heads=2)
    assert config.join(target.spec, [limited, shallower]).max_depth == 4
    assert join("two_model", "ngram").max_positions == 512
    assert join("medusa", "ngram").max_positions is None


def test_a_member_that_takes_no_tree_is_refused(target: Target) -> None:
    config = drafter_config("ensemble", members=["mine", "ngram"])
    assert isinstance(config, JoinedConfig)
    mine = build("medusa", target.spec)
    mine.branches = False
    message = (
        r"^drafter\.members must be drafters whose expand takes levels of a tree "
        r"\(branches = True\), got mine$"
    )
    with pytest.raises(ValueError, match=message):
        config.join(target.spec, [mine, build("ngram", target.spec)])


def test_members_keep_a_dtype_of_their_own(target: Target) -> None:
    config = drafter_config("ensemble", members=["a", "b"])
    assert isinstance(config, JoinedConfig)
    members = [build("two_model", target.spec, dtype=dtype) for dtype in ("float32", "auto")]
    drafter = config.join(target.spec, members).to(torch.bfloat16)
    kinds = [next(member.parameters()).dtype for member in drafter.members]  # type: ignore[attr-defined]
    assert kinds == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"members": []}, r"members must name at least two drafters, each once, got \[\]"),
        ({"members": ["a"]}, r"members must name at least two drafters, each once, got \['a'\]"),
        ({"members": ["a", "a"]}, r"members must name at least two drafters, each once, got "),
        ({"settings": {"c": {}}}, r"settings must be of drafters in drafter\.members, as in "),
        ({"settings": {"a": 1}}, r"settings must be of drafters in drafter\.members, as in "),
    ],
)
def test_what_cannot_be_an_ensemble_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^drafter\.{said}"):
        drafter_config("ensemble", **{"members": ["a", "b"]} | changes)


# --- prompt lookup beside the others ---


def test_a_match_is_counted_beyond_its_ngram_and_a_loop_goes_on(target: Target) -> None:
    lookup = build("ngram", target.spec)
    assert isinstance(lookup, Ngram)

    def found(tokens: list[int], depth: int = 5, longest: int = 9) -> tuple[list[int], int]:
        state = state_after(lookup, target, tokens, len(tokens))
        assert isinstance(state, NgramState)
        return lookup.match(state.texts[0], depth, longest)

    assert found([1, 2, 3, 4]) == ([], 0)
    assert found([1, 2, 3, 4, 1]) == ([2, 3, 4, 1, 2], 1)
    loop = [1, 2, 3, 1, 2, 3, 1]
    assert found(loop) == ([2, 3, 1, 2, 3], 4)
    assert found(loop, depth=2, longest=2) == ([2, 3], 2)
    assert found([7, 8, 5, 7, 9, 5]) == ([7, 9, 5, 7, 9], 1)


def test_acceptance_is_learned_by_class_and_what_it_yields_adds_up() -> None:
    known = Acceptance([0.5, 0.25])
    assert known.yields(0, 3) == [1, 1.5, 1.625, 1.65625]  # deeper tokens are of the last class
    assert known.yields(1, 0) == [1]
    known.learn(0, num_accepted=1, num_tested=2)
    tests = 0.99 * PRIOR_TESTS + 1
    expected = [0.5 + 0.5 / tests, 0.25 - 0.25 / tests]
    assert known.rates == pytest.approx(expected)
    known.learn(5, 1, 1)
    assert known.rates == pytest.approx(
        [expected[0], expected[1] + (1 - expected[1]) / (0.99 * tests + 1)]
    )


REPEATED = [1, 20, 33, 41, 60, 52, 20, 33, 41]  # the last three stood there before


def with_lookup(target: Target, *names: str) -> Ensemble:
    drafter = random_drafter("ensemble", target, members=[*names, "ngram"])
    assert isinstance(drafter, Ensemble)
    return drafter


@pytest.mark.parametrize("shape", [(3,), (3, 2, 6)], ids=["chain", "tree"])
@torch.inference_mode()
def test_who_drafts_is_learned_from_what_was_accepted(
    shape: tuple[int, ...], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = with_lookup(target, "medusa")

    def drafted(alone: float, together: float, cycles: int = 1) -> list[dict[Node, str]]:
        state = state_after(drafter, target, REPEATED, len(REPEATED))
        assert isinstance(state, EnsembleState)
        (row,), members = state.rows, []
        row.alone, row.together = Acceptance([alone]), Acceptance([together])
        row.waited = 0
        for _ in range(cycles):
            proposal = drafter.propose(state, *shape)
            assert proposal.members is not None
            assert [*proposal.members[0]] == nodes_of(proposal)[0]
            members.append(dict(proposal.members[0]))
        return members

    path = [(60,), (60, 52), (60, 52, 20)]
    assert drafted(alone=0.9, together=0.1) == [dict.fromkeys(path, "ngram")]
    assert drafted(alone=0.05, together=0.05) == [{}], "a plain step, where neither pays"
    (both,) = drafted(alone=0.1, together=0.9)
    assert set(both.values()) == ({"medusa", "ngram"} if shape[1:] else {"medusa"})
    # They are tried again now and then, as nobody can know what they would have been worth.
    monkeypatch.setattr(ensemble, "PATIENCE", 2)
    *plain, tried = drafted(alone=0.05, together=0.05, cycles=3)
    assert plain == [{}, {}]
    assert "medusa" in tried.values()


@torch.inference_mode()
def test_a_row_learns_from_its_own_text_whoever_drafted(target: Target) -> None:
    drafter = with_lookup(target, "medusa")
    texts = torch.tensor([REPEATED, REPEATED])
    features = target.features(as_batch(REPEATED, REPEATED), drafter.captures)
    state = drafter.begin(target.readout, texts[:, 0], 40)
    following = torch.cat([texts[:, 1:], torch.tensor([[60], [99]])], dim=1)
    drafter.observe(state, following[:, :-1], [8, 8], features.slice(0, 8))
    for row in state.rows:
        row.together = Acceptance([0.0])  # so that prompt lookup drafts alone
    drafter.propose(state, 2)
    before = Acceptance(COPIED).rates
    assert [row.alone.rates for row in state.rows] == [before, before]
    drafter.observe(state, following[:, -1:], [1, 1], features.slice(8, 9))
    right, wrong = (row.alone.rates for row in state.rows)
    assert right[2] > before[2] > wrong[2], "the match had three tokens"
    assert right[:2] == wrong[:2] == before[:2]
    assert right[3:] == wrong[3:] == before[3:]
    for row in state.rows:
        row.alone, row.together = Acceptance([0.0]), Acceptance(TOGETHER)
    drafter.propose(state, 2)
    assert [row.depth for row in state.rows] == [2, 2]
    drafter.observe(state, torch.tensor([[5, 6, 7], [5, 0, 0]]), [3, 1], features.slice(0, 3))
    right, wrong = (row.together.rates for row in state.rows)
    assert right[0] > TOGETHER[0] > wrong[0]
    assert right[1] > TOGETHER[1] == wrong[1], "what follows a rejected token was not tested"
    assert right[2:] == wrong[2:] == [*TOGETHER[2:]]


@torch.inference_mode()
def test_members_that_did_not_draft_read_all_of_the_text(target: Target) -> None:
    """After cycles of prompt lookup alone they draft what they draft where they read at once."""
    drafter = with_lookup(target, "small_lm", "eagle3", "two_model", "eagle")
    text = [*REPEATED, 60, 52, 20, 33, 9, 60, 7, 5]
    tokens = torch.tensor([text])
    _, features = target.step(target.begin(), tokens[:, :-1], drafter.captures)
    proposals = []
    for alone in (True, False):
        state = drafter.begin(target.readout, tokens[:, 0], 64)
        for first, last in [(1, 9), (9, 12), (12, 14), (14, 15), (15, 17)]:
            row = state.rows[0]
            row.together = Acceptance([0.0 if alone else 1.0])
            row.waited = 0
            if first > 1:
                drafter.propose(state, 3, 2, 6)
            part = features.slice(first - 1, last - 1)
            drafter.observe(state, tokens[:, first:last], [last - first], part)
        state.rows[0].together = Acceptance([1.0])
        proposals.append(nodes_of(drafter.propose(state, 3, 2, 6)))
    assert proposals[0] == proposals[1]


@pytest.mark.parametrize(
    "policy",
    [chain(4), tree_of_widths([2, 2, 1]), DynamicTree(3, 3, 8)],
    ids=lambda policy: policy.describe(),
)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 5, 1.0)], ids=["greedy", "sampled"])
def test_the_parts_of_the_members_add_up(
    policy: Policy, sampling: Sampling, target: Target
) -> None:
    drafter = with_lookup(target, "eagle3")
    decoded = speculative_decode_batch(
        target,
        drafter,
        [prompt * 3 for prompt in PROMPTS],
        rows=range(len(PROMPTS)),
        policy=policy,
        sampling=sampling,
        draft_sampling=GREEDY,
        max_new_tokens=30,
        chance=SeededChance(0),
        stop_tokens=[],
    )
    seen: set[str] = set()
    for each in decoded:
        whole, parts = each.stats.trimmed, each.stats.by_member
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            assert getattr(whole, name) == sum(getattr(part, name) for part in parts.values())
        assert max(part.num_drafts for part in parts.values()) <= whole.num_drafts
        assert whole.num_drafts <= sum(part.num_drafts for part in parts.values())
        seen |= parts.keys()
    assert seen == {"eagle3", "ngram"}
    assert sum(each.stats.by_member["ngram"].num_accepted_tokens for each in decoded) > 0
