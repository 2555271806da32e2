"""What float32 logits cost and gain in bfloat16 training, on the device it runs on: --help.

Rounded logits are those of a plain bfloat16 product, which training took until 2026-11-27; float32
logits are the sums of the same products, unrounded. Three tables:

gradients: the relative error of the gradient of the drafter's states against float64, by loss and
acceptance rate (vocabulary 32k, width 512, 32 positions);
steps: time and peak memory of a training step of EAGLE and EAGLE-3 (forward, backward, AdamW) over
features that are ready. A whole step has the target's forward too, so its time changes by less.
Both are timed in turns; medians. Memory is what torch held beyond weights and features;
acceptance: acceptance length on held-out conversations of the embedded target after the same steps,
by seed, and the difference paired by conversation.

    python benchmarks/logits.py --out FOLDER                   # all; under 3 minutes on an H200
    python benchmarks/logits.py --parts steps --vocabs 4096    # some
"""

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests/support")]

from defaults import longer, validation  # noqa: E402
from side_by_side import run  # noqa: E402
from train import Form, NoChance  # noqa: E402

import drafttrain.core.ops.chunked_losses as chunked  # noqa: E402
from drafttrain.config.groups import content_of  # noqa: E402
from drafttrain.core.losses import TokenLossConfig  # noqa: E402
from drafttrain.core.ops.chunked_losses import OutputHead, TargetProbs  # noqa: E402
from drafttrain.core.placed_batch import placed  # noqa: E402
from drafttrain.core.readout import Readout  # noqa: E402
from drafttrain.core.types import Batch, TargetFeatures, TargetSpec  # noqa: E402

VARIANTS = ("rounded", "float32")
NOISES = (0.02, 0.05, 0.15, 0.5)  # how far the drafter's states are from the target's
COMPARED = ("soft_cross_entropy", "forward_kl", "total_variation")
DEFAULTS = {"jsd_beta": 0.5, "lk_eta": 3.0, "top_k": 10}
CONF = HERE / "conf"  # of the experiments
BF16 = "hardware.train_dtype=bfloat16 hardware.ranks=1 hardware.threads=1"


def rounded_linear(
    values: Tensor, weight: Tensor, bias: Tensor | None = None, fused: bool | None = None
) -> Tensor:
    """Return the product as bfloat16 rounds it, in float32."""
    bias = None if bias is None else bias.to(values.dtype)
    product = functional.linear(values, weight.to(values.dtype), bias)
    return product.to(torch.promote_types(values.dtype, torch.float32))


@contextlib.contextmanager
def logits_of(variant: str) -> Iterator[None]:
    """Compute the losses from rounded or from float32 logits in the block."""
    before = chunked.wide_linear, chunked.multiplies_into_float32
    if variant == "rounded":  # weights stay in bfloat16, as for a device that needs no copies
        chunked.wide_linear, chunked.multiplies_into_float32 = rounded_linear, lambda _: True
    try:
        yield
    finally:
        chunked.wide_linear, chunked.multiplies_into_float32 = before


