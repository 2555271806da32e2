"""Speeds beside other busy processes: benchmarks/neighbours.py [--rounds 10] [--json FILE].

Four kinds of work on the embedded target: steps of EAGLE-3's training, features, plain answers, and
drafted answers as `evaluate` makes them. Every kind is timed on the idle machine, beside one and
beside two busy processes, in turns; medians over the rounds. A variant is how a process is started:

    package      drafttrain is imported first, as by commands and most scripts
    torch-first  torch is imported before drafttrain, as in many notebooks
    spin=N       GOMP_SPINCOUNT=N in the environment (commands set 20000 until 2026-11-27, and
                 OpenMP's own default is 300000)

Each variant is a process that stays, so that the turns differ in nothing else. Wanted is 0.67 of
its idle speed beside one busy process, 0.45 beside two, and at most 2 % less than the best idle.
Run it on a machine that does nothing else: about 9 minutes for the three default variants.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUSY = (0, 1, 2)
WANTED = (0.98, 0.67, 0.45)
KINDS = ("training", "features", "answers", "evaluation")


def work() -> dict[str, Callable[[], int]]:
    """Return functions that each do a piece of a kind of work, and return its tokens."""
    import torch

    import drafttrain
    from drafttrain.config.groups import content_of
    from drafttrain.core.chance import SeededChance
    from drafttrain.core.sampling_config import GREEDY
    from drafttrain.core.types import Batch, weighted_sum
    from drafttrain.decode.autoregressive import autoregressive_decode_batch
    from drafttrain.decode.loop import speculative_decode_batch
    from drafttrain.drafters.eagle3 import Eagle3Config
    from drafttrain.runtime.hardware import num_cores
    from drafttrain.training.teacher_forced import NoChance

    target = drafttrain.load_target("tiny", dtype="bfloat16")
    threads = torch.get_num_threads()  # chosen for decoding
    values = content_of("drafter", "eagle3")
    del values["_target_"]
    drafter = Eagle3Config(**values).build(target.spec)
    torch.manual_seed(0)
    shape = (8, 64)
    tokens = torch.randint(4, target.spec.vocab_size, shape)
    drafter.prepare(tokens.flatten().bincount(minlength=target.spec.vocab_size), target.readout)
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    rows = torch.arange(shape[0])[:, None].expand(shape).contiguous()
    batch = Batch(tokens, torch.ones(shape, dtype=torch.bool), positions, rows)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5, fused=True)
    prompt = tokens[0, :24].tolist()
    given = {"sampling": GREEDY, "max_new_tokens": 32, "chance": SeededChance(0), "rows": [0, 1]}
    prompts = [prompt, prompt[::-1]]

    def training() -> int:
        torch.set_num_threads(num_cores())
        drafter.train()
        with torch.no_grad():
            features = target.features(batch, drafter.captures)
        with torch.autocast("cpu", torch.bfloat16):
            losses = drafter(batch, features, NoChance())
        (weighted_sum(losses) / batch.tokens.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return batch.tokens.numel()

    def features() -> int:
        torch.set_num_threads(num_cores())
        with torch.no_grad():
            target.features(batch, drafter.captures)
        return batch.tokens.numel()

    def answers() -> int:
        torch.set_num_threads(threads)
        decoded = autoregressive_decode_batch(target, prompts, stop_tokens=(), **given)
        return sum(len(each.tokens) for each in decoded)

    def evaluation() -> int:
        torch.set_num_threads(threads)
        drafter.eval()
        decoded = speculative_decode_batch(
            target, drafter, prompts, policy=4, stop_tokens=(), **given
        )
        return sum(len(each.tokens) for each in decoded)

    return {
        "training": training,
        "features": features,
        "answers": answers,
        "evaluation": evaluation,
    }


def serve() -> None:
    """Do what each line of standard input asks for, KIND SECONDS; print tokens/s."""
    kinds = work()
    for piece in kinds.values():
        piece()
    print("ready", flush=True)
    for line in sys.stdin:
        kind, seconds = line.split()
        kinds[kind]()  # threads and caches are warm
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() - began < float(seconds):
            tokens += kinds[kind]()
        print(tokens / (time.perf_counter() - began), flush=True)


def started(variant: str) -> subprocess.Popen[str]:
    """Return a process that serves as a variant says."""
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PYTHONPATH"] = str(ROOT)
    first = "import torch; " if variant == "torch-first" else ""
    if variant.startswith("spin="):
        environment["GOMP_SPINCOUNT"] = variant.removeprefix("spin=")
    program = (
        f"{first}import drafttrain, sys; sys.path.insert(0, 'benchmarks'); import neighbours; "
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}neighbours.serve()"],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        sys.exit(f"{variant} did not start")
    return process


def asked(process: subprocess.Popen[str], kind: str, seconds: float) -> float:
    """Return the speed at which a process does a kind of work for some seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{kind} {seconds}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Measure in turns; print a table by kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", default=["package", "torch-first", "spin=20000"])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.2, help="of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    served = {variant: started(variant) for variant in options.variants}
    speeds: dict[str, list[float]] = {}
    try:
        for turn in range(options.rounds):
            for busy in BUSY:
                others = [
                    subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    for _ in range(busy)
                ]
                try:
                    order = options.variants if turn % 2 else options.variants[::-1]
                    for kind in options.kinds:
                        for variant in order:
                            found = asked(served[variant], kind, options.seconds)
                            speeds.setdefault(f"{kind}/{variant}/{busy}", []).append(found)
                finally:
                    for other in others:
                        other.kill()
                        other.wait()
    finally:
        for process in served.values():
            process.kill()
    median = {name: statistics.median(found) for name, found in speeds.items()}
    print(f"{os.cpu_count()} cores, medians of {options.rounds}; wanted: {WANTED}")
    print("| kind | variant | idle, tokens/s | of the best idle | beside 1 | beside 2 |")
    print("|---|---|---|---|---|---|")
    for kind in options.kinds:
        best = max(median[f"{kind}/{variant}/0"] for variant in options.variants)
        for variant in options.variants:
            idle, one, two = (median[f"{kind}/{variant}/{busy}"] for busy in BUSY)
            print(
                f"| {kind} | {variant} | {idle:.0f} | {idle / best:.3f} | {one / idle:.2f} "
                f"| {two / idle:.2f} |"
            )
    if options.json:
        options.json.write_text(json.dumps({"speeds": speeds, "medians": median}, indent=1) + "\n")


if __name__ == "__main__":
    main()
