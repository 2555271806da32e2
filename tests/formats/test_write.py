"""Exports: engines accept anything, so everything they would misread must be an error here."""

import dataclasses
import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import drafter_config, model_config
from huggingface_hub import ModelCard
from paths import ROOT
from safetensors.torch import load_file, save_file

from drafttrain.core.readout import Readout
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Counters, DecodeStats, PromptResult, TargetFeatures, TargetSpec
from drafttrain.core.vocab import DraftVocab
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.ngram import NgramConfig
from drafttrain.drafters.serving.layout import ServedLayout
from drafttrain.formats.read.folder import open_folder
from drafttrain.formats.write.config import ExportSettings
from drafttrain.formats.write.export import Exported, check, export_drafter
from drafttrain.formats.write.precision import Precision, read_back
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.build import build_report
from drafttrain.report.card import CardData, model_card, read_run, served_as
from drafttrain.report.config import VerdictSettings
from drafttrain.report.results import (
    SCHEMA_VERSION,
    Evaluated,
    LimitedSampling,
    LosslessCheck,
    Report,
    TimingInfo,
)
from drafttrain.report.write import as_data, as_json
from drafttrain.runtime.untrusted_input import typed

FAMILIES = ("dflash", "dflash2", "dspark", "eagle3", "eagle3_1", "eagle", "medusa", "p_eagle")
VOCAB, HIDDEN = 200, 32
CARD = CardData(
    title="tiny-eagle3",
    family="eagle3",
    about=Eagle3.about,
    target="tiny",
    base_model="ada/tiny",
    license="apache-2.0",
    training={"data": {"name": "selfgen", "conversations": 512}, "steps": 300},
    provenance={"commit": "0123abc", "versions": {"torch": "2.13.0"}},
    reports={},
)


def spec(num_layers: int = 8) -> TargetSpec:
    return TargetSpec(
        name="tiny",
        fingerprint="f00d",
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,  # not hidden / heads: the head_dim key matters
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        max_positions=64,
        eos_token_ids=(5, 6),
        bos_token_id=1,
        pad_token_id=0,
    )


