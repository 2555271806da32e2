"""Curves, tables and reports in TensorBoard's files; the only door to it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttrain.runtime.terminal import console
from drafttrain.runtime.untrusted_input import shown

FOLDER = "tensorboard"


class TensorboardMirror:
    """Writes event files below a run's folder: `tensorboard --logdir outputs` shows every run."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "tracker=tensorboard needs the package tensorboard, which is not installed: "
                "pip install 'drafttrain[tensorboard]', or leave it out with tracker=none"
            ) from error
        place = folder / FOLDER
        # What an interrupted run wrote of later steps is hidden: those steps are taken again.
        purge = None if resume_step is None else resume_step + 1
        self.writer: Any = SummaryWriter(str(place), purge_step=purge)
        console.print(f"tensorboard: look with: tensorboard --logdir {place}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table as text."""
        lines = [columns, ["---"] * len(columns), *rows]
        cells = [[_cell(cell) for cell in line] for line in lines]
        text = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        self.writer.add_text(shown(name), text, step)

    def keep(self, name: str, kind: str, files: Sequence[Path], step: int) -> None:
        """Show the Markdown of a report; TensorBoard keeps no other files."""
        for file in files:
            if file.suffix == ".md":
                self.writer.add_text(shown(name), file.read_text(encoding="utf-8"), step)

    def finish(self, failed: bool) -> None:
        """Write what is left."""
        self.writer.close()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else shown(value).replace("|", "\\|").replace("<", "&lt;")
