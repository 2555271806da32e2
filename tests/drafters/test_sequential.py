"""Heads that read the token drafted before them, against their papers' equations in float64."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from published import rms, turned
from test_drafters import NoChance, as_batch, build, random_drafter, stepped_logits
from torch import Tensor
from torch.nn.functional import gelu, silu

from drafttrain.core.types import TargetFeatures
from drafttrain.drafters.mlp_speculator import MLPSpeculator
from drafttrain.target.model import Target, load_target

TEXT = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 4, 30]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    target = load_target(model_config(tiny_target_dir), torch.float64, "cpu")
    with torch.no_grad():
        target.readout.head.mul_(8)  # sharp enough to differ from a drafter
    return target


# --- references: logits after tokens read one by one, from hidden states up to the first ---


def residual(weights: Tensors, name: str, count: int, values: Tensor) -> Tensor:
    for number in range(count):
        layer = f"{name}.layers.{number}"
        values = values + silu(values @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
    return values


def hydra(drafter: Any, weights: Tensors, hidden: Tensor, table: Tensor, read: list[int]) -> Tensor:
    k, state = len(read) - 1, hidden[-1]
    if drafter.config.prefix_attention:
        state = prefixed(drafter, weights, hidden)
    values = torch.cat([state, *(table[token] for token in read)])
    first = f"mlps.{k}"
    inner = values @ weights[f"{first}.linear.weight"].T + weights[f"{first}.linear.bias"]
    kept = values @ weights[f"{first}.residual.weight"].T + weights[f"{first}.residual.bias"]
    state = residual(weights, f"{first}.blocks", drafter.config.num_layers - 1, kept + silu(inner))
    return state @ weights[f"lm_heads.{k}.weight"].T


def prefixed(drafter: Any, weights: Tensors, hidden: Tensor) -> Tensor:
    """The last position's output of a Llama layer over all of them, and a norm."""
    shape, name = drafter.shape, "prefix.layer"
    frequencies = [
        shape.rope_theta ** (-2 * j / shape.head_dim) for j in range(shape.head_dim // 2)
    ]
    normed = rms(hidden, weights[f"{name}.input_layernorm.weight"], shape.rms_norm_eps)
    projections = (f"{name}.self_attn.{part}_proj.weight" for part in "qkv")
    q, k, v = (
        (normed @ weights[part].T).unflatten(1, (-1, shape.head_dim)) for part in projections
    )
    q, k = turned(q, frequencies), turned(k, frequencies)
    groups = shape.num_attention_heads // shape.num_key_value_heads
    heads = []
    for head in range(shape.num_attention_heads):
        scores = k[:, head // groups] @ q[-1, head] / math.sqrt(shape.head_dim)
        heads.append(scores.softmax(0) @ v[:, head // groups])
    state = hidden[-1] + torch.cat(heads) @ weights[f"{name}.self_attn.o_proj.weight"].T
    normed = rms(state, weights[f"{name}.post_attention_layernorm.weight"], shape.rms_norm_eps)
    gate, up = (normed @ weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    state = state + (silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    return rms(state, weights["prefix.norm.weight"], shape.rms_norm_eps)


def speculator(
    drafter: Any, weights: Tensors, hidden: Tensor, table: Tensor, read: list[int]
) -> Tensor:
    """IBM's forward with a LN that centres: both weights as they are written there, though the norm
    divides one out.
    """
    state, depths = hidden[-1], drafter.config.num_heads
    tied = drafter.config.tied
    if drafter.config.scale_input:
        centred = state - state.mean()
        state = centred / (centred.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    width = weights["embeddings.0.weight"].shape[1]
    state_weight = 0.5 ** (0.5 / depths)
    token_weight = math.sqrt(1 - state_weight**2) * math.sqrt(width / 2)
    for depth, token in enumerate(read):
        own = 0 if tied else depth
        projection = weights[f"projections.{min(depth, 1) if tied else depth}.weight"]
        sum_ = state_weight * (projection @ state)
        sum_ = sum_ + token_weight * weights[f"embeddings.{own}.weight"][token]
        centred = sum_ - sum_.mean()
        normed = centred / (centred.square().mean() + 1e-6 * state_weight**2).sqrt()
        state = gelu(normed * weights[f"norms.{own}.weight"] + weights[f"norms.{own}.bias"])
    return weights[f"lm_heads.{own}.weight"] @ state


def redrafter(
    drafter: Any, weights: Tensors, hidden: Tensor, table: Tensor, read: list[int]
) -> Tensor:
    state = torch.zeros_like(hidden[-1])
    for token in read:
        before = weights["rnn_u.weight"] @ state + weights["rnn_u.bias"]
        state = silu(weights["rnn_w.weight"] @ table[token] + before)
    values = torch.cat([hidden[-1], state])
    if drafter.config.exit_size is not None:
        values = weights["input_proj.weight"] @ values + weights["input_proj.bias"]
    values = residual(weights, "blocks", drafter.config.num_layers, values)
    return weights["lm_heads.0.weight"] @ values


CASES: dict[str, tuple[str, dict[str, Any], Callable[..., Tensor]]] = {
    "Hydra": ("hydra_heads", {"num_heads": 3}, hydra),
    "Hydra, two layers": ("hydra_heads", {"num_layers": 2}, hydra),
    "Hydra++": ("hydra_pp", {"losses": {"hard_cross_entropy": 1.0}}, hydra),
    "MLP": ("mlp_speculator", {}, speculator),
    "MLP, tied": ("mlp_speculator", {"tied": True, "scale_input": True}, speculator),
    "MLP, narrow": ("mlp_speculator", {"inner_size": 24, "num_heads": 3}, speculator),
    "ReDrafter": ("redrafter", {}, redrafter),
    "ReDrafter, projected": ("redrafter", {"exit_size": 24, "unroll": 3}, redrafter),
}


def made(case: str, target: Target) -> tuple[Any, Callable[..., Tensor]]:
    family, settings, reference = CASES[case]
    drafter: Any = random_drafter(family, target, **settings).double()

    def logits(hidden: Tensor, read: list[int]) -> Tensor:
        weights = dict(drafter.state_dict())
        table = target.readout.embedding * weights.get("scale.factor", 1.0)
        return reference(drafter, weights, hidden, table, read)

    return drafter, logits


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_training_is_the_papers_equations_at_every_depth(case: str, target: Target) -> None:
    """Every position and depth, one by one: sums and counts of hard cross-entropy."""
    drafter, logits = made(case, target)
    batch = as_batch(TEXT)
    final = target.features(batch, ()).final_hidden
    losses = drafter(batch, TargetFeatures({}, final, target.readout), NoChance())
    assert list(losses) == list(drafter.depth_terms)
    for depth, term in enumerate(losses.values()):
        pairs = [(at, at + 2 + depth) for at in range(len(TEXT) - 2 - depth)]
        each = [
            -logits(final[0, : at + 1], TEXT[at + 1 : ahead]).log_softmax(0)[TEXT[ahead]]
            for at, ahead in pairs
        ]
        torch.testing.assert_close(term.sum, torch.stack(each).sum(), rtol=1e-7, atol=0)
        assert int(term.count) == len(pairs)
        assert term.weight == pytest.approx(drafter.config.depth_decay**depth)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_decoding_is_the_papers_equations_at_every_depth(case: str, target: Target) -> None:
    drafter, logits = made(case, target)
    for root in (1, 6):
        for depth in range(1, drafter.unroll + 1):
            found = stepped_logits(drafter, target, TEXT, root, depth)[0]
            final = target.features(as_batch(TEXT[:root]), ()).final_hidden[0]
            torch.testing.assert_close(found, logits(final, TEXT[root : root + depth]))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_nodes_children_follow_from_its_own_path(case: str, target: Target) -> None:
    """Siblings, and cousins whose parents are named out of order, in two rows at once."""
    drafter, logits = made(case, target)
    texts = torch.tensor([TEXT[:6], TEXT[2:8]])
    _, features = target.step(target.begin(), texts[:, :-1], ())
    state = drafter.begin(target.readout, texts[:, 0], 40)
    drafter.observe(state, texts[:, 1:], [5, 5], features)
    drafter.expand(state, None)
    first = torch.tensor([[33, 41, 7], [9, 12, 33]])
    drafter.expand(state, first, torch.zeros(2, 3, dtype=torch.long))
    parents = torch.tensor([[2, 0, 2], [1, 1, 0]])
    second = torch.tensor([[20, 20, 60], [4, 30, 30]])
    found = drafter.expand(state, second, parents)
    for row in range(2):
        for node in range(3):
            path = [int(first[row, parents[row, node]]), int(second[row, node])]
            read = [int(texts[row, -1]), *path]
            expected = logits(features.final_hidden[row], read)
            torch.testing.assert_close(found[row, node], expected)


@torch.no_grad()
def test_an_rnn_drafts_deeper_than_it_was_trained(target: Target) -> None:
    drafter, logits = made("ReDrafter, projected", target)
    assert drafter.max_depth is None
    found = stepped_logits(drafter, target, TEXT, 4, drafter.unroll + 2)[0]
    final = target.features(as_batch(TEXT[:4]), ()).final_hidden[0]
    torch.testing.assert_close(found, logits(final, TEXT[4 : 4 + drafter.unroll + 2]))


@torch.no_grad()
def test_the_prefix_layer_reads_committed_tokens_only_once(target: Target) -> None:
    """Token by token, or all at once, after drafts that were rejected: the same logits."""
    drafter, logits = made("Hydra++", target)
    tokens = torch.tensor([TEXT])
    _, features = target.step(target.begin(), tokens[:, :-1], ())
    state = drafter.begin(target.readout, tokens[:, 0], 40)
    for at in range(0, len(TEXT) - 1, 2):
        new = tokens[:, at + 1 : at + 3]
        drafter.observe(state, new, [new.shape[1]], features.slice(at, at + new.shape[1]))
        assert state.cache.lengths == [at + new.shape[1]]
        found = drafter.expand(state, None)[0, 0]
        drafter.expand(state, torch.tensor([[50]]))
        upto = at + new.shape[1]
        torch.testing.assert_close(
            found, logits(features.final_hidden[0, :upto], [int(tokens[0, upto])])
        )


@pytest.mark.parametrize("family", ["hydra_heads", "redrafter"])
@torch.no_grad()
def test_heads_begin_as_the_targets_own(family: str, target: Target) -> None:
    """As Medusa's: the first prediction, whatever was drafted, is that of the token after t."""
    torch.manual_seed(0)
    drafter: Any = build(family, target.spec).double()
    drafter.prepare(torch.ones(target.spec.vocab_size, dtype=torch.long), target.readout)
    if family == "redrafter":  # what it adds to the hidden state's logits is not zero
        drafter.lm_heads[0].weight[:, target.spec.hidden_size :].zero_()
    final = target.features(as_batch(TEXT[:5]), ()).final_hidden[0, -1]
    for depth in (1, 3):
        found = stepped_logits(drafter, target, TEXT, 5, depth)[0]
        torch.testing.assert_close(found, target.readout.head @ final)


def test_tied_heads_share_all_but_the_first_projection(target: Target) -> None:
    """IBM's 70B speculator is tied: one table of each kind, and two projections."""
    names = lambda drafter: sorted(drafter.state_dict())  # noqa: E731
    drafter = build("mlp_speculator", target.spec, tied=True)
    assert isinstance(drafter, MLPSpeculator)
    assert names(drafter) == sorted(
        [
            *("embeddings.0.weight", "lm_heads.0.weight", "norms.0.weight", "norms.0.bias"),
            *("projections.0.weight", "projections.1.weight"),
        ]
    )
    assert len(names(build("mlp_speculator", target.spec))) == 4 * 5
    assert len(names(build("mlp_speculator", target.spec, num_heads=1, tied=True))) == 5


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("hydra_heads", "num_heads", 0),
        ("hydra_heads", "num_layers", 0),
        ("mlp_speculator", "num_heads", 0),
        ("mlp_speculator", "inner_size", 0),
        ("redrafter", "unroll", 0),
        ("redrafter", "exit_size", 0),
        ("redrafter", "depth_decay", 1.5),
    ],
)
def test_settings_that_make_no_drafter_are_refused(
    family: str, key: str, value: float, target: Target
) -> None:
    with pytest.raises(ValueError, match=f"drafter.{key} must be .*got {value}"):
        build(family, target.spec, **{key: value})
