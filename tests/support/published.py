"""Drafters as their authors publish them, and plain-torch references of what they mean.

The references share nothing with the package: float64, no cache, loops where they are plainer.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, WIDTH, DRAFTED, DEPTH = 97, 32, 40, 3
LAYERS = [1, 2, 3]  # of a target of 4: the default ids would repeat themselves
Tensors = dict[str, Tensor]


@dataclass
class Published:
    """A drafter as its authors publish it: config.json, tensors, and what they mean."""

    config: dict[str, Any]
    tensors: Tensors
    reference: Callable[[Tensors, Tensor, Tensor, Tensor, list[int]], Tensor]
    file: str = "model.safetensors"
    says: list[int] = field(default_factory=lambda: list(range(VOCAB)))  # its ids -> the target's

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.file.endswith(".safetensors"):
            save_file({n: t.contiguous() for n, t in self.tensors.items()}, folder / self.file)
        else:
            torch.save(self.tensors, folder / self.file)
        return folder


def normal(*shape: int, std: float = 0.3) -> Tensor:
    return std * torch.randn(*shape)


# --- references ----------------------------------------------------------------------------------


def rms(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    return values / (values.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> list[float]:
    plain = [theta ** (-2 * j / head_dim) for j in range(head_dim // 2)]
    if scaling is None:
        return plain
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return [f / factor for f in plain]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    result = []
    for f in plain:
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            result.append(f)
        elif wavelength > original / low:
            result.append(f / factor)
        else:
            share = (original / wavelength - low) / (high - low)
            result.append((1 - share) * f / factor + share * f)
    return result


def turned(heads: Tensor, frequencies: list[float]) -> Tensor:
    """Rotate (position, head, head_dim), half-split, as complex numbers."""
    half = heads.shape[-1] // 2
    numbers = torch.complex(heads[..., :half], heads[..., half:])
    positions = torch.arange(len(heads), dtype=torch.float64)
    angles = positions[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([numbers.real, numbers.imag], dim=-1)


def layer_reference(
    t: Tensors, prefix: str, shape: dict[str, Any], values: Tensor, residual: Tensor
) -> Tensor:
    """The last position's output of one decoder layer over everything before it."""

    def linear(name: str, inputs: Tensor) -> Tensor:
        bias = t.get(f"{prefix}{name}.bias")
        return inputs @ t[f"{prefix}{name}.weight"].T + (0 if bias is None else bias)

    heads, shared, width = shape["heads"], shape["kv_heads"], shape["head_dim"]
    q = linear("self_attn.q_proj", values).view(-1, heads, width)
    k = linear("self_attn.k_proj", values).view(-1, shared, width)
    v = linear("self_attn.v_proj", values).view(-1, shared, width)
    if f"{prefix}self_attn.q_norm.weight" in t:
        q = rms(q, t[f"{prefix}self_attn.q_norm.weight"], shape["eps"])
        k = rms(k, t[f"{prefix}self_attn.k_norm.weight"], shape["eps"])
    frequencies = inverse_frequencies(width, shape["theta"], shape["scaling"])
    q, k = turned(q, frequencies), turned(k, frequencies)
    mixed = []
    for head in range(heads):
        group = head * shared // heads
        weights = (k[:, group] @ q[-1, head] / math.sqrt(width)).softmax(0)
        mixed.append(weights @ v[:, group])
    hidden = residual[-1] + linear("self_attn.o_proj", torch.cat(mixed))
    normed = rms(hidden, t[f"{prefix}post_attention_layernorm.weight"], shape["eps"])
    gate = linear("mlp.gate_proj", normed)
    return hidden + linear("mlp.down_proj", gate * gate.sigmoid() * linear("mlp.up_proj", normed))


