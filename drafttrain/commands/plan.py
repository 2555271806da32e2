"""Memory, time, disk and money before a run."""

import textwrap
from pathlib import Path

from drafttrain.commands.setup.plan import plan_of
from drafttrain.config.sections import PlanConfig
from drafttrain.plan.pages import FILES, blocks, headline, write_plan
from drafttrain.report.results import Table
from drafttrain.report.tables import rich_table
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
        found = plan_of(config)
    width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    wide = Terminal(width)
    wide.print(textwrap.fill(headline(found), width), "")
    for block in blocks(found):
        if isinstance(block, Table):
            wide.print(rich_table(block))
        elif block.items:
            texts = [f"{key}: {text}" if key else text for key, text in block.items]
            lines = [textwrap.fill(f"- {text}", width, subsequent_indent="  ") for text in texts]
            wide.print("\n".join([block.title, *lines, ""]))
    if config.plan.dir is not None:
        with hold(folder, "plan.dir", "plan", console.print):
            write_plan(found, folder)
        console.print(f"plan: {folder / 'plan.html'} (the same in plan.md, plan.json)")
