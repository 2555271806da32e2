"""Figures of pages: drawn by matplotlib, as inline SVG in the page's colours."""

import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import get_named_colors_mapping
from matplotlib.figure import Figure as Canvas
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from drafttrain.report.phrases import cell, count, number, sentence, speed
from drafttrain.report.results import (
    PLAIN,
    Estimate,
    Example,
    MethodRow,
    OutputBin,
    Point,
    Report,
    TrainingCurves,
)
from drafttrain.report.tables import best_depths

WIDTH = 440.0  # in the units of the SVG; the page scales it to its column
DPI = 72  # what the SVG backend assumes: one point is one unit
STYLE_SHEET = Path(__file__).parent / "templates" / "page.css"
LABEL_LIMIT = 20  # characters of a name; the tables have the rest

# Names of the page's CSS variables. matplotlib draws with stand-in colours, which are replaced by
# the variables, so that the page decides the colours, light or dark.
COLOURS = [
    "ink", "soft", "faint", "edge", "on-bar", "drafter", "other", "plain", "conditional", "draft",
    "verify", "rest", "third",
]  # fmt: skip
STAND_IN = {name: f"#0000{place:02x}" for place, name in enumerate(COLOURS, start=1)}
STAGES = {"draft": "draft", "verify": "verify", "other": "rest"}
KINDS = ("drafter", "other", "third", "conditional", "verify", "plain")  # in the order of the rows
MARKS = "osD^vP*X"
DASHED: dict[str, Any] = {"linewidth": 1.25, "linestyle": (0, (4, 3)), "zorder": 1}
HOLLOW: dict[str, Any] = {  # a second, lesser mark
    "marker": "D",
    "markersize": 6,
    "linestyle": "",
    "markerfacecolor": "none",
    "markeredgewidth": 1.5,
}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text; the style sheet gives it the font of the page
    "font.family": "DejaVu Sans",  # comes with matplotlib: text sizes are the same everywhere
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


@dataclass(frozen=True)
class Figure:
    """What `draw` draws, for a page or as pixels; Markdown leaves it out."""

    title: str
    caption: str
    height: int
    draw: Callable[[Axes], None]

    @property
    def name(self) -> str:
        """The title as a part of ids, which makes them unique on the page."""
        return re.sub("[^a-z0-9]+", "-", self.title.lower())

    def __html__(self) -> str:
        """Return it as an inline SVG in the colours and the font of the page that it is in."""
        text = self._saved("svg", transparent=True, metadata={"Date": None}).decode()
        return _inline(text, self.name, self.title)

    def pixels(self) -> np.ndarray:
        """Return it in the light colours of a page: bytes, "height width 3"."""
        light = dict(re.findall(r"--([\w-]+): (#\w+);", STYLE_SHEET.read_text().partition("}")[0]))
        names = get_named_colors_mapping()  # matplotlib looks here before it reads a #rrggbb
        try:
            for name, stand_in in STAND_IN.items():
                names[stand_in] = light[name]
            image = imread(io.BytesIO(self._saved("png", dpi=2 * DPI)))
        finally:
            for stand_in in STAND_IN.values():
                del names[stand_in]
        return np.round(255 * image[..., :3]).astype(np.uint8)

    def _saved(self, form: str, **how: Any) -> bytes:
        content = io.BytesIO()
        look = {**STYLE, "svg.hashsalt": self.name}
        # After a reset, which ignores the user's matplotlibrc.
        with style.context(look, after_reset=True), warnings.catch_warnings():
            # Sizes are estimated with matplotlib's font; the browser has one for every script.
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
            figure = Canvas(figsize=(WIDTH / DPI, self.height / DPI), dpi=DPI)
            self.draw(figure.subplots())
            figure.savefig(content, format=form, **how)
        return content.getvalue()


def _inline(document: str, name: str, label: str) -> Markup:
    """Return the SVG document as an element of the page, with its colours and font, unique ids."""
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
    """Return a name as one short line of characters that XML allows."""
    line = " ".join("".join(char if char.isprintable() else " " for char in name).split())
    return line if len(line) <= LABEL_LIMIT else f"{line[: LABEL_LIMIT - 1]}…"


def legend(axes: Axes, items: Mapping[str, Patch | Line2D]) -> None:
    """Draw a legend above the picture."""
    if not items:
        return
    names = [_short(name) for name in items]
    columns = len(names) if sum(map(len, names)) <= 50 else 2  # short names fit in one line
    assert axes.figure is not None
    axes.figure.legend(items.values(), names, loc="outside upper left", ncols=columns)


