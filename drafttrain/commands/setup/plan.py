"""From a configuration to a plan: which accelerator, how many ranks, which share of the peak."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from statistics import median

import torch
import yaml

from drafttrain.config.compose import as_plain, compose, load_choice, recorded
from drafttrain.config.groups import choices, conf_dir, follow_up, told_target
from drafttrain.config.overrides import UsageError, spelled
from drafttrain.config.sections import CaptureConfig, PlanConfig, TrainConfig
from drafttrain.data.conversations import HubConfig, JsonlConfig, SelfgenConfig
from drafttrain.drafters.base import DrafterConfig
from drafttrain.drafters.shared.model_source import in_drafters_words
from drafttrain.plan.accelerator import Accelerator, accelerator, matching, processor
from drafttrain.plan.advice import ServingPlan, plan_serving, plan_training
from drafttrain.plan.config import PlanSettings
from drafttrain.plan.job import Job
from drafttrain.plan.memory import place, refuse_unless_fitting
from drafttrain.plan.pages import short_form
from drafttrain.plan.serving import as_it_is, rate_of
from drafttrain.plan.shapes import Shape, inflated, settings_of, shape_of
from drafttrain.plan.throughput import cost
from drafttrain.plan.trace import DrafterCost, Load, UnknownCostError, trace
from drafttrain.plan.units import GIB
from drafttrain.report.card import read_run
from drafttrain.runtime.config import HardwareConfig
from drafttrain.runtime.hardware import choose_train_dtype, dtype_name
from drafttrain.runtime.ranks import ALONE, Ranks
from drafttrain.runtime.run_folder import METRICS_FILE, PROVENANCE
from drafttrain.runtime.settings import AUTO, require
from drafttrain.runtime.tracker import SPEED, read_metrics
from drafttrain.runtime.untrusted_input import read_typed, shown
from drafttrain.target.placement import (
    SERVING_SHARE,
    TARGET_SHARE,
    Placement,
    free_bytes,
    gpus_to_serve,
    placement_of,
)
from drafttrain.target.pretrained.config import ModelConfig, RandomModelConfig
from drafttrain.target.pretrained.hub import cached_config
from drafttrain.target.store.config import StoredFeaturesConfig
from drafttrain.target.vllm.config import VllmConfig

SETTLING = 2  # first lines of metrics, left out: the run still compiles and fills caches
FASTEST = 1e12  # tokens per second: no machine reaches it, so a file that has more is wrong
PLAIN_TEXT = re.compile(r"[A-Za-z/~.][\w/~.-]*")  # which the command line takes without quotes
MEASURE_S, GLANCE_S = 0.15, 0.02  # seconds to time products on a CPU, and as long for memory


def plan_of(config: PlanConfig) -> ServingPlan:
    """Return the whole plan; ValueError where none can be made."""
    settings = config.plan
    chip = accelerator_of(config.hardware, MEASURE_S)
    if settings.measured is not None:
        chip = replace(chip, efficiency=measured_efficiency(Path(settings.measured), chip))
    job = job_of(config, settings, chip)
    plan = plan_serving(job, settings, *acceptance_of(settings, job.drafter, config.model.name))
    if not config.drafter.trainable:
        return plan
    shardings = [load_choice("deepspeed", name) for name in choices("deepspeed")]
    if config.deepspeed not in shardings:
        shardings.append(config.deepspeed)
    shardings.sort(key=lambda way: (way.enabled, way.stage, way.offloads_optimizer))
    placement, stored = _asked(config)
    plan = plan_training(plan, config.deepspeed, placement, shardings, stored)
    if config.hardware.accelerator and config.hardware.ranks == AUTO and job.load.ranks == 1:
        text = "One rank is planned: hardware.ranks=8, or the launcher of the run, says how many."
        plan = replace(plan, advice=(text, *plan.advice))
    return plan


def _asked(config: PlanConfig | TrainConfig) -> tuple[str, bool]:
    """Return where the target is to go, "stored" for nowhere, and whether features are stored."""
    features, placement = config.features, config.hardware.target_placement
    if not isinstance(features, StoredFeaturesConfig):
        return placement, False
    return placement if features.validate else "stored", True


def acceptance_of(settings: PlanSettings, drafter: str, target: str) -> tuple[float, str]:
    """Return the chance of each drafted token if the one before came through, and who measured it.

    A given length comes first, then plan.run's report: the one named "default" counts, else the
    first one of chains, if it is of this drafter and this target. "" where none was measured.
    """
    if settings.acceptance_length is not None:
        return rate_of(settings.acceptance_length, settings.depth), "plan.acceptance_length's"
    reports = {} if settings.run is None else read_run(Path(settings.run))[1]
    for name, report in sorted(reports.items(), key=lambda one: one[0] != "default"):
        length = report.summary.acceptance_length.micro
        same = (report.drafter, report.target) == (drafter, target)
        if length is not None and not report.tree and same:
            measured = f"by the report {shown(name)} of {settings.run}"
            return rate_of(length, report.depth), measured
    return settings.conditional_acceptance, ""


def foresee(config: TrainConfig, ranks: Ranks = ALONE) -> tuple[list[str], Placement | None]:
    """Return the plan's short form for `train`, and where the run is to put the target.

    ValueError for what cannot fit on this machine. None where the target cannot be planned. Rank 0
    plans for all, with the free memory of the fullest device.
    """
    free = min(ranks.gather_objects(free_bytes(ranks.device)))
    found = ranks.broadcast_object(ranks.on_rank_0(lambda: _foreseen(config, free)))
    return found[0], found[1] and Placement(**found[1])


def _foreseen(config: TrainConfig, free: int) -> tuple[list[str], dict[str, str] | None]:
    hardware, own = config.hardware, config.deepspeed
    chip = accelerator_of(hardware, GLANCE_S, free)
    try:
        job = job_of(config, default_settings(), chip, free)
    except UnknownCostError as error:  # no reason to refuse
        return [f"plan: none, {error}"], None
    (placement, stored), more = _asked(config), plan_command(config)
    if hardware.check_fit:
        # Without a GPU, the plan of a machine that has some says more than that of this one.
        elsewhere = "h100x8" if chip.is_cpu else None
        refuse_unless_fitting(job, own, placement, lambda: plan_command(config, elsewhere))
    lines = short_form(job, cost(job, place(job, own, placement), stored), more)
    return lines, vars(job.placement)


def plan_command(
    config: TrainConfig | CaptureConfig,
    hardware: str | None = None,
    command: str = "plan",
    *more: str,
) -> str:
    """Return the command that plans a run with all its settings; hardware: another's instead.

    command: another that takes the settings, with `more` arguments.
    """
    words = told_target(config.model)
    known = {field.name for field in fields(PlanConfig)} & vars(config).keys()
    if hardware is not None:
        words, known = [*words, f"hardware={hardware}"], known - {"hardware"}
    for whole in (True, False):  # choices first: they change what other keys are by default
        usual = as_plain(compose(command, [*more, *words]))  # not checked: data.path is null
        for section in sorted(known):
            theirs, name = usual[section], getattr(config, section).name
            if whole and name != theirs["name"] and name in choices(section):
                words.append(f"{section}={name}")
            elif not whole and section != "model":
                for key, value in vars(getattr(config, section)).items():
                    if value != theirs.get(key, value) and key != "name":
                        plain = isinstance(value, str) and PLAIN_TEXT.fullmatch(value)
                        words.append(f"{section}.{key}={value if plain else spelled(value)}")
    return follow_up(command, *more, *words)


def spread_to_serve(model: ModelConfig, hardware: HardwareConfig, asked: int | str) -> int:
    """Return on how many GPUs commands are to serve a target in bfloat16; 1 if nobody knows.

    By this machine's GPUs, or those of hardware.accelerator, or without either by an H100's.
    """
    if asked != AUTO:
        return int(asked)
    gpu = torch.cuda.is_available() and hardware.device != "cpu"
    named = replace(hardware, accelerator=hardware.accelerator or (None if gpu else "h100"))
    with suppress(UnknownCostError):
        shape = inflated(model, shape_of(model))
        memory = accelerator_of(replace(named, device="auto"), GLANCE_S).memory
        size = shape.bytes(2, model.quantization)
        return gpus_to_serve(size, memory, shape.num_attention_heads)
    return 1


def default_settings() -> PlanSettings:
    """Return the section `plan` as conf/plan.yaml has it."""
    return PlanSettings(**yaml.safe_load((conf_dir() / "plan.yaml").read_text())["plan"])


def job_of(
    config: PlanConfig | TrainConfig,
    settings: PlanSettings,
    chip: Accelerator,
    free: float | None = None,
) -> Job:
    """Return what is planned, with target and drafter counted.

    free: bytes that a rank of this very run has for the target; None: no run is started.
    ValueError for a drafter that is neither trained nor a language model; UnknownCostError where
    the target's architecture, or the number of steps, is not known before anything is loaded.
    """
    model, hardware, data, trainer = config.model, config.hardware, config.data, config.trainer
    ranks, ranks_here = ranks_of(hardware, chip)
    gpus = ranks if free is None else torch.cuda.device_count()
    if free is not None and "WORLD_SIZE" not in os.environ:
        ranks = ranks_here = 1
    here = free is not None or hardware.accelerator is None
    limit = data.limit if isinstance(data, JsonlConfig | HubConfig) else None  # else unknown
    conversations = data.num_conversations if isinstance(data, SelfgenConfig) else limit
    plain = shape_of(model)
    length = settings.length or min(data.max_length, plain.max_positions)
    if trainer.unsized:
        if conversations is None and config.drafter.trainable:
            raise UnknownCostError(
                "trainer=auto takes its steps from the data, which is not read for a plan: give "
                "trainer.max_steps and trainer.tokens_per_step, or data.limit"
            )
        count, rate = conversations or 1, config.drafter.lr
        steps = partial(_num_steps, count, length)
        trainer = trainer.sized(count * length, steps, plain.hidden_size, rate)
    load = Load(
        # A step with fewer tokens than its micro batches hold has fewer rows in each.
        rows=max(1, min(hardware.micro_batch, -(-trainer.tokens_per_step // (length * ranks)))),
        length=length,
        ranks=ranks,
        ranks_here=ranks_here,
        tokens_per_step=trainer.tokens_per_step,
        loss_share=settings.loss_share,
        dtype=dtype_name(_train_dtype(hardware, chip, here)),
        checkpointing=hardware.gradient_checkpointing,
        low=hardware.weights_dtype == "bfloat16",
        on_cpu=chip.is_cpu,
        averaged=trainer.ema_decay > 0,
    )
    shape, price = inflated(model, plain), settings.price_per_hour
    target_bytes = shape.bytes(load.width, model.quantization)
    share = chip.memory / (ranks_here if chip.is_cpu else 1) if free is None else free
    asked = hardware.target_placement
    placement = placement_of(asked, model, settings_of(model), target_bytes, share, ranks)
    # Where a device map is asked for, plain python starts one process.
    alone = placement.kind != "device_map" or (asked == "device_map" and free is None)
    return Job(
        target=model.label,
        drafter=config.drafter.name,
        shape=shape,
        parts=drafter_cost(config.drafter, model, plain, load),
        load=load,
        chip=chip,
        max_steps=trainer.max_steps,
        muon=config.optimizer.muon,
        data_tokens=None if conversations is None else conversations * length,
        target_bytes=target_bytes,
        origin=_origin(model),
        checkpoints=trainer.keep_checkpoints + 1,
        placement=placement,
        gpus=1 if chip.is_cpu else max(1, gpus),
        maps=1 if alone else ranks,
        host_room=_host_room(
            settings, free is not None or not (chip.is_cpu or hardware.accelerator)
        ),
        engine_bytes=_engine_bytes(
            config.vllm, chip, target_bytes, shape.num_attention_heads, gpus if ranks == 1 else 1
        ),
        price_per_hour=chip.price_per_hour if price is None else price,
    )


def _host_room(settings: PlanSettings, here: bool) -> float:
    """Return the bytes that layers may take of a host's memory; infinite where nobody knows it."""
    if settings.host_gib is None:
        return TARGET_SHARE * free_bytes(torch.device("cpu")) if here else inf
    return TARGET_SHARE * settings.host_gib * GIB


