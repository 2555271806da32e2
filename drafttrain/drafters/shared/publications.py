"""What is published of a family: its paper, and the numbers that others measured."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """The data of a family for model cards."""

    kind: str  # with its article: "An EAGLE-3"
    paper: str  # its number on arXiv


@dataclass(frozen=True)
class Published:
    """A measurement of a family that others published, as far as it is stated."""

    target: str
    drafts: str  # chain or tree, and how large
    trained_on: str
    prompts: str  # and how they were decoded
    hardware: str
    speedup: float | None  # as it was printed; None: not stated
    acceptance_length: float | None  # each source has its own definition
    source: str  # such as its number on arXiv


def quoted(
    source: str,
    drafts: str,
    rows: Mapping[str, tuple[float | None, float | None]],
    trained_on: str = "not stated",
    prompts: str = "not stated",
    hardware: str = "not stated",
) -> tuple[Published, ...]:
    """Return the measurements of one source; rows: speedup and acceptance length, by target."""
    return tuple(
        Published(target, drafts, trained_on, prompts, hardware, speedup, length, source)
        for target, (speedup, length) in rows.items()
    )


def spec_bench(
    rows: Mapping[str, tuple[float | None, float | None]],
    drafts: str = "tree",
    trained_on: str = "not stated",
) -> tuple[Published, ...]:
    """Return the measurements of Spec-Bench's leaderboard, as `quoted` does."""
    prompts = "Spec-Bench, greedy, batch 1"
    return quoted("Spec-Bench leaderboard", drafts, rows, trained_on, prompts, "A100")
