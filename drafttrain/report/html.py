"""The report as one HTML file that loads nothing: a page to show a colleague."""

from typing import Any

from drafttrain.report import plots, sweep_plots, wording
from drafttrain.report.markdown import depth_told, methods_of, money_cells
from drafttrain.report.pages import page
from drafttrain.report.statistics import PLAIN
from drafttrain.report.verdict import bill, is_serious


def html(report: dict[str, Any]) -> str:
    """Return the page: style and plots inline, every text of the report escaped."""
    rows, drafter = methods_of(report), report["drafter"]
    summaries = {method: tasks["all"] for method, tasks in rows.items()}
    plain = report["methods"][PLAIN]["summary"]
    timed = any(row["speedup"]["value"] for row in summaries.values())
    drafted = any(row["num_drafts"] for row in summaries.values())
    return page(
        "report.html.j2",
        report=report,
        rows=rows,
        main=summaries[drafter],
        others={method: row for method, row in rows.items() if method != drafter},
        step_ms=plain["time_ms"],
        plots={
            "speedup": plots.speedup_plot(rows, drafter) if timed else None,
            "acceptance": plots.acceptance_plot(summaries, drafter) if drafted else None,
            "time": plots.time_plot(summaries, plain, drafter)
            if plain["num_target_passes"]
            else None,
            "speed": plots.speed_plot(rows, drafter) if timed else None,
            **_sweep(report["sweep"]),
        },
        depth=depth_told(report),
        serious=[flag for flag in report["flags"] if is_serious(flag, report)],
        ordinary=[flag for flag in report["flags"] if not is_serious(flag, report)],
        words=wording,
        bill=bill(report["verdicts"]["all"]),
        money_cells=money_cells,
        widest=_widest(rows[drafter]),
    )


def _widest(rows: dict[str, Any]) -> dict[str, float]:
    """Return what a full bar in a table cell stands for."""
    return {
        "length": max(row["acceptance_length"]["micro"] or 0.0 for row in rows.values()) or 1.0,
        "speedup": max(row["speedup"]["value"] or 0.0 for row in rows.values()) or 1.0,
    }


def _sweep(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plots of a sweep, where more than one depth or batch was measured."""
    several = {key: len({point[key] for point in points}) > 1 for key in ("depth", "batch_size")}
    return {
        "by_depth": sweep_plots.depth_plot(points) if several["depth"] else None,
        "by_batch": sweep_plots.batch_plot(points) if several["batch_size"] else None,
    }
