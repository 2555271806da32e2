"""Which layers of the target each engine reads for a drafter, by the drafter's config.json.

Ids as in core/types.py: id i is the input of layer i. vLLM's two model runners differ: V1
(_get_eagle3_aux_layers_from_config in v1/worker/gpu_model_runner.py) reads eagle_config's ids, V2
(get_eagle3_aux_layers_from_config in v1/worker/gpu/spec_decode/eagle/eagle3_utils.py) does not.
Both drop repeats, and take the target's default layers where config.json names none.
"""

from collections.abc import Sequence
from typing import Any

from drafttrain.drafters.serving.layout import Config
from drafttrain.runtime.untrusted_input import shown

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Targets for which SGLang adds one to the ids of eagle_config only where the first is 1
# (sglang#25454). It adds it for all others, but for gpt_oss not where the last layer's output is
# named, which is never written.
ADDED_AFTER_ONE = frozenset({"deepseek_v2", "deepseek_v3"})


def usual_layers(num_layers: int) -> list[int]:
    """Return the layers that every engine reads where none are named: (2, L//2, L-3)."""
    return [2, num_layers // 2, num_layers - 3]


def read_by_v1(config: Config) -> Any:
    """Return what vLLM's V1 runner reads as the list of layers, None for the default."""
    block, nested = _mapping(config, "dflash_config"), _mapping(config, "eagle_config")
    named = nested.get(LAYER_IDS) if nested else _after(block.get("target_layer_ids"))
    return config.get(LAYER_IDS) or named or None


def read_by_v2(config: Config) -> Any:
    """Return what vLLM's V2 runner reads as the list of layers, None for the default."""
    block, nested = _mapping(config, "dflash_config"), _mapping(config, "eagle_config")
    named = _after(block.get("target_layer_ids") or config.get("target_layer_ids"))
    return config.get(LAYER_IDS) or named or block.get("layer_ids") or nested.get("layer_ids")


def read_by_sglang(config: Config, architecture: str) -> Any:
    """Return what SGLang reads for EAGLE-3 with such a target, None for the default."""
    return _counted_by_sglang(_mapping(config, "eagle_config").get(LAYER_IDS), architecture)


def written_for_sglang(layers: Sequence[int], architecture: str) -> list[int]:
    """Return the ids of eagle_config by which SGLang reads these layers, if there are any."""
    less, same = [layer - 1 for layer in layers], list(layers)
    return less if _counted_by_sglang(less, architecture) == same else same


def named_for_sglang(layers: Sequence[int], architecture: str) -> bool:
    """Return whether there are such ids."""
    written = written_for_sglang(layers, architecture)
    return bool(_counted_by_sglang(written, architecture) == list(layers))


def _counted_by_sglang(ids: Any, architecture: str) -> Any:
    """Return the layers that SGLang takes ids of eagle_config for."""
    if architecture in ADDED_AFTER_ONE and isinstance(ids, list) and ids[:1] != [1]:
        return ids
    return _after(ids)


def runners_differ(config: Config, num_layers: int) -> list[str]:
    """Return a note if vLLM's two runners would read different layers of a target."""
    usual = usual_layers(num_layers)
    v1, v2 = read_by_v1(config) or usual, read_by_v2(config) or usual
    if v1 == v2:
        return []
    return [
        f"by its config.json vLLM's V1 runner (CPUs) reads layers {shown(v1)}, its V2 runner "
        f"(GPUs) layers {shown(v2)}: both read the top-level {LAYER_IDS} alone"
    ]


def _mapping(config: Config, key: str) -> Config:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _after(ids: Any) -> Any:
    """Return ids that count a layer's output as ids that count the next one's input."""
    if isinstance(ids, list) and all(type(layer) is int for layer in ids):
        return [layer + 1 for layer in ids]
    return ids
