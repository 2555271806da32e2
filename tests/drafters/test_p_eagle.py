"""P-EAGLE against a dense reference; what its slots see; which of them a step trains."""

from typing import Any

import pytest
import torch
from builders import drafter_config
from published import p_eagle_reference
from test_drafters import NoChance, as_batch, build, random_drafter

from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.types import Batch, TargetFeatures
from drafttrain.drafters.p_eagle import PEagle, keep_share
from drafttrain.drafters.serving.p_eagle_layout import PEagleLayout
from drafttrain.target.model import Target
from drafttrain.training.loop import StepChance

TEXT = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12, 4, 30]
UNROLL = 4
ON_TEXT = {"losses": {"hard_cross_entropy": 1.0}, "draft_vocab_coverage": 1.0}


def p_eagle(target: Target, **overrides: Any) -> PEagle:
    drafter = random_drafter("p_eagle", target, **overrides)
    assert isinstance(drafter, PEagle)
    return drafter


@pytest.mark.parametrize("cod_ratio", [1.0, 0.6])
@torch.no_grad()
def test_training_is_the_definition_for_every_position_and_depth(
    target: Target, cod_ratio: float
) -> None:
    """Each position's own pass, densely and in float64; a step trains the slots that it drew."""
    settings = {"cod_ratio": cod_ratio, "depth_decay": 0.5, "num_layers": 3}
    drafter = p_eagle(target, **ON_TEXT, **settings).double().train()
    shape = {**vars(drafter.shape), "eps": drafter.shape.rms_norm_eps, "scaling": None}
    shape |= {"heads": shape["num_attention_heads"], "kv_heads": shape["num_key_value_heads"]}
    shape |= {"theta": shape["rope_theta"]}
    reference = p_eagle_reference(shape, 3, UNROLL, drafter.mask_token_id)
    batch, readout = as_batch(TEXT), target.readout.to(torch.float64)
    features = target.features(batch, drafter.captures)
    captured = torch.stack([features.captured[layer][0] for layer in drafter.captures]).double()
    chance = StepChance(3, 0)
    drawn = chance.uniform_like(torch.empty(1, len(TEXT), 1), batch.document)[0, :, 0]
    order = drawn[: len(TEXT) - 2].argsort().tolist()
    # Those that a depth can train are fewer by the depth: it ends at the text's last token.
    pools = [[at for at in order if at + depth < len(TEXT) - 2] for depth in range(UNROLL)]
    share = [round((len(TEXT) - 2) * cod_ratio**depth) for depth in range(UNROLL)]
    expected, counts = torch.zeros(UNROLL).double(), [0] * UNROLL
    tensors = drafter.to_serving()[1]
    for position in range(len(TEXT) - 2):
        before = captured[:, : position + 1]
        logits = reference(tensors, before, before[0], readout.embedding, TEXT)
        for depth, token in enumerate(TEXT[position + 2 : position + 2 + UNROLL]):
            if position in pools[depth][: share[depth]]:
                expected[depth] -= logits[depth].log_softmax(-1)[token]
                counts[depth] += 1
    layers = dict(zip(drafter.captures, captured[:, None], strict=True))
    final = torch.zeros(1, len(TEXT), target.spec.hidden_size).double()
    terms = list(drafter(batch, TargetFeatures(layers, final, readout), chance).values())
    found = torch.stack([term.sum for term in terms])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert [int(term.count) for term in terms] == counts
    assert counts[0] == len(TEXT) - 2
    assert cod_ratio == 1 or 0 < counts[-1] < len(TEXT) - 1 - UNROLL
    assert [term.weight for term in terms] == [0.5**depth for depth in range(UNROLL)]


@pytest.mark.parametrize("depth", range(UNROLL))
def test_a_slot_reads_the_pairs_up_to_its_position_alone(target: Target, depth: int) -> None:
    drafter, ahead = p_eagle(target, **ON_TEXT), 8
    position = ahead - 2 - depth
    batch = as_batch(TEXT, mask=[[place == ahead for place in range(len(TEXT))]])
    features = target.features(batch, drafter.captures)
    leaves = {layer: hidden.requires_grad_() for layer, hidden in features.captured.items()}
    own = TargetFeatures(leaves, features.final_hidden, features.readout)
    drafter(batch, own, NoChance())[f"depth_{depth + 1}"].sum.backward()
    for hidden in leaves.values():
        assert hidden.grad is not None
        assert hidden.grad[0, : position + 1].abs().amax(-1).all()
        assert not hidden.grad[0, position + 1 :].any()
    assert drafter.embed_tokens is not None
    assert drafter.embed_tokens.weight.grad is not None
    read = set(drafter.embed_tokens.weight.grad.abs().amax(-1).nonzero()[:, 0].tolist())
    mask = {drafter.mask_token_id} if depth else set()
    assert read == set(TEXT[1 : position + 2]) | mask


def kept(drafter: PEagle, batch: Batch, step: int) -> list[set[tuple[int, int]]]:
    """Return, by depth, the conversation and position of each slot that a step trains."""
    predictions = drafter._chains(batch, StepChance(3, step)).predictions
    found = []
    for depth, places in enumerate(predictions.places):
        here = places >= 0
        rows, columns = predictions.rows[here], predictions.columns[here]
        documents, positions = batch.document[rows, columns], batch.positions[rows, columns]
        found.append(
            {
                (int(document), int(position) - 2 - depth)
                for document, position in zip(documents, positions, strict=True)
            }
        )
    return found


