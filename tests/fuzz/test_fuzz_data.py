"""Whatever data, prompts and answers hold, they are read or refused, and no more."""

import gzip
import json
from dataclasses import asdict
from typing import Any

import pytest
from fences import FUZZ, Fence, damaged, edited, fence, nasty_json
from hypothesis import given
from hypothesis import strategies as st
from test_conversations import jsonl

from drafttrain.data.conversations import Conversation, read, read_asked
from drafttrain.data.evaluation_prompts import prompts_sha256, read_prompts
from drafttrain.data.records import Message
from drafttrain.runtime.untrusted_input import typed
from drafttrain.target.answers.answers_file import read_answers
from drafttrain.target.answers.dialogue import AnsweredConversation, Dialogue, Failure
from drafttrain.target.answers.endpoint import Completion, Models, take

__all__ = ["fence"]

pytestmark = pytest.mark.slow

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
]
ANSWER = {"tokens": [1, 2], "num_tokens": 2, "finished": True}
RECORDS = [
    {"messages": TURNS, "id": 3, "answers": [ANSWER]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]},
    {"messages": {"role": ["user", "assistant"], "content": ["Hi", "Yes."]}},
    {"messages": TURNS, "index": 0, "tokens": [1, 2, 3], "num_prompt_tokens": 2, "finished": True},
    {"text": "Once."},
    {"turns": ["Hi", "Why?"], "prompt": "Hi"},
]
PROMPTS = [
    {"id": "a", "task": "math", "turns": ["2 + 2?"], "reference": "4", "licence": "MIT"},
    {"question_id": 1, "category": "writing", "turns": ["Write."], "reference": ["x"]},
    {"prompt_id": 2, "category": "chat", "prompt": ["Hi"]},
    {"task_id": 3, "text": "Add.", "test_list": ["assert add(1, 1) == 2"], "code": "..."},
    {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "pass"},
    {"question": "2 + 2?", "answer": "4"},
    {"messages": TURNS},
]
ROW = {
    "index": 0, "messages": TURNS[:1], "answers": [ANSWER], "cut": None, "source": "a:1",
    "digest": "0",
}  # fmt: skip
FAILURE = {
    "index": 0, "reason": "no", "detail": "", "final": True, "source": "a:1", "digest": "0"
}  # fmt: skip
CHOICE = {
    "message": {"role": "assistant", "content": "Yes.", "reasoning_content": None},
    "finish_reason": "stop",
    "token_ids": [1, 2],
}
COMPLETION = {"id": "1", "choices": [CHOICE], "usage": {"completion_tokens": 2}}
MODELS = {"object": "list", "data": [{"id": "parrot", "owned_by": "us"}]}


def lines(records: list[Any]) -> st.SearchStrategy[bytes]:
    """Draw a file of a few records, some of them edited, some of them damaged."""
    line = st.one_of(*(damaged(edited(record)) for record in records))
    return st.lists(line, max_size=4).map(b"\n".join)


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a name that says what a file holds, and what it holds."""
    kind = draw(st.sampled_from((".jsonl", ".jsonl", ".jsonl.gz", ".json", ".json.gz")))
    listed = st.one_of(damaged(edited(RECORDS)), lines(RECORDS))
    content = draw(lines(RECORDS) if "jsonl" in kind else listed)
    if kind.endswith(".gz"):
        content = draw(damaged(st.just(gzip.compress(content, mtime=0))))
    return f"a{kind}", content


@FUZZ
@given(file=files(), template=st.sampled_from(("chat", "none")))
def test_conversations(fence: Fence, file: tuple[str, bytes], template: str) -> None:
    place = fence.fresh() / file[0]
    place.write_bytes(file[1])
    fence.holds(lambda: read(jsonl(str(place), template=template)))


@FUZZ
@given(content=lines(RECORDS), turns=st.sampled_from(("all", "last")))
def test_prompts_to_answer(fence: Fence, content: bytes, turns: str) -> None:
    place = fence.fresh() / "a.jsonl"
    place.write_bytes(content)
    fence.holds(lambda: read_asked(jsonl(str(place)), turns))


@FUZZ
@given(content=lines(PROMPTS))
def test_evaluation_prompts(fence: Fence, content: bytes) -> None:
    place = fence.fresh() / "a.jsonl"
    place.write_bytes(content)
    fence.holds(lambda: prompts_sha256(read_prompts(place, None)[0]))


@FUZZ
@given(content=lines([ROW, FAILURE]), kind=st.sampled_from((AnsweredConversation, Failure)))
def test_answers(fence: Fence, content: bytes, kind: type[AnsweredConversation | Failure]) -> None:
    place = fence.fresh() / "a.jsonl"
    place.write_bytes(content)
    fence.holds(lambda: list(read_answers(place, kind)))


@FUZZ
@given(content=damaged(st.one_of(edited(COMPLETION), nasty_json().map(json.dumps).map(str.encode))))
def test_replies_of_an_endpoint(fence: Fence, content: bytes) -> None:
    dialogue = Dialogue(Conversation((Message("user", "Hi"),), 0, "a:1"))

    def read() -> None:
        take(dialogue, typed(Completion, content, "the reply"), "parrot")
        assert dialogue.outcome is not None
        line = json.dumps(asdict(dialogue.outcome))
        assert typed(type(dialogue.outcome), line, "it") == dialogue.outcome

    fence.holds(read)


@FUZZ
@given(content=damaged(edited(MODELS)))
def test_models_of_an_endpoint(fence: Fence, content: bytes) -> None:
    fence.holds(lambda: typed(Models, content, "its list of models"))
