"""Published drafters are recognised, compute what their authors mean, or are refused by name."""

import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import drafter_config
from paths import ROOT
from published import (
    DEPTH,
    DRAFTED,
    LAYOUTS,
    VOCAB,
    WIDTH,
    Published,
    dflash,
    dflash2,
    dspark,
    eagle,
    eagle3,
    edited,
    faster_decoding,
    medusa,
    mtp,
    normal,
    p_eagle,
    without,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import TargetFeatures, TargetSpec
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.decode.rows import check_room
from drafttrain.drafters.base import Drafter, DrafterConfig
from drafttrain.formats.read.admit import Admitted, AdmittedConfig, admit, recognise
from drafttrain.formats.read.folder import open_folder
from drafttrain.formats.write.config import ExportSettings
from drafttrain.formats.write.export import export_drafter
from drafttrain.report.card import CardData
from drafttrain.target.model import Target

PROMPT = [1, 3, 6, 20, 33, 41, 20, 7, 9]


def admitted(folder: Path, target: Target, **changes: Any) -> Admitted:
    settings: dict[str, Any] = {"revision": None, "layers": None, "allow_pickle": True} | changes
    config = AdmittedConfig(name="theirs", path=str(folder), **settings)
    return admit(config, target.spec, target.tokenizer, drafter_config)


@torch.no_grad()
def drafted_logits(
    drafter: Drafter, target: Target, captured: Tensor, final: Tensor, tokens: list[int]
) -> Tensor:
    """What the drafter says along a chain after features of len(final) positions."""
    drafter, readout = drafter.double(), target.readout.to(torch.float64)
    layers = dict(zip(drafter.captures, captured[:, None], strict=True))
    count, ids = len(final), torch.tensor([tokens])
    state = drafter.begin(readout, ids[:, 0], len(tokens) + 1)
    features = TargetFeatures(layers if drafter.captures else {}, final[None], readout)
    drafter.observe(state, ids[:, 1 : count + 1], [count], features)
    logits, drafted = [], None
    for depth in range(DEPTH):
        logits.append(drafter.expand(state, drafted)[0, 0])
        drafted = ids[:, count + 1 + depth, None]
    return torch.stack(logits)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_computes_what_its_authors_mean(
    name: str, target: Target, tmp_path: Path
) -> None:
    kind, make = LAYOUTS[name]
    published = make()
    theirs = admitted(published.write(tmp_path), target)
    assert theirs.recognised.layout.kind == kind
    torch.manual_seed(5)
    count = 30  # past the 16 positions that llama3's scaling counts from
    tokens = torch.randint(VOCAB, (count + 1 + DEPTH,)).tolist()
    captured, final = torch.randn(3, count, WIDTH).double(), torch.randn(count, WIDTH).double()
    captured = captured[: len(theirs.drafter.captures)]
    tensors = {
        n: t.double() if t.is_floating_point() else t for n, t in published.tensors.items()
    } | {"the target's head": target.readout.head.double()}
    embedding = target.readout.embedding.double()
    expected = published.reference(tensors, captured, final, embedding, tokens)
    found = drafted_logits(theirs.drafter, target, captured, final, tokens)
    # Rotations are computed in float32 whatever the weights are in.
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert expected[expected.isfinite()].std() > 0.05, (
        "a reference that says nothing would agree with anything"
    )
    vocab = theirs.drafter.vocab
    assert published.says == (list(range(VOCAB)) if vocab is None else vocab.target_ids.tolist())


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_output_with_a_published_drafter_is_the_plain_loops(
    name: str, target: Target, tmp_path: Path
) -> None:
    theirs = admitted(LAYOUTS[name][1]().write(tmp_path), target)
    settings: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 24, "stop_tokens": []}
    settings["chance"] = SeededChance(0)
    plain = autoregressive_decode(target, PROMPT, **settings)
    drafted = speculative_decode(target, theirs.drafter, PROMPT, policy=DEPTH, **settings)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.untrimmed.num_drafts > 0


