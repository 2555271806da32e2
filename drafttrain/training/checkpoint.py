"""Checkpoints: folders that appear whole or not at all, and are verified when read."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.runtime.disk import (
    DiskError,
    LinkError,
    MachineError,
    digest_of,
    flush,
    put_folder,
    reason,
    refuse_links,
    remove,
    rename,
    sha256_of,
    write_whole,
)
from drafttrain.runtime.terminal import working
from drafttrain.runtime.untrusted_input import (
    MAX_JSON_BYTES,
    Count,
    FileName,
    Sha256,
    UntrustedError,
    header_of,
    parse_json,
    read_bytes,
    read_object,
    typed,
)
from drafttrain.training.engine.engine import Engine

WEIGHTS_FILE = "drafter.safetensors"
STATE_FILE = "state.json"
INDEX_FILE = "index.json"
# step-000123, or step-000123-2 if a resumed run reached the same step again.
NAME = re.compile(r"step-([0-9]{1,18})(?:-([0-9]{1,9}))?")
SKIP = "run.resume=true run.skip_damaged=true"
LEFTOVER = ".leftover-"  # prefix of a folder that is not yet, or no longer, a checkpoint


class CheckpointError(ValueError):
    """A checkpoint could not be written, is damaged, or belongs to another run."""


class UnsavedError(CheckpointError, MachineError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class TrainState:
    """The state of a run besides weights and optimizer; everything in it is plain JSON."""

    step: Count  # finished optimizer steps
    tokens: Count  # trained on so far, over all ranks
    data: dict[str, Any]  # position in the data, from Batches.state_dict()
    best_metric: float | None  # of the best checkpoint; None before the first validation
    fingerprint: str  # of the target that the drafter belongs to
    extra: dict[str, Any]  # other state of the training loop


@dataclass(frozen=True)
class _File:
    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class _Record:
    """The content of state.json: names of files, never paths."""

    state: TrainState
    files: dict[FileName, _File]


class Checkpoints:
    """The checkpoints of a run: folders step-000123; the newest and the best are kept.

    `index.json` names the latest and the best one. All ranks call `save` and `resume` together, on
    one file system; rank 0 writes.
    """

    def __init__(self, folder: Path, keep: int, skip_damaged: bool = False) -> None:
        self.folder, self.keep, self.skip_damaged = folder, keep, skip_damaged
        self.skipped: list[str] = []  # damaged checkpoints that were skipped, on rank 0
        self._whole: Path | None = None  # verified by this process, which need not do it again

    def latest(self) -> Path | None:
        """Return the checkpoint to resume from, None if there is none."""
        names = self._names()
        named = self._index().get("latest")
        return self.folder / (named if named in names else names[-1]) if names else None

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, None if none is marked best."""
        named = self._index().get("best")
        return self.folder / named if named in self._names() else None

    def resumed_best(self, engine: Engine) -> bool:
        """Return whether the checkpoint resumed from is the best one, the same on every rank."""
        found = engine.is_main and self._whole is not None and self._whole == self.best()
        return bool(engine.ranks.broadcast_object(found))

    def load_chosen(self) -> tuple[Path, TrainState, dict[str, Tensor]] | None:
        """Return the best checkpoint, or the latest if none is marked best; None if there is none.

        With its state and weights, verified: a run that continues meanwhile may delete it.
        """
        refuse_links(self.folder.parent, self.folder.name)
        while True:
            index = self._index()
            folder = self.best() or self.latest()
            if self._index() != index:
                continue  # the former best is deleted, and the new one was not in the index yet
            if folder is None:
                return None
            try:
                return folder, load_state(folder), load_weights(folder)
            except (CheckpointError, OSError):
                if folder.is_dir():
                    raise

    def save(self, engine: Engine, state: TrainState, best: bool) -> None:
        """Write a checkpoint, mark it the best if `best`, then delete those that need not be kept.

        Raises UnsavedError on all ranks if it cannot be written; earlier ones are then intact.
        """
        resumed, self._whole = self._whole, None
        unfinished = self.folder / f"{LEFTOVER}unfinished"
        if resumed is not None and _step_and_visit(resumed.name)[0] == state.step:
            # No step was taken since: what is recorded about the weights is new, they are not.
            with self._fate_shared(engine, unfinished):
                if engine.is_main:
                    _write_state(resumed, state)
                    old = self._index().get("best")
                    self._write_index(resumed.name, resumed.name if best else old)
            return
        with self._fate_shared(engine, unfinished):
            if engine.is_main:
                if not self.folder.is_dir():
                    self.folder.mkdir(parents=True)
                    flush(self.folder.parent)
                for leftover in self.folder.glob(f"{LEFTOVER}*"):
                    remove(leftover, self.folder.parent)
                unfinished.mkdir()
        with self._fate_shared(engine, unfinished):
            engine.save(unfinished)
            weights = engine.weights()  # by all ranks together
            if engine.is_main:
                save_file(weights, unfinished / WEIGHTS_FILE)
                _write_state(unfinished, state)
                visits = [v for s, v in map(_step_and_visit, self._names()) if s == state.step]
                name = f"step-{state.step:06d}" + (f"-{max(visits) + 1}" if visits else "")
                put_folder(unfinished, self.folder / name, self.folder.parent)
                old = self._index().get("best")
                # If the best step is reached again, its new checkpoint replaces the old one.
                again = old is not None and _step_and_visit(old)[0] == state.step
                self._write_index(name, name if best or again else old)
                self._prune(name)

    def to_resume(self, engine: Engine) -> Path | None:
        """Return the checkpoint to resume from, verified, the same on every rank; None if none.

        Raises CheckpointError on all ranks if it is damaged. With skip_damaged the newest whole one
        is used instead, and `skipped` lists the others.
        """
        with self._fate_shared(engine, None):
            if engine.is_main and self._whole is None:
                with working("reading checkpoints"):
                    self._whole = self._newest_whole()
        whole = engine.ranks.broadcast_object(self._whole and str(self._whole))
        self._whole = Path(whole) if whole else None
        return self._whole

    def _newest_whole(self) -> Path | None:
        refuse_links(self.folder.parent, self.folder.name)
        names = self._names()
        if not names:
            return None
        lost, here = True, _step_and_visit(names[-1])  # unless the index can be read
        with self._passing_over():
            latest = self.latest()
            assert latest is not None
            lost, here = False, _step_and_visit(latest.name)
        for name in reversed([name for name in names if _step_and_visit(name) <= here]):
            with self._passing_over():
                verify(self.folder / name)
                if lost:
                    self._write_index(name, None)
                return self.folder / name
        raise CheckpointError(
            f"{self.folder} must hold a whole checkpoint, but every one is damaged: "
            f"{self.skipped[-1]}; or start another run by run.name=ANOTHER_NAME"
        )

    @contextmanager
    def _passing_over(self) -> Iterator[None]:
        """Record damage that the block finds, if damaged checkpoints are to be skipped."""
        try:
            yield
        except CheckpointError as error:
            if not self.skip_damaged:
                raise
            self.skipped.append(str(error))

    def resume(self, engine: Engine) -> TrainState | None:
        """Load the latest checkpoint into the engine and return its state, None if there is none.

        Raises CheckpointError if it is damaged or of another drafter.
        """
        folder = self.to_resume(engine)
        if folder is None:
            return None
        path = folder / WEIGHTS_FILE
        try:
            engine.load_weights(_tensors(path))
        except ValueError as error:
            raise CheckpointError(
                f"{path} must fit the drafter, got: {error}; "
                "resume with the drafter settings that the run was started with"
            ) from error
        engine.load(folder)
        state = load_state(folder)
        if not engine.ranks.broadcast_object(engine.is_main and self.best() is not None):
            # Killed before the index named it, or lost since: the next validated one is best.
            state = replace(state, best_metric=None)
        return state

    def _names(self) -> list[str]:
        """Return the names of the checkpoints, oldest first: whole ones, unless damaged since."""
        names = [path.name for path in self.folder.glob("step-*")]
        return sorted(filter(_is_name, names), key=_step_and_visit)

    def _index(self) -> dict[str, Any]:
        path = self.folder / INDEX_FILE
        way_out = f"{SKIP} resumes from the newest checkpoint, with none called the best yet"
        if not path.exists():
            if len(self._names()) > 1:  # the first one exists before its index, for a moment
                raise CheckpointError(f"{path} must exist, but is missing; {way_out}")
            return {}
        with suppress(UntrustedError):
            index = read_object(path)
            whole = index.pop("sha256", None) == digest_of(index)
            named = [name for name in index.values() if name is not None]
            if whole and set(index) == {"latest", "best"} and all(map(_is_name, named)):
                return index
        raise CheckpointError(
            f"{path} must be as this program wrote it, but it is damaged or changed; {way_out}"
        )

    def _write_index(self, latest: str, best: str | None) -> None:
        index = {"latest": latest, "best": best}
        index["sha256"] = digest_of(index)
        write_whole(self.folder / INDEX_FILE, json.dumps(index, indent=1) + "\n")

    def _prune(self, newest: str) -> None:
        here = _step_and_visit(newest)
        past = [name for name in self._names() if _step_and_visit(name) <= here]
        visits = {_step_and_visit(name)[0]: name for name in past}  # the last one of each step
        kept = {*list(visits.values())[-self.keep :], self._index().get("best")}
        for name in set(past) - kept:
            leftover = self.folder / f"{LEFTOVER}{name}"
            # Renaming is atomic; deleting takes longer.
            rename(self.folder / name, leftover, self.folder.parent)
            with suppress(OSError):  # the next save tries again
                remove(leftover, self.folder.parent)

    @contextmanager
    def _fate_shared(self, engine: Engine, unfinished: Path | None) -> Iterator[None]:
        """Raise an error of rank 0 on every rank, as the others would wait for it."""
        problem = None
        try:
            yield
        except (OSError, SafetensorError, CheckpointError, DiskError, LinkError) as error:
            problem = str(error)
            if unfinished is not None and engine.is_main:
                with suppress(OSError):
                    remove(unfinished, self.folder.parent)
                problem = self._explain(error)
        problem = engine.ranks.broadcast_object(problem)
        if problem is not None:
            raise CheckpointError(problem) if unfinished is None else UnsavedError(problem)

    def _explain(self, error: Exception) -> str:
        try:
            latest = self.latest()
            intact = f"{latest.name} is intact" if latest else "there is none from before"
        except CheckpointError as damage:
            intact = str(damage)
        return (
            f"no checkpoint could be written to {self.folder}: {reason(error, self.folder)}; then "
            f"resume with run.resume=true ({intact})"
        )


