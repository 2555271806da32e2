"""Architectures one by one: where export prints a vLLM command, a real vLLM counts what we count.

Run by scripts/serving_suite.sh. Random targets whose configurations differ in what an export may
forget: scaled embeddings, logits scaled, capped and biased, norms, windows, experts. Greedy,
float32, one prompt at a time; a drafter that was trained a little, so that some drafts fail.
"""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import EXACT, MIXED, build
from conftest import character_tokenizer
from overfit import decisive_texts, overfit, target_at
from test_vllm import DEPTH, ask_vllm, card_of, decode, export_config, request

from drafttrain.core.types import Counters
from drafttrain.formats.write.export import export_drafter

pytestmark = pytest.mark.serving

STEPS, NUM_PROMPTS, MAX_NEW_TOKENS = 25, 3, 32
# As vLLM's CPU kernels want them: heads of 32.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
WINDOWED = {**MIXED, "sliding_window": 128, "layer_types": MIXED["layer_types"] * 2}
# Architecture by name -> what differs from the table of tests/support/architectures.py.
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "gemma": {},
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 32},
    "gemma3": {**WINDOWED, "query_pre_attn_scalar": 32},
    "phi3": {},
    "olmo2": {},
    "olmo3": WINDOWED,
    "stablelm": {},
    "cohere": {},
    "cohere2": WINDOWED,
    "granite": {"attention_multiplier": 0.2},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "glm4": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "gpt_oss": WINDOWED,
    "starcoder2": {},
    "nemotron": {},
    "ernie4_5": {},
    "exaone4": WINDOWED,
    "seed_oss": {},
    "phi": {},
    "gpt_neox": {},
}


@dataclass
class Case:
    """A target with a drafter, and what both sides said."""

    commands: dict[str, str]
    plain: list[tuple[int, ...]] = field(default_factory=list)
    ours: list[tuple[tuple[int, ...], Counters]] = field(default_factory=list)


# An engine start is seconds: of the two kinds that read hidden states, the one that reads more,
# where vLLM has it; EAGLE-1, which embeds by the target's table alone, where embeddings are scaled.
ONLY_EAGLE = ("gemma", "gemma2", "gemma3", "stablelm", "cohere", "cohere2", "glm4", "mixtral")
ONLY_EAGLE += ("qwen2_moe", "nemotron", "exaone4")
FAMILIES = {name: ("eagle",) if name in ONLY_EAGLE else ("eagle3",) for name in CHANGES}
FAMILIES |= {"granite": ("eagle", "eagle3"), "gemma3": ("eagle", "eagle3")}
# No command: said instead.
NOT_SERVED = ("gemma3 eagle3", "gpt_neox eagle3", "gemma2 eagle", "cohere eagle", "cohere2 eagle")
NOT_SERVED += ("ernie4_5 eagle3",)
CASES = [f"{name} {family}" for name, families in FAMILIES.items() for family in families]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Case], dict[str, Any]]:
    """Train, export and decode every case here, then let one vLLM process serve them all."""
    python = os.environ.get("DRAFTTRAIN_VLLM_PYTHON", "")
    if not Path(python).is_file():
        pytest.fail(f"DRAFTTRAIN_VLLM_PYTHON must name vLLM's interpreter, got {python!r}")
    folder = tmp_path_factory.mktemp("architectures")
    cases, requests = {}, []
    for name, changes in CHANGES.items():
        kind, own = EXACT[name]
        place = folder / name
        build(kind, {**WIDE, **own, **changes}).model.save_pretrained(place)
        character_tokenizer().save_pretrained(place)
        target = target_at(place)
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(6, target.spec.vocab_size, (5 + 3 * i,), generator=generator).tolist()
            for i in range(2 * NUM_PROMPTS)
        ]
        texts = decisive_texts(target, prompts, NUM_PROMPTS, MAX_NEW_TOKENS)
        for family in FAMILIES[name]:
            drafter = overfit(family, target, texts, STEPS)
            out = folder / f"{name}_{family}"
            done = export_drafter(
                drafter,
                str(place),
                out,
                export_config(),
                card_of(family),
                partial(getattr, target, "tokenizer"),
            )
            case = cases[f"{name} {family}"] = Case(done.commands)
            if "vLLM" not in done.commands:
                continue
            case.plain = [tuple(text.answer) for text in texts]
            case.ours = [decode(target, drafter, text.prompt, MAX_NEW_TOKENS) for text in texts]
            speculative = {
                "method": done.method,
                "model": str(out),
                "num_speculative_tokens": DEPTH,
            }
            asked = request(f"{name} {family}", place, texts, speculative)
            requests.append({**asked, "max_model_len": 128})
    return cases, ask_vllm(python, folder, requests, MAX_NEW_TOKENS)


@pytest.mark.parametrize("name", CASES)
def test_vllm_says_and_counts_what_we_do(
    name: str, served: tuple[dict[str, Case], dict[str, Any]]
) -> None:
    case, answers = served[0][name], served[1]
    if name in NOT_SERVED:
        assert not case.commands
        return
    answer = answers[name]
    assert "error" not in answer, answer["error"]
    assert [tuple(tokens) for tokens in answer["tokens"]] == case.plain
    assert [tokens for tokens, _ in case.ours] == case.plain
    counted = [counters for _, counters in case.ours]
    print(name, sum(counted, Counters()))
    assert answer["counters"] == [
        {
            "num_drafts": one.num_drafts,
            "num_draft_tokens": one.num_draft_tokens,
            "num_accepted_tokens": one.num_accepted_tokens,
            "num_accepted_tokens_per_pos": one.num_accepted_tokens_per_position,
        }
        for one in counted
    ]
    total = sum(counted, Counters())  # or a drafter that says nothing would pass
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens, total
