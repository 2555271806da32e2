"""The plots of the HTML report, as inline SVG: colours come from the page, so dark mode works."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from drafttrain.report.rows import Row
from drafttrain.report.wording import Number, estimate, number, speed

WIDTH = 560.0
LABEL_LIMIT = 20  # characters of a row's name; the rest is in its tooltip


def tag(name: str, body: Markup | str = "", **attributes: object) -> Markup:
    """Return one SVG element, everything escaped; `class_` becomes class, `_` becomes `-`."""
    texts = []
    for key, value in attributes.items():
        text = f"{value:.1f}" if isinstance(value, float) else str(value)
        texts.append(Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), text))
    # The name is ours, never data.
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(texts), body)


def svg(height: float, label: str, parts: Sequence[Markup]) -> Markup:
    """Return a whole picture, named for readers who cannot see it."""
    return tag(
        "svg",
        Markup("").join([tag("title", label), *parts]),
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        class_="plot",
    )


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> Markup:
    """Return a line of text; `y` is its baseline."""
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=f"t {kind}".strip())


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """Return a straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> Markup:
    """Return a bar with a tooltip."""
    size = {"width": max(width, 0.0), "height": max(height, 0.0)}
    return tag("rect", tag("title", tip) if tip else "", x=x, y=y, rx=1.5, class_=kind, **size)


def legend(items: Sequence[tuple[str, str]], x: float, y: float) -> list[Markup]:
    """Return squares with their names, left to right from x."""
    parts = []
    for kind, name in items:
        parts += [rect(x, y - 9.0, 10.0, 10.0, kind), text(x + 15.0, y, _short(name))]
        x += 34.0 + 6.9 * len(_short(name))
    return parts