def verify(folder: Path, only: str | None = None) -> None:
    """Check the files of a checkpoint (or `only` one of them) against their recorded checksums.

    Raises CheckpointError that names the first file that is missing or not as it was written.
    """
    for name, recorded in _read_state(folder).files.items():
        path = folder / name
        if only not in (None, name):
            continue
        if not path.is_file():
            wrong = "exist, but is missing"
        elif (size := path.stat().st_size) != recorded.bytes:
            wrong = f"have the {recorded.bytes} bytes that were written, got {size}: it was cut off"
            wrong += " or changed"
        elif (found := sha256_of(path)) != recorded.sha256:
            wrong = f"match its recorded checksum {recorded.sha256[:12]}..., got {found[:12]}...:"
            wrong += " it is damaged or changed"
        else:
            continue
        raise CheckpointError(f"{path} must {wrong}; {_way_round(folder)}")


def _way_round(folder: Path) -> str:
    return f"{SKIP} resumes from the newest whole checkpoint, as removing {folder} would"


def load_state(folder: Path) -> TrainState:
    return _read_state(folder).state


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return the drafter's weights from a checkpoint, verified, on the CPU, as saved."""
    verify(folder, only=WEIGHTS_FILE)
    return _tensors(folder / WEIGHTS_FILE)


