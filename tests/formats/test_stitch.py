"""A drafter within its target's checkpoint: whole, linked, read back, fine-tuned and replaced."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from builders import drafter_config, model_config
from conftest import character_tokenizer
from safetensors.torch import load_file, save_file
from test_read import admitted
from test_write import CARD, config_of
from transformers import AutoModelForCausalLM

from drafttrain.__main__ import main
from drafttrain.drafters.base import Drafter
from drafttrain.formats.write.export import Exported, export_drafter
from drafttrain.target.model import Target, load_target

LONG = {"max_position_embeddings": 512}
ADDED = "drafter.safetensors"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 in several files."""
    folder = tmp_path_factory.mktemp("qwen2") / "target"
    build("qwen2", LONG).model.save_pretrained(folder, max_shard_size="20KB")
    character_tokenizer().save_pretrained(folder)
    (folder / "modeling_own.py").write_text("# code that some targets bring\n")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def loaded(folder: Path) -> Target:
    return load_target(model_config(folder), torch.float32, "cpu")


def drafter_for(target: Target, seed: int = 0, **changes: Any) -> Drafter:
    torch.manual_seed(seed)
    drafter = drafter_config("mtp", **changes).build(target.spec)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return drafter.eval()


def export(drafter: Drafter, target: Path, out: Path, **changes: Any) -> Exported:
    card = dataclasses.replace(CARD, family="mtp", about=drafter.about)
    settings = config_of(dtype="float32", **changes)
    return export_drafter(drafter, str(target), out, settings, card, target_folder=lambda: target)


def weights_of(folder: Path) -> dict[str, Any]:
    files = (file for file in folder.glob("*.safetensors") if file.name != ADDED)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def state_of(folder: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    return model.state_dict()


def test_the_targets_files_are_linked_and_the_module_is_beside_them(
    sharded: Path, tmp_path: Path
) -> None:
    target, out = loaded(sharded), tmp_path / "out"
    before = {file.name: (file.read_bytes(), file.stat().st_mode) for file in sharded.iterdir()}
    drafter = drafter_for(target)
    done = export(drafter, sharded, out)
    after = {file.name: (file.read_bytes(), file.stat().st_mode) for file in sharded.iterdir()}
    assert after == before
    shards = {file.name for file in sharded.glob("*.safetensors")}
    assert all((out / name).samefile(sharded / name) for name in shards)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {
        **json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"],
        **dict.fromkeys(load_file(out / ADDED), ADDED),
    }
    theirs = json.loads((sharded / "config.json").read_text())
    ours = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    assert json.loads((out / "config.json").read_text()) == theirs | ours
    for name in ("tokenizer.json", "modeling_own.py"):
        assert (out / name).read_bytes() == (sharded / name).read_bytes()
    command = shlex.split(done.commands["vLLM"])
    assert command[:3] == ["vllm", "serve", str(out)]
    assert json.loads(command[-1]) == {
        **{"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
    }
    assert any(note.startswith("No SGLang command") for note in done.notes)


def test_transformers_and_we_load_the_target_and_the_module_bit_for_bit(
    sharded: Path, tmp_path: Path
) -> None:
    target, out = loaded(sharded), tmp_path / "out"
    drafter = drafter_for(target)
    export(drafter, sharded, out)
    assert all(torch.equal(t, state_of(sharded)[n]) for n, t in state_of(out).items())
    for place in (target, loaded(out)):
        theirs = admitted(out, place).drafter
        assert theirs.captures == (target.spec.num_layers,)
        state = theirs.state_dict()
        assert state.keys() == drafter.state_dict().keys()
        assert all(torch.equal(t, state[n]) for n, t in drafter.state_dict().items())


@pytest.mark.parametrize("mixed", [False, True])
def test_a_module_that_is_there_is_replaced(sharded: Path, tmp_path: Path, mixed: bool) -> None:
    """mixed: its tensors lie in a file of the target's, as in the Hub's checkpoints."""
    target, first = loaded(sharded), tmp_path / "first"
    export(drafter_for(target), sharded, first)
    if mixed:
        one = tmp_path / "one"
        one.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "modeling_own.py"):
            (one / name).write_bytes((first / name).read_bytes())
        save_file(weights_of(first) | load_file(first / ADDED), one / "model.safetensors")
        first = one
    other = drafter_for(target, seed=1)
    second = tmp_path / "second"
    export(drafter_config("mtp").build(loaded(first).spec).eval(), first, second)
    for _ in range(2):  # over an earlier export, too
        fresh = other.config.build(loaded(first).spec)
        fresh.load_weights(other.state_dict())
        export(fresh.eval(), first, second, overwrite=True)
    state = admitted(second, target).drafter.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())
    names = [n for file in second.glob("*.safetensors") for n in load_file(file)]
    assert len(names) == len(set(names)), "engines would load one of two"
    assert weights_of(second).keys() == weights_of(sharded).keys()


