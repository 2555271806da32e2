"""Example outputs by who wrote what, and acceptance along the output, in a report and its pages."""

import re
from dataclasses import replace
from typing import Any

import pytest
from test_report import built, html, many_prompts, markdown, measured, report_of

from drafttrain.core.types import PromptResult
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.report.metrics import Resampling
from drafttrain.report.outputs import along_output, examples_of
from drafttrain.report.plots import time_figure
from drafttrain.report.results import Example, WrittenText
from drafttrain.report.write import as_data

LETTERS = ["a", "<b>", "\n", "&", "d", "e", " f", "g", "\u202eh", "i"]


class Tokenizer:
    """One text for each token."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(LETTERS[token] for token in tokens)


def timed(result: PromptResult, pass_s: float) -> PromptResult:
    """The result with its passes recorded, each of `pass_s` seconds."""
    cycles = result.stats.cycles or [(0, 0, 0)] * result.stats.num_target_passes
    passes = [(1, drafted, drafted, 0.0, pass_s, 0.0) for _, drafted, _ in cycles]
    return replace(result, stats=replace(result.stats, passes=passes))


def five_prompts() -> list[PromptResult]:
    """Outputs of ten tokens, of which prompt n had n accepted; each timed in two blocks."""
    results = []
    for name in (3, 1, 0, 4, 2):
        drafts = [(2, 2)] * (name // 2) + [(2, 1)] * (name % 2)
        drafts += [(2, 0)] * (9 - sum(accepted + 1 for _, accepted in drafts))
        for block in (0, 1):
            told: dict[str, Any] = {"block": block, "task": "math"}
            results.append(timed(measured("autoregressive", str(name), **told), 0.5))
            results.append(timed(measured("eagle3", str(name), drafts, **told), 1.0))
    return results


PROMPTS = [Prompt(str(name), "math", "math", (f"<i>{name}</i>", "later")) for name in range(5)]


def examples() -> list[Example]:
    return examples_of(five_prompts(), "eagle3", PROMPTS, Tokenizer())


def test_examples_are_the_least_the_median_and_the_most_accepted() -> None:
    assert [(one.prompt_id, one.prompt) for one in examples()] == [
        ("0", "<i>0</i>"),
        ("2", "<i>2</i>"),
        ("4", "<i>4</i>"),
    ]
    last = examples()[-1]
    assert last.pieces[:5] == [
        WrittenText("plain", "a", 1),
        WrittenText("accepted", "<b>\n", 2),
        WrittenText("bonus", "&", 1),
        WrittenText("accepted", "de", 2),
        WrittenText("bonus", " f", 1),
    ]
    assert [piece.writer for piece in last.pieces[5:]] == ["corrected"] * 3
    assert {one: last.num_tokens(one) for one in ("accepted", "bonus")} == {
        "accepted": 4,
        "bonus": 2,
    }


def test_tokens_by_time_follow_the_passes() -> None:
    last = examples()[-1]
    assert last.drafted.tokens == [1, 4, 7, 8, 9, 10]
    assert last.drafted.seconds == pytest.approx([0, 1, 2, 3, 4, 5])
    assert last.plain.tokens == list(range(1, 11))
    assert last.plain.seconds == pytest.approx([0.5 * step for step in range(10)])
    batch = [
        replace(one, stats=replace(one.stats, passes=[(8, *rest) for _, *rest in one.stats.passes]))
        for one in five_prompts()
    ]
    together = examples_of(batch, "eagle3", PROMPTS, Tokenizer())[-1]
    assert together.drafted.seconds == pytest.approx([0, 8, 16, 24, 32, 40]), "of eight rows each"


def test_outputs_whose_passes_were_not_recorded_are_no_examples() -> None:
    assert examples_of(many_prompts(), "eagle3", [], Tokenizer()) == []


def test_pages_mark_every_token_by_its_writer_and_stay_safe() -> None:
    shown: dict[str, Any] = as_data(replace(built(five_prompts()), examples=examples()))
    page, text = html(shown), markdown(shown)
    assert '<span class="accepted" title="accepted">&lt;b&gt;\n</span>' in page
    assert "&lt;i&gt;4&lt;/i&gt;" in page
    assert "\u202e" not in page
    for writer in ("accepted", "corrected", "bonus"):  # told apart without colours too
        assert re.search(rf"span\.{writer} {{[^}}]*text-decoration: underline", page)
        assert f'<li><span class="{writer}">{writer}</span> ' in page
    assert "Tokens against time" in page
    row = next(line for line in text.splitlines() if line.startswith("| math, 4 |"))
    assert row.endswith("| 4 | 3 | 2 | 1 |")
    assert "<" not in text


def test_acceptance_along_the_output_by_hand() -> None:
    bins = along_output(five_prompts(), "eagle3", Resampling(200, 0))
    counted = [(b.first, b.last, b.num_drafts, b.num_accepted_tokens) for b in bins]
    # Drafts begin at 1, and after each at the token after its last.
    assert counted == [(0, 3, 8, 7), (4, 7, 17, 3), (8, 11, 10, 0)]
    assert [b.accepted_per_draft.value for b in bins] == pytest.approx([7 / 8, 3 / 17, 0])
    assert bins[0].accepted_per_draft.ci95 is not None
    assert sum(b.num_drafts for b in bins) == report_of(five_prompts())["summary"]["num_drafts"]


def test_bins_grow_with_the_output() -> None:
    bins = along_output(many_prompts(), "eagle3", Resampling(200, 0))
    assert len(bins) <= 12
    assert {b.last - b.first for b in bins} == {31}


def test_the_figure_of_outputs_names_its_units() -> None:
    assert "seconds after the prefill" in time_figure(examples(), "eagle3").__html__()
