"""The settings of the vLLM engine."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """Where vLLM is installed, and what it may use of this machine."""

    name: str
    python: str | None
    devices: str | None  # as CUDA_VISIBLE_DEVICES spells them
    tensor_parallel: int
    memory: float  # share of each GPU
    cpu_cache: int  # GiB
    max_num_seqs: int
    patience: float  # seconds

    def __post_init__(self) -> None:
        for key in ("tensor_parallel", "cpu_cache", "max_num_seqs"):
            if getattr(self, key) < 1:
                raise ValueError(f"vllm.{key} must be at least 1, got {getattr(self, key)}")
        if not 0 < self.memory <= 1:
            raise ValueError(f"vllm.memory must be a share in (0, 1], got {self.memory}")
        if not self.patience > 0:
            raise ValueError(f"vllm.patience must be above 0 seconds, got {self.patience}")
