"""OpenMP's threads sleep soon after their work, however drafttrain is imported."""

import os
import subprocess
import sys

import pytest
from paths import PYTHONPATH

SPIN = "import os; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"


def output(program: str, **environment: str) -> str:
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": PYTHONPATH, **environment},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, "100 None"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
        ({"OMP_WAIT_POLICY": "passive"}, "None passive"),
    ],
    ids=["ours", "the user's", "the user's policy"],
)
def test_importing_the_package_sets_it_before_torch(
    environment: dict[str, str], found: str
) -> None:
    assert output(f"import drafttrain; {SPIN}", **environment) == found


# Runs a product by two threads and then one by none, five times: a worker that spins takes time
# meanwhile. On a busy machine it gets no core in some of them, so the most of the five counts.
SPINNING = """
import torch
import drafttrain
import time
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import COMMANDS
from drafttrain.runtime import hardware
from drafttrain.runtime.hardware import choose_device
hardware.num_cores = lambda: 2
if {set_up}:
    config = typed(compose("plan", ["hardware=cpu", "hardware.threads=2"]), COMMANDS["plan"])
    choose_device(config.hardware)
torch.set_num_threads(2)
values, most = torch.ones(1 << 16), 0.0
for _ in range(5):
    values.add_(1)
    spent = 0.0
    for _ in range(100):
        values.add_(1)
        before = time.process_time()
        time.sleep(0.002)
        spent += time.process_time() - before
    most = max(most, spent)
print(most)
"""


def test_where_torch_came_first_its_threads_sleep_soon_too() -> None:
    spins = float(output(SPINNING.format(set_up=False))) > 0.05
    assert float(output(SPINNING.format(set_up=True))) < 0.025
    if not spins:
        pytest.skip("no thread could be seen spinning here without `choose_device`")
