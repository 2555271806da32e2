"""The frozen target against Transformers' own forward: features, steps, masks, readout."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.core.types import Batch
from drafttrain.target.describe import read_out
from drafttrain.target.model import Target, load_target
from drafttrain.target.pretrained.config import ModelConfig

VOCAB = 97  # of the tokenizer in tiny_target_dir
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 5,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 8},  # scaled embedding, soft caps
    "cohere": {"logit_scale": 0.25},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def save(kind: str, folder: Path, tokenizer_from: Path, **changes: Any) -> Path:
    """Write a random model of a family to a directory, with the tiny tokenizer."""
    shape = SHAPE | FAMILIES.get(kind, {}) | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    model.requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:  # which start at one (or zero) and would hide a mistake
            torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.1)
    model.save_pretrained(folder)
    for file in tokenizer_from.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: Any, tiny_target_dir: Path) -> Target:
    folder = save(request.param, tmp_path_factory.mktemp("target"), tiny_target_dir)
    return load_target(model_config(folder), torch.float32, "cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any, tiny_target_dir: Path) -> Target:
    folder = save("llama", tmp_path_factory.mktemp("target"), tiny_target_dir)
    return load_target(model_config(folder), torch.float32, "cpu")


def tokens_of(rows: int, length: int) -> Tensor:
    return torch.randint(6, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def batch_of(tokens: Tensor, lengths: list[list[int]]) -> Batch:
    """Documents of these lengths in each row, then padding."""
    positions, document = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    index = 0
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            positions[row, start : start + length] = torch.arange(length)
            document[row, start : start + length] = index
            start, index = start + length, index + 1
    return Batch(tokens, document >= 0, positions, document)


@torch.no_grad()
def forward(target: Target, tokens: Tensor) -> Any:
    return target.model(input_ids=tokens, output_hidden_states=True, use_cache=False)


# Features


def test_features_are_the_hidden_states_of_transformers(target: Target) -> None:
    tokens = tokens_of(2, 12)
    features = target.features(batch_of(tokens, [[12], [12]]), (0, 2, 4))
    expected = forward(target, tokens)
    assert sorted(features.captured) == [0, 2, 4]
    for layer in (0, 2):
        torch.testing.assert_close(features.captured[layer], expected.hidden_states[layer], **CLOSE)
    # Transformers' last hidden state is after the norm; ours with that id is before it.
    torch.testing.assert_close(features.final_hidden, expected.hidden_states[4], **CLOSE)
    normed = target.final_norm(features.captured[4])
    torch.testing.assert_close(normed, features.final_hidden, **CLOSE)
    assert not torch.allclose(features.captured[4], features.final_hidden, atol=0.1)


def test_the_readout_gives_the_models_own_logits_and_embeddings(target: Target) -> None:
    tokens = tokens_of(2, 12)
    features = target.features(batch_of(tokens, [[12], [12]]), (0,))
    torch.testing.assert_close(
        target.readout.logits(features.final_hidden), forward(target, tokens).logits, **CLOSE
    )
    torch.testing.assert_close(target.readout.embed(tokens), features.captured[0], **CLOSE)


def test_the_readout_in_half_precision_is_the_models_too(
    target: Target, tmp_path: Path, tiny_target_dir: Path
) -> None:
    # Of this width, Gemma's scale is another number in bfloat16.
    folder = save(target.spec.architecture, tmp_path, tiny_target_dir, hidden_size=48)
    half = load_target(model_config(folder), torch.bfloat16, "cpu")
    tokens = tokens_of(1, 9)
    logits, features = half.step(half.begin(), tokens, (0,))
    assert half.dtype == logits.dtype == features.final_hidden.dtype == torch.bfloat16
    assert torch.equal(half.readout.embed(tokens), features.captured[0])
    with torch.no_grad():
        expected = half.model(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2)


def test_the_norm_in_the_readout_is_what_the_final_norm_multiplies_by(target: Target) -> None:
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    if target.spec.architecture == "cohere":
        hidden = hidden - hidden.mean(-1, keepdim=True)
    unit = hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()
    assert target.readout.norm is not None
    with torch.no_grad():
        torch.testing.assert_close(
            unit * target.readout.norm, target.final_norm(hidden), rtol=1e-3, atol=1e-3
        )
    if target.spec.architecture == "llama":
        assert target.readout.norm.data_ptr() == target.final_norm.weight.data_ptr()


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_share_one_tensor(tied: bool, tmp_path: Path, tiny_target_dir: Path) -> None:
    folder = save("llama", tmp_path, tiny_target_dir, tie_word_embeddings=tied)
    readout = load_target(model_config(folder), torch.float32, "cpu").readout
    assert (readout.head is readout.embedding) == tied


def test_a_quantised_head_is_refused(llama: Target) -> None:
    model = copy.deepcopy(llama.model)
    weight = model.lm_head.weight.detach()
    del model.lm_head.weight
    for packed in (None, weight.to(torch.uint8)):  # as other names, or in its place
        model.lm_head.weight = packed
        with pytest.raises(ValueError, match=r"model.path must hold a target whose head is not qu"):
            read_out(model)


def test_padding_changes_no_feature_of_a_real_token(target: Target) -> None:
    tokens = tokens_of(3, 12)
    features = target.features(batch_of(tokens, [[12], [7], [1]]), (1, 4))
    for row, length in enumerate((12, 7, 1)):
        alone = target.features(batch_of(tokens[row : row + 1, :length], [[length]]), (1, 4))
        for layer in (1, 4):
            torch.testing.assert_close(
                features.captured[layer][row, :length], alone.captured[layer][0], **CLOSE
            )
        assert features.final_hidden.isfinite().all()


def test_packed_documents_do_not_see_each_other(target: Target) -> None:
    tokens = tokens_of(2, 14)
    lengths = [[5, 1, 6], [14]]
    features = target.features(batch_of(tokens, lengths), (0, 3))
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            piece = tokens[row : row + 1, start : start + length]
            alone = target.features(batch_of(piece, [[length]]), (0, 3))
            inside = slice(start, start + length)
            torch.testing.assert_close(
                features.final_hidden[row, inside], alone.final_hidden[0], **CLOSE
            )
            torch.testing.assert_close(
                features.captured[3][row, inside], alone.captured[3][0], **CLOSE
            )
            start += length
    assert features.final_hidden.isfinite().all()


def test_an_empty_row_is_finite(llama: Target) -> None:
    for lengths in ([[6], []], [[3, 3], []]):
        features = llama.features(batch_of(tokens_of(2, 6), lengths), (1,))
        assert features.final_hidden.isfinite().all()


def test_only_asked_layers_are_captured_and_no_hook_stays(llama: Target) -> None:
    features = llama.features(batch_of(tokens_of(1, 4), [[4]]), ())
    assert features.captured == {}
    llama.features(batch_of(tokens_of(1, 4), [[4]]), (1, 4))
    with pytest.raises(ValueError, match=r"captured layers must be in 0..4 for model=tiny_test, g"):
        llama.features(batch_of(tokens_of(1, 4), [[4]]), (1, 5))
    modules = [*llama.layers, llama.final_norm]
    assert not any(module._forward_pre_hooks for module in modules)


def test_features_carry_no_gradient_and_yet_can_be_trained_on(llama: Target) -> None:
    features = llama.features(batch_of(tokens_of(1, 4), [[4]]), (1,))
    assert not features.final_hidden.requires_grad
    weight = torch.ones(32, requires_grad=True)
    (features.captured[1] * weight).sum().backward()  # would raise for inference tensors
    assert weight.grad is not None
    assert not any(parameter.requires_grad for parameter in llama.model.parameters())
    assert not llama.model.training


# Steps


def test_steps_and_rollbacks_give_the_logits_of_one_forward(target: Target) -> None:
    tokens = tokens_of(2, 20)
    expected = forward(target, tokens)
    cache, done, logits, hidden = target.begin(), 0, [], []
    for kept, rejected in ((6, 0), (1, 4), (3, 1), (1, 0), (5, 7), (4, 0)):
        wrong = tokens_of(2, rejected) if rejected else tokens[:, :0]
        piece = torch.cat([tokens[:, done : done + kept], wrong], 1)
        scores, features = target.step(cache, piece, captures=(2, 4))
        target.rollback(cache, [done + kept] * 2)
        logits.append(scores[:, :kept])
        hidden.append(features.captured[2][:, :kept])
        done += kept
        assert cache.lengths == [done, done]
    torch.testing.assert_close(torch.cat(logits, 1), expected.logits, **CLOSE)
    torch.testing.assert_close(torch.cat(hidden, 1), expected.hidden_states[2], **CLOSE)


def test_a_cache_can_be_rolled_back_to_nothing(llama: Target) -> None:
    tokens = tokens_of(1, 5)
    cache = llama.begin()
    first, _ = llama.step(cache, tokens)
    llama.rollback(cache, [5])
    assert cache.get_seq_length() == 5
    llama.rollback(cache, [0])
    assert cache.get_seq_length() == 0
    again, _ = llama.step(cache, tokens)
    assert torch.equal(first, again)
    with pytest.raises(AssertionError, match=r"cannot roll back from \[5\] to \[6\]"):
        llama.rollback(cache, [6])


def test_last_only_scores_the_last_token(llama: Target) -> None:
    tokens = tokens_of(2, 6)
    every, _ = llama.step(llama.begin(), tokens)
    last, features = llama.step(llama.begin(), tokens, last_only=True)
    assert last.shape == (2, 1, VOCAB)
    torch.testing.assert_close(last, every[:, -1:], **CLOSE)
    assert features.final_hidden.shape == (2, 6, 32)


def test_rows_of_different_lengths_decode_as_if_alone(target: Target) -> None:
    tokens, lengths = tokens_of(3, 20), [9, 4, 1]
    prompt = torch.zeros(3, 9, dtype=torch.long)
    for row, length in enumerate(lengths):
        prompt[row, :length] = tokens[row, :length]
    cache = target.begin()
    prefill, _ = target.step(cache, prompt, counts=lengths)
    last, _ = target.step(target.begin(), prompt, counts=lengths, last_only=True)
    said = [[prefill[row, :length]] for row, length in enumerate(lengths)]
    for row in range(3):
        torch.testing.assert_close(last[row, 0], said[row][0][-1], **CLOSE)
    done = lengths
    # Padding in some rows, a rollback of another number in each, and a step of one token.
    for kept, fed in (([3, 1, 2], 4), ([1, 4, 2], 4), ([1, 1, 1], 1)):
        piece = torch.zeros(3, fed, dtype=torch.long)
        for row in range(3):
            piece[row, : kept[row]] = tokens[row, done[row] : done[row] + kept[row]]
        logits, _ = target.step(cache, piece)
        done = [length + count for length, count in zip(done, kept, strict=True)]
        target.rollback(cache, done)
        for row in range(3):
            said[row].append(logits[row, : kept[row]])
    for row in range(3):
        expected = forward(target, tokens[row : row + 1, : done[row]]).logits[0]
        torch.testing.assert_close(torch.cat(said[row]), expected, **CLOSE)


def test_selected_rows_go_on_alone(llama: Target) -> None:
    tokens = tokens_of(3, 10)
    cache = llama.begin()
    llama.step(cache, tokens[:, :6])
    llama.select(cache, [2, 0])
    logits, _ = llama.step(cache, tokens[[2, 0], 6:])
    torch.testing.assert_close(logits, forward(llama, tokens[[2, 0]]).logits[:, 6:], **CLOSE)


def test_more_tokens_than_positions_are_refused(llama: Target) -> None:
    cache = llama.begin()
    llama.step(cache, tokens_of(1, 60))
    with pytest.raises(ValueError, match="65 tokens must fit in the 64 positions of model=tiny_te"):
        llama.step(cache, tokens_of(1, 5))


# What it says of itself


def test_the_spec_is_the_configurations(target: Target, tmp_path: Path) -> None:
    spec = target.spec
    assert spec.architecture in FAMILIES
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (VOCAB, 32, 48)
    assert (spec.num_layers, spec.num_attention_heads, spec.head_dim) == (4, 4, 8)
    assert spec.num_key_value_heads == 2
    assert spec.rope_theta in (10000.0, 500000.0)
    assert (spec.max_positions, spec.bos_token_id, spec.pad_token_id) == (64, 1, 0)
    assert spec.eos_token_ids == (5,)
    assert len(spec.fingerprint) == 32


def test_every_token_that_ends_an_answer_is_known(tmp_path: Path, tiny_target_dir: Path) -> None:
    folder = save("llama", tmp_path, tiny_target_dir, eos_token_id=[7, 8])
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    spec = load_target(model_config(folder), torch.float32, "cpu").spec
    assert spec.eos_token_ids == (9, 7, 8, 5)  # generation, configuration, tokenizer


def test_fewer_positions_can_be_asked_for_but_not_more(llama: Target, tmp_path: Path) -> None:
    folder = Path(llama.model.name_or_path)
    fewer = dataclasses.replace(model_config(folder), max_positions=16)
    assert load_target(fewer, torch.float32, "cpu").spec.max_positions == 16
    more: ModelConfig = dataclasses.replace(fewer, max_positions=65)
    with pytest.raises(
        ValueError, match=r"model.max_positions must be at most 64 \(what model=tin"
    ):
        load_target(more, torch.float32, "cpu")


def test_an_architecture_that_reads_out_in_its_own_way_is_refused(llama: Target) -> None:
    broken = Target(llama.model, llama.tokenizer, llama.spec)
    broken.check_readout()
    for change in ({"logit_scale": 1.5}, {"embedding_scale": 2.0}, {"soft_cap": 1.0}):
        broken.readout = dataclasses.replace(llama.readout, **change)
        with pytest.raises(ValueError, match=r"\(llama\) (embeds|computes) .* drafttrain does not"):
            broken.check_readout()