def patches(colours: Mapping[str, str]) -> dict[str, Patch | Line2D]:
    """Return legend entries: a filled patch for each colour."""
    return {name: Patch(facecolor=STAND_IN[colour]) for name, colour in colours.items()}


def weight(name: str) -> str:
    """Return the font weight of a row's texts."""
    return "bold" if name == "all" else "normal"


def rows_axis(axes: Axes, names: Sequence[str], highest: float, unit: str) -> None:
    """Give the picture one row per name, from the top, and a scale from 0 below them."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.tick_params(axis="y", labelcolor=STAND_IN["ink"], pad=8)
    for name, tick in zip(names, axes.get_yticklabels(), strict=True):
        tick.set_fontweight(weight(name))
    axes.set_xlim(0, highest * 1.02 or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit, loc="right")


def height_of(names: Collection[str], bars: int) -> int:
    """Return the height of rows of `bars` bars each, with the legend above and the scale below."""
    return 74 + (12 + 12 * bars) * len(names)


def write(
    axes: Axes, x: float, y: float, words: str, shift: tuple[int, int] = (5, 0), **look: Any
) -> None:
    """Write next to a point: to its right, or shifted by `shift`."""
    look = {"va": "center_baseline", **look}
    axes.annotate(words, (x, y), shift, textcoords="offset points", **look)


def bounds(values: Sequence[float], ends: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis that shows every value.

    An interval that ends far beyond the values does not stretch the axis: the other intervals would
    be too short to see. It is cut (`cut_interval`), with its number next to it.
    """
    low, high = min(values), max(values)
    room = 0.6 * max(high - low, 0.25 * abs(high), 1e-9)
    return max(min([low, *ends]), low - room), min(max([high, *ends]), high + room)


def cut_interval(
    axes: Axes,
    ci95: Sequence[float],
    across: float,
    colour: str,
    span: tuple[float, float],
    along: str = "x",
) -> None:
    """Draw an interval along an axis, with an arrow where it continues beyond its end."""
    low, high = max(ci95[0], span[0]), min(ci95[1], span[1])
    look: dict[str, Any] = {"color": colour, "alpha": 0.55}
    arrows = "<>" if along == "x" else "v^"

    def draw(*ends: float, **how: Any) -> None:
        pair = (ends, [across] * len(ends))
        axes.plot(*(pair if along == "x" else pair[::-1]), **how, **look)

    draw(low, high, linewidth=2.5)
    for end, at, mark in ((ci95[0], low, arrows[0]), (ci95[1], high, arrows[1])):
        if end != at:
            draw(at, marker=mark, clip_on=False, markersize=6)


@dataclass(frozen=True)
class Series:
    """The data drawn in one colour: values by row with their intervals, and lesser marks."""

    name: str
    colour: str
    mark: str
    values: Mapping[str, Estimate]
    lesser: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


