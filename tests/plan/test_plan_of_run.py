"""`plan run.dir=outputs/NAME`: the run's settings, and the acceptance that its report measured."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_plan import planned
from test_report import built, two_prompts

from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import PlanConfig, TrainConfig
from drafttrain.plan.pages import headline
from drafttrain.plan.serving import accepted, rate_of
from drafttrain.report.pages import write_report
from drafttrain.runtime.run_folder import write_config

ON = "hardware=h100x1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of MTP that was not evaluated."""
    told = ["drafter=mtp", "data=jsonl", "data.path=a.jsonl", "trainer.max_steps=7"]
    config = typed(compose("train", [f"run.dir={tmp_path}", *told]), TrainConfig)
    write_config(config, tmp_path / "config.yaml")
    return tmp_path


def test_a_plan_of_a_run_is_of_its_settings(run: Path) -> None:
    config = typed(compose("plan", [f"run.dir={run}", ON]), PlanConfig)
    assert (config.drafter.name, config.data.name) == ("mtp", "jsonl")
    assert (config.trainer.max_steps, config.hardware.name) == (7, "h100x1")
    other = typed(compose("plan", [f"run.dir={run}", ON, "drafter=eagle"]), PlanConfig)
    assert (other.drafter.name, other.data.name) == ("eagle", "jsonl")
    told = headline(planned(f"run.dir={run}", ON))
    assert "is assumed: plan.acceptance_length or run.dir takes a measured one." in told


def test_a_plan_of_a_run_counts_with_the_acceptance_of_its_report(run: Path) -> None:
    mine = replace(built(two_prompts()), drafter="mtp")
    write_report(mine, run / "evaluations" / "other")
    write_report(mine, run / "evaluations" / "default")
    length = mine.summary.acceptance_length.micro
    assert length is not None
    plan = planned(f"run.dir={run}", ON, "plan.depth=2")  # the report's
    assert plan.serving[0].acceptance_length == pytest.approx(length)
    assert f"{length:.2f} at depth 2, is by the report default of {run}." in headline(plan)
    deeper = planned(f"run.dir={run}", ON, "plan.depth=4").serving[0].acceptance_length
    assert deeper == pytest.approx(accepted(rate_of(length, 2), 4))
    given = planned(f"run.dir={run}", ON, "plan.acceptance_length=2.5")
    assert given.serving[0].acceptance_length == pytest.approx(2.5)


def test_the_rate_of_a_report_is_not_taken_for_a_conditional_one() -> None:
    with pytest.raises(ValueError, match="plan has no key acceptance_rate"):
        compose("plan", ["plan.acceptance_rate=0.5"])


def test_a_plan_takes_no_acceptance_of_another_drafter_or_target(run: Path) -> None:
    write_report(built(two_prompts()), run / "evaluations" / "default")  # of eagle3
    assert "is assumed: " in headline(planned(f"run.dir={run}", ON))
    mine = replace(built(two_prompts()), drafter="mtp")
    write_report(mine, run / "evaluations" / "mine")
    assert "by the report mine of" in headline(planned(f"run.dir={run}", ON, "plan.depth=4"))
    assert "is assumed: " in headline(planned(f"run.dir={run}", ON, "drafter=medusa"))
    assert "is assumed: " in headline(planned(f"run.dir={run}", ON, "model=llama8b"))