def gradient(
    loss: str, head: Tensor, final: Tensor, states: Tensor, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return the gradient of the states in one dtype, and the loss of a position."""
    config = TokenLossConfig(losses={loss: 1.0}, **DEFAULTS)
    states = states.to(torch.float32 if dtype == torch.bfloat16 else dtype).requires_grad_()
    readout = Readout(head.to(dtype), head.to(dtype))
    every = torch.arange(len(states), device=states.device)
    target = TargetProbs(readout, final.to(dtype), every, None)
    labels = torch.zeros_like(every)
    device = states.device.type
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        sums, *_ = chunked.chunked_losses(
            config, [1.0], [OutputHead.of(readout)], [states], every[None], labels, target
        )
    sums.sum().backward()
    return states.grad, float(sums.detach()) / len(states)  # type: ignore[return-value]


def gradients(device: str, vocab: int = 32768, width: int = 512) -> list[dict[str, Any]]:
    """Return the relative error of the gradient, by loss and likeness of drafter and target."""
    rows = []
    torch.manual_seed(0)
    states = torch.randn(32, width)
    head = (3 * torch.randn(vocab, width) / width**0.5).bfloat16().to(device)
    for noise in NOISES:
        own = (states + noise * torch.randn(32, width)).bfloat16().to(device)
        final = states.bfloat16().to(device)
        _, distance = gradient("total_variation", head, final, own, torch.float64)
        for loss in COMPARED:
            exact, _ = gradient(loss, head, final, own, torch.float64)
            row: dict[str, Any] = {"acceptance": 1 - distance, "loss": loss}
            for variant in VARIANTS:
                with logits_of(variant):
                    found, _ = gradient(loss, head, final, own, torch.bfloat16)
                row[variant] = float((found.double() - exact).norm() / exact.norm())
            rows.append(row)
    return rows


def form_of(family: str, vocab: int, width: int, length: int, device: str) -> Form:
    """Return a training step on features of a random target, in bfloat16."""
    torch.manual_seed(0)
    half = {"dtype": torch.bfloat16, "device": device}
    heads = width // 64
    spec = TargetSpec(
        *("random", "0" * 64, "llama", vocab, width, 3 * width, 8, heads, heads, 64),
        *(1e-5, 1e4, 1 << 17, (1,), None, None),
    )
    values = content_of("drafter", family)
    config = locate(values.pop("_target_"))
    drafted = min(vocab, 32000) if family == "eagle3" else vocab  # as published EAGLE-3
    if family == "eagle3":
        values |= {"draft_vocab_coverage": 1.0, "draft_vocab_size": drafted}
    head = torch.randn(vocab, width, **half) / width**0.5
    head[drafted:] *= 1e-2  # so that the draft vocabulary has the target's likeliest tokens
    readout = Readout(
        torch.randn(vocab, width, **half) / width**0.5, head, torch.ones(width, **half)
    )
    drafter = config(**values).build(spec)
    counts = (torch.arange(vocab) < drafted).long()
    drafter.prepare(counts, readout.to(torch.device("cpu")))
    drafter.to(device)
    tokens = torch.randint(drafted, (1, length))
    places, ones = torch.arange(length)[None], torch.ones_like(tokens)
    batch = placed(Batch(tokens, ones.bool(), places, 0 * ones), torch.device(device))
    states = {layer: torch.randn(1, length, width, **half) for layer in drafter.captures}
    features = TargetFeatures(states, torch.randn(1, length, width, **half), readout)
    return Form(lambda: drafter(batch, features, NoChance()), drafter, batch, "bfloat16")


def step_costs(device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return seconds and peak memory of steps with each kind of logits, timed in turns."""
    rows = []
    for family in options.families:
        for vocab in options.vocabs:
            form = form_of(family, vocab, options.width, options.length, device)
            times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            row: dict[str, Any] = {"family": family, "vocab": vocab}
            for variant in VARIANTS:
                with logits_of(variant):
                    form.step()
                    row[f"{variant} MB"] = form.peak() / 1e6
            for turn in range(options.repeats):
                for variant in VARIANTS if turn % 2 else reversed(VARIANTS):
                    with logits_of(variant):
                        times[variant].append(form.step())
            for variant in VARIANTS:
                row[f"{variant} ms"] = 1e3 * statistics.median(times[variant])
            pairs = zip(times["float32"], times["rounded"], strict=True)
            row["time ratio"] = statistics.median(a / b for a, b in pairs)
            row["memory ratio"] = row["float32 MB"] / row["rounded MB"]
            rows.append(row)
            del form
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows


def trained(variant: str, line: str, logs: Path) -> tuple[str, bool]:
    """Train by a line of `side_by_side.py` with one kind of logits."""
    with logits_of(variant):
        return run(line, logs)


def acceptance(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every family with each kind of logits and each seed; return acceptance lengths."""
    out = options.out.resolve()
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    lines = []
    for seed in options.seeds:
        for family in options.families:
            for variant in VARIANTS:
                name = f"{family}-{variant}-{seed}"
                lines.append(
                    (
                        variant,
                        f"{name}: train --config-dir={CONF} +experiment=equal_tokens "
                        f"run.name={name} "
                        f"run.dir={out / name} run.seed={seed} drafter={family} "
                        f"data.batch_size=1024 data.cache_dir={out / 'selfgen'} "
                        f"trainer.max_steps={options.steps} trainer.validate_every={options.steps} "
                        f"trainer.save_every={options.steps} "
                        f"trainer.validation_prompts={options.prompts} {BF16} {options.more}",
                        logs,
                    )
                )
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        if failed := [name for name, well in pool.starmap(trained, lines, chunksize=1) if not well]:
            sys.exit(f"failed, see {logs}: {' '.join(failed)}")
    rows = []
    for family in options.families:
        row: dict[str, Any] = {"family": family}
        files = {
            variant: [out / f"{family}-{variant}-{seed}/metrics.jsonl" for seed in options.seeds]
            for variant in VARIANTS
        }
        for variant in VARIANTS:
            found = [validation(file)[0]["val/acceptance_length"] for file in files[variant]]
            row[variant] = statistics.mean(found)
            row[f"{variant} by seed"] = " ".join(f"{value:.3f}" for value in found)
        summed = {
            variant: sum(validation(file)[1] for file in files[variant]) for variant in VARIANTS
        }
        row["longer"], row["standard error"] = longer(summed["float32"], summed["rounded"])
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    """Print rows as markdown."""
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure, print, and write logits.json."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/logits"))
    parser.add_argument("--parts", nargs="+", default=["gradients", "steps", "acceptance"])
    parser.add_argument("--families", nargs="+", default=["eagle", "eagle3"])
    parser.add_argument("--vocabs", nargs="+", type=int)
    parser.add_argument("--width", type=int, default=4096 if cuda else 576, help="of the target")
    parser.add_argument("--length", type=int, default=4096 if cuda else 512, help="tokens a step")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="of training for the acceptance")
    parser.add_argument("--prompts", type=int, default=128, help="that are decoded after it")
    parser.add_argument("--processes", type=int, default=12 if cuda else 2)
    parser.add_argument("--threads", type=int, default=1, help="of the steps, on a CPU")
    parser.add_argument("--more", default="", help="overrides of every training")
    options = parser.parse_args()
    options.vocabs = options.vocabs or ([4096, 32768, 131072] if cuda else [4096, 49152])
    device = "cuda" if cuda else "cpu"
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "logits.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    name = torch.cuda.get_device_name() if cuda else f"CPU, {options.threads} threads"
    result |= {"device": name, "torch": torch.__version__}
    parts = {
        "gradients": lambda: gradients(device),
        "steps": lambda: step_costs(device, options),
        "acceptance": lambda: acceptance(options),
    }
    for part in options.parts:
        started = time.monotonic()
        result[part] = parts[part]()
        print(f"\n{part}: {name}, torch {torch.__version__}, {time.monotonic() - started:.0f} s\n")
        table(result[part])
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
