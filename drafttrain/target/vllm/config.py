"""The settings of the vLLM engine."""

from dataclasses import dataclass
from typing import Any

from drafttrain.runtime.settings import AUTO, Settings, is_count_or_auto


@dataclass(frozen=True, kw_only=True)
class VllmConfig(Settings):
    """Where vLLM is installed, and what it may use of this machine."""

    section = "vllm"

    name: str
    python: str | None
    devices: str | None  # as CUDA_VISIBLE_DEVICES spells them
    tensor_parallel: Any  # a number, or AUTO
    memory: float  # share of each GPU
    cpu_cache: int  # GiB
    max_num_seqs: int
    patience: float  # seconds

    def __post_init__(self) -> None:
        self.require_at_least(1, "cpu_cache", "max_num_seqs")
        known = is_count_or_auto(self.tensor_parallel)
        self.require("tensor_parallel", known, f"be at least 1, or {AUTO}")
        self.require("memory", 0 < self.memory <= 1, "be a share in (0, 1]")
        self.require("patience", self.patience > 0, "be above 0 seconds")
