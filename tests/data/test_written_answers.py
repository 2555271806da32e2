"""What is trained is what the target writes after its generation prompt, whatever the template.

The templates have the structures of those that models are published with; test_real_templates.py
tries the rule on these themselves.
"""

from dataclasses import replace
from typing import Any

import pytest
from builders import BY_TEMPLATE, WITHOUT_TEMPLATE
from test_chat import chat, config, encode_one, marked, qwen3, splitting_as_llama3, tiny

from drafttrain.data.chat import answer_turn, encode
from drafttrain.data.conversations import Conversation
from drafttrain.data.records import Message, Recorded, messages_of
from drafttrain.data.skips import NothingUsable
from drafttrain.data.template import ChatFormat, render

Q, A, THOUGHT = "Hi there", "It is", "<think>\nHm.\n</think>\n\nIt is"
HEAD = "{% for m in messages %}{% if m.role == 'assistant' %}"
REST = "{% else %}{{ '<' + m.role + '>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"


def template(answer: str, prompt: str) -> str:
    """A template that writes answers and its generation prompt like this, as Jinja expressions."""
    opening = "{% if add_generation_prompt %}{{ " + prompt + " }}{% endif %}"
    return HEAD + "{{ " + answer + " }}" + REST + opening


LAST = "('<think>\\n\\n</think>\\n\\n' if loop.last and '</think>' not in m.content else '')"
SPLIT = "(m.content.split('</think>')[-1])"
TEMPLATES = {
    "plain": template("'<a>' + m.content + '<|end|>'", "'<a>'"),
    # as gpt-oss, whose last answer ends otherwise than earlier ones
    "header": template(
        "'<a><channel>final<message>' + m.content + ('<|end|>' if loop.last else '<|user|>')",
        "'<a>'",
    ),
    "word header": template("'<a>>>>all\\n' + m.content + '<|end|>'", "'<a>>>>'"),
    # as GLM-4.6 and Qwen3: an empty thought of the template's
    "empty thought": template("'<a>\\n<think></think>\\n' + m.content + '<|end|>'", "'<a>'"),
    "last empty thought": template("'<a>' + " + LAST + " + m.content + '<|end|>'", "'<a>'"),
    # as Qwen3.5: the prompt opens the thought that the rendering closes
    "opened and closed": template(
        "'<a>' + " + LAST + " + m.content + '<|end|>'", "'<a><think>\\n'"
    ),
    # as R1 and MiniMax M2; GLM-4.7 with an option
    "open thought": template("'<a>' + m.content + '<|end|>'", "'<a><think>\\n'"),
    "option": template(
        "'<a></think>' + m.content + '<|end|>'",
        "'<a></think>' if enable_thinking is false else '<a><think>'",
    ),
    "prose": template("'<a>' + m.content + '<|end|>'", "'<a>Here are my steps:\\n'"),
    # as QwQ, DeepSeek V3.2 and Gemma 4
    "closed thought": template("'<a>' + m.content + '<|end|>'", "'<a><think>\\n</think>'"),
    "other closed thought": template("'<a>' + m.content + '<|end|>'", "'<a><|ch>t\\n<ch|>'"),
    "closed, then a header": template(
        "'<a><|START_RESPONSE|>' + m.content + '<|end|>'",
        "'<a><|START_THINKING|><|END_THINKING|>'",
    ),
    "drops thoughts": template("'<a>' + " + SPLIT + " + '<|end|>'", "'<a>'"),
    "strips": template("'<a>' + m.content | trim + '<|end|>'", "'<a>'"),
    "two ends": template(
        "'<a>' + m.content + '<|end|>' + ('<|begin|>' if loop.last else '')", "'<a>'"
    ),
    "no system": "{{ raise_exception('no system') if messages[0].role == 'system' else '' }}"
    + template("'<a>' + m.content + '<|end|>'", "'<a>'"),
    "many marks": template("'<a>' + m.content + '<|user|>response<|system|><|end|>'", "'<a>'"),
}
OPEN = "the answer would stand inside a thought that the prompt opens; "
FIRST = "the recorded thought would follow text that the chat template writes first; "
ITSELF = "answers by the target itself would help (python -m drafttrain regenerate)"
UNKNOWN = "the chat template does not show where the answer begins; "
DROPPED = "the chat template shortens or rewrites the last answer; "
OPTION = "data.template_kwargs={enable_thinking: false} would help"