def dots(
    title: str,
    caption: str,
    series: Sequence[Series],
    unit: str,
    *,
    even: float,
    from_zero: bool = True,
    lesser: str = "",
) -> Figure:
    """Return a figure of values as dots on their intervals, with a line at no gain (`even`).

    Several series on a row are drawn below each other. The first one's values are written next to
    it, unless they could be mistaken for another's. lesser: the legend of the lesser marks.
    """
    rows = list(dict.fromkeys(row for one in series for row in one.values))
    on = {row: [one for one in series if row in one.values] for row in rows}
    alone = all(len(sharing) == 1 for sharing in on.values())
    known = [value for one in series for value in one.values.values() if value.value is not None]
    points = [0.0, even, *(value.value for value in known if value.value is not None)]
    points += [p for one in series for marks in one.lesser.values() for p in marks if p is not None]
    low, high = bounds(points, [end for value in known for end in value.ci95 or []])
    low = 0.0 if from_zero else low

    def draw(axes: Axes) -> None:
        for index, (row, sharing) in enumerate(on.items()):
            for place, one in enumerate(sharing):
                y = index + (place - (len(sharing) - 1) / 2) * min(0.32, 0.72 / len(sharing))
                value, colour = one.values[row], STAND_IN[one.colour]
                if value.value is not None:
                    if value.ci95:
                        cut_interval(axes, value.ci95, y, colour, (low, high))
                    axes.plot(value.value, y, one.mark, color=colour)
                for mark in one.lesser.get(row, ()):
                    if mark is not None:
                        axes.plot(mark, y + 0.26 * alone, **HOLLOW, markeredgecolor=colour)
            if alone or from_zero:
                at, words = axes.get_yaxis_transform(), cell(sharing[0].values[row])
                write(axes, 1.0, index, words, xycoords=at, fontweight=weight(row))
        rows_axis(axes, rows, high, unit)
        if not from_zero:
            room = 0.04 * (high - low) or 1.0
            axes.set_xlim(low - room, high + room)
        axes.axvline(even, color=STAND_IN["ink"], **DASHED)
        marks = {
            one.name: Line2D([], [], color=STAND_IN[one.colour], marker=one.mark, linewidth=2.5)
            for one in series
            if not (alone and len(series) > 1)  # else the row labels name the series
        }
        if lesser and any(one.lesser for one in series):
            marks[lesser] = Line2D([], [], **HOLLOW, markeredgecolor=STAND_IN["soft"])
        legend(axes, marks)

    height = height_of(rows, bars=1 if alone else 1 + len(series))
    return Figure(title, caption, height + 18 * max(0, (len(series) + 1) // 2 - 2), draw)


def stacked(
    title: str,
    caption: str,
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str,
    *,
    digits: int = 2,
    end: float | None = None,
    limit: float | None = None,
) -> Figure:
    """Return a figure of stacked bars, one per row; parts without a colour are "the rest".

    end: where bars are cut; their numbers stay true. limit: drawn as a dashed line.
    """
    end = end or max(sum(parts.values()) for parts in bars.values())
    rest = {part: "rest" for parts in bars.values() for part in parts if part not in colours}

    def draw(axes: Axes) -> None:
        rows_axis(axes, list(bars), end, unit)
        for index, parts in enumerate(bars.values()):
            left = 0.0
            for part, colour in {**colours, **rest}.items():
                width = min(parts.get(part, 0.0), max(end - left, 0.0))
                axes.barh(index, width, 0.62, left, color=STAND_IN[colour])
                if limit is None and width > 0.1 * end:
                    words, middle = number(width, digits), left + width / 2
                    look = {"color": STAND_IN["ink" if colour == "rest" else "on-bar"]}
                    write(axes, middle, index, words, (0, 0), ha="center", fontsize=11, **look)
                left += width
            write(axes, left, index, number(sum(parts.values()), digits), fontweight="bold")
        if limit is not None:
            axes.axvline(limit, color=STAND_IN["ink"], **DASHED)
        legend(axes, patches({**colours, **({"the rest": "rest"} if rest else {})}))

    height = height_of(bars, bars=2) + 22 * ((len(colours) + 1) // 2)
    return Figure(title, caption, height, draw)


def memory_figure(ways: Mapping[str, Mapping[str, float]], limit: float) -> Figure:
    """Return a figure of memory in GiB by component: a bar per way to shard, and the limit."""
    sizes = {name: max(way[name] for way in ways.values()) for name in next(iter(ways.values()))}
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    parts = {way: {name: of[name] for name in largest} for way, of in ways.items()}
    # A bar that far exceeds the limit is cut, but its number is true.
    end = min(max(limit, *(sum(of.values()) for of in parts.values())), 1.5 * limit)
    caption = (
        "Of one accelerator, for every deepspeed=..., with the target where it was asked for. The "
        "dashed line is what there is."
    )
    colours = dict(zip(largest, KINDS, strict=False))
    how: dict[str, Any] = {"digits": 1, "end": end, "limit": limit}
    return stacked("Memory by component", caption, parts, colours, "GiB", **how)


def report_figures(report: Report) -> list[Figure]:
    """Return the figures of a report, for what was measured only."""
    rows = {method: found.by_name for method, found in report.drafting.items()}
    colours = dict(zip(rows, ("drafter", "other", *["third"] * len(rows)), strict=False))
    summaries = {method: found["all"] for method, found in rows.items()}
    main, plain = summaries[report.drafter], report.methods[PLAIN].summary
    found: list[Figure] = []
    if any(row.speedup.value for row in summaries.values()):
        series = [
            Series(
                method,
                colours[method],
                "o",
                {name: row.speedup.estimate for name, row in by_name.items()},
                {name: [row.predicted_speedup] for name, row in by_name.items()},
            )
            for method, by_name in rows.items()
        ]
        caption = (
            "Tokens per second over the plain loop's; the dashed line is no gain. Predicted: from "
            "acceptance length and the times of a cycle."
        )
        unit = "times plain decoding, 95 % interval"
        found.append(dots("Speedup by task", caption, series, unit, even=1.0, lesser="predicted"))
        found.append(speed_figure(rows, colours))
    if any(row.num_drafts for row in summaries.values()):
        found.append(acceptance_figure(summaries, colours))
    if report.along_output:
        found.append(along_figure(report.along_output))
    if report.examples:
        found.append(time_figure(report.examples, report.drafter))
    if len({point.depth for point in report.sweep}) > 1:
        found.append(
            depth_figure(
                [
                    (p.temperature, p.batch_size, p.depth, p.summary.speedup.value,
                     p.summary.predicted_speedup)
                    for p in report.sweep
                ]
            )
        )  # fmt: skip
    if len({point.batch_size for point in report.sweep}) > 1:
        found.append(batch_figure(report.sweep))
    if plain.num_target_passes:
        times = {"plain step": plain.time_ms}
        times |= {f"{method} cycle": row.time_ms for method, row in summaries.items()}
        bars = {
            name: {stage: getattr(time, stage) or 0.0 for stage in STAGES}
            for name, time in times.items()
        }
        caption = (
            f"A draft yields {number(main.acceptance_length.micro)} tokens, a plain step one: "
            f"predicted speedup {number(main.predicted_speedup)}, measured "
            f"{number(main.speedup.value)} with prefill and the loop's own time."
        )
        unit = f"milliseconds per {'row and ' * (report.batch_size > 1)}target pass"
        found.append(stacked("Where a cycle's time goes", caption, bars, STAGES, unit))
    if report.training is not None:
        found.append(training_figure(report.training))
    return found


def along_figure(bins: Sequence[OutputBin]) -> Figure:
    """Return a figure of accepted tokens per draft along the output."""
    values = [one.accepted_per_draft.value or 0.0 for one in bins]
    middles = [(one.first + one.last + 1) / 2 for one in bins]
    ends = [end for one in bins for end in one.accepted_per_draft.ci95 or []]
    _, high = bounds([0.0, *values], ends)

    def draw(axes: Axes) -> None:
        colour = STAND_IN["drafter"]
        axes.plot(middles, values, color=colour, marker="o", linewidth=1.5, markersize=6)
        for x, one in zip(middles, bins, strict=True):
            if one.accepted_per_draft.ci95:
                cut_interval(axes, one.accepted_per_draft.ci95, x, colour, (0.0, high), "y")
            look: dict[str, Any] = {"fontsize": 10, "color": STAND_IN["soft"], "ha": "center"}
            words = f"{one.num_drafts:,}"
            at = axes.get_xaxis_transform()
            write(axes, x, 1.0, words, (0, 4), xycoords=at, va="bottom", **look)
        axes.set_xlim(0, bins[-1].last + 1)
        axes.set_ylim(0, high * 1.05 or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.set_xlabel("position in the output, tokens", loc="right")
        axes.set_ylabel("accepted tokens per draft")

    caption = (
        "Accepted tokens per draft with 95 % intervals, by the position at which the draft began. "
        "Numbers on top: drafts in the bin."
    )
    return Figure("Acceptance along the output", caption, 290, draw)


def time_figure(examples: Sequence[Example], drafter: str) -> Figure:
    """Return a figure of tokens against time of example outputs, plain and drafted."""
    looks: dict[str, dict[str, Any]] = {
        drafter: {"color": STAND_IN["drafter"], "linewidth": 2},
        "plain decoding": {"color": STAND_IN["plain"], "linewidth": 2, "linestyle": "--"},
    }

    def draw(axes: Axes) -> None:
        for place, example in enumerate(examples, start=1):
            both = zip(looks.values(), (example.drafted, example.plain), (5, -5), strict=True)
            for look, times, up in both:
                axes.plot(times.seconds, times.tokens, **look)
                end = times.seconds[-1], times.tokens[-1]
                write(axes, *end, str(place), (5, up), fontsize=11, color=STAND_IN["ink"])
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds after the prefill", loc="right")
        axes.set_ylabel("tokens of the output")
        legend(axes, {name: Line2D([], [], **look) for name, look in looks.items()})

    caption = (
        "The example outputs below, by their numbers: a plain pass yields one token, a pass with a "
        "draft several."
    )
    return Figure("Tokens against time", caption, 290, draw)


def training_figure(curves: TrainingCurves) -> Figure:
    """Return a figure of the loss by step, and on a second axis what validation measured."""
    loss, *validations = curves.series

    def draw(axes: Axes) -> None:
        looks = [("plain", "", "-"), ("drafter", "o", "-"), ("third", "D", "--")]
        names: dict[str, Patch | Line2D] = {}
        right = axes.twinx() if validations else axes
        right.grid(visible=False)
        for one, (colour, mark, line) in zip(curves.series, looks, strict=False):
            look: dict[str, Any] = {"color": STAND_IN[colour], "marker": mark, "linestyle": line}
            look |= {"markersize": 6, "linewidth": 2}
            (axes if one is loss else right).plot(one.steps, one.values, **look)
            names[one.name.partition("/")[2].replace("_", " ")] = Line2D([], [], **look)
        if curves.checkpoint_step is not None:
            axes.axvline(curves.checkpoint_step, color=STAND_IN["ink"], **DASHED)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("loss")
        if validations:
            right.set_ylim(bottom=0)
            right.set_ylabel("tokens per target pass")
        axes.set_xlabel(f"optimizer step ({count(loss.tokens[-1])} tokens at the end)", loc="right")
        legend(axes, names)

    units = "".join(f" Validation ({one.name}): {one.unit}." for one in validations)
    caption = f"{sentence(curves.statement)}{units}"
    if curves.checkpoint_step is not None:
        caption += " Dashed: the evaluated checkpoint."
    return Figure("Training", caption, 300, draw)


def acceptance_figure(rows: Mapping[str, MethodRow], kinds: Mapping[str, str]) -> Figure:
    """Return acceptance per position as bars, the drafter's conditional acceptance as a line."""
    depth = max(len(row.acceptance_per_position) for row in rows.values())
    drafter = next(iter(rows.values()))
    width = 0.68 / len(kinds)
    labelled = WIDTH * width / depth >= 26.0
    words: dict[str, Any] = {"ha": "center", "va": "baseline", "fontsize": 11}

    def known(rates: Sequence[float | None]) -> list[tuple[int, float]]:
        return [(at, rate) for at, rate in enumerate(rates, start=1) if rate is not None]

    def draw(axes: Axes) -> None:
        for place, (method, kind) in enumerate(kinds.items()):
            for position, rate in known(rows[method].acceptance_per_position):
                x = position + (place - (len(kinds) - 1) / 2) * width
                axes.bar(x, rate, width * 0.94, color=STAND_IN[kind])
                if labelled:  # at the foot of the bar, clear of the line
                    foot, shift, colour = (0.0, 5, "on-bar") if rate > 0.09 else (rate, 3, "ink")
                    look = {**words, "color": STAND_IN[colour]}
                    write(axes, x, foot, f"{100 * rate:.0f}", (0, shift), **look)
        line: dict[str, Any] = {"color": STAND_IN["conditional"], "linewidth": 2, "marker": "o"}
        points = known(drafter.conditional_acceptance)
        axes.plot([x for x, _ in points], [rate for _, rate in points], clip_on=False, **line)
        for x, rate in points:
            look = {**words, "fontweight": "bold", "color": STAND_IN["conditional"]}
            look["gid"] = f"halo-{x}"  # the style sheet draws a halo
            write(axes, x, rate, f"{100 * rate:.0f}", (0, 7), **look)
        axes.set_xlim(0.5, depth + 0.5)
        axes.set_ylim(0.0, 1.0)
        axes.set_xticks(range(1, depth + 1, math.ceil(depth / 16)))
        axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("drafted token", loc="right")
        legend(axes, {**patches(kinds), "conditional": Line2D([], [], **line)})

    caption = (
        "Bars: share of all drafts, in percent. Line, conditional: share of the drafts that got so "
        "far."
    )
    return Figure("Acceptance by position", caption, 290, draw)


def speed_figure(rows: Mapping[str, Mapping[str, MethodRow]], kinds: Mapping[str, str]) -> Figure:
    """Return tokens per second by task: plain, with the drafter, with the other methods."""
    drafter = next(iter(rows.values()))
    bars = {"plain decoding": [r.tokens_per_second.autoregressive for r in drafter.values()]} | {
        method: [by_name[name].tokens_per_second.speculative for name in drafter]
        for method, by_name in rows.items()
    }
    colours = {"plain decoding": "plain", **kinds}
    thick = 0.84 / len(bars)

    def draw(axes: Axes) -> None:
        for place, (method, values) in enumerate(bars.items()):
            for index, value in enumerate(values):
                y = index + (place - (len(bars) - 1) / 2) * thick
                axes.barh(y, value or 0.0, thick * 0.86, color=STAND_IN[colours[method]])
                look: dict[str, Any] = {"fontsize": 10, "color": STAND_IN["soft"]}
                write(axes, value or 0.0, y, speed(value), **look)
        highest = max(value or 0.0 for values in bars.values() for value in values)
        rows_axis(axes, list(drafter), highest, "tokens per second")
        legend(axes, patches(colours))

    caption = "Prefill included; each pass counts at the median of its kind."
    return Figure("Tokens per second", caption, height_of(drafter, len(bars)), draw)


def depth_figure(points: Sequence[tuple[float, int, int, float | None, float | None]]) -> Figure:
    """Return a figure of speedup by depth, a line for each temperature and batch size.

    points: temperature, batch size, depth, measured and predicted speedup.
    """
    lines: dict[tuple[float, int], list[tuple[int, float | None, float]]] = {}
    for temperature, size, depth, value, predicted in sorted(points, key=lambda point: point[:3]):
        lines.setdefault((temperature, size), []).append((depth, value, predicted or 0.0))
    several = len({temperature for temperature, _ in lines}) > 1

    def draw(axes: Axes) -> None:
        for place, ((temperature, size), line) in enumerate(lines.items()):
            depths, values, expected = zip(*line, strict=True)
            look: dict[str, Any] = {"color": STAND_IN["drafter"]}
            look["alpha"] = 1 - 0.7 * place / max(len(lines) - 1, 1)
            solid: dict[str, Any] = {
                "linewidth": 2,
                "marker": MARKS[place % len(MARKS)],
                "markersize": 6,
            }
            name = f"batch {size}" + (f", T {temperature:g}" if several else "")
            axes.plot(depths, expected if None in values else values, label=name, **look, **solid)
            axes.plot(depths, expected, linestyle="--", linewidth=1, **look)
        axes.set_xticks(sorted({point[2] for point in points}))
        assert axes.figure is not None
        axes.figure.legend(loc="outside upper left", ncols=4)
        gain_axes(axes, "depth: drafted tokens a cycle", "speedup")

    caption = (
        "Solid: measured. Dashed: predicted from acceptance length and the times of a cycle. "
        "Dotted: no gain."
    )
    return Figure("Speedup by depth", caption, 300, draw)


def batch_figure(points: Sequence[Point]) -> Figure:
    """Return a figure of the best depth's speedup by batch size, with its interval."""
    best = {place: chosen["all"] for place, chosen in best_depths(points).items()}
    temperatures = list(dict.fromkeys(temperature for temperature, _ in best))
    speedups = [point.summary.speedup for point in best.values()]
    known = [0.0, 1.0, *(speedup.value or 0.0 for speedup in speedups)]
    _, highest = bounds(known, [end for speedup in speedups for end in speedup.ci95 or []])

    def draw(axes: Axes) -> None:
        for place, temperature in enumerate(temperatures):
            here = {str(size): best[t, size] for t, size in sorted(best) if t == temperature}
            found = [point.summary.speedup for point in here.values()]
            values = [speedup.value or 0.0 for speedup in found]
            ends = [speedup.ci95 or [speedup.value or 0.0] * 2 for speedup in found]
            look: dict[str, Any] = {"color": STAND_IN["drafter"], "marker": MARKS[place]}
            look["alpha"] = 1 - 0.5 * place / len(temperatures)
            axes.plot(list(here), values, **look)
            for at, ci95 in enumerate(ends):
                cut_interval(axes, ci95, at, STAND_IN["drafter"], (0.0, highest), "y")
            for (x, point), value in zip(here.items(), values, strict=True):
                told: dict[str, Any] = {"fontsize": 10, "color": STAND_IN["soft"], "va": "bottom"}
                axes.annotate(f"  depth {point.depth}", (x, value), **told)
        axes.margins(x=0.15)
        gain_axes(axes, "prompts decoded together", "speedup of the best depth")

    caption = (
        "At the depth that is fastest for the batch, with 95 % intervals. Where it meets the "
        "dotted line, speculation stops paying."
    )
    return Figure("Speedup by batch size", caption, 300, draw)


def gain_axes(axes: Axes, x: str, y: str) -> None:
    """Label the axes, and draw the line of no gain."""
    # Closer dots look like a thin line.
    axes.axhline(1.0, color=STAND_IN["soft"], linestyle=(0, (1, 2.5)), linewidth=1.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
