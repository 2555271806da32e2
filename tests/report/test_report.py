"""The report: exact numbers on small measurements, honest intervals, and pages that are safe."""

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from rich.console import Console

from drafttrain.commands.evaluate import evaluation_table
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Counters, DecodeStats, PromptResult
from drafttrain.report.bootstrap import Resampling, interval
from drafttrain.report.build import build_report, certified, sweep_point
from drafttrain.report.config import VerdictSettings
from drafttrain.report.document import Listing
from drafttrain.report.document import markdown as text_of
from drafttrain.report.metrics import ACCEPTANCE_LENGTH
from drafttrain.report.pages import report_document
from drafttrain.report.pages import write_report as write_files
from drafttrain.report.phrases import cell, rule_statement, speed
from drafttrain.report.plots import bounds, report_figures
from drafttrain.report.results import (
    PLAIN,
    SCHEMA_VERSION,
    Check,
    Divergence,
    Estimate,
    Evaluated,
    LimitedSampling,
    LosslessCheck,
    Report,
    TimingInfo,
)
from drafttrain.report.tables import rich_table
from drafttrain.report.tables import summary_table as summary_of
from drafttrain.report.totals import PassTimes, collect, repeats
from drafttrain.report.write import as_data, as_json
from drafttrain.report.write import html as page_of
from drafttrain.runtime.untrusted_input import typed

RESAMPLING = Resampling(resamples=2000, seed=0)
EXACT = LosslessCheck("greedy", True, "float32", 2, 2, [], "")


def counters(drafts: list[tuple[int, int]], last_is_cut: bool = False) -> Counters:
    total = Counters()
    for place, (drafted, accepted) in enumerate(drafts, 1):
        total.add(drafted, accepted, cut=last_is_cut and place == len(drafts))
    return total


def measured(
    method: str,
    prompt_id: str,
    drafts: list[tuple[int, int]] | None = None,
    *,
    tokens: tuple[int, ...] = tuple(range(10)),
    seconds: tuple[float, float, float, float] = (0.1, 0.0, 0.9, 0.0),
    task: str = "math",
    turn: int = 0,
    block: int = 0,
    untrimmed: list[tuple[int, int]] | None = None,
) -> PromptResult:
    """One measurement; `drafts`: (drafted, accepted); `seconds`: prefill, draft, verify, other."""
    passes = len(tokens) - 1 if drafts is None else len(drafts)
    cycles, position = [], 1  # the prefill gives the token before
    for drafted, accepted in drafts or []:
        cycles.append((min(position, len(tokens) - 1), drafted, accepted))
        position += accepted + 1
    stats = DecodeStats(
        counters(drafts or [], last_is_cut=position > len(tokens)),
        counters(untrimmed or drafts or []),
        passes,
        *seconds,
        cycles,
    )
    return PromptResult(prompt_id, turn, task, method, block, 5, tokens, stats)


def read(report: dict[str, Any]) -> Report:
    """The report that a report.json holds: what pages are made of can be read again."""
    return typed(Report, as_json(report), "it")


def report_html(report: Report) -> str:
    return page_of(report_document(report), report_figures(report))


def html(report: dict[str, Any]) -> str:
    return report_html(read(report))


def markdown(report: dict[str, Any]) -> str:
    return text_of(report_document(read(report)))


def summary_table(report: dict[str, Any]) -> Any:
    return rich_table(summary_of(read(report)))


def write_report(report: dict[str, Any], folder: Path) -> None:
    write_files(read(report), folder)


def estimate(measured: dict[str, Any]) -> str:
    return cell(Estimate(measured["value"], measured["ci95"]))


def report_of(results: list[PromptResult], **changes: Any) -> dict[str, Any]:
    """The report of these results, as report.json has it."""
    data: dict[str, Any] = as_data(built(results, **changes))
    return data


def built(results: list[PromptResult], **changes: Any) -> Report:
    sampling = changes.pop("sampling", GREEDY)
    limit = changes.pop("max_new_tokens", 16)
    resamples = changes.pop("resamples", RESAMPLING.resamples)
    settings = changes.pop("verdict", VerdictSettings(1.05, None, "USD"))
    how = {key: changes.pop(key) for key in ("of_depths", "adaptive", "memory") if key in changes}
    about: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "target": "tiny",
        "drafter": "eagle3",
        "depth": 2,
        "sampling": LimitedSampling(**vars(sampling), max_new_tokens=limit),
        "draft_sampling": GREEDY,
        "batch_size": 1,
        "sweep": [],
        "tables": [],
        "lossless": EXACT,
        "timing": TimingInfo("float32", 2, len({result.block for result in results}), "cpu"),
        "provenance": {"commit": "abc", "versions": {"torch": "2.13.0"}},
        "prompts": {"source": "tiny.jsonl"},
        "notes": ["one note"],
    }
    resampling = Resampling(resamples, RESAMPLING.seed)
    return build_report(results, Evaluated(**{**about, **changes}), resampling, settings, **how)


def two_prompts() -> list[PromptResult]:
    """Plain: 1 s for 10 tokens each. eagle3: 4 and 6 drafts. ngram: accepts less, also faster."""
    return [
        measured("autoregressive", "a"),
        measured("autoregressive", "b"),
        measured(
            "eagle3",
            "a",
            [(2, 2), (2, 2), (2, 1), (2, 1)],
            seconds=(0.1, 0.04, 0.20, 0.06),
            untrimmed=[(2, 2), (2, 2), (2, 1), (2, 2)],
        ),
        measured("eagle3", "b", [(2, 1), (2, 1), (2, 1), (2, 0), (2, 0), (2, 0)]),
        measured("ngram", "a", [(2, 1)] * 4 + [(2, 0)]),
        measured("ngram", "b", [(2, 0)] * 9),
    ]


