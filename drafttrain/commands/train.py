"""From data to the best checkpoint of a drafter."""

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from drafttrain import __version__
from drafttrain.commands.setup.init_from import keep_start, starting_point
from drafttrain.commands.setup.plan import foresee, plan_command
from drafttrain.commands.setup.preview import preview
from drafttrain.commands.setup.target_and_drafter import others_answers, source_of_features
from drafttrain.commands.setup.training import first_weights, gather, validation_of
from drafttrain.config.groups import follow_up
from drafttrain.config.resume import check_resumed
from drafttrain.config.sections import TrainConfig
from drafttrain.core.ops.layer_calls import LayerCalls
from drafttrain.data.batches import Batches
from drafttrain.data.prefetch import Prefetcher
from drafttrain.drafters.shared.publications import expectation
from drafttrain.runtime.disk import write_whole
from drafttrain.runtime.hardware import (
    TORCH_DTYPES,
    choose_compiler,
    choose_device,
    choose_train_dtype,
    dtype_name,
)
from drafttrain.runtime.lock import require_free
from drafttrain.runtime.ranks import LostRankError, join_ranks
from drafttrain.runtime.run_folder import (
    CHECKPOINTS,
    CONFIG,
    PROVENANCE,
    append_log,
    check_run_folder,
    common_to_ranks,
    provenance,
    write_config,
)
from drafttrain.runtime.settings import AUTO
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import console
from drafttrain.runtime.tracker import destination, open_tracker, require_tracker
from drafttrain.target.store.config import StoredFeaturesConfig
from drafttrain.training.checkpoint import WEIGHTS_FILE, Checkpoints, load_state
from drafttrain.training.config import TrainerConfig
from drafttrain.training.engine.build import build_engine
from drafttrain.training.loop import resumed
from drafttrain.training.loop import train as run_training
from drafttrain.training.validation import Validation, forecast


def train(config: TrainConfig) -> None:
    """Train a drafter to predict the target's next tokens, from data to the best checkpoint."""
    if config.data.preview:
        return preview(config)
    with StopRequest().listening() as stop, ExitStack() as held:
        try:
            train_until(stop, config, held)
        except LostRankError:
            stop.obey()  # another rank, asked to stop as this one was, may have left early
            raise


