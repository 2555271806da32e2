"""model.adapter through the commands: recorded, found from anywhere, never lost in silence."""

import io
import json
from pathlib import Path

import pytest
import torch
import yaml
from builders import save_adapter

import drafttrain
from drafttrain.__main__ import main

QUICK = ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32"]
SHORT = ["eval.prompts_per_task=1", "eval.max_new_tokens=4", "eval.depth=2", "eval.blocks=1"]
BASE, ADAPTED = "model.path=base", "model.adapter=lora"


@pytest.fixture(scope="module")
def place(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, an adapter, data, and a run that was trained on both for two steps."""
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "base").symlink_to(tiny_target_dir)
    save_adapter(tiny_target_dir, folder / "lora")
    with (folder / "data.jsonl").open("w") as file:
        for number in range(8):
            turns = [{"role": "user", "content": f"Say {number}."}]
            turns += [{"role": "assistant", "content": f"It is {number}, I think."}]
            file.write(json.dumps({"messages": turns}) + "\n")
    told = ["train", "run.dir=run", BASE, ADAPTED, *QUICK, "drafter=medusa", "data=jsonl"]
    told += ["data.path=data.jsonl", "data.holdout=2", "trainer.tokens_per_step=32"]
    told += ["trainer.validation_prompts=1", "trainer.validation_tokens=4", "trainer.max_steps=2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(told) == 0
    return folder


def test_a_run_records_it_and_is_used_from_elsewhere(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = yaml.safe_load((place / "run" / "config.yaml").read_text())["model"]
    assert saved["adapter"] == str(place / "lora")
    log = (place / "run" / "train.log").read_text()
    assert "target: base with adapter lora, " in log
    assert f"its adapter was trained for {saved['path']}"[:35] in log
    monkeypatch.chdir(tmp_path)
    run = f"run.dir={place / 'run'}"
    assert main(["evaluate", run, *QUICK, *SHORT]) == 0
    said = capsys.readouterr().out
    assert "trained for" not in said.replace("its adapter was trained for", "")
    assert main(["train", run, "run.resume=true", "trainer.max_steps=3", *QUICK]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["generate", run, *QUICK, "chat.prompt=Hello", "chat.max_new_tokens=4"]) == 0


def test_the_base_alone_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    told = ["run.dir=run", "model.adapter=null", *QUICK]
    assert main(["evaluate", *told, *SHORT, "eval.name=base"]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert f"trained for base ({place / 'base'} with model.adapter={place / 'lora'}), " in said
    assert f"measured on base ({place / 'base'}): the adapter differs: fingerprint " in said
    assert main(["train", *told, "run.resume=true", "trainer.max_steps=4"]) == 2
    assert "the adapter differs" in capsys.readouterr().err.replace("\n", " ")


def test_the_next_commands_have_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `capture` and `regenerate` print is typed as it stands."""
    monkeypatch.chdir(place)
    told = [BASE, ADAPTED, *QUICK, "data.path=data.jsonl"]
    assert main(["capture", "store.dir=store", *told, "data=jsonl", "drafter=medusa"]) == 0
    assert (
        main(["regenerate", "regenerate.out=out.jsonl", *told, "regenerate.max_new_tokens=8"]) == 0
    )
    said = capsys.readouterr().out.replace("\n", " ")
    assert said.count("model.path=base model.adapter=lora") == 2
    trained = ["train", "run.dir=stored", BASE, *QUICK, "drafter=medusa", "features=stored"]
    trained += ["features.dir=store", "trainer.max_steps=1", "trainer.tokens_per_step=32"]
    assert main(trained) == 2
    assert "the adapter differs" in capsys.readouterr().err.replace("\n", " ")
    assert main(["plan", BASE, ADAPTED, "drafter=medusa", "plan.dir=plan"]) == 0
    (place / "lora" / "adapter_config.json").rename(place / "lora" / "away.json")
    try:
        for command in (["plan", "plan.dir=again"], ["train", "run.dir=again"]):
            assert main([*command, BASE, ADAPTED, "drafter=medusa"]) != 0
            captured = capsys.readouterr()
            assert "missing: adapter_config.json" in (captured.err + captured.out)
    finally:
        (place / "lora" / "away.json").rename(place / "lora" / "adapter_config.json")


def test_an_export_has_no_path_of_it_and_says_what_to_serve(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main(["export", "run.dir=run", "export.dir=export"]) == 0
    said = capsys.readouterr().out
    assert "TARGET: where you save base with adapter lora, merged by PEFT" in said
    card = (place / "export" / "README.md").read_text()
    assert "medusa for base with adapter lora" in card
    assert str(place) not in card


def test_the_api_loads_it(place: Path) -> None:
    chosen = {"device": "cpu", "dtype": "float32"}
    target = drafttrain.load_target(place / "base", adapter=str(place / "lora"), **chosen)
    base = drafttrain.load_target(place / "base", **chosen)
    assert target.spec.fingerprint.startswith(f"{base.spec.fingerprint}-")
    tokens = torch.arange(1, 9)[None]
    assert not torch.allclose(target.model(tokens).logits, base.model(tokens).logits, atol=0.1)
    assert drafttrain.load_drafter(place / "run", target).captures is not None
