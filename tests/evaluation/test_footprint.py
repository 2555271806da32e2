"""What a drafter takes beside its target: weights of its own, and its cache by position."""

from dataclasses import dataclass

import pytest
import torch
from test_drafters import random_drafter

from drafttrain.core.ops.ragged_cache import RaggedCache, run_decoder
from drafttrain.evaluation.evaluate import bytes_per_position, caches_of, extra_memory
from drafttrain.target.model import Target


@pytest.mark.parametrize(("name", "layers"), [("eagle", 1), ("eagle3", 1), ("medusa", 0)])
def test_weights_and_cache_are_those_of_the_family(name: str, layers: int, target: Target) -> None:
    drafter, spec = random_drafter(name, target), target.spec
    memory = extra_memory(target, drafter)
    numbers = sum(parameter.numel() for parameter in drafter.parameters())
    assert memory.weight_bytes >= 4 * numbers  # float32; buffers come on top
    assert memory.weight_bytes < 4 * numbers + 16 * spec.vocab_size
    wide = 2 * spec.num_key_value_heads * spec.head_dim * 4
    assert memory.kv_bytes_per_token == layers * wide
    halved = extra_memory(target, drafter.to(torch.bfloat16))
    assert halved.kv_bytes_per_token == layers * wide // 2
    assert halved.weight_bytes < 0.6 * memory.weight_bytes


def test_prompt_lookup_takes_nothing(target: Target) -> None:
    memory = extra_memory(target, random_drafter("ngram", target))
    assert (memory.weight_bytes, memory.kv_bytes_per_token) == (0, 0)


def test_weights_of_the_target_are_not_counted(target: Target) -> None:
    drafter = random_drafter("eagle3", target)
    before = extra_memory(target, drafter).weight_bytes
    drafter.register_parameter("lent", next(target.model.parameters()))
    assert extra_memory(target, drafter).weight_bytes == before
    drafter.register_parameter("own", torch.nn.Parameter(torch.zeros(10)))
    assert extra_memory(target, drafter).weight_bytes == before + 40


@dataclass
class Nested:
    caches: list[RaggedCache]
    name: str


def test_a_cache_of_transformers_counts_every_layer(target: Target) -> None:
    cache, spec = RaggedCache(), target.spec
    tokens = torch.zeros(2, 5, dtype=torch.long)
    with torch.inference_mode():
        run_decoder(lambda **told: (target.model.model(**told).last_hidden_state,), cache, tokens)
    wide = 2 * spec.num_key_value_heads * spec.head_dim * 4
    assert bytes_per_position(cache) == spec.num_layers * wide
    assert list(caches_of({"no": "state"})) == []
    own = RaggedCache(3)
    own.open(3, 7)
    own.update(*torch.zeros(2, 3, 2, 7, 4, dtype=torch.bfloat16), 0)
    assert list(caches_of(Nested([own], "x"))) == [own]
    assert bytes_per_position(own) == 2 * 2 * 4 * 2
