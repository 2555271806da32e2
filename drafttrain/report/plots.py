"""The plots of the HTML report: drawn by matplotlib, as inline SVG in the page's own colours."""

import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from drafttrain.report.rows import Row
from drafttrain.report.wording import Number, estimate, number, speed

WIDTH = 560.0  # in the units of the SVG; the page scales it to its column
DPI = 72  # what the SVG backend assumes: one point is one unit
LABEL_LIMIT = 20  # characters of a name; the tables have the rest
FAR = 0.6  # of the range of the values: how far beyond them an axis goes for intervals
LEGEND_LIMIT = 50  # characters of all names that fit in one line

# Names of the page's CSS variables. matplotlib draws with stand-ins that say which is meant, so
# that the page decides the colours, for light and dark.
COLOURS = [
    "ink", "soft", "faint", "edge", "on-bar", "drafter", "other", "plain", "conditional", "draft",
    "verify", "rest", "third",
]  # fmt: skip
STAND_IN = {name: f"#0000{place:02x}" for place, name in enumerate(COLOURS, start=1)}
STAGES = {"draft": "draft", "verify": "verify", "other": "rest"}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text; the style sheet gives it the font of the page
    "font.family": "DejaVu Sans",  # comes with matplotlib: sizes are estimated alike everywhere
    "text.parse_math": False,  # a dollar in a task's name is a dollar
    "font.size": 12,
    "lines.markersize": 8,
    "text.color": STAND_IN["ink"],
    "axes.labelcolor": STAND_IN["faint"],
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": STAND_IN["edge"],
    "grid.linewidth": 1,
    "xtick.color": STAND_IN["faint"],
    "ytick.color": STAND_IN["faint"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.6,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.02,
} | {f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}


def picture(name: str, label: str, height: int, draw: Callable[[Axes], None]) -> Markup:
    """Return what `draw` draws as one inline SVG; `name` keeps its ids apart from other plots'."""
    text = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Sizes are estimated with matplotlib's font; the browser has one for every script.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
        matplotlib.rcParams.update({**STYLE, "svg.hashsalt": name})
        figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)
        draw(figure.subplots())
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _inline(text.getvalue(), name, label)


def _inline(document: str, name: str, label: str) -> Markup:
    """Return the SVG document as an element of the page: its colours and font, ids of its own."""
    root = ElementTree.fromstring(document)
    for parent in list(root.iter()):
        for child in list(parent):
            # The style sheet would apply to the whole page, and the metadata is about matplotlib.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(key): _in_page(_local(key), value, name) for key, value in element.items()
        }
    root.attrib = {
        "class": "plot",
        "role": "img",
        "aria-label": label,
        "viewBox": root.attrib["viewBox"],
    }
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _local(qualified: str) -> str:
    return qualified.rpartition("}")[2]