def until(length: int, accepted: list[int]) -> list[int]:
    """As many of the accepted runs as make an output of this length with their bonus tokens."""
    position, found = 1, []
    while position < length:
        found.append(min(accepted[len(found)], length - position))
        position += found[-1] + 1
    return found


def many_prompts(seed: int = 0, prompts: int = 30, blocks: int = 5) -> list[PromptResult]:
    """Prompts whose length and speed vary much, and whose speedup varies little."""
    random = np.random.default_rng(seed)
    results = []
    for index in range(prompts):
        length = int(random.integers(10, 200))
        rate = float(random.uniform(0.5, 2.0))  # slow and fast prompts
        tokens = tuple(int(token) for token in random.integers(0, 50, length))
        accepted = until(length, random.binomial(2, 0.6, length).tolist())
        gain = float(random.normal(1.6, 0.05))
        for block in range(blocks):
            for method, factor in (("autoregressive", 1.0), ("eagle3", gain), ("ngram", 1.1)):
                drafts = None if method == "autoregressive" else [(2, count) for count in accepted]
                if method == "ngram":
                    drafts = [(2, count) for count in until(length, [1] * length)]
                spent = length * rate / factor
                results.append(
                    measured(
                        method,
                        f"prompt {index}",
                        drafts,
                        tokens=tokens,
                        seconds=(0.01, 0.1 * spent, 0.8 * spent, 0.1 * spent),
                        task=("math", "coding")[index % 2],
                        block=block,
                    )
                )
    return results


@pytest.fixture(scope="module")
def varied() -> dict[str, Any]:
    return report_of(many_prompts())


def test_numbers_of_two_prompts_are_those_computed_by_hand():
    report = report_of(two_prompts())
    row = report["summary"]
    assert row["num_prompts"] == 2
    assert row["num_output_tokens"] == 20
    assert (row["num_drafts"], row["num_draft_tokens"], row["num_accepted_tokens"]) == (10, 20, 9)
    assert row["num_cut_drafts"] == 1  # the fourth of "a" accepts the last token
    assert row["acceptance_length"]["micro"] == pytest.approx((9 + 10 - 1) / 10)
    assert row["acceptance_length"]["macro"] == pytest.approx(((6 + 4 - 1) / 4 + (3 + 6) / 6) / 2)
    assert row["acceptance_rate"] == pytest.approx(9 / 20)
    assert row["acceptance_per_position"] == pytest.approx([7 / 10, 2 / 10])
    assert row["conditional_acceptance"] == pytest.approx([7 / 10, 2 / 7])
    assert row["tokens_per_second"]["autoregressive"] == pytest.approx(20 / 2.0)
    assert row["tokens_per_second"]["speculative"] == pytest.approx(20 / (0.4 + 1.0))
    assert row["speedup"]["value"] == pytest.approx(2.0 / 1.4)
    assert row["speedup"]["blocks"] == pytest.approx([2.0 / 1.4])
    assert row["time_ms"]["draft"] == pytest.approx(1000 * 0.04 / 10)
    assert row["time_ms"]["verify"] == pytest.approx(1000 * (0.20 + 0.9) / 10)
    assert row["time_ms"]["other"] == pytest.approx(1000 * 0.06 / 10)
    assert row["time_ms"]["prefill"] == pytest.approx(1000 * 0.2 / 2)
    assert row["predicted_speedup"] == pytest.approx(1.8 * 100 / (4 + 110))
    assert row["outputs_differing"] == {"num": 0, "of": 2}
    assert row["untrimmed"]["num_accepted_tokens"] == 10
    assert row["untrimmed"]["num_accepted_tokens_per_position"] == [7, 3]
    assert row["untrimmed"]["mean_acceptance_length"] == pytest.approx(2.0)
    assert row["repetition_rate"] == 0
    assert report["tasks"]["math"] == row
    plain = report["methods"]["autoregressive"]["summary"]
    assert plain["time_ms"]["verify"] == pytest.approx(1000 * 1.8 / 18)
    assert report["methods"]["ngram"]["summary"]["num_drafts"] == 14
    assert report["beats_ngram"]["speedup_difference"]["value"] == pytest.approx(2.0 / 1.4 - 1)


def test_turns_of_a_prompt_are_one_unit_and_blocks_count_tokens_once():
    results = []
    for block, factor in enumerate((1.0, 1.1, 9.0)):  # the median is that of block 1
        for turn in (0, 1):
            for method in ("autoregressive", "eagle3"):
                drafts = None if method == "autoregressive" else [(2, 2), (2, 2), (2, 2)]
                speed = factor if method == "eagle3" else 2.0
                results.append(
                    measured(
                        method, "a", drafts, seconds=(0.0, 0.0, speed, 0.0), turn=turn, block=block
                    )
                )
    row = report_of(results)["summary"]
    assert (row["num_prompts"], row["num_turns"], row["num_output_tokens"]) == (1, 2, 20)
    assert row["num_drafts"] == 6
    assert row["speedup"]["value"] == pytest.approx(2.0 / 1.1)
    assert row["speedup"]["blocks"] == pytest.approx([2.0, 2.0 / 1.1, 2.0 / 9])
    assert row["speedup"]["ci95"] is None