def made(name: str) -> Any:
    tokenizer = splitting_as_llama3()
    tokenizer.add_tokens(["<think>", "</think>", "<a>", "<user>", "<system>"])
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def outcome(conversation: Conversation, name: str, **changes: Any) -> str:
    """The text from the last question, trained parts marked; or why the record is skipped."""
    tokenizer = made(name)
    try:
        (sample,), _ = encode([conversation], tokenizer, config(**changes))
    except NothingUsable as error:
        return str(error).split("1 x ")[1].split(": a.jsonl:4")[0]
    return marked(sample, tokenizer).partition(f"<user>{Q}<|end|>")[2]


@pytest.mark.parametrize(
    ("name", "plain", "two", "thought"),
    [
        ("plain", "<a>«It is<|end|>»", "<a>«It is<|end|>»", f"<a>«{THOUGHT}<|end|>»"),
        (
            "header",
            "<a>«<channel>final<message>It is<|end|>»",
            "<a>«<channel>final<message>It is»<|user|>",
            FIRST + ITSELF,
        ),
        (
            "word header",
            "<a>>>>«all\nIt is<|end|>»",
            "<a>>>>«all\nIt is<|end|>»",
            FIRST + ITSELF,
        ),
        (
            "empty thought",
            "<a>\n<think></think>\n«It is<|end|>»",
            "<a>\n<think></think>\n«It is<|end|>»",
            FIRST + ITSELF,
        ),
        (
            "last empty thought",
            "<a><think>\n\n</think>\n\n«It is<|end|>»",
            "<a>It is<|end|>",
            f"<a>«{THOUGHT}<|end|>»",
        ),
        (
            "opened and closed",
            "<a><think>\n\n</think>\n\n«It is<|end|>»",
            "<a>It is<|end|>",
            "<a><think>\n«Hm.\n</think>\n\nIt is<|end|>»",
        ),
        (
            "open thought",
            OPEN + ITSELF,
            OPEN + ITSELF,
            "<a><think>\n«Hm.\n</think>\n\nIt is<|end|>»",
        ),
        ("option", OPEN + OPTION, OPEN + OPTION, "<a><think>«\nHm.\n</think>\n\nIt is<|end|>»"),
        ("prose", UNKNOWN + ITSELF, UNKNOWN + ITSELF, FIRST + ITSELF),
        (
            "closed thought",
            "<a><think>\n</think>«It is<|end|>»",
            "<a>It is<|end|>",
            FIRST + ITSELF,
        ),
        (
            "other closed thought",
            "<a><|ch>t\n<ch|>«It is<|end|>»",
            "<a>It is<|end|>",
            FIRST + ITSELF,
        ),
        (
            "closed, then a header",
            "<a><|START_THINKING|><|END_THINKING|>«<|START_RESPONSE|>It is<|end|>»",
            "<a><|START_RESPONSE|>It is<|end|>",
            FIRST + ITSELF,
        ),
        ("drops thoughts", "<a>«It is<|end|>»", "<a>«It is<|end|>»", DROPPED + ITSELF),
        ("strips", "<a>«It is<|end|>»", "<a>«It is<|end|>»", f"<a>«{THOUGHT}<|end|>»"),
        (
            "two ends",  # the model stops at the first
            "<a>«It is<|end|>»<|begin|>",
            "<a>«It is<|end|>»",
            f"<a>«{THOUGHT}<|end|>»<|begin|>",
        ),
        (
            "many marks",  # the model stops at its end token
            "<a>«It is<|user|>response<|system|><|end|>»",
            "<a>«It is<|user|>response<|system|><|end|>»",
            f"<a>«{THOUGHT}<|user|>response<|system|><|end|>»",
        ),
    ],
)
def test_what_follows_the_generation_prompt_is_trained(
    name: str, plain: str, two: str, thought: str
) -> None:
    assert outcome(chat(Q, A), name) == plain
    earlier = outcome(chat(Q, A, "Why so", "That"), name)
    assert earlier.partition("<user>")[0] == two
    if "<a>" in plain:
        assert earlier.endswith("That".join(plain[plain.index("<a>") :].split(A)))
    assert outcome(chat(Q, THOUGHT), name) == thought


def test_the_named_option_trains_the_record() -> None:
    quiet = {"enable_thinking": False}
    assert outcome(chat(Q, A), "option", template_kwargs=quiet) == "<a></think>«It is<|end|>»"