def _in_page(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "style":
        for colour, stand_in in STAND_IN.items():
            value = value.replace(stand_in, f"var(--{colour})")
        return value
    return re.sub(r"^(url\()?#", rf"\g<0>{name}-", value)  # clip-path and href


def _short(name: str) -> str:
    """Return a name as one line of characters that XML allows, not too long."""
    line = " ".join("".join(char if char.isprintable() else " " for char in name).split())
    return line if len(line) <= LABEL_LIMIT else f"{line[: LABEL_LIMIT - 1]}…"


def legend(axes: Axes, items: Mapping[str, Patch | Line2D]) -> None:
    """Explain above the picture what each mark stands for."""
    names = [_short(name) for name in items]
    columns = len(names) if sum(map(len, names)) <= LEGEND_LIMIT else 2
    assert axes.figure is not None
    axes.figure.legend(items.values(), names, loc="outside upper left", ncols=columns)


def _patch(colour: str) -> Patch:
    return Patch(facecolor=STAND_IN[colour])


def _kinds(rows: Mapping[str, object], drafter: str) -> dict[str, str]:
    others = [method for method in rows if method != drafter]
    return {
        drafter: "drafter",
        **dict(zip(others, ["other", *["third"] * len(others)], strict=False)),
    }


def rows_axis(axes: Axes, names: Sequence[str], highest: float, unit: str) -> None:
    """Give the picture one row per name, from the top, and a scale from 0 below them."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.tick_params(axis="y", labelcolor=STAND_IN["ink"], pad=8)
    for name, tick in zip(names, axes.get_yticklabels(), strict=True):
        tick.set_fontweight("bold" if name == "all" else "normal")
    axes.set_xlim(0, highest * 1.02 or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit, loc="right")


def height_of(names: Collection[str], bars: int) -> int:
    """Return what rows of so many bars need, with the legend above and the scale below."""
    return 74 + (12 + 12 * bars) * len(names)


def beside(axes: Axes, x: Number, y: Number, words: str, **look: Any) -> None:
    """Write to the right of a point."""
    axes.annotate(words, (x, y), (5, 0), textcoords="offset points", va="center_baseline", **look)


def bounds(values: Sequence[Number], ends: Sequence[Number]) -> tuple[float, float]:
    """Return from where to where an axis goes that shows every value.

    An end of an interval far beyond the values does not stretch it: the other intervals would be
    too short to see. It is cut (`cut_interval`); the number stands beside it.
    """
    low, high = float(min(values)), float(max(values))
    room = FAR * max(high - low, 0.25 * abs(high), 1e-9)
    return max(min([low, *ends]), low - room), min(max([high, *ends]), high + room)


def cut_interval(
    axes: Axes, ci95: Sequence[Number], y: Number, kind: str, shown: tuple[float, float]
) -> None:
    """Draw an interval, with an arrow where it goes on beyond the axis."""
    low, high = max(ci95[0], shown[0]), min(ci95[1], shown[1])
    look: dict[str, Any] = {"color": STAND_IN[kind], "alpha": 0.55}
    axes.plot([low, high], [y, y], linewidth=2.5, **look)
    for end, at, mark in ((ci95[0], low, "<"), (ci95[1], high, ">")):
        if end != at:
            axes.plot(at, y, mark, clip_on=False, markersize=6, **look)


def speedup_plot(rows: Mapping[str, Mapping[str, Row]], drafter: str) -> Markup:
    """Return measured speedup by task with intervals, the predicted one beside it.

    `rows` are by method, then by task or "all".
    """
    names, kinds = list(rows[drafter]), _kinds(rows, drafter)

    def draw(axes: Axes) -> None:
        every = [rows[method][name] for method in kinds for name in names]
        values = [row["speedup"]["value"] or 0.0 for row in every]
        values += [row["predicted_speedup"] or 0.0 for row in every]
        ends = [end for row in every for end in row["speedup"]["ci95"] or []]
        shown = (0.0, bounds([0.0, 1.0, *values], ends)[1])
        for place, (method, kind) in enumerate(kinds.items()):
            for index, name in enumerate(names):
                row = rows[method][name]
                value, ci95 = row["speedup"]["value"], row["speedup"]["ci95"]
                predicted = row["predicted_speedup"]
                y = index + (place - (len(kinds) - 1) / 2) * 0.32
                if ci95:
                    cut_interval(axes, ci95, y, kind, shown)
                if value is not None:
                    axes.plot(value, y, "o", color=STAND_IN[kind])
                if predicted is not None:
                    axes.plot(predicted, y, **hollow(kind))
        rows_axis(axes, names, shown[1], "times plain decoding, 95 % interval")
        axes.axvline(1.0, color=STAND_IN["ink"], linewidth=1.25, linestyle=(0, (4, 3)), zorder=1)
        for index, name in enumerate(names):
            words = estimate(rows[drafter][name]["speedup"])
            weight = "bold" if name == "all" else "normal"
            across = axes.get_yaxis_transform()
            beside(axes, 1.0, index, words, xycoords=across, fontweight=weight)
        dots = {
            method: Line2D([], [], color=STAND_IN[kind], marker="o", linewidth=2.5)
            for method, kind in kinds.items()
        }
        legend(axes, {**dots, "predicted": Line2D([], [], **hollow("soft"))})

    height = height_of(names, bars=1 + len(kinds))
    return picture("speedup", "Speedup over plain decoding by task", height, draw)


def hollow(kind: str) -> dict[str, Any]:
    """Return the look of a second, lesser mark."""
    return {
        "marker": "D",
        "linestyle": "",
        "markerfacecolor": "none",
        "markeredgecolor": STAND_IN[kind],
        "markeredgewidth": 1.5,
    }


def acceptance_plot(rows: Mapping[str, Row], drafter: str) -> Markup:
    """Return acceptance per position as bars, the drafter's conditional acceptance as a line."""
    kinds = _kinds(rows, drafter)
    depth = max(len(row["acceptance_per_position"]) for row in rows.values())
    width = 0.68 / len(kinds)
    labelled = WIDTH * width / depth >= 26.0

    def draw(axes: Axes) -> None:
        for place, (method, kind) in enumerate(kinds.items()):
            for position, rate in _known(rows[method]["acceptance_per_position"]):
                x = position + (place - (len(kinds) - 1) / 2) * width
                axes.bar(x, rate, width * 0.94, color=STAND_IN[kind])
                if labelled:  # at the foot, out of the line's way
                    inside = rate > 0.09
                    axes.annotate(
                        f"{100 * rate:.0f}",
                        (x, 0.0 if inside else rate),
                        (0, 5 if inside else 3),
                        textcoords="offset points",
                        ha="center",
                        fontsize=11,
                        color=STAND_IN["on-bar" if inside else "ink"],
                    )
        points = _known(rows[drafter]["conditional_acceptance"])
        line: dict[str, Any] = {"color": STAND_IN["conditional"], "linewidth": 2, "marker": "o"}
        axes.plot([x for x, _ in points], [rate for _, rate in points], clip_on=False, **line)
        for x, rate in points:
            axes.annotate(
                f"{100 * rate:.0f}",
                (x, rate),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=11,
                fontweight="bold",
                color=STAND_IN["conditional"],
                gid=f"halo-{x}",  # the style sheet gives it one
            )
        axes.set_xlim(0.5, depth + 0.5)
        axes.set_ylim(0.0, 1.0)
        axes.set_xticks(range(1, depth + 1, math.ceil(depth / 16)))
        axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("drafted token", loc="right")
        bars = {method: _patch(kind) for method, kind in kinds.items()}
        legend(axes, {**bars, "conditional": Line2D([], [], **line)})

    return picture("acceptance", "Share of drafted tokens accepted, by position", 290, draw)


def _known(rates: Sequence[Number | None]) -> list[tuple[int, Number]]:
    """Return (position, rate) of the positions that have one; positions count from 1."""
    return [(position, rate) for position, rate in enumerate(rates, start=1) if rate is not None]


def time_plot(rows: Mapping[str, Row], plain: Row, drafter: str) -> Markup:
    """Return the time of one cycle, stacked, beside one plain step."""
    bars = {"plain step": plain["time_ms"]}
    bars |= {f"{method} cycle": rows[method]["time_ms"] for method in _kinds(rows, drafter)}
    totals = [sum(times[stage] or 0.0 for stage in STAGES) for times in bars.values()]

    def draw(axes: Axes) -> None:
        for index, times in enumerate(bars.values()):
            left = 0.0
            for stage, colour in STAGES.items():
                spent = times[stage] or 0.0
                axes.barh(index, spent, 0.62, left, color=STAND_IN[colour])
                if spent > 0.1 * max(totals):
                    axes.annotate(
                        number(spent),
                        (left + spent / 2, index),
                        ha="center",
                        va="center_baseline",
                        fontsize=11,
                        color=STAND_IN["ink" if stage == "other" else "on-bar"],
                    )
                left += spent
            beside(axes, left, index, f"{number(left)} ms", fontweight="bold")
        rows_axis(axes, list(bars), max(totals), "milliseconds per target pass")
        legend(axes, {stage: _patch(colour) for stage, colour in STAGES.items()})

    return picture("time", "Time of one cycle beside one plain step", height_of(bars, bars=3), draw)


def speed_plot(rows: Mapping[str, Mapping[str, Row]], drafter: str) -> Markup:
    """Return tokens per second by task: plain, with the drafter, with the other methods."""
    names, kinds = list(rows[drafter]), _kinds(rows, drafter)
    plain = [rows[drafter][name]["tokens_per_second"]["autoregressive"] for name in names]
    bars = [("plain decoding", "plain", plain)]
    for method, kind in kinds.items():
        fast = [rows[method][name]["tokens_per_second"]["speculative"] for name in names]
        bars.append((method, kind, fast))
    thick = 0.84 / len(bars)

    def draw(axes: Axes) -> None:
        for place, (_, kind, values) in enumerate(bars):
            for index, value in enumerate(values):
                y = index + (place - (len(bars) - 1) / 2) * thick
                axes.barh(y, value or 0.0, thick * 0.86, color=STAND_IN[kind])
                words = speed(value)
                beside(axes, value or 0.0, y, words, fontsize=10, color=STAND_IN["soft"])
        highest = max(value or 0.0 for _, _, values in bars for value in values)
        rows_axis(axes, names, highest, "tokens per second")
        legend(axes, {method: _patch(kind) for method, kind, _ in bars})

    height = height_of(names, len(bars))
    return picture("speed", "Tokens per second by task", height, draw)
