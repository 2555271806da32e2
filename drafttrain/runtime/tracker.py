"""The curves of a run: metrics.jsonl always, and W&B's or TensorBoard's; the only door to these."""

import importlib.util
import math
import netrc
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlparse

import numpy as np
import yaml

from drafttrain.runtime import limits
from drafttrain.runtime.disk import refuse_links, write_whole
from drafttrain.runtime.journal import append_records, read_records, replace_records
from drafttrain.runtime.lock import alone
from drafttrain.runtime.run_folder import METRICS_FILE
from drafttrain.runtime.settings import Settings
from drafttrain.runtime.terminal import console
from drafttrain.runtime.untrusted_input import MAX_COUNT, UntrustedError, shown

# Names of the metrics that reports and plans read back from it.
LOSS, TOKENS, SPEED = "train/loss", "train/tokens", "perf/tokens_per_s"
ACCEPTANCE_LENGTH = "val/acceptance_length"
EXPECTED_LENGTH = "val/expected_acceptance_length"
WANDB_ID_FILE = "wandb/run_id"
MODES = ("auto", "online", "offline")


@dataclass(frozen=True, kw_only=True)
class TrackerConfig(Settings):
    """Where curves go besides metrics.jsonl; subclasses are the choices."""

    section = "tracker"

    name: str


@dataclass(frozen=True, kw_only=True)
class JsonlTrackerConfig(TrackerConfig):
    """Curves go to metrics.jsonl only."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig(TrackerConfig):
    """Curves go to Weights & Biases as well, online or into the run folder for a later upload."""

    project: str
    entity: str | None
    mode: Annotated[str, limits.one_of(*MODES)]
    tags: list[str]
    group: str | None
    artifacts: bool


@dataclass(frozen=True, kw_only=True)
class TensorboardConfig(TrackerConfig):
    """Curves go to TensorBoard's files in the run folder as well."""


def require_tracker(choice: TrackerConfig, folder: Path) -> None:
    """Raise ValueError, before hours and not after them, for what would stop the records.

    That is a package that is not installed, or a metrics.jsonl in the folder that is not ours.
    """
    if (folder / METRICS_FILE).exists():
        read_metrics(folder / METRICS_FILE)
    wanted = isinstance(choice, TensorboardConfig)
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "tracker=tensorboard needs the package tensorboard, which is not installed: "
            "pip install 'drafttrain[tensorboard]', or leave it out with tracker=none"
        )


def destination(choice: TrackerConfig) -> list[str]:
    """Return a line on where W&B sends to, which the config.yaml of another's run may have set."""
    if not isinstance(choice, WandbConfig):
        return []
    whose = f"{shown(choice.entity or 'your default entity')}, project {shown(choice.project)}"
    return [f"tracker=wandb: curves and reports go to {whose}; tracker=none sends nothing"]


def open_tracker(
    choice: TrackerConfig,
    folder: Path,
    *,
    config: dict[str, Any],
    command: str = "train",
    resume_step: int | None = None,
    is_main: bool = True,
    append: bool = False,
) -> "Tracker":
    """Open the records of a run in its folder, on rank 0; the tracker of other ranks does nothing.

    config: the run's configuration, sections of plain data. command: what a new run of W&B is for.
    resume_step: the step of the checkpoint that the run resumes from, None for a new run; records
    of later steps are dropped. append: keep every row, as an evaluation does. ValueError if a
    package is missing; a mirror that fails is a warning, and the run continues.
    """
    if not is_main:
        return Tracker(None)
    require_tracker(choice, folder)
    folder.mkdir(parents=True, exist_ok=True)
    tracker = Tracker(folder / METRICS_FILE, resume_step, append, choice.name)
    with tracker.excused():
        if isinstance(choice, WandbConfig):
            resumed = append or resume_step is not None
            run = _start_wandb(choice, folder, config, resumed, command)
            tracker.mirror = WandbMirror(run, choice.artifacts)
        if isinstance(choice, TensorboardConfig):
            purge = None if append else 0 if resume_step is None else resume_step + 1
            tracker.mirror = TensorboardMirror(folder, config, purge)
    return tracker