def test_a_system_turn_stays_context_and_its_refusal_is_counted() -> None:
    assert outcome(chat(Q, A, system="Be brief"), "header").startswith("<a>«<channel>final")
    refused = outcome(chat(Q, A, system="Be brief"), "no system")
    assert refused == "the chat template refuses it"
    assert outcome(chat(Q, A), "no system") == "<a>«It is<|end|>»"


def test_a_thought_goes_on_where_the_prompt_opened_it() -> None:
    continued = "Hm.\n</think>\n\nIt is"
    assert outcome(chat(Q, continued), "open thought") == f"<a><think>\n«{continued}<|end|>»"
    prose = "Here are my steps:\nHm. It is"  # written once
    assert outcome(chat(Q, prose), "prose") == "<a>Here are my steps:\n«Hm. It is<|end|>»"


def test_space_around_the_marks_of_a_thought_is_the_templates() -> None:
    tokenizer = qwen3()
    text = encode_one(chat(Q, "<think>Hm.</think>It is"), tokenizer)
    assert text.endswith("assistant\n«<think>\nHm.\n</think>\n\nIt is<|im_end|>»\n")


def test_a_prompts_own_tokens_are_never_changed_by_its_answer() -> None:
    tokenizer = splitting_as_llama3()  # newlines are one token
    for answer, end in (("\n\nnew", "<|end|>"), (" new", "<|end|>"), ("\nnew\n", "\n")):
        tokenizer.chat_template = tiny().chat_template
        if end == "\n":  # the end of the turn is text, too
            tokenizer.chat_template = tokenizer.chat_template.replace("'<|end|>'", "''")
        (sample,), _ = encode([chat("Hi", answer)], tokenizer, config())
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True
        )["input_ids"]
        assert sample.tokens[: len(prompt)].tolist() == prompt
        assert not sample.loss_mask[: len(prompt)].any()
        assert sample.loss_mask[len(prompt)]
        assert f"«{answer.rstrip()}" in marked(sample, tokenizer)
    # Later turns have other tokens there: the answer is context.
    tokenizer.chat_template = tiny().chat_template
    (sample,), report = encode([chat("Hi", "\n\nnew", "And", "old")], tokenizer, config())
    assert "«\n\nnew" not in marked(sample, tokenizer)
    assert list(report.notes.values()) == [1]


def test_a_turn_of_weight_0_is_context() -> None:
    def of(*weights: Any) -> Conversation:
        turns = [{"role": "user", "content": Q}, {"role": "assistant", "content": A}] * 2
        rows = [dict(turn) for turn in turns]
        for row, weight in zip(rows[1::2], weights, strict=True):
            row["weight"] = weight
        return Conversation(messages_of({"messages": rows}), 3, "a.jsonl:4")

    tokenizer = made("plain")
    turn, trained = f"<user>{Q}<|end|><a>It is<|end|>", f"<user>{Q}<|end|><a>«It is<|end|>»"
    assert encode_one(of(1, 1), tokenizer) == trained * 2
    assert encode_one(of(0, 1), tokenizer) == turn + trained
    assert encode_one(of(1, 0), tokenizer) == trained  # nothing follows that it is context of
    assert encode_one(of(None, 1.0), tokenizer) == trained * 2
    with pytest.raises(NothingUsable, match="no answer to train on: each has weight 0"):
        encode([of(0, 0)], tokenizer, config())
    with pytest.raises(ValueError, match="a weight that is neither 0 nor 1"):
        of(0.5, 1)
    ids = tuple(tokenizer("It is<|end|>", add_special_tokens=False)["input_ids"])
    answers = (Recorded(ids, True), Recorded(ids, True))
    assert encode_one(replace(of(1, 0), recorded=answers), tokenizer) == trained
    untrained = {"role": "assistant", "content": A, "train": False}  # as axolotl marks it
    messages = messages_of({"messages": [{"role": "user", "content": Q}, untrained]})
    assert messages == (Message("user", Q), Message("assistant", A, False))