def test_a_step_trains_a_share_of_each_depth_drawn_anew_whatever_the_batch(target: Target) -> None:
    drafter = p_eagle(target, cod_ratio=0.7).train()
    rows = [[5 + i % 60 for i in range(length)] for length in (400, 250, 7)]
    batch = as_batch(*rows)
    real = batch.document >= 0
    packed = Batch(*(tensor[real][None] for tensor in vars(batch).values()))
    drawn, every = kept(drafter, batch, step=0), kept(drafter.eval(), batch, step=0)
    drafter.train()
    assert drawn == kept(drafter, packed, step=0) == kept(drafter, batch, step=0)
    assert drawn[1] != kept(drafter, batch, step=1)[1]
    for depth in range(UNROLL):
        wanted = {(row, at) for row in range(3) for at in range(len(rows[row]) - 2 - depth)}
        assert every[depth] == wanted
        pool = drawn[depth - 1] & wanted if depth else wanted
        for row, length in enumerate(map(len, rows)):
            trained, here = (
                len([s for s in slots if s[0] == row]) for slots in (drawn[depth], pool)
            )
            assert trained == min(round((length - 2) * 0.7**depth), here)
        if depth:
            assert drawn[depth] <= drawn[depth - 1], "a slot needs those of its chain before it"
    later = [kept(drafter, batch, step) for step in range(20)]
    assert set().union(*(step[-1] for step in later)) > drawn[-1]


def test_a_share_of_each_conversation_is_kept_nested_by_depth() -> None:
    """Counted one by one; two conversations share a row, and a hole in the text ends chains."""
    torch.manual_seed(0)
    ratio, document = 0.6, torch.tensor([[3] * 30 + [1] * 12 + [-1] * 8, [2] * 50])
    trained = torch.rand(2, 50, 4) < 0.9
    trained[document < 0] = False
    trained[..., 0] |= document >= 0
    drawn = torch.rand(2, 50)
    found = keep_share(trained, drawn, document, ratio)
    assert torch.equal(found[..., 0], trained[..., 0])
    for name in (1, 2, 3):
        own = document == name
        for depth in (1, 2, 3):
            can = own & trained[..., depth] & (found[..., depth - 1] if depth > 1 else own)
            count = min(int(can.sum()), round(int(own.sum()) * ratio**depth))
            least = drawn[can].sort().values[:count]
            assert torch.equal(found[..., depth] & own, can & torch.isin(drawn, least))
            assert 0 < count < int(own.sum())
    assert torch.equal(keep_share(trained, drawn, document, 1.0)[..., 1], trained[..., 1])
    alone = keep_share(trained[:1, 30:42], drawn[:1, 30:42], document[:1, 30:42], ratio)
    assert torch.equal(alone, found[:1, 30:42])


def test_slots_that_are_not_trained_are_not_computed(target: Target) -> None:
    batch = as_batch(list(range(20, 60)), mask=[[place == 30 for place in range(40)]])
    chains = p_eagle(target)._chains(batch, NoChance())
    assert chains.sizes == [3, 2, 1], "three chains end at the token, of one to three masks"
    assert chains.columns.tolist() == [[25, 26, 27]]


@torch.no_grad()
def test_a_proposal_is_drafted_in_the_pass_that_observes(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, passes, run = p_eagle(target), [], RaggedCache.run
    monkeypatch.setattr(RaggedCache, "run", lambda *a, **k: passes.append(1) or run(*a, **k))
    batch = as_batch(TEXT, TEXT)
    features = target.features(batch, drafter.captures)
    state = drafter.begin(target.readout, batch.tokens[:, 0], 20)
    drafter.observe(state, batch.tokens[:, 1:7], [6, 4], features.slice(0, 6))
    first = drafter.expand(state, None)
    for tokens in ([[5, 6]] * 2, [[7, 8, 9]] * 2, [[1]] * 2):
        logits = drafter.expand(state, torch.tensor(tokens))
        assert logits.shape[:2] == (2, len(tokens[0]))
        assert bool((logits == logits[:, :1]).all()), "the children of a level are the same"
        assert not torch.equal(logits[:, 0], first[:, 0])
    assert len(passes) == 1
    assert state.cache.lengths == [6, 4], "the cache forgets the masks"
    drafter.observe(state, batch.tokens[:, 7:9], [1, 2], features.slice(6, 8))
    assert state.cache.lengths == [7, 6]


def test_the_layout_tells_vllm_what_it_asks_for(target: Target) -> None:
    drafter = p_eagle(target)
    config, tensors = drafter.to_serving()
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["ptd_token_id"]) == (2, drafter.mask_token_id)
    assert tensors["embed_tokens.weight"].shape == target.readout.embedding.shape
    assert tensors["mask_hidden"].shape == (1, 1, 3 * target.spec.hidden_size)
    assert {name.split(".")[1] for name in tensors if name.startswith("layers.")} == {"1"}
    assert config["n_predict"] == UNROLL == drafter.max_depth
    assert PEagleLayout().parallel


def test_the_embedding_begins_as_the_targets_and_is_trained(target: Target) -> None:
    drafter = drafter_config("p_eagle").build(target.spec)
    drafter.prepare(torch.ones(target.spec.vocab_size, dtype=torch.long), target.readout)
    assert torch.equal(drafter.embed_tokens.weight, target.readout.embedding)
    assert drafter.embed_tokens.weight.requires_grad


def test_settings_that_do_not_fit_are_named(target: Target) -> None:
    with pytest.raises(ValueError, match=r"drafter\.mask_token_id must be one of the .* got 99999"):
        build("p_eagle", target.spec, mask_token_id=99999)
    with pytest.raises(ValueError, match=r"drafter\.cod_ratio must be in \(0, 1\], got 0\.0"):
        build("p_eagle", target.spec, cod_ratio=0.0)
    with pytest.raises(ValueError, match=r"drafter\.num_layers must be at least 1, got 0"):
        build("p_eagle", target.spec, num_layers=0)
