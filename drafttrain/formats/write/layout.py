"""What engines expect in a drafter's directory, derived from its config.json alone.

A table of its own, independent of the drafters: engines load a file with a missing tensor, a
dropped bias or a wrong layer id without a word, and draft badly. Here all of it is an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from drafttrain.core.types import TargetSpec

Config = dict[str, Any]
FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Expected:
    """One tensor of a layout: its shape, and whether it is a weight, an index or a mask."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    required: bool = True


def method_of(config: Config) -> str:
    """Return the name under which vLLM serves a drafter: eagle3, eagle, medusa or draft_model."""
    names = tuple(config.get("architectures") or ())
    for architecture, method in (
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("LlamaForCausalLMEagle", "eagle"),
        ("MedusaModel", "medusa"),
    ):
        if architecture in names:
            return method
    if config.get("model_type") in transformers.CONFIG_MAPPING and names:
        return "draft_model"
    raise ValueError(f"no serving format is known for architectures {list(names)}")


def expected_tensors(config: Config) -> dict[str, Expected]:
    """Return every tensor of the layout that a serving configuration promises."""
    return _TABLES[method_of(config)](config)


def _layer(config: Config, prefix: str, input_width: int) -> dict[str, Expected]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, input_width),
        "self_attn.k_proj": (keys, input_width),
        "self_attn.v_proj": (keys, input_width),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"{prefix}.{name}.weight": Expected(shape) for name, shape in shapes.items()}


def _eagle3(config: Config) -> dict[str, Expected]:
    hidden, vocab, drafted = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    table = {
        "fc.weight": Expected((hidden, config["num_aux_hidden_states"] * target_hidden)),
        "midlayer.input_layernorm.weight": Expected((hidden,)),
        "midlayer.hidden_norm.weight": Expected((hidden,)),
        **_layer(config, "midlayer", 2 * hidden),
        "norm.weight": Expected((hidden,)),
        "lm_head.weight": Expected((drafted, hidden)),
        # Without it engines use the target's, which fits where the widths are equal.
        "embed_tokens.weight": Expected((vocab, hidden), required=target_hidden != hidden),
    }
    if drafted != vocab:
        table["d2t"] = Expected((drafted,), (torch.int64,))
        table["t2d"] = Expected((vocab,), (torch.bool,))
    return table


def _eagle(config: Config) -> dict[str, Expected]:
    hidden = config["hidden_size"]
    return {
        "fc.weight": Expected((hidden, 2 * hidden)),
        "fc.bias": Expected((hidden,)),
        **_layer(config, "layers.0", hidden),
        "embed_tokens.weight": Expected((config["vocab_size"], hidden), required=False),
    }


def _medusa(config: Config) -> dict[str, Expected]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table = {}
    for head in range(config["num_heads"]):
        for layer in range(config["num_hidden_layers"]):
            table[f"blocks.{head}.layers.{layer}.weight"] = Expected((hidden, hidden))
            if config.get("medusa_fc_bias"):
                table[f"blocks.{head}.layers.{layer}.bias"] = Expected((hidden,))
        table[f"lm_heads.{head}.weight"] = Expected((vocab, hidden))
    return table


def _draft_model(config: Config) -> dict[str, Expected]:
    """Whatever Transformers itself would load; a tied head is left out, as it leaves it out."""
    shape = {key: value for key, value in config.items() if key not in _NO_SHAPE}
    settings = transformers.AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    table = {name: Expected(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    if settings.tie_word_embeddings:
        del table["lm_head.weight"]
    return table


_NO_SHAPE = ("architectures", "torch_dtype")
_TABLES: dict[str, Callable[[Config], dict[str, Expected]]] = {
    "eagle3": _eagle3,
    "eagle": _eagle,
    "medusa": _medusa,
    "draft_model": _draft_model,
}

# What engines assume of config.json; anything else loads and drafts badly, or not at all.
_LLAMA_KEYS = {
    "model_type": "llama",
    "num_hidden_layers": 1,  # SGLang reads a second EAGLE-3 layer differently from vLLM
    "tie_word_embeddings": False,  # true would draft with the embedding for a head
    "attention_bias": False,
    "bias": False,  # engines take it for the attention's too, and find none to load
    "mlp_bias": False,
    "hidden_act": "silu",
}
_REQUIRED_KEYS: dict[str, Config] = {
    "eagle3": {
        **_LLAMA_KEYS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "norm_before_residual": False,  # SGLang knows no other
        **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), False),
    },
    # SGLang takes the first it knows, vLLM the first that it can wrap, which is only the second.
    "eagle": {**_LLAMA_KEYS, "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"]},
    "medusa": {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True},
}
_FALSE_BY_DEFAULT = ("bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def check(
    config: Config, tensors: dict[str, Tensor], spec: TargetSpec, captures: tuple[int, ...]
) -> None:
    """Raise ValueError naming everything that an engine would misread, not only the first.

    `captures` are the layers that the drafter was trained on.
    """
    method = method_of(config)
    complaints = _check_config(config, spec, method)
    if not complaints:
        complaints = _check_tensors(expected_tensors(config), tensors)
        if method == "eagle3":
            complaints += _check_captures(config, spec, captures)
    if not complaints:
        complaints = _check_values(tensors, config["vocab_size"])
    if complaints:
        raise ValueError(f"this {method} drafter cannot be served: {'; '.join(complaints)}")


