"""Run inside an environment with `speculators`: write a drafter as its trainer would begin one.

usage: python speculators_directory.py ALGORITHM TARGET_DIR OUT_DIR OPTIONS_JSON

The options are keywords of the package's own `from_training_args`. The weights are random; the
environment variable TORCHDYNAMO_DISABLE must be set, because compiling takes minutes.
"""

import json
import sys
from typing import Any

import torch
from speculators import SpeculatorModel
from transformers import AutoConfig

algorithm, target, out, options = sys.argv[1:]
told: dict[str, Any] = json.loads(options)
torch.manual_seed(0)
layers: Any = AutoConfig.from_pretrained(target)
if algorithm in ("dflash", "dflash2", "dspark"):
    shape = {key: value for key, value in layers.to_dict().items() if key != "model_type"}
    layers = AutoConfig.for_model("qwen3", **shape)
    layers.layer_types = ["full_attention"] * told["num_layers"]
else:  # as the trainer's `create_transformer_layer_config` does unless it is told otherwise
    layers.layer_types = ["sliding_attention"] * told["num_layers"]
    layers.sliding_window, layers.use_sliding_window = 2048, True
layers.num_hidden_layers = told.pop("num_layers")
told |= {"verifier_name_or_path": target, "draft_attn_impl": "eager"}
model_class: Any = SpeculatorModel.registry[algorithm]
reduced = told["draft_vocab_size"] < layers.vocab_size
if reduced:
    kept = torch.randperm(layers.vocab_size)[: told["draft_vocab_size"]].sort().values
    told["d2t"] = kept - torch.arange(len(kept))
    told["t2d"] = torch.zeros(layers.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
model = model_class.from_training_args(layers, **told)
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn_like(parameter))
model.save_pretrained(out)