def eagle3_reference(prefix: str, shape: dict[str, Any], variant: frozenset[str]) -> Callable:
    def run(
        t: Tensors, captured: Tensor, final: Tensor, embedding: Tensor, tokens: list[int]
    ) -> Tensor:
        eps = shape["eps"]
        parts = list(captured)
        if "fc_norm" in variant:
            parts = [rms(p, t[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)]
        read = torch.cat(parts, dim=-1)
        if "norm_before_fc" in variant:
            read = rms(read, t["input_norm.weight"], eps)
        states = read @ t["fc.weight"].T
        table = t.get("embed_tokens.weight", embedding)
        logits = []
        for _ in range(DEPTH):
            embedded = table[tokens[1 : len(states) + 1]]
            normed = rms(states, t[f"{prefix}hidden_norm.weight"], eps)
            inputs = [rms(embedded, t[f"{prefix}input_layernorm.weight"], eps), normed]
            residual = normed if "norm_before_residual" in variant else states
            state = layer_reference(t, prefix, shape, torch.cat(inputs, dim=-1), residual)
            after = rms(state, t["norm.weight"], eps)
            logits.append(t["lm_head.weight"] @ after)
            states = torch.cat([states, (after if "norm_output" in variant else state)[None]])
        return torch.stack(logits)

    return run


def eagle_reference(shape: dict[str, Any]) -> Callable:
    def run(
        t: Tensors, captured: Tensor, final: Tensor, embedding: Tensor, tokens: list[int]
    ) -> Tensor:
        table, states, logits = t.get("embed_tokens.weight", embedding), final, []
        for _ in range(DEPTH):
            pairs = torch.cat([table[tokens[1 : len(states) + 1]], states], dim=-1)
            values = pairs @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(1).double())
            state = layer_reference(t, "layers.0.", shape, values, values)
            logits.append(t["the target's head"] @ state)
            states = torch.cat([states, state[None]])
        return torch.stack(logits)

    return run


