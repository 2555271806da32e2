"""Backward, step, clip and save behind one face: plain torch, or DeepSpeed's ZeRO."""

from drafttrain.engine.config import DeepSpeedConfig
from drafttrain.engine.engine import (
    OPTIMIZER_FILE,
    Engine,
    NonFiniteError,
    PlainEngine,
    build_engine,
)

__all__ = [
    "OPTIMIZER_FILE",
    "DeepSpeedConfig",
    "Engine",
    "NonFiniteError",
    "PlainEngine",
    "build_engine",
]
