"""The loss mask covers what the assistant writes, token by token, in each family's template."""

from pathlib import Path
from typing import Any

import pytest
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

from drafttrain.data.chat import encode, prompt_of, prompt_tokens, split_holdout
from drafttrain.data.conversations import Conversation, JsonlConfig, PlainText
from drafttrain.data.records import Message
from drafttrain.data.skips import NothingUsable
from drafttrain.data.template import chat_format
from drafttrain.types import Sample

TINY = Path(__file__).parent.parent / "drafttrain" / "assets" / "tiny"

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
    settings = {"path": "a", "limit": None, "max_length": 512, "holdout": 0, "template": "chat"}
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
            qwen3,  # the empty <think> block of the last turn is what the model itself begins with
            "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n«Yes it is<|im_end|>»\n"
            "<|im_start|>user\nWhy so<|im_end|>\n<|im_start|>assistant\n"
            "«<think>\n\n</think>\n\nBecause of that<|im_end|>»\n",
            "<|im_start|>system\nBe brief<|im_end|>\n"
            "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n«Yes it is<|im_end|>»\n"
            "<|im_start|>user\nWhy so<|im_end|>\n<|im_start|>assistant\n"
            "«<think>\n\n</think>\n\nBecause of that<|im_end|>»\n",
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
    form = chat_format(tokenizer)
    end = form.tail.strip()
    said = f"It is {end}{form.closing}fake {end}"
    text = encode_one(chat(f"What is {end}{form.closing}?", said, "And?", end), tokenizer)
    runs = [part.split("»")[0] for part in text.split("«")[1:]]
    assert len(runs) == 2
    assert runs[0].count(end) == said.count(end) + 1
    assert runs[0].startswith(("It is", "  It is"))
    assert runs[0].endswith(end)
    assert runs[1].removeprefix("<think>\n\n</think>\n\n").strip() in (end + end, f"{end} {end}")


@pytest.mark.parametrize(
    ("make", "answer", "expected"),
    [
        (llama3, "  \n Yes it is \n", "<|end_header_id|>\n\n«Yes it is<|eot_id|>»"),
        (mistral, " \nYes it is\n ", "[/INST]«  Yes it is</s>»"),
        (tiny, " Yes it is\n", "<|assistant|>\n« Yes it is\n<|end|>»\n"),
        # The header's newline and the answer's first make one token: it is not the answer's.
        (tiny, "\n\nYes it is", "<|assistant|>\n\n«\nYes it is<|end|>»\n"),
        (qwen3, "\nYes it is", "assistant\n«<think>\n\n</think>\n\nYes it is<|im_end|>»\n"),
        (
            qwen3,
            "<think>\nHm.\n</think>\n\nYes it is",
            "assistant\n«<think>\nHm.\n</think>\n\nYes it is<|im_end|>»\n",
        ),
        (
            qwen3,
            "<think>Or<|im_end|>\n?</think>Yes",
            "assistant\n«<think>\nOr<|im_end|>\n?\n</think>\n\nYes<|im_end|>»\n",
        ),
    ],
)
def test_answers_that_the_template_trims_or_rewrites_are_found(
    make: Any, answer: str, expected: str
) -> None:
    assert encode_one(chat("Hi there", answer), make()).endswith(expected)


def test_thoughts_of_earlier_turns_are_stripped_and_the_turn_still_found() -> None:
    text = encode_one(chat("Hi", "<think>\nHm.\n</think>\n\nYes", "Why so", "That"), qwen3())
    assert "assistant\n«Yes<|im_end|>»\n<|im_start|>user\nWhy so" in text
    assert "Hm." not in text


def test_a_last_turn_of_the_user_is_context_only() -> None:
    text = encode_one(chat("Hi there", "Yes it is", "Why so"), llama3())
    assert text.endswith(
        "«Yes it is<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nWhy so<|eot_id|>"
    )


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
    with pytest.raises(NothingUsable, match="1 x the chat template rewrites an answer beyond"):
        encode([chat("Hi there", "Yes it is")], tokenizer, config())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ValueError, match="must write each turn once, with something between"):
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
        prompt_tokens(chat("Hi").messages, bare, "chat")
    with pytest.raises(
        NothingUsable, match=r"data.template=none takes \{\"text\": ...\}: a.jsonl:4"
    ):
        encode([chat(*TURNS)], bare, config(template="none"))
    with pytest.raises(NothingUsable, match=r"text without turns, which needs data\.template=none"):
        encode([PlainText("Once.", 0, "a.jsonl:1")], tiny(), config())


@pytest.mark.parametrize("make", [tiny, llama3, qwen3, mistral, llama2])
def test_a_prompt_is_what_stands_before_the_answer_in_training(make: Any) -> None:
    tokenizer = make()
    conversation = chat("Hi there", "Yes it is", system="Be brief")
    (sample,), _ = encode([conversation], tokenizer, config())
    prompt = prompt_tokens(conversation.messages[:2], tokenizer, "chat")
    assert prompt_of(sample) == prompt
    if tokenizer.bos_token in tokenizer.decode(prompt):
        assert prompt.count(tokenizer.bos_token_id) == 1
    turns = [{"role": turn.role, "content": turn.content} for turn in conversation.messages[:2]]
    assert prompt_tokens(turns, tokenizer, "chat") == prompt


def test_a_prompt_without_a_template_is_the_text_with_one_beginning() -> None:
    tokenizer = mistral()
    prompt = prompt_tokens([{"role": "user", "content": "Yes it is"}], tokenizer, "none")
    assert tokenizer.decode(prompt) == "<s> Yes it is"
    (sample,), _ = encode([PlainText("Yes it is" * 40, 0, "a")], tokenizer, config(template="none"))
    assert prompt_of(sample) == sample.tokens[:32].tolist()


def test_the_held_out_conversations_depend_on_the_seed_alone() -> None:
    items = list(range(100))
    kept, held = split_holdout(items, 10, seed=0)
    assert (kept, held) == split_holdout(items, 10, seed=0)
    assert sorted(kept + held) == items
    assert kept == sorted(kept)
    assert held != split_holdout(items, 10, seed=1)[1]
    assert split_holdout(items, 0, seed=0) == (items, [])
    with pytest.raises(ValueError, match=r"data\.holdout must be less than the 100 usable"):
        split_holdout(items, 100, seed=0)
