"""The error for a setting that is refused."""


def require(holds: bool, key: str, need: str, got: object, remedy: str = "") -> None:
    """Raise ValueError unless a condition on a setting holds. need: such as "be at least 1"."""
    if not holds:
        raise ValueError(f"{key} must {need}, got {got}{remedy}")
