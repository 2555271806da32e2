"""Numbers with their units, to three figures: GiB of memory, GB of disk."""

GIB = 2**30


def gib(value: float) -> str:
    """Return bytes of memory as GiB (MiB below a tenth)."""
    if value < 0.1 * GIB:
        return f"{value / 2**20:,.0f} MiB"
    return f"{three(value / GIB)} GiB"


def disk(value: float) -> str:
    """Return bytes of disk, or of a token, in decimal units."""
    units = {" TB": 1e12, " GB": 1e9, " MB": 1e6, " kB": 1e3}
    return _largest(value, units) or f"{value:.0f} bytes"


def count(value: float) -> str:
    """Return a number of tokens or weights as 70.6B, 1.24B, 842M or 4,096."""
    return _largest(value, {"T": 1e12, "B": 1e9, "M": 1e6}) or f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Return seconds as us, ms, s, min or h, and as days from three days on."""
    units = {" h": 3600, " min": 60, " s": 1, " ms": 1e-3, " us": 1e-6}
    days = f"{three(seconds / 86400)} days" if seconds >= 3 * 86400 else ""
    return days or _largest(seconds, units) or "0 s"


def money(dollars: float) -> str:
    """Return dollars, cents below a hundred."""
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:.2f}"


def three(value: float) -> str:
    """Return three figures, and no fraction from a hundred on."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _largest(value: float, units: dict[str, float]) -> str:
    fitting = [f"{three(value / size)}{unit}" for unit, size in units.items() if value >= size]
    return fitting[0] if fitting else ""
