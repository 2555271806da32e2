"""What a command is told: Hydra composes yaml, frozen dataclasses check it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hydra
import yaml
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from drafttrain.choices import choices, command_groups, complete, conf_dir, offer_saved
from drafttrain.overrides import (
    ADMITTED,
    SAVED,
    UsageError,
    did_you_mean,
    load_class,
    parse,
    start_of,
    with_drafter,
    with_start,
    wrong_value,
)
from drafttrain.resume import run_to_resume, values_of_run, with_saved
from drafttrain.run import CONFIG, RunConfig, load_config

if TYPE_CHECKING:  # they import torch: a mistyped key is answered before that
    from drafttrain.capture.asked import StoreConfig
    from drafttrain.compare import CompareConfig as ComparisonConfig
    from drafttrain.data.conversations import DataConfig
    from drafttrain.drafters.base import DrafterConfig
    from drafttrain.engine import DeepSpeedConfig
    from drafttrain.evaluation.config import EvalConfig
    from drafttrain.evaluation.tune import TuneConfig as TuneSettings
    from drafttrain.export import ExportConfig as FormatConfig
    from drafttrain.hardware import HardwareConfig
    from drafttrain.plan import PlanConfig as PlanSettings
    from drafttrain.pretrained import ModelConfig
    from drafttrain.regenerate import RegenerateConfig as RegenerateSettings
    from drafttrain.serving import VllmConfig
    from drafttrain.target.store import FeaturesConfig
    from drafttrain.tracker import TrackerConfig
    from drafttrain.train import TrainerConfig

# The class of each section. A yaml may name a subclass of it with `_target_`, and nothing else.
SECTIONS = {
    "run": "drafttrain.run.RunConfig",
    "model": "drafttrain.pretrained.ModelConfig",
    "data": "drafttrain.data.conversations.DataConfig",
    "features": "drafttrain.target.store.FeaturesConfig",
    "store": "drafttrain.capture.asked.StoreConfig",
    "drafter": "drafttrain.drafters.base.DrafterConfig",
    "trainer": "drafttrain.train.TrainerConfig",
    "hardware": "drafttrain.hardware.HardwareConfig",
    "deepspeed": "drafttrain.engine.DeepSpeedConfig",
    "tracker": "drafttrain.tracker.TrackerConfig",
    "eval": "drafttrain.evaluation.config.EvalConfig",
    "export": "drafttrain.export.ExportConfig",
    "tune": "drafttrain.evaluation.tune.TuneConfig",
    "compare": "drafttrain.compare.CompareConfig",
    "regenerate": "drafttrain.regenerate.RegenerateConfig",
    "vllm": "drafttrain.serving.VllmConfig",
    "plan": "drafttrain.plan.PlanConfig",
    "accelerator": "drafttrain.plan.accelerator.AcceleratorConfig",
}
# Keys that a command takes without their section.
SHORT = {"compare": {"runs": "compare.runs"}}
# What training that starts from a run takes from it, where nothing else is chosen.
STARTED_FROM = ("model", "trainer", "drafter")
ALONE = "evaluate_without_run"  # heads an evaluation of a drafter that no run has trained


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything `train` is told."""

    run: RunConfig
    model: "ModelConfig"
    data: "DataConfig"
    features: "FeaturesConfig"
    drafter: "DrafterConfig"
    trainer: "TrainerConfig"
    hardware: "HardwareConfig"
    deepspeed: "DeepSpeedConfig"
    tracker: "TrackerConfig"
    eval: "EvalConfig"
    vllm: "VllmConfig"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Everything `evaluate` is told: the saved run, with `eval` of its own."""

    run: RunConfig
    model: "ModelConfig"
    data: "DataConfig"
    drafter: "DrafterConfig"
    hardware: "HardwareConfig"
    tracker: "TrackerConfig"
    eval: "EvalConfig"


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Everything `tune` is told: the saved run, with `eval` and `tune` of its own."""

    run: RunConfig
    model: "ModelConfig"
    data: "DataConfig"
    drafter: "DrafterConfig"
    hardware: "HardwareConfig"
    tracker: "TrackerConfig"
    eval: "EvalConfig"
    tune: "TuneSettings"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Everything `export` is told: the saved run, and the format to write."""

    run: RunConfig
    model: "ModelConfig"
    data: "DataConfig"
    drafter: "DrafterConfig"
    hardware: "HardwareConfig"
    export: "FormatConfig"


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Everything `compare` is told; the runs say the rest."""

    compare: "ComparisonConfig"
    tracker: "TrackerConfig"


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """Everything `capture` is told: whose features, of which text, for which drafters."""

    store: "StoreConfig"
    model: "ModelConfig"
    data: "DataConfig"
    drafter: "DrafterConfig"
    hardware: "HardwareConfig"
    vllm: "VllmConfig"


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Everything `regenerate` is told."""

    regenerate: "RegenerateSettings"
    model: "ModelConfig"
    data: "DataConfig"
    hardware: "HardwareConfig"
    vllm: "VllmConfig"


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Everything `plan` is told: what `train` would be, and what to count with."""

    plan: "PlanSettings"
    model: "ModelConfig"
    data: "DataConfig"
    drafter: "DrafterConfig"
    trainer: "TrainerConfig"
    hardware: "HardwareConfig"
    deepspeed: "DeepSpeedConfig"


