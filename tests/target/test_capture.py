"""A store is written once, whole or not at all, whatever kills the process that writes it."""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import drafter_config
from paths import PYTHONPATH
from safetensors.torch import load_file
from test_drafters import FAMILIES, build
from test_training import random_samples

from drafttrain.__main__ import main
from drafttrain.commands.capture import asked_by
from drafttrain.commands.setup.target_and_drafter import shape_of
from drafttrain.data.batches import collate
from drafttrain.runtime.rank_process import end
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.signals import Stopped, StopRequest
from drafttrain.target.model import Target
from drafttrain.target.store import shards
from drafttrain.target.store.capture import Writer, capture
from drafttrain.target.store.config import StoreConfig, StoreContents
from drafttrain.target.store.features import StoredTarget
from drafttrain.target.store.shards import (
    Manifest,
    kept_positions,
    plan_shards,
    read_journals,
    read_manifest,
)

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
EVERYTHING = StoreContents((1, 2), None)
RECORD = {"command": "python -m drafttrain capture store.dir=here"}


def settings(folder: Path, **changes: Any) -> StoreConfig:
    values: dict[str, Any] = {
        "dir": str(folder),
        "drafters": None,
        "layers": None,
        "final_hidden": True,
        "dtype": "float32",
        "shard_mb": 0.025,  # of 384 bytes a token: 65 tokens
        "assistant_only": False,
        "verify": False,
    }
    return StoreConfig(**values | changes)


def write(
    target: Target,
    folder: Path,
    asked: StoreContents = EVERYTHING,
    lines: list[str] | None = None,
    ranks: Ranks = ALONE,
    **changes: Any,
) -> Manifest:
    return capture(
        target,
        random_samples(),
        asked,
        settings(folder, **changes),
        template="of a template",
        record=RECORD,
        micro_batch=4,
        ranks=ranks,
        stop=StopRequest(),
        say=(lines if lines is not None else []).append,
    )


class Elsewhere(Ranks):
    """A rank that has waited for the others."""

    def barrier(self) -> None: ...


def test_a_folder_that_machines_do_not_share_is_named(target: Target, tmp_path: Path) -> None:
    ranks = Elsewhere(1, 0, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"one folder for all machines.*rank 1 does not find the"):
        write(target, tmp_path / "other", ranks=ranks)
    ranks = Elsewhere(0, 0, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"rank 0 does not find \d shards of other ranks there"):
        write(target, tmp_path / "own", ranks=ranks)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    manifest = write(target, folder)
    assert len(manifest.shards) >= 5
    return folder


def forked(work: Callable[[], Any]) -> int:
    """Start `work` in a process of its own, which has everything imported and loaded."""
    with warnings.catch_warnings(action="ignore"):  # newer Pythons warn of threads: there are none
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def test_killed_at_random_instants_it_ends_with_the_same_bytes(
    target: Target, whole: Path, tmp_path: Path
) -> None:
    started = time.monotonic()
    os.waitpid(forked(lambda: write(target, tmp_path / "timed")), 0)
    once = time.monotonic() - started
    assert content(tmp_path / "timed") == content(whole)
    draw = random.Random(0)
    folder, kills = tmp_path / "killed", 0
    for attempt in range(60):
        child = forked(lambda: write(target, folder))
        if attempt < 14:
            time.sleep(draw.uniform(0, once / 2))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            kills += 1
        elif attempt < 14 and folder.exists():  # finished before it was shot: begin another
            assert content(folder) == content(whole)
            shutil.rmtree(folder)
        else:
            assert os.waitstatus_to_exitcode(status) == 0
            break
    assert kills >= 10
    assert content(folder) == content(whole)


@pytest.mark.slow
def test_killed_before_any_step_that_reaches_the_disk_it_goes_on(
    target: Target, tmp_path: Path
) -> None:
    """Dies once before each file that is written, replaced or flushed, the journal among them."""
    size = {"shard_mb": 0.06}
    write(target, tmp_path / "whole", **size)
    expected = content(tmp_path / "whole")

    def dies_at(instant: int, folder: Path) -> None:
        left = instant

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **keywords)

            return call

        os.replace, os.fsync = counted(os.replace), counted(os.fsync)
        shards.save_file = counted(shards.save_file)  # type: ignore[assignment]
        write(target, folder, **size)

    for instant in itertools.count():
        folder = tmp_path / str(instant)
        child = forked(functools.partial(dies_at, instant, folder))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        write(target, folder, **size)
        assert content(folder) == expected, instant
        shutil.rmtree(folder)
    assert instant > 25