def ticks(top: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to at least `top`."""
    top = top if top > 0 and math.isfinite(top) else 1.0
    power = 10.0 ** math.floor(math.log10(top / count))
    step = next(s * power for s in (1, 2, 5, 10) if s * power * count >= top * 0.999)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def _short(name: str, limit: int = LABEL_LIMIT) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _tick_text(value: float, step: float) -> str:
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9)) if step < 1 else 0}f}"


def _name(row: str, y: float) -> Markup:
    label = text(140.0, y, _short(row), "end", "strong" if row == "all" else "")
    return tag("g", tag("title", row) + label)


def _axis(
    left: float, right: float, top: float, bottom: float, marks: list[float], unit: str
) -> list[Markup]:
    parts = []
    for mark in marks:
        x = left + (right - left) * mark / marks[-1]
        parts += [line(x, top, x, bottom, "grid")]
        parts += [text(x, bottom + 15.0, _tick_text(mark, marks[1]), "middle", "faint")]
    return [*parts, text(right, bottom + 31.0, unit, "end", "faint")]


def speedup_plot(rows: Mapping[str, Mapping[str, Row]], drafter: str) -> Markup:
    """Return speedup by task with intervals; `rows` are by method, then by task or "all"."""
    names = list(rows[drafter])
    kinds = _kinds(rows, drafter)
    left, right, top, height = 152.0, WIDTH - 126.0, 34.0, 42.0
    bottom = top + height * len(names)
    highs = [1.0]
    for method in rows:
        for row in rows[method].values():
            highs += [row["speedup"]["value"] or 0.0, (row["speedup"]["ci95"] or [0, 0])[1]]
    marks = ticks(max(highs) * 1.02)

    def at(value: float) -> float:
        return left + (right - left) * value / marks[-1]

    parts = legend([(kind, method) for method, kind in kinds.items()], left, 12.0)
    parts += _axis(left, right, top, bottom, marks, "times plain decoding, 95 % interval")
    parts += [line(at(1.0), top - 4.0, at(1.0), bottom, "one")]
    for index, name in enumerate(names):
        middle = top + height * (index + 0.5)
        parts += [_name(name, middle + 4.0)]
        spread = 13.0
        for place, (method, kind) in enumerate(kinds.items()):
            measured = rows[method][name]["speedup"]
            if measured["value"] is None:
                continue
            y = middle + (place - (len(kinds) - 1) / 2) * spread
            tip = f"{method} on {name}: {estimate(measured)}"
            if measured["ci95"]:
                low, high = (at(bound) for bound in measured["ci95"])
                parts += [line(low, y, high, y, f"whisker {kind}")]
            dot = tag(
                "circle", tag("title", tip), cx=at(measured["value"]), cy=y, r=4.5, class_=kind
            )
            parts += [dot]
        main = rows[drafter][name]["speedup"]
        kind = "strong" if name == "all" else ""
        parts += [text(right + 10.0, middle + 4.0, estimate(main), kind=kind)]
    return svg(bottom + 40.0, "Speedup over plain decoding by task", parts)


def _kinds(rows: Mapping[str, Any], drafter: str) -> dict[str, str]:
    return {drafter: "drafter", **{method: "other" for method in rows if method != drafter}}


def acceptance_plot(rows: Mapping[str, Row], drafter: str) -> Markup:
    """Return acceptance per position as bars, conditional acceptance as a line."""
    kinds = _kinds(rows, drafter)
    depth = max(len(row["acceptance_per_position"]) for row in rows.values())
    left, right, top, bottom = 44.0, WIDTH - 8.0, 40.0, 250.0
    items = [(kind, method) for method, kind in kinds.items()]
    parts = legend([*items, ("conditional", "conditional")], left, 12.0)
    for percent in range(0, 101, 25):
        y = bottom - (bottom - top) * percent / 100
        parts += [line(left, y, right, y, "grid")]
        parts += [text(left - 8.0, y + 4.0, f"{percent} %", "end", "faint")]
    slot = (right - left) / max(depth, 1)
    bar = min(slot * 0.6 / len(kinds), 46.0)
    labelled = bar >= 22.0
    for position in range(depth):
        centre = left + slot * (position + 0.5)
        parts += [text(centre, bottom + 16.0, str(position + 1), "middle", "faint")]
        for place, (method, kind) in enumerate(kinds.items()):
            rates = rows[method]["acceptance_per_position"]
            rate = rates[position] if position < len(rates) else None
            if rate is None:
                continue
            x = centre + (place - len(kinds) / 2) * bar
            tip = f"{method}, position {position + 1}: {number(rate)}"
            size = (bottom - top) * rate
            parts += [rect(x + 1.0, bottom - size, bar - 2.0, size, kind, tip)]
            if labelled:
                inside = size > 22.0
                y, look = (bottom - size + 14.0, "on-bar") if inside else (bottom - size - 5.0, "")
                parts += [text(x + bar / 2, y, f"{100 * rate:.0f}", "middle", f"small {look}")]
    parts += _conditional(rows[drafter]["conditional_acceptance"], left, slot, top, bottom)
    parts += [text(right, bottom + 32.0, "drafted token", "end", "faint")]
    return svg(bottom + 40.0, "Share of drafted tokens accepted, by position", parts)


def _conditional(
    rates: Sequence[Number | None], left: float, slot: float, top: float, bottom: float
) -> list[Markup]:
    points = [
        (left + slot * (position + 0.5), bottom - (bottom - top) * rate, rate)
        for position, rate in enumerate(rates)
        if rate is not None
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    parts = [tag("polyline", points=path, class_="conditional-line")]
    for x, y, rate in points:
        tip = tag("title", f"{number(rate)} given that all before were accepted")
        parts += [tag("circle", tip, cx=x, cy=y, r=4.0, class_="conditional")]
        parts += [text(x, y - 9.0, f"{100 * rate:.0f}", "middle", "small halo")]
    return parts


def time_plot(rows: Mapping[str, Row], plain: Row, drafter: str) -> Markup:
    """Return the time of one cycle, stacked, beside one plain step."""
    stages = [("stage-draft", "draft"), ("stage-verify", "verify"), ("stage-other", "other")]
    bars = {"plain step": plain["time_ms"]}
    bars |= {f"{method} cycle": rows[method]["time_ms"] for method in _kinds(rows, drafter)}
    totals = {name: sum(times[stage] or 0.0 for _, stage in stages) for name, times in bars.items()}
    left, right, top, height = 152.0, WIDTH - 84.0, 34.0, 46.0
    bottom = top + height * len(bars)
    marks = ticks(max(totals.values()) * 1.02)
    parts = legend([(kind, stage) for kind, stage in stages], left, 12.0)
    parts += _axis(left, right, top, bottom, marks, "milliseconds per target pass")
    for index, (name, times) in enumerate(bars.items()):
        y = top + height * index + 9.0
        x = left
        parts += [_name(name, y + 18.0)]
        for kind, stage in stages:
            width = (right - left) * (times[stage] or 0.0) / marks[-1]
            parts += [rect(x, y, width, 28.0, kind, f"{name}: {stage} {number(times[stage])} ms")]
            if width > 34.0:
                shade = "small on-bar" if kind != "stage-other" else "small"
                middle = x + width / 2
                parts += [text(middle, y + 18.0, number(times[stage]), "middle", shade)]
            x += width
        parts += [text(x + 8.0, y + 18.0, f"{number(totals[name])} ms", kind="strong")]
    return svg(bottom + 40.0, "Time of one cycle beside one plain step", parts)


def speed_plot(rows: Mapping[str, Mapping[str, Row]], drafter: str) -> Markup:
    """Return tokens per second by task: plain, with the drafter, with the other methods."""
    names = list(rows[drafter])
    kinds = _kinds(rows, drafter)
    bars: dict[str, list[tuple[str, str, float]]] = {}
    for name in names:
        plain = rows[drafter][name]["tokens_per_second"]["autoregressive"] or 0.0
        bars[name] = [("plain", "plain", plain)]
        for method, kind in kinds.items():
            fast = rows[method][name]["tokens_per_second"]["speculative"] or 0.0
            bars[name].append((kind, method, fast))
    left, right, top, thick = 152.0, WIDTH - 60.0, 34.0, 11.0
    height = thick * (1 + len(kinds)) + 10.0
    bottom = top + height * len(names)
    marks = ticks(max(value for group in bars.values() for _, _, value in group) * 1.02)
    items = [("plain", "plain decoding"), *((kind, method) for method, kind in kinds.items())]
    parts = legend(items, left, 12.0)
    parts += _axis(left, right, top, bottom, marks, "tokens per second")
    for index, (name, group) in enumerate(bars.items()):
        y = top + height * index + 5.0
        parts += [_name(name, y + (height - 10.0) / 2 + 4.0)]
        for place, (kind, method, value) in enumerate(group):
            width = (right - left) * value / marks[-1]
            tip = f"{method} on {name}: {speed(value)} tokens per second"
            parts += [rect(left, y + thick * place, width, thick - 2.0, kind, tip)]
            words = speed(value or None)
            parts += [text(left + width + 5.0, y + thick * place + 8.5, words, kind="tiny")]
    return svg(bottom + 40.0, "Tokens per second by task", parts)


def spark(rates: Sequence[Number | None], kind: str) -> Markup:
    """Return acceptance per position as a row of little columns, for a table cell."""
    step, tall = 9.0, 20.0
    parts = [tag("title", "acceptance per position: " + " ".join(number(rate) for rate in rates))]
    for position, rate in enumerate(rates):
        x, size = step * position, tall * (rate or 0.0)
        parts += [rect(x, 0.0, step - 2.0, tall, "spark-bed")]
        parts += [rect(x, tall - size, step - 2.0, size, kind)]
    width = step * max(len(rates), 1)
    box = {"viewBox": f"0 0 {width:.0f} {tall:.0f}", "width": f"{width:.0f}", "height": "20"}
    return tag("svg", Markup("").join(parts), class_="spark", role="img", **box)