COMMANDS: dict[str, type] = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "tune": TuneConfig,
    "compare": CompareConfig,
    "export": ExportConfig,
    "capture": CaptureConfig,
    "regenerate": RegenerateConfig,
    "plan": PlanConfig,
}
Config = TypeVar(
    "Config",
    TrainConfig,
    EvaluateConfig,
    TuneConfig,
    CompareConfig,
    ExportConfig,
    CaptureConfig,
    RegenerateConfig,
    PlanConfig,
)


def compose(command: str, overrides: Sequence[str], config_dir: Path | None = None) -> DictConfig:
    """Return the resolved configuration of a command; nothing heavy is imported.

    For every command but `train`, the choice `saved` of a group is what run.dir/config.yaml holds.
    `evaluate` needs no run where the drafter is given, as a choice or by drafter.path.
    config_dir: a folder laid out like conf/, whose choices join ours.
    Raises UsageError in one line for an unknown section, choice or key and for a missing value.
    """
    parsed = parse(command, [_in_full(command, text) for text in overrides])
    sections = [field.name for field in fields(COMMANDS[command])]
    head = command
    if command == "evaluate":
        parsed = with_drafter(parsed)
        head = _head(parsed)
    groups = command_groups(head)
    resumed = start = None
    if command == "train":
        resumed = run_to_resume(
            parsed, lambda texts: str(compose(command, texts, config_dir).run.dir)
        )
        start = start_of(parsed) if resumed is None else None
    if resumed is not None:
        restored = [group for group in groups if group in resumed]
        offer_saved(resumed, restored, sections)
        parsed = with_saved(parsed, restored)
        groups |= {group: SAVED for group in restored}
    if start is not None:
        offered = STARTED_FROM if (start / CONFIG).is_file() else ()
        if offered:
            saved_run = load_config(start)
            if "trainer" not in saved_run:
                raise UsageError(
                    f"run.init_from must be the folder of a run that was trained, got {start}, "
                    "that of an evaluation; give the directory of the drafter it measured"
                )
            offer_saved(saved_run, [*offered], sections)
        parsed = with_start(parsed, start, offered)
        groups |= {group: SAVED for group in offered}
    if command != "train" and SAVED in groups.values():
        saved_run = _saved_run(command, parsed)
        offer_saved(saved_run, [g for g in groups if groups[g] == SAVED], sections)
    chosen, values = [], []
    for override in parsed:
        section = _section_of(override, sections)
        if section != override.key_or_group:
            values.append(override)
            continue
        if section not in groups:
            raise UsageError(f"{section} is a section: set its keys, as in {section}.dir=...")
        saved = [SAVED] if groups[section] == SAVED else []
        _check_choice(override, [*sorted(choices(section, config_dir)), *saved])
        if command == "train" and not (start or resumed) and override.value() == ADMITTED:
            raise UsageError(
                "drafter=admitted was trained elsewhere: measure it, python -m drafttrain evaluate "
                "drafter.path=DIR, or train it further, python -m drafttrain train "
                "run.init_from=DIR"
            )
        chosen.append(str(override.input_line))
    search = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = hydra.compose(head, overrides=[*search, *chosen])
        for key, value in values_of_run(resumed).items() if resumed else ():
            OmegaConf.update(config, key, value)
        for override in values:
            key, added = override.key_or_group, override.type != OverrideType.CHANGE
            _check_key(key, added, config)
            # A dict replaces the one before it, as a list does; DeepSpeed's own keys are joined.
            merge = key.split(".")[0] == "deepspeed"
            OmegaConf.update(config, key, override.value(), merge=merge, force_add=added)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise UsageError(f"{missing[0]} must be given, as in {missing[0]}=VALUE")
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UsageError(_one_line(error)) from error
    for section in sections:
        target = config[section].get("_target_")
        if target is not None:
            _check_target(section, target, config_dir)
    return OmegaConf.create({section: config[section] for section in sections})


def typed(config: DictConfig, schema: type[Config]) -> Config:
    """Return the frozen dataclasses of a composed configuration; this imports their modules.

    Raises ValueError in one line that names section.key, what must hold and what was got.
    """
    return schema(**{field.name: _section(config, field.name) for field in fields(schema)})


def load_choice(section: str, name: str) -> Any:
    """Return one entry of a group as its dataclass, such as the drafter every report refers to."""
    files = choices(section)
    if name not in files:
        raise UsageError(f"{section}={name} is not a choice; choices: {', '.join(sorted(files))}")
    content = yaml.safe_load(files[name].read_text())
    return _section(OmegaConf.create({section: content}), section)


