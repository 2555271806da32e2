"""Run lines of drafttrain commands in several processes: benchmarks/side_by_side.py LOGS < LINES.

A line is a name and its commands, in their order: `NAME: train ... && evaluate ...`; it ends at the
first that fails. Each process starts once and takes one line after another. The output of a line
goes to LOGS/NAME.log; a list of those that failed is the last thing said, and the exit status 1.
"""

import argparse
import contextlib
import gc
import multiprocessing
import shlex
import sys
import time
from pathlib import Path


def run(line: str, logs: Path) -> tuple[str, bool]:
    """Run a line's commands in this process; return its name, and whether all went well."""
    import torch

    from drafttrain.__main__ import main

    name, _, commands = line.partition(":")
    started, well = time.monotonic(), True
    with (
        (logs / f"{name}.log").open("w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        for command in commands.split("&&"):
            try:
                well = main(shlex.split(command)) == 0
            except Exception as error:  # a process ends none of its other lines
                print(f"{type(error).__name__}: {error}")
                well = False
            gc.collect()
            torch.cuda.empty_cache()
            if not well:
                break
    print(
        f"{name}: {'done' if well else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True
    )
    return name, well


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, help="a folder, made if it is missing")
    parser.add_argument("--processes", type=int, default=8)
    told = parser.parse_args()
    told.logs.mkdir(parents=True, exist_ok=True)
    lines = [line.strip() for line in sys.stdin if line.strip()]
    # CUDA cannot be used in a process that was forked.
    with multiprocessing.get_context("spawn").Pool(told.processes) as pool:
        done = pool.starmap(run, [(line, told.logs) for line in lines], chunksize=1)
    failed = [name for name, well in done if not well]
    listed = f"; failed: {' '.join(failed)}" if failed else ""
    print(f"{len(done) - len(failed)} of {len(done)} done{listed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
