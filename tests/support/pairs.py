"""Combinations of test parameters: every pair of values, instead of the full product."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairs(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each parameter, such that every pair of values is in some row.

    The product of parameters with 20, 5, 4 and 3 values has 1,200 rows; their pairs need about
    100. Greedy and without randomness: each row begins with the first pair that is missing, and
    every other parameter takes the value that adds most pairs.
    """
    sizes = [len(values) for values in parameters]
    missing = {
        (first, one, second, other): None  # a dict keeps the order
        for first, second in combinations(range(len(sizes)), 2)
        for one, other in product(range(sizes[first]), range(sizes[second]))
    }
    rows: list[tuple[Any, ...]] = []
    used = [[0] * size for size in sizes]
    while missing:
        first, one, second, other = next(iter(missing))
        row = {first: one, second: other}
        for index in range(len(sizes)):
            if index not in row:
                # Of values that add as many pairs, the one that was used least.
                row[index] = max(
                    range(sizes[index]),
                    key=lambda value: (
                        sum(_pair(index, value, *item) in missing for item in row.items()),
                        -used[index][value],
                    ),
                )
        for place, chosen in row.items():
            used[place][chosen] += 1
        for left, right in combinations(sorted(row), 2):
            missing.pop((left, row[left], right, row[right]), None)
        rows.append(tuple(values[row[i]] for i, values in enumerate(parameters)))
    return rows


def dealt(names: Sequence[Any], values: Sequence[Any], start: int = 0) -> list[tuple[Any, Any]]:
    """Return each name with one of the values, in turn: every name and every value is tested."""
    return [(name, values[(start + i) % len(values)]) for i, name in enumerate(names)]


def _pair(first: int, one: int, second: int, other: int) -> tuple[int, int, int, int]:
    """Return two values as `missing` names them: the earlier parameter first."""
    return (first, one, second, other) if first < second else (second, other, first, one)
