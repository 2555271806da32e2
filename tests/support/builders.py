"""What several test files build in the same way."""

import atexit
import functools
import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from drafttrain.config.groups import content_of
from drafttrain.data.template import Template
from drafttrain.drafters.base import DrafterConfig
from drafttrain.target.pretrained.config import ModelConfig

# What every data section has, beside what each test says.
TOLD = {"template_kwargs": {}, "template_date": "2024-07-26", "roles": {}, "preview": 0}
TOLD["train_on"] = "answers"
BY_TEMPLATE = Template("chat", {}, "2024-07-26")
WITHOUT_TEMPLATE = Template("none", {}, "2024-07-26")


def model_config(folder: Path) -> ModelConfig:
    """A target in a local directory."""
    return ModelConfig(
        name="tiny_test",
        path=str(folder),
        adapter=None,
        repo=None,
        revision=None,
        embedded=False,
        max_positions=None,
        attention="auto",
        quantization=None,
        trust_remote_code=False,
        allow_pickle=False,
        inflate=None,
        shape=None,
    )


def drafter_config(name: str, **changes: Any) -> DrafterConfig:
    """A drafter as conf/drafter/<name>.yaml says, less what is changed."""
    values = content_of("drafter", name)
    module, _, kind = values.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), kind)(**values | changes)


@functools.cache
def draft_model_dir(vocab_size: int, **changes: Any) -> str:
    """A random Llama to draft with, shaped otherwise than any target; character tokenizer."""
    import torch
    from conftest import character_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tempfile.mkdtemp(prefix="draft_model_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shape: dict[str, Any] = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **{**shape, **changes}))
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, **changes: Any) -> Path:
    """Save a LoRA adapter of random weights for a model, as PEFT does."""
    import warnings

    import peft
    import torch
    import transformers

    told: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **told | changes)
        adapted = peft.get_peft_model(model, config)
        for weight in filter(lambda weight: weight.requires_grad, adapted.parameters()):
            weight.data += 0.1 * torch.randn_like(weight)
        adapted.save_pretrained(folder)
    return folder
