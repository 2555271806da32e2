"""Whatever a tokenizer.json says, its tokens are bounded, and its failure is one line."""

import ast
import base64
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from builders import model_config
from test_floors import MODULES

from drafttrain.core.tokenizer import encoded, text_of, token_ids
from drafttrain.target.pretrained.models import load_tokenizer

HELPLESS = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}
STAR = {"type": "Replace", "pattern": {"Regex": "."}, "content": "b" * 1_000_000}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
HOSTILE: dict[str, dict[str, Any]] = {
    "a long replacement": {"normalizer": STAR},
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "b" * 2_000_000}},
    "doubled 40 times": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
    "doubled in decoding": {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 40}},
    "a long decoder": {"decoder": STAR},
}


def target(base: Path, folder: Path, changes: dict[str, Any]) -> Any:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return load_tokenizer(model_config(folder))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_lengthens_text_without_bound_is_refused(
    name: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: .* must") as error:
        target(tiny_target_dir, tmp_path, HOSTILE[name])
    assert str(error.value).isprintable()


def test_a_panic_is_one_clear_error(tiny_target_dir: Path, tmp_path: Path) -> None:
    tokenizer = target(tiny_target_dir, tmp_path, {"pre_tokenizer": HELPLESS})
    with pytest.raises(ValueError, match="must read any text, and failed") as error:
        token_ids(tokenizer, "a" * 40 + "b")
    assert str(error.value).isprintable()


def test_the_tokens_of_a_character_are_bounded() -> None:
    def tokenizer(texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[0] * 1000 * len(text) for text in texts]}

    with pytest.raises(ValueError, match="at most 64 tokens for a character, got 3,000 for 3"):
        encoded(tokenizer, ["abc"])


def test_nothing_is_changed_for_an_honest_tokenizer(tiny_target_dir: Path) -> None:
    tokenizer = load_tokenizer(model_config(tiny_target_dir))
    assert token_ids(tokenizer, "Hi there") == tokenizer("Hi there")["input_ids"]
    ids = token_ids(tokenizer, "Hi there", special=False)
    assert text_of(tokenizer, ids) == tokenizer.decode(ids)


def test_one_module_alone_calls_the_tokenizer() -> None:
    called = re.compile(r"(tokenizer|own)\.(encode|decode|batch_decode)$|(^|\.)tokenizer$")
    nodes = [(m, node) for m, source in MODULES.items() for node in ast.walk(ast.parse(source))]
    calls = {m for m, n in nodes if isinstance(n, ast.Call) and called.search(ast.unparse(n.func))}
    methods = re.compile(r"(tokenizer|own)\.(encode|decode|batch_decode)$")
    uses = {m for m, n in nodes if isinstance(n, ast.Attribute) and methods.search(ast.unparse(n))}
    assert calls | uses == {"core.tokenizer"}


def charsmap(replacement: str) -> str:
    return base64.b64encode(bytes(4) + replacement.encode() + b"\0").decode()


OTHERS: dict[str, dict[str, Any]] = {
    "a long charsmap": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("b" * 100_000)}
    },
    "a regex in decoding": {
        "decoder": {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "b"}
    },
    "a long added token": {"added_tokens": [{"id": 0, "content": "b" * 100_000, "special": True}]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_part_of_a_tokenizer_may_make_too_much_of_a_token(
    name: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: .* must") as error:
        target(tiny_target_dir, tmp_path, OTHERS[name])
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "content", [b"", b"\x9f\xce\x80\x9e\x1a", bytes(3), b"\4\0\0\0a", bytes(4) + b"\xff"]
)
def test_a_charsmap_that_rust_would_end_the_process_for_is_refused(
    content: bytes, tiny_target_dir: Path, tmp_path: Path
) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}
    split = {
        "type": "CharDelimiterSplit",
        "delimiter": "",
    }  # a second failure while that one unwinds
    with pytest.raises(ValueError, match="must be one of sentencepiece's"):
        target(tiny_target_dir, tmp_path, {"normalizer": broken, "pre_tokenizer": split})


@pytest.mark.parametrize("key", ["normalizer", "model", "added_tokens"])
@pytest.mark.parametrize("value", [5, "b", [[]], {"vocab": 5}, {"vocab": [[]]}])
def test_what_is_no_tokenizer_is_refused_in_a_line(
    key: str, value: Any, tiny_target_dir: Path, tmp_path: Path
) -> None:
    if (key, value) == ("normalizer", [[]]):  # the library takes it for none
        target(tiny_target_dir, tmp_path, {key: value})
        return
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded") as error:
        target(tiny_target_dir, tmp_path, {key: value})
    assert str(error.value).isprintable()


def test_a_long_token_of_the_vocabulary_is_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    model = json.loads((tiny_target_dir / "tokenizer.json").read_text())["model"]
    model["vocab"]["b" * 100_000] = len(model["vocab"])
    with pytest.raises(ValueError, match="a text of its model must be of at most 4000"):
        target(tiny_target_dir, tmp_path, {"model": model})


def test_a_slow_tokenizer_is_given_up(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Split that stays just below the limit of its library, at every third character."""
    slow = HELPLESS | {"pattern": {"Regex": "(a|aa)+$"}}
    tokenizer = target(tiny_target_dir, tmp_path, {"pre_tokenizer": slow})
    monkeypatch.setattr("drafttrain.core.tokenizer.SECONDS", 0.2)
    started = time.monotonic()
    for _ in range(2):  # the second is refused at once
        with pytest.raises(ValueError, match=r"must read 10,000 characters a second, and was not"):
            token_ids(tokenizer, ("a" * 27 + "b") * 60)  # it takes 1.7 s
    assert time.monotonic() - started < 10
    assert token_ids(load_tokenizer(model_config(tiny_target_dir)), "Hi there")


def test_what_the_tokenizer_raises_is_raised_to_its_caller() -> None:
    def tokenizer(texts: list[str], **_: Any) -> dict[str, Any]:
        raise KeyError(texts[0])

    with pytest.raises(KeyError, match="abc"):
        encoded(tokenizer, ["abc"])
