"""Files of every kind that is named are read, and none takes more than its size explains."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from test_conversations import GOOD, hub, jsonl, write
from test_records import ROWS

from drafttrain.data import files
from drafttrain.data.conversations import LEFT_OUT, read, read_asked
from drafttrain.data.skips import NothingUsable


def parquet(file: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, **options)
    return str(file)


def bomb(file: Path) -> str:
    """100 texts of 15 MB in 2 kB: one text in a dictionary, named 100 times."""
    text = pyarrow.array(["a" * (15 << 20)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100, "int32"), text)
    table = pyarrow.table({"text": column})
    pyarrow.parquet.write_table(table, file, compression="zstd")
    assert file.stat().st_size < 100_000
    return str(file)


def test_parquet_is_read_as_the_rows_it_holds(tmp_path: Path) -> None:
    rows = [{**GOOD, "image": b"\xff"}, {**GOOD, "messages": None}]
    path = parquet(tmp_path / "a.parquet", rows)
    found, report = read(jsonl(path))
    expected, _ = read(jsonl(write(tmp_path / "a.jsonl", GOOD)))
    assert [one.messages for one in found] == [one.messages for one in expected]
    assert (found[0].source, report.num_skipped) == (f"{path}:1", 1)
    assert len(read(jsonl(path, limit=1))[0]) == 1


def test_a_parquet_bomb_is_refused_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    folder = tmp_path / "set"
    folder.mkdir()
    bomb(folder / "train.parquet")
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for config in (jsonl(str(folder), template="none"), hub(repo=str(folder), column="text")):
        before = peak()
        report = read(replace(config, template="none"))[1]
        assert "expands to more than 1,000 times its size" in " ".join(report.lines())
        assert peak() - before < 500_000  # kB
    assert not cache.exists() or sum(f.stat().st_size for f in cache.rglob("*")) < 100_000


def peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_parquet_in_a_directory_is_read_by_column(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    parquet(folder / "train.parquet", [{"a": "Hi", "b": "Yes."}])
    found, _ = read(hub(repo=str(folder), column=None, prompt_column="a", response_column="b"))
    assert [turn.content for turn in found[0].messages] == ["Hi", "Yes."]
    with pytest.raises(ValueError, match=r"data.column: no column c \(there are a, b\)"):
        read(hub(repo=str(folder), column="c"))


@pytest.mark.parametrize("damage", [b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1"])
def test_a_damaged_parquet_file_is_said_in_a_line(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(damage)
    with pytest.raises(NothingUsable, match="1 x the file is damaged here") as error:
        read(jsonl(str(tmp_path)))
    assert str(error.value).isprintable()


def test_zstandard_and_lines_in_a_json_file_are_read(tmp_path: Path) -> None:
    lines = (json.dumps(GOOD) + "\n").encode() * 3
    squeezed = pyarrow.compress(lines, codec="zstd", asbytes=True)
    (tmp_path / "a.jsonl.zst").write_bytes(squeezed + squeezed)
    (tmp_path / "b.json").write_bytes(lines)
    (tmp_path / "c.json").write_text(json.dumps(ROWS[1][0]))
    found, report = read(jsonl(str(tmp_path)))
    assert len(found) == 10
    assert report.num_skipped == 0
    (tmp_path / "a.jsonl.zst").write_bytes(squeezed[:-9])
    assert "damaged here" in " ".join(read(jsonl(str(tmp_path)))[1].lines())


def test_a_zstandard_bomb_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SMALL", 1 << 20)
    monkeypatch.setattr(files, "EXPANSION", 100)
    lines = (json.dumps(GOOD) + "\n").encode() * 30_000
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
    report = read(jsonl(str(file)))[1]
    assert "expands to more than 100 times" in " ".join(report.lines())


@pytest.mark.parametrize("name", ["a.csv", "a.zip", "a.jsonl"])
def test_a_format_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04\xff" if name != "a.csv" else b"a,b\n")
    with pytest.raises(ValueError, match=r"of the kinds \.jsonl.*data\.repo=csv"):
        read(jsonl(str(tmp_path / name)))


@pytest.mark.parametrize("kind", ["pipe", "device", "broken"])
def test_a_directory_with_something_else_than_files_is_refused_and_it_is_named(
    kind: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert len(read(jsonl(str(tmp_path)))[0]) == 2
    other = tmp_path / "b.jsonl"
    if kind == "pipe":
        os.mkfifo(other)
    else:
        other.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
    for path in (tmp_path, other, tmp_path / "*.jsonl"):
        if path == other and kind == "broken":
            continue
        with pytest.raises(ValueError, match=r"data\.path must name regular files, got .*b\.jsonl"):
            read(jsonl(str(path)))
    with pytest.raises(ValueError, match=r"data\.repo must name regular files, got .*b\.jsonl"):
        read(hub(repo=str(tmp_path)))


def test_a_directory_is_read_as_its_files_would_be_and_the_others_are_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "c.ndjson", "g.JSONL", "b.csv", "e.jsonl.bz2", ".hidden"):
        write(tmp_path / name, GOOD)
    (tmp_path / "u.JSON").write_text(json.dumps([GOOD, GOOD]))
    packed = pyarrow.Codec("zstd").compress(json.dumps([GOOD]).encode(), asbytes=True)
    (tmp_path / "z.json.zst").write_bytes(packed)
    (tmp_path / "sub").mkdir()
    config = jsonl(str(tmp_path))
    for found, report in (read(config), read_asked(config, "all")):
        assert len(found) == 6
        assert not report.counts
        ((line, count),) = report.notes.items()
        assert line.startswith(f"{LEFT_OUT}: b.csv, e.jsonl.bz2, sub/; data=hub")
        assert count == 3
    assert not read(jsonl(str(tmp_path / "*.jsonl")))[1].notes


LINE = json.dumps(GOOD).encode()


@pytest.mark.parametrize(
    ("begins", "skipped"),
    [(b"", 0), (b"\n  \n", 0), (b'{"messages": [\n', 1), (LINE + b",\n", 1), (b"\xef\xbb\xbf", 0)],
)
@pytest.mark.parametrize("name", ["a.json", "a.json.zst"])
def test_a_record_a_line_is_found_behind_a_bad_first_line(
    begins: bytes, skipped: int, name: str, tmp_path: Path
) -> None:
    content = begins + b"\n".join([LINE] * 3)
    if name.endswith("zst"):
        content = pyarrow.Codec("zstd").compress(content, asbytes=True)
    (tmp_path / name).write_bytes(content)
    found, report = read(jsonl(str(tmp_path / name)))
    assert len(found) == 3
    assert report.num_skipped == skipped


def test_an_object_over_several_lines_is_no_record_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": [GOOD]}, indent=1))
    with pytest.raises(NothingUsable, match="neither a json list nor a record a line"):
        read(jsonl(str(tmp_path / "a.json")))


def test_parquet_of_the_hub_is_read_within_the_same_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    address = "hf://datasets/someone/something@0123/train.parquet"
    path = bomb(tmp_path / "downloaded")

    def builder(repo: str, *_: Any, **__: Any) -> Any:
        config = SimpleNamespace(data_files={"train": [address]})
        return SimpleNamespace(config=config)

    def download(_: Any, names: list[str]) -> list[str]:
        assert names == [address]
        return [path]

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets.DownloadManager, "download", download)
    report = read(replace(hub(column="text"), template="none"))[1]
    assert "expands to more than 1,000 times its size" in " ".join(report.lines())


def test_parquet_files_that_are_named_are_read_within_the_same_bounds(tmp_path: Path) -> None:
    config = hub(repo="parquet", files=bomb(tmp_path / "a.parquet"), column="text")
    report = read(replace(config, template="none"))[1]
    assert "expands to more than 1,000 times its size" in " ".join(report.lines())
