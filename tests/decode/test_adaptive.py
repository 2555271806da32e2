"""The decisions of the adaptive policy, against the times that they lead to."""

import random
from itertools import product

import pytest

from drafttrain.decode.adaptive import Adaptive, Pace
from drafttrain.decode.costs import Costs

DEPTHS, BATCHES, CONTEXTS = (1, 2, 4, 8), (1, 8), (64, 256)
PLAIN, LEVEL, NODE, READ = 10.0, 1.5, 0.3, 40.0  # milliseconds
CELLS = list(product(BATCHES, CONTEXTS))


def costs(node: float = NODE, read: float = READ) -> Costs:
    """A pass costs 10 ms and 0.3 more for each token after the first; a drafted token 1.5 ms."""
    return Costs(
        BATCHES,
        CONTEXTS,
        plain={cell: PLAIN / 1000 for cell in CELLS},
        verify={(d, *cell): (PLAIN + node * d) / 1000 for d in DEPTHS for cell in CELLS},
        draft={(d, *cell): LEVEL * d / 1000 for d in DEPTHS for cell in CELLS},
        read={cell: read / 1000 for cell in CELLS},
    )


def pace(acceptance: float, depth: int = 8, node: float = NODE, **settings: float) -> Pace:
    policy = Adaptive(depth, costs(node), (acceptance,), **settings)  # type: ignore[arg-type]
    return Pace(policy, [0])


def decoded(
    one: Pace, tokens: int, chances: list[float], seed: int = 0, confidence: float | None = None
) -> tuple[float, list[int]]:
    """Return the seconds that the pace takes for a text, and the depth of each cycle.

    chances: that a drafted token is accepted, one after another along the text, again and again.
    confidence: the drafter's own word; None: it knows its chance.
    """
    told, generator = one.policy.costs, random.Random(seed)
    emitted, seconds, depths, read = 0, 0.0, [], False
    while emitted < tokens:
        chance = chances[emitted * len(chances) // tokens]
        depth = accepted = 0
        if one.begins([0], [64], [tokens - emitted]):
            seconds += 0 if read else told.read_s(1, 64)
            depth, read = 1, True
            while one.goes_on([chance if confidence is None else confidence]):
                depth += 1
            while accepted < depth and generator.random() < chance:
                accepted += 1
            one.learn([0], [accepted], [depth])
        seconds += (PLAIN + (NODE + LEVEL) * depth) / 1000
        emitted += accepted + 1
        depths.append(depth)
    return seconds, depths


def fixed(depth: int, tokens: int, chances: list[float], seed: int = 0) -> float:
    emitted, seconds, generator = 0, READ / 1000 if depth else 0.0, random.Random(seed)
    while emitted < tokens:
        chance, accepted = chances[emitted * len(chances) // tokens], 0
        while accepted < depth and generator.random() < chance:
            accepted += 1
        seconds += (PLAIN + (NODE + LEVEL) * depth) / 1000
        emitted += accepted + 1
    return seconds


@pytest.mark.parametrize("confidence", [0.02, 0.5, 0.9])
def test_a_bad_drafter_costs_at_most_three_percent(confidence: float) -> None:
    plain = 1000 * PLAIN / 1000
    known, _ = decoded(pace(0.02), 1000, [0.02], confidence=confidence)
    assert known < 1.03 * plain
    surprised, depths = decoded(pace(0.5), 1000, [0.02], confidence=confidence)
    assert surprised < 1.03 * plain
    assert any(depths), "it was tried"


def test_a_drafter_is_given_up_though_a_draft_costs_little() -> None:
    table = costs(node=0.0)
    for key in table.draft:
        table.draft[key] = 0.0005 * key[0]  # a twentieth of a plain step
    _, depths = decoded(Pace(Adaptive(8, table, (0.6,)), [0]), 500, [0.0])
    # A try costs what 2 % of two and a half plain steps do: every fourth step may be one.
    assert max(depths[50:]) == 1
    assert depths[50:].count(0) >= 0.74 * len(depths[50:])


@pytest.mark.parametrize("chance", [0.3, 0.5, 0.7, 0.85, 0.95])
def test_it_is_as_fast_as_the_best_depth(chance: float) -> None:
    ours = sum(decoded(pace(0.6), 2000, [chance], seed)[0] for seed in range(5))
    best = min(sum(fixed(d, 2000, [chance], seed) for seed in range(5)) for d in range(9))
    assert ours < 1.05 * best


@pytest.mark.parametrize("chances", [[0.95, 0.02], [0.02, 0.95]])
def test_a_text_that_changes_is_drafted_where_that_pays_and_only_there(
    chances: list[float],
) -> None:
    ours = sum(decoded(pace(0.6), 1000, chances, seed)[0] for seed in range(5))
    parts = [
        min(sum(fixed(d, 500, [chance], seed) for seed in range(5)) for d in range(9))
        for chance in chances
    ]
    assert ours < 1.06 * sum(parts)


def test_a_drafter_that_was_thought_bad_is_found_good() -> None:
    _, depths = decoded(pace(0.02), 1000, [0.95])
    tried = min(place for place, depth in enumerate(depths) if depth)
    assert tried > 100  # reading the prompt is not cheap
    assert min(place for place, depth in enumerate(depths) if depth > 3) < tried + 40


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_confidence_below_those_before_it_ends_a_draft(scale: float) -> None:
    one = pace(0.8)
    for _ in range(4):
        assert one.begins([0], [64], [500])
        while one.goes_on([0.9 * scale]):
            pass
        one.learn([0], [len(one.confidence)], [len(one.confidence)])
    assert one.begins([0], [64], [500])
    assert one.goes_on([0.9 * scale])
    assert not one.goes_on([0.05 * scale])


def test_no_cycle_takes_longer_than_the_latency_asked_for() -> None:
    one = pace(0.9, latency_s=0.0145)  # depth 2 takes 13.6 ms, 3 takes 15.4
    _, depths = decoded(one, 500, [0.9])
    assert max(depths) == 2
    assert set(decoded(pace(0.9, latency_s=0.011), 500, [0.9])[1]) == {0}


def test_a_short_answer_does_not_pay_for_reading_the_prompt() -> None:
    for left, pays in ((3, False), (300, True)):
        assert pace(0.8).begins([0], [64], [left]) == pays


def test_a_batch_that_fills_the_machine_is_not_drafted_for() -> None:
    table = costs()
    for depth, context in product(DEPTHS, CONTEXTS):
        table.verify[depth, 8, context] = (1 + depth) * PLAIN / 1000  # no token is free
    policy = Adaptive(8, table, (0.6,))
    assert Pace(policy, range(1)).begins([0], [64], [500])
    assert not Pace(policy, range(8)).begins(range(8), [64] * 8, [500] * 8)


def test_rows_bring_what_they_have_seen_themselves() -> None:
    one = Pace(Adaptive(4, costs(), (0.5,)), [3, 5])
    for _ in range(20):
        assert one.begins([3, 5], [64, 64], [500, 500])
        one.goes_on([0.9, 0.9])
        one.learn([3, 5], [1, 0], [2, 2])
    assert one.ahead[0, 0] > 0.7
    assert one.ahead[1, 0] < 0.3


def test_costs_come_back_from_a_file_as_they_were() -> None:
    assert Costs.of_records(costs().records()).cycle_s(2, 1, 64) == pytest.approx(0.0136)
    broken = costs().records()
    broken["draft"].pop()
    with pytest.raises(ValueError, match="costs must have every depth, batch and context"):
        Costs.of_records(broken)
