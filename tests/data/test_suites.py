"""Suites: rows of the public ones, local files and data sets, and what each conf/eval asks for."""

import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from builders import BY_TEMPLATE, model_config
from test_drafters import random_drafter

from drafttrain.config.compose import compose, typed
from drafttrain.config.groups import choices
from drafttrain.config.sections import TrainConfig
from drafttrain.data.evaluation_prompts import Prompt, load_prompts, prompts_sha256
from drafttrain.data.records import ROLES
from drafttrain.data.skips import SkipReport
from drafttrain.data.suites import MT_BENCH, PromptSource, in_our_spelling
from drafttrain.evaluation.measure import fitting
from drafttrain.target.model import load_target

# `large` has the embedded prompts too, fewer of them.
SUITES = sorted(name for name in choices("eval") if name not in ("default", "large"))
# One row of each public suite, in the columns it is published with (texts are ours).
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "spec_bench": [
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorter."]},
        {"question_id": 161, "category": "translation", "turns": ["Translate: Guten Tag."]},
    ],
    "mt_bench": [
        {"prompt_id": 7, "category": "math", "prompt": ["2 + 2?", "And 3?"], "reference": ["4"]},
    ],
    "gsm8k": [{"question": "One and one?", "answer": "It is 2. #### 2"}],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "canonical_solution": "    return x\n",
            "test": "def check(f): pass",
            "entry_point": "f",
        }
    ],
    "mbpp": [
        {"task_id": 11, "text": "Add one.", "code": "def g(x): ...", "test_list": ["assert g(1)"]},
        {"task_id": 12, "prompt": "Add two.", "code": "", "test_list": [], "test_imports": []},
    ],
}
EXPECTED = {
    "spec_bench": [
        Prompt("question_81", "mt_bench", "mt_bench/writing", ("Write a poem.", "Shorter.")),
        Prompt("question_161", "translation", "translation", ("Translate: Guten Tag.",)),
    ],
    "mt_bench": [Prompt("question_7", "mt_bench", "mt_bench/math", ("2 + 2?", "And 3?"))],
    "gsm8k": [Prompt("gsm8k_0", "gsm8k", "gsm8k", ("One and one?",))],
    "humaneval": [Prompt("HumanEval/0", "humaneval", "humaneval", ("def f(x):\n",))],
    "mbpp": [
        Prompt(
            "mbpp_11",
            "mbpp",
            "mbpp",
            ("Add one.\nYour code should satisfy these tests:\nassert g(1)",),
        ),
        Prompt("mbpp_12", "mbpp", "mbpp", ("Add two.",)),
    ],
}


def source(**changes: Any) -> PromptSource:
    values = {field.name: None for field in fields(PromptSource)}
    given = {"setting": "eval.prompts", "split": "test", "task_by": "task", **changes}
    return PromptSource(**{**values, **given})


def jsonl(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suite", PUBLISHED)
def test_rows_as_published_become_prompts_from_a_file_and_from_a_data_set(
    suite: str, tmp_path: Path
) -> None:
    rows, task = PUBLISHED[suite], None if suite in ("spec_bench", "mt_bench") else suite
    prompts, report = load_prompts(source(path=jsonl(tmp_path, rows), task=task))
    assert prompts == EXPECTED[suite]
    assert report.num_skipped == 0
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(rows[:1]).save_to_disk(str(folder))
    from_dataset, _ = load_prompts(source(dataset=str(folder), task=task))
    assert from_dataset == EXPECTED[suite][:1]


def test_a_data_set_of_files_is_read_by_its_split(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "wrong split", "answer": ""}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    prompts, _ = load_prompts(source(dataset=str(tmp_path), task="gsm8k"))
    assert [prompt.turns for prompt in prompts] == [("q",)]


def test_a_local_file_comes_before_the_data_set(tmp_path: Path) -> None:
    path = jsonl(tmp_path, PUBLISHED["gsm8k"])
    prompts, _ = load_prompts(source(path=path, dataset="openai/gsm8k", task="gsm8k"))
    assert [prompt.id for prompt in prompts] == ["gsm8k_0"]
    embedded, _ = load_prompts(source(dataset="embedded", limit=1))
    assert len(embedded) == 8
    assert source(path="a.jsonl", dataset="o/d").describe() == "a.jsonl"
    assert source(path="a.jsonl", dataset="embedded").describe() == "a.jsonl"
    assert source(dataset="embedded").describe() == "the prompts of the package"
    described = source(dataset="o/d", subset="main", revision="abc").describe()
    assert described == "o/d (main), split test, revision abc"


def test_the_category_as_task_splits_mt_bench_and_limits_each(tmp_path: Path) -> None:
    rows = [
        {"question_id": number, "category": category, "turns": ["x"]}
        for number, category in enumerate([*sorted(MT_BENCH), "rag"] * 3)
    ]
    path = jsonl(tmp_path, rows)
    fine, _ = load_prompts(source(path=path, task_by="category", limit=2))
    wanted = {**{f"mt_bench/{name}": 2 for name in MT_BENCH}, "rag": 2}
    assert Counter(prompt.task for prompt in fine) == wanted
    coarse, _ = load_prompts(source(path=path, limit=2))
    assert Counter(prompt.task for prompt in coarse) == {"mt_bench": 2, "rag": 2}


def test_rows_of_a_suite_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    rows = [
        {"question": "fine", "answer": "a"},
        {"question": " ", "answer": "a"},
        {"question": 3, "answer": "a"},
        {"task_id": 1, "text": None, "test_list": ["assert f()"]},
        {"task_id": 2, "text": "Do it.", "test_list": "assert f()"},
        {"question_id": 9, "category": "math", "turns": []},
        {"words": "of no suite"},
        ["a list"],
    ]
    path = jsonl(tmp_path, rows)
    Path(path).write_text(Path(path).read_text() + '{"question": "cut o\n')
    prompts, report = load_prompts(source(path=path, task="gsm8k"))
    assert [prompt.id for prompt in prompts] == ["gsm8k_0"]
    assert report.counts == {
        "an empty prompt": 2,
        "an empty turn": 1,
        "content is not a string": 1,
        "tests are not a list": 1,
        "without id": 1,
        "not an object": 1,
        "not JSON": 1,
    }
    assert report.examples["not JSON"][0].startswith(f"{path}:9 (")


def test_rows_that_name_no_task_need_one(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"question": "q", "answer": "a"}])
    with pytest.raises(ValueError, match=r"1 x without task"):
        load_prompts(source(path=path))
    own = {"id": "a", "task": "mine", "turns": ["x"]}
    assert in_our_spelling(own, 0, "other", ROLES) == own
    assert in_our_spelling({"id": "a", "turns": ["x"]}, 0, "other", ROLES)["task"] == "other"


