"""Features on the disk, for many runs and several drafters."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from drafttrain import __version__
from drafttrain.commands.setup.plan import plan_command
from drafttrain.commands.setup.preview import preview
from drafttrain.commands.setup.target_and_drafter import (
    check_engine,
    describe_target,
    expected_spec,
    load_on_ranks,
    load_samples,
    others_answers,
    read_samples,
    refuse_selfgen,
    refuse_without_store,
    served_to,
    shape_of,
)
from drafttrain.config.compose import load_choice
from drafttrain.config.groups import safe
from drafttrain.config.sections import CaptureConfig
from drafttrain.data.conversations import ANSWERS
from drafttrain.data.template import template_fingerprint
from drafttrain.drafters.base import Drafter
from drafttrain.runtime.disk import require_writable
from drafttrain.runtime.hardware import choose_device, choose_train_dtype, dtype_name
from drafttrain.runtime.ranks import Ranks, join_ranks
from drafttrain.runtime.run_folder import (
    CHECKPOINTS,
    CONFIG,
    PROVENANCE,
    common_to_ranks,
    provenance,
    refuse_foreign,
)
from drafttrain.runtime.settings import require
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import console
from drafttrain.target.model import Target
from drafttrain.target.served import ServedTarget
from drafttrain.target.store.capture import OWN
from drafttrain.target.store.capture import capture as write_store
from drafttrain.target.store.config import StoreConfig, StoreContents
from drafttrain.target.store.shards import read_manifest


def capture(config: CaptureConfig) -> None:
    """Write the features that drafters read to store.dir, once; resume where a capture stopped."""
    if config.data.preview:
        return preview(config)
    stop = StopRequest(": what is stored stays, and the same command resumes where it stopped")
    with stop.listening():
        with stop.at_once():
            ranks = join_ranks(choose_device(config.hardware))
            ranks = replace(ranks, goes_on="the same command resumes where it stopped")
            dtype = choose_train_dtype(config.hardware, ranks.device)
            ranks.require_equal(common_to_ranks("capture", config, dtype_name(dtype)))
        with ranks.naming_a_loss():
            capture_until(stop, ranks, config, dtype)


def capture_until(
    stop: StopRequest, ranks: Ranks, config: CaptureConfig, dtype: torch.dtype
) -> None:
    """Write the missing part of the store, until it is complete or a scheduler asks to stop."""

    def say(line: str) -> None:
        if ranks.is_main:
            console.print(line)

    folder, names = Path(config.store.dir), config.store.drafters
    drafters = [load_choice("drafter", name) for name in names] if names else [config.drafter]
    say(
        f"drafttrain {__version__}: capture for {', '.join(d.name for d in drafters)} from "
        f"{config.model.label} ({config.model.origin})"
    )
    say(f"  data={config.data.name}  hardware={config.hardware.name}  store: {folder}")
    for line in others_answers(config.data, config.model):
        say(line)
    check_store_folder(folder)
    if served := config.hardware.target_placement == "vllm":
        refuse_selfgen(config.data)
        check_engine(config, ranks)
    spec = expected_spec(config.model)
    asked = asked_by([shape_of(drafter, spec) for drafter in drafters], config.store)
    only_answers = config.data.train_on == ANSWERS
    config.data.require("train_on", only_answers, f"be {ANSWERS} for `capture`")
    ready = read_samples(config.data, config.model, ranks)
    started, longest = time.monotonic(), config.data.max_length
    with ExitStack() as stack:
        stack.enter_context(ranks.holding(folder, "store.dir", "capture", console.print))
        target: Target | ServedTarget
        if served:  # no other copy of it is needed here
            engine = served_to(ranks, config, dtype, asked.layers, longest, folder)
            target = stack.enter_context(engine)
            say(f"target: {target.spec.name}, in vLLM {target.engine.version}")
        else:
            target = load_on_ranks(config.model, dtype, ranks, config.hardware.target_placement)
            say(describe_target(target, started))
        samples, skipped = ready or load_samples(config.data, target, ranks)
        for line in skipped.lines():
            say(line)
        manifest = write_store(
            target,
            samples,
            asked,
            config.store,
            template=template_fingerprint(target.tokenizer, config.data.text_format),
            record=provenance() | {"data": skipped.to_dict()},
            micro_batch=config.hardware.micro_batch,
            ranks=ranks,
            stop=stop,
            say=say,
        )
    say(manifest.summary())
    data = replace(config.data, holdout=min(config.data.holdout, len(samples) // 4))
    trained = replace(config, data=data, drafter=drafters[0])
    stored = "features=stored", safe(f"features.dir={folder}")
    say(f"next: {plan_command(trained, None, 'train', *stored)}")


def check_store_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written or that holds a run, before a target is loaded."""
    require_writable(folder, "store.dir")
    if (folder / CONFIG).is_file() or (folder / CHECKPOINTS).is_dir():
        raise ValueError(
            f"store.dir must be a folder of its own, got {folder}, which holds a run; "
            "as in store.dir=outputs/store"
        )
    if folder.is_dir() and read_manifest(folder) is None:
        names = [path.name for path in folder.iterdir() if OWN.fullmatch(path.name)]
        refuse_foreign(folder, "store.dir", names, PROVENANCE, ("versions", "drafttrain"))


def asked_by(drafters: Sequence[Drafter], config: StoreConfig) -> StoreContents:
    """Return what drafters read; ValueError names one that no store can serve."""
    for drafter in drafters:
        refuse_without_store(drafter)
    layers = sorted({layer for drafter in drafters for layer in drafter.captures})
    if config.layers is not None:
        spec = drafters[0].spec
        layers = sorted(set(config.layers))
        wrong = [layer for layer in layers if not 0 <= layer <= spec.num_layers]
        need = f"be in 0..{spec.num_layers} for model={spec.name}"
        require(not wrong, "store.layers", need, wrong)
    something, need = bool(layers) or config.final_hidden, "be true where no layer is captured"
    require(something, "store.final_hidden", need, "false", ": nothing would be stored")
    if not config.assistant_only:
        return StoreContents(tuple(layers), None)
    reach = 1
    for drafter in drafters:
        if drafter.reach is None:
            raise ValueError(
                f"store.assistant_only must be false for drafter={drafter.config.name}, which "
                "attends to the whole conversation, got true; it suits drafters that read single "
                "positions (Drafter.reach)"
            )
        reach = max(reach, drafter.reach)
    return StoreContents(tuple(layers), reach)
