"""One function per command: typed configuration -> objects -> worker. The architecture diagram."""

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
    record_evaluation,
    recorded_spec,
)
from drafttrain.checkpoint import Checkpoints, load_state
from drafttrain.compare import compare_runs, comparison_table
from drafttrain.config import (
    CompareConfig,
    EvaluateConfig,
    ExportConfig,
    TrainConfig,
    TuneConfig,
)
from drafttrain.data.batches import Batches, token_counts
from drafttrain.data.chat import split_holdout
from drafttrain.engine import build_engine
from drafttrain.evaluation.evaluate import evaluate_drafter
from drafttrain.evaluation.measure import PLAIN
from drafttrain.evaluation.tune import as_rows, choose, tune_drafter, write_tuned
from drafttrain.export.card import CardData, read_run, served_as
from drafttrain.export.hub import plan_push, push
from drafttrain.export.vllm import export_vllm
from drafttrain.hardware import choose_device, choose_draft_dtype, choose_train_dtype
from drafttrain.measuring import set_up, tuned_export
from drafttrain.pretrained import load_tokenizer
from drafttrain.ranks import join_ranks
from drafttrain.report import (
    Report,
    summary_table,
    witness_table,
    write_report,
)
from drafttrain.report.comparison_pages import comparison_summary, write_comparison
from drafttrain.report.tuning import rich_table, tune_tables, write_tuning
from drafttrain.run import (
    CHECKPOINTS,
    CONFIG,
    PROVENANCE,
    append_log,
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
from drafttrain.witnessing import served_by_vllm, witnessed


def train(config: TrainConfig) -> None:
    """Train a drafter on what the target says, from data to the best checkpoint."""
    check_run_folder(config)
    if not config.drafter.trainable:
        raise ValueError(
            f"drafter={config.drafter.name} has nothing to train; evaluate it beside any run, or "
            "choose another drafter"
        )
    ranks = join_ranks(choose_device(config.hardware))
    dtype = choose_train_dtype(config.hardware, ranks.device)
    said: list[str] = []  # what train.log gets, once there is a folder for it

    def say(line: str) -> None:
        if ranks.is_main:
            console.print(line)
            said.append(line)

    for line in intentions(config):
        say(line)
    torch.manual_seed(config.run.seed)
    started = time.monotonic()
    target = load_target(config.model, dtype, str(ranks.device))
    say(describe_target(target, started))
    drafter = config.drafter.build(target.spec)
    drafter.initialise(target.model, target.tokenizer)
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
        draft_dtype=choose_draft_dtype(config.hardware, ranks.device, dtype),
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
        append_log(folder, said)
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
    if engine.is_main:
        append_log(folder, said)


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
    """Measure a drafter in the whole speculative loop and write the report."""
    setup = set_up(config)
    settings, parts = setup.settings, setup.parts
    served = served_by_vllm(config, setup) if settings.engine == "vllm" else None
    record_evaluation(config)
    place = setup.folder / "evaluations" / settings.name
    report, results, journals = evaluate_drafter(
        parts,
        setup.prompts,
        setup.template,
        settings,
        folder=place,
        conditions=setup.conditions,
        timing=setup.timing,
        report_settings={
            "target": config.model.label,
            "provenance": provenance(sys.argv[1:])
            | {
                "checkpoint": None if setup.checkpoint is None else str(setup.checkpoint),
                "drafter": setup.origin,
                "target_fingerprint": parts.target.spec.fingerprint,
            },
            "prompts": setup.about_prompts,
            "notes": setup.notes,
        },
        seed=config.run.seed,
    )
    write_report(report, place)
    if served is not None:  # what we measured is on the disk, whatever becomes of vLLM
        report = witnessed(report, results, config, setup, served, place / "vllm")
        write_report(report, place)
    for journal in journals:
        journal.finish()
    console.print(summary_table(report))
    if report["vllm"] is not None:
        console.print(rich_table(witness_table(report["vllm"])))
    if report["certificate"] is not None:
        console.print(f"certificate: {report['certificate']['statement']}")
    console.print(f"report: {place / 'report.html'} (the same in report.md and report.json)")
    tracker = open_tracker(
        config.tracker,
        setup.folder,
        config=asdict(config),
        resume_step=None,
        is_main=True,
        append=True,
    )
    tracker.table(f"evaluation/{settings.name}", *evaluation_table(report))
    tracker.finish()


def tune(config: TuneConfig) -> None:
    """Predict every depth's speedup on this machine, measure it, choose, and write the choice."""
    setup = set_up(config, needs_exact=False)
    predictions, costs = tune_drafter(
        setup.parts,
        setup.prompts,
        setup.template,
        setup.settings,
        config.tune,
        folder=setup.folder / "tune",
        conditions=setup.conditions,
        seed=config.run.seed,
    )
    record_evaluation(config)
    file = write_tuned(setup.folder, predictions, costs, setup.conditions)
    rows = as_rows(predictions)
    tables = tune_tables(rows, choose(predictions))
    for table in tables:
        console.print(rich_table(table))
    title = f"{config.drafter.name} on {config.model.label}: which depth"
    page = write_tuning(setup.folder, title, rows, tables, setup.notes)
    console.print(f"chosen depths: {file}; the whole of it: {page}")
    console.print(
        f"next: python -m drafttrain evaluate run.dir={setup.folder} eval.tuned=true, "
        f"or export run.dir={setup.folder} export.tuned=true"
    )


def evaluation_table(report: Report) -> tuple[list[str], list[list[str | float | None]]]:
    """Return the columns and rows of an evaluation for the tracker: a row per method and task."""
    columns = ["method", "task", "acceptance_length", "acceptance_rate", "tokens_per_second"]
    columns += ["speedup", "speedup_low", "speedup_high"]
    rows: list[list[str | float | None]] = []
    others = {name: part for name, part in report["methods"].items() if name != PLAIN}
    drafting = {report["drafter"]: report, **others}
    for method, part in drafting.items():
        for task, row in {**part["tasks"], "all": part["summary"]}.items():
            low, high = row["speedup"]["ci95"] or (None, None)
            length, speed = row["acceptance_length"]["micro"], row["tokens_per_second"]
            values = [length, row["acceptance_rate"], speed["speculative"], row["speedup"]["value"]]
            rows.append([method, task, *values, low, high])
    return columns, rows


def compare(config: CompareConfig) -> None:
    """Set evaluated runs side by side, paired by prompt, and write the comparison."""
    settings = config.compare
    comparison = compare_runs(settings, provenance(sys.argv[1:]))
    place = Path(settings.dir)
    write_comparison(comparison, place)
    console.print(comparison_summary(comparison))
    console.print(f"comparison: {place / 'compare.html'} (the same in compare.md, compare.json)")
    told = {"run": {"name": settings.name}} | asdict(config)
    tracker = open_tracker(
        config.tracker, place, config=told, resume_step=None, is_main=True, append=True
    )
    tracker.table(f"comparison/{settings.name}", *comparison_table(comparison))
    tracker.finish()


def export(config: ExportConfig) -> None:
    """Write a run's drafter as serving engines load it, check it, and push it if asked."""
    run = Path(config.run.dir)
    settings = tuned_export(config.export, run)
    drafter, _ = load_drafter(run, config.drafter, recorded_spec(run))
    place = Path(settings.dir or run / "export")
    record, reports = read_run(run)
    name = served_as(config.model)
    card = CardData(
        title=f"{config.drafter.name} for {config.model.name}",
        family=config.drafter.name,
        target=config.model.name,
        base_model=None if config.model.path else config.model.repo,
        license=settings.license,
        training={"data": asdict(config.data), "drafter": asdict(config.drafter)},
        provenance=record,
        reports=reports,
    )
    done = export_vllm(
        drafter.eval(), name, place, settings, card, lambda: load_tokenizer(config.model)
    )
    for line in done.lines():
        console.print(line)
    if settings.push is None:
        return
    if settings.dry_run:
        for line in plan_push(place, tuple(done.sizes), settings.push, settings.private):
            console.print(line)
        return
    console.print(f"pushed to {push(place, tuple(done.sizes), settings.push, settings.private)}")
