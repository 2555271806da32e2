"""One line of markdown per evaluated run: benchmarks/table.py RUN [RUN ...] [--name NAME]."""

import argparse
import json
from pathlib import Path
from typing import Any


def line(label: str, row: dict[str, Any], passes: str) -> str:
    """Return a row of the table: acceptance and speedup with their intervals."""
    length, speedup = row["acceptance_length"], row["speedup"]
    speeds = row["tokens_per_second"]
    positions = " ".join(f"{share:.2f}" for share in row["acceptance_per_position"])
    between = lambda ci: f"[{ci[0]:.2f}, {ci[1]:.2f}]" if ci else ""  # noqa: E731
    if None in (length["micro"], speedup["value"]):
        raise SystemExit(f"{label} must have an acceptance length and a speedup, got none measured")
    return (
        f"| {label} | {length['micro']:.2f} {between(length['ci95'])} | {positions} "
        f"| {speeds['autoregressive']:.0f} | {speeds['speculative']:.0f} "
        f"| {speedup['value']:.2f} {between(speedup['ci95'])} | {passes} |"
    )


def main() -> None:
    """Print the table; the n-gram row is that of the first run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--name", default="default", help="evaluation under each run")
    arguments = parser.parse_args()
    print(
        "| run | acceptance length | per position | plain tok/s | with tok/s | speedup "
        "| greedy identical |"
    )
    print("|---|---|---|---|---|---|---|")
    reports = [
        json.loads((run / "evaluations" / arguments.name / "report.json").read_text())
        for run in arguments.runs
    ]
    for run, report in zip(arguments.runs, reports, strict=True):
        lossless = report["lossless"]
        passes = f"{lossless['greedy_identical']}/{lossless['greedy_total']} ({lossless['dtype']})"
        print(line(run.name, report["summary"], passes))
    first = arguments.runs[0]
    if "ngram" not in reports[0]["methods"]:
        raise SystemExit(f"{first} has no ngram beside its drafter for a last row; name it later")
    print(line(f"ngram (with {first.name})", reports[0]["methods"]["ngram"]["summary"], ""))


if __name__ == "__main__":
    main()