def timed(result: PromptResult, seconds: Sequence[float]) -> PromptResult:
    """The measurement with the seconds of each of its passes, all in verification."""
    drafts = [(drafted, drafted) for _, drafted, _ in result.stats.cycles]
    kinds = drafts or [(0, 0)] * result.stats.num_target_passes
    passes = [(1, *kind, 0.0, s, 0.0) for kind, s in zip(kinds, seconds, strict=True)]
    stats = replace(result.stats, prefill_s=0.1, verify_s=sum(seconds), passes=passes)
    return replace(result, stats=stats)


def passes_of_two_prompts(disturbed: float = 0.1) -> list[PromptResult]:
    """Every pass takes 0.1 s, but one plain step of prompt b, in block 1."""
    return [
        timed(
            replace(result, block={"a": 0, "b": 1}[result.prompt_id]),
            [
                disturbed if (result.method, result.prompt_id, place) == (PLAIN, "b", 3) else 0.1
                for place in range(result.stats.num_target_passes)
            ],
        )
        for result in two_prompts()
    ]


def test_a_pass_counts_at_the_median_of_its_kind():
    """One step of eighteen takes as long as all others together, and nothing moves."""
    quiet, report = report_of(passes_of_two_prompts()), report_of(passes_of_two_prompts(2.0))
    told = report["summary"]["speedup"]
    assert told["value"] == pytest.approx((2 * 0.1 + 18 * 0.1) / (2 * 0.1 + 10 * 0.1))
    assert told == quiet["summary"]["speedup"]
    assert report["summary"]["time_ms"]["verify"] == pytest.approx(100)
    assert report["methods"][PLAIN]["summary"]["time_ms"]["prefill"] == pytest.approx(100)


def test_passes_of_another_kind_or_context_have_their_own_median():
    """Steps of a long context take three times as long; so do those of a larger batch."""
    short, long = measured(PLAIN, "a"), replace(measured(PLAIN, "b"), num_prompt_tokens=500)
    results = [timed(short, [0.1] * 9), timed(long, [0.3] * 9)]
    times = PassTimes(results)
    assert times.seconds(results[0]).verify == pytest.approx(0.9)
    assert times.seconds(results[1]).verify == pytest.approx(2.7)
    batch = replace(timed(short, [0.3] * 9), prompt_id="c")
    batch.stats.passes[:] = [(4, *rest) for _, *rest in batch.stats.passes]
    assert PassTimes([*results, batch]).seconds(batch).verify == pytest.approx(2.7)
    assert PassTimes([*results, batch]).seconds(results[0]).verify == pytest.approx(0.9)


def test_a_decoding_that_took_longer_than_its_passes_usually_do_is_delayed():
    results = passes_of_two_prompts(2.0)
    times = PassTimes(results)
    late = [times.delay(result) for result in results if times.delay(result) > 1.5]
    assert late == [pytest.approx((0.1 + 8 * 0.1 + 2.0) / (0.1 + 9 * 0.1))]


def test_every_block_times_the_passes_of_all_prompts():
    """Blocks hold other prompts: only how long their passes took tells the blocks apart."""
    results = passes_of_two_prompts()
    slow = [
        timed(result, [0.2] * 9) if (result.method, result.block) == (PLAIN, 1) else result
        for result in results
    ]
    report = report_of(slow)
    assert report["timing"]["blocks"] == 2
    assert report["timing"]["repeats"] == 1
    drafted = 2 * 0.1 + 10 * 0.1
    assert report["summary"]["speedup"]["blocks"] == pytest.approx(
        [(2 * 0.1 + 18 * 0.1) / drafted, (2 * 0.1 + 18 * 0.2) / drafted]
    )


def test_interval_of_a_mean_agrees_with_the_closed_form():
    values = np.random.default_rng(1).normal(3.0, 1.0, 200)
    ones = [1.0] * len(values)
    low, high = interval(np.divide, [values.tolist(), ones], RESAMPLING)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


@pytest.mark.parametrize("num_prompts", [5, 10, 80])
def test_interval_covers_the_truth_about_as_often_as_it_says(num_prompts: int):
    """BCa covers 82, 85 and 91 % of such prompts (benchmarks/README.md)."""
    random = np.random.default_rng(2)
    covered = 0
    for _ in range(400):
        drafts = np.maximum(1, random.poisson(20, num_prompts)).astype(float)
        yielded = drafts * (1 + random.exponential(1.0, num_prompts))
        low, high = interval(np.divide, [yielded, drafts], Resampling(500, 0))
        covered += low <= 2.0 <= high
    assert covered >= 0.9 * 400  # 93 %, less two standard errors


def test_rounding_is_not_taken_for_a_standard_error():
    """Resamples of prompts alone that accepted nothing have none; 1e-17 made bounds of millions."""
    drafts, yielded = [30.0, 41.0, 28.0, 35.0, 40.0], [30.0, 41.0, 39.0, 42.0, 40.0]
    low, high = interval(np.divide, [yielded, drafts], RESAMPLING)
    assert 0.9 < low < 192 / 174 < high < 1.3


def test_no_interval_reaches_below_what_its_quantity_can_be():
    """Bootstrap-t of five prompts, one of them easy, goes below the length of no acceptance."""
    drafts, yielded = [20.0] * 5, [22.0, 24.0, 26.0, 24.0, 80.0]
    assert interval(np.divide, [yielded, drafts], RESAMPLING)[0] < 1
    run = {"yielded": yielded, "drafts": drafts}
    assert ACCEPTANCE_LENGTH.mean([run], RESAMPLING).ci95[0] == 1.0
    half = {"yielded": [value / 2 for value in yielded], "drafts": [10.0] * 5}
    assert ACCEPTANCE_LENGTH.mean([run, half], RESAMPLING).ci95[0] == 1.0
    other = {"yielded": [30.0] * 5, "drafts": drafts}
    assert ACCEPTANCE_LENGTH.difference([run], [other], RESAMPLING).ci95[0] < 1 - 1.5


