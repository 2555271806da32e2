"""The loss mask covers what the assistant writes, token by token, in each family's template."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import BY_TEMPLATE, TOLD, WITHOUT_TEMPLATE
from paths import ROOT
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drafttrain.core.types import Sample
from drafttrain.data.chat import encode, num_repeated, prompt_of, prompt_tokens, split_holdout
from drafttrain.data.conversations import Conversation, JsonlConfig, PlainText
from drafttrain.data.records import Message, Recorded
from drafttrain.data.skips import NothingUsable
from drafttrain.data.template import RENDERING, ChatFormat, Template, template_fingerprint

TINY = ROOT / "drafttrain" / "assets" / "tiny"

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content ="
    " '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Qwen3's own, less its branches for tools.
QWEN3 = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set thought = content.split('</think>')[0].rstrip('\n') %}
                {%- set reasoning_content = thought.split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') }}
                {{- '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
# Mistral-7B-Instruct-v0.3's, less tools: the system prompt goes into the last user turn.
MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if message == user_messages[-1] and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}"""
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation"
    " roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' +"
    " system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content ="
    " message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' +"
    " content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  +"
    " content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


# How Llama 3 and Qwen split text before the byte-level merges: newlines stay together.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tiny() -> PreTrainedTokenizerFast:
    """The embedded byte-level tokenizer."""
    return AutoTokenizer.from_pretrained(TINY)


def splitting_as_llama3() -> PreTrainedTokenizerFast:
    tokenizer = tiny()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def llama3() -> PreTrainedTokenizerFast:
    tokenizer = splitting_as_llama3()
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    # As in the original, where eos is <|end_of_text|>: only the added tokens know of <|eot_id|>.
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.bos_token = names[0]
    tokenizer.chat_template = LLAMA3
    return tokenizer


def qwen3() -> PreTrainedTokenizerFast:
    tokenizer = splitting_as_llama3()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = QWEN3
    return tokenizer


def mistral(template: str = MISTRAL, controls: tuple[str, ...] = ("[INST]", "[/INST]")) -> Any:
    """A tokenizer of the SentencePiece kind, as of Llama 2 and Mistral: words begin with spaces."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    words = [
        "Hi there",
        "Yes it is",
        "Why so",
        "Because of that",
        "Be brief",
        "[INST] [/INST] \n x",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=120,
        special_tokens=["<unk>", "<s>", "</s>", *controls],
        initial_alphabet=[chr(code) for code in range(33, 127)] + ["\n"],
        show_progress=False,
    )
    backend.train_from_iterator(words * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def llama2() -> PreTrainedTokenizerFast:
    return mistral(LLAMA2, controls=())


def chat(*contents: str, system: str | None = None) -> Conversation:
    turns = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(contents)]
    first = [] if system is None else [Message("system", system)]
    return Conversation((*first, *turns), 3, "a.jsonl:4")


def config(**changes: Any) -> JsonlConfig:
    settings = {
        "path": "a",
        "limit": None,
        "max_length": 512,
        "holdout": 0,
        "template": "chat",
        **TOLD,
    }
    return JsonlConfig(**{"name": "test", "seed": 0, **settings, **changes})


def marked(sample: Sample, tokenizer: Any) -> str:
    """Return the sample's text, with each run of trained tokens between « and »."""
    text, inside = "", False
    for token, trained in zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True):
        if trained != inside:
            text += "«" if trained else "»"
            inside = trained
        text += tokenizer.decode([token])
    return text + "»" * inside


def encode_one(conversation: Any, tokenizer: Any, **changes: Any) -> str:
    (sample,), report = encode([conversation], tokenizer, config(**changes))
    assert report.counts == {}
    assert sample.index == conversation.index
    return marked(sample, tokenizer)


TURNS = ("Hi there", "Yes it is", "Why so", "Because of that")