def test_other_files_of_a_user_are_never_replaced(sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ADDED).write_text("mine")
    with pytest.raises(ValueError, match=f"but {out} holds {ADDED}"):
        export(drafter_for(loaded(sharded)), sharded, out, overwrite=True)


def test_a_target_without_a_class_in_vllm_is_written_and_the_reason_said(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    done = export(drafter_for(loaded(tiny_target_dir)), tiny_target_dir, tmp_path / "out")
    assert done.commands == {}
    because = "vLLM 0.32.0 has no class for an MTP module in llama targets"
    assert f"No vLLM command: {because}." in done.notes
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert admitted(tmp_path / "out", loaded(tiny_target_dir)).family == "mtp"


def test_both_spellings_come_back_bit_for_bit(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = loaded(tiny_target_dir)
    drafter = drafter_for(target, variant="qwen", attention_bias=False)
    export(drafter, tiny_target_dir, tmp_path / "out")
    names = load_file(tmp_path / "out" / ADDED).keys()
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight"} <= names
    theirs = admitted(tmp_path / "out", target).drafter
    assert theirs.captures == ()
    state = theirs.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": False}, "config.json's attention_bias must be True, got False"),
        ({"variant": "qwen"}, "config.json's variant must be mimo, got qwen"),
        ({"intermediate_size": 80}, "config.json's intermediate_size must be 48, got 80"),
        ({"qk_norm": True}, "config.json's qk_norm must be False, got True"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            r"rope_scaling must be None, got \{'rope_type': 'linear', 'factor': 2\.0\}",
        ),
    ],
)
def test_what_engines_would_misread_is_refused(
    changes: dict[str, Any], said: str, sharded: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        export(drafter_for(loaded(sharded), **changes), sharded, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_hold_it_is_named(
    sharded: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    drafter, out = drafter_for(loaded(sharded)), tmp_path / "out"
    card = dataclasses.replace(CARD, family="mtp")
    with pytest.raises(ValueError, match=r"must be a directory or a repository .* has no files"):
        export_drafter(drafter, "random", out, config_of(), card, target_folder=lambda: None)
    with pytest.raises(ValueError, match="the configuration and weights differ: "):
        export(drafter, tiny_target_dir, out)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(state_of(sharded), pickled / "pytorch_model.bin")
    (pickled / "config.json").write_bytes((sharded / "config.json").read_bytes())
    drafter.spec = dataclasses.replace(drafter.spec, fingerprint="")
    with pytest.raises(ValueError, match="must hold its weights as safetensors for a mtp drafter"):
        export(drafter, pickled, out)
    assert not out.exists()


def test_the_targets_own_module_is_trained_further_and_put_back(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    export(drafter_for(loaded(sharded)), sharded, theirs)
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    lines = [{"messages": [{**turns[0], "content": f"Hi {n}."}, turns[1]]} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = ["train", f"run.dir={run}", f"model.path={theirs}", "drafter=mtp", "data=jsonl"]
    told += [f"data.path={tmp_path / 'data.jsonl'}", "data.holdout=2", "drafter.unroll=2"]
    told += ["trainer.max_steps=2", "trainer.tokens_per_step=64", "trainer.validation_prompts=1"]
    told += ["trainer.validation_tokens=4", "hardware=cpu", "hardware.threads=1"]
    told += ["hardware.dtype=float32"]
    assert main([*told, f"run.init_from={sharded}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "must hold an MTP module in its target, named as MiMo's or Qwen3-Next's, and" in error
    assert main([*told, f"run.init_from={theirs}"]) == 0
    assert "MTP module" in capsys.readouterr().out
    start = load_file(run / "initial" / "drafter.safetensors")
    own = admitted(theirs, loaded(theirs)).drafter.state_dict()
    assert all(torch.equal(start[name], tensor) for name, tensor in own.items())
    out = tmp_path / "out"
    assert main(["export", f"run.dir={run}", f"export.dir={out}", "export.dtype=float32"]) == 0
    trained = admitted(out, loaded(sharded)).drafter.state_dict()
    assert not torch.equal(trained["layer.input_proj.weight"], own["layer.input_proj.weight"])
    assert all(torch.equal(t, weights_of(sharded)[n]) for n, t in weights_of(out).items())
