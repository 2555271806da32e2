"""The settings of the vLLM engine."""

from dataclasses import dataclass

from drafttrain.runtime import limits
from drafttrain.runtime.settings import Settings


@dataclass(frozen=True, kw_only=True)
class VllmConfig(Settings):
    """Where vLLM is installed, and what it may use of this machine."""

    section = "vllm"

    name: str
    python: str | None
    devices: str | None  # as CUDA_VISIBLE_DEVICES spells them
    tensor_parallel: limits.CountOrAuto
    memory: limits.PositiveFraction  # of each GPU
    cpu_cache: limits.PositiveInt  # GiB
    max_num_seqs: limits.PositiveInt
    patience: limits.PositiveFloat  # seconds
