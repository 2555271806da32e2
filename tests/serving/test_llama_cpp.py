"""A real llama.cpp converts our exports, drafts with them, and counts what we count.

Run by scripts/serving_suite.sh, which builds it. Everything is float32 and greedy, one prompt at a
time, on the CPU, and nothing ends a text but the limit.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from overfit import Text, decisive_texts, overfit, target_at
from test_vllm import card_of, export_config, prompts_of, random_target
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import DecodeStats
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.formats.write.export import export_drafter
from drafttrain.target.model import Target

pytestmark = pytest.mark.serving

FOLDER = "DRAFTTRAIN_LLAMA_CPP"
MAX_NEW_TOKENS, NUM_PROMPTS = 64, 5
TIMEOUT_S = 600
# name: target, family, depth, training steps (few, so that drafts fail), changes to its yaml.
CASES: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "dflash": ("qwen3", "dflash", 5, 30, {"block_size": 6, "num_layers": 3}),
    "dspark": ("llama", "dspark", 5, 30, {"block_size": 5, "num_layers": 2, "markov_rank": 32}),
    "dflash2": (
        *("qwen3", "dflash2", 3, 30),
        {"block_size": 4, "num_layers": 2, "selector_rank": 32, "selector_top_k": 8},
    ),
    "eagle3": ("scaled", "eagle3", 3, 40, {"draft_vocab_size": 128}),
    "norms": ("llama", "eagle3", 3, 40, {"norm_before_residual": True, "norm_before_fc": True}),
    "small_lm": ("llama", "small_lm", 3, 60, {}),
    "scaled layers": ("scaled", "small_lm", 3, 40, {"layers": [0, 3, 6], "lora_rank": 4}),
    "qwen3 layers": ("qwen3", "small_lm", 3, 40, {"layers": [0, 3, 6]}),
}
CUT, P_MIN = ["dspark"], 0.3  # the case that is decoded with --spec-draft-p-min too

Cycles = list[tuple[int, int]]  # drafted and accepted tokens of each


@dataclass(frozen=True)
class Served:
    """A target as both sides have it, and what our plain loop says to some prompts."""

    folder: Path  # with target.gguf
    target: Target
    texts: list[Text]


@dataclass(frozen=True)
class WholeTokenizer:
    """A target's tokenizer, saved with sentencepiece's own file where the target has one."""

    served: Served

    def save_pretrained(self, folder: Path) -> None:
        self.served.target.tokenizer.save_pretrained(folder)
        for file in self.served.folder.glob("tokenizer.model"):
            shutil.copy(file, folder)


@dataclass(frozen=True)
class Witnessed:
    """What both sides did with the same prompts."""

    case: str
    served: Served
    drafter: Drafter
    depth: int
    ours: list[DecodeStats]
    theirs: list[dict[str, Any]]
    command: list[str]  # as printed, behind the target


@pytest.fixture(scope="module")
def checkout() -> Iterator[Path]:
    """Yield the folder that the suite made: llama.cpp's source, our client, sentencepiece."""
    folder = os.environ.get(FOLDER, "")
    if not folder:
        pytest.skip(f"{FOLDER} is not set: scripts/serving_suite.sh builds llama.cpp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(folder) / "site"))  # for the converter
        yield Path(folder)


@pytest.fixture(scope="module")
def served(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """Return what converts a target, by its name, once."""
    return cache(partial(serve, checkout, tmp_path_factory.mktemp("llama_cpp")))


@pytest.fixture(scope="module", params=CASES)
def witnessed(
    request: pytest.FixtureRequest,
    checkout: Path,
    served: Callable[[str], Served],
    tmp_path_factory: pytest.TempPathFactory,
) -> Witnessed:
    """Train, export and convert a drafter, and let llama.cpp decode with it."""
    case: str = request.param
    name, family, depth, steps, changes = CASES[case]
    one = served(name)
    drafter = overfit(family, one.target, one.texts, steps, **changes)
    out = tmp_path_factory.mktemp("exports") / case
    settings = replace(
        export_config(),
        format="gguf",
        converter=str(checkout / "source"),
        num_speculative_tokens=depth,
    )
    done = export_drafter(
        *(drafter, str(one.folder), out, settings, card_of(family)),
        partial(WholeTokenizer, one),
        target_folder=lambda: one.folder,
    )
    words = shlex.split(done.commands["llama.cpp"])  # as a user is told
    assert words[:3] == ["llama-server", "-m", "TARGET.gguf"]
    ours = [our_counts(one.target, drafter, text.prompt, depth) for text in one.texts]
    theirs = ask(checkout, one, words[3:])
    return Witnessed(case, one, drafter, depth, ours, theirs, words[3:])


def serve(checkout: Path, folder: Path, name: str) -> Served:
    """Make a target with a tokenizer that the converter knows, convert it, and let it answer."""
    place = folder / name
    random_target(place, "qwen3" if name == "qwen3" else "llama", num_layers=7)
    if name == "scaled":
        scale_positions(place)
    prompts = prompts_of(name, target_at(place))
    convertible_tokenizer(place)
    target = target_at(place)
    texts = decisive_texts(target, prompts, NUM_PROMPTS, MAX_NEW_TOKENS)
    converter = checkout / "source" / "convert_hf_to_gguf.py"
    words = [sys.executable, str(converter), str(place), "--outtype", "f32"]
    words += ["--outfile", str(place / "target.gguf")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Served(place, target, texts)


def scale_positions(folder: Path) -> None:
    """Give a Llama target the rotary positions of Llama 3."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config["rope_parameters"] |= factors | {"rope_type": "llama3"}
    config["rope_parameters"]["original_max_position_embeddings"] = 64  # short texts reach it
    file.write_text(json.dumps(config))


def convertible_tokenizer(folder: Path) -> None:
    """Replace a target's tokenizer by one that the converter knows, with as many tokens.

    It recognises byte-level tokenizers by a hash of what they make of a text, so only published
    ones; one with byte fallback it takes as it is. Both sides are given token ids.
    """
    config = json.loads((folder / "config.json").read_text())
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [f"token{number}" for number in range(config["vocab_size"] - len(words))]
    vocab = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / file).unlink(missing_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    if "Qwen3" not in config["architectures"][0]:
        return
    # Of a Qwen3 it takes a byte-level one, or sentencepiece's own file.
    code = "import sys, sentencepiece as one; one.SentencePieceTrainer.train(sentence_iterator="
    code += "iter(['abc'] * 9), model_prefix=sys.argv[1], vocab_size=7, model_type='char')"
    words = [sys.executable, "-c", code, str(folder / "tokenizer")]
    subprocess.run(words, check=True, capture_output=True)


def ask(
    checkout: Path, served: Served, words: Sequence[str], p_min: float = 0.0
) -> list[dict[str, Any]]:
    """Let the client decode all prompts; words: of the printed command, behind the target."""
    options = dict(zip(words[::2], words[1::2], strict=True))
    drafter, kind = options.get("-md", "-"), options.get("--spec-type", "none")
    depth = options.get("--spec-draft-n-max", "1")
    settings = [drafter, kind, depth, str(p_min), str(MAX_NEW_TOKENS)]
    done = subprocess.run(
        [str(checkout / "build" / "client"), str(served.folder / "target.gguf"), *settings],
        input="".join(" ".join(map(str, text.prompt)) + "\n" for text in served.texts),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: list[dict[str, Any]] = json.loads(done.stdout)
    return answer


def our_counts(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    depth: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> DecodeStats:
    decoded = speculative_decode(
        target,
        drafter,
        prompt,
        policy=depth,
        sampling=GREEDY,
        max_new_tokens=max_new_tokens,
        chance=SeededChance(0),
        stop_tokens=(),
    )
    return decoded.stats


def cycles_of_ours(stats: DecodeStats) -> Cycles:
    return [(drafted, accepted) for _, drafted, accepted in stats.cycles]


def cycles_of(answer: dict[str, Any]) -> Cycles:
    return [(drafted, accepted) for drafted, accepted in answer["cycles"]]


@pytest.mark.parametrize("name", ["llama", "qwen3", "scaled"])
def test_plain_decoding_is_the_same_in_both(
    checkout: Path, served: Callable[[str], Served], name: str
) -> None:
    answers = [answer["tokens"] for answer in ask(checkout, served(name), [])]
    assert answers == [text.answer for text in served(name).texts]


def test_greedy_output_is_that_of_plain_decoding(witnessed: Witnessed) -> None:
    answers = [answer["tokens"] for answer in witnessed.theirs]
    assert answers == [text.answer for text in witnessed.served.texts]


def test_every_cycle_drafts_and_accepts_as_many_tokens_as_ours(witnessed: Witnessed) -> None:
    theirs = [cycles_of(answer) for answer in witnessed.theirs]
    total = sum(accepted for cycles in theirs for _, accepted in cycles)
    drafts = sum(map(len, theirs))
    print(f"{witnessed.case}: {total} accepted in {drafts} drafts of {witnessed.depth}")
    for number, (ours, other) in enumerate(zip(witnessed.ours, theirs, strict=True)):
        assert cycles_of_ours(ours)[:-1] == other[:-1], f"prompt {number}"
        counted = len(other), *(sum(counts) for counts in zip(*other, strict=True))
        mine = ours.untrimmed  # the last cycle reaches beyond the limit
        assert counted == (mine.num_drafts, mine.num_draft_tokens, mine.num_accepted_tokens)


def test_equal_cycles_mean_something(witnessed: Witnessed) -> None:
    """Drafts must fail and succeed at every depth, or a drafter that says nothing would pass."""
    counts = [accepted for answer in witnessed.theirs for _, accepted in cycles_of(answer)]
    assert {*counts} == {*range(witnessed.depth + 1)}


@pytest.mark.parametrize("witnessed", CUT, indirect=True)
def test_a_block_is_cut_where_our_confidence_head_is_below_the_threshold(
    witnessed: Witnessed, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, drafter, depth = witnessed.served, witnessed.drafter, witnessed.depth
    confidence: list[float] = []

    def expand(*given: Any) -> Tensor:
        logits: Tensor = type(drafter).expand(drafter, *given)
        sure = drafter.confidence(given[0])
        assert sure is not None
        confidence.append(float(sure))
        return logits

    monkeypatch.setattr(drafter, "expand", expand)
    theirs = ask(checkout, served, witnessed.command, P_MIN)
    lengths: list[int] = []
    for text, answer in zip(served.texts[:3], theirs, strict=False):
        assert answer["tokens"] == text.answer
        place = 1
        for drafted, accepted in cycles_of(answer):
            confidence.clear()
            our_counts(served.target, drafter, text.prompt + text.answer[: place - 1], depth, 2)
            below = [k for k, sure in enumerate(confidence[:depth]) if sure < P_MIN]
            assert drafted == (below[0] if below else depth), (place, confidence[:depth])
            lengths.append(drafted)
            place += accepted + 1
    print({length: lengths.count(length) for length in sorted({*lengths})})
    assert len({*lengths}) >= 3, "the threshold cuts too little, or all"


@pytest.mark.parametrize("witnessed", CUT, indirect=True)
def test_the_converter_refuses_a_tokenizer_that_it_does_not_know(
    witnessed: Witnessed, checkout: Path, tmp_path: Path
) -> None:
    """That of the embedded target, or another of no published model: nothing is written."""
    place = random_target(tmp_path / "target", "llama", num_layers=1)
    settings = replace(export_config(), format="gguf", converter=str(checkout / "source"))
    with pytest.raises(ValueError, match="it knows tokenizers by a hash, and not this target's"):
        export_drafter(
            *(witnessed.drafter, str(place), tmp_path / "out", settings, card_of("dspark")),
            target_folder=lambda: place,
        )
    assert list(tmp_path.iterdir()) == [place]
