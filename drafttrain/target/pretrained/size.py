"""Model sizes as text: 500M, 8B."""

import re

MOST_PARAMETERS = 1e15  # 1000T
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_size(text: str) -> int:
    """Return the number of parameters that text like 500M or 8B means; ValueError otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", text.strip().upper())
    size = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 1 <= size <= MOST_PARAMETERS:
        raise ValueError(
            f"model.inflate must be a number of parameters with its unit (K, M, B or T) such as"
            f" 500M, 0.5B or 8B, or null for none, got {text!r}"
        )
    return round(size)


def parameters(number: int) -> str:
    """Return a number of parameters as messages show it: 8.03B, 160M, 24,096."""
    for unit in ("T", "B", "M"):
        if number >= UNITS[unit]:
            return f"{number / UNITS[unit]:.3g}{unit} parameters"
    return f"{number:,} parameters"