def test_pairing_with_plain_decoding_shrinks_the_interval_of_the_speedup(varied: dict[str, Any]):
    low, high = varied["summary"]["speedup"]["ci95"]
    assert low < 1.6 < high
    totals = collect(many_prompts())

    def speeds(method: str) -> list[list[float]]:
        prompts = totals[method].values()
        return [
            [float(prompt.row.num_output_tokens) for prompt in prompts],
            [prompt.row.seconds.total for prompt in prompts],
        ]

    slow, fast = (
        interval(np.divide, speeds(method), RESAMPLING) for method in ("autoregressive", "eagle3")
    )
    assert high - low < 0.2 * (fast[1] / slow[0] - fast[0] / slow[1])


def test_interval_is_one_point_when_all_prompts_are_alike():
    results = [
        measured(method, prompt_id, drafts)
        for prompt_id in "abcde"
        for method, drafts in (("autoregressive", None), ("eagle3", [(2, 1)] * 5))
    ]
    row = report_of(results)["summary"]
    assert row["acceptance_length"]["ci95"] == pytest.approx([1.8, 1.8])
    assert row["speedup"]["ci95"] == pytest.approx([1.0, 1.0])


def test_beating_ngram_is_decided_by_the_interval_of_the_paired_difference(varied: dict[str, Any]):
    low, high = varied["beats_ngram"]["speedup_difference"]["ci95"]
    assert varied["beats_ngram"]["answer"] == "yes"
    assert 0 < low < 0.5 < high
    swapped = report_of(
        [
            PromptResult(
                **{
                    **vars(r),
                    "method": {"eagle3": "ngram", "ngram": "eagle3"}.get(r.method, r.method),
                }
            )
            for r in many_prompts()
        ]
    )
    assert swapped["beats_ngram"]["answer"] == "no"
    assert "does not beat prompt lookup" in swapped["beats_ngram"]["statement"]
    alone = report_of([r for r in many_prompts() if r.method != "ngram"])
    assert alone["beats_ngram"]["answer"] is None
    assert "not measured" in alone["beats_ngram"]["statement"]


def test_a_handicapped_baseline_is_flagged_and_a_fair_one_is_not(varied: dict[str, Any]):
    assert varied["flags"] == []
    slow = [
        PromptResult(
            **{**vars(r), "stats": DecodeStats(Counters(), Counters(), 9, 0.0, 0.0, 900.0, 0.0)}
        )
        if r.method == "autoregressive"
        else r
        for r in many_prompts()
    ]
    flags = report_of(slow)["flags"]
    assert {flag["kind"] for flag in flags} == {"handicapped_baseline"}
    assert {flag["row"] for flag in flags} >= {"eagle3: all", "eagle3: math", "ngram: coding"}


def test_blocks_that_disagree_are_flagged_and_no_verdict_to_speculate():
    """The whole machine was slow for the plain loop in two blocks of five, not on one prompt."""
    results = [
        replace(result, stats=replace(result.stats, verify_s=2.5 * result.stats.verify_s))
        if result.method == "autoregressive" and result.block in (1, 3, 4)
        else replace(result, stats=replace(result.stats, verify_s=1.7 * result.stats.verify_s))
        if result.method == "eagle3"
        else result
        for result in many_prompts()
    ]
    report = report_of(results)
    blocks = report["summary"]["speedup"]["blocks"]
    assert min(blocks) < 1.05 < 1.15 * min(blocks) < max(blocks)
    (flag,) = (
        f for f in report["flags"] if f["kind"] == "blocks_disagree" and "eagle3" in f["row"]
    )
    assert re.match(r"the timing blocks disagree, \d\.\d\d to \d\.\d\d times as fast", flag["text"])
    assert report["verdicts"]["all"]["decision"] == "marginal"
    assert "but its timing blocks disagree" in report["verdict"]
    slow_once = [
        replace(result, stats=replace(result.stats, verify_s=2.0 * result.stats.verify_s))
        if result.method == "autoregressive" and result.block == 1
        else result
        for result in many_prompts()
    ]
    report = report_of(slow_once)
    assert "blocks_disagree" in {flag["kind"] for flag in report["flags"]}
    assert report["verdicts"]["all"]["decision"] == "speculate", "every block is above 1.05"
    told = "whose timing blocks disagree and are not all above 1.05. unknown:"
    assert told in report["definitions"]["verdicts"]


def test_a_batchs_times_are_told_to_be_a_rows_share(varied: dict[str, Any]):
    report = report_of(two_prompts(), batch_size=8)
    assert "that row's equal share of its time" in report["definitions"]["time_ms"]
    assert "milliseconds per row and target pass" in html(report)
    assert "share of its time" not in varied["definitions"]["time_ms"]
    assert "milliseconds per target pass" in html(varied)
    assert "A draft yields" in html(varied)
    assert "per draft, bonus counted" in html(varied)


