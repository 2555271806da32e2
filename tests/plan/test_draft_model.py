"""A language model that drafts as it is: a plan says what serving the pair takes and brings."""

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from drafttrain.__main__ import main
from drafttrain.commands.setup.plan import plan_of
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import PlanConfig
from drafttrain.plan.advice import Plan, ServingPlan
from drafttrain.plan.pages import headline, what
from drafttrain.plan.serving import accepted, fitting
from drafttrain.plan.units import duration, money

SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def planned(*overrides: str) -> ServingPlan:
    return plan_of(typed(compose("plan", overrides), PlanConfig))


def test_a_pair_is_planned_by_the_draft_models_configuration_alone() -> None:
    """Llama 70B, drafted for by Llama 8B, on H100s."""
    pair = ("model=llama70b", "drafter=two_model", "hardware=h100x1")
    plan = planned(*pair, "drafter.path=meta-llama/Llama-3.1-8B-Instruct")
    assert not isinstance(plan, Plan), "nothing is trained"
    host, parts = plan.host, plan.job.parts
    assert parts.num_parameters == 8_030_261_248
    assert host.drafter_bytes == 2 * 8_030_261_248
    assert host.draft_cache_bytes == 2048 * 2 * 32 * 8 * 128 * 2
    # A pass reads all weights but the embedding, and the cache.
    read = 2 * (8_030_261_248 - 128_256 * 4096) + host.draft_cache_bytes
    chip = plan.job.chip
    one = read / (host.spread * chip.bandwidth * chip.bandwidth_efficiency)
    fixed = chip.pass_s + 64 * chip.collective_s
    row = plan.serving[0]
    assert row.draft_s == pytest.approx(4 * (one + fixed))
    length = accepted(0.75, 4)
    assert row.predicted_speedup == pytest.approx(
        length * row.plain_s / (row.draft_s + row.verify_s)
    )
    assert headline(plan).startswith("Fits: target and drafter take 146 GiB of the 316 GiB of 4 x")
    rows = dict(what(plan).items)
    assert "serving the drafter" in rows
    assert not {"training", "features", "checkpoints, on disk"} & rows.keys()


def test_a_pair_of_local_models_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    CONFIG_MAPPING["llama"](**sizes, **heads).save_pretrained(tmp_path / "draft")
    out = tmp_path / "plan"
    pair = ["drafter=two_model", f"drafter.path={tmp_path / 'draft'}", "trainer=auto"]
    assert main(["plan", *pair, f"plan.dir={out}", "hardware.accelerator=h100"]) == 0
    printed = capsys.readouterr().out
    assert "does speculation pay?" in printed
    assert "deepspeed" not in printed
    data = json.loads((out / "plan.json").read_text())
    assert data["drafter"]["draft_vocab"] == 1000
    assert {"plan.md", "plan.html"} <= {file.name for file in out.iterdir()}


def test_quantised_draft_models_are_planned_at_their_size() -> None:
    pair = ("model=llama8b", "drafter=two_model", f"drafter.path={SMALL}", "hardware=h100x1")
    whole, small = planned(*pair), planned(*pair, "drafter.quantization=torchao-int8")
    assert small.host.drafter_bytes < whole.host.drafter_bytes
    assert small.serving[0].draft_s < whole.serving[0].draft_s


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ada/unknown", r"`hf download ada/unknown config\.json` puts it there"),
        ("/no/such/folder", r"drafter\.path"),
        ("null", r"drafter\.path must say which model drafts"),
    ],
)
def test_a_draft_model_that_is_not_here_is_named_by_its_setting(path: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        planned("drafter=two_model", f"drafter.path={path}")
    assert "model.path" not in str(error.value)


def test_a_drafter_without_a_model_has_nothing_to_plan() -> None:
    with pytest.raises(ValueError, match="drafter=ngram has nothing to train"):
        planned("drafter=ngram")


def test_a_plan_says_what_a_million_tokens_cost_and_when_training_is_paid_for() -> None:
    """At full load: an hour's price over its tokens; an hour with the drafter saves gain - 1."""
    run = ("model=llama70b", "drafter=eagle", "hardware=h100x8", "plan.price_per_hour=2")
    plan = planned(*run)
    assert isinstance(plan, Plan)
    rows = dict(what(plan).items)
    full, gain = plan.full, plan.full.best_predicted_speedup
    assert full.batch == fitting(plan.host)
    assert gain > 1
    plain = 1e6 / (full.batch / full.plain_s) / 3600 * 4 * 2
    repaid = plan.chosen.dollars / (4 * 2 * (gain - 1))
    assert rows["a million tokens"] == (
        f"{money(plain / gain)} instead of {money(plain)}, at {full.batch} requests and depth "
        f"{full.best_depth}; pays for training in {duration(3600 * repaid)}"
    )
    loss = planned(*run, "plan.conditional_acceptance=0.05")
    assert "where no drafter pays" in str(what(loss))
    free = planned(*run[:3], "plan.price_per_hour=0")
    assert "a million tokens" not in str(what(free))