def between_convolutions(
    own: Tensors, name: str, values: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """A sublayer of a block between two convolutions, as in vLLM's qwen3_dflash2.py, if it has any.

    Every place, tap and channel by itself.
    """
    base = own.get(f"{name}.base_kernel")
    if base is None:
        return sublayer(values)
    _, taps, width = base.shape
    given = own[f"{name}.kernel_projection.weight"] @ values.T
    given = given.T.reshape(len(values), 2, taps, -1)
    channels = width // given.shape[-1]

    def convolved(side: int, inputs: Tensor) -> Tensor:
        found = torch.zeros_like(inputs)
        for place in range(len(inputs)):
            for tap in range(min(taps, place + 1)):
                for channel in range(width):
                    delta = given[place, side, tap, channel // channels]
                    kernel = base[side, tap, channel] + delta
                    found[place, channel] += kernel * inputs[place - tap, channel]
        return found

    return convolved(1, sublayer(convolved(0, values)))


MTP_NAMES = {  # of the projection and its norms, of the final norm, and what the layer begins with
    "mimo": ("input_proj", "hidden_layernorm", "token_layernorm", "final_layernorm", ""),
    "qwen": ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm", "layers.0."),
}


def mtp_reference(shape: dict[str, Any], variant: str) -> Callable:
    """As vLLM's mimo_mtp.py, or its qwen3_next_mtp.py with a plain layer, in a loop."""
    place = {"mimo": "model.mtp_layers.0.", "qwen": "mtp."}[variant]
    project, of_hidden, of_token, final_norm, layer = MTP_NAMES[variant]

    def run(
        t: Tensors, captured: Tensor, final: Tensor, embedding: Tensor, tokens: list[int]
    ) -> Tensor:
        t = {name.removeprefix(place): tensor for name, tensor in t.items()}
        eps, logits = shape["eps"], []
        states = captured[0] if variant == "mimo" else final
        for _ in range(DEPTH):
            embedded = embedding[tokens[1 : len(states) + 1]]
            if variant == "mimo":
                embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
            parts = [
                rms(states, t[f"{of_hidden}.weight"], eps),
                rms(embedded, t[f"{of_token}.weight"], eps),
            ]
            pairs = torch.cat(parts if variant == "mimo" else parts[::-1], dim=-1)
            pairs = pairs @ t[f"{project}.weight"].T
            normed = rms(pairs, t[f"{layer}input_layernorm.weight"], eps)
            state = layer_reference(t, layer, shape, normed, pairs)
            state = rms(state, t[f"{final_norm}.weight"], eps)
            logits.append(t["the target's head"] @ state)
            states = torch.cat([states, state[None]])
        return torch.stack(logits)

    return run


def block_reference(shape: dict[str, Any], num_layers: int, size: int, mask: int) -> Callable:
    """The states of one block after the features: a dense softmax over both, nothing masked."""

    def run(t: Tensors, captured: Tensor, embedding: Tensor, tokens: list[int]) -> Tensor:
        eps, width, before = shape["eps"], shape["head_dim"], captured.shape[1]
        fused = torch.cat(list(captured), dim=-1) @ t["fc.weight"].T
        context = rms(fused, t["hidden_norm.weight"], eps)
        block = [tokens[before]] + [mask] * (size - 1)
        hidden = t.get("embed_tokens.weight", embedding)[block]
        frequencies = inverse_frequencies(width, shape["theta"], shape["scaling"])
        for number in range(num_layers):
            own = {n.removeprefix(f"layers.{number}."): tensor for n, tensor in t.items()}

            def by_head(name: str, values: Tensor, own: Tensors = own) -> Tensor:
                return (values @ own[f"self_attn.{name}_proj.weight"].T).view(
                    len(values), -1, width
                )

            def attended(normed: Tensor, own: Tensors = own, by_head: Callable = by_head) -> Tensor:
                keys = torch.cat([context, normed])
                k = rms(by_head("k", keys), own["self_attn.k_norm.weight"], eps)
                k, v = turned(k, frequencies), by_head("v", keys)
                q = rms(by_head("q", keys), own["self_attn.q_norm.weight"], eps)
                q = turned(q, frequencies)[before:]
                mixed = []
                for head in range(shape["heads"]):
                    group = head * shape["kv_heads"] // shape["heads"]
                    scores = q[:, head] @ k[:, group].T / math.sqrt(width)
                    mixed.append(scores.softmax(-1) @ v[:, group])
                return torch.cat(mixed, -1) @ own["self_attn.o_proj.weight"].T

            def fed(normed: Tensor, own: Tensors = own) -> Tensor:
                gate = normed @ own["mlp.gate_proj.weight"].T
                inner = gate * gate.sigmoid() * (normed @ own["mlp.up_proj.weight"].T)
                return inner @ own["mlp.down_proj.weight"].T

            normed = rms(hidden, own["input_layernorm.weight"], eps)
            hidden = hidden + between_convolutions(own, "attention_conv", normed, attended)
            normed = rms(hidden, own["post_attention_layernorm.weight"], eps)
            hidden = hidden + between_convolutions(own, "mlp_conv", normed, fed)
        return rms(hidden, t["norm.weight"], eps)

    return run


def dflash_reference(shape: dict[str, Any], num_layers: int, size: int, mask: int) -> Callable:
    """Every place of a block but the first, that of the last token, drafts its own token."""
    states = block_reference(shape, num_layers, size, mask)

    def run(
        t: Tensors, captured: Tensor, final: Tensor, embedding: Tensor, tokens: list[int]
    ) -> Tensor:
        return states(t, captured, embedding, tokens)[1:] @ t["the target's head"].T

    return run


def selector_scores(t: Tensors, state: Tensor, before: int, tokens: list[int]) -> Tensor:
    """The scores of these tokens: the place's logit, and a product of rank r, one by one."""
    s = "candidate_selector."
    context = t[f"{s}predecessor_codebook"][before] * (t[f"{s}hidden_projection.weight"] @ state)
    logits = t["the target's head"] @ state
    return torch.stack(
        [logits[token] + context @ t[f"{s}successor_codebook"][token] for token in tokens]
    )


def dflash2_reference(
    shape: dict[str, Any], num_layers: int, size: int, mask: int, top_k: int
) -> Callable:
    """DFlash's places, each with a score for its most likely tokens; the others have none."""
    block = block_reference(shape, num_layers, size, mask)

    def run(
        t: Tensors, captured: Tensor, final: Tensor, embedding: Tensor, tokens: list[int]
    ) -> Tensor:
        states, last, found = block(t, captured, embedding, tokens), captured.shape[1], []
        for place, state in enumerate(states[1:]):
            logits = t["the target's head"] @ state
            likely = logits.sort(descending=True).indices[:top_k].tolist()
            found.append(torch.full_like(logits, -math.inf))
            found[-1][likely] = selector_scores(t, state, tokens[last + place], likely)
        return torch.stack(found)

    return run


def dspark_reference(
    shape: dict[str, Any], num_layers: int, size: int, mask: int, confidence: bool = False
) -> Callable:
    """Every place drafts the next token; as in vLLM's qwen3_dspark.py and DeepSpec, in a loop.

    confidence: return the predicted acceptance of each instead of logits.
    """
    block = block_reference(shape, num_layers, size, mask)

    def run(
        t: Tensors, captured: Tensor, final: Tensor, embedding: Tensor, tokens: list[int]
    ) -> Tensor:
        states, before, found = block(t, captured, embedding, tokens), captured.shape[1], []
        for place, state in enumerate(states):
            embedded = t["markov_head.markov_w1.weight"][tokens[before + place]]
            both = torch.cat([state, embedded])
            if confidence:
                score = t["confidence_head.proj.weight"][0] @ both
                found.append(1 / (1 + torch.exp(-score - t["confidence_head.proj.bias"][0])))
                continue
            if "markov_head.gate_proj.weight" in t:
                gate = t["markov_head.gate_proj.weight"] @ both + t["markov_head.gate_proj.bias"]
                embedded = embedded / (1 + torch.exp(-gate))
            bias = t["markov_head.markov_w2.weight"] @ embedded
            found.append(t["the target's head"] @ state + bias)
        return torch.stack(found)

    return run


def p_eagle_reference(shape: dict[str, Any], num_layers: int, depth: int, mask: int) -> Callable:
    """One causal sequence: the pairs, then a mask for each token to draft but the first."""

    def run(
        t: Tensors, captured: Tensor, final: Tensor, embedding: Tensor, tokens: list[int]
    ) -> Tensor:
        eps, before = shape["eps"], captured.shape[1]

        def each(prefix: str, values: Tensor, residual: Tensor) -> Tensor:
            ends = range(1, len(values) + 1)
            return torch.stack(
                [layer_reference(t, prefix, shape, values[:end], residual[:end]) for end in ends]
            )

        t = {n.replace("layers.0.", "midlayer."): tensor for n, tensor in t.items()}
        masks = t["mask_hidden"].view(1, -1).expand(depth - 1, -1)
        hidden = torch.cat([torch.cat(list(captured), dim=-1), masks]) @ t["fc.weight"].T
        table = t.get("embed_tokens.weight", embedding)
        embedded = table[tokens[1 : before + 1] + [mask] * (depth - 1)]
        pairs = [
            rms(embedded, t["midlayer.input_layernorm.weight"], eps),
            rms(hidden, t["midlayer.hidden_norm.weight"], eps),
        ]
        hidden = each("midlayer.", torch.cat(pairs, dim=-1), hidden)
        for prefix in (f"layers.{number}." for number in range(1, num_layers)):
            hidden = each(prefix, rms(hidden, t[f"{prefix}input_layernorm.weight"], eps), hidden)
        return rms(hidden[before - 1 :], t["norm.weight"], eps) @ t["lm_head.weight"].T

    return run


def medusa_reference(
    block: str, head: str, num_layers: int, rows: Tensor | None = None, scale: float = 1.0
) -> Callable:
    def run(
        t: Tensors, captured: Tensor, final: Tensor, embedding: Tensor, tokens: list[int]
    ) -> Tensor:
        logits = []
        for k in range(DEPTH):
            hidden = final[-1]
            for j in range(num_layers):
                name = block.format(k=k, j=j)
                inner = t[f"{name}.weight"] @ hidden + t.get(f"{name}.bias", 0)
                hidden = hidden + inner * inner.sigmoid()
            weight = t[head.format(k=k)]
            logits.append(scale * (weight if rows is None else weight[rows]) @ hidden)
        return torch.stack(logits)

    return run


# --- what is published ---------------------------------------------------------------------------


def layer_tensors(prefix: str, inputs: int, shape: dict[str, Any], variant: frozenset[str]) -> Any:
    hidden, inner = shape["hidden"], shape["inner"]
    queries, keys = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    sizes = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{prefix}{name}.weight": normal(*size) for name, size in sizes.items()}
    tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + normal(hidden)
    biased = {"bias": "qkvo", "qkv_bias": "qkv"}
    for kind, letters in biased.items():
        for letter in letters if kind in variant else "":
            size = sizes[f"self_attn.{letter}_proj"][0]
            tensors[f"{prefix}self_attn.{letter}_proj.bias"] = normal(size)
    if "qk_norm" in variant:
        for letter in "qk":
            tensors[f"{prefix}self_attn.{letter}_norm.weight"] = 1 + normal(shape["head_dim"])
    return tensors


SHAPE: dict[str, Any] = {
    "hidden": WIDTH, "inner": 40, "heads": 4, "kv_heads": 2, "head_dim": 8, "eps": 1e-5,
    "theta": 20000.0, "scaling": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def llama_config(shape: dict[str, Any], variant: frozenset[str]) -> dict[str, Any]:
    config = {
        "model_type": "llama", "hidden_size": shape["hidden"], "intermediate_size": shape["inner"],
        "num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"], "num_hidden_layers": 1, "vocab_size": VOCAB,
        "hidden_act": "silu", "rms_norm_eps": shape["eps"], "rope_theta": shape["theta"],
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "attention_bias": bool({"bias", "qkv_bias"} & variant), "mlp_bias": False,
    }  # fmt: skip
    if shape["scaling"]:
        config["rope_scaling"] = shape["scaling"]
    return config


def eagle3(
    *variant: str, prefix: str = "midlayer.", file: str = "model.safetensors", **shape: Any
) -> Published:
    torch.manual_seed(1)
    flags, sizes = frozenset(variant), SHAPE | shape
    hidden = sizes["hidden"]
    drafted = VOCAB if "whole" in flags else DRAFTED
    tensors = {
        "fc.weight": normal(hidden, 3 * WIDTH, std=0.1),
        f"{prefix}input_layernorm.weight": 1 + normal(hidden),
        f"{prefix}hidden_norm.weight": 1 + normal(hidden),
        **layer_tensors(prefix, 2 * hidden, sizes, flags),
        "norm.weight": 1 + normal(hidden),
        "lm_head.weight": normal(drafted, hidden),
    }
    if "embedding" in flags:
        tensors["embed_tokens.weight"] = normal(VOCAB, hidden)
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = 1 + normal(3 * WIDTH)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{i}.weight": 1 + normal(WIDTH) for i in range(3)}
    ids = torch.randperm(VOCAB)[:drafted].sort().values
    if drafted < VOCAB:
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    layer = llama_config(sizes, flags)
    options = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    if "speculators" in flags:
        if sizes["scaling"] is None:
            theta = layer.pop("rope_theta")
            layer["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        if "qk_norm" in flags:
            layer["model_type"] = "qwen3"
        config: dict[str, Any] = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "speculators_config": {"verifier": {"name_or_path": "ada/tiny"}},
        }
        # Absent, norm_before_residual is true here.
        if "norm_before_residual" not in flags:
            config["norm_before_residual"] = False
        options = options[1:]
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer}
    config |= {option: True for option in options if option in flags}
    config["draft_vocab_size"] = drafted
    config["eagle_aux_hidden_state_layer_ids"] = LAYERS
    if hidden != WIDTH:
        config["target_hidden_size"] = WIDTH
    if file.endswith(".bin"):
        config["architectures"] = ["LlamaForCausalLM"]
    reference = eagle3_reference(prefix, sizes, flags)
    return Published(config, tensors, reference, file, ids.tolist())


def without(published: Published, *keys: str) -> Published:
    for key in keys:
        del published.config[key]
    return published


def eagle(*variant: str, **shape: Any) -> Published:
    torch.manual_seed(2)
    flags, sizes = frozenset(variant), SHAPE | shape
    tensors = {"fc.weight": normal(WIDTH, 2 * WIDTH), **layer_tensors(
        "layers.0.", WIDTH, sizes, flags)}  # fmt: skip
    config = {"architectures": ["LlamaForCausalLM"], **llama_config(sizes, flags)}
    if "fc_bias" in flags:
        tensors["fc.bias"] = normal(WIDTH)
    if "embedding" in flags:
        tensors["embed_tokens.weight"] = normal(VOCAB, WIDTH)
    if "qkv_bias" in flags:  # as SafeAILab's drafters of Qwen2 say it
        config |= {"attention_bias": False, "qkv_bias": True, "model_type": "qwen2"}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = normal(4)  # of old Transformers
    return Published(config, tensors, eagle_reference(sizes))


def medusa(*variant: str, num_layers: int = 1, scale: float = 1.0) -> Published:
    torch.manual_seed(3)
    flags, tensors = frozenset(variant), {}
    for k in range(DEPTH):
        for j in range(num_layers):
            tensors[f"blocks.{k}.layers.{j}.weight"] = normal(WIDTH, WIDTH)
            if "bias" in flags:
                tensors[f"blocks.{k}.layers.{j}.bias"] = normal(WIDTH)
    drafted = DRAFTED if {"truncated", "rows"} & flags else VOCAB
    rows = VOCAB if "rows" in flags else drafted
    heads = range(1 if "shared" in flags else DEPTH)
    tensors |= {f"lm_heads.{k}.weight": normal(rows, WIDTH) for k in heads}
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": WIDTH,
        "vocab_size": VOCAB, "num_heads": DEPTH, "num_hidden_layers": num_layers,
        "medusa_fc_bias": "bias" in flags, "truncated_vocab_size": drafted,
    }  # fmt: skip
    ids = torch.arange(VOCAB)
    order = None
    if drafted < VOCAB:
        shuffled = torch.randperm(VOCAB)[:drafted]  # most frequent first, as a recipe would have it
        tensors["token_map"] = shuffled
        ids, order = shuffled.sort()
        if "rows" in flags:
            order = ids
    if "shared" in flags:
        config["original_lm_head"] = True
    if scale != 1.0:
        config["logit_scale"] = scale
    head = "lm_heads.0.weight" if "shared" in flags else "lm_heads.{k}.weight"
    reference = medusa_reference("blocks.{k}.layers.{j}", head, num_layers, order, scale)
    return Published(config, tensors, reference, says=ids.tolist())


