"""The steps between the runs of benchmarks/protocols/families.md, by its rules.

    python benchmarks/families.py rates SWEEP    # from families_lr: each family's learning rate
    python benchmarks/families.py minutes SWEEP  # from families_tiny: steps of equal time

SWEEP is the folder of `train -m +experiment=... hydra.sweep.dir=SWEEP`.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import yaml

from drafttrain.report.training import training_curves
from drafttrain.runtime.tracker import read_metrics

BASELINE = "eagle3"
ROUND = 10  # steps


def runs_of(sweep: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the configuration and the metrics of every run of a sweep."""
    folders = [file.parent for file in sorted(sweep.glob("*/metrics.jsonl"))]
    return [
        (
            yaml.safe_load((folder / "config.yaml").read_text()),
            read_metrics(folder / "metrics.jsonl"),
        )
        for folder in folders
    ]


def rates(sweep: Path) -> None:
    """Print each family's acceptance length by learning rate, and the rate that is chosen."""
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for config, rows in runs_of(sweep):
        validated = [row for row in rows if "val/acceptance_length" in row]
        if validated:
            last = validated[-1]
            measured = last["val/acceptance_length"], last["val/acceptance_length_error"]
            found.setdefault(config["drafter"]["name"], {})[config["trainer"]["lr"]] = measured
    every = sorted({rate for by_rate in found.values() for rate in by_rate})
    print("| family | " + " | ".join(f"{rate:g}" for rate in every) + " | chosen |")
    print("|---" * (len(every) + 2) + "|")
    for family, by_rate in found.items():
        best = max(by_rate, key=lambda rate: by_rate[rate][0])
        length, error = by_rate[best]
        chosen = min(rate for rate, (other, _) in by_rate.items() if other >= length - error)
        cells = [f"{by_rate[rate][0]:.3f}" if rate in by_rate else "" for rate in every]
        print(f"| {family} | " + " | ".join(cells) + f" | {chosen:g} |")


def minutes(sweep: Path) -> None:
    """Print how long each family's runs took, and its steps in the time of the baseline's."""
    seconds: dict[str, list[float]] = {}
    steps: dict[str, int] = {}
    for config, rows in runs_of(sweep):
        curves = training_curves(rows)
        if curves is not None and curves.seconds is not None:
            family = config["drafter"]["name"]
            seconds.setdefault(family, []).append(curves.seconds)
            steps[family] = curves.series[0].steps[-1]
    budget = statistics.median(seconds[BASELINE])
    print(f"Budget: {budget / 60:.2f} minutes, the median of {BASELINE}.\n")
    print("| family | minutes, by seed | steps in the budget |\n|---|---|---|")
    for family, times in seconds.items():
        own = int(budget / statistics.median(times) * steps[family]) // ROUND * ROUND
        listed = " ".join(f"{time / 60:.2f}" for time in times)
        print(f"| {family} | {listed} | {own} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("rates", "minutes"))
    parser.add_argument("sweep", type=Path)
    told = parser.parse_args()
    {"rates": rates, "minutes": minutes}[told.what](told.sweep)


if __name__ == "__main__":
    main()
