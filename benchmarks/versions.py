"""Whether a checkout is as fast as another: both run the same commands in turns.

    python benchmarks/versions.py OLD_CHECKOUT NEW_CHECKOUT [--turns 5] [--out FILE.json]

Measured are the wall time of `plan`, of a short `train` and of `evaluate`, each from the start of
its process to its end, and what the last two report of themselves: the time of a trained token, and
of a decoded one with the drafter and with every method beside it. Both evaluate the run that the
old one trained. A ratio is the median over turns of new time over old time within a turn: below 1
the new one is faster.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from same import commit_of, run

CPU = "hardware=cpu hardware.threads=1 hardware.dtype=float32"
TRAIN = (
    f"drafter=eagle3 {CPU} hardware.train_dtype=float32 data.cache_dir=selfgen "
    "data.num_conversations=32 data.holdout=4 data.max_answer_tokens=64 trainer.log_every=4 "
    "trainer.tokens_per_step=1024 trainer.max_steps=24 trainer.validate_every=24 "
    "trainer.validation_prompts=2"
)
EVALUATE = f"run.dir=fixed {CPU} eval.prompts_per_task=1 eval.max_new_tokens=64 eval.resamples=200"


def train_of(checkout: Path) -> list[str]:
    """Return the overrides of `train`: the optimizer that every checkout has, by its own name."""
    chosen = ["optimizer=adamw"] if (checkout / "conf/optimizer").is_dir() else []
    return [*TRAIN.split(), *chosen]


def seconds(checkout: Path, place: Path, *arguments: str) -> float:
    """Run a command of a checkout; return the wall time of its process."""
    started = time.perf_counter()
    run(checkout, place, *arguments)
    return time.perf_counter() - started


def measured(checkout: Path, place: Path) -> dict[str, float]:
    """Run every command once; return seconds by what they are of."""
    shutil.rmtree(place / "run", ignore_errors=True)
    shutil.rmtree(place / "fixed/evaluations", ignore_errors=True)
    found = {
        "plan": seconds(checkout, place, "plan", *train_of(checkout)),
        "train": seconds(checkout, place, "train", *train_of(checkout), "run.dir=run"),
        "evaluate": seconds(checkout, place, "evaluate", *EVALUATE.split()),
    }
    rows = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    speeds = [row["perf/tokens_per_s"] for row in rows if "perf/tokens_per_s" in row]
    found["a trained token"] = 1 / statistics.median(speeds[1:])
    report = json.loads((place / "fixed/evaluations/default/report.json").read_text())
    for name, method in {**report["methods"], report["drafter"]: report}.items():
        *_, speed = method["summary"]["tokens_per_second"].values()
        found[f"a token, {name}"] = 1 / speed
    return found


def main() -> None:
    """Measure both in turns, print the ratios and write the seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write commits, seconds and ratios here")
    arguments = parser.parse_args()
    checkouts = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    turns: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder) / name for name in checkouts}
        for name, place in places.items():
            place.mkdir()
            seconds(checkouts[name], place, "train", *train_of(checkouts[name]), "run.dir=run")
        for place in places.values():
            shutil.copytree(places["old"] / "run", place / "fixed")
        for turn in range(arguments.turns):
            order = ("old", "new") if turn % 2 == 0 else ("new", "old")
            turns.append({name: measured(checkouts[name], places[name]) for name in order})
            print(f"turn {turn + 1} of {arguments.turns}", flush=True)
    ratios = {}
    for what in turns[0]["old"]:
        pairs = [(turn["old"][what], turn["new"][what]) for turn in turns]
        ratio = statistics.median(new / old for old, new in pairs)
        ratios[what] = round(ratio, 3)
        old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
        spread = " ".join(f"{new / old:.2f}" for old, new in pairs)
        print(f"{what:<24}{old:10.4f} s{new:10.4f} s   {ratio:.3f}   ({spread})")
    if arguments.out:
        commits = {name: commit_of(checkout) for name, checkout in checkouts.items()}
        kept = {"commits": commits, "ratios": ratios, "turns": turns}
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
