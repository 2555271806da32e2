"""Evaluated runs side by side."""

from dataclasses import asdict
from pathlib import Path

from drafttrain.config.sections import CompareConfig
from drafttrain.report.comparison import (
    FILES,
    compare_runs,
    comparison_document,
    comparison_figures,
    comparison_summary,
    comparison_table,
)
from drafttrain.report.tables import rich_table
from drafttrain.report.write import pictures, write_pages
from drafttrain.runtime.disk import require_writable
from drafttrain.runtime.lock import hold
from drafttrain.runtime.run_folder import provenance, refuse_foreign
from drafttrain.runtime.terminal import console, working
from drafttrain.runtime.tracker import open_tracker, require_tracker


def compare(config: CompareConfig) -> None:
    """Set evaluated runs side by side, paired by prompt, and write the comparison."""
    settings = config.compare
    place = Path(settings.dir)
    require_tracker(config.tracker, place)
    require_writable(place, "compare.dir")
    refuse_foreign(place, "compare.dir", FILES, FILES[0], ("definitions", "speedup"))
    with working("comparing"):
        comparison = compare_runs(settings, provenance())
    with hold(place, "compare.dir", "compare", console.print):
        document, figures = comparison_document(comparison), comparison_figures(comparison)
        html = write_pages(place, "compare", document, figures, comparison)
        console.print(rich_table(comparison_summary(comparison)))
        console.print(f"comparison: {html} (the same in compare.md, compare.json)")
        told = {"run": {"name": settings.name}} | asdict(config)
        tracker = open_tracker(config.tracker, place, config=told, command="compare", append=True)
        tracker.table(f"comparison/{settings.name}", *comparison_table(comparison))
        tracker.keep(f"compared/{settings.name}", "report", [place / name for name in FILES])
        tracker.pictures(f"compared/{settings.name}", lambda: pictures(figures))
        tracker.finish()
