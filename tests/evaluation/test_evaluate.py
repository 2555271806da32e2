"""Evaluation: every turn by every method, the losslessness check, what is refused, validation."""

import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import BY_TEMPLATE, drafter_config
from omegaconf import OmegaConf
from paths import ROOT
from test_drafters import random_drafter
from test_engine import deepspeed_config

from drafttrain.core.types import Counters, Decoded, DecodeStats, PromptResult, Proposal, Sample
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.records import Message
from drafttrain.data.skips import SkipReport
from drafttrain.decode.loop import speculative_passes
from drafttrain.decode.policy import chain, spine
from drafttrain.decode.rows import Passes
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.ngram import Ngram
from drafttrain.evaluation import certify
from drafttrain.evaluation.certify import greedy_check
from drafttrain.evaluation.config import EvalConfig, TunedEval
from drafttrain.evaluation.evaluate import choosing_prompts, fastest
from drafttrain.evaluation.measure import (
    at_depth,
    check_depths,
    first_turn,
    fitting,
    measure,
    methods_of,
    spread,
)
from drafttrain.evaluation.measurements import Measurements
from drafttrain.evaluation.tune_choice import Chosen
from drafttrain.report.outputs import first_blocks
from drafttrain.report.results import BEFORE
from drafttrain.runtime.signals import StopRequest
from drafttrain.target.model import Target
from drafttrain.training.engine.build import build_engine
from drafttrain.training.validation import Validation, held_out_prompts

PROMPTS = [
    Prompt("sum", "math", "math", ("What is 2 + 2?",)),
    Prompt("talk", "chat", "chat", ("Say hello.", "And good bye, please.")),
    Prompt("list", "code", "code", ("Write a list of a, b and c.",)),
]
TURNS = [("sum", 0), ("talk", 0), ("talk", 1), ("list", 0)]
CONF = ROOT / "conf"
METHODS = ["autoregressive", "eagle3", "ngram"]


@pytest.fixture(scope="module")
def drafters(target: Target) -> dict[str, Drafter]:
    return {name: random_drafter(name, target) for name in ("eagle3", "ngram")}


def settings(**changes: Any) -> EvalConfig:
    values = OmegaConf.to_container(OmegaConf.load(CONF / "eval" / "default.yaml"))
    assert isinstance(values, dict)
    values |= {"name": "test", "depth": 3, "max_new_tokens": 12, "blocks": 3, "resamples": 100}
    values |= {"lossless_prompts": 3}
    return EvalConfig(**values | changes)


def results_of(
    target: Target, drafters: dict[str, Drafter], config: EvalConfig, **more: Any
) -> list[PromptResult]:
    """Results of one point, under the names of reports."""
    ordered = {name: drafters[name] for name in ("ngram", "eagle3")}
    methods = methods_of(ordered, config)
    values: dict[str, Any] = {
        "sampling": config.sampling,
        "batch_size": config.batch_size,
        "seed": 0,
    }
    values |= more
    prompts = values.pop("prompts", PROMPTS)
    results = measure(target, methods, prompts, BY_TEMPLATE, config, **values).results
    return at_depth(results, config.depth)


def test_references_draft_as_deep_as_the_drafter_and_the_one_before_as_it_does(
    target: Target, drafters: dict[str, Drafter]
) -> None:
    """Otherwise a depth, not the training, may make the difference between before and after."""
    before = random_drafter("eagle3", target)
    every = {"ngram": drafters["ngram"], BEFORE: before, "eagle3": drafters["eagle3"]}
    swept = settings(depths=[1], policy="optimal_tree", tree_width=2)
    methods = methods_of(every, swept)
    for depth in (1, 3):
        shape = spine(depth, 2)
        policies = {"ngram": chain(depth), BEFORE: shape, "eagle3": shape}
        here = [each for each in methods if each.depth == depth]
        assert {each.name: each.policy for each in here} == policies
        drafted = [
            PromptResult("sum", 0, "math", name, 0, 5, (at,), DecodeStats(), at)
            for name, at in (("autoregressive", 0), *(each.key for each in methods))
        ]
        told = {result.method: result.tokens for result in at_depth(drafted, depth)}
        assert told == {"autoregressive": (0,), **dict.fromkeys(every, (depth,))}
        assert first_blocks([*drafted, *drafted]) == drafted
    by_task = TunedEval(**vars(settings()), from_tune=Chosen(3, {"math": 2}))
    assert all(each.of_task == {"math": chain(2)} for each in methods_of(every, by_task))


