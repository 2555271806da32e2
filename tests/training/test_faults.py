"""What goes wrong around a training run: it is said in one plain line, and nothing is lost."""

import asyncio
import contextlib
import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import compare, curve, settings, write_conversations
from safetensors import SafetensorError
from safetensors.torch import save_file
from test_write import drafter_of
from test_write import export as export_drafter

import drafttrain.commands.train as command
import drafttrain.training.loop
import drafttrain.training.validation
from drafttrain.__main__ import main
from drafttrain.commands.setup import training as material
from drafttrain.commands.setup.target_and_drafter import best_of
from drafttrain.data.conversations import JsonlConfig, read
from drafttrain.data.files import file_records
from drafttrain.report.write import write_texts
from drafttrain.runtime.disk import FULL, DiskError, append_text, write_whole, writing, written
from drafttrain.runtime.ranks import LostRankError
from drafttrain.runtime.run_folder import append_log
from drafttrain.runtime.signals import ECHO_S, Stopped, StopRequest, answered
from drafttrain.runtime.tracker import JsonlTrackerConfig, open_tracker, read_metrics
from drafttrain.training.checkpoint import (
    Checkpoints,
    _write_state,
    load_state,
    load_weights,
    verify,
)

SHORT = ("trainer.max_steps=9", "trainer.validate_every=4")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations and a run of nine steps that was left alone."""
    folder = tmp_path_factory.mktemp("faults")
    write_conversations(folder / "data.jsonl")
    assert main(settings(folder / "alone", folder / "data.jsonl", *SHORT)) == 0
    return folder


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Take the room that is left, but for so many bytes."""
    ballast = folder / "ballast"
    disk = os.statvfs(folder)
    ballast.write_bytes(b"x" * max(0, disk.f_bavail * disk.f_frsize - leave))
    return ballast


