"""A real vLLM serves a target that an MTP module was added to, and counts what we count.

Run by scripts/serving_suite.sh. A random Qwen2, which vLLM loads by its class for MiMo from the
export; greedy, float32, one prompt at a time; a drafter that was trained a little.
"""

import json
import os
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from conftest import character_tokenizer
from overfit import decisive_texts, overfit, target_at
from test_vllm import DEPTH, ask_vllm, card_of, decode, export_config
from test_vllm import request as asked

from drafttrain.core.types import Counters
from drafttrain.formats.write.export import export_drafter
from drafttrain.target.model import Target

pytestmark = pytest.mark.serving

STEPS, NUM_PROMPTS, MAX_NEW_TOKENS = 15, 5, 48
# As vLLM's CPU kernels want them: heads of 32.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # else its text soon repeats itself
}
Answers = tuple[Target, list[tuple[tuple[int, ...], Counters]], dict[str, Any]]


@pytest.fixture(scope="module", params=["own head", "tied"])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return the target, what we said and counted, and vLLM's answers by case."""
    python = os.environ.get("DRAFTTRAIN_VLLM_PYTHON", "")
    if not Path(python).is_file():
        pytest.fail(f"DRAFTTRAIN_VLLM_PYTHON must name an interpreter with vLLM, got {python!r}")
    folder = tmp_path_factory.mktemp("within")
    place, out = folder / "qwen2", folder / "with_module"
    tied = {"tie_word_embeddings": request.param == "tied"}  # as the smaller Qwen2.5 are
    model = build("qwen2", WIDE | tied).model
    with torch.no_grad():  # a final norm that matters: the module reads the state before it
        model.model.norm.weight.uniform_(0.2, 2.0, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(place)
    character_tokenizer().save_pretrained(place)
    target = target_at(place)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(6, target.spec.vocab_size, (2 + 3 * i,), generator=generator).tolist()
        for i in range(3 * NUM_PROMPTS)
    ]
    texts = decisive_texts(target, prompts, NUM_PROMPTS, MAX_NEW_TOKENS)
    drafter = overfit("mtp", target, texts, STEPS)
    done = export_drafter(
        *(drafter, str(place), out, export_config(), card_of("mtp")),
        partial(getattr, target, "tokenizer"),
        target_folder=lambda: place,
    )
    _, _, served, *_, speculative = shlex.split(done.commands["vLLM"])  # as a user is told
    assert served == str(out)
    requests = [
        asked("qwen2", place, texts, None),
        asked("module", out, texts, json.loads(speculative)),
    ]
    ours = [decode(target, drafter, text.prompt, MAX_NEW_TOKENS) for text in texts]
    return target, ours, ask_vllm(python, folder, requests, MAX_NEW_TOKENS)


def test_the_text_is_that_of_the_target_without_the_module(answers: Answers) -> None:
    _, ours, theirs = answers
    assert "error" not in theirs["module"], theirs["module"]["error"]
    assert theirs["module"]["tokens"] == theirs["plain qwen2"]["tokens"]
    assert theirs["module"]["tokens"] == [list(tokens) for tokens, _ in ours]


def test_vllm_counts_the_same_drafts_and_acceptances(answers: Answers) -> None:
    _, ours, theirs = answers
    total = sum((counters for _, counters in ours), Counters())
    print(total)
    for (_, mine), counted in zip(ours, theirs["module"]["counters"], strict=True):
        assert counted == {
            "num_drafts": mine.num_drafts,
            "num_draft_tokens": mine.num_draft_tokens,
            "num_accepted_tokens": mine.num_accepted_tokens,
            "num_accepted_tokens_per_pos": mine.num_accepted_tokens_per_position,
        }
    assert len(total.num_accepted_tokens_per_position) == DEPTH
    assert 0.1 < total.num_accepted_tokens / total.num_draft_tokens < 0.95
    assert all(total.num_accepted_tokens_per_position)