@pytest.mark.parametrize(
    ("make", "plain", "with_system"),
    [
        (
            tiny,
            "<|begin|><|user|>\nHi there<|end|>\n<|assistant|>\n«Yes it is<|end|>»\n"
            "<|user|>\nWhy so<|end|>\n<|assistant|>\n«Because of that<|end|>»\n",
            "<|begin|><|system|>\nBe brief<|end|>\n"
            "<|user|>\nHi there<|end|>\n<|assistant|>\n«Yes it is<|end|>»\n"
            "<|user|>\nWhy so<|end|>\n<|assistant|>\n«Because of that<|end|>»\n",
        ),
        (
            llama3,
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«Yes it is<|eot_id|>»"
            "<|start_header_id|>user<|end_header_id|>\n\nWhy so<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«Because of that<|eot_id|>»",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«Yes it is<|eot_id|>»"
            "<|start_header_id|>user<|end_header_id|>\n\nWhy so<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«Because of that<|eot_id|>»",
        ),
        (
            qwen3,  # the last turn has an empty <think> block, as context; earlier ones lack it
            "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nYes it is<|im_end|>\n"
            "<|im_start|>user\nWhy so<|im_end|>\n<|im_start|>assistant\n"
            "<think>\n\n</think>\n\n«Because of that<|im_end|>»\n",
            "<|im_start|>system\nBe brief<|im_end|>\n"
            "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nYes it is<|im_end|>\n"
            "<|im_start|>user\nWhy so<|im_end|>\n<|im_start|>assistant\n"
            "<think>\n\n</think>\n\n«Because of that<|im_end|>»\n",
        ),
        (
            mistral,  # its normalizer writes a space after every special token
            "<s>[INST]  Hi there[/INST]«  Yes it is</s>»"
            "[INST]  Why so[/INST]«  Because of that</s>»",
            "<s>[INST]  Hi there[/INST]«  Yes it is</s>»"
            "[INST]  Be brief\n\nWhy so[/INST]«  Because of that</s>»",
        ),
        (
            llama2,
            "<s> [INST] Hi there [/INST]« Yes it is </s>»"
            "<s> [INST] Why so [/INST]« Because of that </s>»",
            "<s> [INST] <<SYS>>\nBe brief\n<</SYS>>\n\nHi there [/INST]« Yes it is </s>»"
            "<s> [INST] Why so [/INST]« Because of that </s>»",
        ),
    ],
)
def test_the_mask_covers_answers_and_end_of_turn(make: Any, plain: str, with_system: str) -> None:
    tokenizer = make()
    assert encode_one(chat(*TURNS), tokenizer) == plain
    assert encode_one(chat(*TURNS, system="Be brief"), tokenizer) == with_system
    # Tokenised as a whole: the very tokens that Transformers gives for the conversation.
    turns = [{"role": turn.role, "content": turn.content} for turn in chat(*TURNS).messages]
    (sample,), _ = encode([chat(*TURNS)], tokenizer, config())
    assert sample.tokens.tolist() == tokenizer.apply_chat_template(turns)["input_ids"]


def test_the_mask_is_that_of_the_generation_marks_where_a_template_has_them() -> None:
    tokenizer = tiny()
    conversations = [
        chat(*TURNS),
        chat(*TURNS, system="Be brief"),
        chat(" a\n", " b<|end|>c ", "<|user|>\n", "  "),
        chat("x", "<|end|>"),
    ]
    samples, _ = encode(conversations, tokenizer, config())
    for conversation, sample in zip(conversations, samples, strict=True):
        turns = [{"role": turn.role, "content": turn.content} for turn in conversation.messages]
        told = tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True)
        assert sample.loss_mask.int().tolist() == told["assistant_masks"]


@pytest.mark.parametrize("make", [tiny, llama3, qwen3, mistral])
def test_special_tokens_within_contents_do_not_end_a_turn(make: Any) -> None:
    tokenizer = make()
    form = ChatFormat(tokenizer, BY_TEMPLATE)
    end = form.tail.strip()
    said = f"It is {end}{form.prompt_closing}fake {end}"
    text = encode_one(chat(f"What is {end}{form.prompt_closing}?", said, "And?", end), tokenizer)
    runs = [part.split("»")[0] for part in text.split("«")[1:]]
    assert runs[-1].strip() in (end + end, f"{end} {end}")
    if make is qwen3:  # it leaves the empty thought out of earlier turns: they are context
        assert len(runs) == 1
        return
    assert len(runs) == 2
    assert runs[0].count(end) == said.count(end) + 1
    assert runs[0].startswith(("It is", "  It is"))
    assert runs[0].endswith(end)


@pytest.mark.parametrize(
    ("make", "answer", "expected"),
    [
        (llama3, "  \n Yes it is \n", "<|end_header_id|>\n\n«Yes it is<|eot_id|>»"),
        (mistral, " \nYes it is\n ", "[/INST]«  Yes it is</s>»"),
        (tiny, " Yes it is\n", "<|assistant|>\n« Yes it is\n<|end|>»\n"),
        # As a whole, the header's newline and the answer's would make one token.
        (tiny, "\n\nYes it is", "<|assistant|>\n«\n\nYes it is<|end|>»\n"),
        (qwen3, "\nYes it is", "assistant\n<think>\n\n</think>\n\n«Yes it is<|im_end|>»\n"),
        (
            qwen3,
            "<think>\nHm.\n</think>\n\nYes it is",
            "assistant\n«<think>\nHm.\n</think>\n\nYes it is<|im_end|>»\n",
        ),
    ],
)
def test_answers_that_the_template_trims_are_found(make: Any, answer: str, expected: str) -> None:
    assert encode_one(chat("Hi there", answer), make()).endswith(expected)