def _tensors(path: Path) -> dict[str, Tensor]:
    header_of(path)  # it states the file's size: a torn file is reported before it is loaded
    return load_file(path)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def _step_and_visit(name: str) -> tuple[int, int]:
    match = NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2] or 1)


def _write_state(folder: Path, state: TrainState) -> None:
    """Write the last file of a checkpoint, which records the others."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.name != STATE_FILE and not path.name.startswith(".")  # what a kill left
    }
    content: dict[str, Any] = {"state": asdict(state), "files": files}
    content["sha256"] = digest_of(content)
    write_whole(folder / STATE_FILE, json.dumps(content, indent=1) + "\n")


def _read_state(folder: Path) -> _Record:
    path = folder / STATE_FILE
    try:
        text = read_bytes(path, MAX_JSON_BYTES)
        content = parse_json(text, "it")
        record = typed(_Record, text, "it")
        if content.pop("sha256", None) == digest_of(content) and WEIGHTS_FILE in record.files:
            return record
        problem = "it is damaged or changed"
    except FileNotFoundError:
        problem = "it is missing"
    except UntrustedError as error:
        problem = f"it is cut off or changed ({error})"
    raise CheckpointError(
        f"{path} must be the record that a checkpoint was saved with, but {problem}; "
        f"{_way_round(folder)}"
    )
