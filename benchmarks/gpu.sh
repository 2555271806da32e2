#!/usr/bin/env bash
# Everything that needs a GPU, under 9 minutes: the gpu tests (the host's waits among them), then for
# each drafter a training run and an evaluation on the embedded target, and one table; passes of a
# random 8B model against the bound of memory, training shapes. Needs drafttrain's dependencies.
#
#   benchmarks/gpu.sh [OUT]        OUT: where runs and logs go (default outputs/gpu)
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-outputs/gpu}
PYTHON=${PYTHON:-python}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p "$OUT"

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || exit 1
timeout 90 $PYTHON -m pytest -q -m gpu tests/test_gpu.py 2>&1 | tail -n 5

for drafter in eagle3 eagle medusa; do
    run=$OUT/$drafter
    rm -rf "$run"
    timeout 70 $PYTHON -m drafttrain train "run.name=$drafter" "run.dir=$run" "drafter=$drafter" \
        data.num_conversations=8192 data.batch_size=1024 "data.cache_dir=$OUT/selfgen" \
        trainer.max_steps=600 trainer.tokens_per_step=16384 hardware.micro_batch=64 \
        trainer.validate_every=600 trainer.save_every=600 >"$OUT/$drafter.train.log" 2>&1 &&
        timeout 40 $PYTHON -m drafttrain evaluate "run.dir=$run" eval.prompts_per_task=5 \
            >"$OUT/$drafter.evaluate.log" 2>&1
    [ $? -eq 0 ] || tail -n 20 "$OUT/$drafter".*.log
done
$PYTHON benchmarks/table.py "$OUT"/{eagle3,eagle,medusa}
timeout 60 $PYTHON benchmarks/passes.py 2>&1 | grep "^|"
timeout 60 $PYTHON benchmarks/train.py --only-record --repeats 3 2>&1 | grep "^|"