def measured(
    target: Target, drafters: dict[str, Drafter], **changes: Any
) -> dict[tuple[str, int], dict[str, list[PromptResult]]]:
    """Results by turn and method."""
    table: dict[tuple[str, int], dict[str, list[PromptResult]]] = {}
    for result in results_of(target, drafters, settings(**changes)):
        turn = table.setdefault((result.prompt_id, result.turn), {})
        turn.setdefault(result.method, []).append(result)
    return table


@pytest.mark.parametrize(("blocks", "repeats"), [(2, 1), (3, 3), (5, 1), (5, 2)])
def test_every_turn_is_measured_by_every_method_in_as_many_blocks_as_asked(
    blocks: int, repeats: int, target: Target, drafters: dict[str, Drafter]
) -> None:
    table = measured(target, drafters, blocks=blocks, repeats=repeats, max_new_tokens=2)
    assert sorted(table) == sorted(TURNS)
    used: set[int] = set()
    for turn, methods in table.items():
        assert sorted(methods) == METHODS, turn
        in_blocks = {tuple(result.block for result in results) for results in methods.values()}
        assert len(in_blocks) == 1, (turn, in_blocks)  # methods are compared within a block
        (chosen,) = in_blocks
        assert len(set(chosen)) == len(chosen) == repeats, turn
        used |= set(chosen)
    assert used <= set(range(blocks))
    assert len(used) == min(blocks, len(PROMPTS) + repeats - 1)


