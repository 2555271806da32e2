"""Depth, temperature and batch: one row per point that was measured, and what follows from them."""

from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.core.types import PromptResult
from drafttrain.report.rows import method_row
from drafttrain.report.statistics import NGRAM, PLAIN, Resampling, collect
from drafttrain.report.tables import Table
from drafttrain.report.wording import estimate, number, speed

Point = dict[str, Any]


def sweep_point(
    results: Sequence[PromptResult],
    *,
    drafter: str,
    depth: int,
    temperature: float,
    batch_size: int,
    resamples: int,
    seed: int,
) -> Point:
    """Return what one point of a sweep measured, in all and by task."""
    totals = collect(results)
    resampling = Resampling(resamples, seed)
    plain, ngram = totals[PLAIN], totals.get(NGRAM)

    def row_of(method: str, task: str | None = None) -> dict[str, Any]:
        pairs = [
            (mine, plain[key])
            for key, mine in totals[method].items()
            if task is None or mine.task == task
        ]
        mine, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        lookup = None if ngram is None or method == NGRAM else ngram
        beside = None
        if lookup is not None:
            beside = [p for p in lookup.values() if task is None or p.task == task]
        return method_row(mine, theirs, depth, resampling, beside)

    tasks = sorted({prompt.task for prompt in plain.values()})
    return {
        "depth": depth,
        "temperature": temperature,
        "batch_size": batch_size,
        "summary": row_of(drafter),
        "tasks": {task: row_of(drafter, task) for task in tasks},
        "ngram": row_of(NGRAM) if NGRAM in totals and drafter != NGRAM else None,
    }


def best_depths(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the fastest measured depth of each temperature and batch size, by task and in all."""
    chosen = []
    for temperature, size in dict.fromkeys((p["temperature"], p["batch_size"]) for p in points):
        here = [p for p in points if (p["temperature"], p["batch_size"]) == (temperature, size)]

        def fastest(task: str | None, here: list[Point] = here) -> dict[str, Any]:
            rows = {p["depth"]: p["tasks"][task] if task else p["summary"] for p in here}
            depth = max(rows, key=lambda d: rows[d]["speedup"]["value"] or 0.0)
            return {"depth": depth, "speedup": rows[depth]["speedup"]}

        chosen.append(
            {
                "temperature": temperature,
                "batch_size": size,
                "all": fastest(None),
                "tasks": {task: fastest(task) for task in here[0]["tasks"]},
            }
        )
    return chosen


def stops_paying(points: Sequence[Point]) -> list[str]:
    """Say for each temperature at which measured batch size speculation no longer pays."""
    sentences = []
    best = best_depths(points)
    for temperature in dict.fromkeys(choice["temperature"] for choice in best):
        here = sorted(
            (choice for choice in best if choice["temperature"] == temperature),
            key=lambda choice: choice["batch_size"],
        )
        if len(here) < 2:
            continue
        sizes = ", ".join(str(choice["batch_size"]) for choice in here)
        pays = [
            choice["batch_size"]
            for choice in here
            if choice["all"]["speedup"]["ci95"] and choice["all"]["speedup"]["ci95"][0] > 1
        ]
        not_any_more = [size for size in (c["batch_size"] for c in here) if size not in pays]
        small = [size for size in not_any_more if pays and size < max(pays)]
        at = f"At temperature {temperature:g}, over batches of {sizes}"
        if not not_any_more:
            sentences.append(f"{at}, speculation pays at every size.")
        elif not pays:
            sentences.append(
                f"{at}, speculation pays at none (lower bound of the speedup above 1)."
            )
        elif small:  # no single size from which on it pays no more
            sentences.append(
                f"{at}, speculation pays at {', '.join(map(str, pays))} only: elsewhere the "
                "speedup of the best depth is not above 1 with 95 % confidence."
            )
        else:
            sentences.append(
                f"{at}, speculation stops paying at {min(not_any_more)}: there the speedup of the "
                "best depth is no longer above 1 with 95 % confidence."
            )
    return sentences


def sweep_table(points: Sequence[Point], rules: Mapping[float, str]) -> Table:
    """Return the sweep as a table of the report; rules: by temperature, how drafts are accepted."""
    columns = ["temperature", "batch", "depth", "acceptance length, 95 %", "tokens/s plain"]
    columns += ["tokens/s drafted", "speedup, 95 %", "predicted speedup", "speedup of ngram"]
    rows = [
        [
            f"{p['temperature']:g}",
            str(p["batch_size"]),
            str(p["depth"]),
            estimate(p["summary"]["acceptance_length"]),
            speed(p["summary"]["tokens_per_second"]["autoregressive"]),
            speed(p["summary"]["tokens_per_second"]["speculative"]),
            estimate(p["summary"]["speedup"]),
            number(p["summary"]["predicted_speedup"]),
            estimate(p["ngram"]["speedup"]) if p["ngram"] else number(None),
        ]
        for p in points
    ]
    notes = [
        f"Fastest at temperature {choice['temperature']:g}, batch {choice['batch_size']}: depth "
        f"{choice['all']['depth']} in all; by task "
        + ", ".join(f"{task} {row['depth']}" for task, row in choice["tasks"].items())
        + "."
        for choice in best_depths(points)
    ]
    if len(set(rules.values())) > 1:
        notes += [f"Rule at temperature {where:g}: {rule}." for where, rule in rules.items()]
    return Table(
        "Depth, temperature and batch",
        "Rows of a batch are decoded together and leave as they end; tokens per second are of the "
        "whole batch. Ngram drafts at the report's depth.",
        columns,
        rows,
        [*notes, *stops_paying(points)],
    )