def _train_dtype(hardware: HardwareConfig, chip: Accelerator, here: bool) -> torch.dtype:
    """Return the dtype of training, as a run chooses it; here: on this machine."""
    if chip.is_cpu or hardware.train_dtype != AUTO or (here and torch.cuda.is_available()):
        return choose_train_dtype(hardware, torch.device("cpu" if chip.is_cpu else "cuda"))
    return torch.bfloat16  # which every accelerator of conf/ has


def _engine_bytes(
    engine: VllmConfig, chip: Accelerator, target_bytes: float, heads: int, gpus: int
) -> float:
    """Return the bytes that vLLM takes of each of a rank's accelerators, with the target in it."""
    if chip.is_cpu:
        return target_bytes + engine.cpu_cache * GIB
    if engine.devices is not None:  # it has accelerators of its own
        return 0.0
    spread = engine.tensor_parallel
    if spread == AUTO:  # as `engine_gpus` chooses
        enough = gpus_to_serve(target_bytes, chip.memory, heads, SERVING_SHARE * engine.memory)
        spread = min(enough, max(1, gpus))
    return max(engine.memory * chip.memory, target_bytes / int(spread))


def _num_steps(conversations: int, length: int, tokens_per_step: int, epochs: float) -> int:
    """Return the steps of epochs, as `Batches` would cut conversations of one length into them."""
    an_epoch = min(conversations, max(1, round(conversations * length / tokens_per_step)))
    return max(1, ceil(round(epochs * an_epoch, 6)))


