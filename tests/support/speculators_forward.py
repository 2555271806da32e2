"""Run inside an environment with `speculators`: what its own model of a drafter holds and answers.

usage: python speculators_forward.py DRAFTER_DIR INPUTS.safetensors OUTPUTS.safetensors

The outputs are the logits of each step of EAGLE-3's unroll, or of the block that DFlash drafts from
the input `anchor`, and `weights.NAME`, every tensor of the loaded model.
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
found = {f"weights.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
given = load_file(inputs)
logits: list[torch.Tensor] = []
model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output.detach()))
common = {
    "hidden_states": given["hidden_states"],
    "input_ids": given["input_ids"],
    "document_ids": torch.zeros_like(given["input_ids"]),
    "position_ids": given["position_ids"],
}
with torch.no_grad():
    if "anchor" in given:
        chosen = torch.zeros_like(given["input_ids"])
        chosen[0, int(given["anchor"])] = 1
        last = torch.zeros(*chosen.shape, config.transformer_layer_config.hidden_size)
        model._backbone_forward(
            **common, loss_mask=chosen, verifier_last_hidden_states=last, max_anchors=1
        )
    else:
        model(**common, ttt_steps=int(given["ttt_steps"]))
found |= {str(step): values.contiguous() for step, values in enumerate(logits)}
save_file(found, outputs)
