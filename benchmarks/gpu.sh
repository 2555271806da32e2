#!/usr/bin/env bash
# Everything that needs a GPU, in 12 minutes on an H200 with 16 cores: what float32 logits cost and gain
# (benchmarks/logits.py, at most 3 minutes); the gpu tests (kernels, gradients, waits of the host,
# memory; 60 s); every family by benchmarks/protocols/families.md with three seeds and
# its acceptance, several at a time (4 minutes, and 90 s to compare); the speed of some at the cost of
# 8B, one after the other (30 s each); passes of a random 8B model against the bound of memory,
# training shapes (half a minute). Only when it is asked for, in 5 minutes: the search of
# benchmarks/protocols/defaults.md. Needs drafttrain's dependencies.
#
#   benchmarks/gpu.sh [OUT [STEP ...]]   OUT: where runs and logs go (default outputs/gpu);
#                                        STEP: logits, tests, families, speeds, passes, train
#                                        (default: these), defaults
#   SEEDS, FAMILIES and TIMED (those of `speeds`) choose; MORE: overrides of every training;
#   SMALL: the folder of the small target of `defaults`.
#
# real, when it is asked for, in 8 minutes: drafters of SmolLM2-135M (benchmarks/protocols/real.md).
#   GGUF: its file, which may travel in parts (cat part? >FILE); REAL: a folder with prompts.jsonl,
#   recorded.jsonl and validate.jsonl.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${1:-outputs/gpu}")
STEPS=("${@:2}")
[ ${#STEPS[@]} -gt 0 ] || STEPS=(logits tests families speeds passes train)
PYTHON=${PYTHON:-python}
PROCESSES=${PROCESSES:-16}
# Those that take longest first.
FAMILIES=${FAMILIES:-dflash2 dspark dflash p_eagle eagle3 eagle3_1 hass hydra_pp mtp redrafter eagle
    early_exit mlp_speculator hydra_heads small_lm medusa}
SEEDS=${SEEDS:-0 1 2}
TIMED=${TIMED:-eagle eagle3 medusa}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT/logs"

tests() {
    timeout 120 $PYTHON -m pytest -q -m gpu tests/test_gpu.py -n "$PROCESSES" -p no:benchmark \
        >"$OUT/logs/tests.log" 2>&1
    grep -E "^(FAILED|ERROR)" "$OUT/logs/tests.log"
    tail -n 1 "$OUT/logs/tests.log"
}

# Lines of commands, PROCESSES at a time. By MPS, where the driver has it, processes use the GPU
# together instead of in turns: 2.6 times as many small steps for twelve of them.
side_by_side() {
    local daemon=""
    export CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps
    mkdir -p "$OUT/mps"
    nvidia-cuda-mps-control -d 2>/dev/null && daemon=1
    $PYTHON benchmarks/side_by_side.py "$OUT/logs" --processes "$PROCESSES"
    [ -z "$daemon" ] || echo quit | nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# Greedy outputs are checked for the first seed, on four prompts.
families() {
    local seed family checked=4
    for seed in $SEEDS; do
        for family in $FAMILIES; do
            echo "$family-$seed: train --config-dir=benchmarks/conf +experiment=equal_tokens run.name=$family-$seed" \
                "run.dir=$OUT/$family-$seed run.seed=$seed drafter=$family data.batch_size=1024" \
                "data.cache_dir=$OUT/selfgen trainer.validation_prompts=2 ${MORE:-} &&" \
                "evaluate run.dir=$OUT/$family-$seed eval.policy=chain eval.batch_size=10 eval.blocks=1" \
                "eval.lossless_prompts=$checked hardware.threads=1"
        done
        checked=0
    done | side_by_side
    local runs
    runs=$(ls "$OUT"/*-?/evaluations/default/report.json | sed 's:/evaluations/.*::' | paste -sd,)
    $PYTHON -m drafttrain compare "runs=[$runs]" compare.baseline=eagle3 \
        compare.all_pairs=true "compare.dir=$OUT/compared" \
        >"$OUT/logs/compare.log" 2>&1 && $PYTHON benchmarks/families.py table "$OUT/compared"
}

defaults() {
    : "${SMALL:?must be the folder of the small target}"
    $PYTHON benchmarks/defaults.py lines "$OUT" "$SMALL" | side_by_side
    $PYTHON benchmarks/defaults.py table "$OUT"
}

speeds() {
    local family depths
    for family in $TIMED; do
        depths=1,2,4,7
        case $family in
            medusa | hydra* | mlp*) depths=1,2,4 ;;
            p_eagle) depths=1,2,4,5 ;;
        esac
        echo "speed-$family: evaluate run.dir=$OUT/$family-0 eval=large eval.name=speed" \
            "model.inflate=${INFLATE:-8B} eval.depths=[$depths] hardware.threads=1"
    done | $PYTHON benchmarks/side_by_side.py "$OUT/logs" --processes 1
    $PYTHON benchmarks/families.py speeds "$OUT"/*-0/evaluations/speed
}

# The tables of a script, or how it failed.
measured() {
    local log=$OUT/logs/$1.log
    timeout 60 $PYTHON "benchmarks/$1.py" "${@:2}" >"$log" 2>&1
    grep -E "^(\||passes)" "$log" || tail -n 3 "$log"
}

passes() { measured passes; }

train() { measured train --only-record --repeats 3; }

logits() {
    local log=$OUT/logs/logits.log processes=$((PROCESSES < 12 ? PROCESSES : 12))
    timeout 240 $PYTHON benchmarks/logits.py --out "$OUT/logits" --processes "$processes" \
        >"$log" 2>&1 || tail -n 3 "$log"
    grep -E "^(\||gradients|steps|acceptance)" "$log"
}

real() {
    local model="model=smollm2_135m model.path=${GGUF:?must be the file of the model}"
    local from=${REAL:?must be the folder of prompts} folder=$OUT/real
    mkdir -p "$folder" && cp "$from"/{recorded,validate}.jsonl "$folder/"
    export HF_HOME=$OUT/hub
    # Once, before several processes ask for it.
    $PYTHON scripts/dequantize.py "$GGUF" "$folder/model" >"$OUT/logs/dequantize.log" 2>&1
    model="model=smollm2_135m model.path=$folder/model"
    $PYTHON benchmarks/real.py answers "$folder" --prompts "$from/prompts.jsonl" --model "$model" |
        side_by_side
    $PYTHON benchmarks/real.py train "$folder" --out "$OUT/runs" --model "$model" | side_by_side
    $PYTHON benchmarks/real.py table "$OUT/runs"
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || exit 1
for step in "${STEPS[@]}"; do
    started=$SECONDS
    "$step"
    echo "=== $step: $((SECONDS - started)) s"
done
