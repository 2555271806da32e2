"""Compare the time of each test file with a record, so that no test becomes slow unnoticed.

    RECORD_DURATIONS=build/durations.json make test
    python scripts/durations.py check build/durations.json
    python scripts/durations.py record build/durations.json    # then commit, and say why

`check` prints a line, and ends with 1, for each test file that takes 20 % and 5 CPU seconds more
than tests/durations.json says (a file that is not recorded counts as 0 s), and where all together
take more than the limit there. Seconds are first divided by how much slower this machine is than
the one of the record (`calibration`, a fixed computation). With `--suspects FILE` it also writes
the names of the slow files, so that they can be measured again. No fixed computation is slowed
down exactly as a test is, so `--before MEASURED RECORD` compares a file with itself: MEASURED holds
the seconds of an earlier commit on this machine, RECORD is that commit's tests/durations.json. A
file that took 1.4 times its record there may take 1.4 times its record now.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "durations.json"
FACTOR, SECONDS = 1.2, 5.0  # a file fails where it is slower by both


def scaled(measured: dict[str, Any], record: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each file as they would be on the machine of the record."""
    speed = record["calibration"] / measured["calibration"]
    return {name: seconds * speed for name, seconds in measured["files"].items()}


def excess(measured: dict[str, Any], record: dict[str, Any]) -> dict[str, float]:
    """Return how many times its record each file takes on this machine, at least 1."""
    return {
        name: max(1.0, seconds / record["files"][name])
        for name, seconds in scaled(measured, record).items()
        if record["files"].get(name)
    }


def slower(
    measured: dict[str, Any], record: dict[str, Any], machine: dict[str, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Return the files that became slower: name -> recorded and measured CPU seconds.

    `machine` is the `excess` of an earlier commit on this machine; seconds are divided by it.
    """
    seconds = {
        name: now / (machine or {}).get(name, 1.0) for name, now in scaled(measured, record).items()
    }
    return {
        name: (before, now)
        for name, now in seconds.items()
        if (before := record["files"].get(name, 0.0)) * FACTOR < now and before + SECONDS < now
    }


def total(measured: dict[str, Any], record: dict[str, Any]) -> float:
    """Return the seconds of all files and shared fixtures on the machine of the record."""
    speed = record["calibration"] / measured["calibration"]
    return sum(scaled(measured, record).values()) + speed * sum(measured["fixtures"].values())


def check(
    measured: dict[str, Any],
    record: dict[str, Any],
    whole: bool,
    machine: dict[str, float] | None = None,
) -> list[str]:
    """Return a line for each file that became slower, and one for a total past the limit."""
    lines = [
        f"{name}: {now:.1f} CPU seconds, {before:.1f} are recorded (at most 20 % and 5 s more)"
        for name, (before, now) in sorted(slower(measured, record, machine).items())
    ]
    seconds = total(measured, record)
    if whole and seconds > record["limit"]:
        lines.append(f"all tests: {seconds:.0f} CPU seconds, the limit is {record['limit']:.0f}")
    return lines


def main() -> int:
    """Check or record; return the exit status."""
    parser = argparse.ArgumentParser(description="CPU seconds of each test file against a record.")
    parser.add_argument("action", choices=("check", "record"))
    parser.add_argument("measured", type=Path, help="what RECORD_DURATIONS=FILE pytest wrote")
    parser.add_argument("--record", type=Path, default=RECORD, help="default: tests/durations.json")
    parser.add_argument(
        "--suspects", type=Path, help="write the names of slow files here, one a line"
    )
    parser.add_argument(
        "--part", action="store_true", help="some files only: no limit for the total"
    )
    parser.add_argument(
        "--before",
        nargs=2,
        type=Path,
        metavar=("MEASURED", "RECORD"),
        help="the same files of an earlier commit on this machine, and that commit's record",
    )
    arguments = parser.parse_args()
    measured = json.loads(arguments.measured.read_text())
    record = json.loads(arguments.record.read_text())
    if arguments.action == "record":
        arguments.record.write_text(
            json.dumps({"limit": record["limit"], **measured}, indent=2) + "\n"
        )
        print(f"{len(measured['files'])} files recorded in {arguments.record}")
        return 0
    machine = {}
    if arguments.before:
        machine = excess(*(json.loads(path.read_text()) for path in arguments.before))
        for name, times in sorted(machine.items()):
            print(f"{name}: {times:.2f} times its record at the earlier commit, on this machine")
    lines = check(measured, record, not arguments.part, machine)
    if arguments.suspects:
        arguments.suspects.write_text("".join(f"{name}\n" for name in slower(measured, record)))
    print("\n".join(lines) or f"{total(measured, record):.0f} CPU seconds, no file became slower")
    if lines:
        print("If the time is needed: scripts/durations.py record, and say why in the commit.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