def drafter_of(family: str, num_layers: int = 8, layers: list[int] | None = None) -> Drafter:
    """A drafter with random weights everywhere, and a reduced vocabulary of 64 for eagle3."""
    torch.manual_seed(0)
    own = {"layers": layers, "intermediate_size": 40}
    reduced = {"draft_vocab_size": 64, "draft_vocab_coverage": 1.0}
    changes: dict[str, dict[str, Any]] = {
        "dflash": {"num_layers": 2},
        "dflash2": {"num_layers": 2, "selector_rank": 8},
        "dspark": {"num_layers": 2, "markov_rank": 8},
        "eagle3": own | reduced,
        "eagle3_1": reduced,
        "eagle": {"feature_noise": 0.0},
        "medusa": {"num_heads": 3, "num_layers": 2},
        "p_eagle": reduced | {"num_layers": 3, "own_embedding": False},
    }
    config = drafter_config(family, **changes[family])
    drafter = config.build(spec(num_layers))
    readout = Readout(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    drafter.prepare(torch.randint(1, 99, (VOCAB,)), readout)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


def config_of(**changes: Any) -> ExportSettings:
    file = ROOT / "conf" / "export" / "vllm.yaml"
    return ExportSettings(**{**yaml.safe_load(file.read_text()), **changes})


def export(drafter: Drafter, folder: Path, **changes: Any) -> Exported:
    card = dataclasses.replace(CARD, family=drafter.config.name, about=drafter.about)
    return export_drafter(drafter, "/models/tiny", folder, config_of(**changes), card)


def serving(family: str, **options: Any) -> tuple[Drafter, dict[str, Any], dict[str, torch.Tensor]]:
    drafter = drafter_of(family, **options)
    return drafter, *drafter.to_serving()


def layout_of(drafter: Drafter) -> ServedLayout:
    assert drafter.config.layout is not None
    return drafter.config.layout


def loaded(folder: Path, drafter: Drafter) -> Drafter:
    """The drafter that an export's reader makes of it, for a drafter's target."""
    files = open_folder(folder, allow_pickle=False)
    reading = layout_of(drafter).read(files, drafter.config, drafter.spec, None)
    assert not reading.complaints
    fresh = reading.config.build(reading.declared)
    fresh.load_weights(reading.tensors)
    return fresh


def complaint(
    drafter: Drafter, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> str | None:
    try:
        check(config, tensors, drafter.spec, drafter.captures, layout_of(drafter))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("family", "key"),
    [("eagle3", "head_dim"), ("eagle", "intermediate_size"), ("medusa", "num_heads")],
)
def test_a_key_that_is_missing_is_named(family: str, key: str) -> None:
    """A drafter of the user's own that left one out ended in a bare KeyError."""
    drafter, config, tensors = serving(family)
    del config[key]
    wanted = f"this {family} drafter cannot be served: config.json must hold {key}"
    assert complaint(drafter, config, tensors) == wanted


# Round trips


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_holds_every_tensor_of_its_layout_and_loads_back(
    family: str, tmp_path: Path
) -> None:
    drafter = drafter_of(family)
    done = export(drafter, tmp_path / "out", dtype="float32")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(done.sizes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {
        name: e for name, e in layout_of(drafter).expected_tensors(config).items() if e.required
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: expected.shape for name, expected in wanted.items()
    }
    assert config["torch_dtype"] == "float32"
    assert done.rounding.largest_difference == 0
    assert done.rounding.same_choice == 1
    read, original = loaded(tmp_path / "out", drafter).state_dict(), drafter.state_dict()
    original.pop("scale.factor", None)  # of EAGLE's embeddings: in fc
    assert all(torch.equal(read.pop(name), tensor) for name, tensor in original.items())
    assert not any(tensor.any() for tensor in read.values()), "EAGLE's files hold a bias of zeros"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_a_factor_of_embeddings_is_in_fc_and_rounds_nothing(dtype: str, tmp_path: Path) -> None:
    """In 8 bits a row's scale serves both halves of fc: there it rounds differently."""
    drafter: Any = drafter_of("eagle")
    drafter.scale.factor.fill_(16)
    done = export(drafter, tmp_path / "out", dtype=dtype)
    assert done.rounding.exact == (dtype != "fp8")
    written = done.rounding.written.state_dict()
    assert "scale.factor" not in written
    ratio = written["fc.weight"][:, :HIDDEN] / drafter.fc.weight[:, :HIDDEN]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 16), rtol=0.1, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_rounds_the_weights_and_says_how_far_that_moved_the_logits(
    family: str, tmp_path: Path
) -> None:
    done = export(drafter_of(family), tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    assert floats == {torch.bfloat16}
    assert 0 < done.rounding.largest_difference < 1
    text = "\n".join(done.lines())
    assert "loaded back: logits equal to those of the same weights, bit for bit" in text
    assert "rounding to bfloat16 moved logits by at most" in text


def test_frozen_copies_of_the_targets_layers_are_rounded_too(tmp_path: Path) -> None:
    """They are no parameters; a target in float16 or float32 has weights that bfloat16 rounds."""
    torch.manual_seed(0)
    drafter = drafter_config("early_exit", exit_layer=2).build(spec())
    done = export(drafter, tmp_path / "out", dtype="bfloat16")
    assert done.rounding.exact
    assert done.rounding.largest_difference > 0


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark"])
def test_a_mask_token_past_the_first_thousand_ids_is_exported(family: str, tmp_path: Path) -> None:
    large = dataclasses.replace(spec(), vocab_size=3000, pad_token_id=2999)
    drafter = drafter_config(family, num_layers=2).build(large)
    assert export(drafter, tmp_path / "out", dtype="float32").rounding.exact


def test_weights_that_are_not_the_drafters_are_noticed_when_read_back(tmp_path: Path) -> None:
    drafter = drafter_of("eagle")
    export(drafter, tmp_path / "out", dtype="float32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    read_back(tmp_path / "out", drafter, Precision(torch.float32), layout_of(drafter))
    tensors["layers.0.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match="does not give back the drafter: its logits differ"):
        read_back(tmp_path / "out", drafter, Precision(torch.float32), layout_of(drafter))


@pytest.mark.parametrize(
    ("format", "key", "value"),
    [
        ("vllm", "rope_theta", 10000.0),
        ("vllm", "rms_norm_eps", 1e-2),
        ("vllm", "norm_before_residual", True),
        ("speculators", "norm_output", True),
    ],
)
def test_a_setting_that_is_not_the_drafters_is_noticed_when_read_back(
    format: str, key: str, value: Any, tmp_path: Path
) -> None:
    drafter = drafter_of("eagle3")
    export(drafter, tmp_path, dtype="float32", format=format)
    layout = layout_of(drafter)
    written = layout.derived.get(format, layout)
    read_back(tmp_path, drafter, Precision(torch.float32), written)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ValueError, match="does not give back the drafter: its logits differ"):
        read_back(tmp_path, drafter, Precision(torch.float32), written)


# All or nothing


def test_a_failed_export_leaves_nothing_behind_and_an_earlier_one_untouched(tmp_path: Path) -> None:
    drafter = drafter_of("medusa")
    folder = tmp_path / "out"
    broken = dataclasses.replace(evaluation(), verdicts={})
    card = dataclasses.replace(CARD, family="medusa", reports={"quick": broken})
    with pytest.raises(KeyError, match="all"):
        export_drafter(drafter, "/models/tiny", folder, config_of(), card)
    assert list(tmp_path.iterdir()) == []
    export(drafter, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KeyError, match="all"):
        export_drafter(drafter, "/models/tiny", folder, config_of(overwrite=True), card)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_is_replaced_only_when_asked_and_only_if_it_is_an_export(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    export(drafter_of("medusa"), folder)
    with pytest.raises(ValueError, match=r"export.dir must be empty, .* export.overwrite=true"):
        export(drafter_of("eagle"), folder)
    export(drafter_of("eagle"), folder, overwrite=True)
    assert "fc.weight" in load_file(folder / "model.safetensors")
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds thesis.tex; choose another folder"):
        export(drafter_of("eagle"), folder, overwrite=True)
    assert (folder / "thesis.tex").read_text() == "years of work"
    with pytest.raises(ValueError, match=r"export\.dir must be a folder, got the file"):
        export(drafter_of("eagle"), folder / "thesis.tex", overwrite=True)
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "theirs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "theirs" / name).write_text("a model of somebody's")
    with pytest.raises(ValueError, match=r"safetensors, and no README.md that says"):
        export(drafter_of("eagle"), tmp_path / "theirs", overwrite=True)


# What engines do not check


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_unknown_or_misshapen_tensor_is_named(family: str) -> None:
    drafter, config, tensors = serving(family)
    assert complaint(drafter, config, tensors) is None
    for name, tensor in tensors.items():
        without = {other: value for other, value in tensors.items() if other != name}
        shape = list(tensor.shape)
        assert f"missing {name} of shape {shape}" in (complaint(drafter, config, without) or "")
        wide = {**tensors, name: torch.cat([tensor, tensor])}
        text = f"{name} must be {shape}, got {[2 * shape[0], *shape[1:]]}"
        assert text in (complaint(drafter, config, wide) or "")
        half = {**tensors, name: tensor.to(torch.float16)}
        assert f"{name} must be torch." in (complaint(drafter, config, half) or "")
    unknown = {**tensors, "model.fc.weight": torch.zeros(1)}
    assert "unknown model.fc.weight" in (complaint(drafter, config, unknown) or "")


def test_all_faults_are_named_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    drafter, config, tensors = serving("eagle3")
    del tensors["midlayer.mlp.down_proj.weight"]
    tensors["foo"] = tensors["norm.weight"]
    text = complaint(drafter, config, tensors) or ""
    assert "this eagle3 drafter cannot be served: missing midlayer.mlp.down_proj.weight" in text
    assert "unknown foo" in text
    with torch.no_grad():
        drafter.fc.weight[0, :3] = torch.nan
    with pytest.raises(ValueError, match=r"fc\.weight holds 3 values that are not finite"):
        export(drafter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", VOCAB + 1),
        ("hidden_size", HIDDEN * 2),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("num_hidden_layers", 2),
    ],
)
def test_a_configuration_that_engines_would_take_for_another_model_is_refused(
    key: str, value: Any
) -> None:
    drafter, config, tensors = serving("eagle3")
    text = complaint(drafter, {**config, key: value}, tensors) or ""
    assert f"config.json's {key} must be {config.get(key, False)}, got {value}" in text


def test_dflash2_is_served_as_dflash_by_an_architecture_of_its_own(tmp_path: Path) -> None:
    done = export(drafter_of("dflash2"), tmp_path / "out", num_speculative_tokens=7)
    said = json.loads(shlex.split(done.commands["vLLM"])[-1])
    assert (said["method"], said["num_speculative_tokens"]) == ("dflash", 7)
    assert "SGLang" not in done.commands
    assert any("V2 alone" in note for note in done.notes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    own = config["dflash_config"]
    assert (own["conv_kernel_size"], own["conv_group_size"]) == (2, 16)
    assert (own["selector_rank"], own["selector_top_k"]) == (8, 16)


@pytest.mark.parametrize(("family", "name"), [("dflash2", "DFlash-2"), ("dspark", "DSpark")])
def test_targets_whose_logits_are_scaled_get_no_command_where_logits_are_corrected(
    family: str, name: str, tmp_path: Path
) -> None:
    drafter = drafter_of(family)
    drafter.spec = spec_of("granite")
    done = export(drafter, tmp_path / "out")
    assert done.commands == {}
    assert any(f"{name} does not scale logits as granite targets do" in n for n in done.lines())


@pytest.mark.parametrize(
    ("family", "method"), [("eagle", "greedy"), ("dflash", "greedy"), ("eagle3", "probabilistic")]
)
def test_drafts_are_not_drawn_from_logits_without_the_targets_scale(
    family: str, method: str, tmp_path: Path
) -> None:
    """vLLM would draw them at another temperature; a head of the drafter's own has the scale."""
    drafter, card = drafter_of(family), dataclasses.replace(CARD, reports={"b": drawn()})
    drafter.spec = spec_of("granite")
    done = export_drafter(drafter, "/models/tiny", tmp_path / "out", config_of(), card)
    told = json.loads(shlex.split(done.commands["vLLM"])[4])
    assert told["draft_sample_method"] == method
    said = "does not scale a drafter's logits as granite targets do"
    assert (said in "\n".join(done.lines())) == (method == "greedy")


@pytest.mark.parametrize("key", ["sample_from_anchor", "enable_confidence_head"])
def test_what_engines_assume_of_dspark_when_it_is_absent_is_always_written(key: str) -> None:
    drafter, config, tensors = serving("dspark")
    assert config[key] is config["confidence_head_with_markov"] is True
    assert (config["block_size"], config["markov_rank"]) == (7, 8)
    assert config["target_layer_ids"] == [layer - 1 for layer in drafter.captures]
    without = {name: value for name, value in config.items() if name != key}
    assert f"config.json's {key} must be True, got None" in (
        complaint(drafter, without, tensors) or ""
    )


def test_a_gated_markov_head_is_not_exported_and_the_reason_says_what_to_do(
    tmp_path: Path,
) -> None:
    gated = drafter_config("dspark", num_layers=2, markov="gated", markov_rank=8).build(spec())
    with pytest.raises(ValueError, match=r"leave out the gate .* train with drafter.markov=plain"):
        export(gated, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_features_that_only_the_first_layer_reads_are_not_exported(tmp_path: Path) -> None:
    drafter = drafter_config("dflash", num_layers=2, fusion="input").build(spec())
    with pytest.raises(ValueError, match=r"every layer; train with drafter\.fusion=every_layer"):
        export(drafter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_dspark_is_served_by_the_runner_that_has_it(tmp_path: Path) -> None:
    done = export(drafter_of("dspark"), tmp_path / "out", num_speculative_tokens=6)
    said = json.loads(shlex.split(done.commands["vLLM"])[-1])
    assert (said["method"], said["num_speculative_tokens"]) == ("dspark", 6)
    assert any("V2 alone" in note for note in done.notes)
    with pytest.raises(ValueError, match="num_speculative_tokens must be at most 7"):
        export(drafter_of("dspark"), tmp_path / "other", num_speculative_tokens=8)


@pytest.mark.parametrize(
    ("family", "depth"),
    [("dspark", 7), ("dflash", 7), ("dflash2", 7), ("p_eagle", 3), ("eagle3", 3), ("medusa", 2)],
)
def test_engines_draft_whole_blocks_unless_a_number_is_given(
    family: str, depth: int, tmp_path: Path
) -> None:
    """Of a block each token sees the others: engines that draft fewer draft other tokens."""
    drafter = drafter_of(family)
    if family == "medusa":
        drafter = drafter_config(family, num_heads=2).build(spec())
    done = export(drafter, tmp_path / "out")
    said = json.loads(shlex.split(done.commands["vLLM"])[-1])
    assert said["num_speculative_tokens"] == depth
    if layout_of(drafter).derived:
        export(drafter, tmp_path / "named", format="speculators")
        config = json.loads((tmp_path / "named" / "config.json").read_text())
        (proposal,) = config["speculators_config"]["proposal_methods"]
        assert proposal["speculative_tokens"] == depth


@pytest.mark.parametrize(
    ("family", "own", "said"),
    [
        ("eagle3", False, "It reads the target's embedding; its head is its own."),
        ("p_eagle", True, "Embedding and head are its own."),
        ("dspark", False, "It reads the target's embedding and head."),
        ("dflash", True, "Its embedding is its own; it reads the target's head."),
    ],
)
def test_whose_embedding_and_head_engines_take_is_told(
    family: str, own: bool, said: str, tmp_path: Path
) -> None:
    done = export(drafter_config(family, own_embedding=own).build(spec()), tmp_path / "out")
    assert said in done.notes
    assert said in (tmp_path / "out" / "README.md").read_text()


def test_medusa_says_that_its_blocks_have_biases_since_vllm_drops_them_otherwise() -> None:
    drafter, config, tensors = serving("medusa")
    assert config["medusa_fc_bias"] is True
    without = {key: value for key, value in config.items() if key != "medusa_fc_bias"}
    assert "medusa_fc_bias must be True, got None" in (complaint(drafter, without, tensors) or "")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("medusa", {"fc_bias": False}),
        ("eagle", {"attention_bias": True}),
        ("eagle3", {"attention_bias": True}),
    ],
)
def test_a_setting_that_engines_do_not_take_is_named(
    family: str, changes: dict[str, bool], tmp_path: Path
) -> None:
    """A user sets the drafter's, and cannot edit config.json before it is written."""
    ((key, value),) = changes.items()
    said = rf"{key} must be {not value}, got {value} \(drafter\.{key} of its training\)"
    with pytest.raises(ValueError, match=said):
        export(drafter_config(family, **changes).build(spec()), tmp_path / "out")


def test_medusa_with_one_head_for_all_is_exported(tmp_path: Path) -> None:
    """vLLM loads lm_heads.0 for original_lm_head, and no other."""
    drafter = drafter_config("medusa", num_heads=3, shared_head=True).build(spec())
    done = export(drafter, tmp_path / "out", dtype="float32")
    assert "vLLM" in done.commands
    assert json.loads((tmp_path / "out" / "config.json").read_text())["original_lm_head"]
    fresh = loaded(tmp_path / "out", drafter)
    assert {n for n in fresh.state_dict() if n.startswith("lm_heads")} == {"lm_heads.0.weight"}


def test_medusa_heads_bound_the_depth_that_vllm_accepts(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="num_speculative_tokens must be at most 3 for this medusa"
    ):
        export(drafter_of("medusa"), tmp_path / "out", num_speculative_tokens=4)


def test_eagle_carries_a_zero_bias_and_names_that_both_engines_take() -> None:
    drafter, config, tensors = serving("eagle")
    assert not tensors["fc.bias"].any()
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    tensors["fc.bias"][0] = 1
    assert "fc.bias must be zero" in (complaint(drafter, config, tensors) or "")
    biased = complaint(drafter, {**config, "bias": True}, tensors) or ""
    assert "config.json's bias must be False, got True" in biased
    alone = {**config, "architectures": ["LlamaForCausalLMEagle"]}
    assert "architectures must be" in (complaint(drafter, alone, tensors) or "")


def test_d2t_is_an_offset_and_t2d_its_mask() -> None:
    drafter, config, tensors = serving("eagle3")
    ids = tensors["d2t"] + torch.arange(64)
    assert config["draft_vocab_size"] == 64
    assert torch.equal(ids, drafter.vocab.target_ids)
    absolute = complaint(drafter, config, {**tensors, "d2t": ids}) or ""
    assert "d2t must be an offset (target id = i + d2t[i])" in absolute
    other = tensors["t2d"].roll(1)
    assert "t2d must mark exactly" in (complaint(drafter, config, {**tensors, "t2d": other}) or "")
    without = {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    assert "missing d2t of shape [64]" in (complaint(drafter, config, without) or "")


def test_a_whole_vocabulary_needs_no_maps(tmp_path: Path) -> None:
    drafter = drafter_of("eagle3")
    whole = drafter.config.build(drafter.spec)
    export(whole, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "d2t" not in tensors
    assert tensors["lm_head.weight"].shape == (VOCAB, HIDDEN)


def test_the_top_level_always_names_the_layers_and_shallow_targets_get_both_spellings(
    tmp_path: Path,
) -> None:
    """vLLM's V2 runner reads no other key; SGLang's default is right for every target it knows."""
    _, config, _ = serving("eagle3", num_layers=8)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert "eagle_config" not in config
    shallow = drafter_of("eagle3", num_layers=4)
    assert shallow.captures == (1, 2, 3)
    done = export(shallow, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert any("Reads target layers [1, 2, 3]" in line for line in done.lines())


@pytest.mark.parametrize(
    ("layers", "served"), [([1, 4, 7], True), ([0, 4, 7], False), ([1, 4, 8], False)]
)
def test_sglang_reads_what_lies_between_two_layers(
    layers: list[int], served: bool, tmp_path: Path
) -> None:
    done = export(drafter_of("eagle3", layers=layers), tmp_path / "out")
    assert ("SGLang" in done.commands) == served
    said = f"SGLang 0.5.23 reads layers 1..7, and this drafter {layers}"
    assert (said in "\n".join(done.lines())) != served


@pytest.mark.parametrize(
    ("kind", "layers", "written"),
    [
        ("llama", [3, 4, 6], [2, 3, 5]),
        ("gpt_oss", [3, 4, 6], [2, 3, 5]),
        ("deepseek_v3", [2, 4, 6], [1, 3, 5]),
        ("deepseek_v3", [3, 4, 6], [3, 4, 6]),
        ("deepseek_v3", [1, 4, 6], None),
    ],
)
def test_sglang_is_told_layers_as_it_counts_them(
    kind: str, layers: list[int], written: list[int] | None, tmp_path: Path
) -> None:
    """It adds one, for DeepSeek's targets only where the first id is 1."""
    drafter = drafter_of("eagle3", layers=layers)
    drafter.spec = spec_of(kind)
    folder = tmp_path / "out"
    if written is None:
        said = "SGLang 0.5.23 would add 1 to the layers of deepseek_v3 targets where the first is 1"
        with pytest.raises(ValueError, match=said):
            export(drafter, folder, format="sglang")
        assert not folder.exists()
        done = export(drafter, folder)
        assert said in "\n".join(done.lines())
        assert set(done.commands) == {"vLLM"}
        return
    done = export(drafter, folder, format="sglang")
    assert set(done.commands) == {"SGLang"}
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == layers
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written


def test_what_was_not_measured_of_an_export_is_told(tmp_path: Path) -> None:
    rounded = export(drafter_of("dflash"), tmp_path / "rounded", dtype="bfloat16")
    told = "\n".join(rounded.notes)
    assert "What the rounding costs in acceptance was not measured" in told
    assert "On a CPU vLLM 0.32.0 scales the keys of every layer by the first one's k_norm" in told
    single = drafter_config("dflash", num_layers=1).build(spec())
    exact = export(single, tmp_path / "exact", dtype="float32")
    assert "vLLM" in exact.commands
    assert not [note for note in exact.notes if "not measured:" in note or "k_norm" in note]


def test_export_sglang_writes_the_native_files(tmp_path: Path) -> None:
    drafter = drafter_of("eagle")
    export(drafter, tmp_path / "vllm")
    done = export(drafter, tmp_path / "sglang", format="sglang")
    assert "No vLLM command: export=vllm writes the same files" in "\n".join(done.notes)
    for file in ("config.json", "model.safetensors"):
        native = (tmp_path / "vllm" / file).read_bytes()
        assert (tmp_path / "sglang" / file).read_bytes() == native


def test_layer_ids_that_an_engine_would_read_otherwise_are_refused() -> None:
    drafter, config, tensors = serving("eagle3", layers=[1, 4, 6])
    assert complaint(drafter, config, tensors) is None
    top = {key: value for key, value in config.items() if key != "eagle_config"}
    text = complaint(drafter, top, tensors) or ""
    assert "SGLang would read layers [2, 4, 5], trained on [1, 4, 6]" in text
    assert "vLLM" not in text
    nested = {k: v for k, v in config.items() if k != "eagle_aux_hidden_state_layer_ids"}
    text = complaint(drafter, nested, tensors) or ""
    assert "vLLM's V1 runner would read layers [0, 3, 5], trained on [1, 4, 6]" in text
    assert "vLLM's V2 runner would read layers [2, 4, 5], trained on [1, 4, 6]" in text
    neither = {key: value for key, value in top.items() if key in config and "eagle" not in key}
    text = complaint(drafter, neither, tensors) or ""
    assert "vLLM's V1 runner would read layers [2, 4, 5]" in text
    assert "SGLang would read layers [2, 4, 5]" in text


def test_a_drafter_without_weights_cannot_be_exported(tmp_path: Path) -> None:
    ngram = NgramConfig(name="ngram", max_ngram=3, min_ngram=1).build(spec())
    with pytest.raises(ValueError, match="drafter=ngram has no serving format: it has no weights"):
        export_drafter(ngram, "/models/tiny", tmp_path / "out", config_of(), CARD)


# Serving and configuration


def test_serve_commands_name_target_drafter_method_and_depth(tmp_path: Path) -> None:
    done = export(drafter_of("eagle3"), tmp_path / "it's here", num_speculative_tokens=5)
    words = shlex.split(done.commands["vLLM"])
    assert words[:4] == ["vllm", "serve", "/models/tiny", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": str(tmp_path / "it's here"),
        "num_speculative_tokens": 5,
        "draft_sample_method": "greedy",
    }
    words = shlex.split(done.commands["SGLang"])
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--model-path": "/models/tiny",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(tmp_path / "it's here"),
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6",
    }
    pushed = export(drafter_of("medusa"), tmp_path / "medusa", push="ada/tiny-medusa")
    assert '"model": "ada/tiny-medusa"' in pushed.commands["vLLM"]
    assert "SGLang" not in pushed.commands
    assert "No SGLang command: SGLang 0.5.23 has no Medusa." in pushed.notes


@torch.no_grad()
def test_sglang_gets_the_tokens_that_a_reduced_eagle_drafts(tmp_path: Path) -> None:
    """vLLM drafts from all tokens: its files are the usual ones, and a note says so."""
    drafter = drafter_of("eagle")
    plain = export(drafter, tmp_path / "plain")
    config = drafter_config("eagle", feature_noise=0.0, draft_vocab_size=50)
    reduced = config.build(drafter.spec)
    reduced.load_weights(drafter.state_dict())
    reduced.reduce(DraftVocab.of(torch.arange(3, 153, 3), VOCAB))
    for overwrite in (False, True):
        done = export(reduced, tmp_path / "its map", overwrite=overwrite)
    file = tmp_path / "its map" / "token_map.pt"
    assert torch.load(file, weights_only=True) == list(range(3, 153, 3))
    assert {*done.sizes} == {*plain.sizes} | {"token_map.pt"}
    assert shlex.split(done.commands["SGLang"])[-2:] == ["--speculative-token-map", str(file)]
    assert "token-map" not in done.commands["vLLM"] + str(plain.commands)
    assert any("not from the 50 tokens" in note for note in done.notes)
    assert not any("whole vocabulary" in note for note in plain.notes)
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("plain", "its map"))
    assert one.keys() == other.keys()
    pushed = export(reduced, tmp_path / "pushed", push="ada/tiny-eagle")
    assert pushed.commands["SGLang"].endswith("--speculative-token-map ada/tiny-eagle/token_map.pt")
    card = (tmp_path / "its map" / "README.md").read_text()
    assert "--speculative-token-map DRAFTER/token_map.pt" in card


@pytest.mark.parametrize("kind", ["vllm", "speculators"])
def test_every_serve_command_spreads_a_large_target_over_gpus(kind: str, tmp_path: Path) -> None:
    done = export(drafter_of("eagle3"), tmp_path / "spread", format=kind, tensor_parallel=4)
    commands = {**done.commands, "card": (tmp_path / "spread" / "README.md").read_text()}
    assert done.commands["vLLM"].endswith(" --tensor-parallel-size 4")
    assert " --tensor-parallel-size 4\n" in commands["card"]
    if kind == "vllm":
        assert done.commands["SGLang"].endswith(" --tp-size 4")
    assert any("spread over 4 GPUs; export.tensor_parallel" in note for note in done.notes)
    alone = export(drafter_of("eagle3"), tmp_path / "alone", format=kind, tensor_parallel=1)
    assert "parallel-size" not in " ".join(alone.commands.values())


@pytest.mark.parametrize("path", ["eagle-x", "my-EAGLE3", "dflash", "dspark-1"])
def test_a_path_by_which_vllm_would_choose_another_method_is_refused(
    path: str, tmp_path: Path
) -> None:
    """vLLM takes the method from the path, whatever it is given, except for four methods."""
    told = f"must not contain '.*' for a medusa drafter, got .*{path}: vLLM 0.32.0 would take it"
    with pytest.raises(ValueError, match=f"export.dir {told}"):
        export(drafter_of("medusa"), tmp_path / path)
    with pytest.raises(ValueError, match=f"export.push {told}"):
        export(drafter_of("medusa"), tmp_path / "out", push=f"ada/{path}")
    assert list(tmp_path.iterdir()) == []
    assert "vLLM" in export(drafter_of("eagle"), tmp_path / path).commands
    served_elsewhere = drafter_of("medusa")
    served_elsewhere.spec = spec_of("doge")  # a target that vLLM does not serve
    assert not export(served_elsewhere, tmp_path / "b" / path).commands


def test_the_runners_of_vllm_that_serve_a_family_are_named(tmp_path: Path) -> None:
    for family, said in (
        ("eagle3", "serves it with both of its model runners: V2, the default where Triton works"),
        ("medusa", "serves it with its model runner V1 alone, and chooses that by itself"),
    ):
        done = export(drafter_of(family), tmp_path / family[:2])
        assert said in "\n".join(done.lines())
        assert said in (tmp_path / family[:2] / "README.md").read_text()


def test_a_target_is_served_from_its_directory_or_its_repository() -> None:
    here = model_config(Path("/models/tiny"))
    assert served_as(here) == "/models/tiny"
    assert served_as(model_config(Path("models/tiny"))) == str(Path.cwd() / "models/tiny")
    assert served_as(model_config(Path("~/tiny"))) == str(Path.home() / "tiny")
    assert served_as(dataclasses.replace(here, path=None, repo="ada/tiny")) == "ada/tiny"
    embedded = Path(served_as(dataclasses.replace(here, path=None, embedded=True)))
    assert (embedded / "config.json").is_file()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"dtype": "float16"},
            "export.dtype must be one of auto, float32, bfloat16, fp8, got float16",
        ),
        ({"measured_prompts": -1}, "export.measured_prompts must be at least 0, got -1"),
        (
            {"num_speculative_tokens": 0},
            "export.num_speculative_tokens must be a number of at least 1, or auto, or null, got 0",
        ),
        ({"push": "tiny"}, "export.push must be user/repo, or null, got tiny; for example"),
        ({"dry_run": True}, "export.dry_run=true must come with export.push=user/repo"),
        ({"license": "The MIT"}, "export.license must be a licence id of the Hub"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        config_of(**changes)


# The card


def evaluation() -> Report:
    def result(method: str, task: str, prompt: int, seconds: float, accepted: int) -> PromptResult:
        counters = Counters()
        for _ in range(0 if method == "autoregressive" else 4):
            counters.add(3, accepted)
        stats = DecodeStats(counters, counters, 4, verify_s=seconds)
        tokens = tuple(range(16))
        return PromptResult(f"{task}-{prompt}", 0, task, method, 0, 8, tokens, stats)

    results = [
        result(method, task, prompt, seconds, accepted)
        for task in ("code", "chat")
        for prompt in range(3)
        for method, seconds, accepted in (
            ("autoregressive", 2.0 + prompt, 0),
            ("eagle3", 1.0 + prompt, 2),
            ("ngram", 1.5 + prompt, 1),
        )
    ]
    about = Evaluated(
        schema_version=SCHEMA_VERSION,
        target="tiny",
        drafter="eagle3",
        depth=3,
        sampling=LimitedSampling(**vars(GREEDY), max_new_tokens=16),
        draft_sampling=GREEDY,
        batch_size=1,
        sweep=[],
        tables=[],
        lossless=LosslessCheck("greedy match", True, "float32", 6, 6, [], ""),
        timing=TimingInfo("bfloat16", 2, 1, "cpu"),
        provenance={"commit": "0123abc"},
        prompts={"file": "prompts.jsonl"},
        notes=[],
    )
    return build_report(results, about, Resampling(200, 0), VerdictSettings(1.05, None, "USD"))


def drawn(**changes: Any) -> Report:
    """A report of an evaluation at temperature 1."""
    hot = dataclasses.replace(evaluation().sampling, temperature=1.0)
    drafts = Sampling(1.0, 0, 1.0)
    return dataclasses.replace(
        evaluation(), **({"sampling": hot, "draft_sampling": drafts} | changes)
    )


@pytest.mark.parametrize(
    ("family", "reports", "method", "note"),
    [
        ("eagle3", {}, "greedy", "No evaluation here drew drafts; for temperatures above 0"),
        ("eagle3", {"a": evaluation}, "greedy", "No evaluation here drew drafts"),
        ("eagle3", {"a": lambda: drawn(draft_sampling=GREEDY)}, "greedy", "No evaluation here"),
        ("eagle3", {"a": evaluation, "b": drawn}, "probabilistic", "as evaluation b did; its"),
        ("eagle3", {"b": lambda: drawn(draft_sampling=None)}, "probabilistic", "evaluation b did;"),
        (
            "dflash",
            {"b": lambda: drawn(draft_sampling=Sampling(0.5, 0, 1.0))},
            "probabilistic",
            "did (there with settings of its own, temperature 0.5, top_k 0, top_p 1.0); its",
        ),
        ("medusa", {"b": drawn}, "greedy", "every temperature unlike evaluation b, which drew"),
    ],
)
def test_vllm_is_told_to_draft_as_the_report_measured(
    family: str, reports: dict[str, Any], method: str, note: str, tmp_path: Path
) -> None:
    card = dataclasses.replace(CARD, reports={name: make() for name, make in reports.items()})
    done = export_drafter(drafter_of(family), "/models/tiny", tmp_path / "out", config_of(), card)
    told = json.loads(shlex.split(done.commands["vLLM"])[4])
    assert told["draft_sample_method"] == method
    card_text = (tmp_path / "out" / "README.md").read_text()
    assert f'"draft_sample_method": "{method}"' in card_text
    assert note in "\n".join(done.lines())
    assert note in card_text


def test_the_card_has_front_matter_that_the_hub_reads(tmp_path: Path) -> None:
    export(drafter_of("eagle3"), tmp_path / "out")
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.license == "apache-2.0"
    assert data.library_name == "drafttrain"
    assert data.base_model == "ada/tiny"
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["speculative-decoding", "eagle3", "drafttrain", "vllm", "sglang"]


def test_a_card_without_an_evaluation_says_not_measured_and_how_to_serve(tmp_path: Path) -> None:
    done = export(drafter_of("eagle3"), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "An EAGLE-3 drafter ([arXiv:2503.01840]" in text
    assert "Not measured: the run has no evaluation." in text
    assert done.commands["vLLM"].startswith("vllm serve /models/tiny --speculative-config")
    assert '\nvllm serve ada/tiny --speculative-config \'{"method": "eagle3"' in text
    assert "`DRAFTER` is the directory of this drafter." in text
    assert "| data.conversations | 512 |" in text
    assert "| commit | 0123abc |" in text
    assert "| versions.torch | 2.13.0 |" in text


def test_the_measured_table_comes_from_the_runs_reports(tmp_path: Path) -> None:
    report = evaluation()
    for name in ("greedy", "sampled"):
        (tmp_path / "evaluations" / name).mkdir(parents=True)
        (tmp_path / "evaluations" / name / "report.json").write_text(as_json(as_data(report)))
    (tmp_path / "provenance.json").write_text('{"commit": "89abcde"}')
    provenance, reports = read_run(tmp_path)
    assert provenance == {"commit": "89abcde"}
    card = dataclasses.replace(CARD, reports=reports, provenance=provenance)
    text = model_card(card, {"model_type": "llama"}, {"vLLM": "vllm serve"}, ())
    assert "Evaluation **greedy** of eagle3. " in text
    assert "depth 3 · greedy · at most" in text
    assert "Evaluation **sampled**" in text
    rows = [line for line in text.splitlines() if line.startswith(("| all |", "| code", "| all,"))]
    assert len(rows) == 6
    assert rows[0].startswith("| all | 3.00 [3.00, 3.00] | 3.00 | 1.00 1.00 .00 |")
    assert rows[2].startswith("| all, by ngram | 2.00 [2.00, 2.00]")
    assert "6 of 6 greedy outputs identical to plain decoding in float32" in text
    assert "batch 1 · timed in bfloat16 on cpu, 2 threads, 1 interleaved block." in text
    assert "- `speedup`: Tokens per second over those of the plain" in text
    assert "Not measured" not in text


ODD = "x\n---\nlicense: mit\n\n# Free\n<script>alert(1)</script>|[a](http://b)`\u202e\ud800```"


HALF = ODD.replace("\ud800", "")  # half a character is none that JSON can be read with


def test_no_name_breaks_out_of_its_place_in_the_card(tmp_path: Path) -> None:
    """Target, family, task, method, evaluation, flag and setting may be anybody's text."""
    told = as_json(as_data(evaluation()))
    for word in ('"chat"', '"ngram"', '"cpu"', '"bfloat16"', '"greedy match"'):
        told = told.replace(word, json.dumps(HALF))
    data = json.loads(told)
    data["verdict"] = data["lossless"]["statement"] = data["tree"] = HALF
    data["flags"] = [{"kind": "timing", "row": HALF, "text": HALF}]
    report = typed(Report, json.dumps(data), "it")
    card = dataclasses.replace(
        CARD,
        title=ODD,
        family=ODD,
        about=None,
        target=ODD,
        base_model=ODD,
        training={ODD: "x"},
        provenance={"commit": ODD},
        reports={ODD: report},
    )
    text = model_card(card, {"model_type": ODD}, {"vLLM": shlex.join(["vllm", "serve", ODD])}, ())
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    front, _, rest = text.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    assert "base_model" not in yaml.safe_load(front)
    fenced = [line for line in rest.splitlines() if line.startswith("vllm serve")]
    assert len(fenced) == 1
    assert rest.splitlines()[rest.splitlines().index(fenced[0]) + 1] == "`" * 4
    rest = rest.replace(fenced[0], "")
    assert "<script" not in rest
    assert "\n---\n" not in rest
    assert "\n# Free" not in rest
    assert "\u202e" not in rest
    assert "](http://b)" not in rest.replace("\\](http://b)", "")
    tables = [line.replace("\\|", "") for line in rest.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in tables} == {3, 8}


def test_a_card_names_nothing_of_the_machine_that_wrote_it(tmp_path: Path) -> None:
    card = dataclasses.replace(
        CARD,
        base_model=None,
        training={
            "data": {
                "path": ["secret/chats.jsonl"],
                "cache_dir": "outputs/cache",
                "seed": 0,
                "skipped": "correct /home/ada/chats.jsonl:3",
                "repo": "https://ada:hunter2@example.org/x",
                "template": "chat",
            },
            "steps": 300,
        },
        provenance={
            "command": "python -m drafttrain train model.path=/home/ada/secret",
            "checkpoint": "outputs/secret/checkpoints/step-3",
            "features": {"store.dir": "secret/store"},
            "platform": "Linux-5.10/x86",
        },
    )
    drafter = drafter_of("eagle3")
    export_drafter(drafter, "/home/ada/secret", tmp_path / "out", config_of(), card)
    text = (tmp_path / "out" / "README.md").read_text()
    for word in ("secret", "/home", "outputs", "hunter2", str(tmp_path), "python -m drafttrain"):
        assert word not in text, word
    assert "| data.template | chat |" in text
    assert "| platform | Linux-5.10/x86 |" in text
    assert "vllm serve TARGET --speculative-config" in text
    assert "`TARGET` is the directory of the target's weights, `DRAFTER` is the" in text


def test_a_family_of_the_users_own_has_a_card(tmp_path: Path) -> None:
    """A drafter in a folder of its own, outside the package; the card ended in a KeyError."""
    (tmp_path / "own_family.py").write_text(
        "from drafttrain.drafters.medusa import Medusa\n\n\nclass Own(Medusa):\n    about = None\n"
    )
    found = importlib.util.spec_from_file_location("own_family", tmp_path / "own_family.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    drafter = module.Own(
        dataclasses.replace(drafter_config("medusa", num_heads=3), name="own"), spec()
    )
    drafter.prepare(
        torch.ones(VOCAB, dtype=torch.long),
        Readout(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)),
    )
    export(drafter, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "A drafter of the family own for speculative decoding with" in text


def test_a_report_that_is_not_json_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations" / "broken"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken/report.json: Invalid JSON"):
        read_run(tmp_path)
    (folder / "report.json").write_text('{"schema_version": 2, "drafter": "medusa"}')
    with pytest.raises(ValueError, match=r"broken/report.json: target: .* evaluate the run again"):
        read_run(tmp_path)


# Targets


def spec_of(architecture: str, embedding_scale: float = 1.0) -> TargetSpec:
    return dataclasses.replace(spec(), architecture=architecture, embedding_scale=embedding_scale)


def scaled_eagle(**changes: Any) -> Drafter:
    torch.manual_seed(0)
    config = drafter_config("eagle", feature_noise=0.0, **changes)
    return config.build(spec_of("gemma3_text", HIDDEN**0.5))


def logits_of(drafter: Drafter, readout: Readout) -> torch.Tensor:
    """What a drafter drafts after one pair, by a readout of the target's."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (1, 6), generator=generator)
    features = TargetFeatures({}, torch.randn(1, 6, HIDDEN, generator=generator), readout)
    state = drafter.begin(readout, tokens[:, 0], 8)
    drafter.observe(state, tokens, [6], features)
    return drafter.expand(state, None)[:, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scaled_embedding_is_in_the_served_weights_of_eagle(tmp_path: Path, dtype: str) -> None:
    """An engine's drafter does not scale: with the table alone it must draft what ours drafts."""
    drafter = scaled_eagle()
    done = export(drafter, tmp_path, dtype=dtype)
    table, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    ours = logits_of(drafter, Readout(table, head, embedding_scale=HIDDEN**0.5))
    engine = drafter.config.build(spec())  # whose target scales nothing
    engine = loaded(tmp_path, engine)
    slack = 1e-4 if dtype == "float32" else 0.2
    torch.testing.assert_close(logits_of(engine, Readout(table, head)), ours, atol=slack, rtol=0)
    assert "up to rounding (fc.weight is rescaled)" in "\n".join(done.lines())
    again = loaded(tmp_path, drafter)  # and ours reads it back
    back = logits_of(again, Readout(table, head, embedding_scale=HIDDEN**0.5))
    torch.testing.assert_close(back, ours, atol=slack, rtol=0)


def test_an_embedding_of_its_own_is_not_scaled() -> None:
    drafter = scaled_eagle(own_embedding=True)
    _, tensors = drafter.to_serving()
    assert torch.equal(tensors["fc.weight"], drafter.state_dict()["fc.weight"])


@pytest.mark.parametrize(
    ("family", "kind", "engines", "note"),
    [
        ("eagle3", "llama", {"vLLM", "SGLang"}, None),
        ("eagle3", "granite", {"vLLM"}, "is not known to read layers of granite targets"),
        ("eagle3", "gemma3_text", set(), "vLLM 0.32.0 has no EAGLE-3 for gemma3_text targets"),
        ("eagle3", "glm4", set(), "vLLM 0.32.0 has no EAGLE-3 for glm4 targets"),
        ("eagle", "glm4", {"vLLM", "SGLang"}, None),
        ("eagle", "stablelm", {"vLLM"}, "does not hand the embedding of stablelm targets to EAGLE"),
        ("eagle", "cohere", set(), "finds no head of cohere targets to share with EAGLE drafters"),
        (
            "eagle3",
            "ernie4_5",
            set(),
            "rotates a drafter's positions as it does those of ernie4_5",
        ),
        ("eagle", "minicpm3", set(), "final hidden states of minicpm3 targets divided"),
        ("medusa", "minicpm3", set(), "final hidden states of minicpm3 targets divided"),
        ("medusa", "gpt_neox", set(), "does not compute gpt_neox targets as Transformers does"),
        ("medusa", "doge", set(), "was not tried with doge targets"),
    ],
)
def test_an_engine_that_cannot_serve_gets_no_command_and_a_reason(
    family: str, kind: str, engines: set[str], note: str | None, tmp_path: Path
) -> None:
    drafter = drafter_of(family)
    drafter.spec = spec_of(kind)
    done = export(drafter, tmp_path)
    assert set(done.commands) == engines
    told = "\n".join([*done.lines(), (tmp_path / "README.md").read_text()])
    assert ("vllm serve" in told) == ("vLLM" in engines)
    assert ("sglang.launch_server" in told) == ("SGLang" in engines)
    assert note is None or told.count(note) == 2


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_an_embedding_of_its_own_gets_no_sglang_command(family: str, tmp_path: Path) -> None:
    """SGLang writes the target's over it, and would draft badly without a word."""
    done = export(drafter_config(family, own_embedding=True).build(spec()), tmp_path)
    assert set(done.commands) == {"vLLM"}
    assert "overwrites a drafter's own embedding" in "\n".join(done.notes)
