"""The search of benchmarks/protocols/defaults.md.

    python benchmarks/defaults.py lines OUT SMALL  # of 400k and 1.6M tokens, for gpu.sh
    python benchmarks/defaults.py short OUT SMALL  # of 100k tokens of SMALL, for a CPU
    python benchmarks/defaults.py table OUT        # what they reached

Lines are those that side_by_side.py takes.

OUT: where runs go. SMALL: the folder of the small target.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from drafttrain.runtime.tracker import read_metrics

# Changed by itself at 1.6M and 100k tokens of the small target and at 400k of the embedded one.
CHANGES = {
    "no warm-up": "trainer.warmup_steps=0",
    "cosine to 0": "trainer.final_lr_ratio=0",
    "ema 0.99": "trainer.ema_decay=0.99",
    "adamw at 0.004": "optimizer=adamw trainer.lr=0.004",
    "unroll 2": "drafter.unroll=2",
    "unroll 4": "drafter.unroll=4",
    "depths of equal weight": "drafter.depth_decay=1",
    "lk_hybrid": "drafter.losses={lk_hybrid:1.0}",
    "cross entropy with the text": "drafter.losses={hard_cross_entropy:1.0}",
    "the whole vocabulary": "drafter.draft_vocab_coverage=1.0",
    "norms of EAGLE-3.1": "drafter.fc_norm=true drafter.norm_output=true",
}
# Not at 1.6M.
MORE = {
    "warm-up of a tenth": "trainer.warmup_steps=78",
    "weight decay 0": "trainer.weight_decay=0",
    "weight decay 0.1": "trainer.weight_decay=0.1",
    "depths weigh 0.6": "drafter.depth_decay=0.6",
    "total variation": "drafter.losses={total_variation:1.0}",
    "until the first miss": "drafter.until_first_miss=true",
}
# Only at 100k.
SHORT = {
    "warm-up of a tenth": "trainer.warmup_steps=20",
    "ema 0.9": "trainer.ema_decay=0.9",
    "unroll 5": "drafter.unroll=5",
    "layers 1 3 6": "drafter.layers=[1,3,6]",
    "layers 2 4 6": "drafter.layers=[2,4,6]",
    "layers 2 4 7": "drafter.layers=[2,4,7]",
}
RATES = {"eagle3": (0.004, 0.008, 0.016), "eagle": (0.002, 0.004, 0.008)}
LONG = 3000  # steps: such runs are too long for the last of the rates
AUTO = {  # what trainer=auto took when the protocol was written; at 100k the protocol's base
    "small-100k": "eagle3_512_0.008",
    "embedded-400k": "eagle3_512_0.008",
    "embedded-1600k": "eagle3_1024_0.008",
    "small-1600k": "eagle3_1024_0.008",
}
CONVERSATIONS = {100: 1624, 400: 5970, 1600: 23100}  # by thousands of tokens


def lines(out: Path, small: Path, short: bool) -> Iterator[str]:
    """Yield a name and a command for every run."""

    def line(target: str, tokens: int, step: int, name: str, overrides: str, rate: float) -> str:
        steps = 1000 * tokens // step
        model = f"model.path={small}" if target == "small" else "model=tiny"
        run = f"{target}-{tokens}k/{name.replace(' ', '_')}"
        rated = "" if "trainer.lr" in overrides else f"trainer.lr={rate}"
        return (
            f"{run.replace('/', '-')}: train run.dir={out}/defaults/{run} {model} "
            f"data.num_conversations={CONVERSATIONS[tokens]} data.holdout=256 data.batch_size=1024 "
            f"data.cache_dir={out}/selfgen hardware.threads=1 trainer=auto "
            f"trainer.max_steps={steps} trainer.tokens_per_step={step} "
            f"trainer.validate_every={steps} trainer.save_every={steps} "
            f"trainer.validation_prompts=64 {overrides} {rated}"
        )

    def grid(target: str, tokens: int, step: int) -> Iterator[str]:
        for family, rates in RATES.items():
            for rate in rates[:2] if 1000 * tokens // step > LONG else rates:
                name = f"{family} {step} {rate}"
                yield line(target, tokens, step, name, f"drafter={family}", rate)

    if short:
        for seed in (1, 2):
            name = f"eagle3 512 0.008 seed {seed}"
            yield line("small", 100, 512, name, f"drafter=eagle3 run.seed={seed}", 0.008)
        for name, overrides in (CHANGES | MORE | SHORT).items():
            yield line("small", 100, 512, name, f"drafter=eagle3 {overrides}", 0.008)
        for step in (256, 512, 1024):
            yield from grid("small", 100, step)
        return
    for step in (512, 1024, 2048):
        for target in ("embedded", "small"):
            yield from grid(target, 1600, step)
    for name, overrides in CHANGES.items():
        yield line("small", 1600, 1024, name, f"drafter=eagle3 {overrides}", 0.008)
    for name, overrides in (CHANGES | MORE).items():
        yield line("embedded", 400, 512, name, f"drafter=eagle3 {overrides}", 0.008)
    for step in (512, 1024):
        yield from grid("embedded", 400, step)


def validation(file: Path) -> tuple[dict[str, float], np.ndarray]:
    """Return a run's last validation, and drafts and accepted tokens by conversation."""
    rows = read_metrics(file)
    last = [row for row in rows if "val/acceptance_length" in row][-1]
    by_conversation = [row for row in rows if row.get("table") == "validation"][-1]["rows"]
    return last, np.array(by_conversation)[:, 1:3]


def longer(found: np.ndarray, base: np.ndarray) -> tuple[float, float]:
    """Return how much longer the acceptance of the same conversations is, and the standard error.

    Both are ratios of sums; the error is that of their difference to first order, paired.
    """
    parts, lengths = [], []
    for drafts, accepted in (found.T, base.T):
        lengths.append(accepted.sum() / drafts.sum())
        parts.append((accepted - lengths[-1] * drafts) / drafts.sum())
    off = parts[0] - parts[1]
    return lengths[0] - lengths[1], float(np.sqrt((off**2).sum() * len(off) / (len(off) - 1)))


def table(out: Path) -> None:
    """Print what every run reached, and how much longer that is than EAGLE-3 as in AUTO."""
    print("| run | acceptance length | by position | longer than auto |\n|---|---|---|---|")
    for data in sorted((out / "defaults").iterdir()):
        print(f"| **{data.name}** | | | |")
        _, base = validation(data / AUTO[data.name] / "metrics.jsonl")
        for file in sorted(data.glob("*/metrics.jsonl")):
            last, found = validation(file)
            positions = [last[f"val/acceptance_position_{place}"] for place in range(1, 5)]
            listed = " ".join(f"{value:.2f}" for value in positions)
            more, error = longer(found, base)
            length = last["val/acceptance_length"]
            print(f"| {file.parent.name} | {length:.2f} | {listed} | {more:+.2f} ± {error:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("lines", "short", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("small", type=Path, nargs="?")
    told = parser.parse_args()
    if told.what == "table":
        table(told.out)
    else:
        if told.small is None or not told.small.is_dir():
            parser.error(f"SMALL must name the folder of the small target, got {told.small}")
        print("\n".join(lines(told.out, told.small, told.what == "short")))


if __name__ == "__main__":
    main()