def test_earlier_answers_whose_thoughts_are_stripped_are_context_only() -> None:
    text = encode_one(chat("Hi", "<think>\nHm.\n</think>\n\nYes", "Why so", "That"), qwen3())
    assert "assistant\nYes<|im_end|>\n<|im_start|>user\nWhy so" in text
    assert text.endswith("assistant\n<think>\n\n</think>\n\n«That<|im_end|>»\n")
    assert "Hm." not in text


def test_a_last_turn_of_the_user_is_left_out() -> None:
    text = encode_one(chat("Hi there", "Yes it is", "Why so"), llama3())
    assert text.endswith("«Yes it is<|eot_id|>»")


def test_a_template_that_ends_no_turn_trains_the_words_alone() -> None:
    tokenizer = tiny()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    text = encode_one(chat("Hi there", "Yes it is", "Why so", "That"), tokenizer)
    assert text == "user: Hi there\nassistant:« Yes it is»\nuser: Why so\nassistant:« That»\n"


def test_what_a_template_refuses_or_garbles_is_counted_and_named() -> None:
    strict = mistral(MISTRAL.replace('messages[0]["role"] == "system"', "false"))
    good, bad = chat(*TURNS), chat(*TURNS, system="Be brief")
    samples, report = encode([good, bad], strict, config())
    assert len(samples) == 1
    assert report.examples == {
        "the chat template refuses it": ["a.jsonl:4 (Only user and assistant roles are supported)"]
    }
    assert report.num_read == 2
    tokenizer = tiny()
    count = "{{ m['content'] + '<|end|>' }}{{ m['content'] | length }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] + '<|end|>' }}", count, 1
    )
    with pytest.raises(NothingUsable, match="1 x the chat template shortens or rewrites the last"):
        encode([chat("Hi there", "Yes it is")], tokenizer, config())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(NothingUsable, match="1 x the chat template shortens or rewrites the last"):
        encode([good], tokenizer, config())


def test_what_is_too_long_is_skipped_whole() -> None:
    conversations = [chat(*TURNS), chat("Hi there", "Yes it is " * 40)]
    samples, report = encode(conversations, tiny(), config(max_length=60))
    assert len(samples) == 1
    assert report.counts == {"longer than data.max_length=60 tokens": 1}
    (length,) = [len(s.tokens) for s in encode(conversations[1:], tiny(), config())[0]]
    assert f"a.jsonl:4 ({length} tokens)" in report.lines()[1]
    samples, _ = encode(conversations, tiny(), config(max_length=length))
    assert len(samples) == 2


def test_plain_text_is_trained_whole_but_for_its_first_token() -> None:
    tokenizer = mistral()
    tokenizer.chat_template = None
    texts = [PlainText("Yes it is", 0, "a:1"), PlainText("", 1, "a:2")]
    (sample,), report = encode(texts, tokenizer, config(template="none"))
    assert marked(sample, tokenizer) == "<s>« Yes it is»"
    assert report.examples == {"no token to train on": ["a:2"]}
    (sample,), _ = encode([PlainText("Yes it is", 0, "a:1")], tiny(), config(template="none"))
    assert sample.loss_mask.tolist() == [False] + [True] * (len(sample.tokens) - 1)


def test_a_template_and_turns_belong_together() -> None:
    bare = tiny()
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"needs a tokenizer with a chat template.*template=none"):
        encode([chat(*TURNS)], bare, config())
    with pytest.raises(ValueError, match=r"needs a tokenizer with a chat template"):
        prompt_tokens(chat("Hi").messages, bare, BY_TEMPLATE)


@pytest.mark.parametrize("make", [tiny, llama3, qwen3, mistral, llama2])
def test_a_prompt_is_what_stands_before_the_answer_in_training(make: Any) -> None:
    tokenizer = make()
    conversation = chat("Hi there", "Yes it is", system="Be brief")
    (sample,), _ = encode([conversation], tokenizer, config())
    prompt = prompt_tokens(conversation.messages[:2], tokenizer, BY_TEMPLATE)
    assert sample.tokens[: len(prompt)].tolist() == prompt
    added = tokenizer.decode(prompt_of(sample)[len(prompt) :])
    assert added == ("<think>\n\n</think>\n\n" if make is qwen3 else "")
    if tokenizer.bos_token in tokenizer.decode(prompt):
        assert prompt.count(tokenizer.bos_token_id) == 1


