"""What the last validation of a run says of drafting on the machine that trained it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from drafttrain.decode.costs import Costs
from drafttrain.runtime.run_folder import METRICS_FILE, PROVENANCE, hardware
from drafttrain.runtime.tracker import ACCEPTANCE_LENGTH, read_metrics
from drafttrain.runtime.untrusted_input import UntrustedError, read_object
from drafttrain.training.checkpoint import NAME
from drafttrain.training.validation import BREAK_EVEN

CONTEXT = 256  # tokens that a drafter is taken to read in the time of its deepest draft
MOST = 1e6  # of a number in a file that anyone may have written; no acceptance or cost comes near


@dataclass(frozen=True)
class Validated:
    """Acceptance and the time of drafts, greedy and one prompt at a time.

    reached: the share of drafts whose tokens up to each position were all accepted. break_even: the
    acceptance length from which drafts of so many tokens pay. machine: its hardware.
    """

    length: float
    reached: list[float]
    break_even: float
    machine: object

    @property
    def acceptance(self) -> list[float]:
        """How often each position was accepted, where the one before it was."""
        before = [1.0, *self.reached]
        return [min(a / b, 1.0) if b else 0.0 for a, b in zip(self.reached, before, strict=False)]

    @property
    def token_cost(self) -> float:
        """The time to draft and verify one token, as a share of a plain step."""
        return max(self.break_even - 1, 0.01) / len(self.reached)

    @property
    def pays(self) -> bool:
        """Whether drafts of some depth are faster than plain steps."""
        depths = range(1, len(self.reached) + 1)
        return any(sum(self.reached[:depth]) > self.token_cost * depth for depth in depths)

    @property
    def statement(self) -> str:
        """The measurement, in words."""
        return (
            f"drafts of {len(self.reached)} tokens pay from an acceptance length of "
            f"{self.break_even:.2f}, the last validation had {self.length:.2f}"
        )

    def on_this(self, device: torch.device) -> bool:
        """Return whether it was measured on this machine, and on such a device."""
        here = hardware()
        return self.machine == here and bool(here["gpus"]) == (device.type == "cuda")

    def costs(self, deepest: int) -> Costs:
        """Return the costs of passes, in plain steps; each drafted token adds the same."""
        cell, depths = (1, CONTEXT), range(1, deepest + 1)
        draft = {(depth, *cell): self.token_cost * depth for depth in depths}
        read = {cell: self.token_cost * len(self.reached)}
        return Costs([1], [CONTEXT], {cell: 1.0}, dict.fromkeys(draft, 1.0), draft, read)


def validated(run: Path, checkpoint: Path) -> Validated | None:
    """Return what a run last validated up to a checkpoint; None where passes were not timed."""
    match = NAME.fullmatch(checkpoint.name)
    try:
        rows = read_metrics(run / METRICS_FILE)
        machine = read_object(run / PROVENANCE).get("hardware")
    except (OSError, UntrustedError):
        return None
    for row in reversed(rows):
        numbers = {
            name: value
            for name, value in row.items()
            if isinstance(value, int | float) and 0 <= value <= MOST
        }
        reached = list[float]()
        while (position := f"val/acceptance_position_{len(reached) + 1}") in numbers:
            reached.append(numbers[position])
        timed = {BREAK_EVEN, ACCEPTANCE_LENGTH} <= numbers.keys()
        if match and reached and timed and row["step"] <= int(match[1]):
            return Validated(numbers[ACCEPTANCE_LENGTH], reached, numbers[BREAK_EVEN], machine)
    return None
