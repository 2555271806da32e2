"""Run inside an environment with `speculators`: what its own model of a drafter holds and answers.

usage: python speculators_forward.py DRAFTER_DIR INPUTS.safetensors OUTPUTS.safetensors

The outputs are the logits of each step of EAGLE-3's unroll, of the block that DFlash, DFlash-2 (the
scores of its candidates) or DSpark drafts from the input `anchor`, or of P-EAGLE's slots after it,
and `weights.NAME`, every tensor of the loaded model.
"""

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.peagle import core as peagle

folder, inputs, outputs = sys.argv[1:]
config: Any = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"  # the default wants a GPU
model: Any = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
found = {f"weights.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
given = load_file(inputs)
kind = config.speculators_model_type
heard: dict[str, list[torch.Tensor]] = {"lm_head": [], "markov_head.markov_w2": []}
for name, module in model.named_modules():
    if name in heard:
        module.register_forward_hook(
            lambda module, args, output, heard=heard[name]: heard.append(output.detach())
        )
if kind == "dflash2":
    score = model.candidate_selector.score_candidates

    def hear(
        unary: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor, trained: torch.Tensor
    ) -> torch.Tensor:
        """Score the candidates of training; keep those that an engine would score."""
        likely = unary.topk(model.candidate_selector.top_k, dim=-1).indices
        scores = torch.full_like(unary, -torch.inf)
        heard["selector"] = [scores.scatter(-1, likely, score(unary, hidden, before, likely))]
        return score(unary, hidden, before, trained)

    model.candidate_selector.score_candidates = hear
common = {
    "hidden_states": given["hidden_states"],
    "input_ids": given["input_ids"],
    "document_ids": torch.zeros_like(given["input_ids"]),
    "position_ids": given["position_ids"],
}
last = torch.zeros(*given["input_ids"].shape, config.transformer_layer_config.hidden_size)
training = {"verifier_last_hidden_states": last, "loss_config": resolve_loss_config("ce", "eager")}
with torch.no_grad():
    if kind == "eagle3":
        model(**common, ttt_steps=int(given["ttt_steps"]))
    elif kind == "peagle":
        anchor, steps = int(given["anchor"]), int(given["ttt_steps"])
        places, chain = torch.arange(given["input_ids"].shape[1]), torch.arange(1, steps)
        # Which slots are trained is drawn at random: these are the ones compared.
        peagle.generate_cod_sample_indices = lambda **told: (
            torch.cat([places, torch.full_like(chain, anchor)]),
            torch.cat([torch.zeros_like(places), chain]),
        )
        model(**common, **training)
        heard["lm_head"] = [heard["lm_head"][0][:, [anchor, *range(-len(chain), 0)]]]
    else:
        chosen = torch.zeros_like(given["input_ids"])
        chosen[0, int(given["anchor"])] = 1
        more = {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}
        model(
            **common,
            **training,
            **(more if kind in ("dflash2", "dspark") else {}),
            loss_mask=chosen,
            max_anchors=1,
        )
logits = heard["lm_head"]
if kind == "dspark":
    logits = [logits[0] + heard["markov_head.markov_w2"][0]]
logits = heard.get("selector", logits)
found |= {str(step): values.contiguous() for step, values in enumerate(logits)}
save_file(found, outputs)
