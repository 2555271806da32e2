"""model.adapter: PEFT's LoRA is merged into the target, or refused in one line."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from builders import model_config, save_adapter
from safetensors.torch import load_file, save_file

from drafttrain.core.types import changed_part
from drafttrain.plan.shapes import shape_of
from drafttrain.runtime.ranks import Ranks
from drafttrain.target.model import load_target
from drafttrain.target.placement import choose_placement
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.models import fingerprint
from drafttrain.target.served import directory

CPU = torch.device("cpu")


@pytest.fixture
def adapter(tiny_target_dir: Path, tmp_path: Path) -> Path:
    return save_adapter(tiny_target_dir, tmp_path / "lora")


def adapted(base: Path, adapter: Path | str, **changes: Any) -> ModelConfig:
    return replace(model_config(base), adapter=str(adapter), **changes)


def change(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def mark(config: ModelConfig) -> str:
    return fingerprint(config, torch.float32, "cpu")


KINDS: dict[str, dict[str, Any]] = {
    "some layers": {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 32},
    "all layers": {"target_modules": "all-linear", "use_rslora": True},
    "DoRA": {"target_modules": ["v_proj"], "use_dora": True},
    "a head of its own": {"target_modules": r".*\.q_proj", "modules_to_save": ["lm_head"]},
    "ranks of their own": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {"v_proj": 64},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(kind: str, tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = save_adapter(tiny_target_dir, tmp_path / "lora", **KINDS[kind])
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    tokens = torch.arange(1, 30)[None]
    plain = base(tokens).logits
    with warnings.catch_warnings(action="ignore"):
        theirs = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().eval()
    target = load_target(adapted(tiny_target_dir, folder), torch.float32, "cpu")
    logits = target.model(tokens).logits
    assert torch.equal(logits, theirs(tokens).logits)
    assert not torch.allclose(logits, plain, atol=0.1)
    assert not any("lora" in name for name, _ in target.model.named_modules())
    assert {weight.dtype for weight in target.model.parameters()} == {torch.float32}
    assert target.spec.name == "tiny_test with adapter lora"


def test_the_fingerprint_is_of_both(tiny_target_dir: Path, adapter: Path, tmp_path: Path) -> None:
    base, both = mark(model_config(tiny_target_dir)), mark(adapted(tiny_target_dir, adapter))
    assert both.startswith(f"{base}-")
    moved = shutil.copytree(adapter, tmp_path / "moved")
    change(moved, base_model_name_or_path="elsewhere", lora_dropout=0.5, use_dora=None)
    assert mark(adapted(tiny_target_dir, moved)) == both
    scaled = shutil.copytree(adapter, tmp_path / "scaled")
    change(scaled, lora_alpha=0)
    tensors = load_file(moved / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] += 1e-3
    save_file(tensors, moved / "adapter_model.safetensors")
    marks = {base, both, *(mark(adapted(tiny_target_dir, one)) for one in (moved, scaled))}
    assert len(marks) == 4
    for other in marks - {both}:
        said = changed_part(both, other)
        assert said.startswith("the adapter differs: fingerprint ")
        shown = said.removeprefix("the adapter differs: fingerprint ").split(", now ")
        assert shown[0] != shown[1]


def with_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def do(adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return do


def cut(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (shutil.rmtree, r"must be a local directory .*missing: adapter_config\.json, adapt"),
    "no settings": (
        lambda adapter: (adapter / "adapter_config.json").unlink(),
        r"missing: adapter_config\.json;"),
    "pickled weights": (pickled, r"missing: adapter_model\.safetensors;.*\(\.bin\) must be conver"),
    "a torn file": (cut, r"adapter_model\.safetensors is torn.*copy or download it again"),
    "no JSON": (
        lambda adapter: (adapter / "adapter_config.json").write_text("{"), r"must be valid JSON"),
    "another kind": (lambda adapter: change(adapter, peft_type="IA3"), r"states peft_type=IA3;"),
    "no kind": (lambda adapter: change(adapter, peft_type=[1]), r"states peft_type=\[1\];"),
    "another task": (
        lambda adapter: change(adapter, task_type="SEQ_CLS"), r"states task_type=SEQ_CLS;"),
    "weights that were changed as well": (
        lambda adapter: change(adapter, init_lora_weights="pissa"),
        r"states init_lora_weights=pissa; merge it with PEFT"),
    "a module of anyone's": (
        lambda adapter: change(adapter, megatron_config={"a": 1}, megatron_core="antigravity"),
        r"states megatron_config="),
    "other layers": (
        lambda adapter: change(adapter, layer_replication=[[0, 4], [2, 4]]),
        r"states layer_replication="),
    "a rank that is text": (lambda adapter: change(adapter, r="4"), r"must fit "),
    "a rank of another shape": (
        lambda adapter: change(adapter, r=8),
        r"must fit model\.path=.*lora_A\.weight is \[4, 64\] instead of \[8, 64\] \(16 differ"),
    "an impossible rank": (lambda adapter: change(adapter, r=-1), r"must fit .*positive"),
    "an endless rank": (lambda adapter: change(adapter, r=10**18), r"model\.adapter=.*"),
    "a pattern of another kind": (
        lambda adapter: change(adapter, alpha_pattern=[1]), r"states alpha_pattern=\[1\]"),
    "a scale that is text": (lambda adapter: change(adapter, lora_alpha="a"), r"must fit "),
    "a pattern without end": (
        lambda adapter: change(adapter, rank_pattern={"(a+)+$": 4}), r"states rank_pattern=.*a\+"),
    "a tensor too few": (
        with_tensors(lambda tensors: tensors.pop(Q)),
        r"lora_A\.weight is missing instead of \[4, 32\] \(1 d"),
    "a tensor too many": (
        with_tensors(lambda tensors: tensors.update(
            {Q.replace("layers.0", "layers.9"): tensors[Q].clone()})),
        r"layers\.9.*is \[4, 32\] instead of none"),
    "a tensor that is none's": (
        with_tensors(lambda tensors: tensors.update({"x": torch.ones(2)})),
        r"x is \[2\] instead of none"),
    "no LoRA": (with_tensors(lambda tensors: [
        tensors.pop(name) for name in list(tensors)] + [tensors.update(a=torch.ones(1))]),
        r"a is \[1\] instead of none"),
    "an adapter of norms": (with_tensors(lambda tensors: tensors.update(
        {Q.replace("self_attn.q_proj", "input_layernorm"): tensors[Q].clone()})),
        r"must fit .*Target module LlamaRMSNorm"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_merged_is_one_line(
    name: str, tiny_target_dir: Path, adapter: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """For the plan as for the target itself."""
    do, said = WRONG[name]
    do(adapter)
    config = adapted(tiny_target_dir, adapter)
    for use in (lambda: load_target(config, torch.float32, "cpu"), lambda: shape_of(config)):
        with pytest.raises(ValueError, match=said) as caught:
            use()
        assert str(caught.value).startswith(f"model.adapter={adapter}")
        assert str(caught.value).isprintable()
    assert not recwarn.list


def test_an_adapter_of_a_wider_model_is_named_with_its_model(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_target_dir, hidden_size=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    adapter = save_adapter(tmp_path / "wide", tmp_path / "lora")
    said = rf"^model\.adapter={adapter}, trained for {tmp_path / 'wide'}, must fit .*64, 4"
    with pytest.raises(ValueError, match=said):
        shape_of(adapted(tiny_target_dir, adapter))


def test_weights_that_are_no_numbers_are_refused(tiny_target_dir: Path, adapter: Path) -> None:
    with_tensors(lambda tensors: tensors[Q].fill_(torch.nan))(adapter)
    with pytest.raises(ValueError, match=r"^model\.adapter=.* cannot be merged: .*NaN"):
        load_target(adapted(tiny_target_dir, adapter), torch.float32, "cpu")


def test_a_matrix_that_is_embedding_and_head_is_not_adapted(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """PEFT would merge what is for the one into the other as well."""
    base = shutil.copytree(tiny_target_dir, tmp_path / "tied")
    settings = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(settings))
    adapter = save_adapter(base, tmp_path / "lora", target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="whose embedding and head are one matrix"):
        shape_of(adapted(base, adapter))


def test_readers_of_files_refuse_it(tiny_target_dir: Path, adapter: Path) -> None:
    config = adapted(tiny_target_dir, adapter)
    assert choose_placement("auto", config, torch.float32, Ranks(0, 0, 1, CPU)).kind == "device"
    uses: tuple[Callable[[], Any], ...] = (
        lambda: directory(config),
        *(
            partial(choose_placement, asked, config, torch.float32, Ranks(0, 0, 1, CPU))
            for asked in ("zero3", "device_map", "vllm")
        ),
        lambda: adapted(tiny_target_dir, adapter, quantization="bnb-8bit"),
    )
    for use in uses:
        with pytest.raises(ValueError, match=r"^model\.adapter must be null .*merge it with PEFT"):
            use()


def test_an_adapted_target_is_inflated(tiny_target_dir: Path, adapter: Path) -> None:
    config = adapted(tiny_target_dir, adapter)
    small = load_target(config, torch.float32, "cpu")
    large = load_target(replace(config, inflate="200K"), torch.float32, "cpu")
    tokens = torch.arange(1, 30)[None]
    assert large.num_parameters > 2 * small.num_parameters
    assert torch.allclose(large.model(tokens).logits, small.model(tokens).logits, atol=1e-4)