# A template, what a model writes after its prompt, and the content of that turn in later prompts.
WRITTEN = [
    ("plain", "It is<|end|>", "It is"),
    ("plain", THOUGHT, THOUGHT),  # the template repeats it
    ("header", "<channel>final<message>It is<|end|>", "It is"),
    ("header", "<channel>x<message>Hm.<|user|><a><channel>final<message>It is<|end|>", "It is"),
    ("header", "<channel>final<message>", ""),  # it was cut
    ("header", "It is", "It is"),
    ("word header", "all\nIt is<|end|>", "It is"),
    ("word header", "Not all\nof it", "Not all\nof it"),
    ("empty thought", "\n<think></think>\nIt is<|end|>", "It is"),
    ("empty thought", f"\n{THOUGHT}", "It is"),  # the template would write an empty one before it
    ("open thought", "Hm.\n</think>\n\nIt is <b>so</b><|end|>", "It is <b>so</b>"),
    ("open thought", "Hm. It is", "Hm. It is"),  # cut within its thought
    ("opened and closed", "Hm.\n</think>\n\nIt is<|end|>", "It is"),
    ("drops thoughts", f"{THOUGHT}<|end|>", THOUGHT),  # the template drops it from later prompts
    ("many marks", "It is<|user|>response<|system|><|end|>", "It is"),
    ("many marks", "It is<|user|>response<|system|>", "It is"),  # without the token that ends it
    ("special thought", "[THINK]Hm.[/THINK]It is<|end|>", "It is"),
    ("no later turns", "all\nIt is<|end|>", "all\nIt is"),
]
TEMPLATES["special thought"] = TEMPLATES["plain"]
TEMPLATES["no later turns"] = (
    "{{ raise_exception('one question') if messages | length > 1 else '' }}" + TEMPLATES["header"]
)


@pytest.mark.parametrize(("name", "text", "content"), WRITTEN)
def test_a_generated_answer_stands_in_later_prompts_as_the_template_writes_it(
    name: str, text: str, content: str
) -> None:
    tokenizer, asked = made(name), Message("user", Q)
    special = ["<channel>", "<message>", *(["[THINK]", "[/THINK]"] if "special" in name else [])]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    turn = answer_turn([asked], ids, tokenizer, BY_TEMPLATE)
    assert turn == Message("assistant", content)
    if name == "no later turns":
        return
    later = render([asked, turn, Message("user", "Why")], tokenizer, BY_TEMPLATE, for_answer=True)
    assert later.count("<channel>final<message>") == (name == "header")
    assert later.count("all\n") == (name == "word header") + content.count("all\n")
    assert later.count("</think>") <= 2 - ("open" not in name)  # the next prompt may close one


def test_a_generated_answer_without_a_template_is_its_text() -> None:
    tokenizer = tiny()
    ids = tokenizer("It is<|end|>", add_special_tokens=False)["input_ids"]
    assert answer_turn([], ids, tokenizer, WITHOUT_TEMPLATE).content == "It is"


CODE = "    def f():\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", f"<a>«{CODE}<|end|>»"),
        ("header", f"<a>«<channel>final<message>{CODE}<|end|>»"),
        ("word header", f"<a>>>>«all\n{CODE}<|end|>»"),
        ("empty thought", f"<a>\n<think></think>\n«{CODE}<|end|>»"),
        ("last empty thought", f"<a><think>\n\n</think>\n\n«{CODE}<|end|>»"),
        ("opened and closed", f"<a><think>\n\n</think>\n\n«{CODE}<|end|>»"),
        ("closed thought", f"<a><think>\n</think>«{CODE}<|end|>»"),
        (
            "closed, then a header",
            f"<a><|START_THINKING|><|END_THINKING|>«<|START_RESPONSE|>{CODE}<|end|>»",
        ),
        ("drops thoughts", f"<a>«{CODE}<|end|>»"),
        ("strips", f"<a>«{CODE.strip()}<|end|>»"),
    ],
)
def test_the_indent_of_an_answer_is_trained_where_the_template_keeps_it(
    name: str, expected: str
) -> None:
    asked = Message("user", Q)
    conversation = Conversation((asked, Message("assistant", CODE)), 0, "a.jsonl:4")
    assert outcome(conversation, name) == expected


@pytest.mark.parametrize("question", ["a", "s", "<", "t>", "It"])
def test_a_short_question_is_not_taken_for_a_part_of_a_header(question: str) -> None:
    """QwQ and R1-Distill-Qwen drop the thoughts of earlier turns and close one in the prompt."""
    tokenizer = splitting_as_llama3()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>' + m.role + '<b>' + m.content + '<e>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant<b><think>\\n</think>' }}{% endif %}"
    )
    form = ChatFormat(tokenizer, BY_TEMPLATE)
    turns = [Message("user", question), Message("assistant", question)]
    located = form.locate([*turns, *turns])
    asked = form.render([*turns, turns[0]], for_answer=True)
    assert located.text.startswith(asked)
    assert located.text[located.spans[-1].start :].startswith(question)
    assert form.locate(turns).text.startswith(form.render(turns[:1], for_answer=True))
