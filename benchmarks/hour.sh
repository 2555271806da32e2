#!/usr/bin/env bash
# One hour on two idle cores: a chat model answers prompts, a drafter learns from the answers, and both
# are timed on prompts that were not trained. OUT/times.txt has the seconds after each step.
#
#   benchmarks/hour.sh MODEL PROMPTS VALIDATION OUT
#
# MODEL: a GGUF file. PROMPTS: conversations, of which COUNT are answered. VALIDATION: prompts with a
# task each, as eval.prompts reads them: the drafter, prompt lookup and both together are timed on them.
# Two processes of one thread train 1.3 to 1.5 times as fast as one process of two threads, while one
# process of two threads writes answers faster than two processes.
set -euo pipefail
PYTHON=${PYTHON:-python}
MODEL=$(realpath "${1:?must be a GGUF file}") VALIDATION=$(realpath "${3:?must be a file of prompts}")
OUT=${4:?must be a folder for the results}
mkdir -p "$OUT"
head -n "${COUNT:-3400}" "${2:?must be a file of conversations}" >"$OUT/prompts.jsonl"
cd "$OUT"
TARGET=(model=smollm2_135m "model.path=$MODEL")
DATA=(data=jsonl data.path=answers.jsonl)
TWO=(hardware.ranks=2 hardware.threads=1)
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

step() { # step NAME THREADS COMMAND...
    OMP_NUM_THREADS=$2 $PYTHON -m drafttrain "${@:3}" >"$1.log" 2>&1
    echo "$1: $SECONDS s" | tee -a times.txt
}

: >times.txt
step regenerate 2 regenerate "${TARGET[@]}" data=jsonl data.path=prompts.jsonl \
    regenerate.out=answers.jsonl regenerate.max_new_tokens=192 regenerate.batch_size=128
step capture 1 capture "${TARGET[@]}" drafter=eagle3_1 "${DATA[@]}" store.dir=store "${TWO[@]}"
step train 1 train "${TARGET[@]}" drafter=eagle3_1 trainer=auto "${DATA[@]}" \
    features=stored features.dir=store run.dir=run "${TWO[@]}"
step evaluate 1 evaluate run.dir=run drafter=ensemble eval.policy=chain "eval.prompts=$VALIDATION" \
    eval.prompts_per_task=30 eval.max_new_tokens=96 eval.blocks=1
