"""Every published chat template that llama.cpp keeps: what is trained is what it renders.

DRAFTTRAIN_TEMPLATES names the folder `models` of llama.cpp's source, with templates/ and the
vocabularies ggml-vocab-*.gguf, which Transformers reads by the package gguf.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builders import BY_TEMPLATE
from test_chat import chat, config
from transformers import AutoTokenizer

from drafttrain.data.chat import encode
from drafttrain.data.skips import NothingUsable
from drafttrain.data.template import render

pytestmark = pytest.mark.serving

FOLDER = "DRAFTTRAIN_TEMPLATES"
NUM_TEMPLATES = 70
QUESTION, ANSWER = "What colour is the sky?", "It is blue."
THOUGHT = f"<think>\nA thought.\n</think>\n\n{ANSWER}"
CASES = {
    "plain": chat(QUESTION, ANSWER),
    "two turns": chat(QUESTION, ANSWER, "And grass?", "Green."),
    "system": chat(QUESTION, ANSWER, system="Be brief."),
    "thought": chat(QUESTION, THOUGHT),
    "newline": chat(QUESTION, f"\n\n{ANSWER}"),
}
VOCABULARIES = ("llama-bpe", "qwen2", "phi-3", "llama-spm")
CLOSED = ("</think>", "<channel|>", "<|END_THINKING|>", "</think:opensource>")


def models() -> Path:
    """The folder; it must be named where these tests are asked for."""
    assert FOLDER in os.environ, f"{FOLDER} must name the folder models of llama.cpp's source"
    return Path(os.environ[FOLDER])


@cache
def vocabulary(name: str) -> Any:
    return AutoTokenizer.from_pretrained(models(), gguf_file=f"ggml-vocab-{name}.gguf")


def test_all_templates_are_there() -> None:
    assert len(list((models() / "templates").glob("*.jinja"))) == NUM_TEMPLATES


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_trained_text_is_the_rendering_after_its_generation_prompt(name: str) -> None:
    tokenizer = vocabulary(name)
    for file in sorted((models() / "templates").glob("*.jinja")):
        tokenizer.chat_template = file.read_text()
        for case, conversation in CASES.items():
            try:
                (sample,), _ = encode([conversation], tokenizer, config(max_length=8192))
            except NothingUsable as error:
                print(f"{file.stem}: {case}: skipped: {error}")
                continue
            turns = conversation.messages
            prompt = render(turns[:-1], tokenizer, BY_TEMPLATE, for_answer=True)
            whole = render(turns, tokenizer, BY_TEMPLATE)
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            where = (name, file.stem, case)
            assert sample.tokens[: len(ids)].tolist() == ids, where
            assert case == "two turns" or not sample.loss_mask[: len(ids)].any(), where
            first = len(ids) + int(sample.loss_mask[len(ids) :].int().argmax())
            last = int(sample.loss_mask.nonzero().max())
            trained = tokenizer.decode(sample.tokens[first : last + 1].tolist())
            text = tokenizer.decode(sample.tokens[len(ids) : last + 1].tolist())
            final = turns[-1].content.strip().removeprefix("<think>").strip()
            print(f"{file.stem}: {case}: {trained!r}")
            assert "".join(final.split()) in "".join(trained.split()), where
            if whole.startswith(prompt):
                rest = "".join(whole[len(prompt) :].split())
                doubled = case == "thought" and prompt.rstrip().endswith("<think>")
                assert rest.startswith("".join(text.split())) or doubled, where
            else:
                closed = prompt.rstrip().endswith(CLOSED)
                assert closed or case in ("thought", "system"), where
            if prompt.rstrip().endswith("<think>"):
                assert "</think>" in text, where
