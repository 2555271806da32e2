"""One function per command: typed configuration -> objects -> worker. The architecture diagram."""

import copy
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from drafttrain import __version__
from drafttrain.assemble import (
    describe_drafter,
    describe_target,
    load_drafter,
    load_samples,
    load_target_to_decode,
    recorded_spec,
)
from drafttrain.checkpoint import Checkpoints, load_state
from drafttrain.config import EvaluateConfig, ExportConfig, TrainConfig
from drafttrain.data.batches import Batches, token_counts
from drafttrain.data.chat import split_holdout
from drafttrain.data.prompts import BUILTIN_PROMPTS, overlap_line, overlap_record, read_prompts
from drafttrain.drafters.ngram import NgramConfig
from drafttrain.engine import build_engine
from drafttrain.evaluate import check_lossless, check_prompts, measure
from drafttrain.export.card import CardData, read_run, served_as
from drafttrain.export.hub import plan_push, push
from drafttrain.export.vllm import FILES, export_vllm
from drafttrain.hardware import choose_device, choose_draft_dtype, choose_train_dtype
from drafttrain.ranks import join_ranks
from drafttrain.report import Report, TimingInfo, build_report, summary_table, write_report
from drafttrain.run import (
    CHECKPOINTS,
    CONFIG,
    PROVENANCE,
    check_run_folder,
    provenance,
    write_config,
)
from drafttrain.target.target import load_target
from drafttrain.terminal import console
from drafttrain.tracker import open_tracker
from drafttrain.train import METRIC
from drafttrain.train import train as run_training
from drafttrain.validate import Validation


def train(config: TrainConfig) -> None:
    """Train a drafter on what the target says, from data to the best checkpoint."""
    check_run_folder(config)
    ranks = join_ranks(choose_device(config.hardware))
    dtype = choose_train_dtype(config.hardware, ranks.device)
    say = console.print if ranks.is_main else lambda line: None
    for line in intentions(config):
        say(line)
    torch.manual_seed(config.run.seed)
    started = time.monotonic()
    target = load_target(config.model, dtype, str(ranks.device))
    say(describe_target(target, started))
    drafter = config.drafter.build(target.spec)
    if not drafter.capabilities.trainable:
        raise ValueError(f"drafter={config.drafter.name} must be trainable; it has no weights")
    samples, skipped = load_samples(config.data, target, ranks)
    for line in skipped.lines():
        say(line)
    samples, held_out = split_holdout(samples, config.data.holdout, config.data.seed)
    drafter.prepare(token_counts(samples, target.spec.vocab_size), target.readout)
    say(describe_drafter(drafter))
    trainer = config.trainer
    engine = build_engine(
        drafter,
        config.deepspeed,
        device=str(ranks.device),
        dtype=dtype,
        betas=(trainer.beta1, trainer.beta2),
        eps=1e-8,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
    )
    batches = Batches(
        samples,
        trainer.tokens_per_step,
        config.hardware.micro_batch,
        config.run.seed,
        engine.rank,
        engine.world_size,
    )
    num_tokens = sum(len(sample.tokens) for sample in samples)
    say(
        f"data: {len(samples):,} conversations of {num_tokens:,} tokens, "
        f"{batches.steps_in_epoch:,} steps an epoch; {len(held_out)} held out"
    )
    validation = Validation(
        target,
        engine,
        held_out,
        num_prompts=trainer.validation_prompts,
        depth=config.eval.depth,
        max_new_tokens=trainer.validation_tokens,
    )
    folder = Path(config.run.dir)
    checkpoints = Checkpoints(folder / CHECKPOINTS, trainer.keep_checkpoints)
    latest = checkpoints.latest()
    if engine.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / CONFIG)
        record = provenance(sys.argv[1:]) | {
            "target": asdict(target.spec),
            "data": skipped.to_dict(),
        }
        (folder / PROVENANCE).write_text(json.dumps(record, indent=2) + "\n")
    tracker = open_tracker(
        config.tracker,
        folder,
        config=asdict(config),
        resume_step=None if latest is None else load_state(latest).step,
        is_main=engine.is_main,
    )
    try:
        run_training(
            engine, target, batches, checkpoints, tracker, trainer, validation, config.run.seed
        )
        tracker.table("validation", *validation.table())
    finally:
        tracker.finish()
    best = checkpoints.best()
    if best is not None:
        metric = load_state(best).best_metric
        say(f"best checkpoint: {best} ({METRIC} {metric:.3f} at depth {validation.depth})")
    say(f"next: python -m drafttrain evaluate run.dir={folder}")


def intentions(config: TrainConfig) -> list[str]:
    """Return what `train` is about to do, before anything is loaded."""
    model, trainer, hardware = config.model, config.trainer, config.hardware
    return [
        f"drafttrain {__version__}: train {config.drafter.name} for {model.name} ({model.origin})",
        f"  data={config.data.name}  steps={trainer.max_steps:,} of {trainer.tokens_per_step:,} "
        f"tokens  lr={trainer.lr:g}  hardware={hardware.name}  deepspeed={config.deepspeed.name}",
        f"  run folder: {config.run.dir}",
    ]


