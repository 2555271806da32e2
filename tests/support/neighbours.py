"""Pairs of commands on one place, started at any two instants, and a third after a kill -9.

As a script: `python neighbours.py KIND FOLDER TIMES SEED` carries out a command undisturbed, then
so many pairs of it on one place, asserts that one went on and that the other was told who holds the
place or found it done, and that the place is as the undisturbed one; prints what it saw as JSON.
"""

import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lives import Board, Life, compare, curve, settings, warm_up, write_conversations

DRAWN = ("model", "hardware", "data", "drafter")  # the sections of `settings` that others take


@dataclass(frozen=True)
class Kind:
    """Two commands on one place (the same one, or another beside it), and what they must leave."""

    first: Callable[[Path], list[str]]
    second: Callable[[Path], list[str]]
    same: Callable[[Path, Path], None]  # as the undisturbed place, or AssertionError
    waits: bool = False  # the second waits for the first
    reads: bool = False  # the second goes on beside the first


def drawn(folder: Path, *sections: str) -> list[str]:
    texts = settings(folder / "none", folder.parent / "data.jsonl")
    return [text for text in texts if text.split(".")[0].split("=")[0] in (sections or DRAWN)]


def train(place: Path) -> list[str]:
    return settings(place / "run", place.parent / "data.jsonl", "trainer.max_steps=18")


def train_for_long(place: Path) -> list[str]:
    return settings(place / "run", place.parent / "data.jsonl", "trainer.max_steps=120")


def capture(place: Path) -> list[str]:
    small = ["store.shard_mb=0.01", "store.layers=[1,2]"]
    return ["capture", f"store.dir={place / 'store'}", *drawn(place), *small]


def regenerate(place: Path) -> list[str]:
    out = [f"regenerate.out={place / 'answers.jsonl'}", "regenerate.max_new_tokens=12"]
    return ["regenerate", *drawn(place, "model", "hardware"), *out, "regenerate.batch_size=4",
            f"data.path={place.parent / 'data.jsonl'}"]  # fmt: skip


def selfgen(run: str) -> Callable[[Path], list[str]]:
    def command(place: Path) -> list[str]:
        kept = [text for text in train(place) if not text.startswith(("data", "run.dir"))]
        cache = f"data.cache_dir={place / 'cache'}"
        return [*kept, f"run.dir={place / run}", "data=selfgen", cache,
                "data.num_conversations=24", "data.batch_size=4", "data.holdout=2",
                "data.max_user_tokens=8", "data.max_answer_tokens=16"]  # fmt: skip

    return command


def on_trained(command: str, *overrides: str) -> Callable[[Path], list[str]]:
    """A command on a run that was trained before."""
    return lambda place: [command, f"run.dir={place / 'run'}", *overrides]


SHORT = ("eval.max_new_tokens=6", "eval.resamples=100", "eval.lossless_prompts=1",
         "eval.prompts_per_task=2", "eval.depth=2", "eval.policy=chain",
         "hardware.dtype=float32")  # fmt: skip
evaluate = on_trained("evaluate", *SHORT)
tune = on_trained("tune", *SHORT, "tune.depths=[1,2]", "tune.batch_sizes=[1]",
                  "tune.contexts=[16]", "tune.rounds=2")  # fmt: skip
export = on_trained("export", "export.overwrite=true")


def same_run(alone: Path, other: Path) -> None:
    compare(alone / "run", other / "run")


def same_store(alone: Path, other: Path) -> None:
    from drafttrain.target.store.shards import read_manifest

    one, two = read_manifest(alone / "store"), read_manifest(other / "store")
    assert one is not None
    assert two is not None
    assert one.complete
    assert two.complete
    assert one.shards == two.shards
    for shard in one.shards:
        texts = [(place / "store" / shard.file).read_bytes() for place in (alone, other)]
        assert texts[0] == texts[1]