def faster_decoding(num_layers: int, file: str) -> Published:
    torch.manual_seed(4)
    tensors = {}
    for k in range(DEPTH):
        for j in range(num_layers):
            tensors[f"{k}.{j}.linear.weight"] = normal(WIDTH, WIDTH)
            tensors[f"{k}.{j}.linear.bias"] = normal(WIDTH)
        tensors[f"{k}.{num_layers}.weight"] = normal(VOCAB, WIDTH)
    config = {  # published ones really count 2 where there are 5
        "medusa_num_heads": DEPTH - 1,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    head = "{k}." + f"{num_layers}.weight"
    return Published(config, tensors, medusa_reference("{k}.{j}.linear", head, num_layers), file)


def dflash(*variant: str, num_layers: int = 2, **shape: Any) -> Published:
    torch.manual_seed(6)
    flags, sizes = frozenset({"qk_norm", *variant}), SHAPE | shape
    tensors = {
        "fc.weight": normal(WIDTH, 3 * WIDTH, std=0.1),
        "hidden_norm.weight": 1 + normal(WIDTH),
        "norm.weight": 1 + normal(WIDTH),
    }
    for prefix in (f"layers.{number}." for number in range(num_layers)):
        tensors[f"{prefix}input_layernorm.weight"] = 1 + normal(WIDTH)
        tensors |= layer_tensors(prefix, WIDTH, sizes, flags)
    if "embedding" in flags:
        tensors["embed_tokens.weight"] = normal(VOCAB, WIDTH)
    config = llama_config(sizes, flags) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "num_target_layers": 4,
        "block_size": DEPTH + 1,
        "dflash_config": {
            "mask_token_id": 7,
            "target_layer_ids": [layer - 1 for layer in LAYERS],
        },
    }
    if "speculators" in flags:
        layer = {key: config[key] for key in llama_config(sizes, flags)} | {"model_type": "qwen3"}
        if sizes["scaling"] is None:
            theta = layer.pop("rope_theta")
            layer["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        config = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": LAYERS,
            "block_size": DEPTH + 1,
            "draft_vocab_size": VOCAB,
            "mask_token_id": 7,
            "sample_from_anchor": False,
            "transformer_layer_config": layer,
            "speculators_config": {"verifier": {"name_or_path": "ada/tiny"}},
        }
    return Published(config, tensors, dflash_reference(sizes, num_layers, DEPTH + 1, 7))


