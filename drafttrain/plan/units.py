"""Numbers with their units, to three figures: GiB of memory, GB of disk."""

from drafttrain.plan.accelerator import GIB


def gib(value: float | int) -> str:
    """Return bytes of memory as GiB (MiB below a tenth)."""
    if value < 0.1 * GIB:
        return f"{value / 2**20:,.0f} MiB"
    return f"{three(value / GIB)} GiB"


def disk(value: float | int) -> str:
    """Return bytes of disk, or of a token, in decimal units."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{three(value / size)} {unit}"
    return f"{value:.0f} bytes"


def count(value: float | int) -> str:
    """Return a number of tokens or weights as 70.6B, 1.24B, 842M or 4,096."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{three(value / size)}{unit}"
    return f"{value:,.0f}"


def hours(value: float | int) -> str:
    """Return hours as days, hours, minutes or seconds."""
    if value >= 72:
        return f"{three(value / 24)} days"
    if value >= 1:
        return f"{three(value)} h"
    if value >= 1 / 60:
        return f"{three(value * 60)} min"
    return f"{three(value * 3600)} s"


def seconds(value: float | int) -> str:
    """Return seconds as s, ms or us."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{three(value / size)} {unit}"
    return f"{three(value * 1e6)} us"


def three(value: float | int) -> str:
    """Return three figures, and no fraction from a hundred on."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
