"""Selfgen writes what the target says, the same in any batch, and continues where it stopped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import BY_TEMPLATE, TOLD, model_config

from drafttrain.core.chance import SeededChance
from drafttrain.core.types import Sample
from drafttrain.data.conversations import JsonlConfig, SelfgenConfig, read
from drafttrain.data.skips import NothingUsable
from drafttrain.target.answers.selfgen import (
    ANSWER,
    EMIT,
    USER,
    Frame,
    distribution,
    frame_of,
    load,
    selfgen,
)
from drafttrain.target.model import Target, load_target

# Turns end with tokens of their own, and a single token stands between user and assistant.
SHORT = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ m['content'] }}"
    "{{ '<|user|>' if m['role'] == 'user' else '<|pad|>' }}{% endfor %}"
)


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return load_target(model_config(tiny_target_dir), torch.float32, "cpu")


@pytest.fixture
def config(tmp_path: Path) -> SelfgenConfig:
    return SelfgenConfig(
        name="selfgen",
        max_length=64,
        holdout=0,
        template_kwargs={},
        template_date="2024-07-26",
        roles={},
        preview=0,
        train_on="answers",
        template="chat",
        seed=5,
        num_conversations=18,
        batch_size=10,
        user_temperature=1.3,
        answer_temperature=0.9,
        top_k=0,
        top_p=0.97,
        max_user_tokens=9,
        max_answer_tokens=12,
        cache_dir=str(tmp_path / "selfgen"),
    )


def cache_folder(config: SelfgenConfig) -> Path:
    (folder,) = Path(config.cache_dir).iterdir()
    return folder


def written_alone(index: int, target: Target, config: SelfgenConfig, frame: Frame) -> list[int]:
    """Write one conversation by a full forward for each token: the definition."""
    chance = SeededChance(config.seed)
    tokens = list(frame.opening)

    def next_token(kind: int, first: bool) -> int:
        logits, _ = target.step(target.begin(), torch.tensor([tokens]), last_only=True)
        probs = distribution(logits[:, 0], kind, first, config, frame)
        return int(chance.choose(probs, [index], [len(tokens)], EMIT))

    for place in range(config.max_user_tokens):
        token = next_token(USER, place == 0)
        if token in frame.user_stops:
            break
        tokens.append(token)
    tokens += frame.closing
    for _ in range(config.max_answer_tokens):
        tokens.append(next_token(ANSWER, False))
        if tokens[-1] in frame.answer_stops:
            break
    return tokens


def same(one: list[Sample], other: list[Sample]) -> bool:
    return len(one) == len(other) and all(
        a.index == b.index
        and torch.equal(a.tokens, b.tokens)
        and torch.equal(a.loss_mask, b.loss_mask)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("answer_temperature", "template"),
    [
        (0.0, None),
        (0.9, SHORT),
        pytest.param(0.0, SHORT, marks=pytest.mark.slow),
        pytest.param(0.9, None, marks=pytest.mark.slow),
    ],
)
def test_a_batch_writes_what_each_conversation_is_alone(
    target: Target, config: SelfgenConfig, answer_temperature: float, template: str | None
) -> None:
    if template:
        target.tokenizer.chat_template = template
    config = replace(config, answer_temperature=answer_temperature)
    frame = frame_of(target, BY_TEMPLATE)
    assert len(frame.closing) == (1 if template else 4)
    samples, report = selfgen(target, config, show=False)
    assert len(samples) + report.num_skipped == report.num_read == 18
    written = load(cache_folder(config), target.spec)
    assert sorted(written) == list(range(18))
    for index, conversation in written.items():
        assert conversation.tokens == written_alone(index, target, config, frame)
    for sample in samples:
        tokens = sample.tokens.tolist()
        prompt = tokens[: written[sample.index].num_prompt_tokens]
        assert prompt[: len(frame.opening)] == frame.opening
        assert prompt[-len(frame.closing) :] == frame.closing
        user = prompt[len(frame.opening) : -len(frame.closing)]
        assert 0 < len(user) <= config.max_user_tokens
        assert not set(user) & {*frame.forbidden, *frame.user_stops}
        assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * (
            len(tokens) - len(prompt)
        )
        assert written[sample.index].finished == (tokens[-1] in frame.answer_stops)


def test_answers_end_by_themselves_or_at_the_limit(target: Target, config: SelfgenConfig) -> None:
    selfgen(target, replace(config, num_conversations=40), show=False)
    written = load(cache_folder(config), target.spec).values()
    lengths = {len(item.tokens) - item.num_prompt_tokens for item in written if not item.finished}
    assert lengths == {config.max_answer_tokens}
    assert any(item.finished for item in written)


def test_the_batch_size_changes_nothing(target: Target, config: SelfgenConfig) -> None:
    samples, _ = selfgen(target, config, show=False)
    for batch_size in (1, 7):
        folder = f"{config.cache_dir}_{batch_size}"
        again = replace(config, batch_size=batch_size, cache_dir=folder)
        assert same(selfgen(target, again, show=False)[0], samples)


def test_an_interrupted_run_continues_and_a_torn_line_is_written_again(
    target: Target, config: SelfgenConfig, tmp_path: Path
) -> None:
    whole, _ = selfgen(target, replace(config, cache_dir=str(tmp_path / "whole")), show=False)
    selfgen(target, replace(config, num_conversations=11), show=False)
    file = cache_folder(config) / "conversations.jsonl"
    complete = file.read_bytes()
    file.write_bytes(complete + complete.splitlines()[0][:40])
    resumed, _ = selfgen(target, config, show=False)
    assert same(resumed, whole)
    content = file.read_bytes()
    assert content.startswith(complete)
    assert [json.loads(line)["index"] for line in content.splitlines()] == list(range(18))


def test_a_finished_cache_is_reused_and_says_so(
    target: Target, config: SelfgenConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, _ = selfgen(target, config)
    assert "tiny_test writes 18 conversations to" in capsys.readouterr().out
    file = cache_folder(config) / "conversations.jsonl"
    before = (file.read_bytes(), file.stat().st_mtime_ns)
    again, _ = selfgen(target, config)
    assert same(again, samples)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    said = capsys.readouterr().out
    assert "18 conversations from" in said
    assert "tokens/s" not in said
    fewer, _ = selfgen(target, replace(config, num_conversations=5), show=False)
    assert same(fewer, [sample for sample in samples if sample.index < 5])


@pytest.mark.parametrize(
    "change", [{"seed": 6}, {"answer_temperature": 0.5}, {"top_p": 0.9}, {"max_user_tokens": 8}]
)
def test_another_setting_is_another_cache(
    target: Target, config: SelfgenConfig, change: dict[str, float]
) -> None:
    config = replace(config, num_conversations=2)
    selfgen(target, config, show=False)
    selfgen(target, replace(config, **change), show=False)
    selfgen(target, replace(config, batch_size=1, num_conversations=3), show=False)
    assert len(list(Path(config.cache_dir).iterdir())) == 2
    settings = [
        json.loads((folder / "settings.json").read_text())
        for folder in Path(config.cache_dir).iterdir()
    ]
    assert {entry["target"] for entry in settings} == {target.spec.fingerprint}
    ((key, value),) = change.items()
    assert {entry[key] for entry in settings} == {value, getattr(config, key)}


def test_the_cache_is_readable_text_that_data_jsonl_takes(
    target: Target, config: SelfgenConfig
) -> None:
    selfgen(target, config, show=False)
    folder = cache_folder(config)
    common = {"max_length": 64, "holdout": 0, "template": "chat", "seed": 0, "limit": None, **TOLD}
    conversations, _ = read(JsonlConfig(name="jsonl", path=str(folder), **common))
    written = load(folder, target.spec)
    frame = frame_of(target, BY_TEMPLATE)
    for conversation in conversations:
        text = "".join(
            f"<|{turn.role}|>\n{turn.content}<|end|>\n" for turn in conversation.messages
        )
        item = written[int(conversation.source.split(":")[1]) - 1]
        asked, said = item.tokens[: item.num_prompt_tokens], item.tokens[item.num_prompt_tokens :]
        answer = target.tokenizer.decode(said, skip_special_tokens=True)
        assert f"<|begin|>{text}" == f"{target.tokenizer.decode(asked)}{answer}<|end|>\n"
    assert len(conversations) > 9
    assert frame.opening == target.tokenizer.encode("<|begin|><|user|>\n", add_special_tokens=False)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    target: Target, config: SelfgenConfig
) -> None:
    longest = 3 + 4 + 9 + 12
    selfgen(target, replace(config, max_length=longest, num_conversations=1), show=False)
    with pytest.raises(ValueError, match=r"must fit in data.max_length, got 28 > 27; lower them"):
        selfgen(target, replace(config, max_length=longest - 1), show=False)
    with pytest.raises(ValueError, match=r"must fit in the target's positions, got 516 > 512"):
        selfgen(target, replace(config, max_length=10**4, max_answer_tokens=500), show=False)


def test_a_template_that_opens_with_the_user_cannot_be_started_from(
    target: Target, config: SelfgenConfig
) -> None:
    target.tokenizer.chat_template = SHORT.replace("{{ '<|begin|>' }}", "")
    with pytest.raises(ValueError, match=r"opens with the user's words; use data=jsonl"):
        selfgen(target, config, show=False)


def test_added_tokens_that_the_head_lacks_are_no_part_of_the_frame(
    target: Target, config: SelfgenConfig
) -> None:
    names = [f"<|{place}|>" for place in range(target.spec.vocab_size)]
    target.tokenizer.add_tokens(names, special_tokens=True)
    assert max(target.tokenizer.added_tokens_decoder) >= target.spec.vocab_size
    assert max(frame_of(target, BY_TEMPLATE).first_forbidden) < target.spec.vocab_size
    samples, _ = selfgen(target, replace(config, num_conversations=2), show=False)
    assert samples


def test_empty_answers_are_skipped_and_counted(target: Target, config: SelfgenConfig) -> None:
    # A head of zeros ties all logits, and the first of them, <|pad|>, ends the answer here.
    target.readout.head.zero_()
    target.tokenizer.chat_template = SHORT
    config = replace(config, answer_temperature=0.0, num_conversations=3)
    with pytest.raises(NothingUsable, match="3 x empty answer: conversation 0, conversation 1"):
        selfgen(target, config, show=False)
