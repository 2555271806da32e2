import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.core.ops import grouped_attention as module
from drafttrain.core.ops.grouped_attention import NAME, grouped_attention, share_heads


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("new", [1, 5])
def test_heads_that_share_keys_attend_as_if_each_had_its_own(new: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(new)
    queries = torch.randn(3, 6, new, 8, dtype=torch.float64, generator=generator)
    keys, values = torch.randn(2, 3, 2, 11, 8, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, 1, new, 11, generator=generator) > 0.4
    mask[..., 0] = True
    copied = (heads.repeat_interleave(3, dim=1) for heads in (keys, values))
    expected = scaled_dot_product_attention(queries, *copied, attn_mask=mask)
    torch.testing.assert_close(grouped_attention(queries, keys, values, mask), expected)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(grouped_attention(queries, keys, values, added), expected)


def test_a_model_of_transformers_shares_heads_in_passes_of_few_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = LlamaForCausalLM(config).eval()
    tokens, calls = torch.arange(9)[None], []
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    told = {"input_ids": tokens, "position_ids": tokens}
    with torch.no_grad():
        expected = model(**told, attention_mask=mask).logits
        share_heads(model)
        assert model.config._attn_implementation == NAME
        real = grouped_attention
        monkeypatch.setattr(
            module, "grouped_attention", lambda *args: calls.append(len(args)) or real(*args)
        )
        torch.testing.assert_close(model(**told, attention_mask=mask).logits, expected)
        assert len(calls) == config.num_hidden_layers
        model(input_ids=tokens[:, :1], attention_mask=mask[..., :1, :1])
        assert len(calls) == 2 * config.num_hidden_layers
        torch.testing.assert_close(model(**told).logits, expected)
        monkeypatch.setattr(module, "FEW", 8)
        torch.testing.assert_close(model(**told, attention_mask=mask).logits, expected)
    assert len(calls) == 2 * config.num_hidden_layers
