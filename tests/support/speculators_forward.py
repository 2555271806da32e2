"""Run inside an environment with `speculators`: logits of its own Eagle3DraftModel, for a test.

usage: python speculators_forward.py DRAFTER_DIR INPUTS.safetensors OUTPUTS.safetensors
"""

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

folder, inputs, outputs = sys.argv[1:]
config: Any = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"  # the default wants a GPU
model: Any = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
given = load_file(inputs)
logits: list[torch.Tensor] = []
model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output.detach()))
with torch.no_grad():
    model(
        hidden_states=given["hidden_states"],
        input_ids=given["input_ids"],
        document_ids=torch.zeros_like(given["input_ids"]),
        position_ids=given["position_ids"],
        ttt_steps=int(given["ttt_steps"]),
    )
save_file({str(step): values.contiguous() for step, values in enumerate(logits)}, outputs)
