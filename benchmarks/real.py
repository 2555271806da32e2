"""Drafters of a real chat model, trained on few of its answers: benchmarks/gpu.sh real.

`answers` and `train` print lines for benchmarks/side_by_side.py; `table` prints what the validation
of each run measured. The protocol is benchmarks/protocols/real.md.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

SHARDS = 4  # files of answers, written at the same time
SMALL, MEDIUM, LARGE = 1_400, 5_600, 22_400  # conversations: about 0.2, 0.8 and 3.2 million tokens
EAGLE3, EAGLE, MTP = "drafter=eagle3", "drafter=eagle", "drafter=mtp"
ALL = "data.train_on=all"
# Name: conversations, and the settings that it changes. The order is that of importance.
RUNS: dict[str, tuple[int, list[str]]] = {
    "eagle3-small": (SMALL, [EAGLE3]),
    "eagle3-large": (LARGE, [EAGLE3, "trainer.epochs=1"]),
    "eagle3-medium": (MEDIUM, [EAGLE3]),
    "eagle-small": (SMALL, [EAGLE]),
    "eagle-large": (LARGE, [EAGLE, "trainer.epochs=1"]),
    "eagle3-small-all": (SMALL, [EAGLE3, ALL]),
    "eagle3-small-text": (SMALL, [EAGLE3, ALL, "TEXT", "trainer.epochs=1"]),
    "mtp-small": (SMALL, [MTP]),
    "eagle3-small-words": (SMALL, [EAGLE3, "drafter.draft_vocab_coverage=1.0"]),
    "eagle-medium": (MEDIUM, [EAGLE]),
    "mtp-large": (LARGE, [MTP, "trainer.epochs=1"]),
    "eagle3-medium-once": (MEDIUM, [EAGLE3, "trainer.epochs=1"]),
    "eagle3-small-six": (SMALL, [EAGLE3, "trainer.epochs=6"]),
    "eagle3-medium-sampled": (MEDIUM, [EAGLE3, "SAMPLED"]),
    "eagle3-small-slow": (SMALL, [EAGLE3, "trainer.lr=0.0015"]),
    "eagle3-small-fast": (SMALL, [EAGLE3, "trainer.lr=0.006"]),
    "eagle3-small-lk": (SMALL, [EAGLE3, "drafter.losses={lk_hybrid: 1.0}"]),
    "eagle3-small-hard": (SMALL, [EAGLE3, "drafter.losses={hard_cross_entropy: 1.0}"]),
    "eagle3_1-small": (SMALL, ["drafter=eagle3_1"]),
    "dspark-small": (SMALL, ["drafter=dspark"]),
    "eagle-small-hass": (SMALL, [EAGLE, "drafter.unroll=3"]),
    "eagle3-small-five": (SMALL, [EAGLE3, "drafter.unroll=5"]),
    "eagle3-small-decay": (SMALL, [EAGLE3, "trainer.weight_decay=0.1"]),
    "eagle3-small-adamw": (SMALL, [EAGLE3, "optimizer=adamw"]),
}


def divide(prompts: Path, folder: Path) -> None:
    """Write a file of prompts as one for each process that answers them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = prompts.read_text().splitlines(keepends=True)
    size = -(-len(rows) // SHARDS)
    for shard in range(SHARDS):
        part = rows[shard * size : (shard + 1) * size]
        (folder / f"prompts-{shard}.jsonl").write_text("".join(part))


def answers(model: str, folder: Path, tokens: int) -> Iterator[str]:
    base = f"regenerate {model} data=jsonl regenerate.batch_size=768"
    base += f" regenerate.max_new_tokens={tokens} hardware.threads=1"
    for shard in range(SHARDS):
        place = f"data.path={folder}/prompts-{shard}.jsonl regenerate.out={folder}/a{shard}.jsonl"
        yield f"answers-{shard}: {base} {place}"
    sampled = f"data.path={folder}/prompts-0.jsonl regenerate.out={folder}/sampled.jsonl"
    yield f"answers-sampled: {base} {sampled} regenerate.temperature=0.7"


def train(model: str, folder: Path, out: Path, seeds: list[int], names: list[str]) -> Iterator[str]:
    files = [f"{folder}/a{shard}.jsonl" for shard in range(SHARDS)]
    small = (folder / "a0.jsonl").read_text().splitlines(keepends=True)[:SMALL]
    (folder / "small.jsonl").write_text("".join(small))
    for seed in seeds:
        for name in names or RUNS:
            limit, settings = RUNS[name]
            paths, more = files, []
            for setting in settings:
                if setting == "SAMPLED":
                    paths = [f"{folder}/sampled.jsonl"]
                elif setting == "TEXT":  # the answers, then recorded conversations
                    paths, limit = [f"{folder}/small.jsonl", f"{folder}/recorded.jsonl"], 1 << 30
                else:
                    more.append(f"'{setting}'")
            yield (
                f"{name}-{seed}: train {model} data=jsonl data.path=[{','.join(paths)}]"
                f" data.limit={limit} data.holdout=8 trainer=auto run.dir={out}/{name}-{seed}"
                f" run.seed={seed} data.seed={seed} tracker=none hardware.threads=1"
                f" trainer.validation_prompts={folder}/validate.jsonl trainer.validation_tokens=96"
                f" trainer.validate_every=1000000 {' '.join(more)}"
            )


def table(out: Path) -> None:
    found: dict[str, list[dict[str, float]]] = {}
    for file in sorted(out.glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        measured = [row for row in rows if "val/acceptance_length" in row]
        trained = [row for row in rows if any(key.startswith("train/") for key in row)]
        if measured:
            name = file.parent.name.rpartition("-")[0]
            found.setdefault(name, []).append({**(trained or [{}])[-1], **measured[-1]})
    keys = ["val/acceptance_length/kinds", "val/acceptance_length/spec_bench"]
    keys += ["val/acceptance_position_1", "val/acceptance_position_4"]
    print(f"| run | seeds | steps | {' | '.join(key.removeprefix('val/') for key in keys)} |")
    print("|---" * (3 + len(keys)) + "|")
    for name in [name for name in RUNS if name in found]:
        rows = found[name]
        cells = []
        for key in keys:
            values = [row[key] for row in rows if key in row]
            spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}" if values else "")
        print(f"| {name} | {len(rows)} | {rows[-1]['step']} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["answers", "train", "table"])
    parser.add_argument("folder", type=Path, help="of the answers; for `table`, of the runs")
    parser.add_argument("--prompts", type=Path, help="records to answer, for `answers`")
    parser.add_argument("--model", default="model=smollm2_135m")
    parser.add_argument("--out", type=Path, default=Path("outputs/real"))
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="*", default=[])
    given = parser.parse_args()
    if given.what == "table":
        return table(given.folder)
    if given.what == "answers":
        divide(given.prompts, given.folder)
    lines = (
        answers(given.model, given.folder, given.tokens)
        if given.what == "answers"
        else train(given.model, given.folder, given.out, given.seeds, given.runs)
    )
    for line in lines:
        print(line)
    return None


if __name__ == "__main__":
    main()
