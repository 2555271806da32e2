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


# Greedy chains, one seed (benchmarks/README.md). The other prompts are those of Spec-Bench.
LENGTHS = {
    "eagle": "1.78 and 1.38 from 0.2M tokens, 2.20 and 1.60 from 0.8M, 2.26 and 1.68 from 3.2M",
    "eagle3": "1.75 and 1.35 from 0.2M tokens, 2.14 and 1.53 from 0.8M",
    "eagle3_1": "1.97 and 1.43 from 0.2M tokens",
    "mtp": "1.84 and 1.36 from 0.2M tokens",
}


def expectation(drafter: str) -> str:
    """Return a line on the acceptance lengths of a family as measured, and on which target."""
    return (
        "acceptance lengths measured on prompts like the data, and on others: "
        f"{LENGTHS.get(drafter, f'none of drafter={drafter}')} (SmolLM2-135M-Instruct, width 576, "
        "depth 4; other targets were not measured)"
    )
