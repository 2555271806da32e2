"""The training curves of a report, from the log of the run."""

import math
from typing import Any

from test_report import html, many_prompts, markdown, report_of

from drafttrain.report.curves import training_curves
from drafttrain.report.write import as_data


def logged(steps: int = 30) -> list[dict[str, Any]]:
    """The log of a run that validated every tenth step; one step had no finite loss."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = math.nan if step == 5 else 6.0 / step
        terms = {"train/loss_depth_1": loss, "train/loss_depth_2": 1.0}
        rows.append({"step": step, "train/loss": loss, **terms, "train/tokens": 100 * step})
        if step % 10 == 0:
            rows.append({"step": step, "val/acceptance_length": 1 + step / 100})
    return [*rows, {"step": steps, "table": "t", "rows": [[1]]}, {"step": "3", "train/loss": 1.0}]


def test_curves_are_those_of_the_log() -> None:
    curves = training_curves(logged(), step=20)
    assert curves is not None
    loss, validation = curves.series
    assert loss.name == "train/loss"
    assert loss.steps[:5] == [1, 2, 3, 4, 6]
    assert loss.tokens[:2] == [100, 200]
    assert (validation.steps, validation.tokens) == ([10, 20, 30], [1000, 2000, 3000])
    assert validation.values == [1.1, 1.2, 1.3]
    assert validation.unit == "tokens per target pass"
    assert "weighted sum of its terms (depth_1, depth_2)" in curves.statement


def test_a_long_log_is_thinned_and_keeps_its_ends() -> None:
    curves = training_curves(logged(5001))
    assert curves is not None
    steps = curves.series[0].steps
    assert len(steps) <= 401
    assert (steps[0], steps[-1]) == (1, 5001)


def test_the_time_of_training_is_that_of_the_steps_up_to_the_checkpoint() -> None:
    rows = [row | {"perf/tokens_per_s": 50.0} if "train/tokens" in row else row for row in logged()]
    rows[0]["perf/tokens_per_s"] = 10.0
    curves = training_curves(rows, step=20)
    assert curves is not None
    assert curves.seconds == 100 / 10 + 1900 / 50
    del rows[3]["perf/tokens_per_s"]
    unknown = training_curves(rows, step=20)
    assert unknown is not None
    assert unknown.seconds is None


def test_a_log_without_losses_has_no_curves() -> None:
    assert training_curves([{"step": 1, "perf/tokens_per_s": 3.0}]) is None


def test_pages_show_the_curves_and_say_what_the_loss_is() -> None:
    report = report_of(many_prompts(prompts=6), training=training_curves(logged(), step=20))
    page, text = html(report), markdown(report)
    assert "weighted sum of its terms (depth_1, depth_2) per token of the loss mask." in page
    assert "optimizer step (3,000 tokens at the end)" in page
    assert "Dashed: the evaluated checkpoint" in page
    row = next(line for line in text.splitlines() if "val/acceptance" in line)
    assert row.endswith("| tokens per target pass | 1.10 at step 10 | 1.30 at step 30 | 3,000 |")
    assert as_data(report)["training"]["checkpoint_step"] == 20
