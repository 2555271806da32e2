"""The figures of a comparison, in the manner of the report's plots."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from drafttrain.report.plots import (
    STAND_IN,
    Axes,
    Line2D,
    beside,
    bounds,
    cut_interval,
    height_of,
    hollow,
    legend,
    picture,
    rows_axis,
)
from drafttrain.report.wording import change, estimate

KINDS = ("drafter", "other", "conditional", "verify", "plain")  # colours, in the order of the rows
MARKS = ("o", "s", "^", "v")  # another mark each time that the colours have been through
NO_CHANGE: dict[str, Any] = {"linewidth": 1.25, "linestyle": (0, (4, 3)), "zorder": 1}


def looks(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return colour and mark of each method, the same in every figure."""
    return {
        row["method"]: (KINDS[i % len(KINDS)], MARKS[i // len(KINDS) % len(MARKS)])
        for i, row in enumerate(rows)
    }


def estimates_plot(
    rows: Sequence[dict[str, Any]], quantity: str, unit: str, even: float
) -> Markup | None:
    """Return a quantity of each row on all prompts, with interval and single runs; None: no value.

    `even` is the value at which nothing is gained.
    """
    shown = {row["method"]: row["summary"][quantity] for row in rows}
    if not any(measured["value"] is not None for measured in shown.values()):
        return None
    several = any(len(measured["by_run"]) > 1 for measured in shown.values())
    colours = looks(rows)

    def draw(axes: Axes) -> None:
        known = [measured for measured in shown.values() if measured["value"] is not None]
        values = [own for measured in known for own in measured["by_run"]]
        ends = [end for measured in known for end in measured["ci95"] or []]
        span = (0.0, bounds([0.0, even, *values], ends)[1])
        for index, (method, measured) in enumerate(shown.items()):
            value, ci95 = measured["value"], measured["ci95"]
            kind, mark = colours[method]
            if value is None:
                continue
            if ci95:
                cut_interval(axes, ci95, index, kind, span)
            axes.plot(value, index, mark, color=STAND_IN[kind])
            for own in measured["by_run"] if len(measured["by_run"]) > 1 else ():
                axes.plot(own, index + 0.26, **hollow(kind) | {"markersize": 5})
        rows_axis(axes, list(shown), span[1], unit)
        axes.axvline(even, color=STAND_IN["ink"], **NO_CHANGE)
        for index, measured in enumerate(shown.values()):
            across = axes.get_yaxis_transform()
            beside(axes, 1.0, index, estimate(measured), xycoords=across)
        if several:
            dot = Line2D([], [], color=STAND_IN["soft"], marker="o", linewidth=2.5)
            lesser = Line2D([], [], **hollow("soft") | {"markersize": 5})
            legend(axes, {"mean, 95 % interval": dot, "single runs": lesser})

    label = f"{quantity.replace('_', ' ').capitalize()} of each method"
    return picture(f"all-{quantity}", label, height_of(shown, bars=1), draw)


def differences_plot(
    rows: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]], quantity: str, unit: str
) -> Markup | None:
    """Return the differences to the baseline by task, with intervals; None if there are none."""
    colours = looks(rows)
    found = {
        pair["method"]: {
            name: part[quantity]
            for name, part in {"all": pair["summary"], **pair["tasks"]}.items()
            if part[quantity]["value"] is not None
        }
        for pair in pairs
    }
    names = list(dict.fromkeys(name for parts in found.values() for name in parts))
    if not names:
        return None
    parts_of_all = [measured for parts in found.values() for measured in parts.values()]
    ends = bounds(
        [0.0, *(measured["value"] for measured in parts_of_all)],
        [end for measured in parts_of_all for end in measured["ci95"] or []],
    )

    def draw(axes: Axes) -> None:
        for place, (method, parts) in enumerate(found.items()):
            kind, mark = colours[method]
            for index, name in enumerate(names):
                if name not in parts:
                    continue
                value, ci95 = parts[name]["value"], parts[name]["ci95"]
                y = index + (place - (len(found) - 1) / 2) * 0.72 / len(found)
                if ci95:
                    cut_interval(axes, ci95, y, kind, ends)
                axes.plot(value, y, mark, color=STAND_IN[kind])
        rows_axis(axes, names, 1.0, unit)
        room = 0.04 * (ends[1] - ends[0]) or 1.0
        axes.set_xlim(ends[0] - room, ends[1] + room)
        axes.axvline(0.0, color=STAND_IN["ink"], **NO_CHANGE)
        if len(found) == 1:
            (parts,) = found.values()
            for index, name in enumerate(names):
                words = change(parts[name]) if name in parts else ""
                beside(axes, 1.0, index, words, xycoords=axes.get_yaxis_transform())
        marks = {
            method: Line2D(
                [], [], color=STAND_IN[colours[method][0]], marker=colours[method][1], linewidth=2.5
            )
            for method in found
        }
        legend(axes, marks)

    label = f"Difference in {quantity.replace('_', ' ')} by task"
    height = height_of(names, bars=len(found)) + 18 * max(0, (len(found) + 1) // 2 - 1)
    return picture(f"difference-{quantity}", label, height, draw)