def recorded(folder: Path, schema: type[Config]) -> Config:
    """Return what a run was told, with the keys that its choices have gained since."""
    saved = load_config(folder)
    sections = {field.name: complete(field.name, saved) for field in fields(schema)}
    return typed(OmegaConf.create(sections), schema)


def _in_full(command: str, text: str) -> str:
    key, equals, value = text.partition("=")
    return f"{SHORT.get(command, {}).get(key, key)}{equals}{value}"


def _section_of(override: Override, sections: list[str]) -> str:
    section = override.key_or_group.split(".")[0]
    if section not in sections:
        raise UsageError(
            f"no section is called {section}{did_you_mean(section, sections)} "
            f"sections: {', '.join(sections)}"
        )
    return section


def _check_choice(override: Override, options: list[str]) -> None:
    section, value = override.key_or_group, override.value()
    if value not in options:
        raise UsageError(
            f"{section}={value} is not a choice{did_you_mean(str(value), options)} "
            f"choices: {', '.join(options)}"
        )


def _check_key(dotted: str, added: bool, config: DictConfig) -> None:
    path = dotted.split(".")
    if added and path[0] == "deepspeed":  # its `config` holds DeepSpeed's own keys
        return
    node: Any = config
    for depth, key in enumerate(path):
        keys = [str(k) for k in node] if isinstance(node, DictConfig) else []
        if key not in keys:
            name = config[path[0]].get("name") if depth == 1 and choices(path[0]) else None
            section = f"{path[0]}={name}" if name else ".".join(path[:depth])
            own = f"; another dict replaces it: {section}='{{{key}: ...}}'"
            if path[0] == "deepspeed":
                own = f"; a key of DeepSpeed's own takes a plus: +{dotted}=..."
            raise UsageError(
                f"{section} has no key {key}{did_you_mean(key, keys)} "
                f"keys: {', '.join(k for k in keys if k != '_target_') or 'none'}"
                f"{own if isinstance(node, DictConfig) and depth > 1 else ''}"
            )
        node = None if OmegaConf.is_missing(node, key) else node[key]


def _check_target(section: str, target: str, config_dir: Path | None) -> None:
    """Let a yaml name a class outside this package only if it is the user's own file."""
    if target.startswith("drafttrain."):
        return
    own = [yaml.safe_load(file.read_text()) for file in choices(section, config_dir).values()]
    if target not in [content.get("_target_") for content in own]:
        raise UsageError(
            f"{section}._target_ must name a class of drafttrain or of a yaml of yours, "
            f"got {target}; add its yaml with --config-dir FOLDER (FOLDER/{section}/NAME.yaml)"
        )


def _saved_run(command: str, parsed: list[Override]) -> dict[str, dict[str, Any]]:
    named = [override.value() for override in parsed if override.key_or_group == "run.dir"]
    if not named:
        found = sorted(Path("outputs").glob("*/config.yaml"), key=lambda p: p.stat().st_mtime)
        example = found[-1].parent if found else "outputs/demo"
        raise UsageError(f"run.dir must be given: python -m drafttrain {command} run.dir={example}")
    return load_config(Path(str(named[-1])))


def _head(parsed: list[Override]) -> str:
    """Return the yaml that heads an evaluation: of a run, or of a drafter that is given."""
    given = {override.key_or_group: override.value() for override in parsed}
    folder = given.get("run.dir")
    is_run = folder is not None and (Path(str(folder)) / CONFIG).is_file()
    return ALONE if "drafter" in given and not is_run else "evaluate"


def _section(config: DictConfig, key: str) -> Any:
    base = load_class(key, SECTIONS[key])
    value = OmegaConf.to_container(config[key], resolve=True)
    assert isinstance(value, dict)
    target = value.pop("_target_", None)
    kind = base if target is None else load_class(key, target)
    if not issubclass(kind, base):
        raise UsageError(
            f"{key}._target_ must name a subclass of {base.__name__}, got {kind.__name__}"
        )
    names = [field.name for field in fields(kind)]
    # Under its own key, so that OmegaConf's errors name drafter.num_heads, not num_heads.
    schema = OmegaConf.create({key: OmegaConf.structured(kind)})
    OmegaConf.set_readonly(schema[key], False)  # frozen dataclasses arrive read-only
    try:
        merged = OmegaConf.select(OmegaConf.merge(schema, {key: value}), key)
    except ConfigKeyError as error:
        raise UsageError(
            f"{error.full_key} is not a field of {kind.__name__}"
            f"{did_you_mean(str(error.key), names)} fields: {', '.join(names)}"
        ) from error
    except OmegaConfBaseException as error:
        raise UsageError(wrong_value(error, kind, value)) from error
    unset = [name for name in names if OmegaConf.is_missing(merged, name)]
    if unset:
        raise UsageError(f"{key}.{unset[0]} must be given, as in {key}.{unset[0]}=VALUE")
    plain = OmegaConf.to_container(merged)
    assert isinstance(plain, dict)
    return kind(**{name: plain[name] for name in names})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