def _check_config(config: Config, spec: TargetSpec, method: str) -> list[str]:
    required = dict(_REQUIRED_KEYS.get(method, {}))
    required["vocab_size"] = spec.vocab_size
    if method == "draft_model":
        pass  # it reads tokens, and nothing of the target's
    elif not config.get("target_hidden_size"):
        required["hidden_size"] = spec.hidden_size
    else:
        required["target_hidden_size"] = spec.hidden_size
    if method == "medusa":
        required["truncated_vocab_size"] = spec.vocab_size
    elif method != "draft_model":
        required["rope_theta"] = spec.rope_theta
        required["rms_norm_eps"] = spec.rms_norm_eps
    complaints = []
    for key, wanted in required.items():
        got = config.get(key, False if key in _FALSE_BY_DEFAULT else None)
        if got != wanted:
            complaints.append(f"config.json's {key} must be {wanted}, got {got}")
    return complaints


def _check_tensors(table: dict[str, Expected], tensors: dict[str, Tensor]) -> list[str]:
    complaints = [
        f"missing {name} of shape {list(expected.shape)}"
        for name, expected in table.items()
        if expected.required and name not in tensors
    ]
    complaints += [f"unknown {name}" for name in tensors if name not in table]
    for name, tensor in tensors.items():
        expected = table.get(name)
        if expected is None:
            continue
        if tuple(tensor.shape) != expected.shape:
            complaints.append(f"{name} must be {list(expected.shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in expected.dtypes:
            names = " or ".join(str(dtype) for dtype in expected.dtypes)
            complaints.append(f"{name} must be {names}, got {tensor.dtype}")
    return complaints


def _check_captures(config: Config, spec: TargetSpec, captures: tuple[int, ...]) -> list[str]:
    """Both engines must end up reading the layers that training read."""
    usual = (2, spec.num_layers // 2, spec.num_layers - 3)
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # vLLM: the top-level list, else the nested one, unshifted, repeats dropped. SGLang: only the
    # nested one, and one more than each id.
    for_vllm = tuple(sorted(set(top or nested or usual)))
    for_sglang = tuple(layer + 1 for layer in nested) if nested else usual
    complaints = []
    for engine, layers in (("vLLM", for_vllm), ("SGLang", for_sglang)):
        if layers != captures:
            complaints.append(
                f"{engine} would read layers {list(layers)}, trained on {list(captures)}: set "
                "eagle_aux_hidden_state_layer_ids to the ids, eagle_config's to the ids less one"
            )
    if config.get("num_aux_hidden_states") != len(captures):
        complaints.append(
            f"config.json's num_aux_hidden_states must be {len(captures)}, "
            f"got {config.get('num_aux_hidden_states')}"
        )
    return complaints


def _check_values(tensors: dict[str, Tensor], vocab_size: int) -> list[str]:
    complaints = [
        f"{name} holds {int((~tensor.isfinite()).sum())} values that are not finite"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    bias = tensors.get("fc.bias")
    if bias is not None and bool(bias.any()):
        complaints.append("fc.bias must be zero: vLLM drops it, SGLang applies it")
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and t2d is not None:
        ids = d2t + torch.arange(len(d2t), device=d2t.device)
        in_range = bool(((ids >= 0) & (ids < vocab_size)).all())
        if not in_range or not bool((ids[1:] > ids[:-1]).all()):
            complaints.append(
                "d2t must be an offset (target id = i + d2t[i]) that gives ascending ids below "
                f"{vocab_size}"
            )
        elif not torch.equal(t2d.nonzero().squeeze(-1), ids):
            complaints.append("t2d must mark exactly the ids that d2t gives")
    return complaints
