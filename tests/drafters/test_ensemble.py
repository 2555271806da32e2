"""Several drafters in one tree: how votes merge what they draft, and what each one reads.

The contract suite and tests/decode take an ensemble like any other drafter.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders import drafter_config
from test_drafters import MEMBERS, PROMPTS, build, random_drafter
from torch import Tensor

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Proposal, TargetFeatures
from drafttrain.decode.draft import draft
from drafttrain.decode.loop import Cycle, speculative_decode_batch
from drafttrain.decode.policy import DynamicTree, Policy, chain, tree_of_widths
from drafttrain.drafters.base import Drafter, DraftState, JoinedConfig
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
    """The kept nodes, in order, as paths."""
    tokens, parents = merged(opinions, width, most)
    nodes: list[Node] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(nodes), "a node's parent comes first"
        nodes.append((*(nodes[parent] if parent >= 0 else ()), token))
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
    state_after(drafter, target, [1, 3, 6], 3)
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
            assert 0 < len(nodes) <= policy.num_nodes
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