class Tracker:
    """Writes rows to metrics.jsonl, each as soon as it comes, and mirrors them."""

    def __init__(
        self,
        path: Path | None,
        resume_step: int | None = None,
        append: bool = False,
        name: str = "none",
    ) -> None:
        self._path, self._name = path, name
        self.mirror: WandbMirror | TensorboardMirror | None = None
        self.listener: Callable[[int, Mapping[str, float]], None] | None = None  # to what is logged
        self._known: set[str] = set()  # what a resumed run has of its first step already
        self._resume_step = -1 if resume_step is None else resume_step
        self._step = max(self._resume_step, 0)
        if path is None or not path.exists():
            return
        if append:  # a torn last line is cut off before the next one is written
            self._step = max((row["step"] for row in read_metrics(path)), default=0)
            return
        with alone(path):
            rows = [row for row in read_metrics(path) if row["step"] <= self._resume_step]
            replace_records(path, rows)
        for row in rows:
            if row["step"] == self._resume_step:
                self._known |= {row["table"]} if "table" in row else row.keys()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step; one that is not finite becomes null."""
        self._step = step
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._append({"step": step, "time": round(time.time(), 3), **finite})
        again = self._known if step == self._resume_step else set()
        if new := {key: value for key, value in values.items() if key not in again}:
            self._mirrored("log", step, new)
        if self.listener is not None:
            self.listener(step, values)

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str | float | None]]
    ) -> None:
        """Record a table, such as an evaluation's, after the last logged step."""
        plain = [list(row) for row in rows]
        self._append({"step": self._step, "table": name, "columns": list(columns), "rows": plain})
        if self._step != self._resume_step or name not in self._known:
            self._mirrored("table", name, columns, plain, self._step)

    def keep(self, name: str, kind: str, files: Sequence[Path]) -> None:
        """Hand files of the run folder to the mirror; kind: report or drafter."""
        self._mirrored("keep", name, kind, files, self._step)

    def pictures(self, name: str, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Draw pictures and show them, by title, if there is a mirror.

        draw: returns bytes, "height width 3".
        """
        with self.excused():
            if self.mirror is not None:
                self.mirror.pictures(name, draw(), self._step)

    def finish(self) -> None:
        """Upload the rest and close the mirror, as a failed run while an error is being raised."""
        self._mirrored("finish", sys.exc_info()[0] is not None)
        self.mirror = None

    def _append(self, row: dict[str, Any]) -> None:
        if self._path is None:
            return
        with alone(self._path):  # a run evaluated during training has two writers
            if row["step"] == self._resume_step and self._path.exists():
                # A resumed run validates its first step again: the new row replaces the old.
                rows = read_metrics(self._path)
                others = [old for old in rows if _subject(old) != _subject(row)]
                replace_records(self._path, others)
            append_records(self._path, [row])

    def _mirrored(self, method: str, *values: Any) -> None:
        with self.excused():
            if self.mirror is not None:
                getattr(self.mirror, method)(*values)

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Turn an error of the mirror into one line, and go on without it."""
        try:
            yield
        except Exception as error:  # whatever it is, hours of training are worth more
            text = " ".join(str(error).split()).rstrip(".")
            console.print(f"tracker={self._name} stopped: {text}. metrics.jsonl is still written.")
            self.mirror = None


class WandbMirror:
    """A run of Weights & Biases."""

    def __init__(self, run: Any, artifacts: bool) -> None:
        self.run, self.artifacts = run, artifacts

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values; the online run that is resumed has those of earlier steps already."""
        if step >= self.run.step:
            self.run.log(dict(values), step=step)

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        import wandb

        plain = [[shown(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        self.run.log({shown(name): wandb.Table(columns=list(columns), data=plain)})

    def keep(self, name: str, kind: str, files: Sequence[Path], step: int) -> None:
        """Upload files as one artifact, and pages with their pictures for viewing as well."""
        import wandb

        for file in files:
            if file.suffix == ".html":
                page = wandb.Html(file.read_text(encoding="utf-8"), inject=False)
                self.run.log({shown(name): page})
        if not self.artifacts:
            return
        artifact = wandb.Artifact(re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:100], type=kind)
        for file in files:
            # Without a copy: that of a drafter would take as much disk again.
            artifact.add_file(str(file), policy="immutable", skip_cache=True)
        self.run.log_artifact(artifact)

    def pictures(self, name: str, pictures: Mapping[str, np.ndarray], step: int) -> None:
        import wandb

        images = {f"{name}/{title}": wandb.Image(pixels) for title, pixels in pictures.items()}
        self.run.log({shown(title): image for title, image in images.items()})

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=1 if failed else 0)


class TensorboardMirror:
    """Event files below a run's folder: `tensorboard --logdir outputs` shows every run."""

    def __init__(self, folder: Path, config: dict[str, Any], purge: int | None) -> None:
        """purge: the step from which on TensorBoard hides what an interrupted run wrote."""
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        is_new = purge == 0 or not place.exists()
        self.writer: Any = SummaryWriter(str(place), purge_step=purge)
        if is_new:
            text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
            self.writer.add_text("config", f"```yaml\n{text}```", 0)
        console.print(f"tensorboard: view with: tensorboard --logdir {place}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        self.writer.add_text(shown(name), text, step)

    def keep(self, name: str, kind: str, files: Sequence[Path], step: int) -> None:
        """Show the Markdown of a report; TensorBoard keeps no other files."""
        for file in files:
            if file.suffix == ".md":
                self.writer.add_text(shown(name), file.read_text(encoding="utf-8"), step)

    def pictures(self, name: str, pictures: Mapping[str, np.ndarray], step: int) -> None:
        for title, pixels in pictures.items():
            self.writer.add_image(shown(f"{name}/{title}"), pixels, step, dataformats="HWC")

    def finish(self, failed: bool) -> None:
        self.writer.close()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else shown(value).replace("|", "\\|").replace("<", "&lt;")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without a last line that a killed run left unfinished.

    UntrustedError for a row whose step or table is not what `Tracker` writes.
    """
    rows: list[dict[str, Any]] = list(read_records(path, dict))
    for number, row in enumerate(rows, 1):
        step, table = row.get("step"), row.get("table", "")
        if type(step) is not int or not 0 <= step <= MAX_COUNT or not isinstance(table, str):
            raise UntrustedError(
                f"{shown(path, 400)}:{number} must have a step, which counts from 0, and a table "
                f"only by name, got {shown(row)}; remove the line, or name another folder"
            )
    return rows


def _subject(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["step"], row.get("table"), *sorted(row))


def _start_wandb(
    choice: WandbConfig, folder: Path, config: dict[str, Any], resumed: bool, command: str
) -> Any:
    import wandb

    id_file = folder / WANDB_ID_FILE
    refuse_links(folder, WANDB_ID_FILE)  # what it named would be sent as the id
    known = resumed and id_file.exists()
    run_id = id_file.read_text().strip() if known else secrets.token_hex(4)
    # Tables wait for their upload here, not in the user's home.
    os.environ.setdefault("WANDB_DATA_DIR", str((folder / "wandb").resolve()))
    mode: Any = choice.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
    start = partial(
        wandb.init,
        project=choice.project,
        entity=choice.entity,
        name=config["run"]["name"],
        id=run_id,
        resume="allow" if known else None,
        config=config,
        tags=choice.tags,
        group=choice.group,
        job_type=None if known else command,
        dir=folder.resolve(),  # the client's process may be in another folder
        reinit="create_new",  # not the run of a mirror that failed before, in this process
        # wandb would capture the progress bars, and print what we print already.
        settings=wandb.Settings(silent=True, console="off", save_code=False, init_timeout=60),
    )
    try:
        run = start(mode=mode)
    except Exception as error:  # its own errors, the network's, the file system's
        if mode != "online":
            raise
        text = " ".join(str(error).split()).rstrip(".")
        console.print(f"tracker=wandb could not start online: {text}. It writes offline instead.")
        mode = "offline"
        wandb.teardown()  # its process keeps the id of a run that timed out
        run = start(mode=mode)
    id_file.parent.mkdir(exist_ok=True)
    write_whole(id_file, run_id + "\n")
    if mode == "offline":
        place = Path(run.settings.sync_dir)
        console.print(f"wandb: offline; upload later, if you like, with: wandb sync {place}")
    elif run.url:
        console.print(f"wandb: {run.url}")
    return run


def _logged_in() -> bool:
    """Whether this machine has credentials for Weights & Biases, without sending anything."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False
