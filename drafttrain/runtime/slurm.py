"""The batch script that `--slurm` prints: torchrun on every node, saving and requeueing in time."""

import re
import shlex
import sys
from collections.abc import Sequence

from drafttrain.runtime.config import HardwareConfig
from drafttrain.runtime.untrusted_input import did_you_mean, shown

GPUS = 8  # where hardware.ranks is auto
CPUS_PER_RANK = 8
WARNING_S = 300  # how long before the time limit SLURM sends its signal: what a save may take
SAVING_S = 240  # the part of it that torchrun gives its ranks before it kills them
# Options of sbatch (23.11 to 25.05) that suit a job of ours: no array, no other user, no wrap.
NAMES = """
account acctg-freq bb bbf begin chdir cluster-constraint clusters comment constraint container
container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution error exclude exclusive export export-file extra
extra-node-info get-user-env gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task
gres gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill nodefile
nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode
output overcommit oversubscribe partition power prefer priority profile propagate qos quiet
reboot requeue reservation resv-ports segment signal sockets-per-node spread-job stepmgr
switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task use-min-nodes
verbose wait-all-nodes wckey
"""
OPTIONS = frozenset(NAMES.split())
VALUE = re.compile(r"[^\s#'\"\\]*")  # of one option: a directive's line ends it at a space
SCRIPT = """\
#!/bin/bash
# `sbatch FILE` submits it; options given to sbatch win over these lines: sbatch --nodes=4 FILE
{options}

set -u
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
threads=$((${{SLURM_CPUS_PER_TASK:-{cpus}}} / {ranks}))
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-{cpus}}}"
# How long torchrun waits for ranks that save before it kills them.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={saving}

# {again}
srun --kill-on-bad-exit=1 \\
    {python} -m torch.distributed.run \\
    --nnodes "$SLURM_NNODES" --nproc-per-node {ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" \\
    --rdzv-id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" \\
    -m drafttrain \\
    {call} &
step=$!

out_of_time=
trap 'out_of_time=yes; kill -TERM "$step"' USR1 # SLURM's, {warning} s before the end
trap 'kill -TERM "$step"' TERM # scancel, or preemption, after which SLURM itself queues again
wait "$step"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do # a signal ended the wait, not the step
    wait "$step"
    code=$?
done
if [ -n "$out_of_time" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def batch_script(call: Sequence[str], options: str, hardware: HardwareConfig, name: str) -> str:
    """Return a script for sbatch that runs `python -m drafttrain CALL...` on every node it gets.

    options: KEY=VALUE,... of sbatch, which extend or replace the script's own; ValueError for what
    cannot be one. name: of the job.
    """
    on_cpu = hardware.device == "cpu"
    ranks = hardware.ranks if hardware.ranks != "auto" else 1 if on_cpu else GPUS
    lines = {
        "job-name": re.sub(r"[^\w.-]", "_", name),
        "nodes": "1",
        "ntasks-per-node": "1",
        "cpus-per-task": str(ranks * CPUS_PER_RANK),
        "time": "24:00:00",
        "signal": f"B:USR1@{WARNING_S}",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    if not on_cpu:
        lines["gpus-per-node"] = str(ranks)
    lines |= _options(options)
    if "gpus-per-node" in lines and hardware.ranks == "auto":
        gpus = lines["gpus-per-node"].rpartition(":")[2]  # h100:4
        ranks = int(gpus) if gpus.isdecimal() else ranks
    call = list(call)
    again = "Queued again, it resumes where it stopped."
    if call[0] == "train":
        again = "run.resume=true starts anew where there is no checkpoint, else it resumes."
        if not any(text.startswith("run.resume=") for text in call):
            call.append("run.resume=true")
    told = [f"{key}={value}" if value else key for key, value in lines.items()]
    return SCRIPT.format(
        options="\n".join(f"#SBATCH --{option}" for option in [*told, "requeue"]),
        cpus=lines["cpus-per-task"],
        ranks=ranks,
        python=shlex.quote(sys.executable),
        again=again,
        call=" \\\n    ".join(shlex.quote(text) for text in call),
        saving=SAVING_S,
        warning=WARNING_S,
    )


def _options(text: str) -> dict[str, str]:
    """Parse KEY=VALUE,... or KEY,...; what is no option extends the value before: nodelist=a,b."""
    found: dict[str, str] = {}
    last = None
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in OPTIONS and not equals and last is not None and found[last]:
            key, value = last, f"{found[last]},{part}"
        if key not in OPTIONS:
            raise ValueError(
                "--slurm must be options of sbatch such as nodes=2,time=4:00:00, got "
                f"{shown(repr(part))}{did_you_mean(key, OPTIONS).rstrip(';')}"
            )
        if not VALUE.fullmatch(value) or not value.isprintable():
            raise ValueError(
                f"--slurm: {key} must have a value on one line, without spaces, quotes and #, got "
                f"{shown(repr(value))}"
            )
        if key == "cpus-per-task" and not (value.isascii() and value.isdecimal()):
            raise ValueError(f"--slurm: cpus-per-task must be a number, got {shown(repr(value))}")
        found[key] = value
        last = key
    return found
