"""The witness with a real vLLM: it says and counts what our loop does, end tokens included.

Run by scripts/serving_suite.sh. Greedy, float32, an EAGLE-3 drafter and prompt lookup on the
embedded target, with end tokens honoured and batches of one and four.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Int
from overfit import decisive_texts, overfit, target_at
from test_vllm import card_of, export_config, prompts_of
from torch import Tensor

from drafttrain.config.compose import load_choice
from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import PromptResult, TargetFeatures
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.ngram import Ngram, NgramConfig, NgramState
from drafttrain.evaluation.evaluate import Parts
from drafttrain.evaluation.witness.section import WitnessPrompt, check_witness, witness_section
from drafttrain.formats.write.export import export_drafter
from drafttrain.report.results import WitnessSection
from drafttrain.target.model import Target
from drafttrain.target.pretrained.models import EMBEDDED

pytestmark = pytest.mark.serving

DEPTH, LIMIT = 3, 40


class EarliestNgram(Ngram):
    """Prompt lookup as vLLM does it: what followed the earliest occurrence, not the latest."""

    def observe(
        self,
        state: NgramState,
        tokens: Int[Tensor, "batch new"],
        counts: Sequence[int],
        features: TargetFeatures,
    ) -> None:
        """Keep the first place of every n-gram."""
        for text, row, count in zip(state.texts, tokens.tolist(), counts, strict=True):
            for token in row[:count]:
                end = len(text.tokens)
                for size in range(self.config.min_ngram, min(self.config.max_ngram, end) + 1):
                    text.ends.setdefault(tuple(text.tokens[end - size :]), [end])
                text.tokens.append(token)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_at(EMBEDDED)


@pytest.fixture(scope="module")
def asked(target: Target) -> list[WitnessPrompt]:
    texts = decisive_texts(target, prompts_of("embedded", target), 8, LIMIT)
    return [WitnessPrompt(f"p{n}", 0, "talk", tuple(text.prompt)) for n, text in enumerate(texts)]


@pytest.fixture(scope="module")
def eagle3(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Drafter, Path]:
    texts = decisive_texts(target, prompts_of("embedded", target), 8, LIMIT)
    drafter = overfit("eagle3", target, texts, 25, draft_vocab_coverage=0.95)
    folder = tmp_path_factory.mktemp("eagle3") / "export"
    export_drafter(drafter, str(EMBEDDED), folder, export_config(), card_of("eagle3"))
    return drafter, folder


def ours(
    target: Target, drafter: Drafter, asked: list[WitnessPrompt], name: str
) -> list[PromptResult]:
    results = []
    settings: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": LIMIT}
    for one in asked:
        plain = autoregressive_decode(target, one.tokens, chance=SeededChance(0), **settings)
        drafted = speculative_decode(
            target, drafter, one.tokens, policy=DEPTH, chance=SeededChance(0), **settings
        )
        assert plain.tokens == drafted.tokens
        for method, decoded in (("autoregressive", plain), (name, drafted)):
            length = len(one.tokens)
            results.append(
                PromptResult(
                    one.prompt_id, 0, "talk", method, 0, length, decoded.tokens, decoded.stats
                )
            )
    return results


def section_of(
    target: Target,
    drafter: Drafter,
    name: str,
    serving_dir: Path | None,
    asked: list[WitnessPrompt],
    folder: Path,
) -> WitnessSection:
    told: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": LIMIT, "resamples": 200}
    told |= {"temperature": 0.0, "vllm_batch_sizes": [1, 4]}
    config = replace(load_choice("eval", "default"), **told)
    served = check_witness(drafter, name, EMBEDDED, serving_dir, config)
    results = ours(target, drafter, asked, name)
    assert any(target.spec.eos_token_ids[0] in r.tokens for r in results), "no output ends early"
    section = witness_section(
        Parts(target, target, drafter, name, torch.float32, {}),
        served,
        asked,
        results,
        config,
        threads=1,
        folder=folder,
        seed=0,
        ours_by_batch={},
    )
    print(section.agreement, section.prediction, sep="\n")
    return section


def check(section: WitnessSection, num_outputs: int) -> None:
    agreement = section.agreement
    assert agreement.num_outputs == num_outputs
    assert agreement.num_equal == num_outputs, agreement.disagreements
    assert agreement.ours == agreement.theirs
    assert 0 < agreement.ours.num_accepted_tokens < agreement.ours.num_draft_tokens
    assert section.interleaved
    one, four = section.batches
    assert (one.batch_size, four.batch_size) == (1, 4)
    assert one.outputs_differing == four.outputs_differing == 0
    assert one.mean_acceptance_length.value == four.mean_acceptance_length.value
    assert one.speedup.value > 0
    assert section.prediction is not None
    assert section.prediction.num_test == 5


def test_eagle3_is_witnessed(
    target: Target, eagle3: tuple[Drafter, Path], asked: list[WitnessPrompt], tmp_path: Path
) -> None:
    drafter, folder = eagle3
    check(section_of(target, drafter, "eagle3", folder, asked, tmp_path), len(asked))


def test_prompt_lookup_is_witnessed_and_its_difference_named(
    target: Target, asked: list[WitnessPrompt], tmp_path: Path
) -> None:
    config = load_choice("drafter", "ngram")
    assert isinstance(config, NgramConfig)
    earliest = EarliestNgram(config, target.spec).eval()
    check(section_of(target, earliest, "ngram", None, asked, tmp_path), len(asked))


def test_a_vllm_that_refuses_says_why_in_one_line(
    target: Target, eagle3: tuple[Drafter, Path], asked: list[WitnessPrompt], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nothing"], "model_type": "llama"}')
    with pytest.raises(ValueError, match=r"vLLM ended with code 1: .+; the log is ") as raised:
        section_of(target, eagle3[0], "eagle3", tmp_path, asked, tmp_path / "out")
    print(raised.value)
    assert "\n" not in str(raised.value)
