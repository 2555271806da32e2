"""`evaluate drafter=ensemble`: members of every origin, and each mistake in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import draft_model_dir

import drafttrain
from drafttrain.__main__ import main

pytestmark = pytest.mark.usefixtures("plain_pictures")

QUICK = ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32"]
SHORT = ["eval.max_new_tokens=6", "eval.resamples=100", "eval.lossless_prompts=2", "eval.depth=3"]
SHORT += ["eval.policy=chain"]  # what is drafted must not depend on the machine


@pytest.fixture(scope="module")
def place(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two steps, `one` and `two`, of two families, and `one` as engines load it."""
    folder = tmp_path_factory.mktemp("members")
    talk = [{"role": "user", "content": "Add 2 and 2."}, {"role": "assistant", "content": "4."}]
    data = folder / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"messages": [{**talk[0], "content": f"Add {n} and 2."}, talk[1]]}) + "\n"
            for n in range(24)
        )
    )
    (folder / "prompts.jsonl").write_text(
        "".join(
            json.dumps({"id": task, "task": task, "turns": [f"Say {task}, {task}."]}) + "\n"
            for task in ("math", "chat")
        )
    )
    for name, family in (("one", ["medusa"]), ("two", ["eagle3", "drafter.layers=[1,2,3]"])):
        told = ["train", f"run.dir={folder / name}", f"drafter={family[0]}", *family[1:], *QUICK]
        told += [f"model.path={tiny_target_dir}", "data=jsonl", f"data.path={data}"]
        told += ["data.holdout=2", "trainer.max_steps=2", "trainer.tokens_per_step=64"]
        told += ["trainer.validation_prompts=1", "trainer.validation_tokens=4"]
        assert main(told) == 0
    told = ["export", f"run.dir={folder / 'one'}", "export=vllm"]
    assert main([*told, f"export.dir={folder / 'served'}"]) == 0
    return folder


def model_of(place: Path) -> str:
    return str(yaml.safe_load((place / "one" / "config.yaml").read_text())["model"]["path"])


def arguments(place: Path, members: list[str], run: Path, model: str = "") -> list[str]:
    told = ["evaluate", "drafter=ensemble", f"drafter.members=[{','.join(members)}]", *SHORT]
    told += [f"run.dir={run}", f"model.path={model or model_of(place)}", *QUICK]
    return [*told, f"eval.prompts={place / 'prompts.jsonl'}"]


