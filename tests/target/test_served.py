"""What stands beside a served target: its two ends, its documents, the process that serves it."""

import importlib.util
import json
import os
import re
import shutil
import stat
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from builders import model_config
from conftest import character_tokenizer
from paths import ROOT
from safetensors.torch import load_file, save_file

from drafttrain.__main__ import PLACES, main
from drafttrain.config.compose import load_choice
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import Sample
from drafttrain.data.batches import collate, documents_of, pack
from drafttrain.target.describe import open_target, read_out
from drafttrain.target.model import load_target
from drafttrain.target.pretrained.models import EMBEDDED, load_model_config
from drafttrain.target.served import ServedTarget, directory, load_ends, visible_name
from drafttrain.target.vllm import worker
from drafttrain.target.vllm.config import VllmConfig
from drafttrain.target.vllm.engine import VllmEngine
from drafttrain.target.vllm.process import HAS_VLLM, VARIABLE, require_vllm

CONF = ROOT / "conf"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("embedded", [True, False], ids=["tied", "with a head of its own"])
def test_two_ends_are_those_of_the_whole_model(
    embedded: bool, dtype: torch.dtype, tiny_target_dir: Path
) -> None:
    config = model_config(EMBEDDED if embedded else tiny_target_dir)
    target = load_target(config, dtype, "cpu")
    settings = load_model_config(config)
    model = load_ends(config, settings, dtype, "cpu")
    assert all(parameter.is_meta for parameter in model.get_decoder().layers.parameters())
    ends = read_out(model)
    for name in ("embedding", "head", "norm"):
        ours, whole = getattr(ends, name), getattr(target.readout, name)
        assert ours.dtype == dtype
        assert torch.equal(ours, whole)
    assert (ends.head is ends.embedding) == embedded
    hidden = torch.randn(2, 3, target.spec.hidden_size).to(dtype)
    assert torch.equal(model.get_decoder().norm(hidden), target.final_norm(hidden))
    assert open_target(config)[2] == replace(target.spec, fingerprint="")


