"""A GGUF of a drafter, made by llama.cpp's own converter from the directory that it reads."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from drafttrain.drafters.serving.engines import CONVERTER, GGUF, LLAMA_CPP, convert_command
from drafttrain.drafters.serving.layout import ServedLayout
from drafttrain.runtime.environment import environment_without_secrets

BY_HAND = "leave export.converter out, and run the printed command in the converter's environment"


def check_converter(converter: str | None) -> None:
    """Raise ValueError unless it is a checkout of llama.cpp, or None."""
    if converter is not None and not (Path(converter) / CONVERTER).is_file():
        raise ValueError(
            f"export.converter must be a checkout of llama.cpp, with {CONVERTER}, got {converter}"
        )


def convert(
    layout: ServedLayout, converter: str, target: Path, folder: Path, name: str, dtype: torch.dtype
) -> None:
    """Write `GGUF` into a drafter's directory.

    converter: a checkout of llama.cpp. target: the target's directory. name: the GGUF's own. dtype:
    of the weights; norms are float32 in any GGUF. ValueError with the converter's last line where
    it fails.
    """
    words = convert_command(layout, converter, str(target), str(folder), dtype)
    words += ["--model-name", name]
    # A program of others gets none of the user's tokens.
    given = {
        **environment_without_secrets(os.environ),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    done = subprocess.run(
        [sys.executable, *words[1:]], capture_output=True, text=True, check=False, env=given
    )
    if done.returncode != 0 or not (folder / GGUF).is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise ValueError(
            f"export.converter={converter} must convert this drafter (export.dir keeps nothing), "
            f"got: {said}; {_advice(said)}"
        )


def _advice(said: str) -> str:
    """Return what to do about the converter's last line."""
    if "pre-tokenizer was not recognized" in said:
        return (
            "it knows tokenizers by a hash, and not this target's: a checkout that knows it is "
            f"needed ({LLAMA_CPP} was tried)"
        )
    if said.startswith("ModuleNotFoundError"):
        return f"install that module beside drafttrain, or {BY_HAND}"
    return BY_HAND