def test_a_data_set_out_of_reach_is_one_clear_error(tmp_path: Path) -> None:
    wanted = r"eval\.dataset must name a data set .* got nobody/nothing .*eval\.prompts=FILE"
    with pytest.raises(ValueError, match=wanted):
        load_prompts(source(dataset="nobody/nothing", task="x"))
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match=re.escape(f"got {tmp_path} (split validation)")):
        load_prompts(source(dataset=str(tmp_path), split="validation", task="x"))
    folder = tmp_path / "saved"
    datasets.Dataset.from_list([{"words": "x"}]).save_to_disk(str(folder))
    with pytest.raises(ValueError, match=re.escape(f"eval.dataset={folder} must hold usable")):
        load_prompts(source(dataset=str(folder), task="x"))


def test_prompts_are_known_by_what_is_decoded() -> None:
    one, other = Prompt("a", "t", "c", ("x", "y")), Prompt("a", "t", "c", ("xy",))
    assert prompts_sha256([one]) == prompts_sha256([Prompt("a", "t", "d", ("x", "y"))])
    assert len({prompts_sha256(prompts) for prompts in ([one], [other], [one, other])}) == 3


def eval_of(suite: str, *overrides: str) -> Any:
    return typed(compose("train", [f"eval={suite}", *overrides]), TrainConfig).eval


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_in_conf_reads_its_rows_from_a_local_file(suite: str, tmp_path: Path) -> None:
    config = eval_of(suite, f"eval.prompts={jsonl(tmp_path, PUBLISHED[suite])}")
    prompts, report = load_prompts(config.source)
    assert [prompt.turns for prompt in prompts] == [prompt.turns for prompt in EXPECTED[suite]]
    assert report.num_skipped == 0
    assert config.source.limit == 80
    assert config.skip_long_prompts
    fine = suite in ("spec_bench", "mt_bench")
    named = [prompt.category if fine else prompt.task for prompt in EXPECTED[suite]]
    assert [prompt.task for prompt in prompts] == named


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_never_falls_back_on_the_embedded_prompts(suite: str) -> None:
    if suite == "spec_bench":  # it is on no Hub
        with pytest.raises(
            ValueError, match=r"eval\.prompts must name a file .* got null for both"
        ):
            eval_of(suite)
    else:
        assert eval_of(suite).source.dataset


def test_prompts_too_long_for_the_context_are_refused_or_counted(tiny_target_dir: Path) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    prompts = [Prompt("short", "t", "t", ("Hello.",)), Prompt("long", "t", "t", ("word " * 9000,))]
    config, report = eval_of("default"), SkipReport(what="prompts")
    drafters = [random_drafter("ngram", target)]
    with pytest.raises(ValueError, match=r"long may need \d+ tokens .*skip_long_prompts=true"):
        fitting(prompts, report, target, BY_TEMPLATE, config, drafters)
    assert not report.counts
    lenient = eval_of("default", "eval.skip_long_prompts=true")
    assert fitting(prompts, report, target, BY_TEMPLATE, lenient, drafters) == prompts[:1]
    assert report.counts == {"too long for the context": 1}
    with pytest.raises(ValueError, match=r"must hold prompts that fit .*, got none"):
        fitting(prompts[1:], report, target, BY_TEMPLATE, lenient, drafters)
