"""DeepSpeed as it is imported here: told where the ranks compute, and quiet."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drafttrain.runtime.ranks import Ranks


def import_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed (seconds, the first time), told where these ranks compute."""
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    # It takes the GPU of this number, even in a single process: of hardware.device=cuda:1, 1.
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
    """Keep to itself what DeepSpeed's own code is warned of; ours, run by it, still warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
        warnings.filterwarnings("ignore", module=r"deepspeed\.")
        yield
