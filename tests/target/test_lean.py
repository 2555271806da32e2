"""Lean decoding steps: to the last bit what Transformers computes, and only where it is asked."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import model_config

from drafttrain.core.ops.growing import RaggedCache, run_decoder
from drafttrain.target.model import load_target
from drafttrain.target.pretrained.lean import Turn, make_lean
from drafttrain.target.pretrained.models import load_model, load_model_config

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXT = torch.tensor([[5, 9, 33, 21, 7, 60, 12, 80, 3, 44], [8, 1, 1, 70, 90, 2, 31, 6, 11, 17]])
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0} | {
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": SCALED}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"head_dim": 8}),
    ("qwen3", {}),
]


def drawn(kind: str, changes: dict[str, Any], dtype: torch.dtype) -> Any:
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:  # drawn as 1 and 0, which hides mistakes
                weight.data += 0.3 * torch.randn_like(weight)
    return model.eval().requires_grad_(False)


def steps(model: Any) -> list[torch.Tensor]:
    """A prompt of unequal rows, single tokens, several at once after a rollback, one row alone."""
    cache, decoder = RaggedCache(), model.get_decoder()
    out = [run_decoder(decoder, cache, TEXT[:, :5]).last_hidden_state]
    out.append(run_decoder(decoder, cache, TEXT[:, 5:6]).last_hidden_state)
    out.append(run_decoder(decoder, cache, TEXT[:, 6:9]).last_hidden_state)
    cache.rollback([7, 9])
    out.append(run_decoder(decoder, cache, TEXT[:, 7:9], [2, 1]).last_hidden_state)
    cache.select([1])
    out.append(run_decoder(decoder, cache, TEXT[1:, 9:]).last_hidden_state)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "changes"), KINDS, ids=["llama", "biases", "m", "q2", "q3"])
def test_every_step_is_what_transformers_computes(
    kind: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = drawn(kind, changes, dtype)
    expected = steps(model)
    assert make_lean(model)
    for got, wanted in zip(steps(model), expected, strict=True):
        # Equal to the last bit on most machines; kernels for grouped heads may round once.
        bound = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
        torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


def test_the_lean_path_is_the_one_that_decoding_takes(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    kinds = []
    update = RaggedCache.update

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        kinds.append("step")
        return update(self, *args, **kwargs)

    monkeypatch.setattr(RaggedCache, "update", noted)
    seen = []
    target.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    target.step(target.begin(), TEXT[:1])
    assert len(kinds) == len(target.layers)
    assert isinstance(seen[0][2], Turn)


def test_captured_layers_are_those_of_transformers(tiny_target_dir: Path) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    _, features = target.step(target.begin(), TEXT, captures=(0, 2, 4))
    expected = target.model(TEXT, output_hidden_states=True, use_cache=False).hidden_states
    for layer in (0, 2):
        torch.testing.assert_close(features.captured[layer], expected[layer])
    torch.testing.assert_close(target.final_norm(features.captured[4]), expected[4])


def test_generate_and_plain_forwards_run_what_they_ran(tiny_target_dir: Path) -> None:
    config = model_config(tiny_target_dir)
    lean = load_model(config, load_model_config(config), torch.float32, "cpu")
    own = transformers.AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    assert torch.equal(lean(TEXT).logits, own(TEXT).logits)
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    mask = torch.ones_like(TEXT)
    texts = [model.generate(TEXT, attention_mask=mask, **settings) for model in (lean, own)]
    assert torch.equal(*texts)


def test_a_copy_computes_with_its_own_weights() -> None:
    model = drawn("llama", {}, torch.float32)
    make_lean(model)
    twin = copy.deepcopy(model).to(torch.float64)
    for weight in twin.parameters():
        weight.data *= 1.5
    plain = copy.deepcopy(twin)
    for module in plain.modules():
        module.__dict__.pop("forward", None)
    for got, wanted in zip(steps(twin), steps(plain), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "olmo2"])
def test_other_families_stay_as_they_are(kind: str) -> None:
    model = drawn(kind, {}, torch.float32)
    assert not make_lean(model)
    assert "forward" not in model.get_decoder().__dict__


def test_eager_attention_stays_as_it_is(tiny_target_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_target_dir, attn_implementation="eager"
    )
    assert not make_lean(model)