@pytest.mark.usefixtures("plain_pictures")
def test_a_busy_machine_is_told_and_is_no_error():
    timing = TimingInfo("float32", 1, 5, "cpu", others_cores=0.8, stolen=0.1, delayed=0.25)
    report = report_of(many_prompts(), timing=timing)
    (flag,) = report["flags"]
    assert flag["text"] == (
        "the machine was busy: other processes used 0.80 cores and the host took 10 % of its time "
        "and 25 % of the decodings were delayed; the times are medians by kind of pass"
    )
    page = html(report)
    assert "other processes used 0.80 cores" in page
    assert "Read with care" not in page
    quiet = TimingInfo("float32", 1, 5, "cpu", others_cores=0.1, stolen=0.0, delayed=0.01)
    assert report_of(many_prompts(), timing=quiet)["flags"] == []


def test_two_prompts_have_no_interval_and_the_pages_say_so(tmp_path: Path):
    report = report_of(two_prompts())
    assert report["summary"]["speedup"]["ci95"] is None
    assert "(too few prompts for an interval)" in report["verdict"]
    assert "1.43 [too few]" in markdown(report)
    page = html(report)
    assert '<span class="range">too few</span>' in page
    assert "too few prompts for an interval; predicted" in page


@pytest.mark.usefixtures("plain_pictures")
def test_every_page_names_the_depth_and_those_it_was_chosen_from(tmp_path: Path):
    settings: dict[str, Any] = {"drafter": "eagle3", "temperature": 0.0, "batch_size": 1}
    points = [
        sweep_point(many_prompts(), Resampling(100, 0), depth=depth, **settings) for depth in (2, 4)
    ]
    report = report_of(many_prompts(), sweep=points, depth=2, of_depths=[2, 4])
    value = report["summary"]["speedup"]["value"]
    assert report["verdict"].startswith(
        f"Speculate at depth 2, the fastest of 2, 4: tiny decodes {value:.2f} times as fast"
    )
    page, text = html(report), markdown(report)
    assert f'Speedup</p><p class="value">{value:.2f}<small>' in page
    assert "depth 2, the fastest of 2, 4" in page
    assert "depth 2, the fastest of 2, 4" in text
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(report))
    assert "depth 2, the fastest of 2, 4" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "chosen on other prompts" in report["definitions"]["verdicts"]
    (again,) = (row for row in evaluation_table(read(report))[1] if row[:2] == ["eagle3", "all"])
    assert again[5] == pytest.approx(value)  # what the tracker gets


def test_the_page_sums_up_the_overlap_of_the_prompts():
    overlap = {"tasks": {"math": {"num_ngrams": 41}}}
    told = {"source": "x", "overlap": overlap, "overlap_statement": "0 of 8 are equal"}
    text = markdown(report_of(many_prompts(), prompts=told))
    assert "- `overlap_statement`: 0 of 8 are equal" in text
    assert "num\\_ngrams" not in text


def test_an_adaptive_depth_is_a_maximum():
    report = report_of(many_prompts(), depth=6, adaptive=True, tree="adaptive chain of at most 6")
    assert report["verdict"].startswith("Speculate up to depth 6: ")


def test_only_a_failed_check_is_red():
    lossy = LosslessCheck("typical", False, "float32", 1, 2, [], "")
    broken = LosslessCheck("greedy", True, "float32", 1, 2, [], "")
    check = Check("one-step distribution", False, 0.5, "1e-6", "0.5 apart", [])
    failed = certified([check], rule="greedy", lossless=True, dtype="float32", num_prompts=2)
    documents = {
        kind: report_document(built(many_prompts(), **changes))
        for kind, changes in {
            "exact": {}, "lossy": {"lossless": lossy}, "broken": {"lossless": broken},
            "failed": {"certificate": failed},
        }.items()
    }  # fmt: skip
    looks = {
        kind: {block.look: block.items for block in found.first if isinstance(block, Listing)}
        for kind, found in documents.items()
    }
    assert not looks["exact"]["wrong"]
    assert not looks["exact"]["flags"]
    assert not looks["lossy"]["wrong"]
    assert looks["lossy"]["flags"]
    assert looks["broken"]["wrong"]
    ((_, told),) = looks["failed"]["wrong"]
    assert told == "NOT certified: one-step distribution failed"
    tiles = {kind: found.tiles[3].mood for kind, found in documents.items()}
    assert tiles == {"exact": "good", "lossy": "fair", "broken": "bad", "failed": "bad"}


@pytest.mark.parametrize(
    ("rule", "lossless", "told"),
    [
        ("greedy match (lossless)", True, "lossless by greedy match"),
        ("chain lenience (a 1; NOT lossless)", False, "NOT lossless: chain lenience (a 1)"),
        ("typical", False, "NOT lossless: typical"),
    ],
)
def test_a_rule_is_called_lossless_once(rule: str, lossless: bool, told: str):
    assert rule_statement(rule, lossless) == told


