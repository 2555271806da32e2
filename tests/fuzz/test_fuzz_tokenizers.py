"""Whatever a tokenizer.json is made of, it gives tokens of bounded number, soon, or is refused."""

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import model_config
from fences import FUZZ, Fence, damaged, edited, fence
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.core import tokenizer as called
from drafttrain.target.pretrained.models import load_tokenizer

__all__ = ["fence"]

pytestmark = pytest.mark.slow

# Patterns that search long are given texts of 20 letters: a thread that is given up works on.
REGEXES = st.sampled_from(
    (
        *(r"(a+)+$", r"(a|aa)+$", r"a*a*a*a*b", r".", r"", r"(?=a)", r"\p{L}+|\p{N}{1,3}"),
        *(
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"(?:(?:a{1,9999}){1,9999}){1,9999}",
            r"(",
            r"\G",
            r"a{,2}",
        ),
        *(r"[\ud800]", r"(?i:[sdmt]|ll|ve|re)", r"(?<!a)b", r"\X", r"(?<n>a)\k<n>"),
    )
)
TEXTS = st.one_of(
    st.sampled_from(("", "a", " ", "▁", "aa", "b" * 70, "b" * 1_000_000, "\x00", "ﷺ", "\n")),
    st.text(max_size=4),
)
SIZES = st.sampled_from((0, 1, 2, 7, 2**31, 2**63 - 1, -1))
BEHAVIORS = st.sampled_from(("Removed", "Isolated", "MergedWithPrevious", "Contiguous"))
SCHEMES = st.sampled_from(("always", "first", "never"))
PATTERNS = st.one_of(
    st.fixed_dictionaries({"Regex": REGEXES}), st.fixed_dictionaries({"String": TEXTS})
)
CHARSMAPS = st.one_of(st.binary(max_size=80), TEXTS.map(lambda text: bytes(4) + text.encode()))


def step(kind: str, **options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **options})


def sequence(steps: list[Any], key: str) -> st.SearchStrategy[Any]:
    one = st.one_of(steps)
    many = st.sampled_from((1, 2, 3, 40)).flatmap(lambda n: st.lists(one, min_size=1, max_size=n))
    return st.one_of(
        st.none(), one, many.map(lambda found: {"type": "Sequence", key: found}), *steps[:2]
    )


REPLACE = step("Replace", pattern=PATTERNS, content=TEXTS)
METASPACE = step("Metaspace", replacement=TEXTS, prepend_scheme=SCHEMES, split=st.booleans())
BYTES = step(
    "ByteLevel", add_prefix_space=st.booleans(), trim_offsets=st.booleans(), use_regex=st.booleans()
)
NORMALIZERS = sequence(
    [
        *(REPLACE, step("Prepend", prepend=TEXTS), step("ByteLevel"), step("Nmt")),
        *(step(kind) for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")),
        step("Strip", strip_left=st.booleans(), strip_right=st.booleans()),
        step(
            "Precompiled",
            precompiled_charsmap=CHARSMAPS.map(lambda b: base64.b64encode(b).decode()),
        ),
    ],
    "normalizers",
)
PRE_TOKENIZERS = sequence(
    [
        step("Split", pattern=PATTERNS, behavior=BEHAVIORS, invert=st.booleans()),
        *(BYTES, METASPACE, step("Digits", individual_digits=st.booleans())),
        *(step(kind) for kind in ("BertPreTokenizer", "Whitespace", "UnicodeScripts")),
        *(step("FixedLength", length=SIZES), step("CharDelimiterSplit", delimiter=TEXTS)),
    ],
    "pretokenizers",
)
DECODERS = sequence(
    [
        *(REPLACE, METASPACE, BYTES, step("Fuse"), step("ByteFallback")),
        step("Strip", content=TEXTS, start=SIZES, stop=SIZES),
        step("WordPiece", prefix=TEXTS, cleanup=st.booleans()),
        step("CTC", pad_token=TEXTS, word_delimiter_token=TEXTS, cleanup=st.booleans()),
        step("BPEDecoder", suffix=TEXTS),
    ],
    "decoders",
)
WORDS = st.lists(TEXTS, max_size=8, unique=True).map(lambda words: ["<unk>", *words])


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a model of few tokens, of each kind that there is."""
    words = draw(WORDS)
    vocabulary = {word: number for number, word in enumerate(words)}
    kind = draw(st.sampled_from(("BPE", "WordLevel", "WordPiece", "Unigram")))
    model: dict[str, Any] = {"type": kind, "vocab": vocabulary, "unk_token": "<unk>"}
    if kind == "BPE":
        pairs = st.lists(st.sampled_from(words), min_size=2, max_size=2)
        model |= {
            "merges": draw(st.lists(pairs, max_size=3)),
            "dropout": draw(st.none() | st.floats()),
        }
        model |= {"fuse_unk": draw(st.booleans()), "byte_fallback": draw(st.booleans())}
        model |= {"end_of_word_suffix": draw(st.none() | TEXTS)}
    if kind == "WordPiece":
        model |= {"continuing_subword_prefix": draw(TEXTS), "max_input_chars_per_word": draw(SIZES)}
    if kind == "Unigram":
        scored = [[word, draw(st.floats(allow_nan=False))] for word in words]
        model = {"type": kind, "vocab": scored, "unk_id": draw(SIZES)}
    return model


@st.composite
def tokenizers(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a tokenizer.json: any steps around a model, with added and special tokens."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    added = [
        {"id": draw(SIZES), "content": content, **{flag: draw(st.booleans()) for flag in flags}}
        for content in draw(st.lists(TEXTS, max_size=2))
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": draw(NORMALIZERS), "pre_tokenizer": draw(PRE_TOKENIZERS),
        "post_processor": None, "decoder": draw(DECODERS), "model": draw(models()),
    }  # fmt: skip


@FUZZ
@given(plain=tokenizers().flatmap(lambda plain: damaged(edited(plain, most=1))), text=TEXTS)
def test_tokenizers(fence: Fence, tiny_target_dir: Path, plain: bytes, text: str) -> None:
    folder = fence.fresh()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(tiny_target_dir / name, folder)
    (folder / "tokenizer.json").write_bytes(plain)

    def read() -> None:
        tokenizer = load_tokenizer(model_config(folder))
        for each in ("a" * 20 + "b", text[:70], "Hi there,\n 12 ▁ﷺ 日本"):
            ids = called.token_ids(tokenizer, each)
            assert len(ids) <= called.MAX_TOKENS * (len(each) + 1)
            shown = called.text_of(tokenizer, ids)
            assert len(shown) <= (len(ids) + 1) * called.MAX_STRING * called.MAX_GROWTH

    fence.holds(read)