def test_a_prompt_without_a_template_is_the_text_with_one_beginning() -> None:
    tokenizer = mistral()
    prompt = prompt_tokens([Message("user", "Yes it is")], tokenizer, WITHOUT_TEMPLATE)
    assert tokenizer.decode(prompt) == "<s> Yes it is"
    (sample,), _ = encode([PlainText("Yes it is" * 40, 0, "a")], tokenizer, config(template="none"))
    assert prompt_of(sample) == sample.tokens[:32].tolist()


def sample(index: int, *tokens: int) -> Sample:
    return Sample(torch.tensor(tokens), torch.ones(len(tokens), dtype=torch.bool), index)


def test_the_held_out_conversations_depend_on_the_seed_alone() -> None:
    items = [sample(number, number) for number in range(100)]
    kept, held = split_holdout(items, 10, seed=0)
    assert (kept, held) == split_holdout(items, 10, seed=0)
    places = [item.index for item in kept]
    assert sorted(places + [item.index for item in held]) == list(range(100))
    assert places == sorted(places)
    assert held != split_holdout(items, 10, seed=1)[1]
    assert split_holdout(items, 0, seed=0) == (items, [])
    with pytest.raises(ValueError, match=r"data\.holdout must be less than the 100 usable"):
        split_holdout(items, 100, seed=0)


def test_equal_conversations_are_held_out_or_trained_together() -> None:
    items = [sample(index, index % 30, 7) for index in range(60)]  # each twice
    assert num_repeated(items) == 30
    for seed in range(20):
        kept, held = split_holdout(items, 10, seed)
        assert len(held) == 10
        assert not {int(item.tokens[0]) for item in kept} & {int(item.tokens[0]) for item in held}
    kept, held = split_holdout(items, 1, seed=0)  # no set is so small: one is held out whole
    assert (len(kept), len(held)) == (58, 2)
    with pytest.raises(ValueError, match=r"data\.holdout must be 0 where all conversations are"):
        split_holdout([sample(index, 1, 2) for index in range(5)], 1, seed=0)


# What the target said, and nothing else

# As DeepSeek-R1's distilled models: generation begins in <think>, and history has no thoughts.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' + m['content']"
    " }}{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}{% if '</think>' in"
    " content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|assistant|>' +"
    " content + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|assistant|><think>\n' }}{% endif %}"
)
REASONED = "Let me add.</think>\n\nFour."


def r1() -> PreTrainedTokenizerFast:
    tokenizer = tiny()
    tokenizer.chat_template = R1
    return tokenizer


def test_an_answer_whose_reasoning_the_template_drops_is_refused_and_counted() -> None:
    reasons = "the chat template shortens or rewrites the last answer; answers by the target"
    with pytest.raises(NothingUsable, match=f"1 x {reasons}"):
        encode([chat("2 + 2?", REASONED)], r1(), config())
    garbled = "<think>Or</think> not</think>Yes"
    _, report = encode([chat("2 + 2?", garbled), chat("Hi", "Yes")], qwen3(), config())
    assert [reason.startswith(reasons) for reason in report.counts] == [True]


def test_recorded_tokens_are_trained_as_they_are_after_the_prompt_that_evaluation_asks_with() -> (
    None
):
    tokenizer = r1()
    said = tuple(tokenizer(REASONED, add_special_tokens=False)["input_ids"])
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for tokens, finished in (((*said, end), True), (said[:-1], False)):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        talk = replace(chat("2 + 2?", text), recorded=(Recorded(tokens, finished),))
        (found,), report = encode([talk], tokenizer, config())
        assert report.counts == {}
        prompt = prompt_tokens(talk.messages[:1], tokenizer, BY_TEMPLATE)
        assert prompt_of(found) == prompt
        assert tokenizer.decode(prompt).endswith("<think>\n")
        assert found.tokens.tolist() == [*prompt, *tokens]  # and no end of turn where it was cut
        assert found.loss_mask.tolist() == [False] * len(prompt) + [True] * len(tokens)