def test_a_torn_line_of_the_journal_is_left_out(
    target: Target, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(whole, folder)
    manifest = read_manifest(folder)
    assert manifest is not None
    plain = json.loads((folder / "manifest.json").read_text())
    lines = [json.dumps(shard) for shard in plain["shards"]]
    plain |= {"complete": False, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(plain))
    (folder / "journal-0.jsonl").write_text("\n".join([*lines[:3], lines[3][:40]]))
    with pytest.raises(ValueError, match=r"store, but .* is not: the same command resumes"):
        StoredTarget(folder, torch.float32, torch.device("cpu"), True)
    lines.clear()
    write(target, folder, lines=lines)
    assert content(folder) == content(whole)


def read_all(folder: Path) -> None:
    store = StoredTarget(folder, torch.float32, torch.device("cpu"), True)
    store.read(collate(store.samples), (1, 2))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


@pytest.mark.parametrize("name", ["shard-00002.safetensors", "readout.safetensors"])
@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
def test_what_is_damaged_is_named_and_written_again_alone(
    name: str, harm: Callable[[Path], None], target: Target, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(whole, folder)
    harm(folder / name)
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    command = rf"python -m drafttrain capture store\.dir={folder} .* store\.verify=true \(with the "
    said = rf"{name} must .*: it is damaged or changed; .*: {command}"
    with pytest.raises(ValueError, match=said):
        read_all(folder)
    lines: list[str] = []
    write(target, folder, lines=lines, verify=True)
    assert [line for line in lines if line.startswith(str(folder / name))]
    assert content(folder) == content(whole)
    for path in folder.glob("*.safetensors"):
        assert (path.stat().st_mtime_ns == times.get(path.name)) == (path.name != name)


def test_a_flipped_bit_is_not_looked_for_unless_asked(target: Target, whole: Path) -> None:
    """The other half of the promise: a finished store is not read again in vain."""
    lines: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in whole.glob("*.safetensors")}
    write(target, whole, lines=lines)
    assert lines == []
    assert {path: path.stat().st_mtime_ns for path in whole.glob("*.safetensors")} == before


def test_the_size_that_is_announced_is_that_of_the_tensors(
    target: Target, whole: Path, tmp_path: Path
) -> None:
    for dtype, each in (("float32", 384), ("bfloat16", 192), ("float8", 3 * (32 + 4))):
        lines: list[str] = []
        folder = tmp_path / dtype
        manifest = write(target, folder, lines=lines, dtype=dtype)
        assert manifest.bytes_per_row == each
        files = folder.glob("shard-*")
        size = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
        assert size == each * manifest.num_tokens
        assert f"{manifest.num_tokens:,} tokens, {each} bytes each: {size / 1e3:.1f} kB" in lines[0]
        assert re.search(r"time: about \d+ s, at [\d,]+ tokens/s and [\d,]+ MB/s", lines[1])
        biggest = max(shard.bytes for shard in manifest.shards)
        assert biggest < 25_000 + 1000, "a shard is bounded"


def test_a_disk_that_cannot_hold_it_is_refused_before_anything_is_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    folder = tmp_path / "store"
    with pytest.raises(ValueError, match=r"store.dir must have 1\.\d+ MB free .* got 1.0 MB free"):
        write(target, folder)
    assert not list(folder.glob("*.safetensors"))


def test_a_disk_that_fills_up_is_a_plain_message_and_nothing_is_lost(
    target: Target, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, left = shards.save_file, 5

    def fills_up(tensors: dict[str, torch.Tensor], path: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        save(tensors, path)

    folder = tmp_path / "store"
    monkeypatch.setattr(shards, "save_file", fills_up)
    with pytest.raises(ValueError, match=r"store\.dir=.* the disk is full .* resumes where"):
        write(target, folder)
    monkeypatch.setattr(shards, "save_file", save)
    write(target, folder)
    assert content(folder) == content(whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "bfloat16"}, "store.dtype must be float32, as when"),
        ({"shard_mb": 1.0}, "store.shard_mb must be 0.025"),
        ({"final_hidden": False}, "store.final_hidden must be True"),
        ({"asked": StoreContents((1, 3), None)}, r"store.layers must be \[1, 2\], as when"),
        ({"asked": StoreContents((1, 2), 3)}, "store.assistant_only must be False"),
    ],
)
def test_a_store_goes_on_with_its_own_settings_only(
    changes: dict[str, Any], said: str, target: Target, whole: Path
) -> None:
    before = content(whole)
    with pytest.raises(ValueError, match=said):
        write(target, whole, **changes)
    assert content(whole) == before


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0), ("bfloat16", 0.002), ("float8", 0.03)])
def test_the_error_that_is_recorded_is_that_of_what_is_read(
    dtype: str, most: float, target: Target, whole: Path, tmp_path: Path
) -> None:
    manifest = write(target, tmp_path, dtype=dtype)
    exact = StoredTarget(whole, torch.float32, torch.device("cpu"), True)
    stored = StoredTarget(tmp_path, torch.float32, torch.device("cpu"), True)
    batch = collate(exact.samples)
    truth, found = exact.read(batch, (1, 2)), stored.read(batch, (1, 2))
    for name, recorded in manifest.relative_errors().items():
        layer = None if name == "final_hidden" else int(name[-1])
        a = truth.final_hidden if layer is None else truth.captured[layer]
        b = found.final_hidden if layer is None else found.captured[layer]
        error = float((a - b).norm() / a.norm())
        assert recorded == pytest.approx(error, rel=1e-4)
        assert error <= most
        assert (error == 0) == (dtype == "float32")
    assert ("exact" in manifest.summary()) == (dtype == "float32")