def same_answers(alone: Path, other: Path) -> None:
    for name in ("answers.jsonl", "answers.settings.json"):
        assert (alone / name).read_bytes() == (other / name).read_bytes()


def same_selfgen(alone: Path, other: Path) -> None:
    files = [next((place / "cache").glob("*/conversations.jsonl")) for place in (alone, other)]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    numbers = [row["index"] for row in rows[1]]
    assert len(numbers) == len(set(numbers)) == 24, numbers
    by_index = [sorted(found, key=lambda row: row["index"]) for found in rows]
    assert by_index[0] == by_index[1]
    for run in ("run", "second"):
        if (other / run / "metrics.jsonl").exists():
            compare(alone / "run", other / run)


def measured(place: Path) -> Any:
    report = json.loads((place / "run/evaluations/default/report.json").read_text())
    length = report["summary"]["acceptance_length"]
    return length["micro"], report["lossless"]["greedy_identical"]


def same_evaluation(alone: Path, other: Path) -> None:
    assert measured(alone) == measured(other)
    assert len(list((other / "run/evaluations/default").glob("*.measurements.jsonl"))) == 1
    assert (other / "run/evaluations/default/report.html").is_file()


def same_choice(alone: Path, other: Path) -> None:
    one, two = (json.loads((place / "run/tuned.json").read_text()) for place in (alone, other))
    assert one["batches"].keys() == two["batches"].keys()
    lengths = [[row["acceptance_length"] for row in each["predictions"]] for each in (one, two)]
    assert lengths[0] == lengths[1]