def dflash2(
    *variant: str, taps: int = 2, group: int = 8, rank: int = 6, top_k: int = 12
) -> Published:
    made = dflash(*variant)
    tensors = made.tensors | {
        "candidate_selector.predecessor_codebook": normal(VOCAB, rank, std=1.0),
        "candidate_selector.successor_codebook": normal(VOCAB, rank, std=1.0),
        "candidate_selector.hidden_projection.weight": normal(rank, WIDTH),
    }
    for number in range(2):
        for conv in (f"layers.{number}.attention_conv", f"layers.{number}.mlp_conv"):
            tensors[f"{conv}.base_kernel"] = 0.5 + normal(2, taps, WIDTH)
            shape = 2 * taps * (WIDTH // group), WIDTH
            tensors[f"{conv}.kernel_projection.weight"] = normal(*shape, std=0.1)
    sizes = {
        "conv_kernel_size": taps, "conv_group_size": group,
        "selector_rank": rank, "selector_top_k": top_k,
    }  # fmt: skip
    config = made.config | {"architectures": ["DFlash2DraftModel"]}
    if "speculators" in variant:
        config |= {"speculators_model_type": "dflash2", **sizes}
    else:
        config["dflash_config"] = config["dflash_config"] | sizes
    return Published(config, tensors, dflash2_reference(SHAPE, 2, DEPTH + 1, 7, top_k))


def dspark(*variant: str, rank: int = 6) -> Published:
    made = dflash(*variant)
    heads: dict[str, Any] = {
        "markov_rank": rank,
        "markov_head_type": "gated" if "gated" in variant else "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    tensors = made.tensors | {
        "markov_head.markov_w1.weight": normal(VOCAB, rank),
        "markov_head.markov_w2.weight": normal(VOCAB, rank),
        "confidence_head.proj.weight": normal(1, WIDTH + rank),
        "confidence_head.proj.bias": normal(1),
    }
    if "gated" in variant:
        tensors["markov_head.gate_proj.weight"] = normal(rank, WIDTH + rank)
        tensors["markov_head.gate_proj.bias"] = normal(rank)
    config = made.config | heads | {"block_size": DEPTH, "sample_from_anchor": True}
    if "speculators" in variant:
        config |= {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}
    else:
        config |= config.pop("dflash_config")
        config |= {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
        del config["sample_from_anchor"]
    return Published(config, tensors, dspark_reference(SHAPE, 2, DEPTH, 7))


def p_eagle(*variant: str, num_layers: int = 3, **shape: Any) -> Published:
    made = eagle3(*variant, **shape)
    sizes = SHAPE | shape
    for prefix in (f"layers.{number}." for number in range(1, num_layers)):
        made.tensors[f"{prefix}input_layernorm.weight"] = 1 + normal(sizes["hidden"])
        made.tensors |= layer_tensors(prefix, sizes["hidden"], sizes, frozenset(variant))
    made.tensors["mask_hidden"] = normal(1, 1, 3 * WIDTH, std=1.0)
    if "speculators" in variant:
        proposal = {"proposal_type": "greedy", "speculative_tokens": DEPTH}
        made.config |= {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": "peagle",
            "mask_token_id": 7,
            "speculators_config": {
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": "ada/tiny"},
            },
        }
        made.config["transformer_layer_config"]["num_hidden_layers"] = num_layers
        del made.config["norm_before_residual"]  # false, where it is absent, unlike EAGLE-3's
        made.tensors = {n.replace("midlayer.", "layers.0."): t for n, t in made.tensors.items()}
    else:
        made.config |= {"num_hidden_layers": num_layers, "ptd_token_id": 7}
    reference = p_eagle_reference(sizes, num_layers, DEPTH, 7)
    return replace(made, reference=reference)


def mtp(variant: str = "mimo", *flags: str, kind: str = "mimo", **shape: Any) -> Published:
    """A target's checkpoint, of which the module and another tensor are here."""
    torch.manual_seed(4)
    sizes, place = SHAPE | shape, {"mimo": "model.mtp_layers.0.", "qwen": "mtp."}[variant]
    project, *norms, layer = MTP_NAMES[variant]
    tensors = {f"{place}{name}.weight": 1 + normal(WIDTH) for name in norms}
    tensors |= {
        f"{place}{project}.weight": normal(WIDTH, 2 * WIDTH),
        f"{place}{layer}input_layernorm.weight": 1 + normal(WIDTH),
        **layer_tensors(f"{place}{layer}", WIDTH, sizes, frozenset(flags)),
        "model.layers.0.mlp.up_proj.weight": normal(40, WIDTH),
    }
    config = llama_config(sizes, frozenset(flags)) | {
        "architectures": ["MiMoForCausalLM"], "model_type": kind, "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
    }  # fmt: skip
    return Published(config, tensors, mtp_reference(sizes, variant))


LAYOUTS: dict[str, tuple[str, Callable[[], Published]]] = {
    "DFlash-2": ("dflash2", dflash2),
    "DFlash-2, three taps, own embedding, every token": (
        "dflash2",
        lambda: dflash2("embedding", taps=3, group=1, top_k=VOCAB),
    ),
    "DFlash-2 of speculators": ("speculators_dflash2", lambda: dflash2("speculators")),
    "MTP of MiMo": ("mtp", lambda: mtp("mimo", "qkv_bias")),
    "MTP of MiMo, rope llama3": ("mtp", lambda: mtp(kind="llama", scaling=LLAMA3)),
    "MTP named as Qwen3-Next's": ("mtp", lambda: mtp("qwen", "qk_norm", kind="qwen3")),
    "DSpark": ("dspark", dspark),
    "DSpark, gated, own embedding": ("dspark", lambda: dspark("gated", "embedding")),
    "DSpark of speculators": ("speculators_dspark", lambda: dspark("speculators")),
    "DSpark of speculators, gated": ("speculators_dspark", lambda: dspark("speculators", "gated")),
    "DFlash": ("dflash", dflash),
    "DFlash, one layer, own embedding": ("dflash", lambda: dflash("embedding", num_layers=1)),
    "DFlash, rope llama3": ("dflash", lambda: dflash(scaling=LLAMA3)),
    "P-EAGLE": ("p_eagle", p_eagle),
    "P-EAGLE, biases, own embedding": ("p_eagle", lambda: p_eagle("embedding", "qkv_bias")),
    "P-EAGLE, one layer, rope llama3": ("p_eagle", lambda: p_eagle(num_layers=1, scaling=LLAMA3)),
    "P-EAGLE of speculators": ("speculators_p_eagle", lambda: p_eagle("speculators")),
    "P-EAGLE of speculators, Qwen3, own embedding": (
        "speculators_p_eagle",
        lambda: p_eagle("speculators", "qk_norm", "embedding"),
    ),
    "DFlash of speculators": ("speculators_dflash", lambda: dflash("speculators")),
    "DFlash of speculators, rope llama3": (
        "speculators_dflash",
        lambda: dflash("speculators", "embedding", num_layers=1, scaling=LLAMA3),
    ),
    "native": ("eagle3", eagle3),
    "native layers.0": ("eagle3", lambda: eagle3(prefix="layers.0.")),
    "native, whole vocabulary": ("eagle3", lambda: eagle3("whole")),
    "SafeAILab": ("eagle3", lambda: eagle3(file="pytorch_model.bin")),
    "norm_before_residual": ("eagle3", lambda: eagle3("norm_before_residual")),
    "norm_before_fc": ("eagle3", lambda: eagle3("norm_before_fc")),
    "fc_norm": ("eagle3", lambda: eagle3("fc_norm")),
    "norm_output": ("eagle3", lambda: eagle3("norm_output")),
    "biases": ("eagle3", lambda: eagle3("bias")),
    "qkv biases": ("eagle3", lambda: eagle3("qkv_bias", "norm_output", "norm_before_residual")),
    "own embedding": ("eagle3", lambda: eagle3("embedding")),
    "own width": ("eagle3", lambda: eagle3("embedding", hidden=48)),
    "own heads": ("eagle3", lambda: eagle3(heads=6, kv_heads=3, head_dim=10)),
    "rope llama3": ("eagle3", lambda: eagle3(scaling=LLAMA3)),
    "rope linear": ("eagle3", lambda: eagle3(scaling={"rope_type": "linear", "factor": 4.0})),
    "defaults of Transformers": (
        "eagle3",
        lambda: without(
            eagle3(kv_heads=4, theta=10000.0, eps=1e-6),
            *("rope_theta", "rms_norm_eps", "num_key_value_heads", "head_dim", "num_hidden_layers"),
        ),
    ),
    "speculators": ("speculators_eagle3", lambda: eagle3("speculators", prefix="layers.0.")),
    "speculators by default": (
        "speculators_eagle3",
        lambda: eagle3("speculators", "norm_before_residual", "embedding", prefix="layers.0."),
    ),
    "speculators 3.1 of Qwen3": (
        "speculators_eagle3",
        lambda: eagle3("speculators", "qk_norm", "fc_norm", "norm_output", prefix="layers.0."),
    ),
    "speculators, rope llama3": (
        "speculators_eagle3",
        lambda: eagle3("speculators", "norm_before_fc", prefix="layers.0.", scaling=LLAMA3),
    ),
    "EAGLE-1": ("eagle", eagle),
    "EAGLE-1 with a bias": ("eagle", lambda: eagle("fc_bias", "embedding")),
    "EAGLE-1 of Qwen2": ("eagle", lambda: eagle("fc_bias", "qkv_bias", theta=1e6)),
    "Medusa": ("medusa", lambda: medusa("bias")),
    "Medusa, two layers, no bias": ("medusa", lambda: medusa(num_layers=2)),
    "Medusa, truncated": ("medusa", lambda: medusa("bias", "truncated")),
    "Medusa, rows by token_map": ("medusa", lambda: medusa("rows")),
    "Medusa, one head": ("medusa", lambda: medusa("bias", "shared", "truncated")),
    "Medusa, scaled": ("medusa", lambda: medusa("bias", scale=0.25)),
    "FasterDecoding": ("fasterdecoding", lambda: faster_decoding(1, "medusa_lm_head.pt")),
    "FasterDecoding, two layers": (
        "fasterdecoding",
        lambda: faster_decoding(2, "medusa_lm_head.safetensors"),
    ),
}


def edited(published: Published, **changes: Any) -> Published:
    """Change config.json (None deletes a key) and tensors (by names with dots as __)."""
    for name, value in changes.items():
        key = name.replace("__", ".")
        place: dict[str, Any] = published.tensors if "__" in name else published.config
        if value is None:
            del place[key]
        else:
            place[key] = value
    return published
