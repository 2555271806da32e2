"""A real vLLM loads our exports, says what we say, and counts what we count.

Run by scripts/serving_suite.sh, which makes the environment that vLLM lives in. Everything is
float32 and greedy, a chain of depth 3, one prompt at a time, and nothing ends a text but the limit.
VLLM_CASES="eagle3 eagle" serves these cases only, and VLLM_CASES="-eagle3 -eagle" all others.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import character_tokenizer
from overfit import CONF, Text, decisive_texts, overfit, target_at

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Counters
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.formats.write.config import ExportSettings
from drafttrain.formats.write.export import export_drafter
from drafttrain.report.card import CardData
from drafttrain.target.model import Target
from drafttrain.target.pretrained.models import EMBEDDED
from drafttrain.target.vllm.process import DEFAULTS, IN_PROCESS

pytestmark = pytest.mark.serving

DEPTH, MAX_NEW_TOKENS, NUM_PROMPTS = 3, 64, 8
TIMEOUT_S = 1800
QUESTIONS = (
    "Hello! How are you today?",
    "What is the capital of France?",
    "Write a short story about a cat and a dog.",
    "What is 7 plus 5?",
    "Give me three tips for sleeping well.",
    "Why is the sky blue?",
    "Say the words red, green, blue and red, green, blue again.",
    "How do I make tea?",
    "Tell me a joke about a fish.",
    "What can I cook with rice and eggs?",
    "Where do birds sleep?",
    "Count from one to ten.",
)
# name: target, family, training steps, changes to its yaml. Few steps, so that some drafts fail.
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "eagle3": ("embedded", "eagle3", 25, {"draft_vocab_coverage": 0.95}),
    "eagle3_1": ("embedded", "eagle3_1", 25, {}),
    "p_eagle": ("embedded", "p_eagle", 55, {"unroll": 4, "num_layers": 2, "cod_ratio": 1.0}),
    "eagle": ("embedded", "eagle", 25, {}),
    "medusa": ("embedded", "medusa", 8, {"num_heads": 4}),
    "shallow": ("shallow", "eagle3", 40, {}),
    "norms": (
        "embedded",
        "eagle3",
        25,
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    ),
    "qwen3": ("qwen3", "eagle3", 50, {"draft_vocab_size": 128}),
    "qwen3_eagle": ("qwen3", "eagle", 60, {"intermediate_size": 96, "scale_embeddings": False}),
    "small_lm": ("embedded", "small_lm", 60, {}),
    "lora": ("qwen3", "small_lm", 40, {"layers": [0, 3, 6], "lora_rank": 4}),
    "qwen3_block": ("qwen3", "dflash", 25, {"block_size": DEPTH + 1, "num_layers": 3}),
    "qwen3_candidates": (
        *("qwen3", "dflash2", 25),
        {"block_size": DEPTH + 1, "num_layers": 2, "selector_rank": 32, "selector_top_k": 8},
    ),
}
# Cases that are exported in the speculators format too, and how an engine is given that directory:
# alone, alone with a word on drafts, or beside the target, as the witness of a report gives it.
BY_ITSELF: dict[str, tuple[str, str]] = {
    "eagle3 by itself": ("eagle3", "alone"),
    "eagle3 by itself, drawing drafts": ("eagle3", "drawing"),
    "eagle3 beside its target": ("eagle3", "beside"),
    "p_eagle by itself": ("p_eagle", "alone"),
    "p_eagle beside its target": ("p_eagle", "beside"),
    "shallow by itself": ("shallow", "alone"),
    "norms by itself": ("norms", "alone"),
    "qwen3_block by itself": ("qwen3_block", "alone"),
    "qwen3_block beside its target": ("qwen3_block", "beside"),
    "qwen3_candidates by itself": ("qwen3_candidates", "alone"),
}
# Cases that are exported in 8 bits too; vLLM's product for them runs on every CPU. Where oneDNN has
# no such type it takes a second per draft, so vLLM is asked few of the prompts.
IN_EIGHT_BITS = ("eagle3", "p_eagle", "eagle", "qwen3_eagle", "qwen3_block", "qwen3_candidates")
PROMPTS_IN_EIGHT_BITS = 2


def chosen(names: Iterable[str], words: str) -> list[str]:
    """Return the names that VLLM_CASES chooses: those in it, or all but those after a minus."""
    names, only = list(names), [word for word in words.split() if not word.startswith("-")]
    unknown = {word.removeprefix("-") for word in words.split()} - set(names)
    if unknown:
        raise ValueError(f"VLLM_CASES must name cases of {names}, got {sorted(unknown)}")
    return [name for name in names if (name in only if only else f"-{name}" not in words.split())]


if words := os.environ.get("VLLM_CASES"):
    CASES = {name: CASES[name] for name in chosen(CASES, words)}
    BY_ITSELF = {other: case for other, case in BY_ITSELF.items() if case[0] in CASES}
    IN_EIGHT_BITS = tuple(name for name in IN_EIGHT_BITS if name in CASES)
TARGETS = sorted({where for where, *_ in CASES.values()})


@dataclass
class Served:
    """What both sides said to the same prompts."""

    texts: dict[str, list[Text]] = field(default_factory=dict)  # our plain loop, by target
    ours: dict[str, list[tuple[tuple[int, ...], Counters]]] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)  # vLLM's answers, by case


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Train, export and decode every case here, then let one vLLM process serve them all."""
    python = os.environ.get("DRAFTTRAIN_VLLM_PYTHON", "")
    if not Path(python).is_file():
        pytest.fail(
            "DRAFTTRAIN_VLLM_PYTHON must name the interpreter of an environment with vLLM, got "
            f"{python!r}: run scripts/serving_suite.sh"
        )
    folder = tmp_path_factory.mktemp("serving")
    served, requests = Served(), []
    folders = {
        "embedded": EMBEDDED,
        "shallow": random_target(folder / "shallow", "llama", num_layers=4),
        "qwen3": random_target(folder / "qwen3", "qwen3", num_layers=7),
    }
    targets = {name: target_at(folders[name]) for name in TARGETS}
    for name, target in targets.items():
        prompts = prompts_of(name, target)
        served.texts[name] = decisive_texts(target, prompts, NUM_PROMPTS, MAX_NEW_TOKENS)
        requests.append(request(name, folders[name], served.texts[name], None))
    for name, (where, family, steps, changes) in CASES.items():
        texts = served.texts[where]
        drafter = overfit(family, targets[where], texts, steps, **changes)
        share_key_norms(drafter)
        out = folder / "exports" / name
        target = targets[where]
        done = export_drafter(
            drafter,
            str(folders[where]),
            out,
            export_config(),
            card_of(family),
            partial(getattr, target, "tokenizer"),
        )
        served.ours[name] = [decode(target, drafter, text.prompt) for text in texts]
        speculative = json.loads(shlex.split(done.commands["vLLM"])[-1])  # as a user is told
        assert speculative["num_speculative_tokens"] == DEPTH
        requests.append(request(name, folders[where], texts, speculative))
        if name in IN_EIGHT_BITS:
            other, place = f"{name} in 8 bits", folder / "exports" / f"{name}-fp8"
            wanted, written = replace(export_config(), dtype="fp8"), []
            measure = partial(keep, written)
            export_drafter(
                drafter, str(folders[where]), place, wanted, card_of(family), None, measure
            )
            served.ours[other] = [decode(target, written[0], text.prompt) for text in texts]
            beside = speculative | {"model": str(place)}
            few = texts[:PROMPTS_IN_EIGHT_BITS]
            requests.append(request(other, folders[where], few, beside))
        for other, (case, how) in BY_ITSELF.items():
            if case == name:
                place = folder / "exports" / other.replace(" ", "-")
                wanted = replace(export_config(), format="speculators")
                export_drafter(drafter, str(folders[where]), place, wanted, card_of(family))
                beside = speculative | {"model": str(place)}
                drawing = {"draft_sample_method": "probabilistic"}
                given = {"alone": None, "drawing": drawing, "beside": beside}[how]
                model = folders[where] if how == "beside" else place
                requests.append(request(name, model, texts, given) | {"name": other})
    served.theirs = ask_vllm(python, folder, requests)
    return served