def same_export(alone: Path, other: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        assert (alone / "run/export" / name).read_bytes() == (
            other / "run/export" / name
        ).read_bytes()
    assert not [file.name for file in (other / "run").glob(".export*")]


def same_beside_a_reader(alone: Path, other: Path) -> None:
    trained = [
        [row for row in curve(place / "run") if "evaluation/" not in str(row.get("table"))]
        for place in (alone, other)
    ]
    assert trained[0] == trained[1]
    for file in ("checkpoints/index.json", "config.yaml"):
        assert (other / "run" / file).is_file()


KINDS = {
    "train": Kind(train, train, same_run),
    "capture": Kind(capture, capture, same_store),
    "regenerate": Kind(regenerate, regenerate, same_answers),
    "selfgen": Kind(selfgen("run"), selfgen("second"), same_selfgen, waits=True),
    "evaluate": Kind(evaluate, evaluate, same_evaluation),
    "tune": Kind(tune, tune, same_choice),
    "export": Kind(export, export, same_export),
    "evaluate while it trains": Kind(train_for_long, evaluate, same_beside_a_reader, reads=True),
    "export while it trains": Kind(train_for_long, export, same_beside_a_reader, reads=True),
}


def locks(place: Path) -> list[Path]:
    """Return the lock files of whoever holds something in a place."""
    return [file for file in place.rglob("*.lock") if ".metrics" not in file.name]


def error_of(life: Life) -> str:
    """The one line that a command that failed said."""
    said = [line for line in life.said().splitlines() if line.startswith("error: ")]
    assert len(said) == 1, life.said()
    assert "Traceback" not in life.said(), life.said()
    return said[0]


class Neighbours:
    """Commands on copies of one place."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder, self.count = kind, folder, 0
        write_conversations(folder / "data.jsonl")

    def place(self, name: str) -> Path:
        """A place to work on, with a run in it where the commands need one."""
        place = self.folder / name
        place.mkdir()
        if self.kind.first in (evaluate, tune, export):
            trained = self.folder / "trained"
            if not trained.exists():
                trained.mkdir()
                self.finish(self.start(train(trained)))
            shutil.copytree(trained / "run", place / "run")
        return place

    def start(self, command: list[str]) -> Life:
        self.count += 1
        logs = self.folder / f"logs{self.count}"
        logs.mkdir()
        return Life(Board(1), 1, command, logs)

    def finish(self, life: Life) -> None:
        life.wait()
        assert life.codes == {0: 0}, life.said()

    def pair(self, alone: Path, name: str, delay: float | None) -> str:
        """Start two, the second so many seconds later; return what became of it.

        delay: None starts the second while the first holds the place, and is stopped there until
        the second has found it held.
        """
        place = self.place(name)
        first = self.start(self.kind.first(place))
        process = first.running[0]
        if self.kind.reads:
            for _ in first.polls(0.01):
                if (place / "run/checkpoints/index.json").exists():
                    break
            delay = (delay or 0.0) / 4
        if delay is None:
            for _ in first.polls(0.002):
                if any(file.stat().st_size for file in locks(place)):
                    first.send(signal.SIGSTOP)
                    break
        else:
            time.sleep(delay)
        second = self.start(self.kind.second(place))
        both = (process, second.running[0])
        if delay is None:
            for _ in second.polls(0.01):
                if "waiting for" in second.said():
                    break
            first.send(signal.SIGCONT)
        first.wait()
        second.wait()
        codes = (first.codes[0], second.codes[0])
        assert 0 in codes, (codes, first.said(), second.said())
        if codes == (0, 0):
            return self.went_on(alone, place, first.said() + second.said())
        winner, loser = (0, second) if codes[0] == 0 else (1, first)
        told = error_of(loser)
        if self.kind.reads:  # there was nothing yet to read
            assert "no checkpoint yet" in told or "run.dir must be" in told, told
        else:
            command = self.kind.first(place)[0]
            assert f"held by {command} (process {both[winner]} on this machine, since" in told, told
        self.kind.same(alone, place)
        return "nothing to read yet" if self.kind.reads else "told"

    def went_on(self, alone: Path, place: Path, said: str) -> str:
        self.kind.same(alone, place)
        if self.kind.waits and "waiting for selfgen (process" in said:  # of two at once, either
            return "waited"
        return "beside" if self.kind.reads else "after"

    def third_after_a_kill(self, alone: Path, name: str, delay: float) -> str:
        """Kill a command with -9 and start it again at once."""
        place = self.place(name)
        first = self.start(self.kind.first(place))
        time.sleep(delay)
        first.send(signal.SIGKILL)
        again = self.start(self.kind.first(place))
        first.wait()
        self.finish(again)
        self.kind.same(alone, place)
        assert not locks(place)
        return "killed" if first.codes[0] == -signal.SIGKILL else "over"


def neighbours(name: str, folder: Path, times: int, seed: int) -> dict[str, Any]:
    """Return how often what happened."""
    import drafttrain.runtime.lock

    drafttrain.runtime.lock.PATIENCE_S = (
        0.3  # lives are short: a longer one would see the first one's end
    )
    chance = random.Random(seed)
    here = Neighbours(KINDS[name], folder)
    alone = here.place("alone")
    started = time.monotonic()
    here.finish(here.start(here.kind.first(alone)))
    life = time.monotonic() - started
    seen: Counter[str] = Counter()
    for number in range(times):
        # Both at once; the second while the first holds the place; and anywhere in its life.
        drawn_s = chance.uniform(0, 1.1 * life)
        delay = (chance.uniform(0, 0.02), None, drawn_s)[number % 3]
        seen[here.pair(alone, f"pair{number}", delay)] += 1
        if not here.kind.reads:
            seen[here.third_after_a_kill(alone, f"killed{number}", chance.uniform(0, life))] += 1
    for number in range(3):  # a busy machine may look for the place's holder too late
        if seen["told"] + seen["waited"] + seen["beside"]:
            break
        seen[here.pair(alone, f"again{number}", None)] += 1
    return {"kind": name, **seen}


if __name__ == "__main__":
    warm_up(False)
    what, where, number, drawn_seed = sys.argv[1:5]
    Path(where).mkdir(parents=True, exist_ok=True)
    print(json.dumps(neighbours(what, Path(where), int(number), int(drawn_seed))), flush=True)
