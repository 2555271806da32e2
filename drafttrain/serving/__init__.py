"""vLLM at work for us: another interpreter, told what to do line by line."""

from drafttrain.serving.config import VllmConfig
from drafttrain.serving.engine import Answer, Documents, Engine
from drafttrain.serving.process import (
    VARIABLE,
    Event,
    Process,
    find_python,
    meaningful_line,
    require_vllm,
)

__all__ = [
    "VARIABLE",
    "Answer",
    "Documents",
    "Engine",
    "Event",
    "Process",
    "VllmConfig",
    "find_python",
    "meaningful_line",
    "require_vllm",
]
