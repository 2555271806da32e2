"""Memory, time, disk and money before a run."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from drafttrain.commands.setup.plan import plan_of
from drafttrain.config.sections import PlanConfig
from drafttrain.plan.files import FILES, write_plan
from drafttrain.plan.pages import headline, notes, pieces, printed, tables
from drafttrain.runtime.disk import require_writable
from drafttrain.runtime.lock import hold
from drafttrain.runtime.run_folder import refuse_foreign
from drafttrain.runtime.terminal import Terminal, console, working

WIDTH = 100


def plan(config: PlanConfig) -> None:
    """Print a run's cost and its drafter's benefit from the configuration alone; write plan.dir."""
    if config.plan.dir is not None:
        folder = Path(config.plan.dir)
        require_writable(folder, "plan.dir")
        refuse_foreign(folder, "plan.dir", FILES, FILES[0], ("accelerator", "bandwidth"))
    with working("planning"):
        found, source = plan_of(config)
    width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    wide = Terminal(width)
    wide.print(textwrap.fill(headline(found), width), "")
    for table in tables(found):
        for piece in pieces(table, wide):
            wide.print(printed(piece))
    wide.print(listed("Advice", found.advice, width))
    wide.print(listed("What the numbers assume", notes(found, source), width))
    if config.plan.dir is not None:
        with hold(folder, "plan.dir", "plan", console.print):
            write_plan(found, folder, source)
        console.print(f"plan: {folder / 'plan.html'} (the same in plan.md, plan.json)")


def listed(title: str, texts: Sequence[str], width: int) -> str:
    """Return a list of sentences under a title, wrapped to a width."""
    folded = [textwrap.fill(f"- {text}", width, subsequent_indent="  ") for text in texts]
    return "\n".join([title, *folded, ""])
