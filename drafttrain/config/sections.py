"""The sections of each command, and the class of each section."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from drafttrain.runtime.run_folder import RunConfig

if TYPE_CHECKING:  # slow to import: a mistyped key is reported before that
    from drafttrain.data.conversations import DataConfig
    from drafttrain.decode.config import ChatSettings
    from drafttrain.drafters.base import DrafterConfig
    from drafttrain.evaluation.config import EvalConfig, TuneSettings
    from drafttrain.formats.write.config import ExportSettings
    from drafttrain.plan.config import PlanSettings
    from drafttrain.report.config import CompareSettings
    from drafttrain.runtime.config import HardwareConfig
    from drafttrain.runtime.tracker import TrackerConfig
    from drafttrain.target.answers.config import RegenerateSettings
    from drafttrain.target.pretrained.config import ModelConfig
    from drafttrain.target.store.config import FeaturesConfig, StoreConfig
    from drafttrain.target.vllm.config import VllmConfig
    from drafttrain.training.config import TrainerConfig
    from drafttrain.training.engine.config import DeepSpeedConfig, OptimizerConfig

# The class of each section. A yaml may name a subclass of it with `_target_`, and nothing else.
SECTIONS = {
    "run": "drafttrain.runtime.run_folder.RunConfig",
    "model": "drafttrain.target.pretrained.config.ModelConfig",
    "data": "drafttrain.data.conversations.DataConfig",
    "features": "drafttrain.target.store.config.FeaturesConfig",
    "store": "drafttrain.target.store.config.StoreConfig",
    "drafter": "drafttrain.drafters.base.DrafterConfig",
    "trainer": "drafttrain.training.config.TrainerConfig",
    "optimizer": "drafttrain.training.engine.config.OptimizerConfig",
    "hardware": "drafttrain.runtime.config.HardwareConfig",
    "deepspeed": "drafttrain.training.engine.config.DeepSpeedConfig",
    "tracker": "drafttrain.runtime.tracker.TrackerConfig",
    "eval": "drafttrain.evaluation.config.EvalConfig",
    "export": "drafttrain.formats.write.config.ExportSettings",
    "tune": "drafttrain.evaluation.config.TuneSettings",
    "chat": "drafttrain.decode.config.ChatSettings",
    "compare": "drafttrain.report.config.CompareSettings",
    "regenerate": "drafttrain.target.answers.config.RegenerateSettings",
    "vllm": "drafttrain.target.vllm.config.VllmConfig",
    "plan": "drafttrain.plan.config.PlanSettings",
    "accelerator": "drafttrain.plan.config.AcceleratorConfig",
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    run: RunConfig
    model: "ModelConfig"
    data: "DataConfig"
    features: "FeaturesConfig"
    drafter: "DrafterConfig"
    trainer: "TrainerConfig"
    optimizer: "OptimizerConfig"
    hardware: "HardwareConfig"
    deepspeed: "DeepSpeedConfig"
    tracker: "TrackerConfig"
    eval: "EvalConfig"
    vllm: "VllmConfig"


@dataclass(frozen=True, kw_only=True)
class SavedRunConfig:
    """What a command takes from a saved run, with `eval` of its own."""

    run: RunConfig
    model: "ModelConfig"
    data: "DataConfig"
    drafter: "DrafterConfig"
    hardware: "HardwareConfig"
    eval: "EvalConfig"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SavedRunConfig):
    tracker: "TrackerConfig"


@dataclass(frozen=True, kw_only=True)
class TuneConfig(EvaluateConfig):
    tune: "TuneSettings"


@dataclass(frozen=True, kw_only=True)
class ChatConfig(SavedRunConfig):
    """The configuration of `chat` and `generate`: how to decode, and what is asked."""

    chat: "ChatSettings"


@dataclass(frozen=True, kw_only=True)
class ExportConfig(SavedRunConfig):
    """The configuration of `export`, with the format to write."""

    export: "ExportSettings"


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The configuration of `compare`; the rest is read from the runs."""

    compare: "CompareSettings"
    tracker: "TrackerConfig"


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """The configuration of `capture`: whose features, of which text, for which drafters."""

    store: "StoreConfig"
    model: "ModelConfig"
    data: "DataConfig"
    drafter: "DrafterConfig"
    hardware: "HardwareConfig"
    vllm: "VllmConfig"


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    regenerate: "RegenerateSettings"
    model: "ModelConfig"
    data: "DataConfig"
    hardware: "HardwareConfig"
    vllm: "VllmConfig"


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The configuration of `plan`: that of `train`, and the numbers to calculate with."""

    plan: "PlanSettings"
    model: "ModelConfig"
    data: "DataConfig"
    features: "FeaturesConfig"
    drafter: "DrafterConfig"
    trainer: "TrainerConfig"
    optimizer: "OptimizerConfig"
    hardware: "HardwareConfig"
    deepspeed: "DeepSpeedConfig"
    vllm: "VllmConfig"


COMMANDS: dict[str, type] = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "tune": TuneConfig,
    "compare": CompareConfig,
    "chat": ChatConfig,
    "generate": ChatConfig,
    "export": ExportConfig,
    "capture": CaptureConfig,
    "regenerate": RegenerateConfig,
    "plan": PlanConfig,
}
Config = TypeVar("Config")  # one of these
