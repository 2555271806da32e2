"""The plots of a sweep: speedup by depth for every batch, and by batch at the best depth."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from drafttrain.report.plots import STAND_IN, picture

HEIGHT = 300
MARKERS = "osD^vP*X"
DOTTED = (0, (1, 2.5))  # in line widths; closer dots look like a thin line


def depth_plot(points: Sequence[Mapping[str, Any]]) -> Markup:
    """Return speedup by depth, a line for each temperature and batch size; predicted is dashed."""
    series = _series(points)

    def draw(axes: Any) -> None:
        for place, ((temperature, size), rows) in enumerate(series.items()):
            depths = [row["depth"] for row in rows]
            shade = 1 - 0.7 * place / max(len(series) - 1, 1)
            look = {"color": STAND_IN["drafter"], "alpha": shade}
            expected = [row["summary"]["predicted_speedup"] or 0.0 for row in rows]
            values = [row["summary"]["speedup"]["value"] for row in rows]
            measured = expected if None in values else values
            marker = MARKERS[place % len(MARKERS)]
            name = f"batch {size}" + (f", T {temperature:g}" if _several(series) else "")
            axes.plot(
                depths, measured, marker=marker, markersize=6, linewidth=2, label=name, **look
            )
            axes.plot(depths, expected, linestyle="--", linewidth=1, **look)
        axes.axhline(1.0, color=STAND_IN["soft"], linestyle=DOTTED, linewidth=1.5)
        every = sorted({point["depth"] for point in points})
        axes.set_xticks(every)
        axes.figure.legend(loc="outside upper left", ncols=4)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("depth: drafted tokens a cycle")
        axes.set_ylabel("speedup")

    return picture("sweep-depth", "Speedup by depth", HEIGHT, draw)


def batch_plot(points: Sequence[Mapping[str, Any]]) -> Markup:
    """Return the speedup of the best depth by batch size, with its interval."""
    series = _series(points)
    temperatures = list(dict.fromkeys(temperature for temperature, _ in series))

    def draw(axes: Any) -> None:
        for place, temperature in enumerate(temperatures):
            sizes = sorted(size for t, size in series if t == temperature)
            best = [
                max(series[temperature, size], key=lambda p: p["summary"]["speedup"]["value"] or 0)
                for size in sizes
            ]
            values = [row["summary"]["speedup"]["value"] or 0.0 for row in best]
            spans = [
                row["summary"]["speedup"]["ci95"] or (value, value)
                for row, value in zip(best, values, strict=True)
            ]
            below = [max(v - low, 0.0) for v, (low, _) in zip(values, spans, strict=True)]
            above = [max(high - v, 0.0) for v, (_, high) in zip(values, spans, strict=True)]
            look = {"color": STAND_IN["drafter"], "alpha": 1 - 0.5 * place / len(temperatures)}
            places = [str(size) for size in sizes]
            marker = MARKERS[place % len(MARKERS)]
            axes.errorbar(places, values, yerr=(below, above), marker=marker, capsize=3, **look)
            for x, value, row in zip(places, values, best, strict=True):
                axes.annotate(
                    f"  depth {row['depth']}",
                    (x, value),
                    fontsize=10,
                    color=STAND_IN["soft"],
                    va="bottom",
                )
        axes.axhline(1.0, color=STAND_IN["soft"], linestyle=DOTTED, linewidth=1.5)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.15)
        axes.set_xlabel("prompts decoded together")
        axes.set_ylabel("speedup of the best depth")

    return picture("sweep-batch", "Speedup by batch size", HEIGHT, draw)


def _series(
    points: Sequence[Mapping[str, Any]],
) -> dict[tuple[float, int], list[Mapping[str, Any]]]:
    series: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for point in sorted(points, key=lambda p: (p["temperature"], p["batch_size"], p["depth"])):
        series.setdefault((point["temperature"], point["batch_size"]), []).append(point)
    return series


def _several(series: Mapping[tuple[float, int], Any]) -> bool:
    return len({temperature for temperature, _ in series}) > 1
