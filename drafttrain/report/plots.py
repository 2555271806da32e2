"""Figures of pages: drawn by matplotlib, as inline SVG in the page's colours."""

import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from drafttrain.report.phrases import cell, count, number, sentence, speed
from drafttrain.report.results import PLAIN, Estimate, Example, MethodRow, Report, TrainingCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 440.0  # in the units of the SVG; the page scales it to its column
DPI = 72  # what the SVG backend assumes: one point is one unit
STYLE_SHEET = Path(__file__).parent / "templates" / "page.css"
LABEL_LIMIT = 20  # characters of a name; the tables have the rest

# The colours of a light page by the names of its CSS variables, which replace them in an SVG.
COLOURS = dict(re.findall(r"--([\w-]+): (#\w+);", STYLE_SHEET.read_text().partition("}")[0]))
VARIABLES = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
STAGES = {"draft": "drafter", "verify": "verify", "other": "rest"}
KINDS = ("drafter", "other", "third", "conditional", "verify", "plain")  # in the order of the rows
MARKS = "osD^vP*X"
DASHED: dict[str, Any] = {
    "color": COLOURS["ink"],
    "linewidth": 1.25,
    "linestyle": (0, (4, 3)),
    "zorder": 1,
}
BAND: dict[str, Any] = {"linewidth": 2.5, "alpha": 0.55}  # an interval
HOLLOW: dict[str, Any] = {  # a second, lesser mark
    "marker": "D",
    "markersize": 6,
    "linestyle": "",
    "markerfacecolor": "none",
    "markeredgewidth": 1.5,
}
SMALL: dict[str, Any] = {"fontsize": 10, "color": COLOURS["soft"]}  # text beside a mark

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text; the style sheet gives it the font of the page
    "font.family": "DejaVu Sans",  # comes with matplotlib: text sizes are the same everywhere
    "text.parse_math": False,  # a dollar in a task's name is a dollar
    "font.size": 12,
    "lines.markersize": 8,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["faint"],
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": COLOURS["edge"],
    "grid.linewidth": 1,
    "xtick.color": COLOURS["faint"],
    "ytick.color": COLOURS["faint"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.6,
    "xaxis.labellocation": "right",
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
    draw: Callable[["Axes"], None]

    @property
    def name(self) -> str:
        """The title as a part of ids, which makes them unique on the page."""
        return re.sub("[^a-z0-9]+", "-", self.title.lower())

    def __html__(self) -> str:
        """Return it as an inline SVG in the colours and the font of the page that it is in."""
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        text = self._saved("svg", transparent=True, metadata=nothing).decode()
        # Its style sheet would apply to the whole page.
        text = re.sub("<style.*?</style>", "", text, flags=re.DOTALL)
        text = re.sub(r'( id="|="#|url\(#)', rf"\g<1>{self.name}-", text.replace("xlink:", ""))
        text = re.sub("(?<=: )#[0-9a-f]{6}", lambda found: VARIABLES.get(found[0], found[0]), text)
        head = '<svg class="plot" role="img" aria-label="{}" viewBox="0 0 {:g} {}">'
        head = Markup(head).format(self.title, WIDTH, self.height)
        return Markup(f"{head}{re.split('<svg[^>]*>', text, maxsplit=1)[1]}")

    def pixels(self) -> np.ndarray:
        """Return it in the colours of a light page: bytes, "height width 3"."""
        from matplotlib.image import imread

        image = imread(io.BytesIO(self._saved("png", dpi=2 * DPI)))
        return np.round(255 * image[..., :3]).astype(np.uint8)

    def _saved(self, form: str, **how: Any) -> bytes:
        from matplotlib import style  # which takes a second: only where something is drawn
        from matplotlib.figure import Figure as Canvas

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


def _short(name: str) -> str:
    """Return a name as one short line of characters that XML allows."""
    line = " ".join("".join(char if char.isprintable() else " " for char in name).split())
    return line if len(line) <= LABEL_LIMIT else f"{line[: LABEL_LIMIT - 1]}…"


def legend(axes: "Axes", drawn: Mapping[str, Any]) -> None:
    """Name what was drawn, above the picture."""
    names = [_short(name) for name in drawn]
    columns = len(names) if sum(map(len, names)) <= 50 else 2  # short names fit in one line
    assert axes.figure is not None
    if drawn:
        axes.figure.legend(drawn.values(), names, loc="outside upper left", ncols=columns)


def rows_axis(axes: "Axes", names: Sequence[str], highest: float, unit: str) -> None:
    """Give the picture one row per name, from the top, and a scale from 0 below them."""
    axes.set(xlim=(0, highest * 1.02 or 1.0), ylim=(len(names) - 0.5, -0.5), xlabel=unit)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.tick_params(axis="y", labelcolor=COLOURS["ink"], pad=8)
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.grid(visible=False, axis="y")


def height_of(names: Collection[str], bars: int) -> int:
    """Return the height of rows of `bars` bars each, with the legend above and the scale below."""
    return 74 + (12 + 12 * bars) * len(names)


def write(
    axes: "Axes", x: float, y: float, words: str, shift: tuple[int, int] = (5, 0), **look: Any
) -> None:
    """Write next to a point: to its right, or shifted by `shift`."""
    look = {"va": "center_baseline", **look}
    axes.annotate(words, (x, y), shift, textcoords="offset points", **look)


def bounds(values: Sequence[float], ends: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis that shows every value.

    An interval that ends far beyond the values does not stretch the axis: the other intervals would
    be too short to see. It goes on to the edge of the picture.
    """
    low, high = min(values), max(values)
    room = 0.6 * max(high - low, 0.25 * abs(high), 1e-9)
    return max(min([low, *ends]), low - room), min(max([high, *ends]), high + room)


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
    lesser: str = "",
) -> Figure:
    """Return a figure of values as dots on their intervals, with a line at no gain (`even`).

    Several series on a row are drawn below each other. The first one's values are written next to
    it, if there is no other or all have lesser marks, whose legend is `lesser`.
    """
    on: dict[str, list[Series]] = {}  # by row
    for one in series:
        for row in one.values:
            on.setdefault(row, []).append(one)
    alone = len(series) == 1
    known = [value for one in series for value in one.values.values() if value.value is not None]
    points = [0.0, even, *(value.value for value in known if value.value is not None)]
    points += [p for one in series for marks in one.lesser.values() for p in marks if p is not None]
    low, high = bounds(points, [end for value in known for end in value.ci95 or []])
    room = 0.02 * (high - low) or 1.0

    def draw(axes: "Axes") -> None:
        drawn: dict[str, Any] = {}
        for index, (row, sharing) in enumerate(on.items()):
            for place, one in enumerate(sharing):
                y = index + (place - (len(sharing) - 1) / 2) * min(0.32, 0.72 / len(sharing))
                value, colour = one.values[row], COLOURS[one.colour]
                if value.ci95:
                    axes.plot(value.ci95, [y, y], color=colour, **BAND)
                if value.value is not None:
                    (drawn[one.name],) = axes.plot(value.value, y, one.mark, color=colour)
                marks = [mark for mark in one.lesser.get(row, ()) if mark is not None]
                if marks:
                    look = {**HOLLOW, "markeredgecolor": colour}
                    below = [y + 0.26 * alone] * len(marks)
                    (drawn[lesser],) = axes.plot(marks, below, **look)
            if alone or all(one.lesser for one in series):
                at, words = axes.get_yaxis_transform(), cell(sharing[0].values[row])
                write(axes, 1.0, index, words, xycoords=at)
        rows_axis(axes, list(on), high, unit)
        axes.set_xlim(low - room, high + room)
        axes.axvline(even, **DASHED)
        legend(axes, drawn)

    height = height_of(on, bars=1 if alone else 1 + len(series))
    return Figure(title, caption, height + 18 * max(0, (len(series) + 1) // 2 - 2), draw)


def stacked(
    title: str,
    caption: str,
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str,
    limit: float | None = None,
) -> Figure:
    """Return a figure of stacked bars, one per row, of the parts that have colours.

    limit: drawn as a dashed line; a bar that far exceeds it is cut, but its number is true.
    """
    totals = [sum(parts.values()) for parts in bars.values()]
    end = max(totals) if limit is None else min(max(limit, *totals), 1.5 * limit)
    digits = 2 if limit is None else 1

    def draw(axes: "Axes") -> None:
        rows_axis(axes, list(bars), end, unit)
        drawn: dict[str, Any] = {}
        left = np.zeros(len(bars))
        for part, colour in colours.items():
            widths = np.array([parts.get(part, 0.0) for parts in bars.values()])
            widths = np.minimum(widths, np.maximum(end - left, 0.0))
            drawn[part] = axes.barh(range(len(bars)), widths, 0.62, left, color=COLOURS[colour])
            if limit is None:
                words = [number(width) if width > 0.1 * end else "" for width in widths]
                ink = COLOURS["ink" if colour == "rest" else "on-bar"]
                axes.bar_label(drawn[part], words, label_type="center", fontsize=11, color=ink)
            left += widths
        for index, total in enumerate(totals):
            write(axes, left[index], index, number(total, digits), fontweight="bold")
        if limit is not None:
            axes.axvline(limit, **DASHED)
        legend(axes, drawn)

    height = height_of(bars, bars=2) + 22 * ((len(colours) + 1) // 2)
    return Figure(title, caption, height, draw)


def memory_figure(ways: Mapping[str, Mapping[str, float]], limit: float) -> Figure:
    """Return a figure of memory in GiB by component: a bar per way to shard, and the limit."""
    sizes = {name: max(way[name] for way in ways.values()) for name in next(iter(ways.values()))}
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    shown, others = largest[: len(KINDS)], largest[len(KINDS) :]
    parts = {
        way: {name: of[name] for name in shown} | {"the rest": sum(of[name] for name in others)}
        for way, of in ways.items()
    }
    colours = dict(zip(shown, KINDS, strict=False)) | ({"the rest": "rest"} if others else {})
    caption = (
        "Of one accelerator, for every deepspeed=..., with the target where it was asked for. The "
        "dashed line is what there is."
    )
    return stacked("Memory by component", caption, parts, colours, "GiB", limit)


def report_figures(report: Report) -> list[Figure]:
    """Return the figures of a report, for what was measured only."""
    rows = {method: found.by_name for method, found in report.drafting.items()}
    colours = dict(zip(rows, ("drafter", "other", *["third"] * len(rows)), strict=False))
    summaries = {method: found["all"] for method, found in rows.items()}
    found: list[Figure] = []
    if any(row.speedup.value for row in summaries.values()):
        found += [speedup_figure(rows, colours), speed_figure(rows, colours)]
    if any(row.num_drafts for row in summaries.values()):
        found.append(acceptance_figure(summaries, colours))
    if report.examples:
        found.append(time_figure(report.examples, report.drafter))
    swept = [
        (p.temperature, p.batch_size, p.depth, p.summary.speedup.value, p.summary.predicted_speedup)
        for p in report.sweep
    ]
    if len({point[1:3] for point in swept}) > 1:
        found.append(sweep_figure(swept))
    if report.methods[PLAIN].summary.num_target_passes:
        found.append(cycle_figure(report, summaries))
    if report.training is not None:
        found.append(training_figure(report.training))
    return found


def speedup_figure(rows: Mapping[str, Mapping[str, MethodRow]], kinds: Mapping[str, str]) -> Figure:
    """Return the speedup of every method by task, measured and predicted."""
    series = [
        Series(
            method,
            kinds[method],
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
    return dots("Speedup by task", caption, series, unit, even=1.0, lesser="predicted")


def cycle_figure(report: Report, rows: Mapping[str, MethodRow]) -> Figure:
    """Return the stages of a plain step and of a cycle of every method."""
    times = {"plain step": report.methods[PLAIN].summary.time_ms}
    times |= {f"{method} cycle": row.time_ms for method, row in rows.items()}
    bars = {
        name: {stage: getattr(time, stage) or 0.0 for stage in STAGES}
        for name, time in times.items()
    }
    own = report.summary
    caption = (
        f"A draft yields {number(own.acceptance_length.micro)} tokens, a plain step one: "
        f"predicted speedup {number(own.predicted_speedup)}, measured "
        f"{number(own.speedup.value)} with prefill and the loop's own time."
    )
    unit = f"milliseconds per {'row and ' * (report.batch_size > 1)}target pass"
    return stacked("Where a cycle's time goes", caption, bars, STAGES, unit)


def time_figure(examples: Sequence[Example], drafter: str) -> Figure:
    """Return a figure of tokens against time of example outputs, plain and drafted."""

    def draw(axes: "Axes") -> None:
        drawn: dict[str, Any] = {}
        for place, example in enumerate(examples, start=1):
            for name, times, colour, line, up in (
                (drafter, example.drafted, "drafter", "-", 5),
                ("plain decoding", example.plain, "plain", "--", -5),
            ):
                look: dict[str, Any] = {"color": COLOURS[colour], "linestyle": line, "linewidth": 2}
                (drawn[name],) = axes.plot(times.seconds, times.tokens, **look)
                end = times.seconds[-1], times.tokens[-1]
                write(axes, *end, str(place), (5, up), fontsize=11)
        axes.set(xlabel="seconds after the prefill", ylabel="tokens of the output")
        axes.set(xlim=(0, None), ylim=(0, None))
        legend(axes, drawn)

    caption = (
        "The example outputs below, by their numbers: a plain pass yields one token, a pass with a "
        "draft several."
    )
    return Figure("Tokens against time", caption, 290, draw)


def training_figure(curves: TrainingCurves) -> Figure:
    """Return a figure of the loss by step, and on a second axis what validation measured."""
    loss, *validations = curves.series

    def draw(axes: "Axes") -> None:
        looks = [("plain", "", "-"), ("drafter", "o", "-"), ("third", "D", "--")]
        drawn: dict[str, Any] = {}
        right = axes.twinx() if validations else axes
        for one, (colour, mark, line) in zip(curves.series, looks, strict=False):
            look: dict[str, Any] = {"color": COLOURS[colour], "marker": mark, "linestyle": line}
            side = axes if one is loss else right
            lines = side.plot(one.steps, one.values, markersize=6, linewidth=2, **look)
            drawn[one.name.partition("/")[2].replace("_", " ")] = lines[0]
        if curves.checkpoint_step is not None:
            axes.axvline(curves.checkpoint_step, **DASHED)
        right.set(ylim=(0, None), ylabel="tokens per target pass")
        right.grid(visible=right is axes)
        unit = f"optimizer step ({count(loss.tokens[-1])} tokens at the end)"
        axes.set(xlim=(0, None), ylim=(0, None), xlabel=unit, ylabel="loss")
        legend(axes, drawn)

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

    def known(rates: Sequence[float | None]) -> list[tuple[int, float]]:
        return [(at, rate) for at, rate in enumerate(rates, start=1) if rate is not None]

    def draw(axes: "Axes") -> None:
        drawn: dict[str, Any] = {}
        words: dict[str, Any] = {"ha": "center", "va": "baseline", "fontsize": 11}
        for place, (method, kind) in enumerate(kinds.items()):
            for position, rate in known(rows[method].acceptance_per_position):
                x = position + (place - (len(kinds) - 1) / 2) * width
                drawn[method] = axes.bar(x, rate, width * 0.94, color=COLOURS[kind])
                if labelled:  # at the foot of the bar, clear of the line
                    foot, shift, ink = (0.0, 5, "on-bar") if rate > 0.09 else (rate, 3, "ink")
                    look = {**words, "color": COLOURS[ink]}
                    write(axes, x, foot, f"{100 * rate:.0f}", (0, shift), **look)
        words |= {"color": COLOURS["conditional"], "fontweight": "bold"}
        points = known(drafter.conditional_acceptance)
        for x, rate in points:  # the style sheet draws a halo
            write(axes, x, rate, f"{100 * rate:.0f}", (0, 7), gid=f"halo-{x}", **words)
        look = {"color": COLOURS["conditional"], "linewidth": 2, "marker": "o", "clip_on": False}
        (drawn["conditional"],) = axes.plot(*np.reshape(points, (-1, 2)).T, **look)
        axes.set(xlim=(0.5, depth + 0.5), ylim=(0.0, 1.0), xlabel="drafted token")
        axes.set(xticks=range(1, depth + 1, math.ceil(depth / 16)), yticks=np.linspace(0, 1, 5))
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(visible=False, axis="x")
        legend(axes, drawn)

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
    highest = max(value or 0.0 for values in bars.values() for value in values)

    def draw(axes: "Axes") -> None:
        rows_axis(axes, list(drafter), highest, "tokens per second")
        drawn: dict[str, Any] = {}
        for place, (method, values) in enumerate(bars.items()):
            rows = np.arange(len(values)) + (place - (len(bars) - 1) / 2) * thick
            widths, colour = [value or 0.0 for value in values], COLOURS[colours[method]]
            drawn[method] = axes.barh(rows, widths, thick * 0.86, color=colour)
            axes.bar_label(drawn[method], [*map(speed, values)], padding=5, **SMALL)
        legend(axes, drawn)

    caption = "Prefill included; each pass counts at the median of its kind."
    return Figure("Tokens per second", caption, height_of(drafter, len(bars)), draw)


def sweep_figure(points: Sequence[tuple[float, int, int, float | None, float | None]]) -> Figure:
    """Return a figure of speedup by depth, or by batch size where the depth is always the same.

    points: temperature, batch size, depth, measured and predicted speedup.
    """
    by_depth = len({depth for _, _, depth, *_ in points}) > 1
    several = len({temperature for temperature, *_ in points}) > 1
    ticks = sorted({depth if by_depth else size for _, size, depth, *_ in points})
    lines: dict[str, list[tuple[int, float | None, float]]] = {}
    for temperature, size, depth, value, predicted in sorted(points, key=lambda point: point[:3]):
        name = f"batch {size}" if by_depth else f"depth {depth}"
        line = lines.setdefault(name + f", T {temperature:g}" * several, [])
        line.append((ticks.index(depth if by_depth else size), value, predicted or 0.0))

    def draw(axes: "Axes") -> None:
        drawn: dict[str, Any] = {}
        for place, (name, line) in enumerate(lines.items()):
            at, values, expected = zip(*line, strict=True)
            alpha = 1 - 0.7 * place / max(len(lines) - 1, 1)
            look: dict[str, Any] = {"color": COLOURS["drafter"], "alpha": alpha}
            axes.plot(at, expected, linestyle="--", linewidth=1, **look)
            look |= {"linewidth": 2, "marker": MARKS[place % len(MARKS)], "markersize": 6}
            (drawn[name],) = axes.plot(at, expected if None in values else values, **look)
        # Closer dots look like a thin line.
        axes.axhline(1.0, color=COLOURS["soft"], linestyle=(0, (1, 2.5)), linewidth=1.5)
        unit = "depth: drafted tokens a cycle" if by_depth else "prompts decoded together"
        axes.set(ylim=(0, None), xlabel=unit, ylabel="speedup")
        axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
        legend(axes, drawn)

    caption = (
        "Solid: measured. Dashed: predicted from acceptance length and the times of a cycle. "
        "Dotted: no gain, speculation does not pay below."
    )
    title = f"Speedup by {'depth' if by_depth else 'batch size'}"
    return Figure(title, caption, 300, draw)