def at_call(number: int, real: Callable[..., Any], do: Callable[[], None]) -> Callable[..., Any]:
    """The same function, but `do` happens before its call of that number, from 1."""
    calls = iter(range(1, 1_000_000))

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            do()
        return real(*arguments, **named)

    return wrapped


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("SIGTERM", 143, "stopped by SIGTERM"),
        ("SIGUSR1", 143, "stopped by SIGUSR1"),
        ("SIGINT", 130, "interrupted"),
        ("SIGHUP", 143, "stopped by SIGHUP"),
    ],
)
def test_who_asks_to_stop_gets_a_checkpoint_of_the_step_reached(
    name: str,
    code: int,
    told: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    arguments = settings(run, place / "data.jsonl", *SHORT)
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stepped = at_call(5, drafttrain.training.loop.optimizer_step, send(getattr(signal, name)))
        patch.setattr(drafttrain.training.loop, "optimizer_step", stepped)
        assert main(arguments) == code
    assert signal.getsignal(signal.SIGTERM) == handler
    said = capsys.readouterr().err
    assert said == f"{told} after step 5 of 9, which is saved; resume with run.resume=true\n"
    latest = Checkpoints(run / "checkpoints", 2).latest()
    assert latest is not None
    assert load_state(latest).step == 5
    assert load_state(latest).extra["meter"]["loss_tokens"] > 0  # of the step since the last line
    if name in ("SIGTERM", "SIGINT"):  # the others are answered as the first
        assert main(arguments) == 0
        compare(place / "alone", run)


def test_a_validation_is_given_up_for_a_scheduler_and_made_up_for(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    arguments = settings(run, place / "data.jsonl", *SHORT)
    with monkeypatch.context() as patch:
        decode = at_call(1, drafttrain.training.validation.speculative_passes, send(signal.SIGTERM))
        patch.setattr(drafttrain.training.validation, "speculative_passes", decode)
        assert main(arguments) == 143
    latest = Checkpoints(run / "checkpoints", 2).latest()
    assert latest is not None
    assert load_state(latest).step == 4
    assert not any("val/acceptance_length" in row for row in curve(run))
    assert main(arguments) == 0
    compare(place / "alone", run)


def test_before_the_first_step_a_scheduler_is_obeyed_at_once(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        material, "read_samples", at_call(1, material.read_samples, send(signal.SIGTERM))
    )
    assert main(settings(tmp_path / "run", place / "data.jsonl")) == 143
    assert "stopped by SIGTERM outside the steps of training" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_rank_that_was_asked_to_stop_is_not_lost_to_one_that_stopped_before_its_steps(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are asked at once: one outside its steps leaves, and another waits in vain within."""

    def wait_in_vain() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise LostRankError("rank 0 lost another of the 2 ranks")

    decode = at_call(1, drafttrain.training.validation.speculative_passes, wait_in_vain)
    monkeypatch.setattr(drafttrain.training.validation, "speculative_passes", decode)
    assert main(settings(tmp_path / "run", place / "data.jsonl", *SHORT)) == 143
    assert "stopped by SIGTERM outside the steps of training" in capsys.readouterr().err


def test_a_second_sigterm_ends_at_once_but_its_echo_does_not() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        stop = StopRequest()
        with stop.listening(), stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # passed on by another on the way
            os.kill(os.getpid(), signal.SIGUSR1)
            os.write(writer, str(stop.name).encode())
            stop._first[signal.SIGTERM] -= ECHO_S
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(2)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "SIGTERM"  # it outlived the echo


@pytest.mark.parametrize("rank", [None, "0"], ids=["alone", "under a launcher"])
def test_a_second_ctrl_c_ends_at_once(rank: str | None) -> None:
    """A launcher may pass on what the terminal gave to all already: to its ranks, an echo."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        if rank is not None:
            os.environ["RANK"] = rank
        stop = StopRequest()
        with stop.listening(), stop.deferred(meanwhile="this is saved first"):
            os.kill(os.getpid(), signal.SIGINT)
            os.write(writer, str(stop.name).encode())
            os.kill(os.getpid(), signal.SIGINT)
            os.write(writer, b" lived")
            stop._first[signal.SIGINT] -= ECHO_S
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(2)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    assert said.startswith("\ninterrupted: this is saved first; Ctrl-C again ends at once\n")
    assert said.endswith("SIGINT" if rank is None else "SIGINT lived")


def test_a_request_is_remembered_while_deferred_and_raised_else() -> None:
    with StopRequest().listening() as stop:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.asked
        os.kill(os.getpid(), signal.SIGUSR1)  # known
    with StopRequest().listening() as stop, pytest.raises(Stopped, match="stopped by SIGTERM out"):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_while_ranks_meet_a_request_ends_the_process_at_once(number: signal.Signals) -> None:
    """They wait for each other in C++, where no handler runs: one whose peer is gone would hang."""
    child = os.fork()
    if child == 0:
        with StopRequest().listening() as stop, stop.at_once():
            os.kill(os.getpid(), number)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    with StopRequest().listening() as stop:
        with stop.at_once():
            pass
        with pytest.raises(Stopped):
            os.kill(os.getpid(), number)


def test_a_request_that_c_code_takes_for_its_own_failure_stays_a_request() -> None:
    class Items:
        """As torch reads a storage: asked for an item by C code, which is when the signal comes."""

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return 1

    caught = pytest.raises(Stopped, match="stopped by SIGTERM out")
    with caught as stopped, StopRequest().listening():
        torch.tensor(Items())
    assert "could not determine the shape" in str(stopped.value.__cause__)

    def fails_later(stop: StopRequest) -> None:
        with stop.listening(), stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("another failure")

    with pytest.raises(ValueError, match="another failure"):  # what is only remembered hides none
        fails_later(StopRequest())


def test_a_request_that_tasks_raise_in_a_group_stays_a_request() -> None:
    async def asked() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def connect() -> None:  # as httpx does
        async with asyncio.TaskGroup() as group:
            group.create_task(asked())

    with pytest.raises(Stopped, match="stopped by SIGTERM out"), StopRequest().listening():
        asyncio.run(connect())


def test_a_loss_that_is_not_finite_names_its_step_and_conversations(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    groups: list[tuple[int, ...]] = []
    real = drafttrain.training.loop.optimizer_step

    def noted(engine: Any, target: Any, group: Any, *rest: Any) -> float:
        groups.append(group.documents)
        return real(engine, target, group, *rest)

    monkeypatch.setattr(drafttrain.training.loop, "optimizer_step", noted)
    wild = ("trainer.lr=1.0e+30", "trainer.warmup_steps=0", "trainer.save_every=1")
    assert main(settings(run, place / "data.jsonl", *SHORT, *wild)) == 2
    said = capsys.readouterr().err
    step = len(groups) - 1
    assert step >= 1
    assert said.startswith(f"error: optimizer step {step} must have a finite loss and gradient")
    assert said.endswith(
        "Its conversations, counted from 0 among the usable ones of data: "
        f"{', '.join(map(str, groups[-1]))}\n"
    )
    assert len(set(groups[-1])) == len(groups[-1]) > 1
    assert set(groups[-1]) <= set(range(30))
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert (last["step"], last["train/loss"]) == (step + 1, None)
    latest = Checkpoints(run / "checkpoints", 2).latest()
    assert latest is not None
    verify(latest)
    assert load_state(latest).step == step
    assert all(bool(value.isfinite().all()) for value in load_weights(latest).values())


def test_a_disk_that_is_full_while_saving_costs_nothing_that_was_saved(
    full_disk: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    run = full_disk / "run"
    arguments = settings(run, place / "data.jsonl", *SHORT)
    with monkeypatch.context() as patch:
        # The checkpoint of step 3 is there; that of step 4, the best, finds some room, not enough.
        stepped = at_call(
            4, drafttrain.training.loop.optimizer_step, lambda: fill(full_disk, 100_000)
        )
        patch.setattr(drafttrain.training.loop, "optimizer_step", stepped)
        assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: no checkpoint could be written to {run}/checkpoints: the disk ")
    assert "the disk is full (0.00 GB free): make room there; then resume with run.resume" in said
    assert "(step-000003 is intact)" in said
    assert [path.name for path in (run / "checkpoints").glob("*step*")] == ["step-000003"]
    verify(run / "checkpoints/step-000003")
    (full_disk / "ballast").unlink()
    assert main(arguments) == 0
    compare(place / "alone", run)


def test_a_disk_that_is_full_while_metrics_are_written_leaves_whole_lines(full_disk: Path) -> None:
    def opened(resume_step: int | None) -> Any:
        choice = JsonlTrackerConfig(name="none")
        return open_tracker(choice, full_disk, config={}, resume_step=resume_step, is_main=True)

    tracker = opened(None)
    tracker.log(0, {"a": 1.0})
    ballast = fill(full_disk)
    said = r"metrics\.jsonl could not be written: the disk is full \(0\.00 GB free\): make room"
    with pytest.raises(DiskError, match=said):  # the page that is begun has room
        all(tracker.log(step, {"a": 1.0, "b": 2.0, "c": 3.0}) is None for step in range(1, 200))
    rows = read_metrics(full_disk / "metrics.jsonl")
    assert (full_disk / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    with pytest.raises(DiskError, match=said):
        opened(3)
    assert read_metrics(full_disk / "metrics.jsonl") == rows  # not rewritten, not lost
    ballast.unlink()
    opened(3).log(4, {"a": 5.0})
    assert [row["step"] for row in read_metrics(full_disk / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_full_disk_is_said_of_the_log_and_the_report(full_disk: Path) -> None:
    append_log(full_disk, ["begun"])
    write_texts({"report.md": "old\n"}, full_disk)
    fill(full_disk)
    with pytest.raises(DiskError, match=r"train\.log could not be written: the disk is full"):
        append_log(full_disk, ["x" * 100] * 100)
    assert (full_disk / "train.log").read_text() == "begun\n"
    with pytest.raises(DiskError, match=r"report\.md could not be written: the disk is full"):
        write_texts({"report.md": "new\n" * 5000}, full_disk)
    assert (full_disk / "report.md").read_text() == "old\n"
    assert {p.name for p in full_disk.iterdir()} == {"train.log", "report.md", "ballast"}


def test_a_full_disk_in_an_export_names_the_folder_that_was_asked_for(full_disk: Path) -> None:
    """The draft beside it was named, which is gone by then."""
    fill(full_disk)
    wanted = full_disk / "out"
    said = rf"export\.dir={wanted} could not be written: the disk is full \(0\.00 GB free\)"
    with pytest.raises(DiskError, match=said), written(wanted, "export.dir"):
        export_drafter(drafter_of("medusa"), wanted)


def test_a_full_disk_met_by_a_library_is_one_plain_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def write(*_: object) -> None:
        with Path("/dev/full").open("w") as file:
            file.write("x")

    monkeypatch.setattr(command, "write_config", write)
    assert main(settings(tmp_path / "run", place / "data.jsonl")) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'run'}: the disk is full (")
    assert not list(tmp_path.glob("run/error*.log"))  # a traceback would say nothing more


def test_a_torn_last_line_is_cut_off_before_the_next_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    append_text(file, "one\n")
    file.write_bytes(b"one\ntw")
    append_text(file, "three\n")
    assert file.read_text() == "one\nthree\n"
    file.write_bytes(b"tw")
    append_text(file, "three\n")
    assert file.read_text() == "three\n"
    write_whole(file, "four\n")
    assert file.read_text() == "four\n"
    assert list(tmp_path.iterdir()) == [file]


def test_an_evaluation_after_a_kill_does_not_write_onto_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a')
    choice = JsonlTrackerConfig(name="none")
    tracker = open_tracker(choice, tmp_path, config={}, resume_step=None, is_main=True, append=True)
    tracker.table("evaluation", ["a"], [[1.0]])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 1]


def jsonl(path: Path) -> JsonlConfig:
    return JsonlConfig(
        name="jsonl",
        path=str(path),
        limit=None,
        max_length=99,
        holdout=0,
        template="chat",
        template_kwargs={},
        template_date="2024-07-26",
        roles={},
        preview=0,
        train_on="answers",
        seed=0,
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become nobody")
def test_data_that_may_not_be_read_is_said_plainly(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_conversations(folder / "mine.jsonl", 2)
    (folder / "mine.jsonl").chmod(0o600)
    parents = [*tmp_path.parents][:3]
    modes = {path: path.stat().st_mode for path in [tmp_path, *parents]}
    said = r"data\.path must name files that can be read, got \S+: Permission denied; see that"
    try:
        for path in modes:
            path.chmod(0o755)
        os.seteuid(65534)
        for path in (folder / "mine.jsonl", folder):
            with pytest.raises(ValueError, match=said):
                read(jsonl(path))
        os.seteuid(0)
        folder.chmod(0o700)
        os.seteuid(65534)
        for path in (folder / "mine.jsonl", folder):
            with pytest.raises(ValueError, match=said):
                read(jsonl(path))
    finally:
        os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode & 0o7777)


def test_data_that_vanishes_while_it_is_read_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got \S+gone\.jsonl: No such file or directory; see th"):
        list(file_records(tmp_path / "gone.jsonl"))


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.json.gz"])
def test_a_compressed_file_that_was_cut_off_is_named_and_counted(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (place / "data.jsonl").read_text().splitlines()
    text = "[" + ",".join(lines) + "]" if name == "data.json.gz" else "\n".join(lines * 40)
    cut = gzip.compress(text.encode())[:-300]
    (tmp_path / name).write_bytes(cut)
    short = ("trainer.max_steps=1", "trainer.validation_prompts=1")
    code = main(settings(tmp_path / "run", tmp_path / name, *short))
    captured = capsys.readouterr()
    if name == "data.json.gz":  # one list, of which nothing can be used
        assert code == 2
        assert "data.path=" in captured.err
        assert "1 x the file is damaged" in captured.err
    else:
        assert code == 0
        said = "1 x the file is damaged here, and nothing after it was read"
        assert said in captured.out
        skipped = json.loads((tmp_path / "run/provenance.json").read_text())["data"]["skipped"]
        assert sum(skipped.values()) == 1


def test_the_generators_of_a_step_do_not_depend_on_what_was_drawn_before() -> None:
    drawn = []
    for before in (0, 5):
        torch.rand(before)
        drafttrain.training.loop.seed_generators(7, 3, 1)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    drafttrain.training.loop.seed_generators(7, 3, 0)
    assert not torch.equal(torch.rand(3), drawn[0])


def test_the_noise_of_a_step_is_the_same_in_every_python() -> None:
    """A resumed run may have another interpreter: what Python makes of a key is held fast here."""
    assert hash((7, 3, 11)) == HASH_OF_7_3_11


HASH_OF_7_3_11 = 4494109308305811077


def test_a_damaged_checkpoint_is_skipped_only_if_the_user_says_so(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "alone", run)
    arguments = settings(run, place / "data.jsonl", *SHORT)
    weights = run / "checkpoints/step-000009/drafter.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {weights} must match its recorded checksum")
    assert "run.resume=true run.skip_damaged=true resumes from the newest whole checkpoint" in said
    assert main([*arguments, "run.skip_damaged=true"]) == 0
    captured = capsys.readouterr().out
    assert f"skipped because of run.skip_damaged=true: {weights} must match its rec" in captured
    assert f"resuming from {run}/checkpoints/step-00000" in captured
    compare(place / "alone", run)


def test_a_run_shorter_than_its_warm_up_says_which_rate_it_reaches(place: Path) -> None:
    log = (place / "alone" / "train.log").read_text()
    said = "trainer.warmup_steps=20 are more than trainer.max_steps=9: the learning rate reaches 0."
    assert log.count(said) == 1


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_closed_terminal_asks_to_stop_unless_it_is_ignored(number: signal.Signals) -> None:
    stop = StopRequest()
    with stop.listening(), stop.deferred():
        os.kill(os.getpid(), number)
        assert stop.asked
    handler = signal.signal(number, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest().listening() as stop:
            assert number not in answered()  # which the launcher of ranks hands to torch
            os.kill(os.getpid(), number)
            assert not stop.asked
    finally:
        signal.signal(number, handler)


def test_a_full_disk_under_the_output_ends_no_training_and_is_said_once(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    run = tmp_path / "run"
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr("sys.stdout", full)
    assert main(settings(run, place / "data.jsonl", *SHORT)) == 0
    said = capsys.readouterr().err
    assert main(["--version"]) == 1
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
    assert said == (
        "standard output could not be written (No space left on device); the command goes on "
        "without its lines\n"
    )
    assert capsys.readouterr().err == (
        "error: standard output could not be written (No space left on device)\n"
    )
    compare(place / "alone", run)


@pytest.mark.parametrize(("number", "said"), [(27, "ulimit -f"), (122, "the quota is used up")])
def test_what_libraries_in_rust_say_of_the_system_is_understood(
    number: int, said: str, tmp_path: Path
) -> None:
    for guard in (writing(tmp_path / "a"), written(tmp_path, "export.dir")):
        with pytest.raises(DiskError, match=said), guard:
            raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")
    match = rf"store\.dir=.*{said}.* resumes where it stopped"
    guard = written(tmp_path, "store.dir", FULL, "; the same command resumes where it stopped")
    with pytest.raises(DiskError, match=match), guard:
        raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")


def test_a_finished_run_validated_by_another_yardstick_keeps_its_last_checkpoint(
    place: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(place / "alone", tmp_path / "run")
    names = sorted(os.listdir(run / "checkpoints"))
    more = "trainer.validation_prompts=1"
    assert main(settings(run, place / "data.jsonl", *SHORT, more)) == 0
    assert sorted(os.listdir(run / "checkpoints")) == names
    checkpoints = Checkpoints(run / "checkpoints", 2)
    best = checkpoints.best()
    assert best == checkpoints.latest()
    assert best is not None
    verify(best)
    assert load_state(best).extra["yardstick"]["prompts"] == 1


def test_weights_of_others_that_are_not_finite_are_named(place: Path, tmp_path: Path) -> None:
    run = shutil.copytree(place / "alone", tmp_path / "run")
    best = Checkpoints(run / "checkpoints", 2).best()
    assert best is not None
    weights = load_weights(best)
    next(iter(weights.values())).fill_(math.nan)
    state = load_state(best)
    save_file(weights, best / "drafter.safetensors")
    _write_state(best, state)
    with pytest.raises(ValueError, match=r"run\.dir=.* must hold finite weights, got NaN or inf"):
        best_of(run, "run.dir")