def keep(written: list[Drafter], drafter: Drafter, depth: int) -> str:
    """Take the drafter that an export's files give, as its measure of them."""
    written.append(drafter)
    return "kept"


def share_key_norms(drafter: Drafter) -> None:
    """Give the layers of a block drafter the first one's norm of keys.

    vLLM's CPU kernel normalises the injected keys of every layer by the first layer's weight: it
    takes one weight where qwen3_dflash.py passes a row for each layer.
    """
    norms = [norm for name, norm in drafter.named_parameters() if "self_attn.k_norm" in name]
    with torch.no_grad():
        for norm in norms:
            norm.copy_(norms[0])


def random_target(folder: Path, architecture: str, num_layers: int, vocab_size: int = 512) -> Path:
    """Write a random target that differs from the embedded one in whatever an export may forget."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,  # not hidden / heads
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # wide enough that the greedy choice is never a tie
        "bos_token_id": 1,
        "eos_token_id": 5,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    if architecture == "llama":
        rope = {"rope_type": "default", "rope_theta": 500.0}
        config = LlamaConfig(**shape, rope_parameters=rope, tie_word_embeddings=False)
        model = LlamaForCausalLM(config)
    else:
        rope = {"rope_type": "default", "rope_theta": 1000000.0}
        config = Qwen3Config(**shape, rope_parameters=rope, tie_word_embeddings=True)
        model = Qwen3ForCausalLM(config)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def prompts_of(name: str, target: Target) -> list[list[int]]:
    """Return twelve prompts: chats for the embedded target, random tokens for random ones."""
    if name == "embedded":
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [
            target.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for chat in chats
        ]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(6, target.spec.vocab_size, (5 + 3 * i,), generator=generator).tolist()
        for i in range(len(QUESTIONS))
    ]


def export_config() -> ExportSettings:
    values = yaml.safe_load((CONF / "export" / "vllm.yaml").read_text())
    return ExportSettings(**{**values, "dtype": "float32"})


def card_of(family: str) -> CardData:
    return CardData("serving suite", family, None, "a target", None, "other", {}, {}, {})


def request(
    name: str, target: Path, texts: list[Text], speculative: dict[str, Any] | None
) -> dict[str, Any]:
    prompts = [text.prompt for text in texts]
    return {
        "name": name if speculative else f"plain {name}",
        "target": str(target),
        "prompts": prompts,
        "speculative_config": speculative,
        "max_model_len": 256,
    }


def decode(
    target: Target, drafter: Drafter, prompt: list[int], max_new_tokens: int = MAX_NEW_TOKENS
) -> tuple[tuple[int, ...], Counters]:
    decoded = speculative_decode(
        target,
        drafter,
        prompt,
        policy=DEPTH,
        sampling=GREEDY,
        max_new_tokens=max_new_tokens,
        chance=SeededChance(0),
        stop_tokens=(),
    )
    return decoded.tokens, decoded.stats.untrimmed


def ask_vllm(
    python: str,
    folder: Path,
    requests: list[dict[str, Any]],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, Any]:
    """Run every request in one process of the other environment."""
    paths = folder / "request.json", folder / "answer.json"
    paths[0].write_text(json.dumps({"max_tokens": max_new_tokens, "cases": requests}))
    client = Path(__file__).with_name("vllm_client.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= DEFAULTS | IN_PROCESS | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, str(client), *map(str, paths)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    answer = json.loads(paths[1].read_text())
    print(f"vLLM {answer['vllm']}:", {name: c["seconds"] for name, c in answer["cases"].items()})
    return answer["cases"]


def said(served: Served, case: str) -> list[list[int]]:
    answer = served.theirs[case]
    assert "error" not in answer, answer["error"]
    return answer["tokens"]


@pytest.mark.parametrize("target", TARGETS)
def test_plain_decoding_is_the_same_in_both(served: Served, target: str) -> None:
    assert said(served, f"plain {target}") == [text.answer for text in served.texts[target]]


@pytest.mark.parametrize("case", CASES)
def test_greedy_output_is_that_of_plain_decoding(served: Served, case: str) -> None:
    target = CASES[case][0]
    assert said(served, case) == said(served, f"plain {target}")
    assert [list(tokens) for tokens, _ in served.ours[case]] == said(served, f"plain {target}")


@pytest.mark.parametrize("case", CASES)
def test_vllm_counts_the_same_drafts_and_acceptances_as_we_do(served: Served, case: str) -> None:
    counted = served.theirs[case]["counters"]
    ours = [counters for _, counters in served.ours[case]]
    total = sum(ours, Counters())
    print(case, total)
    for mine, theirs in zip(ours, counted, strict=True):
        assert theirs == {
            "num_drafts": mine.num_drafts,
            "num_draft_tokens": mine.num_draft_tokens,
            "num_accepted_tokens": mine.num_accepted_tokens,
            "num_accepted_tokens_per_pos": mine.num_accepted_tokens_per_position,
        }


@pytest.mark.parametrize("other", BY_ITSELF)
def test_a_directory_that_names_its_target_is_served_alike(served: Served, other: str) -> None:
    """`vllm serve DIR` is the whole command: method, depth and target are in config.json."""
    native = BY_ITSELF[other][0]
    assert said(served, other) == said(served, native)
    assert served.theirs[other]["counters"] == served.theirs[native]["counters"]


@pytest.mark.parametrize("case", IN_EIGHT_BITS)
def test_weights_of_eight_bits_are_served_as_they_are_measured_here(
    served: Served, case: str
) -> None:
    """Products are summed in another order, so that a rounded activation may be its neighbour."""
    other, few = f"{case} in 8 bits", PROMPTS_IN_EIGHT_BITS
    assert said(served, other) == said(served, f"plain {CASES[case][0]}")[:few]
    assert served.ours[other] != served.ours[case], "nothing was rounded"
    ours = sum((counters for _, counters in served.ours[other][:few]), Counters())
    counted = served.theirs[other]["counters"]
    drafts, accepted = (
        sum(each[key] for each in counted) for key in ("num_drafts", "num_accepted_tokens")
    )
    print(other, ours, "theirs:", drafts, accepted)
    allowed = max(1, 0.02 * drafts)  # of fifty to a hundred
    assert abs(drafts - ours.num_drafts) <= allowed
    assert abs(accepted - ours.num_accepted_tokens) <= allowed


@pytest.mark.parametrize("case", CASES)
def test_equal_counters_mean_something(served: Served, case: str) -> None:
    """Drafts must fail and succeed at every depth, or a drafter that says nothing would pass."""
    total = sum((counters for _, counters in served.ours[case]), Counters())
    assert total.num_accepted_tokens > 0.1 * total.num_draft_tokens, total
    assert total.num_accepted_tokens < 0.95 * total.num_draft_tokens, total
    assert all(total.num_accepted_tokens_per_position), total
