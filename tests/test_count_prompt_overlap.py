"""What prompts share with training text, as scripts/count_prompt_overlap.py counts it."""

from collections.abc import Callable
from typing import Any

import pytest
from paths import load_script

from drafttrain.data.evaluation_prompts import Prompt, overlap_record, read_prompts
from drafttrain.data.suites import BUILTIN_PROMPTS


@pytest.fixture
def count_overlap() -> Callable[..., dict[str, Any]]:
    count: Callable[..., dict[str, Any]] = load_script("count_prompt_overlap").count_overlap
    return count


def prompt(text: str, task: str = "math") -> Prompt:
    return Prompt(text, task, task, (text,))


def test_overlap_counts_equal_prompts_and_shared_ngrams_of_words(
    count_overlap: Callable[..., dict[str, Any]],
):
    text = "One two three, four five six seven eight nine ten."
    prompts = [prompt(text), prompt("An entirely other prompt.", "story")]
    record = count_overlap(
        prompts,
        [
            ["  one TWO three four five six seven eight nine ten", "answer"],
            ["so: two three four five six seven eight nine", "an entirely other prompt"],
        ],
    )
    assert record["num_training_conversations"] == 2
    assert record["num_equal_prompts"] == 1
    assert (record["num_ngrams"], record["num_shared_ngrams"]) == (3, 3)
    assert record["tasks"]["story"] == {
        "num_prompts": 1,
        "num_equal_prompts": 0,
        "num_ngrams": 0,
        "num_shared_ngrams": 0,
        "shared_ngram_share": None,
    }
    partly = count_overlap(prompts, [["x", "zero one two three four five six seven eight"]])
    assert (partly["num_equal_prompts"], partly["num_shared_ngrams"]) == (0, 1)


def test_the_shipped_record_counts_the_shipped_prompts(
    count_overlap: Callable[..., dict[str, Any]],
):
    record = overlap_record(BUILTIN_PROMPTS)
    assert record is not None
    prompts, _ = read_prompts(BUILTIN_PROMPTS, None)
    assert record["num_ngrams"] == count_overlap(prompts, [])["num_ngrams"]
