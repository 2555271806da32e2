"""The script that made the embedded target: it trains, goes on, and writes a target."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import model_config
from paths import ROOT

from drafttrain.target.model import load_target

SCRIPT = ROOT / "scripts" / "train_tiny_target.py"

ENVIRONMENT = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "PYTHONUNBUFFERED": "1"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_tiny_target_trains_goes_on_and_loads(tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    rows = [
        [
            {"role": "user", "content": f"What is {number} and {number + 1}?"},
            {"role": "assistant", "content": f"It is {2 * number + 1}, as you know. " * 4},
        ]
        for number in range(20)
    ]
    data.write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    small = (
        *("--data", str(data), "--held-out", "4", "--vocab-size", "300", "--hidden-size", "64"),
        *("--layers", "2", "--context", "32", "--batch", "4", "--micro-batch", "2"),
        *("--device", "cpu", "--save-every", "0"),
    )
    done = run(*small, "--out", str(out), "--tokens", str(6 * 4 * 32))
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "training.json").read_text())
    assert (record["steps"], record["trained_tokens"]) == (6, 768)
    target = load_target(model_config(out), torch.bfloat16, "cpu")
    assert target.spec.num_layers == 2
    assert target.tokenizer.apply_chat_template([{"role": "user", "content": "1"}])

    # Killed after its third step, the same command goes on and ends with the same loss.
    again = tmp_path / "again"
    command = (*small, "--out", str(again), "--tokens", str(6 * 4 * 32))
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *command], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 3: held-out loss") for line in process.stdout)
        process.kill()
    assert not (again / "training.json").exists()
    going_on = run(*command)
    assert going_on.returncode == 0, going_on.stderr
    assert re.search(r"resuming from step [345]", going_on.stdout)
    resumed = json.loads((again / "training.json").read_text())
    assert resumed["steps"] == 6
    assert resumed["held_out_loss"] == record["held_out_loss"]

    other = run(*small, "--out", str(again), "--tokens", str(7 * 4 * 32))
    assert other.returncode != 0
    assert "holds a run with other settings; give another --out" in other.stderr
