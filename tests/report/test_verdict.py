"""The verdict: decisions by the interval, money and memory by hand; repetition; beside ngram."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_report import (
    html,
    many_prompts,
    markdown,
    measured,
    read,
    report_of,
    summary_table,
    two_prompts,
)

from drafttrain.core.types import PromptResult
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.config import VerdictSettings
from drafttrain.report.metrics import PER_DRAFT
from drafttrain.report.results import (
    Change,
    Estimate,
    ExtraMemory,
    LosslessCheck,
    OutsideCounts,
    Point,
)
from drafttrain.report.tables import sweep_table
from drafttrain.report.totals import collect, outside_repetition, repeats
from drafttrain.report.verdict import decide

PRICED = VerdictSettings(1.05, 3.6, "EUR")  # a thousandth per second
MEMORY = ExtraMemory(weight_bytes=3 * 2**20, kv_bytes_per_token=1024)


@pytest.mark.parametrize(
    ("value", "ci95", "decision"),
    [
        (1.6, [1.5, 1.7], "speculate"),
        (1.06, [1.051, 1.07], "speculate"),
        (1.06, [1.05, 1.07], "marginal"),
        (1.04, [1.03, 1.045], "marginal"),
        (1.6, [0.9, 2.5], "marginal"),
        (1.6, None, "marginal"),
        (1.0, [0.8, 1.3], "do not"),
        (0.9, [0.85, 0.95], "do not"),
        (0.9, None, "unknown"),
        (None, None, "unknown"),
    ],
)
def test_the_decision_follows_the_interval(
    value: float | None, ci95: list[float] | None, decision: str
) -> None:
    assert decide(Estimate(value, ci95), 1.05) == decision


def tasks_of_every_kind() -> list[PromptResult]:
    """Three tasks: one gains, one gains a little or nothing, one loses."""
    random = np.random.default_rng(3)
    results = []
    for task, gain, noise in (("gains", 1.6, 0.02), ("unsure", 1.06, 0.1), ("loses", 0.8, 0.02)):
        for index in range(12):
            seconds = 1 / float(random.normal(gain, noise))
            name = f"{task} {index}"
            results += [
                measured("autoregressive", name, task=task, seconds=(0.0, 0.0, 1.0, 0.0)),
                measured("eagle3", name, [(2, 1)] * 5, task=task, seconds=(0.0, 0.0, seconds, 0.0)),
                measured("ngram", name, [(2, 0)] * 9, task=task),
            ]
    return results


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    return report_of(tasks_of_every_kind(), verdict=PRICED, memory=MEMORY)


def test_every_task_has_a_verdict_and_the_headline_is_that_of_all(judged: dict[str, Any]) -> None:
    decisions = {name: verdict["decision"] for name, verdict in judged["verdicts"].items()}
    assert decisions["gains"] == "speculate"
    assert decisions["unsure"] == "marginal"
    assert decisions["loses"] == "do not"
    assert set(decisions) == {"all", "gains", "unsure", "loses"}
    opening = {"speculate": "Speculate", "marginal": "Marginal", "do not": "Do not speculate"}
    for name, verdict in judged["verdicts"].items():
        row = judged["summary"] if name == "all" else judged["tasks"][name]
        assert verdict["speedup"] == {key: row["speedup"][key] for key in ("value", "ci95")}
        assert verdict["acceptance_rate"] == row["acceptance_rate"]
        assert verdict["statement"].startswith(f"{opening[verdict['decision']]} at depth 2: ")
    assert judged["verdict"].startswith(f"{opening[decisions['all']]} at depth 2: tiny decodes ")
    assert "above 1.05" in judged["definitions"]["verdicts"]
    stricter = report_of(tasks_of_every_kind(), verdict=VerdictSettings(1.7, None, "EUR"))
    assert stricter["verdicts"]["gains"]["decision"] == "marginal"
    assert "above 1.7" in stricter["definitions"]["verdicts"]


def test_money_is_the_price_of_the_tokens_by_hand() -> None:
    report = report_of(two_prompts(), verdict=PRICED, memory=MEMORY)
    verdict = report["verdicts"]["math"]
    cost = verdict["money"]
    # Plain: 20 tokens in 2.0 s; drafted: in 1.4 s; 0.001 EUR a second.
    assert cost["per_million_tokens"]["autoregressive"] == pytest.approx(1e6 * 0.001 * 2.0 / 20)
    assert cost["per_million_tokens"]["speculative"] == pytest.approx(1e6 * 0.001 * 1.4 / 20)
    assert cost["saving"]["value"] == pytest.approx(0.3)
    assert cost["saving"]["ci95"] is None, "of two prompts"
    many = report_of(many_prompts(), verdict=PRICED)["verdicts"]["math"]
    low, high = many["speedup"]["ci95"]
    assert many["money"]["saving"]["ci95"] == pytest.approx([1 - 1 / low, 1 - 1 / high])
    assert (
        "EUR 70.00 instead of 100.00 per million output tokens (30 % less)"
        in (verdict["statement"])
    )
    free = report_of(two_prompts())["verdicts"]["all"]
    assert free["money"] is None
    assert "EUR" not in free["statement"]


def test_a_loss_costs_more(judged: dict[str, Any]) -> None:
    verdict = judged["verdicts"]["loses"]
    assert verdict["money"]["saving"]["value"] < -0.2
    assert re.search(r"\(2\d % more\)", verdict["statement"])


def test_memory_is_weights_and_the_cache_of_the_longest_turn() -> None:
    results = two_prompts()
    results += [measured("autoregressive", "long", task="story", tokens=tuple(range(40)))]
    for method in ("eagle3", "ngram"):
        results.append(
            measured(method, "long", [(2, 2)] * 13, task="story", tokens=tuple(range(40)))
        )
    for method, drafts in (("autoregressive", None), ("eagle3", [(2, 0)]), ("ngram", [(2, 0)])):
        results.append(measured(method, "long", drafts, task="story", tokens=(1, 2), turn=1))
    verdicts = report_of(results, memory=MEMORY)["verdicts"]
    assert verdicts["math"]["extra_memory"] == {
        "weight_bytes": 3 * 2**20,
        "kv_bytes_per_token": 1024,
        "num_positions": 15,  # a prompt of 5 and 10 new tokens
        "batch_size": 1,
        "kv_bytes": 15 * 1024,
        "total_bytes": 3 * 2**20 + 15 * 1024,
    }
    assert verdicts["story"]["extra_memory"]["num_positions"] == 45
    assert verdicts["all"]["extra_memory"]["num_positions"] == 45
    assert MEMORY.at(10, 4).kv_bytes == 4 * 10 * 1024
    assert report_of(two_prompts())["verdicts"]["all"]["extra_memory"] is None


def test_a_handicapped_plain_loop_earns_no_verdict_to_speculate() -> None:
    slow = [
        PromptResult(
            **{**vars(r), "stats": measured("x", "x", seconds=(0.0, 0.0, 900.0, 0.0)).stats}
        )
        if r.method == "autoregressive"
        else r
        for r in tasks_of_every_kind()
    ]
    verdict = report_of(slow)["verdicts"]["all"]
    assert verdict["flagged"]
    assert verdict["decision"] == "marginal"
    assert "handicapped" in verdict["statement"]


def test_few_prompts_advise_against_nothing() -> None:
    results = [
        replace(r, stats=replace(r.stats, verify_s=9.0)) if r.method == "eagle3" else r
        for r in two_prompts()
    ]
    report = report_of(results)
    assert report["verdict"].startswith("Undecided at depth 2: tiny decodes 0.1")
    assert "(too few prompts for an interval)" in report["verdict"]


def test_a_lossy_rule_stands_in_the_headline() -> None:
    lossy = LosslessCheck("typical", False, "float32", 0, 0, [], "")
    for prompts in (many_prompts(), two_prompts()):  # with an interval, and without
        said = report_of(prompts, lossless=lossy)["verdict"]
        assert "by a rule that changes what it writes" in said


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.9, None, "USD"), r"eval\.marginal_speedup must be in \[1, 10\], got 0\.9"),
        ((float("nan"), None, "USD"), r"eval\.marginal_speedup"),
        ((1.05, 0.0, "USD"), r"eval\.price_per_hour must be above 0, or null, got 0\.0"),
        ((1.05, float("inf"), "USD"), r"eval\.price_per_hour must be above 0"),
    ],
)
def test_absurd_settings_are_refused(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerdictSettings(*values)


def test_every_page_shows_the_verdicts(judged: dict[str, Any]) -> None:
    page, text = html(judged), markdown(judged)
    for name, kind in (("gains", "speculate"), ("unsure", "marginal"), ("loses", "do-not")):
        words = kind.replace("-", " ")
        assert re.search(
            rf'>{name}</td><td data-label="verdict"><span class="badge {kind}">{words}<',
            page,
        )
        assert re.search(rf"^\| {name} \| {words} \| 2 \|", text, re.M)
    assert page.index("badge speculate") < page.index("<svg")  # at the top
    assert text.index("## Verdict") < text.index("## eagle3, task by task")
    cost = judged["verdicts"]["gains"]["money"]["per_million_tokens"]["speculative"]
    assert f"{cost:.2f}" in page
    assert f"| {cost:.2f} |" in text
    assert text.count("3.0 MiB") == 5
    unpriced = report_of(tasks_of_every_kind())
    assert "per million" not in markdown(unpriced).split("## Definitions")[0]
    output = io.StringIO()
    Console(file=output, width=80).print(summary_table(judged))
    terminal = " ".join(output.getvalue().split())
    assert max(map(len, output.getvalue().splitlines())) <= 80
    assert "Speculate: gains. Marginal: unsure. Do not speculate: loses." in terminal
    assert "per million output tokens" in terminal
    assert "3.0 MiB more memory." in terminal


def test_what_was_not_measured_has_no_verdict() -> None:
    results = [
        measured(method, "a", None if method == "autoregressive" else [], tokens=(7,),
                 seconds=(0.0,) * 4)
        for method in ("autoregressive", "eagle3")
    ]  # fmt: skip
    report = report_of(results, verdict=PRICED, memory=MEMORY)
    assert report["verdicts"]["all"]["decision"] == "unknown"
    assert report["verdicts"]["all"]["money"] is None
    assert "unknown" in html(report)
    assert "unknown" in markdown(report)


def swept(depth: int, temperature: float, batch_size: int, speedups: dict[str, float]) -> Point:
    """A point of a sweep with these speedups, otherwise like the report of three tasks."""
    report = read(report_of(tasks_of_every_kind()))
    rows = {"all": report.summary, **report.tasks}
    for name, value in speedups.items():
        speedup = replace(rows[name].speedup, value=value, ci95=[value, value], blocks=[])
        rows[name] = replace(rows[name], speedup=speedup)
    return Point(depth, temperature, batch_size, rows.pop("all"), rows, None)


def test_a_sweep_says_at_which_batch_sizes_speculation_pays() -> None:
    points = [swept(2, 0.0, size, {"all": value}) for size, value in ((1, 1.5), (2, 1.2), (4, 0.9))]
    notes = sweep_table(points, {0.0: "greedy"}).notes
    said = [re.findall(r"batch (\d+): .* where speculation ([\w ]+);", note)[0] for note in notes]
    assert said == [("1", "pays"), ("2", "pays"), ("4", "may not pay")]


LOOP = (1, 2, 3, 4, 9, 1, 2, 3, 4, 5, 6)  # position 8 ends 1 2 3 4 a second time


def test_repetition_is_marked_where_it_stands() -> None:
    assert [place for place, flag in enumerate(repeats(LOOP)) if flag] == [8]
    assert repeats((1, 2)) == [False, False]
    assert repeats(()) == []
    assert repeats((5,) * 6) == [False] * 4 + [True] * 2
    random = np.random.default_rng(4)
    for length in range(12):
        tokens = random.integers(0, 2, length).tolist()
        assert len(repeats(tokens)) == length


def test_drafts_that_begin_in_repetition_are_left_out() -> None:
    # Cycles: (1..3) two accepted, (4) none, (5..7) two accepted, (8) begins in repetition, (9..).
    cycles = [(1, 2, 2), (4, 2, 0), (5, 2, 2), (8, 2, 0), (9, 2, 1)]
    assert outside_repetition(LOOP, cycles) == OutsideCounts(4, 4, 8, 5)
    # A pass without drafted tokens is no draft, wherever it stands.
    assert outside_repetition(LOOP, [(1, 0, 0), (8, 0, 0)]) == OutsideCounts(1, 0, 0, 0)


def looping(method: str, name: str, drafts: list[tuple[int, int]] | None) -> PromptResult:
    """Twenty tokens, of which the last twelve go round in a loop of four (5 .. 8)."""
    return measured(method, name, drafts, tokens=(0, 1, 2, 3, *(5, 6, 7, 8) * 4))


def looping_results() -> list[PromptResult]:
    """eagle3 accepts 1 of 2 everywhere, ngram all in the loop and nothing before."""
    results = []
    for name in "abcde":
        results += [
            looping("autoregressive", name, None),
            looping("eagle3", name, [(2, 1)] * 9 + [(1, 1)]),  # positions 1, 3, .. 17, 19
            looping("ngram", name, [(2, 0)] * 7 + [(2, 2)] * 4),  # positions 1 .. 7, 8, 11, 14, 17
        ]
    return results


def test_acceptance_outside_repetition_is_that_of_the_drafts_before_the_loop() -> None:
    report = report_of(looping_results())
    row, ngram = report["summary"], report["methods"]["ngram"]["summary"]
    # Positions 8 to 10 cannot end a run of four that stood before; 11 to 19 do.
    assert row["repetition_rate"] == pytest.approx(9 / 20)
    mine, theirs = row["outside_repetition"], ngram["outside_repetition"]
    assert mine["num_drafts"] == 5 * 5  # at 1, 3, 5, 7, 9
    assert mine["acceptance_length"] == pytest.approx(2.0)
    assert row["acceptance_length"]["micro"] == pytest.approx(19 / 10)  # the last draft is cut
    assert mine["acceptance_rate"] == pytest.approx(0.5)
    assert mine["share_of_drafts"] == pytest.approx(5 / 10)
    assert mine["ci95"] == pytest.approx([2.0, 2.0])
    assert (theirs["num_drafts"], theirs["num_accepted_tokens"]) == (5 * 8, 5 * 2)
    beside = row["acceptance_length_difference_to_ngram"]
    assert beside["all_text"]["value"] == pytest.approx(19 / 10 - 19 / 11)
    assert beside["outside_repetition"]["value"] == pytest.approx(2.0 - (1 + 2 / 8))
    assert beside["outside_repetition"]["ci95"] == pytest.approx([0.75, 0.75])
    none = {"value": None, "ci95": None}
    assert row["tokens_per_pass_difference_to_ngram"] == beside  # here every pass had a draft
    assert ngram["acceptance_length_difference_to_ngram"] == {
        "all_text": none, "outside_repetition": none
    }  # fmt: skip
    raw = {(row["method"], row["prompt_id"]): row for row in report["measurements"]}
    assert raw["eagle3", "a"]["outside_repetition"] == {
        "num_target_passes": 5, "num_drafts": 5, "num_draft_tokens": 10, "num_accepted_tokens": 5,
        "num_cut_drafts": 0,
    }  # fmt: skip
    assert raw["eagle3", "a"]["num_repeated_tokens"] == 9


def length_difference(
    mine: list[tuple[int, int]], theirs: list[tuple[int, int]], resampling: Resampling
) -> Change:
    """The difference of two methods whose prompts have these tokens and drafts."""
    one, two = (
        [{"yielded": [float(one) for one, _ in pairs], "drafts": [float(of) for _, of in pairs]}]
        for pairs in (mine, theirs)
    )
    return PER_DRAFT.difference(one, two, resampling)


def test_differences_to_ngram_are_paired_and_of_every_task() -> None:
    report = report_of(many_prompts())
    ngram = report["methods"]["ngram"]
    for row, theirs in zip(
        (report["summary"], *report["tasks"].values()),
        (ngram["summary"], *ngram["tasks"].values()),
        strict=True,
    ):
        beside = row["acceptance_length_difference_to_ngram"]["all_text"]
        low, high = beside["ci95"]
        assert low < beside["value"] < high
        length, other = (each["acceptance_length"]["micro"] for each in (row, theirs))
        assert beside["value"] == pytest.approx(length - other)
    # Two methods that rise and fall together, prompt by prompt, differ by less than each varies.
    random = np.random.default_rng(5)
    easy = [int(count) for count in random.integers(0, 80, 40)]
    ones, others = [(count + 10, 100) for count in easy], [(count, 100) for count in easy]
    paired = length_difference(ones, others, Resampling(2000, 0))
    shuffled = length_difference(ones, others[1:] + others[:1], Resampling(2000, 0))
    assert paired.value == pytest.approx(0.1)
    assert paired.ci95 == pytest.approx([0.1, 0.1])
    assert shuffled.ci95[1] - shuffled.ci95[0] > 0.1


def test_a_pass_without_a_proposal_counts_for_tokens_per_pass_alone() -> None:
    """eagle3 accepts 1 of 2 in each of 5 passes; ngram 2 of 2 in two of its 6."""
    results = []
    for name in "ab":
        results += [measured("autoregressive", name), measured("eagle3", name, [(2, 1)] * 5)]
        ngram = measured("ngram", name, [(2, 2)] * 2)
        ngram.stats.num_target_passes = 6
        ngram.stats.cycles[:] = [(1, 2, 2), (4, 0, 0), (5, 2, 2), *((8, 0, 0),) * 3]
        results.append(ngram)
    row = report_of(results)["summary"]
    lengths, per_pass = (
        row[f"{what}_difference_to_ngram"] for what in ("acceptance_length", "tokens_per_pass")
    )
    for where in ("all_text", "outside_repetition"):
        assert lengths[where]["value"] == pytest.approx(9 / 5 - 3)  # the fifth draft is cut
        assert per_pass[where]["value"] == pytest.approx(9 / 5 - 10 / 6)


def test_prompts_on_which_one_method_drafts_nothing_still_give_an_interval() -> None:
    ones, nothing = [(9, 3)] * 6, (0, 0)
    rarely = [(3, 1), *[nothing] * 5]  # a third of the resamples have no draft
    difference = length_difference(ones, rarely, Resampling(2000, 0))
    assert difference.value == 0
    low, high = difference.ci95
    assert low <= 0 <= high
    never = length_difference(ones, [nothing] * 6, Resampling(500, 0))
    assert never == Change(2.0, [2.0, 2.0])
    assert length_difference([nothing], [nothing], Resampling(99, 0)).value is None


def test_cycles_that_were_not_recorded_leave_a_gap_and_no_zero() -> None:
    results = looping_results()
    for result in results:
        if result.method == "eagle3":
            result.stats.cycles.clear()
    report = report_of(results)
    outside = report["summary"]["outside_repetition"]
    assert set(outside.values()) == {None}
    assert report["summary"]["acceptance_length_difference_to_ngram"]["all_text"]["value"]
    gap = report["summary"]["acceptance_length_difference_to_ngram"]["outside_repetition"]
    assert gap == {"value": None, "ci95": None}
    assert "outside repetition" in markdown(report)
    assert "outside repetition" in html(report)
    json.dumps(report, allow_nan=False)


def test_cycles_that_are_not_those_of_the_counters_are_noticed() -> None:
    results = looping_results()
    results[1].stats.cycles.pop()
    with pytest.raises(AssertionError, match="cycles are those of the trimmed counters"):
        collect(results)


def test_the_pages_give_acceptance_outside_repetition(tmp_path: Path) -> None:
    report = report_of(looping_results())
    text, page = markdown(report), html(report)
    section = text.split("outside repetition, and beside prompt lookup")[1].split("##")[0]
    assert (
        "| all | 45 % | 2.00 [2.00, 2.00] | 0.50 | 50 % | +0.17 [+0.17, +0.17] | +0.75" in section
    )
    assert "+0.75 [+0.75, +0.75]" in section
    assert '>+0.75 <span class="range">+0.75, +0.75</span></td>' in page


def test_where_free_drafts_would_gain_nothing_the_verdict_is_not_to_speculate() -> None:
    results = [
        measured(method, f"prompt {number}", drafts, seconds=(0.1, 0.0, seconds, 0.0))
        for number in range(12)
        for method, drafts, seconds in (
            ("autoregressive", None, 0.9),
            ("eagle3", [(1, 0)] * 9, 0.87),
        )
    ]
    verdict = report_of(results)["verdicts"]["all"]
    assert verdict["speedup"]["value"] > 1
    assert verdict["decision"] == "do not"
