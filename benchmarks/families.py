"""The steps between the runs of benchmarks/protocols/families.md, by its rules.

    python benchmarks/families.py rates SWEEP    # from families_lr: each family's learning rate
    python benchmarks/families.py minutes SWEEP  # from families_tiny: steps of equal time
    python benchmarks/families.py table COMPARED  # of `compare compare.all_pairs=true`: the result
    python benchmarks/families.py speeds EVALUATION ...  # of `eval=large`: at the best depth

SWEEP is the folder of `train -m +experiment=... hydra.sweep.dir=SWEEP`, COMPARED a compare.dir,
EVALUATION the folder of a report.json.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from drafttrain.report.curves import training_curves
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


# By family, what was published to be shorter and to be longer.
PUBLISHED = (
    *(("medusa", "hydra_heads"), ("hydra_heads", "eagle"), ("eagle", "hass"), ("eagle", "eagle3")),
    *(("dflash", "dspark"), ("dflash", "dflash2"), ("p_eagle", "eagle3"), ("eagle3", "eagle3_1")),
)


def table(compared: Path) -> None:
    """Print the families by acceptance length, and what the protocol's rule decides."""
    found = json.loads((compared / "compare.json").read_text())
    rows = {row["drafter"]: row for row in found["rows"]}
    family = {row["method"]: row["drafter"] for row in found["rows"]}
    pairs = {}
    for pair in found["differences"]:
        one, other = family[pair["method"]], family[pair["other"]]
        length = pair["summary"]["acceptance_length"]
        pairs[one, other] = length["value"], *length["ci95"]
        pairs[other, one] = -length["value"], *(-end for end in reversed(length["ci95"]))

    def decided(one: str, other: str) -> bool:
        """Whether the interval leaves out zero, and all seeds lie beyond the other's mean."""
        _, low, high = pairs[one, other]
        seeds = rows[one]["summary"]["acceptance_length"]["by_run"]
        mean = rows[other]["summary"]["acceptance_length"]["value"]
        above = {seed > mean for seed in seeds}
        return len(seeds) > 1 and (low > 0 or high < 0) and above == {low > 0}

    def told(one: str, other: str) -> str:
        value, low, high = pairs[one, other]
        return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]{'' if decided(one, other) else ', open'}"

    columns = ["family", "parameters", "minutes", "acceptance length", "by seed", "by position"]
    columns += ["longer than EAGLE-3", "a draft, ms"]
    slower = found["rows"][0]["slower_targets"][1:2]  # none of a batch
    columns += [f"a target of {at['pass_ms']:.0f} ms" for at in slower]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    by_length = sorted(rows.values(), key=lambda row: -row["summary"]["acceptance_length"]["value"])
    for row in by_length:
        own, summary = row["drafter"], row["summary"]
        length = summary["acceptance_length"]
        seconds = row["training_seconds"]
        cells = [
            own,
            f"{row['drafter_parameters'] / 1e6:.1f}M" if row["drafter_parameters"] else "",
            f"{seconds / 60:.1f}" if seconds else "",
            "{:.2f} [{:.2f}, {:.2f}]".format(length["value"], *length["ci95"]),
            " ".join(f"{value:.2f}" for value in length["by_run"]) if row["seeds"] else "",
            " ".join(f"{value:.2f}" for value in summary["acceptance_per_position"]),
            "" if own == BASELINE else told(own, BASELINE),
            f"{summary['draft_ms']:.1f}",
        ]
        for slow in [at["speedup"] for at in row["slower_targets"][1:2]]:
            cells.append("{:.2f} [{:.2f}, {:.2f}]".format(slow["value"], *slow["ci95"]))
        print("| " + " | ".join(cells) + " |")
    print("\n| published | here |\n|---|---|")
    for shorter, longer in PUBLISHED:
        if (longer, shorter) in pairs:
            print(f"| {longer} longer than {shorter} | {told(longer, shorter)} |")


def speeds(evaluations: Sequence[Path]) -> None:
    """Print each drafter's speedup at the depth chosen on other prompts, the fastest first."""
    rows = []
    for folder in evaluations:
        report = json.loads((folder / "report.json").read_text())
        verdict = report["verdicts"]["all"]
        points = [point for point in report["sweep"] if point["depth"] == verdict["depth"]]
        lacks = {
            f"one point of a sweep at depth {verdict['depth']}": len(points) != 1,
            "an interval of the speedup (too few prompts)": verdict["speedup"]["ci95"] is None,
            "prompt lookup beside its drafter": "ngram" not in report["methods"],
        }
        if any(lacks.values()):
            told = " and ".join(what for what, lacking in lacks.items() if lacking)
            raise SystemExit(
                f"{folder} must be an evaluation as of eval=large, but it lacks {told}"
            )
        (point,) = points
        rows.append((verdict, point["summary"]["time_ms"], report))
    columns = ["family", "depth", "of", "speedup", "acceptance length", "a draft, ms"]
    columns += ["a pass of the target, ms", "prompt lookup's speedup", "other processes, cores"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for verdict, times, report in sorted(rows, key=lambda row: -row[0]["speedup"]["value"]):
        lookup = report["methods"]["ngram"]["summary"]["speedup"]["value"]
        cells = [
            report["drafter"],
            str(verdict["depth"]),
            " ".join(str(depth) for depth in verdict["of_depths"]),
            "{:.2f} [{:.2f}, {:.2f}]".format(
                verdict["speedup"]["value"], *verdict["speedup"]["ci95"]
            ),
            f"{verdict['acceptance_length']:.2f}",
            f"{times['draft']:.1f}",
            f"{times['verify']:.1f}",
            f"{lookup:.2f}",
            f"{report['timing']['others_cores']:.2f}",
        ]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("rates", "minutes", "table", "speeds"))
    parser.add_argument("folder", type=Path, nargs="+")
    told = parser.parse_args()
    if told.what == "speeds":
        speeds(told.folder)
    else:
        {"rates": rates, "minutes": minutes, "table": table}[told.what](*told.folder)


if __name__ == "__main__":
    main()