def test_zeros_and_outliers_survive_float8() -> None:
    values = torch.zeros(3, 8)
    values[1, 0], values[1, 1] = 4000.0, 1.0
    values[2] = 1e-3
    out = torch.empty(3, 8)
    shards.decode(shards.encode(values, "float8"), out)
    assert torch.allclose(out, values, rtol=0.07)


def test_shards_hold_whole_conversations_up_to_their_size() -> None:
    assert plan_shards([3, 3, 3, 9, 1, 1], {"store.shard_mb": 0.006}, 1000) == [
        range(0, 2), range(2, 3), range(3, 4), range(4, 6),
    ]  # fmt: skip
    assert plan_shards([7], {"store.shard_mb": 0.002}, 1000) == [range(0, 1)]


def test_several_drafters_are_asked_what_they_read(target: Target, tmp_path: Path) -> None:
    spec = target.spec
    eagle3, medusa = build("eagle3", spec, layers=[1, 3]), build("medusa", spec)
    other = build("eagle3", spec, layers=[0, 3])
    assert asked_by([eagle3, medusa, other], settings(tmp_path)) == StoreContents((0, 1, 3), None)
    assert asked_by([medusa], settings(tmp_path, layers=[4, 2])) == StoreContents((2, 4), None)
    only = settings(tmp_path, assistant_only=True)
    assert asked_by([medusa, build("small_lm", spec)], only) == StoreContents((), 5)
    for name in ("eagle", "eagle3"):
        said = rf"store\.assistant_only must be false for drafter={name}, which attends"
        with pytest.raises(ValueError, match=said):
            asked_by([medusa, build(name, spec)], only)
    with pytest.raises(ValueError, match="drafter=small_lm trains on text of its own"):
        asked_by([build("small_lm", spec, on_policy=0.5)], settings(tmp_path))
    with pytest.raises(ValueError, match="drafter=ngram has nothing to train"):
        asked_by([build("ngram", spec)], settings(tmp_path))
    with pytest.raises(ValueError, match=r"store\.layers must be in 0\.\.4 .* got \[5, 9\]"):
        asked_by([medusa], settings(tmp_path, layers=[9, 5, 1]))
    with pytest.raises(ValueError, match=r"store\.final_hidden must be true"):
        asked_by([medusa], settings(tmp_path, final_hidden=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_drafter_is_asked_without_memory_for_its_weights(name: str, target: Target) -> None:
    shape, real = shape_of(drafter_config(name), target.spec), build(name, target.spec)
    assert (shape.captures, shape.reach, shape.text_source) == (real.captures, real.reach, None)
    assert name == "small_lm" or all(parameter.is_meta for parameter in shape.parameters())


def test_kept_positions_are_those_before_trained_tokens() -> None:
    mask = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 0, 1], dtype=torch.bool)
    assert kept_positions(mask, 2).int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 0]
    assert kept_positions(mask, 1).int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 0]
    assert kept_positions(mask, 99).int().tolist() == [1] * 9 + [0]
    assert kept_positions(mask, None).all()


