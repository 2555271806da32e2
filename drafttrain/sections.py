"""The sections of each command, and the class of each section."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from drafttrain.run import RunConfig

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