def drafter_cost(
    drafter: DrafterConfig, model: ModelConfig, target: Shape, load: Load
) -> DrafterCost:
    """Return the cost of a drafter that is trained, or of a language model that drafts as it is."""
    if drafter.trainable:
        return trace(drafter, target, lambda: settings_of(model), load)
    source = drafter.draft_model
    if source is None:
        raise ValueError(
            f"drafter={drafter.name} has nothing to train, and so nothing to plan; "
            "choose another drafter"
        )
    draft = draft_shape(source)
    return as_it_is(draft, target, draft.bytes(load.width, source.quantization))


def draft_shape(source: ModelConfig) -> Shape:
    """Return the language model that drafts, as conf/model or its config.json describes it.

    ValueError, in terms of drafter.path, where neither is on this machine.
    """
    shapes = [load_choice("model", name).shape or {} for name in choices("model")]
    listed = [shape for shape in shapes if source.repo and shape.get("of") == source.repo]
    if source.repo and not listed and cached_config(source.repo, source.revision) is None:
        raise ValueError(
            "drafter.path must be a directory, or a repository whose config.json is in the Hub's "
            f"cache, to be planned, got {source.repo}; `hf download {source.repo} config.json` "
            "puts it there"
        )
    try:
        return shape_of(replace(source, shape=listed[0] if listed else None))
    except ValueError as error:
        text = in_drafters_words(str(error), source.name)
        raise ValueError(f"drafter.path cannot be planned: {text}") from error


