"""The import of DeepSpeed, set to the device of the ranks and without its warnings."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drafttrain.runtime.ranks import Ranks


def import_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed (seconds, the first time) and set it to the device of these ranks."""
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    # DeepSpeed takes the GPU of LOCAL_RANK, even in a single process: 1 for hardware.device=cuda:1.
    gpu = ranks.device.index
    os.environ["LOCAL_RANK"] = str(ranks.local_rank if gpu is None else gpu)
    with warnings.catch_warnings(action="ignore"):
        import deepspeed

    if ranks.device.type == "cpu":
        # It would compile a faster all-reduce for CPUs, which needs a C++ compiler and a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings about DeepSpeed's own code; code of ours that it runs still warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
        warnings.filterwarnings("ignore", module=r"deepspeed\.")
        yield
