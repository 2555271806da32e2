"""What comes from outside is bounded and typed before anything else sees it."""

import io
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafttrain.runtime.untrusted_input import (
    Count,
    FileName,
    UntrustedError,
    header_of,
    lines_of,
    parse_json,
    read_bytes,
    read_yaml,
    shown,
    typed,
)


@dataclass(frozen=True)
class Entry:
    file: FileName
    bytes: Count


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a": "\\ud800"}', b"[1,", b"\xff", b"1" * 6000, b"[" + b"1," * 5_000_000],
    ids=["deep", "surrogate", "cut off", "not UTF-8", "long number", "many values"],
)
def test_bad_json_is_one_error_that_names_its_origin(text: bytes) -> None:
    with pytest.raises(UntrustedError, match=r"^here must "):
        parse_json(text, "here")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", "", ".hidden", "a\nb", "a\x00", "x" * 300, 7]
)
def test_a_name_of_a_file_is_no_path(name: object) -> None:
    with pytest.raises(UntrustedError, match=r"^here: file: "):
        typed(Entry, json.dumps({"file": name, "bytes": 1}), "here")


def test_typed_values_are_strict_and_bounded() -> None:
    assert typed(Entry, '{"file": "shard-1.x", "bytes": 3, "new": 0}', "here") == Entry(
        "shard-1.x", 3
    )
    for wrong in ('"3"', "-1", "3.5", "true", str(2**60)):
        with pytest.raises(UntrustedError, match=r"^here: bytes: .*got "):
            typed(Entry, f'{{"file": "x", "bytes": {wrong}}}', "here")
    with pytest.raises(UntrustedError, match=r"^here: bytes: Field required$"):
        typed(Entry, '{"file": "x"}', "here")


@pytest.mark.parametrize(
    "text",
    ["a: &x [1]\nb: *x", "[" * 2000, "!!python/object/apply:os.system ['id']", "a: 2001-99-99",
     "a: b: c", "#" * 300_000],
    ids=["alias", "deep", "class", "no date", "no yaml", "long"],
)  # fmt: skip
def test_yaml_of_others_is_plain_data(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UntrustedError, match=r"config.yaml must "):
        read_yaml(file)


def test_what_is_shown_is_one_line_that_a_terminal_obeys_nothing_of() -> None:
    assert shown("a\n b\x1b[31m\u202e\ud800") == "a b\\x1b[31m\\u202e\\ud800"
    assert shown("a\u00a0\u3000b") == "a\\xa0\\u3000b"
    assert shown("x" * 500) == "x" * 117 + "..."


def safetensors(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_header_is_read_as_what_it_says_of_each_tensor(tmp_path: Path) -> None:
    header = {"__metadata__": {"a": "b"}, "w": entry(0, 8, [2]), "b": entry(8, 12, [1])}
    found = header_of(safetensors(tmp_path / "m.safetensors", header, bytes(12)))
    assert {name: (t.shape, t.data_offsets) for name, t in found.items()} == {
        "w": ([2], (0, 8)),
        "b": ([1], (8, 12)),
    }


@pytest.mark.parametrize(
    ("header", "size", "length"),
    [
        ({"w": entry(0, 8, [2])}, 4, None),  # torn
        ({"w": entry(0, 8, [3])}, 8, None),  # other bytes than its shape has
        ({"w": entry(0, 8, [2]), "v": entry(4, 12, [2])}, 12, None),  # they overlap
        ({"w": entry(0, 8, [2]), "v": entry(12, 20, [2])}, 20, None),  # a gap
        ({"w": entry(0, 8, [-2])}, 8, None),
        ({"w": entry(0, 8, [2], "F99")}, 8, None),
        ({"w": "text"}, 8, None),
        ([1], 0, None),
        (b"no json", 0, None),
        ({"w": entry(0, 8, [2])}, 8, 2**63),  # a header of 8 EB
        ({"w": entry(0, 8, [2])}, 8, 0),
    ],
)
def test_a_header_that_does_not_agree_with_its_file_is_refused(
    tmp_path: Path, header: object, size: int, length: int | None
) -> None:
    file = safetensors(tmp_path / "m.safetensors", header, bytes(size), length)
    with pytest.raises(UntrustedError, match=r"m.safetensors"):
        header_of(file)


def test_a_header_of_a_sparse_file_is_not_held_in_memory(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "m.safetensors", b"", length=4 << 30)
    with file.open("r+b") as stream:
        stream.truncate(5 << 30)
    with pytest.raises(UntrustedError, match="its header cannot be read"):
        header_of(file)


def test_a_line_that_is_too_long_is_passed_over() -> None:
    stream = io.BytesIO(b"one\n" + b"x" * 50 + b"\nthree")
    assert list(lines_of(stream, most=10)) == [b"one\n", None, b"three"]


def test_only_files_within_bounds_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345"
    with pytest.raises(UntrustedError, match="at most 4 bytes"):
        read_bytes(file, 4)
    with pytest.raises(UntrustedError, match="must be a file"):
        read_bytes(tmp_path, 4)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", 4)
