#!/usr/bin/env bash
# Shift the embedded target by LoRA on one task (math answers become JSON), measure the effect on its
# drafter, and adapt the drafter on a tenth of the tokens that it was trained on. About 12 minutes.
#
#   benchmarks/adapt.sh CONVERSATIONS PROMPTS [OUT]
#
# CONVERSATIONS: jsonl of one-turn math problems with answers of several lines (GSM8K's training set
# in the format of data=jsonl). PROMPTS: jsonl of prompts that are not among them (GSM8K's test set).
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=$(realpath "$1")
PROMPTS=$(realpath "$2")
OUT=${3:-outputs/adapt}
PYTHON=${PYTHON:-python}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"

# The task in its new form, and 250 other problems for the shifted target to answer.
$PYTHON - "$DATA" "$OUT" "$PROMPTS" <<'EOF'
import itertools, json, sys

data, out, prompts = sys.argv[1:]
rows = [json.loads(line)["messages"] for line in open(data)]
with open(f"{out}/json.jsonl", "w") as file:
    for user, answer in (row[:2] for row in rows if len(row) > 1):
        lines = [line.strip() for line in answer["content"].split("\n") if line.strip()]
        content = json.dumps({"steps": lines[:-1], "answer": answer["content"].split()[-1]})
        file.write(json.dumps({"messages": [user, {**answer, "content": content}]}) + "\n")
with open(f"{out}/problems.jsonl", "w") as file:
    for row in rows[1000:1250]:
        file.write(json.dumps({"messages": row[:2]}) + "\n")
with open(f"{out}/prompts.jsonl", "w") as file:
    file.writelines(itertools.islice(open(prompts), 40))
EOF

train() { $PYTHON -m drafttrain train "$@"; }
evaluate() { $PYTHON -m drafttrain evaluate eval.policy=chain eval.lossless_prompts=8 "$@"; }

[ -d "$OUT/first/checkpoints" ] || train run.name=first "run.dir=$OUT/first" "data.cache_dir=$OUT/selfgen"
evaluate "run.dir=$OUT/first" "eval.prompts=$OUT/prompts.jsonl" eval.name=math
[ -d "$OUT/shifted" ] || $PYTHON scripts/shift_target.py --data "$OUT/json.jsonl" \
    --out "$OUT/shifted" --steps 80 --lr 2e-3 --length 256
$PYTHON -m drafttrain regenerate "model.path=$OUT/shifted" data=jsonl \
    "data.path=$OUT/problems.jsonl" "regenerate.out=$OUT/traffic.jsonl" regenerate.max_new_tokens=110
train "run.init_from=$OUT/first" "run.dir=$OUT/adapted" "model.path=$OUT/shifted" \
    data=jsonl "data.path=$OUT/traffic.jsonl" data.holdout=16 \
    trainer.max_steps=28 trainer.tokens_per_step=1024 trainer.warmup_steps=2 \
    trainer.validate_every=14 trainer.save_every=14
evaluate "run.dir=$OUT/adapted" "eval.prompts=$OUT/prompts.jsonl" eval.name=math
evaluate "run.dir=$OUT/adapted"