def evaluate(config: EvaluateConfig) -> None:
    """Measure a run's drafter in the whole speculative loop and write the report."""
    folder, settings = Path(config.run.dir), config.eval
    device = choose_device(config.hardware)
    source = settings.prompts or BUILTIN_PROMPTS
    prompts, skipped = read_prompts(source, settings.prompts_per_task)
    overlap = overlap_record(source)
    for line in [*skipped.lines(), overlap_line(overlap)]:
        console.print(line)
    reference = load_target(config.model, torch.float32, device)
    drafter, checkpoint = load_drafter(folder, config.drafter, reference.spec)
    drafter.to(device).eval()
    target, choice = load_target_to_decode(config.model, config.hardware, reference)
    draft_dtype = choose_draft_dtype(config.hardware, target.device, choice.dtype)
    how = f"{choice.reason}; the drafter in {str(draft_dtype).removeprefix('torch.')}"
    console.print(f"decoding in {how}")
    template = config.data.template
    check_prompts(prompts, target, template, settings)
    lossless = check_lossless(reference, drafter, prompts, template, settings)
    drafters = {
        config.drafter.name: copy.deepcopy(drafter).to(draft_dtype),
        "ngram": NgramConfig(name="ngram", max_ngram=3, min_ngram=1).build(target.spec),
    }
    results = measure(target, drafters, prompts, template, settings, config.run.seed)
    report = build_report(
        results,
        target=config.model.name,
        drafter=config.drafter.name,
        depth=settings.depth,
        sampling=settings.sampling,
        max_new_tokens=settings.max_new_tokens,
        lossless=lossless,
        timing=TimingInfo(
            dtype=str(choice.dtype).removeprefix("torch."),
            threads=choice.threads,
            blocks=settings.blocks,
            device=device,
        ),
        provenance=provenance(sys.argv[1:])
        | {"checkpoint": str(checkpoint), "target_fingerprint": target.spec.fingerprint},
        prompts={
            "source": settings.prompts or "the prompts of the package",
            "num_prompts": len(prompts),
            "skipped": skipped.to_dict(),
            "overlap": overlap,
        },
        notes=[f"decoded in {how}"],
        resamples=settings.resamples,
        seed=config.run.seed,
    )
    place = folder / "evaluations" / settings.name
    write_report(report, place)
    latest = Checkpoints(folder / CHECKPOINTS, keep=1).latest()
    tracker = open_tracker(
        config.tracker,
        folder,
        config=asdict(config),
        resume_step=None if latest is None else load_state(latest).step,
        is_main=True,
    )
    tracker.table(f"evaluation/{settings.name}", *evaluation_table(report))
    tracker.finish()
    console.print(summary_table(report))
    console.print(f"report: {place / 'report.html'} (the same in report.md and report.json)")


def evaluation_table(report: Report) -> tuple[list[str], list[list[str | float | None]]]:
    """Return the columns and rows of an evaluation for the tracker: a row per method and task."""
    columns = ["method", "task", "acceptance_length", "acceptance_rate", "tokens_per_second"]
    columns += ["speedup", "speedup_low", "speedup_high"]
    rows: list[list[str | float | None]] = []
    drafting = {report["drafter"]: report, "ngram": report["methods"]["ngram"]}
    for method, part in drafting.items():
        for task, row in {**part["tasks"], "all": part["summary"]}.items():
            low, high = row["speedup"]["ci95"] or (None, None)
            length, speed = row["acceptance_length"]["micro"], row["tokens_per_second"]
            values = [length, row["acceptance_rate"], speed["speculative"], row["speedup"]["value"]]
            rows.append([method, task, *values, low, high])
    return columns, rows


def export(config: ExportConfig) -> None:
    """Write a run's drafter as serving engines load it, check it, and push it if asked."""
    run, settings = Path(config.run.dir), config.export
    drafter, _ = load_drafter(run, config.drafter, recorded_spec(run))
    place = Path(settings.dir or run / "export")
    record, reports = read_run(run)
    name = served_as(config.model)
    card = CardData(
        title=f"{config.drafter.name} for {config.model.name}",
        family=config.drafter.name,
        target=config.model.name,
        base_model=config.model.repo,
        license=settings.license,
        training={"data": asdict(config.data), "drafter": asdict(config.drafter)},
        provenance=record,
        reports=reports,
    )
    for line in export_vllm(drafter.eval(), name, place, settings, card).lines():
        console.print(line)
    if settings.push is None:
        return
    if settings.dry_run:
        for line in plan_push(place, FILES, settings.push, settings.private):
            console.print(line)
        return
    console.print(f"pushed to {push(place, FILES, settings.push, settings.private)}")
