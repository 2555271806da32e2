"""A table on the terminal: what is too wide goes on in the next line, and nothing is cut."""

import io
import re

from rich.console import Console

from drafttrain.report.results import Table
from drafttrain.report.tables import rich_table


def printed(name: str, positions: str) -> str:
    columns = ["task", "acceptance per position", "tok/s plain", "tok/s with", "speedup, 95 %"]
    numbers = ["104", "149", "1.45 [1.36, 1.54]"]
    table = Table("eagle3", "", columns, [[name, positions, *numbers]], [])
    screen = io.StringIO()
    Console(file=screen, width=66).print(rich_table(table))
    return screen.getvalue()


def test_many_positions_go_on_in_the_next_line_and_names_stay_whole() -> None:
    shown = printed("task_dialogue", ".89 .81 .70 .61 .52 .45 .39 .33")
    assert re.search(
        r"^ *task_dialogue +\.89 \.81.* 104 +149 +1\.45 \[1\.36, 1\.54\] *$", shown, re.M
    )
    assert re.search(r"^ +[.0-9 ]*\.39 \.33 *$", shown, re.M)
    assert "…" not in shown


def test_a_long_name_is_broken_and_not_cut() -> None:
    name = "a13s/losses__soft_cross_entropy_1.0/of/many/more"
    shown = printed(name, ".89 .81")
    rows = shown.splitlines()[4:]
    assert name in "".join(re.match(r" *(\S*)", row)[1] for row in rows)
    assert "…" not in shown
