"""Commands that hold conversations repeat no header that the chat template writes itself."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import BY_TEMPLATE
from test_chat import splitting_as_llama3
from test_written_answers import TEMPLATES

from drafttrain.commands.chat import ChatLoop, answers_to
from drafttrain.commands.setup.talk import Talk
from drafttrain.core.types import Decoded, DecodeStats
from drafttrain.data.chat import answer_turn, prompt_tokens
from drafttrain.data.conversations import Conversation
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.records import Message
from drafttrain.decode.rows import Passes, Row
from drafttrain.evaluation.measure import ALONE, _group
from drafttrain.evaluation.witness.section import asked_of
from drafttrain.target.answers.dialogue import ChatTokens, Dialogue
from drafttrain.target.answers.selfgen import Frame, Written, append

ASKED = [Message("user", "Hi"), Message("assistant", "It is"), Message("user", "Why")]


def target() -> Any:
    tokenizer = splitting_as_llama3()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<channel>", "<message>"]})
    tokenizer.chat_template = TEMPLATES["header"]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    spec = SimpleNamespace(eos_token_ids=(end,), vocab_size=1 << 20)
    return SimpleNamespace(tokenizer=tokenizer, spec=spec, device=torch.device("cpu"))


def written(tokenizer: Any) -> list[int]:
    return list(
        tokenizer("<channel>final<message>It is<|end|>", add_special_tokens=False)["input_ids"]
    )


@pytest.mark.usefixtures("stand_ins")
def test_regenerate() -> None:
    model = target()
    turns = (Message("user", "Hi"), Message("user", "Why"))
    dialogue = Dialogue(Conversation(turns, 0, "a.jsonl:1"))
    config: Any = None  # of the limits, which an answer does not need
    chat = ChatTokens(config, BY_TEMPLATE, model.tokenizer, model.spec, 0)
    chat.take(dialogue, written(model.tokenizer))
    assert dialogue.messages == ASKED


@pytest.mark.usefixtures("stand_ins")
def test_evaluate_and_its_witness() -> None:
    model, prompt = target(), Prompt("a", "", "", ("Hi", "Why"))
    asked: list[list[int]] = []

    def decode(prompts: list[list[int]], rows: list[int]) -> Passes:
        asked.extend(prompts)
        yield [Row(0, len(prompts[0]))]
        return [Decoded(tuple(written(model.tokenizer)), DecodeStats())]

    results = _group(model, {ALONE: decode}, [ALONE], [(0, prompt)], BY_TEMPLATE, 0)
    assert asked[1] == prompt_tokens(ASKED, model.tokenizer, BY_TEMPLATE)
    (_, second) = asked_of([prompt], results, model, BY_TEMPLATE)
    assert list(second.tokens) == asked[1]


@pytest.mark.usefixtures("stand_ins")
def test_selfgen(tmp_path: Any) -> None:
    model = target()
    head, mid = (model.tokenizer(text)["input_ids"] for text in ("<a>", "<b>"))
    asked = [*head, *model.tokenizer("Hi")["input_ids"], *mid]
    one = Written(0, [*asked, *written(model.tokenizer)], len(asked), True)
    frame = Frame(head, mid, [], [], [], [])
    append(tmp_path, [one], frame, model.tokenizer, BY_TEMPLATE)
    assert '{"role": "assistant", "content": "It is"}' in next(tmp_path.iterdir()).read_text()


@pytest.mark.usefixtures("stand_ins")
def test_chat_and_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    how: Any = None
    talk = Talk(model, None, how, BY_TEMPLATE, 0, cut=True)
    asked: list[list[int]] = []

    def stream(self: Talk, messages: list[Message], row: int = 0) -> Any:
        asked.append(self.tokens(messages))
        turn_of = partial(
            answer_turn, list(messages), tokenizer=model.tokenizer, template=BY_TEMPLATE
        )
        return SimpleNamespace(tokens=written(model.tokenizer), turn_of=turn_of)

    monkeypatch.setattr(Talk, "stream", stream)
    monkeypatch.setattr("drafttrain.commands.chat.show", lambda *_: None)
    settings: Any = SimpleNamespace(system=None, marks=False, file=None)
    for _ in answers_to(talk, Prompt("a", "", "", ("Hi", "Why")), 0, settings):
        pass
    loop = ChatLoop(talk, settings)
    loop._answer("Hi")
    loop._answer("Why")
    expected = prompt_tokens(ASKED, model.tokenizer, BY_TEMPLATE)
    assert asked[1] == asked[3] == expected
