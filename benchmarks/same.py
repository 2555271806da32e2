"""Compare what the commands of two checkouts write, bit for bit.

    python benchmarks/same.py OLD_CHECKOUT NEW_CHECKOUT [--families NAME ...] [--out FILE.json]

Both are run by this interpreter, only through their command lines, so that modules may be
anywhere. Compared are the conversations that a target writes, the curve of every family with a stop
and a resume in it, its weights, its export, the text and the counters of greedy and sampled
decoding, and the features of a store. Times and paths are left out.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

FAMILIES = ("eagle3", "eagle", "medusa", "small_lm")  # every checkout since 0.1 has them
CPU = "hardware=cpu hardware.threads=1 hardware.dtype=float32 hardware.draft_dtype=float32"
DATA = "data.num_conversations=16 data.holdout=4 data.batch_size=8 data.max_answer_tokens=48"
TRAINER = (
    "trainer.tokens_per_step=256 trainer.validate_every=4 trainer.save_every=4 "
    "trainer.validation_prompts=2 trainer.validation_tokens=16 trainer.log_every=1 "
    "hardware.train_dtype=float32 hardware.micro_batch=4"
)
EVAL = (
    "eval.prompts_per_task=1 eval.max_new_tokens=24 eval.lossless_prompts=2 eval.resamples=100 "
    "eval.depth=4 eval.depths=[2,4] eval.temperatures=[0,1] eval.batch_sizes=[1,3]"
)
# Words of names of what depends on the clock, the machine, the place or the commit.
UNSTEADY = (
    "second s wait time timestamp date speed speedup ms memory byte dir dirty path version commit "
    "command host hostname hardware verdict block noise cost price dollar disturbed predicted "
    "prediction pays warning flag flagged note thread table statement others_cores stolen delayed "
    "break_even"
)
UNSTEADY_NAME = re.compile(rf"(?<![a-z])({UNSTEADY.replace(' ', '|')})s?(?![a-z])")


def steady(value: Any) -> Any:
    """Return plain data without what may differ between two runs of one program."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not UNSTEADY_NAME.search(k.lower())}
        return {key: steady(inner) for key, inner in kept.items()}
    return [steady(inner) for inner in value] if isinstance(value, list) else value


def digest(data: bytes) -> str:
    """Return the beginning of a sha256."""
    return hashlib.sha256(data).hexdigest()[:16]


def lines_of(file: Path) -> list[Any]:
    """Return the records of a file of JSON lines, without times."""
    return [steady(json.loads(line)) for line in file.read_text().splitlines()]


def run(checkout: Path, place: Path, *arguments: str) -> None:
    """Run a command of a checkout in a folder; exit with its error if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "drafttrain", *arguments]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{checkout}: {' '.join(arguments)}\n{done.stderr}")


def commit_of(checkout: Path) -> str:
    """Return the short name of the commit that a checkout has."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(command, text=True).strip()


def recorded(checkout: Path, place: Path, families: Sequence[str]) -> dict[str, Any]:
    """Run every command of a checkout in a folder; return what it computed, by name."""
    found: dict[str, Any] = {}
    call = partial(run, checkout, place)
    for family in families:
        own = f"run.dir=run-{family}"
        told = [own, f"drafter={family}", "data.cache_dir=selfgen"]
        told += f"{CPU} {DATA} {TRAINER}".split()
        if family == "small_lm":
            told += ["drafter.layers=[0,5]"]
        call("train", *told, "trainer.max_steps=6")
        call("train", own, "run.resume=true", "trainer.max_steps=10")
        folder = place / f"run-{family}"
        found[f"{family}: curve"] = lines_of(folder / "metrics.jsonl")
        last = max((folder / "checkpoints").glob("step-*"))
        found[f"{family}: weights"] = digest((last / "drafter.safetensors").read_bytes())
        call("export", own, "export=vllm")
        for name in ("model.safetensors", "config.json"):
            found[f"{family}: export {name}"] = digest((folder / "export" / name).read_bytes())
        call("evaluate", own, *EVAL.split(), *CPU.split()[1:])
        evaluation = folder / "evaluations/default"
        found[f"{family}: report"] = steady(json.loads((evaluation / "report.json").read_text()))
        print(f"{checkout.name}: {family}", flush=True)
    found["conversations"] = lines_of(next((place / "selfgen").glob("*/conversations.jsonl")))
    told = f"store.dir=store drafter=eagle3 data.cache_dir=selfgen hardware=cpu {DATA}"
    call("capture", *told.split())
    for shard in sorted((place / "store").glob("shard-*.safetensors")):
        found[f"store: {shard.name}"] = digest(shard.read_bytes())
    return found


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return where two records differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        gone = [f"{where}/{key}: only in one" for key in keys if key not in old or key not in new]
        both = [key for key in keys if key in old and key in new]
        return gone + [d for key in both for d in differences(old[key], new[key], f"{where}/{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where}[{i}]")]
    return [] if old == new else [f"{where}: {str(old)[:60]} became {str(new)[:60]}"]


def main() -> None:
    """Run both, print what differs, and exit with 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--families", nargs="+", default=FAMILIES, help="of conf/drafter in both")
    parser.add_argument("--out", type=Path, help="write commits, digests and differences here")
    arguments = parser.parse_args()
    records, commits = [], []
    for checkout in (arguments.old.resolve(), arguments.new.resolve()):
        with tempfile.TemporaryDirectory() as place:
            records.append(recorded(checkout, Path(place), arguments.families))
        commits.append(commit_of(checkout))
    found = differences(*records)
    print("\n".join(found) or f"{len(records[0])} records are the same in {' and '.join(commits)}")
    if arguments.out:
        digests = {key: digest(json.dumps(value).encode()) for key, value in records[1].items()}
        kept = {"old": commits[0], "new": commits[1], "differences": found, "records": digests}
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