def test_shards_are_read_together(target: Target, tmp_path: Path) -> None:
    published = eagle("fc_bias")
    whole = admitted(published.write(tmp_path / "whole"), target).drafter.state_dict()
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published.config))
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(published.tensors)}
    for part in set(places.values()):
        chosen = {n: t for n, t in published.tensors.items() if places[n] == part}
        save_file(chosen, folder / part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    sharded = admitted(folder, target).drafter.state_dict()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names 2 shards, missing: part-1\.safetensors"):
        admitted(folder, target)


def test_layers_are_taken_from_where_vllms_newer_runner_takes_them(
    target: Target, tmp_path: Path
) -> None:
    """The top-level key, else layer_ids, else the default; eagle_config's are V1's alone."""
    published = eagle3()
    key = "eagle_aux_hidden_state_layer_ids"
    published.config["eagle_config"] = {key: [0, 1, 2]}
    folder = published.write(tmp_path)
    theirs = admitted(folder, target)
    assert theirs.drafter.captures == (1, 2, 3)
    assert not any("V1" in line for line in theirs.lines())
    assert admitted(folder, target, layers=[4, 0, 2]).drafter.captures == (0, 2, 4)
    deep = Target.__new__(Target)
    deep.spec, deep.tokenizer = replace(target.spec, num_layers=32), target.tokenizer
    del published.config[key]
    theirs = admitted(published.write(tmp_path), deep)
    assert theirs.drafter.captures == (2, 16, 29)
    note = (
        "by its config.json vLLM's V1 runner (CPUs) reads layers [0, 1, 2], its V2 runner (GPUs) "
        f"layers [2, 16, 29]: both read the top-level {key} alone; SGLang reads [1, 2, 3] by "
        "eagle_config: name those that it was trained on, drafter.layers=[...]"
    )
    assert f"  {note}" in theirs.lines()
    with pytest.raises(ValueError, match=r"repeats a layer, \[2, 2, 1\].*V1 runner .*\[0, 1, 2\]"):
        admitted(tmp_path, target)
    published.config["eagle_config"]["layer_ids"] = [1, 2, 3]
    theirs = admitted(published.write(tmp_path), target)
    assert theirs.drafter.captures == (1, 2, 3)
    assert any("V1 runner" in line for line in theirs.lines())
    del published.config["eagle_config"]
    assert admitted(published.write(tmp_path), deep).drafter.captures == (2, 16, 29)


def test_p_eagles_layers_are_taken_from_where_the_only_runner_that_serves_it_takes_them(
    target: Target, tmp_path: Path
) -> None:
    """V1, which reads eagle_config's ids as they are; what V2 would read is nobody's concern."""
    published = p_eagle()
    key = "eagle_aux_hidden_state_layer_ids"
    published.config["eagle_config"] = {key: [0, 2, 4]}
    assert admitted(published.write(tmp_path), target).drafter.captures == (1, 2, 3)
    del published.config[key]
    theirs = admitted(published.write(tmp_path), target)
    assert theirs.drafter.captures == (0, 2, 4)
    assert "  reads layers [0, 2, 4], by config.json's eagle_config" in theirs.lines()
    assert not any("V2" in line for line in theirs.lines())


@pytest.mark.parametrize("name", ["DSpark", "DSpark of speculators"])
def test_a_runner_that_does_not_serve_a_family_gets_no_note(
    name: str, target: Target, tmp_path: Path
) -> None:
    theirs = admitted(LAYOUTS[name][1]().write(tmp_path), target)
    assert not any("V1 runner" in line for line in theirs.lines())


def test_what_was_recognised_is_said_with_its_reason(target: Target, tmp_path: Path) -> None:
    def said(published: Published, name: str) -> str:
        return str(recognise(open_folder(published.write(tmp_path / name), True)))

    native = "EAGLE-3 in the native layout, by "
    assert said(eagle3(), "a") == native + "architectures=['LlamaForCausalLMEagle3']"
    safe = said(eagle3(file="pytorch_model.bin"), "b")
    assert safe == native + "the tensor midlayer.hidden_norm.weight"
    assert said(eagle(), "c") == "EAGLE-1 in SafeAILab's layout, by the tensor fc.weight"
    assert said(eagle3("speculators", prefix="layers.0."), "d") == (
        "EAGLE-3 in the speculators format, by speculators_model_type=eagle3"
    )
    faster = faster_decoding(1, "medusa_lm_head.pt")
    assert said(faster, "e") == "Medusa in FasterDecoding's layout, by the tensor 0.0.linear.weight"
    lines = admitted(tmp_path / "e", target).lines()
    assert "  config.json counts 2 heads, the weights hold 3" in lines
    assert "  its config.json says that it was trained for lmsys/vicuna-7b-v1.3" in lines


def test_a_key_that_engines_read_differently_is_noted(target: Target, tmp_path: Path) -> None:
    absent = eagle3("speculators", "norm_before_residual", prefix="layers.0.")
    lines = admitted(absent.write(tmp_path), target).lines()
    assert any("norm_before_residual is absent and taken as true" in line for line in lines)
    absent.config["norm_before_residual"] = True
    lines = admitted(absent.write(tmp_path), target).lines()
    assert not any("norm_before_residual" in line for line in lines)


def test_a_block_that_vllm_would_mask_is_noted(target: Target, tmp_path: Path) -> None:
    """The package's own default, which vLLM's bridge takes for causal attention in every layer."""
    published = dflash("speculators")
    said = "would draft causally, by sliding_window_non_causal=false"
    assert not any(said in line for line in admitted(published.write(tmp_path), target).lines())
    published.config["sliding_window_non_causal"] = False
    assert any(said in line for line in admitted(published.write(tmp_path), target).lines())


def test_an_anchor_that_vllm_would_not_sample_from_is_noted(target: Target, tmp_path: Path) -> None:
    published = dspark("speculators")
    said = "sample_from_anchor is absent and taken as true"
    assert not any(said in line for line in admitted(published.write(tmp_path), target).lines())
    del published.config["sample_from_anchor"]
    assert any(said in line for line in admitted(published.write(tmp_path), target).lines())


def test_p_eagle_drafts_what_speculators_trained_and_its_lost_norms_are_noted(
    target: Target, tmp_path: Path
) -> None:
    """`n_predict` is ours, the package has the depths it trained as its proposal."""
    published = p_eagle("speculators", "fc_norm")
    theirs = admitted(published.write(tmp_path), target)
    assert theirs.drafter.max_depth == DEPTH
    assert any("drops fc_norm of P-EAGLE" in line for line in theirs.lines())
    published.config["n_predict"] = DEPTH + 2
    del published.config["fc_norm"]
    for i in range(3):
        del published.tensors[f"fc_norm.{i}.weight"]
    theirs = admitted(published.write(tmp_path), target)
    assert theirs.drafter.max_depth == DEPTH + 2
    assert not any("fc_norm" in line for line in theirs.lines())


MIXED_LAYERS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("make", "keys", "window"),
    [
        (eagle, {"layer_types": ["sliding_attention"]}, 12),
        (eagle3, {"model_type": "qwen3", "use_sliding_window": True}, 12),
        (partial(eagle3, "speculators"), {"layer_types": ["sliding_attention"]}, 12),
        (partial(p_eagle, "speculators"), {"layer_types": ["sliding_attention"] * 3}, 12),
        # All places of a block are computed, though fewer are drafted.
        (partial(dflash, "speculators"), {"layer_types": MIXED_LAYERS}, 12 + DEPTH + 1),
        (partial(dspark, "speculators"), {"layer_types": MIXED_LAYERS}, 12 + DEPTH),
    ],
)
def test_a_window_bounds_the_text(
    make: Callable[[], Published],
    keys: dict[str, Any],
    window: int,
    target: Target,
    tmp_path: Path,
) -> None:
    """A text that all layers see whole is drafted for as in training, and no longer one."""

    def read(window: int) -> Admitted:
        published = make()
        published.config["sliding_window_non_causal"] = True  # only DFlash's is read
        layer = published.config.get("transformer_layer_config", published.config)
        layer |= keys | {"sliding_window": window, "max_position_embeddings": 64}
        return admitted(published.write(tmp_path / f"{window}"), target)

    theirs = read(window)
    assert theirs.drafter.max_positions == 12
    assert any("can have 12 tokens together" in line for line in theirs.lines())
    with pytest.raises(ValueError, match=r"must fit in the 12 positions of drafter=theirs"):
        check_room(target, [[1] * 6], 5, theirs.drafter, 2)
    assert check_room(target, [[1] * 6], 4, theirs.drafter, 2) == 12
    with pytest.raises(ValueError, match=r"run\.init_from=here must hold layers that see all of a"):
        theirs.require_whole("run.init_from=here")
    whole = read(target.spec.max_positions + DEPTH + 1)
    assert whole.drafter.max_positions is None
    whole.require_whole("run.init_from")


