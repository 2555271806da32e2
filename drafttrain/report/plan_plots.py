"""The figure of a plan, in the manner of the report's plots."""

from collections.abc import Mapping

from markupsafe import Markup

from drafttrain.report.plots import (
    STAND_IN,
    Axes,
    Patch,
    beside,
    height_of,
    legend,
    picture,
    rows_axis,
)
from drafttrain.report.wording import number

# By component, in the order of the plan; one that has no colour of its own is among the rest.
COLOURS = ("drafter", "other", "conditional", "third", "verify", "plain")
WIDEST = 1.5  # of the memory there is: a bar that is longer is cut, its number is not


def memory_plot(ways: Mapping[str, Mapping[str, float]], limit: float) -> Markup:
    """Return memory in GiB by component, a bar for each way to shard, beside what there is."""
    sizes = {
        name: max(parts[name] for parts in ways.values()) for name in next(iter(ways.values()))
    }
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    colours = dict(zip(largest, COLOURS, strict=False))
    end = min(max(limit, *(sum(parts.values()) for parts in ways.values())), WIDEST * limit)

    def draw(axes: Axes) -> None:
        rows_axis(axes, list(ways), end, "GiB")
        for index, parts in enumerate(ways.values()):
            left = 0.0
            for name in sorted(parts, key=lambda name: -sizes[name]):
                shown = min(parts[name], max(end - left, 0.0))
                axes.barh(index, shown, 0.62, left, color=STAND_IN[colours.get(name, "rest")])
                left += shown
            beside(axes, left, index, number(sum(parts.values()), 1), fontweight="bold")
        axes.axvline(limit, color=STAND_IN["ink"], linewidth=1.25, linestyle=(0, (4, 3)))
        marks = {name: Patch(facecolor=STAND_IN[colour]) for name, colour in colours.items()}
        if len(largest) > len(colours):
            marks["the rest"] = Patch(facecolor=STAND_IN["rest"])
        legend(axes, marks)

    height = height_of(ways, bars=2) + 22 * ((len(colours) + 1) // 2)
    return picture("memory", "Memory by component for every way to shard", height, draw)