def test_a_scale_that_no_file_holds_is_read_out(tmp_path: Path) -> None:
    """Gemma multiplies embeddings by a buffer, and stores its norm less 1."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    whole = Gemma2ForCausalLM(Gemma2Config(**shape, **heads))
    torch.nn.init.normal_(whole.model.norm.weight)
    whole.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    config = model_config(tmp_path)
    ends = load_ends(config, load_model_config(config), torch.float32, "cpu")
    expected, found = read_out(whole), read_out(ends)
    assert found.embedding_scale == expected.embedding_scale != 1
    assert found.soft_cap == expected.soft_cap is not None
    assert found.norm is not None
    assert expected.norm is not None
    torch.testing.assert_close(found.norm, expected.norm)


def test_ends_are_found_under_another_prefix_and_checked(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    place = tmp_path / "target"
    shutil.copytree(tiny_target_dir, place)
    file = place / "model.safetensors"
    tensors = load_file(file)
    renamed = {f"language_model.{name}": value for name, value in tensors.items()}
    save_file(renamed, file)
    config = model_config(place)
    settings = load_model_config(config)
    ends = load_ends(config, settings, torch.float32, "cpu")
    assert torch.equal(ends.get_input_embeddings().weight, tensors["model.embed_tokens.weight"])
    short = tensors | {"lm_head.weight": tensors["lm_head.weight"][:5]}
    save_file(short, file)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight must be of shape \(97, 32\) .* \(5, 32\)"
    ):
        load_ends(config, settings, torch.float32, "cpu")
    del short["model.norm.weight"]
    save_file(short, file)
    with pytest.raises(ValueError, match=r"must hold model\.norm\.weight, got none"):
        load_ends(config, settings, torch.float32, "cpu")


def test_what_runs_must_be_what_lies_on_the_disk(tiny_target_dir: Path) -> None:
    import dataclasses

    with pytest.raises(ValueError, match=r"model\.inflate must be null for vLLM, .*got 1M"):
        directory(dataclasses.replace(model_config(tiny_target_dir), inflate="1M"))
    with pytest.raises(ValueError, match="model=random draws its weights, and vLLM loads those"):
        directory(load_choice("model", "random"))


def test_documents_are_found_in_padded_and_in_packed_rows() -> None:
    samples = [
        Sample(torch.arange(length), torch.ones(length) > 0, index)
        for index, length in enumerate((3, 5, 2))
    ]
    apart = [span[:3] for span in documents_of(collate(samples))]
    assert apart == [(0, 0, 3), (1, 0, 5), (2, 0, 2)]
    packed = pack(samples, 8)
    found = [
        (int(packed.document[row, start]), stop - start)
        for row, start, stop, *_ in documents_of(packed)
    ]
    assert sorted(found) == [(0, 3), (1, 5), (2, 2)]


def test_another_process_sees_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_name(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc")
    assert [visible_name(0), visible_name(1)] == ["4", "GPU-abc"]


# The process


def engine_of(folder: Path, body: str, **changes: Any) -> VllmEngine:
    """An engine whose worker is this Python script: it sees the request as sys.argv[-1]."""
    python = folder / "python"
    script = folder / "script.py"
    script.write_text(f"import json, sys, time\n{body}\n")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    values = yaml.safe_load((CONF / "vllm" / "default.yaml").read_text())
    config = VllmConfig(**values | {"python": str(python), "patience": 20.0} | changes)
    return VllmEngine(
        folder, config, dtype="float32", device="cpu", longest=9, folder=folder / "log"
    )


READY = "print(json.dumps({'event': 'ready', 'version': '1'}), flush=True)\n"


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ended with code 3: RuntimeError: no room; the log is"):
        engine_of(tmp_path, "print('RuntimeError: no room', file=sys.stderr); sys.exit(3)")
    error = "{'event': 'error', 'text': \"ModuleNotFoundError: No module named 'vllm'\"}"
    with pytest.raises(ValueError, match=r"vllm\.python must name .* vllm cannot be imported"):
        engine_of(tmp_path, f"print(json.dumps({error})); sys.exit(1)")
    with pytest.raises(ValueError, match=r"printed nothing for 0\.5 s and was ended"):
        engine_of(tmp_path, "time.sleep(60)", patience=0.5)
    request = json.loads((tmp_path / "log" / "vllm_request.json").read_text())
    assert request["max_model_len"] == 10


@pytest.mark.parametrize("command", ["train", "capture", "regenerate"])
def test_an_interpreter_without_vllm_is_named_before_anything_is_loaded(
    command: str,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, asked = tmp_path / "data.jsonl", "hardware.target_placement=vllm"
    data.write_text('{"prompt": "Hello"}\n')
    # One thread, as in all tests: what forks later in this process would wait for the others.
    call = [command, f"model.path={tiny_target_dir}", "hardware=cpu", "hardware.threads=1"]
    if command == "regenerate":
        asked = "regenerate.backend=vllm"
        call += [f"regenerate.out={tmp_path / 'out.jsonl'}"]
    else:
        call += ["data=jsonl", f"{PLACES.get(command, 'run')}.dir={tmp_path / 'out'}"]
    call += [f"data.path={data}", asked]
    # What loads anything asks for one of these.
    for function in ("setup.target_and_drafter.load_tokenizer", "regenerate.open_target"):
        monkeypatch.setattr(f"drafttrain.commands.{function}", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    without = tmp_path / "python"
    without.symlink_to("/bin/true")
    for python, said in (
        ("null", rf"{asked} must know an interpreter with vLLM: vllm is not installed here"),
        ("nowhere", "vllm.python must name the .* got 'nowhere', which is not a program"),
        (without, rf"vllm.python must name the .* got {without}, which has none: install it"),
    ):
        if python == "null" and importlib.util.find_spec("vllm"):
            continue
        assert main([*call, f"vllm.python={python}"]) == 2
        assert re.match(f"error: {said}", capsys.readouterr().err)
    with_vllm = tmp_path / "with"
    with_vllm.write_text(f"#!/bin/sh\necho {HAS_VLLM}\n")
    with_vllm.chmod(0o755)
    require_vllm(str(with_vllm), asked)


def test_a_worker_is_given_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ["HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"]
    secrets += ["AWS_SESSION_TOKEN", "VLLM_API_KEY", "GITHUB_TOKEN", "HTTPS_PROXY", "MY_PASSWORD"]
    needed = ["CUDA_HOME", "LD_LIBRARY_PATH", "VLLM_MAX_TOKENS_PER_EXPERT", "NCCL_DEBUG", "HF_HOME"]
    for name in (*secrets, *needed, "PYTHONPATH", "RANK"):
        monkeypatch.setenv(name, "5")
    told = "import os\n" + READY.replace("'1'", "' '.join(os.environ)")
    with engine_of(tmp_path, told, devices="4") as engine:
        given = set(engine.version.split())
    assert not given & {*secrets, "PYTHONPATH", "RANK"}
    assert given >= {*needed, "PATH", "HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    probe = tmp_path / "probe"
    probe.write_text(f"#!/bin/sh\nenv > {tmp_path / 'seen'}\necho {HAS_VLLM}\n")
    probe.chmod(0o755)
    require_vllm(str(probe), "")
    assert not any(secret in (tmp_path / "seen").read_text() for secret in secrets)


def test_an_engine_that_dies_at_work_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with engine_of(tmp_path, READY + "sys.stdin.readline(); sys.exit(9)") as engine:
        assert engine.exchange.is_dir()
        engine.submit(0, [1], sampling=GREEDY, max_new_tokens=1, seed=0, stop_tokens=[])
        with pytest.raises(ValueError, match="vLLM ended with code 9: nothing"):
            engine.next_answer()
    assert not engine.exchange.exists()
    assert engine.process.process.poll() is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 1.5}, r"vllm\.memory must be in \(0, 1\], got 1\.5"),
        ({"max_num_seqs": 0}, r"vllm\.max_num_seqs must be at least 1, got 0"),
        ({"patience": 0.0}, r"vllm\.patience must be above 0, got 0"),
    ],
)
def test_settings_of_vllm_are_checked(change: dict[str, Any], message: str) -> None:
    values = yaml.safe_load((CONF / "vllm" / "default.yaml").read_text())
    with pytest.raises(ValueError, match=message):
        VllmConfig(**values | change)


def test_two_engines_fit_where_the_system_would_give_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were read fill the memory of any machine in the end; it is not taken."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    request = {"target": str(tmp_path), "device": "cpu", "dtype": "float32", "tensor_parallel": 1}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_AVPHYS_PAGES" else 4096)
    for gigabytes, fit in ((4, True), (1, False)):
        memory = SimpleNamespace(available=gigabytes << 30)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert worker.fits_twice(request) is fit


@pytest.mark.usefixtures("stand_ins")
def test_a_token_that_the_target_does_not_have_is_another_model(tiny_target_dir: Path) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")

    def read(prefixes: list[list[int]]) -> Any:
        states = [torch.zeros(len(prefix), 1, target.spec.hidden_size) for prefix in prefixes]
        return states, [(target.spec.vocab_size, -0.5)] * len(prefixes)

    engine: Any = SimpleNamespace(captures=(target.spec.num_layers,), read=read)
    served = ServedTarget(engine, target.final_norm, target.readout, target.spec, target.tokenizer)
    with pytest.raises(ValueError, match="they must be the same model"):
        served.check()