def test_a_window_that_no_engine_applies_is_none(target: Target, tmp_path: Path) -> None:
    """As Qwen's configurations have it."""
    full = edited(eagle(), sliding_window=8, use_sliding_window=False)
    admitted(full.write(tmp_path), target)


def test_a_causal_language_model_becomes_two_model(
    target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    assert recognise(open_folder(tiny_target_dir, False)).layout.kind == "causal_lm"

    built = []

    @dataclass(frozen=True, kw_only=True)
    class StandIn(DrafterConfig):
        path: str

        def build(self, spec: TargetSpec) -> Drafter:
            built.append((self.name, self.path, spec))
            return drafter_config("ngram").build(spec)

    def choice(name: str) -> DrafterConfig:
        return StandIn(name=name, path="")

    config = AdmittedConfig(
        name="x", path=str(tiny_target_dir), revision=None, layers=None, allow_pickle=False
    )
    theirs = admit(config, target.spec, target.tokenizer, choice)
    assert built == [("x", str(tiny_target_dir), target.spec)]
    assert str(theirs.recognised) == (
        "a causal language model of Transformers, by architectures=['LlamaForCausalLM']"
    )


# --- refusals ------------------------------------------------------------------------------------


def foreign_width() -> Published:
    published = eagle3(hidden=48)
    published.tensors["fc.weight"] = normal(48, 3 * 48)
    del published.config["target_hidden_size"]
    return published


def absolute_ids() -> Published:
    published = eagle3()
    published.tensors["d2t"] = torch.tensor(published.says)
    return published


def backwards() -> Published:
    published = eagle3()
    ids = torch.tensor(published.says).flip(0)
    published.tensors["d2t"] = ids - torch.arange(DRAFTED)
    return published


def unmarked() -> Published:
    published = eagle3()
    published.tensors["t2d"] = published.tensors["t2d"].roll(1)
    return published


def without_t2d(**changes: Any) -> Published:
    published = eagle3()
    del published.tensors["t2d"], published.tensors["d2t"]
    return edited(published, **changes)


def not_finite() -> Published:
    published = eagle3()
    published.tensors["norm.weight"][3] = math.nan
    return published


def whole_numbers() -> Published:
    return edited(eagle(), fc__weight=torch.ones(WIDTH, 2 * WIDTH, dtype=torch.int8))


def target_as_medusa() -> Published:
    published = medusa("bias")
    published.tensors = {
        f"model.layers.{i}.mlp.up_proj.weight": normal(64, WIDTH) for i in range(9)
    } | {"lm_head.weight": normal(VOCAB, WIDTH)}
    return published


def repeating() -> Published:
    published = medusa("truncated")
    published.tensors["token_map"][1] = published.tensors["token_map"][0]
    return published


def odd_head() -> Published:
    published = faster_decoding(1, "medusa_lm_head.safetensors")
    published.tensors["0.2.weight"] = published.tensors.pop("0.1.weight")
    return published


OF_DFLASH2 = dflash2().config["dflash_config"]
REFUSALS: dict[str, tuple[Callable[[], Published], str]] = {
    "missing": (
        lambda: edited(eagle3(), midlayer__mlp__down_proj__weight=None, norm__weight=None),
        r"does not fit tiny_test: missing: midlayer\.mlp\.down_proj\.weight, norm\.weight$",
    ),
    "missing, as the file spells": (
        lambda: edited(eagle3(prefix="layers.0."), layers__0__mlp__down_proj__weight=None),
        r"missing: layers\.0\.mlp\.down_proj\.weight$",
    ),
    "unknown": (
        lambda: edited(eagle(), layers__0__input_layernorm__weight=normal(WIDTH)),
        r"unknown: layers\.0\.input_layernorm\.weight$",
    ),
    "a bias that config.json does not announce": (
        lambda: edited(eagle3(), midlayer__self_attn__q_proj__bias=normal(32)),
        r"unknown: midlayer\.self_attn\.q_proj\.bias$",
    ),
    "misshapen": (
        lambda: edited(eagle3(), midlayer__mlp__up_proj__weight=normal(41, WIDTH)),
        r"misshapen: midlayer\.mlp\.up_proj\.weight \[41, 32\] instead of \[40, 32\]$",
    ),
    "not finite": (not_finite, r"not finite: norm\.weight$"),
    "whole numbers": (whole_numbers, r"not of real numbers: fc\.weight$"),
    "width": (
        foreign_width,
        r"it reads hidden states 48 wide, tiny_test's are 32$",
    ),
    "width without an embedding": (
        lambda: eagle3(hidden=48),
        r"missing: embed_tokens\.weight$",
    ),
    "vocabulary": (
        lambda: edited(eagle("fc_bias"), vocab_size=128_256),
        r"it is for a vocabulary of 128,256 tokens, tiny_test has 97$",
    ),
    "several at once": (
        lambda: edited(
            eagle(), vocab_size=200, hidden_size=64, layers__0__mlp__up_proj__weight=None
        ),
        r"vocabulary of 200 tokens, tiny_test has 97; it reads hidden states 64 wide, tiny_test's "
        r"are 32; missing: layers\.0\.mlp\.up_proj\.weight; misshapen: fc\.weight",
    ),
    "d2t missing": (
        without_t2d,
        r"d2t, which maps its 40 tokens to the target's 97, is missing; engines would draft the fi",
    ),
    "d2t of another size": (
        lambda: edited(eagle3(), draft_vocab_size=39),
        r"d2t must be 39 integers \(draft_vocab_size\), got \[40\] of torch\.int64",
    ),
    "d2t of ids": (absolute_ids, r"ascending ids below 97, got .*; it looks like the ids themsel"),
    "d2t backwards": (backwards, r"that gives ascending ids below 97, got .*, not ascending$"),
    "t2d": (unmarked, r"t2d must mark exactly the ids that d2t gives$"),
    "default layers of a shallow target": (
        lambda: without(eagle3(), "eagle_aux_hidden_state_layer_ids"),
        r"the default for 4 layers \(2, L/2, L-3\) repeats a layer, \[2, 2, 1\]: name those it was",
    ),
    "layers out of range": (
        lambda: edited(eagle3(), eagle_aux_hidden_state_layer_ids=[1, 2, 29]),
        r"layer 29 is not one of tiny_test's 0\.\.4$",
    ),
    "too few layers": (
        lambda: edited(eagle3(), eagle_aux_hidden_state_layer_ids=[1, 2]),
        r"fc\.weight fuses 3 layers, but 2 are named \(\[1, 2\]\); name those it was trained",
    ),
    "layers that are none": (
        lambda: edited(eagle3(), eagle_aux_hidden_state_layer_ids="1,2,3"),
        r"eagle_aux_hidden_state_layer_ids must be a list of integers, got '1,2,3'$",
    ),
    "several decoder layers": (
        lambda: edited(eagle3(), num_hidden_layers=2),
        r"config\.json's num_hidden_layers must be 1, got 2$",
    ),
    "activation": (
        lambda: edited(eagle(), hidden_act="gelu", mlp_bias=True),
        r"hidden_act must be silu, got gelu; config\.json's mlp_bias must be False, got True$",
    ),
    "rotary scaling": (
        lambda: edited(eagle3(), rope_scaling={"type": "dynamic", "factor": 2.0}),
        r"rope_type must be one of default, linear, llama3, yarn, got dynamic$",
    ),
    "rotary scaling without its numbers": (
        lambda: edited(eagle3(), rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        r"rope_scaling must hold low_freq_factor for rope_type llama3, got None; .*high_freq_fac",
    ),
    "half rotary": (
        lambda: edited(eagle3(), partial_rotary_factor=0.5),
        r"partial_rotary_factor must be 1\.0, got 0\.5$",
    ),
    "quantised": (
        lambda: edited(eagle3(), quantization_config={"quant_method": "fp8"}),
        r"quantization_config must be compressed-tensors' float-quantized, .*, got fp8; other quan",
    ),
    "no shape": (
        lambda: edited(eagle(), hidden_size=None, num_attention_heads="many"),
        r"hidden_size must be an integer of at least 1, got None; config\.json's num_attention_hea",
    ),
    "both norms": (
        lambda: edited(eagle3("norm_before_fc"), fc_norm=True),
        r"drafter\.fc_norm must be false with drafter\.norm_before_fc=true",
    ),
    "no features": (
        lambda: edited(eagle3(), eagle_config={"use_aux_hidden_state": False}),
        r"use_aux_hidden_state must be true: EAGLE-3 reads fused layers$",
    ),
    "a block of its anchor alone": (
        lambda: edited(dflash(), block_size=1),
        r"block_size must be at least 2, got 1$",
    ),
    "no mask": (
        lambda: edited(dflash(), dflash_config={"target_layer_ids": [0, 1, 2]}),
        r"config\.json's mask_token_id must be one of 97 ids, got None$",
    ),
    "layers twice": (
        lambda: edited(dflash(), dflash_config={"mask_token_id": 7, "target_layer_ids": [1, 1]}),
        r"must name distinct layers of the target \(target_layer_ids of .*, got \[2, 2\]$",
    ),
    "sliding windows": (
        lambda: edited(
            dflash(), layer_types=["full_attention", "sliding_attention"], sliding_window=8
        ),
        r"sliding_window_non_causal must be True where layers have .*, got None$",
    ),
    "sliding windows of a target that holds an MTP module": (
        lambda: edited(mtp("mimo"), use_sliding_window=True, sliding_window=8),
        r"config\.json must state no sliding windows: use_sliding_window, layer_types$",
    ),
    "layers of another kind": (
        lambda: edited(eagle(), layer_types=["linear_attention"]),
        r"full_attention or sliding_attention for each of the layers \(1\), got \['linear_att",
    ),
    "one kind of layer too many": (
        lambda: edited(eagle(), layer_types=["full_attention"] * 2),
        r"layer_types must be .* \(1\), got \['full_attention', 'full_attention'\]$",
    ),
    "a window without a size": (
        lambda: edited(eagle3(), model_type="qwen3", use_sliding_window=True),
        r"sliding_window must be an integer of at least 1, got None$",
    ),
    "an anchor that is sampled from": (
        lambda: edited(dflash("speculators"), sample_from_anchor=True),
        r"sample_from_anchor must be False, got True$",
    ),
    "speculators' layers, unnamed": (
        lambda: without(dflash("speculators"), "aux_hidden_state_layer_ids"),
        r"must name distinct layers of the target .*aux_hidden_state_layer_ids, .*, got None$",
    ),
    "speculators without its layers' settings": (
        lambda: edited(dflash("speculators"), transformer_layer_config=None),
        r"transformer_layer_config must be an object$",
    ),
    "convolutions that no target and block have": (
        lambda: edited(dflash2(), dflash_config=OF_DFLASH2 | {"conv_kernel_size": 5}),
        r"config\.json's conv_kernel_size must be at most 4, got 5$",
    ),
    "groups that do not divide, and more candidates than tokens": (
        lambda: edited(
            dflash2(), dflash_config=OF_DFLASH2 | {"conv_group_size": 5, "selector_top_k": 98}
        ),
        r"selector_top_k must be at most 97, got 98; config\.json's conv_group_size must divide "
        r"32, got 5$",
    ),
    "a selector of scaled and capped logits": (
        lambda: edited(
            dflash2(),
            dflash_config=OF_DFLASH2
            | {"output_multiplier": 0.5, "final_logit_softcapping": 30.0, "selector_rank": None},
        ),
        r"selector_rank must be an integer of at least 1, got None; config\.json's "
        r"output_multiplier must be 1, got 0\.5; config\.json's final_logit_softcapping must be 0, "
        r"got 30\.0$",
    ),
    "an anchor that drafts nothing": (
        lambda: edited(dspark(), sample_from_anchor=False),
        r"sample_from_anchor must be True, got False$",
    ),
    "a recurrent Markov head": (
        lambda: edited(dspark(), markov_head_type="rnn", markov_rank=0),
        r"markov_rank must be an integer of at least 1, got 0; config\.json's markov_head_type "
        r"must be one of vanilla, gated, got 'rnn'$",
    ),
    "a confidence that reads no token": (
        lambda: edited(dspark(), confidence_head_with_markov=None, enable_confidence_head=1),
        r"enable_confidence_head must be True, got 1; config\.json's confidence_head_with_markov "
        r"must be True, got None$",
    ),
    "no mask of P-EAGLE": (
        lambda: edited(p_eagle(), ptd_token_id=97),
        r"config\.json must hold one of 97 ids as mask_token_id or pard_token or .*, got 97$",
    ),
    "an MTP module of experts": (
        lambda: edited(mtp("qwen"), mtp__layers__0__mlp__experts__0__up_proj__weight=normal(4, 4)),
        r"is a mixture of experts \(mtp\.layers\.0\.mlp\.experts\.0\.up_proj\.weight\)$",
    ),
    "an MTP module with gated attention": (
        lambda: edited(mtp("qwen"), mtp__layers__0__self_attn__q_proj__weight=normal(64, WIDTH)),
        r"its MTP layer has gated attention \(mtp\.layers\.0\.self_attn\.q_proj\)$",
    ),
    "two MTP modules": (
        lambda: edited(mtp(), model__mtp_layers__1__input_proj__weight=normal(WIDTH, 2 * WIDTH)),
        r"it holds 2 MTP modules, only a single one can be read$",
    ),
    "an MTP module that lacks a norm": (
        lambda: edited(mtp("qwen"), mtp__pre_fc_norm_hidden__weight=None),
        r"missing: mtp\.pre_fc_norm_hidden\.weight$",
    ),
    "other speculators": (
        lambda: edited(eagle3("speculators"), speculators_model_type="xpress"),
        r"has speculators_model_type=xpress, of which dflash, eagle3, peagle, dspark, dflash2 can",
    ),
    "nothing known": (
        lambda: Published(
            {"architectures": ["MLPSpeculatorPreTrainedModel"]},
            {"speculator.emb.0.weight": normal(3, 3)},
            eagle,
        ),
        r"has architectures=\['MLPSpeculatorPreTrainedModel'\] and tensors such as speculator\.emb",
    ),
    "the target as Medusa": (
        target_as_medusa,
        r"\(Medusa in vLLM's layout, by architectures=\['MedusaModel'\]\) does not fit tiny_test: "
        r"missing: .* and 4 more; unknown: .* and 5 more$",
    ),
    "Medusa's biases unannounced": (
        lambda: edited(medusa("bias"), medusa_fc_bias=False),
        r"medusa_fc_bias must be true, because the blocks have biases \(vLLM drops them otherwise",
    ),
    "token_map missing": (
        lambda: edited(medusa(), truncated_vocab_size=DRAFTED),
        r"token_map, which names the 40 tokens of the heads, is missing; misshapen: lm_heads\.0",
    ),
    "token_map repeats": (
        repeating,
        r"token_map must name 40 different ids below 97$",
    ),
    "more tokens than there are": (
        lambda: edited(medusa("bias"), truncated_vocab_size=98),
        r"truncated_vocab_size must be in 1\.\.97, got 98$",
    ),
    "a head short": (
        lambda: edited(medusa("bias"), num_heads=4),
        r"missing: blocks\.3\.layers\.0\.weight, blocks\.3\.layers\.0\.bias, lm_heads\.3\.weight$",
    ),
    "a head out of place": (odd_head, r"the head of 0 must be 0\.1\.weight, got 0\.2\.weight$"),
    "no heads": (
        lambda: Published({"medusa_num_heads": 3}, {"x": normal(2)}, eagle),
        r"it must hold heads I\.J\.linear\.weight and I\.J\.weight, found none$",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_named(name: str, target: Target, tmp_path: Path) -> None:
    make, said = REFUSALS[name]
    with pytest.raises(ValueError, match=said) as caught:
        admitted(make().write(tmp_path), target)
    assert str(caught.value).startswith(f"drafter.path={tmp_path}")
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_none_is_refused(target: Target, tmp_path: Path) -> None:
    def said(folder: Path, **changes: Any) -> str:
        with pytest.raises(ValueError, match=f"drafter.path={folder}") as caught:
            admitted(folder, target, **changes)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "which does not exist; give the directory" in said(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.touch()
    assert "which is a file; give the directory" in said(file)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "must hold config.json and weights, but it is empty" in said(empty)
    (empty / "adapter_config.json").touch()
    assert "a LoRA adapter must be merged first" in said(empty)
    (empty / "config.json").write_text("{")
    assert "config.json must be valid JSON" in said(empty)
    (empty / "config.json").write_text("[]")
    assert "config.json must hold an object, got list" in said(empty)
    (empty / "config.json").write_text("{}")
    assert "must hold weights (model.safetensors, " in said(empty)
    (empty / "model.safetensors").write_bytes(b"torn")
    assert "model.safetensors is no safetensors file: its header cannot be read; copy" in said(
        empty
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    assert f"is the folder of a run: evaluate it by run.dir={run}" in said(run)


def test_pickle_is_read_only_if_that_is_allowed(target: Target, tmp_path: Path) -> None:
    folder = eagle3(file="pytorch_model.bin").write(tmp_path)
    with pytest.raises(ValueError, match=r"only as pickle .*set drafter\.allow_pickle=true"):
        admitted(folder, target, allow_pickle=False)

    class Payload:
        def __reduce__(self) -> Any:
            return (print, ("code that ran",))

    torch.save({"fc.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"torn or holds more than tensors \(weights_only\)"):
        admitted(folder, target)


def test_another_tokenizer_is_shown_token_by_token(target: Target, tmp_path: Path) -> None:
    folder = eagle3().write(tmp_path)
    target.tokenizer.save_pretrained(folder)
    admitted(folder, target)
    file = folder / "tokenizer.json"
    written = json.loads(file.read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(written))
    a, b = (target.tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    with pytest.raises(ValueError, match="its tokenizer differs in 2 tokens") as caught:
        admitted(folder, target)
    assert f'id {a} is "b" to the drafter and "a" to the target, id {b} is "a"' in str(caught.value)
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    vocab["new"] = 97  # in a place that the target leaves free
    file.write_text(json.dumps(written))
    admitted(folder, target)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        admitted(folder, target)
    file.unlink()
    (folder / "tokenizer.model").touch()
    assert any("was not compared" in line for line in admitted(folder, target).lines())


def test_layers_are_for_drafters_that_capture(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"drafter\.layers must be null, got \[1\]: it cap"):
        admitted(medusa("bias").write(tmp_path), target, layers=[1])


SPECULATORS_PYTHON = os.environ.get("DRAFTTRAIN_SPECULATORS_PYTHON")
SELECTOR = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 12}


@pytest.mark.slow
@pytest.mark.skipif(not SPECULATORS_PYTHON, reason="names a Python with speculators==0.9.0")
@pytest.mark.parametrize("variant", ["default", "3.1", "Qwen3"])
def test_speculators_itself_gives_the_same_logits(
    variant: str, target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    flags = {
        "default": ("norm_before_residual", "embedding"),
        "3.1": ("fc_norm", "norm_output", "embedding"),
        "Qwen3": ("qk_norm", "norm_before_fc", "embedding"),
    }[variant]
    published = eagle3("speculators", *flags, prefix="layers.0.")
    published.config["speculators_version"] = "0.9.0"
    # Said, because absent it is false to speculators and true to vLLM.
    published.config["norm_before_residual"] = "norm_before_residual" in flags
    published.config["speculators_config"] = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DEPTH}],
        "verifier": {
            "name_or_path": str(tiny_target_dir),
            "architectures": ["LlamaForCausalLM"],
        },
    }
    folder = published.write(tmp_path / "drafter")
    theirs = admitted(folder, target)
    compare_with_speculators(folder, theirs.drafter, target, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not SPECULATORS_PYTHON, reason="names a Python with speculators==0.9.0")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("eagle3", {"draft_vocab_size": DRAFTED, "draft_vocab_coverage": 1.0}),
        ("eagle3", {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
        ("dflash", {"num_layers": 2, "num_captures": 3, "block_size": DEPTH + 1}),
        ("p_eagle", {"num_layers": 2, "unroll": DEPTH, "draft_vocab_size": DRAFTED}),
        ("dspark", {"num_layers": 2, "num_captures": 3, "block_size": DEPTH, "markov_rank": 6}),
        ("dflash2", {"num_layers": 2, "num_captures": 3, "block_size": DEPTH + 1, **SELECTOR}),
    ],
)
def test_speculators_itself_loads_an_export_bit_for_bit(
    family: str, changes: dict[str, Any], target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    # Without an embedding in the file, the package's own is at times left uninitialised.
    changes = changes | {"own_embedding": "eagle" in family}
    drafter = drafter_config(family, **changes).build(target.spec)
    drafter.prepare(torch.randint(1, 99, (VOCAB,)), target.readout)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    told = yaml.safe_load((ROOT / "conf" / "export" / "vllm.yaml").read_text())
    wanted = ExportSettings(**(told | {"format": "speculators", "dtype": "float32"}))
    card = CardData("it", family, None, "tiny", None, "other", {}, {}, {})
    folder = tmp_path / "drafter"
    export_drafter(drafter.eval(), str(tiny_target_dir), folder, wanted, card)
    loaded = compare_with_speculators(folder, drafter, target, tmp_path)
    written = load_file(folder / "model.safetensors")
    assert len(written) > 10
    for name, tensor in written.items():
        assert torch.equal(tensor, loaded[f"weights.{name}"]), name


GATED = {
    "num_layers": 1,
    "draft_vocab_size": VOCAB,
    "block_size": DEPTH,
    "markov_head_type": "gated",
}


@pytest.mark.slow
@pytest.mark.skipif(not SPECULATORS_PYTHON, reason="names a Python with speculators==0.9.0")
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("eagle3", {"num_layers": 1, "draft_vocab_size": DRAFTED, "ttt_steps": DEPTH}),
        ("peagle", {"num_layers": 3, "draft_vocab_size": DRAFTED, "num_depths": DEPTH}),
        ("peagle", {"num_layers": 1, "draft_vocab_size": VOCAB, "norm_before_residual": True}),
        ("dflash", {"num_layers": 2, "draft_vocab_size": VOCAB, "block_size": DEPTH + 1}),
        ("dspark", {"num_layers": 2, "draft_vocab_size": VOCAB, "block_size": DEPTH}),
        ("dspark", GATED),
        (
            "dflash2",
            {"num_layers": 2, "draft_vocab_size": VOCAB, "block_size": DEPTH + 1, **SELECTOR},
        ),
    ],
)
def test_what_speculators_itself_writes_is_admitted_bit_for_bit(
    algorithm: str,
    options: dict[str, Any],
    target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    shared = {"mask_token_id": 7, "target_layer_ids": [1, 2, 3], "norm_before_residual": False}
    options = shared | options
    if algorithm == "dspark":
        options |= {"markov_rank": 6}
    folder = tmp_path / "theirs"
    script = ROOT / "tests/support/speculators_directory.py"
    run_with_speculators(script, algorithm, tiny_target_dir, folder, json.dumps(options))
    theirs = admitted(folder, target)
    written, held = load_file(folder / "model.safetensors"), theirs.drafter.state_dict()
    for name in ("d2t", "t2d"):
        written.pop(name, None)
    own = {name.replace("mask_hidden.weight", "mask_hidden") for name in held} - {"target_ids"}
    named = {name.replace("layers.0.", "midlayer.") if "eagle" in algorithm else name: tensor
             for name, tensor in written.items()}  # fmt: skip
    assert own == {*named}
    for name, tensor in named.items():
        mine = held["mask_hidden.weight" if name == "mask_hidden" else name]
        assert torch.equal(mine, tensor.float().view_as(mine)), name
    compare_with_speculators(folder, theirs.drafter, target, tmp_path)


def run_with_speculators(script: Path, *told: Any) -> None:
    assert SPECULATORS_PYTHON is not None
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes minutes
    call = [SPECULATORS_PYTHON, script, *told]
    subprocess.run(call, check=True, timeout=300, env=environment)


def compare_with_speculators(
    folder: Path, drafter: Drafter, target: Target, place: Path
) -> dict[str, Tensor]:
    """Return what speculators itself says of a directory; its logits must be the drafter's."""
    torch.manual_seed(5)
    count = 20
    tokens = torch.randint(VOCAB, (count + 1 + DEPTH + 1,))
    captured = torch.randn(len(drafter.captures), count, WIDTH)
    # Its unroll feeds the text's own tokens, so positions past the features only lend theirs.
    padded = torch.cat([captured, torch.zeros(len(captured), DEPTH + 2, WIDTH)], dim=1)
    kind = json.loads((folder / "config.json").read_text())["speculators_model_type"]
    block = kind in ("dflash", "dflash2", "dspark")  # whose anchor is a position of the text itself
    shift = 0 if block else 1
    given = {
        "hidden_states": torch.cat(list(padded[:, : len(tokens) - shift]), dim=-1)[None],
        "input_ids": tokens[None, shift:],
        "position_ids": torch.arange(len(tokens) - shift)[None],
        "ttt_steps": torch.tensor(DEPTH),
    }
    given["anchor"] = torch.tensor(count - shift)
    save_file({n: t.contiguous() for n, t in given.items()}, place / "in.safetensors")
    script = ROOT / "tests/support/speculators_forward.py"
    run_with_speculators(script, folder, place / "in.safetensors", place / "out")
    theirs = load_file(place / "out")
    if kind != "eagle3":  # one pass drafts all; DFlash's anchor itself drafts nothing
        first = 1 if kind in ("dflash", "dflash2") else 0
        expected = theirs["0"][0, first : first + DEPTH]
    else:
        expected = torch.stack([theirs[str(step)][0, count - 1] for step in range(DEPTH)])
    final = torch.randn(count, WIDTH).double()
    found = drafted_logits(drafter, target, captured.double(), final, tokens[:-1].tolist())
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-4)
    return theirs