def report_of(run: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluations" / name / "report.json").read_text())
    return found


def test_an_ensemble_is_certified_beside_plain_decoding(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = arguments(place, [str(place / "two"), "ngram"], tmp_path / "new")
    told += ["eval.policy=dynamic_tree", "eval.tree_nodes=8", "eval.tree_width=3"]
    assert main([*told, "eval.tree_temperature=0.5"]) == 2
    wanted = "eval.tree_temperature must be 1 with drafter=ensemble, which finds its proposals in"
    assert wanted in capsys.readouterr().err
    assert main([*told, "eval.certify=true", "eval.batch_size=2", "eval.draft_temperature=0"]) == 0
    report = report_of(tmp_path / "new", "ensemble")
    assert report["certificate"]["certified"], report["certificate"]
    assert report["drafter"] == "ensemble"
    assert "ngram" in report["methods"], "the reference is measured besides"
    origin = report["provenance"]["drafter"]
    assert str(place / "two/checkpoints") in origin
    assert origin.endswith(", ngram")
    notes = "\n".join(report["notes"])
    assert f"member {place / 'two'}: step-000002" in notes
    # The folder of an evaluation is told once more by its name alone.
    again = [f"run.dir={tmp_path / 'new'}", f"eval.prompts={place / 'prompts.jsonl'}"]
    assert main(["evaluate", *again, *SHORT, "eval.name=again"]) == 0


def test_members_of_every_origin_stand_beside_each_other(place: Path, tmp_path: Path) -> None:
    """A directory that engines load, a run, and an entry with settings; then `compare`."""
    members = [str(place / "served"), str(place / "two"), "two_model"]
    told = arguments(place, members, tmp_path / "all")
    told += [f"drafter.settings={{two_model: {{path: {draft_model_dir(97)}}}}}"]
    assert main([*told, "eval.name=default"]) == 0
    report = report_of(tmp_path / "all", "default")
    assert report["lossless"]["greedy_identical"] == report["lossless"]["greedy_total"] == 2
    prompts = f"eval.prompts={place / 'prompts.jsonl'}"
    alone = ["evaluate", f"run.dir={place / 'two'}", *SHORT, prompts]
    assert main(alone) == 0
    runs = f"runs=[{tmp_path / 'all'},{place / 'two'}]"
    assert main(["compare", runs, f"compare.dir={tmp_path / 'beside'}"]) == 0
    assert (tmp_path / "beside").is_dir()


def test_an_ensemble_is_loaded_from_python(place: Path) -> None:
    target = drafttrain.load_target(model_of(place), device="cpu", dtype="float32")
    drafter = drafttrain.load_drafter("ensemble", target, members=[str(place / "one"), "ngram"])
    settings: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "depth": 3}
    answer = drafttrain.generate(target, drafter, "Say 4, 4.", **settings)
    assert answer.tokens == drafttrain.generate(target, None, "Say 4, 4.", **settings).tokens


@pytest.mark.parametrize(
    ("members", "more", "said"),
    [
        ("[]", "", "drafter.members must name at least two drafters, each once, got []"),
        ("[ngram]", "", "drafter.members must name at least two drafters, each once, got ['ngr"),
        ("[ngram,ngram]", "", "drafter.members must name at least two drafters, each once, got"),
        ("ngram", "", "drafter.members must be a list of texts such as [a,b], got ngram"),
        ("[[ngram],a]", "", "drafter.members must be a list of texts such as [a,b], got "),
        ("[ngram,nowhere]", "", "drafter.members must be folders of runs, directories with a dr"),
        ("[ngram,medusa]", "", "drafter.members must name a trained medusa by its folder, as in "),
        ("[ngram,ensemble]", "", "drafter.members must be single drafters, got ensemble, which h"),
        ("[ngram,EVALUATED]", "", "drafter.members must be single drafters, got EVALUATED"),
        ("[ngram,EMPTY]", "", "drafter.members: EMPTY must be loaded: "),
        ("[ngram,UNTRAINED]", "", "drafter.members: UNTRAINED must be loaded: run.dir=UNTRAINED"),
        ("[ngram,BROKEN]", "", "drafter.members: BROKEN must be usable: drafter.num_heads must be"),
        ("[ngram,admitted]", "", "drafter.members: admitted must be usable: drafter.path must be"),
        ("[ngram,two_model]", "", "drafter.members: two_model must be loaded: drafter.path must "),
        ("[ngram,ONE]", "{ONE: {a: 1}}", "drafter.settings must be of names in conf/drafter, go"),
        ("[ngram,ONE]", "{x: {a: 1}}", "drafter.settings must be of drafters in drafter.members"),
        ("[ngram,ONE]", "{ngram: {a: 1}}", "drafter.members: ngram must be usable: drafter.a is"),
        (
            "[ngram,two_model]",
            "{two_model: {trust_remote_code: true}}",
            "drafter.settings must not hold trust_remote_code, got it for two_model",
        ),
        ("[ngram,ONE]", "{ngram: {_target_: x}}", "drafter.settings must not hold _target_, got "),
    ],
)
def test_a_mistake_is_one_line_before_decoding(
    members: str,
    more: str,
    said: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("EMPTY", "UNTRAINED", "BROKEN", "EVALUATED")
    folders = {name: tmp_path / name.lower() for name in names}
    for folder in folders.values():
        folder.mkdir()
    folders["ONE"] = place / "one"
    recorded = (place / "one" / "config.yaml").read_text()
    for file in ("config.yaml", "provenance.json"):
        shutil.copy(place / "one" / file, folders["UNTRAINED"] / file)
    broken = recorded.replace("num_heads: 4", "num_heads: none")
    (folders["BROKEN"] / "config.yaml").write_text(broken)
    saved = yaml.safe_load((Path(__file__).parents[2] / "conf/drafter/ensemble.yaml").read_text())
    saved = yaml.safe_load(recorded) | {"drafter": saved | {"members": ["a", "b"]}}
    (folders["EVALUATED"] / "config.yaml").write_text(yaml.safe_dump(saved))
    for name, folder in folders.items():
        members, more = members.replace(name, str(folder)), more.replace(name, str(folder))
        said = said.replace(name, str(folder))
    told = arguments(place, [], tmp_path / "new")
    told[2] = f"drafter.members={members}"
    assert main([*told, *([f"drafter.settings={more}"] if more else [])]) in (1, 2)
    assert_refused(capsys, said, tmp_path / "new")


def assert_refused(capsys: pytest.CaptureFixture[str], said: str, run: Path) -> None:
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert lines[-1:] == errors, lines
    assert errors[0].startswith(f"error: {said}"), errors
    assert not (run / "evaluations").exists()


@pytest.mark.parametrize("member", ["one", "served"])
def test_a_member_that_was_trained_on_another_target_is_refused(
    member: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_of(place), other)
    settings = json.loads((other / "config.json").read_text()) | {"initializer_range": 0.5}
    (other / "config.json").write_text(json.dumps(settings))
    told = arguments(place, ["ngram", str(place / member)], tmp_path / "new", str(other))
    assert main(told) == 2
    said = "drafter.members must be trained on other, got "
    assert_refused(capsys, said, tmp_path / "new")


def test_a_run_is_joined_with_prompt_lookup_by_one_override(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "two", run)
    prompts = tmp_path / "prompts.jsonl"
    text = "one two three four five six. " * 3
    lines = [{"id": str(n), "task": "copy", "turns": [f"{text}{n}"]} for n in range(2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = [f"run.dir={run}", "drafter=ensemble"]
    short = [f"eval.prompts={prompts}", "eval.max_new_tokens=24", "eval.resamples=100"]
    assert main(["evaluate", *told, *short, "eval.blocks=1", "eval.policy=chain"]) == 0
    report = report_of(run, "ensemble")
    assert report["lossless"]["greedy_identical"] == report["lossless"]["greedy_total"] == 2
    row = report["summary"]
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert row[name] == sum(part[name] for part in row["by_member"].values())
    assert {"eagle3", "ngram"} < report["methods"].keys(), "each member is measured alone"
    said = " ".join(capsys.readouterr().out.split())
    for name, part in row["by_member"].items():
        assert f"{name}: in {part['num_drafts']} draft" in said
    asked = ["chat.prompt=One two three.", "chat.max_new_tokens=12"]
    answers = []
    for drafter in (told, [told[0]]):
        assert main(["generate", *drafter, *asked]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert main(["export", *told, f"export.dir={tmp_path / 'out'}"]) in (1, 2)
    assert "has no weights of its own, and no engine drafts so" in capsys.readouterr().err
    assert main(["export", told[0], "export=vllm", f"export.dir={tmp_path / 'out'}"]) == 0
    assert "No engine joins drafters" in (tmp_path / "out" / "README.md").read_text()