def _origin(model: ModelConfig) -> str:
    if isinstance(model, RandomModelConfig) or model.path or model.repo is None:
        return ""
    gated = (model.shape or {}).get("of") == model.repo and (model.shape or {}).get("gated")
    return model.repo + (", gated: needs a login (hf auth login)" if gated else "")


def ranks_of(hardware: HardwareConfig, chip: Accelerator) -> tuple[int, int]:
    """Return the number of ranks, launched or to be launched, and how many run on this machine."""
    launched = int(os.environ.get("WORLD_SIZE", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or launched
    if hardware.ranks != "auto":  # of each machine
        each = int(hardware.ranks)
        return each * max(1, launched // max(1, here)), each
    if launched:
        return launched, here
    one = chip.is_cpu or ":" in hardware.device  # as in cuda:1
    found = 1 if one else max(1, torch.cuda.device_count())
    return found, found


def accelerator_of(
    hardware: HardwareConfig, measure_s: float, free: float | None = None
) -> Accelerator:
    """Return what hardware.accelerator names, or what this machine has for hardware.device.

    free: the run is about to start on this machine, whose GPUs have so many bytes left.
    """
    name, device = hardware.accelerator, hardware.device
    gpu = device != "cpu" and torch.cuda.is_available()
    if name is not None and name not in choices("accelerator"):
        raise UsageError(
            f"hardware.accelerator must be one of {', '.join(sorted(choices('accelerator')))}, "
            f"or null to detect it, got {name}"
        )
    if free is not None and not gpu:
        name = "cpu"
    given = name is not None or gpu or not device.startswith("cuda")
    need = f"name what to plan for, as there is no GPU here for hardware.device={device}"
    require(given, "hardware.accelerator", need, "null", "; as in hardware.accelerator=h100")
    dtype = choose_train_dtype(hardware, torch.device("cuda" if gpu else "cpu"))
    entry = partial(load_choice, "accelerator")
    place = torch.device(device.replace("auto", "cuda"))
    if name == "cpu" or (name is None and not gpu):
        found = processor(entry("cpu"), dtype, measure_s)
    elif name is not None:
        found = accelerator(entry(name), f"Peaks of conf/accelerator/{name}.yaml")
    else:
        device_name = torch.cuda.get_device_properties(place).name
        known = matching(device_name, {each: entry(each) for each in choices("accelerator")})
        config, how = known or entry("a100_80gb"), f"{device_name}, found here"
        if known is None:
            how += f"; not in conf/accelerator: peaks of {config.name} are assumed"
        found = accelerator(config, how)
    if gpu and free is not None:
        return replace(found, memory=float(free))
    if gpu and name is None:
        found = replace(found, memory=float(torch.cuda.get_device_properties(place).total_memory))
    return found


@dataclass(frozen=True)
class _Machine:
    cpu: str
    gpus: list[str]


@dataclass(frozen=True)
class _HardwareProvenance:
    hardware: _Machine


def measured_efficiency(folder: Path, chip: Accelerator) -> float:
    """Return the share of the peak that a run reached: its median tokens/s over the roofline's.

    ValueError where the folder has none, or its run was on another kind of machine.
    """
    config = recorded(folder, TrainConfig, "plan.measured")
    file = folder / METRICS_FILE
    rows = read_metrics(file) if file.is_file() else []
    told = [row.get(SPEED) for row in rows]
    speeds = [x for x in told if isinstance(x, int | float) and 0 < x < FASTEST]
    if not speeds or not (folder / PROVENANCE).is_file():
        raise ValueError(
            f"plan.measured must be a run with tokens/s in its {METRICS_FILE}, and a {PROVENANCE}, "
            f"got {folder}"
        )
    machine = read_typed(_HardwareProvenance, folder / PROVENANCE).hardware
    if bool(machine.gpus) == chip.is_cpu:
        raise ValueError(
            f"plan.measured must be a run on the accelerator that is planned, {chip.name}, got "
            f"{folder}, which ran on {shown(', '.join(machine.gpus) or machine.cpu)}"
        )
    job = job_of(config, default_settings(), replace(chip, efficiency=1.0, launch_s=0.0))
    placement, stored = _asked(config)
    found = place(job, config.deepspeed, placement)
    ideal = cost(job, found, stored).speed.tokens_per_s
    return float(median(speeds[SETTLING:] or speeds)) / ideal