def test_names_from_outside_stay_text_on_every_page(tmp_path: Path):
    odd = "a|b\n# c\n<script>x</script>\u202e\ud800"
    results = [
        replace(result, task=odd, prompt_id=odd + result.prompt_id) for result in two_prompts()
    ]
    write_files(built(results, target=odd, prompts={"source": odd}, notes=[odd]), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["target"] == odd
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "<script>x" not in text, name
        assert "\u202e" not in text, name
    assert "\n# c" not in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("plain_pictures")
def test_ordinary_ties_of_a_narrow_dtype_are_not_red():
    results = [
        replace(result, tokens=(99, *result.tokens[1:])) if result.method == "eagle3" else result
        for result in many_prompts()
    ]
    report = report_of(results, timing=TimingInfo("bfloat16", 2, 5, "cpu"))
    page = html(report)
    assert "Good to know" in page
    assert "rounding decides between two tokens that are nearly tied" in page
    assert "Read with care" not in page
    lossy = replace(EXACT, lossless=False)
    assert "Read with care" in html(report_of(many_prompts(), lossless=lossy))


def test_one_wide_interval_does_not_squeeze_the_others():
    assert bounds([1.0, 1.2, 1.3], [0.9, 1.4, 40.0]) == pytest.approx((0.9, 1.495))
    assert bounds([1.0, 1.2, 1.3], [1.1, 1.4]) == pytest.approx((1.0, 1.4))


def test_flags_name_what_weakens_a_report():
    results = two_prompts()
    results[2] = PromptResult(**{**vars(results[2]), "tokens": tuple(range(1, 11))})
    at = Divergence("a", 3, 0.5, 1e-5, False)
    lossy = LosslessCheck("typical", False, "bfloat16", 1, 2, [at], "")
    kinds = {flag["kind"] for flag in report_of(results, lossless=lossy)["flags"]}
    assert kinds == {"lossy", "timing", "outputs_differing"}
    sampled = report_of(results, sampling=Sampling(1.0, 0, 1.0))
    assert {flag["kind"] for flag in sampled["flags"]} == {"timing"}
    changed = [
        PromptResult(**{**vars(r), "block": 1, "tokens": r.tokens[::-1]}) for r in two_prompts()
    ]
    flags = report_of(two_prompts() + changed)["flags"]
    assert [flag["row"] for flag in flags if flag["kind"] == "unstable_output"] == [
        "eagle3: all",
        "autoregressive: all",
        "ngram: all",
    ]


def empty_report() -> dict[str, Any]:
    """One prompt that ended at its first token, timed by a clock that stood still."""
    return report_of(
        [
            measured(
                method,
                "a",
                None if method == "autoregressive" else [],
                tokens=(7,),
                seconds=(0.0,) * 4,
            )
            for method in ("autoregressive", "eagle3", "ngram")
        ],
        provenance={"memory": math.inf, "share": math.nan, "path": Path("/x")},
    )


def test_a_report_of_nothing_has_nulls_and_no_nan(tmp_path: Path):
    report = empty_report()
    row = report["summary"]
    assert row["acceptance_length"] == {"micro": None, "macro": None, "ci95": None}
    assert row["acceptance_per_position"] == [None, None]
    assert row["speedup"]["value"] is None
    assert report["provenance"] == {"memory": None, "share": None, "path": "/x"}
    write_report(report, tmp_path)
    assert "NaN" not in (tmp_path / "report.json").read_text()
    Console(file=io.StringIO()).print(summary_table(report))


def test_zero_accepted_tokens_give_length_one_and_no_conditional_beyond():
    results = [
        measured(method, prompt_id, None if method == "autoregressive" else [(2, 0)] * 9)
        for prompt_id in "abcde"
        for method in ("autoregressive", "eagle3")
    ]
    row = report_of(results)["summary"]
    assert row["acceptance_length"]["micro"] == 1
    assert row["acceptance_length"]["ci95"] == [1, 1]
    assert row["conditional_acceptance"] == [0, None]


def test_repeated_tokens_end_a_run_of_four_seen_before():
    assert sum(repeats((1, 2, 3, 4, 5, 6))) == 0
    assert sum(repeats((1, 2, 3, 4, 1, 2, 3, 4, 1))) == 2
    assert sum(repeats((5,) * 10)) == 6
    assert sum(repeats((1, 2))) == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda results: results[:2], "the drafter of a report must be one of"),
        (lambda results: results[2:], "must have results of method 'autoregressive'"),
        (
            lambda results: results[:3],
            "eagle3 differs in 1 of them, such as turn 0 of 'b' in block 0",
        ),
        (
            lambda results: [*results, results[0]],
            "turn 0 of 'a' by autoregressive twice in block 0",
        ),
    ],
)
def test_results_that_cannot_be_paired_are_refused(spoil: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        report_of(spoil(two_prompts()))


def test_a_wrong_number_of_blocks_is_refused():
    with pytest.raises(ValueError, match=r"timing.blocks must be .*got 5 where the results have 1"):
        report_of(two_prompts(), timing=TimingInfo("float32", 2, 5, "cpu"))


def test_every_key_of_a_row_is_defined(varied: dict[str, Any]):
    defined = set(varied["definitions"])
    assert set(varied["summary"]) <= defined
    assert set(varied["methods"]["autoregressive"]["summary"]) <= defined
    assert {"ci95", "lossless", "beats_ngram", "flags", "timing"} <= defined


def numbers_in(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in numbers_in(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in numbers_in(value)]
    if isinstance(tree, str):
        return [float(text) for text in re.findall(r"\d+\.?\d*", tree)]
    return [float(tree)] if isinstance(tree, int | float) else []


@pytest.mark.usefixtures("plain_pictures")
def test_every_number_in_the_tables_is_one_of_the_json(varied: dict[str, Any], tmp_path: Path):
    write_report(varied, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    known = numbers_in(report)
    written = {f"{number:.{digits}f}" for number in known for digits in (0, 1, 2)}
    written |= {f"{100 * number:.0f}" for number in known}
    shown = [
        number
        for line in (tmp_path / "report.md").read_text().splitlines()
        if line.startswith("|")
        for number in re.findall(r"\d*\.\d+|\d+", line.replace(",", "").replace("95 %", ""))
    ]
    assert len(shown) > 100
    assert {number if number[0] != "." else f"0{number}" for number in shown} <= written


def nasty_report() -> dict[str, Any]:
    nasty = '<script>alert("x")</script>|`*'
    results = [
        PromptResult(**{**vars(r), "task": nasty, "prompt_id": nasty + r.prompt_id})
        for r in many_prompts(prompts=4)
    ]
    return report_of(
        results,
        target=nasty,
        notes=[nasty],
        prompts={nasty: nasty},
        provenance={"command": nasty},
        lossless=LosslessCheck(
            nasty, True, nasty, 1, 2, [Divergence(nasty, 3, 0.5, 1e-5, False)], ""
        ),
    )


def test_the_page_escapes_all_text_and_loads_nothing(tmp_path: Path):
    write_report(nasty_report(), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    elsewhere = r"""(src|srcset|action)\s*=|href\s*=\s*"(?!#)|@import|url\((?!#)|https?://"""
    assert not re.search(elsewhere, page)
    assert page.count("<svg") == 4
    markdown = (tmp_path / "report.md").read_text()
    assert "<" not in markdown
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {4, 8, 10, 14}


@pytest.fixture(scope="module")
def pictures(varied: dict[str, Any]) -> dict[str, ElementTree.Element]:
    """The plots of one page, by their title."""
    texts = re.findall(r"<svg.*?</svg>", html(varied), re.S)
    roots = [ElementTree.fromstring(text) for text in texts]
    return {root.attrib["aria-label"]: root for root in roots}


def boxes(picture: ElementTree.Element, colour: str) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of what is filled with a colour, the legend's square left out."""
    legend = {path for group in picture.iter("g") if "legend" in group.get("id", "")
              for path in group.iter("path")}  # fmt: skip
    found = []
    for path in picture.iter("path"):
        if f"fill: var(--{colour})" in path.get("style", "") and path not in legend:
            points = np.array(re.findall(r"[-\d.]+", path.attrib["d"]), dtype=float).reshape(-1, 2)
            found.append((*points.min(0), *np.ptp(points, axis=0)))
    return found


def test_bars_are_as_long_as_their_numbers(
    pictures: dict[str, ElementTree.Element], varied: dict[str, Any]
):
    heights = [height for *_, height in boxes(pictures["Acceptance by position"], "drafter")]
    rates = varied["summary"]["acceptance_per_position"]
    assert len(heights) == 2
    assert heights[1] / heights[0] == pytest.approx(rates[1] / rates[0], rel=1e-3)

    cycles = [varied["methods"]["autoregressive"]["summary"], varied["summary"]]
    cycles.append(varied["methods"]["ngram"]["summary"])
    stages = [
        boxes(pictures["Where a cycle's time goes"], colour)
        for colour in ("drafter", "verify", "rest")
    ]
    times = [[row["time_ms"][stage] for stage in ("draft", "verify", "other")] for row in cycles]
    widths = np.array([[width for _, _, width, _ in stage] for stage in stages]).T
    assert widths / widths.sum() == pytest.approx(np.array(times) / np.sum(times), rel=1e-3)
    for (left, _, width, _), (following, *_) in zip(stages[0], stages[1], strict=True):
        assert following == pytest.approx(left + width, abs=0.01)  # stacked


def test_plots_name_every_row_and_write_its_numbers(
    pictures: dict[str, ElementTree.Element], varied: dict[str, Any]
):
    def texts(name: str) -> set[str | None]:
        return {text.text for text in pictures[name].iter("text")}

    rows = {"all": varied["summary"], **varied["tasks"]}
    assert texts("Speedup by task") >= {*rows, "eagle3", "ngram", "predicted"}
    assert texts("Speedup by task") >= {estimate(row["speedup"]) for row in rows.values()}
    assert texts("Tokens per second") >= {*rows, "plain decoding", "eagle3", "ngram"}
    assert texts("Tokens per second") >= {
        speed(value) for row in rows.values() for value in row["tokens_per_second"].values()
    }
    assert texts("Acceptance by position") >= {
        f"{100 * rate:.0f}"
        for key in ("acceptance_per_position", "conditional_acceptance")
        for rate in varied["summary"][key]
    }
    assert texts("Where a cycle's time goes") >= {
        "plain step",
        "eagle3 cycle",
        "ngram cycle",
        "draft",
        "verify",
    }


def test_plots_keep_their_ids_apart_and_take_their_colours_from_the_page(varied: dict[str, Any]):
    page = html(varied)
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"""(?:url\(|href=")#([^)"]*)""", page)) <= set(ids)
    plots = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    used, defined = re.findall(r"var\((--[\w-]+)\)", plots), re.findall(r"(--[\w-]+):", page)
    assert {"--drafter", "--other", "--ink"} <= set(used) <= set(defined)
    assert not re.search(r"(fill|stroke): *#|<style|metadata", plots)


def test_plots_are_the_same_whatever_the_settings_of_matplotlib(varied: dict[str, Any]):
    page = html(varied)
    with matplotlib.rc_context({"xtick.labelsize": 30, "svg.fonttype": "path", "font.size": 30}):
        assert html(varied) == page
        assert matplotlib.rcParams["font.size"] == 30


def test_plots_as_pixels_have_the_pages_light_colours(varied: dict[str, Any]):
    pixels = report_figures(read(varied))[0].pixels()
    assert pixels.shape[1:] == (2 * 440, 3)
    colours = {tuple(colour) for colour in pixels.reshape(-1, 3).tolist()}
    drafter = tuple(bytes.fromhex("2563c9"))
    assert {drafter, (255, 255, 255)} <= colours


def test_plots_take_names_in_any_script_and_any_method_alone():
    name = "_$x_{1}$ \N{CJK UNIFIED IDEOGRAPH-6570}\x00\ud800--"
    results = [
        PromptResult(**{**vars(result), "task": name})
        for result in two_prompts()
        if result.method != "ngram"
    ]
    page = report_html(built(results, depth=40))
    assert page.count("_$x_{1}$ \N{CJK UNIFIED IDEOGRAPH-6570} --</text>") == 2


def test_what_was_not_measured_is_not_drawn():
    assert "<svg" not in html(empty_report())
    untimed = [
        PromptResult(
            **{**vars(r), "stats": replace(r.stats, prefill_s=0.0, draft_s=0.0, verify_s=0.0)}
        )
        for r in two_prompts()
    ]
    assert html(report_of(untimed)).count("<svg") == 2


@pytest.mark.slow
def test_matplotlib_is_imported_only_when_a_report_is_written():
    program = "import sys, drafttrain.report; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_intervals_say_how_many_resamples_they_are_of(varied: dict[str, Any]):
    assert varied["definitions"]["ci95"].endswith("Resamples: 2,000.")
    fewer = report_of(two_prompts(), resamples=300)
    assert fewer["definitions"]["ci95"].endswith("Resamples: 300.")
    prompts = many_prompts(prompts=8, blocks=1)
    few = {report_of(prompts, resamples=n)["summary"]["speedup"]["ci95"][0] for n in (99, 200)}
    assert len(few) == 2  # the number is used, not only told


def test_writing_leaves_three_files_and_replaces_old_ones(tmp_path: Path):
    folder = tmp_path / "evaluations" / "last"
    write_report(empty_report(), folder)
    write_report(report_of(two_prompts()), folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
    ]
    assert json.loads((folder / "report.json").read_text())["summary"]["num_prompts"] == 2


def test_the_same_measurements_give_the_same_report(varied: dict[str, Any]):
    assert report_of(many_prompts()) == varied


def test_the_terminal_table_fits_80_columns_and_has_every_row():
    for depth in (8, 4):
        output = io.StringIO()
        Console(file=output, width=80).print(summary_table(report_of(many_prompts(), depth=depth)))
        text = output.getvalue()
        assert max(map(len, text.splitlines())) <= 80
    assert re.search(
        r"^ math .* \.\d\d \.\d\d \.00 \.00 .* 1\.\d\d \[1\.\d\d, 1\.\d\d\]", text, re.M
    )
    for words in (
        "math",
        "coding",
        "all, eagle3",
        "all, ngram",
        "Lossless by greedy; 2 of 2",
    ):
        assert words in text
    assert "2 of 2 greedy outputs identical" in " ".join(text.split())


def of_an_ensemble() -> list[PromptResult]:
    """eagle3's results of `two_prompts` as those of an ensemble of it and prompt lookup."""
    parts = {
        "a": {"ngram": Counters(2, 4, 4), "eagle3": Counters(2, 4, 2)},
        "b": {"eagle3": Counters(6, 12, 3)},
    }
    return [
        replace(
            result,
            method="ensemble",
            stats=replace(result.stats, by_member=parts[result.prompt_id]),
        )
        if result.method == "eagle3"
        else result
        for result in two_prompts()
    ]


def test_a_report_keeps_the_members_of_an_ensemble_apart():
    report = report_of(of_an_ensemble(), drafter="ensemble")
    assert report["summary"]["by_member"] == {
        "eagle3": {
            "num_drafts": 8,
            "num_draft_tokens": 16,
            "num_accepted_tokens": 5,
            "acceptance_rate": 5 / 16,
        },
        "ngram": {
            "num_drafts": 2,
            "num_draft_tokens": 4,
            "num_accepted_tokens": 4,
            "acceptance_rate": 1.0,
        },
    }
    assert report["tasks"]["math"]["by_member"] == report["summary"]["by_member"]
    assert report["methods"]["ngram"]["summary"]["by_member"] == {}
    terminal = "\n".join(summary_of(read(report)).notes)
    assert "eagle3: in 8 drafts, 5 of 16 tokens accepted (31 %)." in terminal
    assert "ngram: in 2 drafts, 4 of 4 tokens accepted (100 %)." in terminal
    for page in (markdown(report), html(report)):
        assert "ensemble: by member" in page
        assert "all, ngram" in page
        assert "prompt lookup comes last" in page
    assert "by member" not in markdown(report_of(two_prompts()))


def test_passes_of_one_shape_that_others_drafted_have_their_own_median():
    """Of two cycles of one shape prompt lookup drafted the first, at no cost."""
    timed_by = {"ngram": 0.0, "eagle3": 0.5}
    results = []
    for name, other in (("a", "b"), ("b", "a")):
        result = measured("ensemble", name, [(2, 2), (2, 2)], tokens=tuple(range(7)))
        drafters = ["ngram"] * 2 if name < other else ["eagle3"] * 2
        passes = [(1, 2, 2, timed_by[who], 0.1, 0.0) for who in drafters]
        stats = replace(result.stats, passes=passes, drafters=drafters)
        results += [replace(result, stats=stats)] * 5
    times = PassTimes(results)
    assert times.seconds(results[0]).draft == pytest.approx(0.0)
    assert times.seconds(results[-1]).draft == pytest.approx(1.0)
    unknown = [replace(one, stats=replace(one.stats, drafters=[])) for one in results]
    assert (
        PassTimes(unknown).seconds(unknown[0]).draft
        == PassTimes(unknown).seconds(unknown[-1]).draft
    )