def command_line(folder: Path, target_dir: Path, *more: str) -> list[str]:
    """Return a `capture` of 20 conversations in a dozen shards."""
    data = folder / "data.jsonl"
    with data.open("w") as file:
        for number in range(20):
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": f"It is {2 * number}. " * (1 + number % 4)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    keys = ["store.drafters=[eagle3,medusa]", "store.shard_mb=0.02", "drafter.layers=[1,2,3]"]
    keys += [f"model.path={target_dir}", "data=jsonl", f"data.path={data}", "hardware=cpu"]
    keys += ["hardware.threads=1", "hardware.train_dtype=float32"]
    return ["capture", *keys, *more]


def test_a_scheduler_that_asks_to_stop_is_told_how_to_go_on(
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = command_line(tmp_path, tiny_target_dir)
    assert main([*call, f"store.dir={tmp_path / 'alone'}"]) == 0
    compute, calls, swallowed = Writer.compute, 0, False

    def asked_midway(writer: Writer, places: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # the first two are the measurement
            # A library that keeps what its callbacks raise does not keep us.
            with contextlib.suppress(*[Stopped] * swallowed):
                os.kill(os.getpid(), signal.SIGTERM)
        return compute(writer, places)

    monkeypatch.setattr(Writer, "compute", asked_midway)
    folder = tmp_path / "stopped"
    for more in (2, 3):
        calls, swallowed = 0, more == 3
        capsys.readouterr()
        assert main([*call, f"store.dir={folder}"]) == 143
        assert capsys.readouterr().err == (
            "stopped by SIGTERM: what is stored stays, and the same command resumes where it "
            "stopped\n"
        )
        begun = read_manifest(folder)
        assert begun is not None
        assert len(read_journals(folder, begun.names)) == more
    assert main([*call, f"store.dir={folder}"]) == 0
    first, second = content(tmp_path / "alone"), content(folder)
    for name in first.keys() | second.keys():
        assert name == "provenance.json" or first[name] == second[name], name


@pytest.mark.slow
def test_two_ranks_write_the_store_of_one_with_the_target_in_pieces_and_through_kills(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    # Ranks run the target unequally often: a shard has one to four passes.
    more = ["store.shard_mb=0.06", "hardware.micro_batch=1"]
    call = command_line(tmp_path, tiny_target_dir, *more)
    assert main([*call, f"store.dir={tmp_path / 'one'}"]) == 0
    expected, folder = content(tmp_path / "one"), tmp_path / "two"
    assert len(expected) > 8

    def run(dies: str, placement: str) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", "2", __file__, *call, f"store.dir={folder}"]
        return subprocess.run(
            [*launcher, f"hardware.target_placement={placement}"],
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "DIES": dies},
            capture_output=True,
            text=True,
            timeout=240,
        )

    for dies, placement, kept in (("1", "device", 1), ("0", "zero3", 2)):
        done = run(dies, placement)
        assert done.returncode != 0
        assert "the same command resumes where it stopped" in done.stderr, done.stderr
        assert "run.resume" not in done.stderr
        manifest = read_manifest(folder)
        assert manifest is not None
        there = {shard.file for shard in (*manifest.shards, *read_journals(folder, manifest.names))}
        assert kept <= len(there)
        assert not manifest.complete
    done = run("", "zero3")
    assert done.returncode == 0, done.stderr
    assert "target placement: zero3 (set by hardware.target_placement)" in done.stdout
    assert done.stdout.count("next: python -m drafttrain train features=stored") == 1
    found = content(folder)
    for name in expected.keys() | found.keys():
        assert name == "provenance.json" or expected[name] == found[name], name


@pytest.fixture(autouse=True)
def nothing_is_left_over(tmp_path: Path) -> Iterator[None]:
    yield
    for manifest in tmp_path.rglob("manifest.json"):
        if json.loads(manifest.read_text())["complete"]:
            assert not list(manifest.parent.glob(".*")), "a finished store has its files only"
            assert not list(manifest.parent.glob("journal*"))


def test_only_conversations_that_are_there_are_captured_by_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["capture", f"store.dir={tmp_path / 'store'}", "hardware=cpu"]
    assert main([*call, "hardware.target_placement=vllm"]) == 2
    assert "data must be conversations that are there" in capsys.readouterr().err


def die_after_the_first_shard() -> None:
    """Let the rank that DIES names be killed when it has written one: with the others under way."""
    import drafttrain.target.store.capture as module

    append = module.append_records

    def and_die(path: Path, records: Any) -> None:
        append(path, records)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["DIES"] == os.environ["RANK"]:
        module.append_records = and_die


if __name__ == "__main__":
    die_after_the_first_shard()
    end(main(sys.argv[1:]))