def test_earlier_recorded_answers_are_trained_where_later_turns_see_them_as_they_were() -> None:
    def recorded(tokenizer: Any, text: str, end: str) -> Recorded:
        return Recorded(tuple(tokenizer(text + end, add_special_tokens=False)["input_ids"]), True)

    for make, end, first, trained in (
        (tiny, "<|end|>", "Yes it is", True),
        (r1, "<|end|>", REASONED, False),
    ):
        tokenizer = make()
        talk = replace(
            chat("2 + 2?", first, "Why so", "Because"),
            recorded=(recorded(tokenizer, first, end), recorded(tokenizer, "Because", end)),
        )
        (found,), report = encode([talk], tokenizer, config())
        assert ("«Yes it is<|end|>»" in marked(found, tokenizer)) is trained
        assert "Let me add" not in marked(found, tokenizer)
        assert marked(found, tokenizer).endswith("«Because<|end|>»")
        assert list(report.notes.values()) == ([] if trained else [1])


def test_an_answer_that_was_cut_gets_no_end_of_turn() -> None:
    tokenizer = tiny()
    cut, whole = Recorded(None, False), Recorded(None, True)
    talk = replace(chat(*TURNS), recorded=(cut, cut))
    text = encode_one(talk, tokenizer)
    assert "«Yes it is»<|end|>" in text
    assert text.endswith("«Because of that»")
    assert encode_one(replace(talk, recorded=(whole, whole)), tokenizer) == encode_one(
        chat(*TURNS), tokenizer
    )


def test_another_targets_tokens_are_not_trained() -> None:
    talk = replace(chat("Hi there", "Yes it is"), recorded=(Recorded((1, 2, 3), True),))
    (found,), report = encode([talk], tiny(), config())
    assert marked(found, tiny()).endswith("«Yes it is<|end|>»\n")
    assert list(report.notes.values()) == [1]
    assert "another target's tokens" in report.lines()[0]


def test_what_a_template_is_told_holds_for_training_and_for_prompts() -> None:
    tokenizer = qwen3()
    told = Template("chat", {"enable_thinking": False}, "2024-07-26")
    talk, quiet = chat("Hi there", "Yes it is"), {"enable_thinking": False}
    text = encode_one(talk, tokenizer, template_kwargs=quiet)
    assert text.endswith("assistant\n<think>\n\n</think>\n\n«Yes it is<|im_end|>»\n")
    (found,), _ = encode([talk], tokenizer, config(template_kwargs=quiet))
    assert prompt_of(found) == prompt_tokens(talk.messages[:1], tokenizer, told)
    turns = [{"role": turn.role, "content": turn.content} for turn in talk.messages]
    assert found.tokens.tolist() == tokenizer.apply_chat_template(turns)["input_ids"]
    prints = {
        template_fingerprint(tokenizer, each)
        for each in (told, BY_TEMPLATE, replace(told, date="2025-01-01"))
    }
    assert len(prints) == 2  # this one writes no date


# Templates of strangers


def test_today_is_the_day_that_the_run_says() -> None:
    tokenizer = tiny()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template
    told = BY_TEMPLATE
    text = tokenizer.decode(prompt_tokens(chat("Hi").messages, tokenizer, told))
    assert text.startswith("26 Jul 2024<|begin|>")
    later = replace(told, date="2024-07-27")
    assert template_fingerprint(tokenizer, told) != template_fingerprint(tokenizer, later)


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(  # three seconds
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            marks=pytest.mark.slow,
        ),
        "{{ 'a' * 10000000000 }}",
        "{{ '%999999999d' % 1 }}{{ '%999999999d' % 1 }}",
        "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x }}",
        "{% set n = messages|length ** (10 ** 9) %}",
        "{{ 'a'.ljust(9999999999) }}",
    ],
)
def test_a_template_that_takes_no_end_is_named_within_seconds(bomb: str) -> None:
    tokenizer = tiny()
    tokenizer.name_or_path = "someones/model"
    tokenizer.chat_template = tokenizer.chat_template + "{% if messages|length > 2 %}" + bomb
    tokenizer.chat_template += "{% endif %}"
    with pytest.raises(ValueError, match=r"a\.jsonl:4: the chat template of someones/model must"):
        encode([chat("Hi", "Yes"), chat(*TURNS)], tokenizer, config())
    tokenizer.chat_template = tiny().chat_template
    assert len(encode([chat(*TURNS)], tokenizer, config())[0]) == 1  # the next one is rendered


def test_a_template_sees_no_secret_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    RENDERING.close()  # so that one is started now
    assert prompt_tokens(chat("Hi").messages, tiny(), BY_TEMPLATE)
    assert RENDERING.process is not None
    environment = Path(f"/proc/{RENDERING.process.pid}/environ").read_bytes()
    assert b"PYTHONPATH" in environment
    assert b"hf_secret" not in environment
