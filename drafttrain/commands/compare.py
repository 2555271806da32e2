"""Evaluated runs side by side."""

import sys
from dataclasses import asdict
from pathlib import Path

from drafttrain.compare import compare_runs, comparison_table
from drafttrain.config import (
    CompareConfig,
)
from drafttrain.disk import require_writable
from drafttrain.lock import hold
from drafttrain.report.comparison_pages import FILES, comparison_summary, write_comparison
from drafttrain.run import (
    provenance,
)
from drafttrain.terminal import console
from drafttrain.tracker import open_tracker


def compare(config: CompareConfig) -> None:
    """Set evaluated runs side by side, paired by prompt, and write the comparison."""
    settings = config.compare
    require_writable(Path(settings.dir), "compare.dir")
    comparison = compare_runs(settings, provenance(sys.argv[1:]))
    place = Path(settings.dir)
    with hold(place, "compare.dir", "compare", console.print):
        write_comparison(comparison, place)
        console.print(comparison_summary(comparison))
        html = place / "compare.html"
        console.print(f"comparison: {html} (the same in compare.md, compare.json)")
        told = {"run": {"name": settings.name}} | asdict(config)
        tracker = open_tracker(
            config.tracker, place, config=told, resume_step=None, is_main=True, append=True
        )
        tracker.table(f"comparison/{settings.name}", *comparison_table(comparison))
        tracker.keep(f"compared/{settings.name}", "report", [place / name for name in FILES])
        tracker.finish()