def train_until(stop: StopRequest, config: TrainConfig, held: ExitStack) -> None:
    """Train to the last step, or to the step at which a scheduler asks to stop.

    held: gets the lock on the run folder, and keeps it until it is closed.
    """
    folder = Path(config.run.dir)
    require_free(folder, "run.dir")  # before checks that would report an unfinished run there
    start = starting_point(config)
    if start is not None:
        config = replace(config, drafter=start.drafter.config)
    check_run_folder(config)
    check_resumed(config)
    require_tracker(config.tracker, folder)
    config.optimizer.check(config.deepspeed)
    if not config.drafter.trainable:
        raise ValueError(
            f"drafter={config.drafter.name} has nothing to train; evaluate it beside any run, or "
            "choose another drafter"
        )
    need = "be a number for `train`, which validates with it"
    why = ": `tune` chooses when a drafter is trained"
    config.eval.require("depth", config.eval.depth != AUTO, need, why)
    with stop.at_once():
        ranks = join_ranks(choose_device(config.hardware, partial(plan_command, config)))
        dtype = choose_train_dtype(config.hardware, ranks.device)
        ranks.require_equal(common_to_ranks("train", config, dtype_name(dtype)))
    held.enter_context(ranks.holding(folder, "run.dir", "train", console.print))
    check_run_folder(config)  # once more: another run may have ended there meanwhile
    changes = check_resumed(config)
    compiler = choose_compiler(config.hardware, ranks.device)
    if compiler:
        config.deepspeed.check_compiled()
    log_lines: list[str] = []  # lines for train.log, kept until its folder exists

    def say(line: str) -> None:
        if ranks.is_main:
            console.print(line)
            log_lines.append(line)

    for line in [*intentions(config), *destination(config.tracker), *changes]:
        say(line)
    planned, placement = foresee(config, ranks)
    for line in planned:
        say(line)
    material = gather(config, start is None, dtype, ranks, placement, say)
    drafter = first_weights(config, start, material, say)
    if ranks.is_main:
        keep_start(folder, start)
    num_tokens = sum(len(sample.tokens) for sample in material.samples)
    if config.trainer.unsized:

        def num_steps(tokens_per_step: int, epochs: float) -> int:
            return Batches(material.samples, tokens_per_step, 1, config.run.seed).num_steps(epochs)

        width, rate = drafter.spec.hidden_size, config.drafter.lr
        trainer = config.trainer.sized(num_tokens, num_steps, width, rate)
        config = replace(config, trainer=trainer)
        say(f"trainer={config.trainer.name} chose {_sizes(config.trainer)}")
        check_resumed(config)
    trainer = config.trainer
    if note := trainer.warm_up_note():
        say(note)
    engine = build_engine(
        drafter,
        config.deepspeed,
        device=str(ranks.device),
        dtype=dtype,
        betas=(trainer.beta1, trainer.beta2),
        eps=1e-8,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        weights_dtype=TORCH_DTYPES[config.hardware.weights_dtype],
        layer_calls=LayerCalls(config.hardware.gradient_checkpointing, compiler),
        optimizer=config.optimizer,
        ema_decay=trainer.ema_decay,
    )
    batches = Batches(
        material.samples,
        trainer.tokens_per_step,
        config.hardware.micro_batch,
        config.run.seed,
        engine.rank,
        engine.world_size,
    )
    say(
        f"data: {len(material.samples):,} conversations of {num_tokens:,} tokens, "
        f"{batches.num_steps(1):,} steps an epoch; {len(material.held_out)} held out"
    )
    say(expectation(config.drafter.name))
    validation = validation_of(config, material, engine, stop, dtype)
    store = material.store
    keep, skip = trainer.keep_checkpoints, config.run.skip_damaged
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep, skip)
    latest = checkpoints.to_resume(engine)
    for line in checkpoints.skipped:
        say(f"skipped because of run.skip_damaged=true: {line}")
    resume_step = None if latest is None else load_state(latest).step
    if resume_step is not None:
        done = f": at or past trainer.max_steps={trainer.max_steps}, nothing is left to train"
        say(f"resuming from {latest}{done if resume_step >= trainer.max_steps else ''}")
    elif config.run.resume:  # batch scripts always ask for it, and a mistyped name looks the same
        say(f"nothing to resume in {folder}: training begins at step 0")
    # What refuses to resume a run comes before anything of its record is written over.
    spec, metric, yardstick = material.source.spec, validation.metric, validation.yardstick
    state = resumed(engine, batches, checkpoints, spec, metric, yardstick, say)
    if isinstance(validation, Validation) and (pays := validation.measure_break_even()):
        say(f"speculation pays here from an acceptance length of {pays:.2f}, one prompt at a time")
    if engine.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / CONFIG)
        record = provenance() | {
            "target": asdict(material.source.spec),
            "data": material.skipped.to_dict(),
            "features": store.manifest.settings if store else {},
        }
        if start is not None:
            record["start"] = {"origin": start.origin, "target_fingerprint": start.fingerprint}
        write_whole(folder / PROVENANCE, json.dumps(record, indent=2) + "\n")
        append_log(folder, log_lines)
    tracker = open_tracker(
        config.tracker,
        folder,
        config=asdict(config),
        resume_step=resume_step,
        is_main=engine.is_main,
    )
    tracker.listener = forecast(trainer.max_steps, num_tokens, drafter.depth_terms, say)
    # While rank 0 writes the record, the others must not yet defer what asks them to stop.
    engine.ranks.barrier()
    read_ahead = partial(store.read, captures=drafter.captures) if store else None
    try:
        with (
            source_of_features(
                material.source, config, drafter.captures, material.everything, ranks
            ) as source,
            Prefetcher(batches, config.features.prefetch, read_ahead) as steps,
        ):
            run_training(
                engine,
                source,
                steps,
                checkpoints,
                tracker,
                trainer,
                validation,
                config.run.seed,
                stop,
                metric,
                state,
            )
        tracker.table("validation", *validation.table())
        kept = checkpoints.best() or checkpoints.latest()
        if kept is not None:
            files = [kept / WEIGHTS_FILE, folder / CONFIG]
            tracker.keep(f"drafter-{config.run.name}", "drafter", files)
    finally:
        tracker.finish()
    best = checkpoints.best()
    if best is not None:
        length = f"{metric} {load_state(best).best_metric:.3f}"
        say(f"best checkpoint: {best} ({length} at depth {validation.depth})")
    say(f"next: {follow_up('evaluate', f'run.dir={folder}')}")
    if engine.is_main:
        append_log(folder, log_lines)


def intentions(config: TrainConfig) -> list[str]:
    """Return what `train` is about to do, before anything is loaded."""
    model, trainer, hardware = config.model, config.trainer, config.hardware
    lines = [
        f"drafttrain {__version__}: train {config.drafter.name} for {model.label} ({model.origin})",
        f"  data={config.data.name}  features={config.features.name}  {_sizes(trainer)}  "
        f"optimizer={config.optimizer.name}  hardware={hardware.name}  "
        f"deepspeed={config.deepspeed.name}",
        f"  run folder: {config.run.dir}",
    ]
    if isinstance(config.features, StoredFeaturesConfig):
        return lines  # `capture` has said it
    return [*lines, *others_answers(config.data, model)]


def _sizes(trainer: TrainerConfig) -> str:
    if trainer.unsized:
        return f"trainer={trainer.name}"
    return f"steps={trainer.max_steps:,} of {trainer.tokens_per_step:,} tokens  lr={trainer.lr:g}"
