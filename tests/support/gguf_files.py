"""Small GGUF files, as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 96


def words() -> list[str]:
    """Byte-level tokens: special ones, then single characters."""
    letters = [chr(code) for code in range(33, 127)]
    return ["<|end|>", "<|user|>", "<|assistant|>", "Ġ", "Ċ", "!!", *letters][:VOCABULARY]


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(seed: int = 0) -> Any:
    """A random Llama whose rows are long enough for blocks of 32 numbers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=256, tie_word_embeddings=True, **shape
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    file: Path, model: Any, kind: str = "F32", tokenizer: bool = True, architecture: str = "llama"
) -> Path:
    """Write a model; kind: how matrices are quantised. tokenizer: whether the file has one."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(words())
        writer.add_token_types([3, 3, 3, *[1] * (len(words()) - 3)])
        writer.add_token_merges(["! !"])
        writer.add_eos_token_id(0)
        writer.add_pad_token_id(0)
        writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        values = weight.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:  # llama.cpp rotates neighbouring dimensions
                halves = values.reshape(count, 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        kept = gguf.GGMLQuantizationType.F32
        if values.ndim == 2 and kind != "F32":
            kept = gguf.GGMLQuantizationType[kind]
            values = gguf.quants.quantize(values, kept)
        written = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(written, np.ascontiguousarray(values), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
