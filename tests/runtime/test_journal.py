"""Records are read back whole, whatever a kill or a full disk left of the last one."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from drafttrain.runtime.disk import append_text
from drafttrain.runtime.journal import append_records, read_records, replace_records
from drafttrain.runtime.untrusted_input import UntrustedError


@dataclass(frozen=True)
class Note:
    number: int
    text: str


def notes(file: Path, first: int = 0) -> list[Note]:
    return list(read_records(file, Note, first))


def test_records_are_read_back_in_order(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    append_records(file, [{"number": 1, "text": "é\n"}])
    append_records(file, [])
    append_records(file, [{"number": 2, "text": ""}, {"number": 3, "text": ""}])
    assert notes(file) == [Note(1, "é\n"), Note(2, ""), Note(3, "")]
    assert notes(file, first=2) == [Note(3, "")]
    replace_records(file, [{"number": 4, "text": ""}])
    assert notes(file) == [Note(4, "")]


@pytest.mark.parametrize("torn", ['{"number": 2', '{"number": 2, "text": ""}', "x" * (3 << 20)])
def test_a_torn_last_line_is_not_read_and_cut_off_by_who_writes_next(
    torn: str, tmp_path: Path
) -> None:
    file = tmp_path / "notes.jsonl"
    append_records(file, [{"number": 1, "text": ""}])
    file.write_text(file.read_text() + torn)
    assert notes(file) == [Note(1, "")]
    assert file.read_text().endswith(torn)  # whoever writes it may be about to end it
    append_records(file, [{"number": 3, "text": ""}])
    assert notes(file) == [Note(1, ""), Note(3, "")]


def test_a_file_that_is_one_torn_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("{")
    append_text(tmp_path / "notes.jsonl", "whole\n")
    assert (tmp_path / "notes.jsonl").read_text() == "whole\n"


def test_a_line_of_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text('{"number": 1, "text": ""}\n{"number": "1", "text": ""}\n')
    with pytest.raises(UntrustedError, match=r"notes\.jsonl:2: number: .*integer"):
        notes(file)
    file.write_text("[" + "1," * (9 << 20) + "1]\n")
    with pytest.raises(UntrustedError, match=r"notes\.jsonl:1 is too long"):
        notes(file)
