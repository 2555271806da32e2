"""The words in which a setting is refused."""


def require(holds: bool, key: str, need: str, got: object, remedy: str = "") -> None:
    """Raise ValueError unless a setting holds what it needs: "be at least 1"."""
    if not holds:
        raise ValueError(f"{key} must {need}, got {got}{remedy}")