def test_between_prompts_only_what_is_new_is_looked_through_for_garbage(
    target: Target, drafters: dict[str, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python and its libraries hold takes half a second to look through."""
    monkeypatch.setattr("drafttrain.evaluation.measure.TRIES_AGAIN", 0)  # by whoever else is here
    monkeypatch.setattr("drafttrain.evaluation.measure.gc", gc)  # not that of tests/conftest.py
    seen: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            seen.append(info["generation"])

    gc.callbacks.append(collected)
    try:
        measured(target, drafters, blocks=1, max_new_tokens=2)
    finally:
        gc.callbacks.remove(collected)
    assert seen == [0] * len(PROMPTS)


def test_greedy_outputs_of_all_methods_are_equal_and_fit_the_limit(
    target: Target, drafters: dict[str, Drafter]
) -> None:
    table = measured(target, drafters, blocks=1)
    for turn, methods in table.items():
        outputs = {result.tokens for results in methods.values() for result in results}
        assert len(outputs) == 1, turn
        assert 1 <= len(outputs.pop()) <= 12
        assert len({result.num_prompt_tokens for (result,) in methods.values()}) == 1
        assert methods["eagle3"][0].stats.trimmed.num_drafts >= 1
        assert methods["autoregressive"][0].stats.trimmed.num_drafts == 0
    assert {result.task for result in table["talk", 1]["ngram"]} == {"chat"}


def test_a_later_turn_carries_the_answer_before_it(
    target: Target, drafters: dict[str, Drafter]
) -> None:
    table = measured(target, drafters, blocks=1, max_new_tokens=4)
    first, second = (table["talk", turn]["autoregressive"][0] for turn in (0, 1))
    answer = target.tokenizer.decode(first.tokens, skip_special_tokens=True)
    assert answer
    said = [("user", "Say hello."), ("assistant", answer), ("user", "And good bye, please.")]
    expected = prompt_tokens([Message(*turn) for turn in said], target.tokenizer, BY_TEMPLATE)
    assert second.num_prompt_tokens == len(expected)


def test_sampled_results_repeat_with_the_seed(target: Target, drafters: dict[str, Drafter]) -> None:
    def outputs(seed: int) -> list[tuple[int, ...]]:
        config = settings(temperature=1.0, max_new_tokens=6, blocks=1)
        results = results_of(target, drafters, config, prompts=PROMPTS[:1], seed=seed)
        return [result.tokens for result in results]

    once = outputs(1)
    assert outputs(1) == once
    assert outputs(2) != once


def greedy_prompts(target: Target) -> list[tuple[str, list[int]]]:
    return [(prompt.id, first_turn(prompt, target, BY_TEMPLATE)) for prompt in PROMPTS]


def test_a_lossless_loop_is_identical_on_every_prompt_checked(
    target: Target, drafters: dict[str, Drafter]
) -> None:
    check = greedy_check(target, drafters["eagle3"], greedy_prompts(target), settings())
    assert (check.passed, check.measured, check.divergences) == (True, 1.0, [])
    assert "3 of 3 greedy outputs identical to plain decoding in float32" in check.text


def test_the_greedy_check_draws_drafts_as_they_are_measured(
    target: Target, drafters: dict[str, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def noted(*given: Any, **told: Any) -> Passes:
        drawn.append(told["draft_sampling"].temperature)
        return speculative_passes(*given, **told)

    monkeypatch.setattr("drafttrain.evaluation.measure.speculative_passes", noted)
    config = settings(draft_temperature=1.0)
    assert greedy_check(target, drafters["eagle3"], greedy_prompts(target), config).passed
    assert drawn == [1.0] * len(PROMPTS)


def test_a_planted_divergence_is_reported_by_prompt_and_position(
    target: Target, drafters: dict[str, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = first_turn(PROMPTS[1], target, BY_TEMPLATE)
    decode = certify._decoded

    def diverging(how: Any, prompts: Any, *policies: Any) -> list[Decoded]:
        (decoded,) = decode(how, prompts, *policies)
        if not policies or prompts[0][1] != wrong:  # decoded plainly, or another prompt
            return [decoded]
        changed = (*decoded.tokens[:2], (decoded.tokens[2] + 1) % 97, *decoded.tokens[3:])
        return [Decoded(changed, decoded.stats)]

    monkeypatch.setattr(certify, "_decoded", diverging)
    check = greedy_check(target, drafters["eagle3"], greedy_prompts(target), settings())
    assert not check.passed
    (divergence,) = check.divergences
    assert (divergence.prompt, divergence.position) == ("talk", 2)
    assert not divergence.tie
    assert divergence.gap > divergence.noise >= 0


def test_what_does_not_fit_is_refused_by_name_before_anything_is_decoded(
    target: Target, drafters: dict[str, Drafter]
) -> None:
    def fit(prompts: list[Prompt], **changes: Any) -> list[Prompt]:
        skipped, given = SkipReport(), [drafters["eagle3"]]
        return fitting(prompts, skipped, target, BY_TEMPLATE, settings(**changes), given)

    assert fit(PROMPTS) == PROMPTS
    long = Prompt("novel", "chat", "chat", ("word " * 200,))
    with pytest.raises(ValueError, match=r"eval\.prompts: novel may need 10\d\d tokens"):
        fit([*PROMPTS, long])
    # Each turn fits alone; with the answers in between they do not.
    many = Prompt("talker", "chat", "chat", ("Go on.",) * 8)
    assert fit([many]) == [many]
    with pytest.raises(ValueError, match=r"talker .* lower eval\.max_new_tokens"):
        fit([many], max_new_tokens=60)
    heads = random_drafter("medusa", target)
    with pytest.raises(ValueError, match=r"^eval\.depth must"):
        check_depths(heads, settings(depth=50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, r"eval\.depth must be a number of at least 1, or auto, got 0"),
        ({"repeats": 4}, r"eval\.repeats must be in 1\.\.eval\.blocks \(3\), got 4"),
        ({"prompts_per_task": 0}, r"eval\.prompts_per_task must be at least 1, or null, got 0"),
        ({"lossless_prompts": -1}, r"eval\.lossless_prompts must be at least 0, got -1"),
        ({"resamples": 10}, r"eval\.resamples must be at least 100, got 10"),
        (
            {"temperature": -1.0},
            r"eval\.temperature must be 0 \(greedy\) or in .* got -1",
        ),
    ],
)
def test_absurd_settings_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batches_say_what_single_prompts_say(
    temperature: float, target: Target, drafters: dict[str, Drafter]
) -> None:
    prompts = [
        Prompt(f"p{i}", "chat", "chat", ("Say " + "hello " * i, "And?")[: 1 + i % 2])
        for i in range(5)
    ]
    config = settings(temperature=temperature, blocks=1, max_new_tokens=8)

    def table(size: int) -> dict[Any, Any]:
        results = results_of(target, drafters, config, prompts=prompts, batch_size=size)
        return {
            (r.prompt_id, r.turn, r.method): (r.tokens, r.stats.trimmed, r.stats.untrimmed)
            for r in results
        }

    alone = table(1)
    assert len(alone) == 3 * 7
    assert table(2) == alone
    assert table(3) == alone


def test_an_interrupted_evaluation_goes_on_from_what_it_measured(
    target: Target, drafters: dict[str, Drafter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafttrain.evaluation.measure.TRIES_AGAIN", 0)  # by whoever else is here
    config = settings(blocks=2, repeats=2, max_new_tokens=4)
    conditions = {"seed": 0}
    whole = Measurements(tmp_path / "whole", "point", conditions)
    expected = results_of(target, drafters, config, journal=whole)
    journal = Measurements(tmp_path, "point", conditions)
    added = journal.add

    def stopped(key: Any, results: Any) -> None:
        added(key, results)
        if key == (0, 2):
            raise KeyboardInterrupt

    monkeypatch.setattr(journal, "add", stopped)
    with pytest.raises(KeyboardInterrupt):
        results_of(target, drafters, config, journal=journal)
    file = next(tmp_path.glob("*.partial.jsonl"))
    content = file.read_text()
    file.write_text(content + '{"key": [1, 0], "resu')  # killed while it wrote
    again = Measurements(tmp_path, "point", conditions)
    assert len(again.known) == 3
    known = [result for results in again.known.values() for result in results]
    resumed = results_of(target, drafters, config, journal=again)
    assert len(resumed) == len(expected)
    for one, other in zip(resumed, expected, strict=True):
        assert (one.tokens, one.stats.trimmed, one.block) == (
            other.tokens,
            other.stats.trimmed,
            other.block,
        )
    assert {id(r.stats) for r in known} <= {id(r.stats) for r in resumed}  # not measured again
    again.finish()
    assert len(Measurements(tmp_path, "point", conditions).known) == 0  # the next one begins anew
    other = Measurements(tmp_path / "whole", "point", {"seed": 1})
    assert len(other.known) == 0  # measured under other conditions


def test_measurements_of_an_earlier_version_are_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = DecodeStats(verify_s=1.0)
    result = PromptResult("a", 0, "math", "autoregressive", 0, 5, (7,), stats)
    Measurements(tmp_path, "point", {}).add((0, 0), [result])
    assert len(Measurements(tmp_path, "point", {}).known) == 1
    monkeypatch.setattr("drafttrain.evaluation.measurements.VERSION", 99)
    assert len(Measurements(tmp_path, "point", {}).known) == 0


class Interrupted(Ngram):
    """Prompt lookup, while which something else takes the machine, once."""

    calls, before, slept = 0, 0.0, 0.0

    def propose(self, state: Any, depth: int) -> Proposal | None:
        self.calls += 1
        now = time.perf_counter()
        if self.calls == 40:  # however slow the machine is: as long as 200 passes
            self.slept = max(0.5, 200 * (now - self.before))
            time.sleep(self.slept)
        self.before = now
        return super().propose(state, depth)


def test_what_was_disturbed_is_measured_again(
    target: Target, drafters: dict[str, Drafter], tmp_path: Path
) -> None:
    slow = Interrupted(drafter_config("ngram"), target.spec)  # type: ignore[arg-type]
    journal = Measurements(tmp_path, "point", {})
    results = results_of(
        target, {**drafters, "ngram": slow}, settings(blocks=3, repeats=3), journal=journal
    )
    assert slow.slept
    assert max(r.stats.total_s for r in results) < slow.slept, "the disturbed batch was replaced"
    assert len(results) == len(TURNS) * len(METHODS) * 3
    again = Measurements(tmp_path, "point", {})
    stored = [r for group in again.known.values() for r in group]
    assert max(r.stats.total_s for r in stored) < slow.slept, "a resumed evaluation has the new one"


def test_a_depth_that_no_context_holds_is_refused_by_its_own_name(
    target: Target, drafters: dict[str, Drafter]
) -> None:
    """It was blamed on the prompt, after the target was loaded."""
    positions = target.spec.max_positions
    for drafter in drafters.values():
        with pytest.raises(ValueError, match=rf"eval\.depth must be at most {positions - 13}, got"):
            check_depths(drafter, settings(depth=99999))
        with pytest.raises(ValueError, match=r"eval\.depths must be at most \d+, got 99999: tiny"):
            check_depths(drafter, settings(depths=[2, 99999]))
    medusa = random_drafter("medusa", target)
    with pytest.raises(ValueError, match=r"eval\.depth must be in 1\.\.4 for drafter=medusa, got"):
        check_depths(medusa, settings(depth=99999))


def test_a_depth_is_chosen_on_prompts_of_which_no_number_is() -> None:
    tasks = [f"t{index % 6}" for index in range(18)]
    prompts = [Prompt(f"{place}", t, t, ("x",)) for place, t in enumerate(tasks)]
    assert choosing_prompts(prompts, settings(depths=[1])) == set("012345")
    assert choosing_prompts(prompts, settings()) == set(), "one depth: nothing to choose"
    assert choosing_prompts(prompts[:4], settings(depths=[1])) == set(), "too few prompts"


def test_the_fastest_depth_takes_the_least_time_for_a_token() -> None:
    def decoded(depth: int, num_tokens: int, seconds: float) -> PromptResult:
        stats = DecodeStats(verify_s=seconds)
        return PromptResult("a", 0, "math", "eagle3", 0, 5, (7,) * num_tokens, stats, depth)

    results = [decoded(2, 10, 1.0), decoded(4, 12, 1.1), decoded(6, 12, 1.3)]
    assert fastest(results, "eagle3", [2, 4, 6]) == 4


def test_spreading_takes_one_task_after_the_other() -> None:
    tasks = ["a", "a", "a", "b", "c", "c"]
    prompts = [Prompt(f"{t}{i}", t, t, ("x",)) for i, t in enumerate(tasks)]
    chosen = [prompt.id for prompt in spread(prompts, 5)]
    assert chosen == ["a0", "b3", "c4", "a1", "c5"]
    assert len(spread(prompts, 50)) == 6
    assert spread(prompts, 0) == []
    assert Counter(p.task for p in spread(prompts, 3)) == {"a": 1, "b": 1, "c": 1}


def validation_of(name: str, target: Target, held_out: list[Sample], **changes: Any) -> Validation:
    engine = build_engine(
        random_drafter(name, target),
        deepspeed_config("none"),
        device="cpu",
        dtype=torch.float32,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    values: dict[str, Any] = {"most": 4, "depth": 3, "max_new_tokens": 16}
    values |= {"draft_dtype": torch.float32, "stop": StopRequest()}
    return Validation(target, engine, held_out_prompts(held_out), **values | changes)


def held_out_samples(count: int = 6, length: int = 20) -> list[Sample]:
    generator = torch.Generator().manual_seed(2)
    return [
        Sample(
            torch.randint(6, 97, (length,), generator=generator), torch.arange(length) >= 8, index
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_validation_reports_acceptance_of_the_loop_and_leaves_the_drafter_alone(
    name: str, target: Target
) -> None:
    validation = validation_of(name, target, held_out_samples())
    drafter = validation.drafter.train()
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    metrics = validation()
    length = metrics["val/acceptance_length"]
    positions = [metrics[f"val/acceptance_position_{place}"] for place in (1, 2, 3)]
    assert 1 <= length <= 4
    total = sum((counters for _, counters in validation.rows), Counters())
    assert length == total.yielded / total.num_drafts
    assert positions == sorted(positions, reverse=True)
    assert validation() == metrics
    assert drafter.training
    assert all(torch.equal(drafter.state_dict()[key], value) for key, value in before.items())


def test_validation_counts_no_bonus_of_a_draft_that_the_limit_cut(target: Target) -> None:
    """As reports do; answers of two tokens end within the draft after the first one."""
    validation = validation_of("eagle3", target, held_out_samples(), max_new_tokens=2)
    length = (validation() or {})["val/acceptance_length"]
    total = sum((counters for _, counters in validation.rows), Counters())
    assert total.num_accepted_tokens == total.num_cut_drafts > 0
    assert length == 1
    assert all(row[3] == 1 for row in validation.table()[1])


def test_the_error_of_validation_is_that_of_a_ratio_over_prompts(target: Target) -> None:
    validation = validation_of("eagle3", target, held_out_samples())
    metrics = validation()
    drafts, lengths = (
        torch.tensor([row[place] for row in validation.table()[1]]) for place in (1, 3)
    )
    yielded = drafts * lengths
    assert yielded.sum() > drafts.sum()
    # The leave-one-out lengths spread as much, to first order.
    without = (yielded.sum() - yielded) / (drafts.sum() - drafts)
    jackknife = ((len(drafts) - 1) * (without - without.mean()).square().mean()).sqrt()
    assert metrics["val/acceptance_length_error"] == pytest.approx(float(jackknife), rel=0.15)


def test_the_table_of_validation_adds_up_to_its_metrics(target: Target) -> None:
    validation = validation_of("medusa", target, held_out_samples())
    metrics = validation()
    columns, rows = validation.table()
    assert [row[0] for row in rows] == [0, 1, 2, 3]
    assert columns[1::2] == ["num_drafts", "acceptance_length"]
    length = sum(row[1] * row[3] for row in rows) / sum(row[1] for row in rows)
    assert metrics["val/acceptance_length"] == pytest.approx(length)


def test_validation_drafts_no_deeper_than_the_drafter_can(target: Target) -> None:
    validation = validation_of("medusa", target, held_out_samples(), depth=50)
    assert validation.depth == validation.drafter.max_depth
    assert f"val/acceptance_position_{validation.depth}" in validation()


def test_validation_without_a_prompt_that_fits_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match=r"trainer\.validation_prompts: none .* data\.holdout"):
        validation_of("eagle3", target, held_out_samples(), max_new_tokens=505)
