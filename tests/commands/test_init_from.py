"""Training that starts from a run or an export, also on another target."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from drafttrain.__main__ import main
from drafttrain.commands.setup.init_from import keep_start, starting_point
from drafttrain.commands.setup.target_and_drafter import GivenDrafter
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import TrainConfig
from drafttrain.runtime.run_folder import load_config

pytestmark = pytest.mark.usefixtures("plain_pictures")

QUICK = ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32"]
SHORT = ["eval.max_new_tokens=6", "eval.resamples=100", "eval.lossless_prompts=1", "eval.depth=3"]
SHORT += ["eval.policy=chain"]  # what is drafted must not depend on the machine
PROMPTS = [
    {"id": "sum", "task": "math", "turns": ["What is 2 + 2?"]},
    {"id": "half", "task": "math", "turns": ["Halve 10."]},
    {"id": "talk", "task": "chat", "turns": ["Say hello.", "And good bye."]},
]


def conversations(place: Path, form: str) -> Path:
    with place.open("w") as file:
        for number in range(24):
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": form.format(2 * number)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return place


def train(*arguments: str) -> int:
    common = ["data=jsonl", "data.holdout=2", "trainer.tokens_per_step=64"]
    common += ["trainer.validation_prompts=1", "trainer.validation_tokens=4", *QUICK]
    return main(["train", *common, *arguments])


@pytest.fixture(scope="module")
def run(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of EAGLE-3, with a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("adapted")
    data = conversations(folder / "data.jsonl", "It is {}.")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    place = folder / "run"
    told = [f"run.dir={place}", f"model.path={tiny_target_dir}", f"data.path={data}"]
    assert train(*told, "trainer.max_steps=2", "drafter.unroll=2") == 0
    return place


@pytest.fixture(scope="module")
def other_target(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's target after a change of its weights."""
    folder = tmp_path_factory.mktemp("other") / "target"
    shutil.copytree(tiny_target_dir, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    weights[name] = weights[name] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run_target(run: Path) -> str:
    return yaml.safe_load((run / "config.yaml").read_text())["model"]["path"]


def test_a_run_is_evaluated_on_a_fine_tuned_sibling_of_its_target(
    run: Path, other_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = f"eval.prompts={run.parent / 'prompts.jsonl'}"
    told = ["evaluate", f"run.dir={run}", f"model.path={other_target}", prompts, *SHORT]
    assert main([*told, "eval.name=sibling"]) == 0
    named = re.compile(
        rf"drafter trained for \w+ \({run_target(run)}\), measured on \w+ \({other_target}\): "
        "the weights differ: fingerprint "
    )
    assert named.search(capsys.readouterr().out.replace("\n", " "))
    report = json.loads((run / "evaluations" / "sibling" / "report.json").read_text())
    assert any(named.match(note) for note in report["notes"])
    assert f"({other_target.name})" in report["target"]
    assert str(other_target) not in report["target"]  # which stands on cards that are pushed
    assert report["lossless"]["greedy_identical"] == report["lossless"]["greedy_total"] > 0
    narrow = tmp_path / "narrow"
    shutil.copytree(other_target, narrow)
    settings = json.loads((narrow / "config.json").read_text())
    settings["num_hidden_layers"] -= 1
    (narrow / "config.json").write_text(json.dumps(settings))
    weights = load_file(narrow / "model.safetensors")
    last = f".layers.{settings['num_hidden_layers']}."
    weights = {name: tensor for name, tensor in weights.items() if last not in name}
    save_file(weights, narrow / "model.safetensors", metadata={"format": "pt"})
    told[2] = f"model.path={narrow}"
    assert main([*told, "eval.name=narrow"]) == 2
    assert "model must have num_layers=" in capsys.readouterr().err


def start_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "initial" / "drafter.safetensors")


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "drafter.safetensors")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_is_trained_further_on_another_target_and_compared_with_what_it_was(
    run: Path, other_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = conversations(tmp_path / "new.jsonl", "That makes {}, I think.")
    adapted = tmp_path / "adapted"
    told = [f"run.init_from={run}", f"run.dir={adapted}", f"model.path={other_target}"]
    assert train(*told, f"data.path={data}", "trainer.max_steps=1") == 0
    said = capsys.readouterr().out
    assert f"({run_target(run)}), trained further for " in said
    assert f"({other_target}): the weights differ: fingerprint " in said
    assert "its vocabulary stays" in said
    assert same(start_of(adapted), weights_of(run))
    assert not same(weights_of(adapted), weights_of(run))
    # What is not said otherwise is the first run's: its trainer, its drafter with its settings.
    config = yaml.safe_load((adapted / "config.yaml").read_text())
    assert config["drafter"]["unroll"] == 2
    assert config["run"]["name"] == "run-adapted"
    record = json.loads((adapted / "provenance.json").read_text())
    assert record["start"]["origin"].startswith(str(run))

    prompts = f"eval.prompts={run.parent / 'prompts.jsonl'}"
    assert main(["evaluate", f"run.dir={adapted}", prompts, *SHORT]) == 0
    place = adapted / "evaluations" / "default"
    report = json.loads((place / "report.json").read_text())
    assert set(report["methods"]) == {"autoregressive", "ngram", "before"}
    rows = report["adaptation"]["rows"]
    assert set(rows) == {"all", "math", "chat"}
    before = report["methods"]["before"]
    for task, row in rows.items():
        old, new = (
            part["summary"] if task == "all" else part["tasks"][task] for part in (before, report)
        )
        length = row["acceptance_length"]
        assert length["before"]["value"] == pytest.approx(old["acceptance_length"]["micro"])
        assert length["after"]["value"] == pytest.approx(new["acceptance_length"]["micro"])
        difference = length["after"]["value"] - length["before"]["value"]
        assert length["difference"]["value"] == pytest.approx(difference)
    assert "Before and after adapting" in (place / "report.html").read_text()
    assert (
        main(
            [
                "evaluate",
                f"run.dir={adapted}",
                prompts,
                *SHORT,
                "eval.before=false",
                "eval.overwrite=true",
            ]
        )
        == 0
    )
    assert json.loads((place / "report.json").read_text())["adaptation"] is None


@pytest.mark.parametrize(
    "engine",
    [
        ("hardware.train_dtype=bfloat16", "hardware.weights_dtype=bfloat16"),
        pytest.param(("deepspeed=zero3",), marks=pytest.mark.slow),
    ],
)
def test_what_was_started_from_is_kept_whatever_the_engine_does_to_its_weights(
    run: Path, engine: tuple[str, ...], tmp_path: Path
) -> None:
    told = [f"run.init_from={run}", f"run.dir={tmp_path}", f"data.path={run.parent}/data.jsonl"]
    assert train(*told, "trainer.max_steps=1", *engine) == 0
    assert same(start_of(tmp_path), weights_of(run))


def test_an_attempt_without_a_checkpoint_leaves_no_start_behind(run: Path, tmp_path: Path) -> None:
    found = starting_point(typed(compose("train", [f"run.init_from={run}"]), TrainConfig))
    assert found is not None

    def start(name: str) -> GivenDrafter:
        return replace(found, origin=name)

    def origin() -> str | None:
        record = tmp_path / "initial" / "record.json"
        return json.loads(record.read_text())["origin"] if record.is_file() else None

    keep_start(tmp_path, start("1"))
    keep_start(tmp_path, start("2"))
    assert origin() == "2"
    assert same(start_of(tmp_path), weights_of(run))
    keep_start(tmp_path, None)
    assert origin() is None
    keep_start(tmp_path, start("3"))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    keep_start(tmp_path, start("4"))  # a resumed run began with what is there
    keep_start(tmp_path, None)
    assert origin() == "3"


def test_an_export_is_trained_further_and_keeps_its_shape(
    run: Path, other_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, adapted = tmp_path / "served", tmp_path / "adapted"
    assert main(["export", f"run.dir={run}", f"export.dir={served}", "export.dtype=float32"]) == 0
    data = f"data.path={run.parent / 'data.jsonl'}"
    told = [f"run.init_from={served}", f"run.dir={adapted}", f"model.path={other_target}", data]
    told += ["trainer.max_steps=1", "drafter=eagle3", "drafter.unroll=1"]
    assert train(*told, "drafter.draft_vocab_size=5000") == 0, "at most so many"
    assert "drafter trained for another target, trained further for " in capsys.readouterr().out
    assert same(start_of(adapted), weights_of(run))
    assert yaml.safe_load((adapted / "config.yaml").read_text())["drafter"]["name"] == "eagle3"

    again = tmp_path / "again"  # without naming the family
    told[1:] = [f"run.dir={again}", *told[2:4]]
    assert train(*told, "trainer.max_steps=1") == 0
    assert yaml.safe_load((again / "config.yaml").read_text())["drafter"]["name"] == "eagle3"
    # And it resumes where it stopped, told the same, or the family too, wherever its origin is now.
    capsys.readouterr()
    moved = served.rename(tmp_path / "moved")
    assert train(*told, "trainer.max_steps=2", "run.resume=true", "drafter=eagle3") == 0
    assert f"start: {served}" in capsys.readouterr().out
    start = json.loads((again / "provenance.json").read_text())["start"]
    assert start == json.loads((again / "initial" / "record.json").read_text())
    moved.rename(served)
    assert sorted(p.name for p in (again / "checkpoints").glob("step-*"))[-1] == "step-000002"
    told = [f"run.dir={again}", "run.resume=true", "trainer.max_steps=3"]  # or nothing but where
    assert main(["train", *told, f"run.init_from={run}"]) != 0
    assert f"run.init_from must be {served} to resume" in capsys.readouterr().err
    assert main(["train", *told]) == 0
    assert load_config(again)["run"]["init_from"] == str(served)

    # The export says whose it is, when it is measured on another target.
    prompts = f"eval.prompts={run.parent / 'prompts.jsonl'}"
    told = ["evaluate", f"drafter.path={served}", f"run.dir={tmp_path / 'e'}", prompts, *SHORT]
    assert main([*told, f"model.path={other_target}", *QUICK]) == 0
    assert "drafter trained for another target, trained further for " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "told", "expected"),
    [
        (
            "nothing",
            [],
            "run.init_from must be the folder of a run, or a directory or a repository of the Hub",
        ),
        ("empty", [], "must hold config.json"),
        ("evaluation", [], "run.init_from must be the folder of a run that was trained"),
        ("untrained", [], "must hold a trained drafter, but has no checkpoint"),
        (
            "run",
            ["drafter=medusa"],
            "holds a drafter of the family eagle3, got drafter=medusa; give",
        ),
        ("run", ["drafter.intermediate_size=24"], "must fit drafter=eagle3"),
        ("run", ["drafter.unrol=3"], "has no key unrol; did you mean unroll?"),
        ("served", ["drafter=medusa"], "holds a drafter of the family eagle3, got drafter=medusa"),
        (
            "served",
            ["drafter=eagle3", "drafter.intermediate_size=24"],
            "drafter.intermediate_size must be left out, or 64 as in run.init_from=",
        ),
        (
            "served",
            ["drafter=eagle3", "drafter.draft_vocab_size=20"],
            "drafter.draft_vocab_size must be left out, or ",
        ),
    ],
)
def test_what_cannot_be_started_from_is_named(
    make: str,
    told: list[str],
    expected: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = run if make == "run" else tmp_path / make
    if make == "empty":
        place.mkdir()
    elif make == "untrained":
        shutil.copytree(run, place, ignore=shutil.ignore_patterns("step-*"))
    elif make == "evaluation":
        place.mkdir()
        config = yaml.safe_load((run / "config.yaml").read_text())
        del config["trainer"]
        (place / "config.yaml").write_text(yaml.safe_dump(config))
    elif make == "served":
        assert main(["export", f"run.dir={run}", f"export.dir={place}"]) == 0
    model = yaml.safe_load((run / "config.yaml").read_text())["model"]["path"]
    start = [f"run.init_from={place}", f"run.dir={tmp_path / 'new'}", f"model.path={model}"]
    assert train(*start, f"data.path={run.parent / 'data.jsonl'}", *told) != 0
    said = capsys.readouterr().err
    assert expected in said
    assert "drafter.path" not in said or "drafter=small_lm drafter.path" in said
    assert not (tmp_path / "new").exists()
