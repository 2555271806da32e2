"""How long one waits for an answer, by its length; and the length from which speculation pays."""

from dataclasses import replace
from typing import Any

import pytest
from test_report import built, measured, report_of, summary_table, two_prompts

from drafttrain.core.types import PromptResult
from drafttrain.report.pages import report_document
from drafttrain.report.tables import answers_table, texts
from drafttrain.report.tables import summary_table as table_of
from drafttrain.report.totals import PassTimes


def answers(lengths: list[int]) -> list[PromptResult]:
    """Plain: 0.1 s to the first token, 0.1 s for each further one. Drafted: in half that time."""
    results = []
    for place, length in enumerate(lengths):
        about: dict[str, Any] = {"tokens": tuple(range(length))}
        plain = (0.1, 0.0, 0.1 * (length - 1), 0.0)
        half = (0.2, 0.0, 0.05 * (length - 1), 0.0)
        results.append(measured("autoregressive", str(place), seconds=plain, **about))
        results.append(measured("eagle3", str(place), [], seconds=half, **about))
    return results


def test_answers_are_timed_in_all_and_by_length() -> None:
    found = built(answers([2, 16, 17, 32, 40])).answer_times
    assert [(row.most_tokens, row.num_answers) for row in found] == [
        *((0, 5), (16, 2), (32, 2), (64, 1)),
    ]
    every, short, _, longest = found
    assert every.plain.seconds == pytest.approx([1.7, 3.2 + 0.8 * 0.8])
    assert every.plain.first_token_ms == pytest.approx([100, 100])
    assert every.drafted.first_token_ms == pytest.approx([200, 200])
    assert longest.drafted.seconds == pytest.approx([0.2 + 0.05 * 39] * 2)
    assert short.speedup.value == pytest.approx((0.2 + 1.6) / (0.25 + 0.95))
    assert longest.speedup.value == pytest.approx(4 / 2.15)
    table = answers_table(found)
    assert texts(table)[3][:4] == ["64", "1", "4.00 / 4.00", "2.15 / 2.15"]
    document = report_document(built(answers([2, 16])))
    assert "Seconds per answer" in [getattr(block, "title", "") for block in document.rest]


def test_the_speedup_of_all_answers_is_the_summarys_with_its_interval() -> None:
    report = built(answers([40, 2, 17, 16, 32]))
    assert report.summary.speedup.ci95
    assert report.answer_times[0].speedup == report.summary.speedup.estimate


def test_an_answer_of_a_batch_waits_for_the_whole_of_its_passes() -> None:
    """Two rows share a prefill of 0.4 s and a pass of 0.2 s, and each is charged its half."""
    one = measured("autoregressive", "a", tokens=(1, 2), seconds=(0.2, 0.0, 0.1, 0.0))
    one = replace(one, stats=replace(one.stats, passes=[(2, 0, 0, 0.0, 0.1, 0.0)]))
    assert PassTimes([one]).waits(one) == pytest.approx((0.4, 0.6))
    assert PassTimes([one]).seconds(one).total == pytest.approx(0.3)


def test_a_verdict_shows_the_acceptance_length_from_which_it_pays() -> None:
    """Passes of (0.04 + 0.20 + 0.0 + 0.9) s / 10 beside plain steps of 1.8 s / 18."""
    report = built(two_prompts())
    times, step = report.summary.time_ms, report.methods["autoregressive"].summary.time_ms.verify
    assert times.draft
    assert times.verify
    assert step
    needed = (times.draft + times.verify) / step
    assert report.summary.break_even_length == pytest.approx(needed) == pytest.approx(1.14)
    verdict = report.verdicts["all"]
    assert verdict.break_even_length == report.summary.break_even_length
    assert "acceptance length 1.80, it pays from 1.14" in verdict.statement
    # Every pass drafted, so that the prediction is the length over that.
    assert report.summary.predicted_speedup == pytest.approx(1.8 / needed)


def test_the_terminal_shows_the_acceptance_rate() -> None:
    report = built(two_prompts())
    table = table_of(report)
    place = list(table.columns).index("rate")
    assert texts(table)[0][place] == "0.45"
    assert summary_table(report_of(two_prompts())).columns[place].header == "rate"
