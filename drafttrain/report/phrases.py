"""How a report writes a number: one rounding for terminal, Markdown and HTML."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.report.results import Cell, Change, Estimate

Number = int | float
NOTHING = "\N{EN DASH}"


def number(value: Number | None, digits: int = 2) -> str:
    """Return the value with `digits` decimals, or a dash for None."""
    return NOTHING if value is None else f"{value:z,.{digits}f}"  # z: no minus before a zero


def count(value: Number | None) -> str:
    """Return a number of things."""
    return number(value, 0)


def speed(value: Number | None) -> str:
    """Return tokens per second with as many digits as are useful."""
    return number(value, 1 if value is not None and value < 100 else 0)


def percent(value: Number | None) -> str:
    """Return a share as a percentage."""
    return NOTHING if value is None else f"{100 * value:.0f} %"


def money(value: Number | None) -> str:
    """Return an amount with two decimals, or three if it is below one."""
    return number(value, 3 if value is not None and abs(value) < 1 else 2)


def memory(num_bytes: Number) -> str:
    """Return bytes in MiB, or in GiB from 1 GiB on."""
    large = num_bytes >= 2**30
    return f"{number(num_bytes / (2**30 if large else 2**20), 1)} {'GiB' if large else 'MiB'}"


def size(value: Number | None) -> str:
    """Return a large count in few characters: `12.4M`."""
    for least, unit, name in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value is not None and value >= least:
            return f"{number(value / unit, 1)}{name}"
    return count(value)


def bounds(ci95: Sequence[Number] | None, digits: int = 2) -> str:
    """Return an interval in words, or why there is none."""
    if ci95 is None:
        return "too few prompts for an interval"
    return f"95 % interval {number(ci95[0], digits)} to {number(ci95[1], digits)}"


def signed(value: Number | None, digits: int = 2) -> str:
    """Return a difference with its sign, or a dash for None."""
    plus = "+" if value is not None and round(value, digits) > 0 else ""
    return f"{plus}{number(value, digits)}"


def value_and_range(measured: Estimate) -> list[str]:
    """Return the value and, if there is one, its interval in brackets."""
    write = signed if isinstance(measured, Change) else number
    if measured.value is None:
        return [NOTHING]
    if measured.ci95 is None:
        return [write(measured.value), "[too few]"]
    return [write(measured.value), f"[{write(measured.ci95[0])}, {write(measured.ci95[1])}]"]


def positions(values: Sequence[Number | None]) -> str:
    """Return rates by position, without leading zeros, to fit a narrow column."""
    return " ".join(number(value).removeprefix("0") for value in values) or NOTHING


def cell(value: Cell) -> str:
    """Return the text of a cell: `1.52 [1.44, 1.60]`, or `1.52 [too few]` (prompts)."""
    if isinstance(value, Estimate):
        return " ".join(value_and_range(value))
    return value if isinstance(value, str) else positions(value)


def things(num: int, name: str) -> str:
    """Return a number with its noun: `1 prompt`, `2 prompts`."""
    return f"{num} {name}{'s' * (num != 1)}"


def drawn(temperature: float) -> str:
    """Return how tokens are drawn: `greedy`, `temperature 0.7`."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def rule_statement(rule: str, lossless: bool) -> str:
    """Return whether a rule is lossless, and its name, whose own word for that is left out."""
    name = re.sub(r" \((NOT )?lossless\)|; NOT lossless(?=\))", "", rule)
    return f"lossless by {name}" if lossless else f"NOT lossless: {name}"


def sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested mappings as (dotted key, text)."""
    leaves: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves += flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            leaves.append((name, ", ".join(map(str, value)) or NOTHING))
        else:
            leaves.append((name, NOTHING if value is None or value == {} else str(value)))
    return leaves
