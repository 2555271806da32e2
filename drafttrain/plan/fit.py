"""Whether a run can fit on this machine: it is refused only where it surely cannot."""

import torch

from drafttrain.plan.accelerator import host_memory
from drafttrain.plan.job import Job
from drafttrain.plan.memory import STATES, Sharding, memory_of, place
from drafttrain.plan.units import gib


def refuse_unless_fitting(job: Job, sharding: Sharding, placement: str) -> None:
    """Raise ValueError where training needs more memory than there is, even at the lowest estimate.

    A device map may use the disk as well, slowly; auto may choose it for every GPU and the host.
    """
    asked = place(job, sharding, placement)
    if asked.least <= asked.limit or placement == "device_map":
        return
    if placement == "auto" and not job.chip.is_cpu:
        spread = memory_of(job, sharding, "stored").least + job.target_bytes
        if spread <= max(1, torch.cuda.device_count()) * job.chip.memory + host_memory():
            return
    states = sum(asked.parts[name] for name in STATES)
    raise ValueError(
        f"hardware must hold the run: it takes at least {gib(asked.least)} where {job.machine} has "
        f"{gib(asked.limit)} (weights of model={job.target} {gib(asked.parts['target'])}, drafter "
        f"and optimizer {gib(states)}, activations of hardware.micro_batch={job.load.rows} "
        f"{gib(asked.parts['working'])}); `python -m drafttrain plan` with the same model, "
        "drafter, trainer and hardware shows what fits; hardware.check_fit=false tries all the same"
    )
