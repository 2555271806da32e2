"""The contract that every drafter of conf/drafter keeps; a new yaml is tested by existing."""

import functools
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import draft_model_dir, drafter_config
from pairs import dealt
from paths import ROOT

from drafttrain.config.groups import content_of
from drafttrain.core import losses
from drafttrain.core.chance import SeededChance
from drafttrain.core.losses import TokenLossConfig
from drafttrain.core.ops.layer_calls import LayerCalls
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Batch, Losses, TargetFeatures, TargetSpec, weighted_sum
from drafttrain.core.vocab import DraftVocab
from drafttrain.decode.autoregressive import autoregressive_decode, autoregressive_decode_batch
from drafttrain.decode.loop import speculative_decode, speculative_decode_batch
from drafttrain.decode.policy import DynamicTree, Policy, chain, tree_of_widths
from drafttrain.decode.verify import Lenience
from drafttrain.drafters.base import (
    Drafter,
    DrafterConfig,
    DraftState,
    JoinedConfig,
    TrainingChance,
)
from drafttrain.target.model import Target, load_target
from drafttrain.target.store.shards import kept_positions

# CONFIG_DIR: a folder of one's own, as --config-dir names it, whose drafters keep the contract too.
PLACES = [Path(text) / "drafter" for text in (ROOT / "conf", os.environ.get("CONFIG_DIR")) if text]
YAML = {file.stem: file for place in PLACES for file in sorted(place.glob("*.yaml"))}
# The tiny target wants tiny drafters, and a reduced vocabulary that really leaves something out. A
# name with a slash is another setting of the same yaml.
TINY: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 5, "num_layers": 2, "gamma": 2.0},
    "dflash/input": {"block_size": 5, "num_layers": 2, "gamma": 2.0, "fusion": "input"},
    "dflash2": {"block_size": 5, "num_layers": 2, "gamma": 2.0, "selector_rank": 12},
    "dspark": {"block_size": 5, "num_layers": 2, "gamma": 2.0, "markov_rank": 8},
    "eagle/reduced": {"draft_vocab_size": 64},
    "mtp/reduced": {"draft_vocab_size": 64},
    "eagle3": {"draft_vocab_coverage": 0.85},
    "eagle3_1": {"draft_vocab_coverage": 0.85},
    "p_eagle": {"draft_vocab_coverage": 0.85, "num_layers": 2, "unroll": 4, "cod_ratio": 1.0},
    "small_lm": {"hidden_size": 48, "intermediate_size": 64, "num_key_value_heads": 1},
}
MEMBERS = ["eagle3", "medusa", "ngram", "two_model"]  # of the drafter that joins others
# `admitted` is no family of its own: what a directory holds is (tests/formats/test_read.py).
OURS = [name for name, file in YAML.items() if file.is_relative_to(ROOT)]
ALL = sorted((YAML.keys() - {"admitted"}) | {name for name in TINY if "/" in name})
STOPS = [50, 51, 52, 53, 54, 55]  # so that rows of a batch end at different places
PROMPTS = [[1, 3, 6, 20, 33, 41, 20], [1, 3, 6, 70, 71], list(range(10, 40)), [5]]
POLICIES = [chain(1), chain(2), chain(4), tree_of_widths([3, 2, 1]), DynamicTree(3, 3, 8)]


def build(name: str, spec: TargetSpec, **overrides: Any) -> Drafter:
    """Build a drafter as its yaml says, less what TINY and overrides change."""
    values = content_of("drafter", name.split("/")[0])
    module, cls = values.pop("_target_").rsplit(".", 1)
    if name == "two_model":
        values["path"] = draft_model_dir(spec.vocab_size)
    values = values | TINY.get(name, {}) | overrides
    return getattr(importlib.import_module(module), cls)(**values).build(spec)


def random_drafter(name: str, target: Target, **overrides: Any) -> Drafter:
    """Random weights everywhere, after `prepare` chose what depends on data."""
    if name == "ensemble":
        # By default the cost, and so who drafts, depends on the device.
        config = drafter_config(name, **{"members": MEMBERS, "verify_cost": 0.1} | overrides)
        assert isinstance(config, JoinedConfig)
        return config.join(
            target.spec, [random_drafter(each, target) for each in config.members]
        ).eval()
    torch.manual_seed(0)
    drafter = build(name, target.spec, **overrides)
    if target.tokenizer is not None:
        drafter.attach(target.tokenizer)
    if drafter.config.trainable:
        drafter.prepare(torch.arange(target.spec.vocab_size), target.readout)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return drafter.eval()


TRAINABLE = [name for name in ALL if name not in ("ensemble", "ngram", "two_model")]
FAMILIES = [name for name in TRAINABLE if "/" not in name]  # as `drafter=` takes them


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    from builders import model_config

    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    # Random logits are nearly flat; a trained target's are not. Sharper, there is something to fit.
    with torch.no_grad():
        target.readout.head.mul_(8)
    return target


class NoChance(TrainingChance):
    def uniform_like(self, values: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        return torch.full_like(values, 0.5)


def as_batch(*rows: list[int], mask: list[list[bool]] | None = None) -> Batch:
    """Pad rows right; documents are numbered by row; everything but the first token is trained."""
    length = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), length, dtype=torch.bool)
    document = torch.full((len(rows), length), -1)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        loss_mask[i, : len(row)] = torch.tensor(mask[i]) if mask else torch.arange(len(row)) > 0
        document[i, : len(row)] = i
        positions[i, : len(row)] = torch.arange(len(row))
    return Batch(tokens, loss_mask, positions, document)


def in_one_row(batch: Batch) -> Batch:
    """Pack every text of a batch into one row."""
    return Batch(*(tensor[batch.document >= 0][None] for tensor in vars(batch).values()))


def losses_of(drafter: Drafter, target: Target, batch: Batch) -> Losses:
    return drafter(batch, target.features(batch, drafter.captures), NoChance())


def sums(terms: Losses) -> dict[str, float]:
    return {name: float(term.sum) for name, term in terms.items()}


def skip_unless_it_branches(drafter: Drafter, policy: Policy) -> None:
    if policy.branches and not drafter.branches:
        pytest.skip(f"{drafter.config.name} drafts chains only")


@pytest.fixture(scope="module")
def plain(target: Target) -> Callable[[Sampling, int], tuple[int, ...]]:
    """The plain loop's answer to a prompt of PROMPTS, which depends on no drafter."""

    @functools.cache
    def answer(sampling: Sampling, row: int) -> tuple[int, ...]:
        stops = [] if sampling.greedy else STOPS
        chance = SeededChance(0 if sampling.greedy else 3)
        settings: dict[str, Any] = {"max_new_tokens": 24, "stop_tokens": stops, "chance": chance}
        decoded = autoregressive_decode(
            target, PROMPTS[row], sampling=sampling, row=row, **settings
        )
        return tuple(decoded.tokens)

    return answer


def until_stop(tokens: tuple[int, ...]) -> list[int]:
    """The tokens up to the first of STOPS."""
    last = next((i for i, token in enumerate(tokens) if token in STOPS), len(tokens))
    return list(tokens[: last + 1])


@pytest.mark.parametrize(
    ("name", "policy"),
    [*dealt(ALL, POLICIES[:2]), *product(ALL, POLICIES[2:])],
    ids=lambda value: value.describe() if isinstance(value, Policy) else None,
)
def test_greedy_speculative_output_is_greedy_output(
    name: str,
    policy: Policy,
    target: Target,
    plain: Callable[[Sampling, int], tuple[int, ...]],
) -> None:
    drafter = random_drafter(name, target)
    skip_unless_it_branches(drafter, policy)
    settings: dict[str, Any] = {"max_new_tokens": 16, "stop_tokens": [], "policy": policy}
    rows, chance = range(len(PROMPTS)), SeededChance(0)
    drafted = speculative_decode_batch(
        target, drafter, PROMPTS, rows=rows, sampling=GREEDY, chance=chance, **settings
    )
    assert [tuple(each.tokens) for each in drafted] == [plain(GREEDY, row)[:16] for row in rows]


SAMPLED = Sampling(1.0, 0, 0.9)
LIMIT = 12  # new tokens; some rows of PROMPTS stop before


# Each drafter drafts a chain and one of the trees, one of them greedily and the other by chance.
ROWS_ALONE = [
    (name, policy, sampling)
    for i, name in enumerate(ALL)
    for policy, sampling in zip(
        (POLICIES[2], POLICIES[3 + i % 2]),
        (GREEDY, SAMPLED) if i // 2 % 2 else (SAMPLED, GREEDY),
        strict=True,
    )
]


@pytest.mark.parametrize(
    ("name", "policy", "sampling"),
    ROWS_ALONE,
    ids=lambda value: value.describe() if isinstance(value, Policy) else None,
)
def test_a_batch_says_what_its_rows_say_alone(
    name: str,
    sampling: Sampling,
    policy: Policy,
    target: Target,
    plain: Callable[[Sampling, int], tuple[int, ...]],
) -> None:
    """Unequal prompts, unequal acceptance, rows that leave early: tokens and counters stay."""
    drafter = random_drafter(name, target)
    skip_unless_it_branches(drafter, policy)
    settings: dict[str, Any] = {
        "sampling": sampling,
        "chance": SeededChance(3),
        "policy": policy,
        "draft_sampling": GREEDY if isinstance(policy, DynamicTree) else sampling,
        "max_new_tokens": LIMIT,
        "stop_tokens": STOPS,
    }
    alone = [
        speculative_decode(target, drafter, prompt, row=row, **settings)
        for row, prompt in enumerate(PROMPTS)
    ]
    assert len({len(decoded.tokens) for decoded in alone}) > 1, "some row must leave early"
    together = speculative_decode_batch(
        target, drafter, PROMPTS, rows=range(len(PROMPTS)), **settings
    )
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert one.stats.trimmed == other.stats.trimmed
        assert one.stats.untrimmed == other.stats.untrimmed
        assert one.stats.cycles == other.stats.cycles
        assert one.stats.num_target_passes == other.stats.num_target_passes
    if sampling.greedy:
        texts = [until_stop(plain(GREEDY, row))[:LIMIT] for row in range(len(PROMPTS))]
        assert [list(decoded.tokens) for decoded in together] == texts


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_of_the_plain_loop_says_what_its_rows_say_alone(
    sampling: Sampling, target: Target, plain: Callable[[Sampling, int], tuple[int, ...]]
) -> None:
    chance = SeededChance(0 if sampling.greedy else 3)
    settings: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 16, "chance": chance}
    rows = range(len(PROMPTS))
    batch = autoregressive_decode_batch(target, PROMPTS, rows=rows, stop_tokens=STOPS, **settings)
    texts = [until_stop(plain(sampling, row))[:16] for row in rows]
    assert [list(decoded.tokens) for decoded in batch] == texts
    assert len({len(text) for text in texts}) > 1, "some row must leave early"


def test_rows_of_a_batch_do_not_move_each_others_tests(target: Target) -> None:
    """Under a lossy rule siblings are tested one by one, and rows have trees of their own."""
    settings: dict[str, Any] = {
        "sampling": Sampling(1.0, 0, 1.0),
        "policy": DynamicTree(3, 3, 8),
        "draft_sampling": GREEDY,
        "rule": Lenience(0.5),
        "chance": SeededChance(3),
        "max_new_tokens": 24,
    }
    texts = [prompt * 3 for prompt in PROMPTS]  # so that lookup finds trees
    drafter = random_drafter("ngram", target)
    rows = range(len(texts))
    together = speculative_decode_batch(target, drafter, texts, rows=rows, **settings)
    for row, text in enumerate(texts):
        alone = speculative_decode(target, drafter, text, row=row, **settings)
        assert alone.tokens == together[row].tokens


def test_every_depth_of_training_is_tested_by_some_drafter(target: Target) -> None:
    unrolls = {name: build(name, target.spec).unroll for name in TRAINABLE}
    assert max(unrolls.values()) >= 3, unrolls


def stepped_logits(
    drafter: Drafter, target: Target, tokens: list[int], root: int, depth: int
) -> torch.Tensor:
    """Decode as the loop does up to the root at index `root`, then follow the text's own tokens."""
    prefix = torch.tensor([tokens[: root + 1]])
    _, features = target.step(target.begin(), prefix[:, :-1], drafter.captures)
    state = drafter.begin(target.readout, prefix[:, 0], 128)
    drafter.observe(state, prefix[:, 1:], [root], features)
    logits = drafter.expand(state, None)
    for level in range(1, depth):
        logits = drafter.expand(state, torch.tensor([[tokens[root + level]]]))
    return logits[:, 0]


@pytest.mark.parametrize("name", TRAINABLE)
@torch.no_grad()
def test_stepped_expansion_gives_the_loss_of_the_training_forward(
    name: str, target: Target
) -> None:
    drafter = random_drafter(name, target)
    if not drafter.depth_terms:
        pytest.skip(f"{name} names no depth_terms, the terms of its loss to compare with")
    tokens = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12]
    batch = as_batch(tokens)
    features = target.features(batch, drafter.captures)
    wanted = torch.zeros(len(tokens), dtype=torch.bool)
    for depth in range(1, drafter.unroll + 1):
        for ahead in range(depth + 1, len(tokens)):
            wanted[:] = False
            wanted[ahead] = True
            one = Batch(batch.tokens, wanted[None], batch.positions, batch.document)
            terms = drafter(one, features, NoChance())
            term = terms[drafter.depth_terms[depth - 1]]
            logits = stepped_logits(drafter, target, tokens, ahead - depth, depth)
            expected = expected_loss(name, drafter, target, features, logits, tokens, ahead)
            if name.split("/")[0] not in OURS and not isinstance(drafter.config, TokenLossConfig):
                # It may be on the text, as Medusa's.
                on_text = expected_loss("medusa", drafter, target, features, logits, tokens, ahead)
                expected = min(expected, on_text, key=lambda loss: abs(loss - term.sum))
            torch.testing.assert_close(
                term.sum,
                expected,
                atol=1e-4,
                rtol=1e-4,
                msg=f"depth {depth} of the token at {ahead}: by the logits that decoding gives the "
                f"loss is {expected:.6g}, `forward` says {term.sum:.6g}",
            )


def logits_of_target(target: Target, features: TargetFeatures, ahead: int) -> torch.Tensor:
    """The target's logits of the token at `ahead`."""
    return target.readout.logits(features.final_hidden[:, ahead - 1])


def expected_loss(
    name: str,
    drafter: Drafter,
    target: Target,
    features: TargetFeatures,
    logits: torch.Tensor,
    tokens: list[int],
    ahead: int,
) -> torch.Tensor:
    """The family's loss on the token at `ahead`, from its definition."""
    name, label = name.split("/")[0], torch.tensor([tokens[ahead]])
    if name == "mtp" and drafter.vocab is not None:
        label = drafter.vocab.draft_ids[label]
        if drafter.vocab.draft_ids[logits_of_target(target, features, ahead).argmax()] < 0:
            return torch.tensor(0.0)
    if name in ("medusa", "dflash", "hydra_heads", "mlp_speculator", "mtp", "redrafter"):
        return losses.hard_cross_entropy(logits, label).sum()
    distribution = logits_of_target(target, features, ahead)
    if name == "hass":
        probs = distribution.softmax(-1)
        return (
            0.1 * losses.soft_cross_entropy(logits, probs) + losses.top_k(logits, probs, 10)
        ).sum()
    config = drafter.config
    if drafter.vocab is not None:
        if drafter.vocab.draft_ids[distribution.argmax()] < 0:
            return torch.tensor(0.0)
        distribution = distribution[:, drafter.vocab.target_ids]
        label = drafter.vocab.draft_ids[label]
    if name == "dspark" or (name not in OURS and isinstance(config, TokenLossConfig)):
        assert isinstance(config, TokenLossConfig)
        return config.token_loss(logits, distribution.softmax(-1), label).sum()
    return losses.soft_cross_entropy(logits, distribution.softmax(-1)).sum()


@pytest.mark.parametrize("name", TRAINABLE)
@torch.no_grad()
def test_what_a_prediction_may_not_see_leaves_it_bit_identical(name: str, target: Target) -> None:
    drafter = random_drafter(name, target)
    tokens = [1, 20, 33, 41, 20, 52, 60, 7, 9, 12]
    ahead = 6
    mask = [[index == ahead for index in range(len(tokens))]]
    before = sums(losses_of(drafter, target, as_batch(tokens, mask=mask)))
    later = sums(
        losses_of(drafter, target, as_batch([*tokens[: ahead + 1], 70, 71, 72], mask=mask))
    )
    assert before == later
    # The token right before the root is read by every family: the same test must see it change.
    seen = [*tokens[:2], 77, *tokens[3:]]
    assert before != sums(losses_of(drafter, target, as_batch(seen, mask=mask)))


@pytest.mark.parametrize("name", TRAINABLE)
@torch.no_grad()
def test_the_loss_reads_no_feature_beyond_its_reach(name: str, target: Target) -> None:
    """A store that holds answers alone gives zeros everywhere else."""
    drafter = random_drafter(name, target)
    mask = [[index in (7, 8, 12) for index in range(14)]]
    batch = as_batch(list(range(20, 34)), mask=mask)
    features = target.features(batch, drafter.captures)
    held = kept_positions(batch.loss_mask[0], drafter.reach)[None, :, None]
    stored = TargetFeatures(
        {layer: hidden.where(held, 0) for layer, hidden in features.captured.items()},
        features.final_hidden.where(held, 0),
        features.readout,
    )
    whole, stored_alone = (sums(drafter(batch, each, NoChance())) for each in (features, stored))
    assert whole == stored_alone, f"set `reach`, which is {drafter.reach}"


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_rows_may_end_before_the_drafter_has_read_anything(name: str, target: Target) -> None:
    """As where the first token of a row is its last, or while a policy does not draft."""
    drafter = random_drafter(name, target)
    rows = [[1, 20, 33, 41, 20], [1, 60, 7, 9, 12], [2, 33, 41, 20, 52]]
    features = target.features(as_batch(*rows), drafter.captures)
    tokens = torch.tensor([[*row[1:], 70] for row in rows])

    def begun(kept: list[int]) -> DraftState:
        return drafter.begin(target.readout, torch.tensor([rows[row][0] for row in kept]), 30)

    def drafted(state: DraftState, kept: list[int]) -> list[list[int]]:
        drafter.observe(state, tokens[kept], [5] * len(kept), features.rows(kept))
        proposal = drafter.propose(state, 2)
        if proposal is None:
            return drafter.expand(state, None).argmax(-1).tolist()
        sizes = proposal.num_nodes.tolist()
        return [row[:size] for row, size in zip(proposal.tokens.tolist(), sizes, strict=True)]

    state = begun([0, 1, 2])
    drafter.select(state, [2, 1])
    alone = [drafted(begun([row]), [row])[0] for row in (2, 1)]
    assert drafted(state, [2, 1]) == alone


@pytest.mark.parametrize("name", TRAINABLE)
@torch.no_grad()
def test_padding_and_other_rows_do_not_change_the_loss(name: str, target: Target) -> None:
    drafter = random_drafter(name, target)
    rows = [[1, 20, 33, 41, 20, 52], [1, 9, 8], list(range(30, 49))]
    together = losses_of(drafter, target, as_batch(*rows))
    alone = [losses_of(drafter, target, as_batch(row)) for row in rows]
    for term, value in together.items():
        torch.testing.assert_close(value.sum, sum(terms[term].sum for terms in alone))
        assert value.count == sum(terms[term].count for terms in alone)


@pytest.mark.parametrize("name", TRAINABLE)
def test_training_asks_no_attention_that_a_gpu_has_no_fused_kernel_for(
    name: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mask, torch's fused kernels of a GPU take no fewer heads of keys than of queries."""
    drafter = random_drafter(name, target)
    batch = in_one_row(as_batch([1, 20, 33, 41, 20, 52], [1, 9, 8], list(range(30, 49))))
    features = target.features(batch, drafter.captures)
    attention = torch.nn.functional.scaled_dot_product_attention

    def asked(query: torch.Tensor, key: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        masked = len(given) > 1 or more.get("attn_mask") is not None
        assert not masked or query.shape[1] == key.shape[1]
        return attention(query, key, *given, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", asked)
    drafter(batch, features, NoChance())


@pytest.mark.parametrize("name", TRAINABLE)
@torch.no_grad()
def test_packed_conversations_have_the_loss_of_unpacked_ones(name: str, target: Target) -> None:
    drafter = random_drafter(name, target)
    rows = [[1, 20, 33, 41, 20, 52], [1, 9, 8], list(range(30, 49))]
    unpacked = as_batch(*rows)
    packed = in_one_row(unpacked)
    one, other = losses_of(drafter, target, unpacked), losses_of(drafter, target, packed)
    for term in one:
        torch.testing.assert_close(one[term].sum, other[term].sum)
        assert one[term].count == other[term].count


@pytest.mark.parametrize("name", TRAINABLE)
def test_packed_conversations_have_the_gradient_of_unpacked_ones(name: str, target: Target) -> None:
    drafter = random_drafter(name, target).train()
    unpacked = as_batch([1, 20, 33, 41, 20, 52], [1, 9, 8], list(range(30, 49)))
    found = []
    for batch in (unpacked, in_one_row(unpacked)):
        drafter.zero_grad()
        weighted_sum(losses_of(drafter, target, batch)).backward()
        found.append({name: p.grad.clone() for name, p in drafter.named_parameters()})
    for name, gradient in found[0].items():
        near = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=near)


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.parametrize("packed", [False, True])
def test_recomputed_layers_give_the_same_gradient(name: str, packed: bool, target: Target) -> None:
    batch = as_batch([1, 20, 33, 41, 20, 52], list(range(30, 49)))
    if packed:
        real = batch.document >= 0
        batch = Batch(*(tensor[real][None] for tensor in vars(batch).values()))
    found = []
    for recompute in (False, True):
        drafter = random_drafter(name, target).train()
        with LayerCalls(recompute).active():
            loss = weighted_sum(losses_of(drafter, target, batch))
        loss.backward()
        found.append({name: p.grad for name, p in drafter.named_parameters()})
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


@pytest.mark.parametrize("name", TRAINABLE)
def test_training_reaches_every_weight_and_never_the_target(name: str, target: Target) -> None:
    drafter = random_drafter(name, target).train()
    weighted_sum(losses_of(drafter, target, as_batch(list(range(20, 40))))).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in drafter.parameters())
    assert all(p.grad is None for p in target.model.parameters())


@dataclass(frozen=True)
class Lesson:
    """A drafter that was trained on one answer of the target's until it drafts all of it."""

    drafter: Drafter
    prompt: list[int]
    output: list[int]

    def learnt(self, target: Target) -> bool:
        """Whether the real loop gives the answer, and every draft of it is accepted."""
        decoded = speculative_decode(
            target,
            self.drafter,
            self.prompt,
            policy=3,
            sampling=GREEDY,
            max_new_tokens=len(self.output),
            chance=SeededChance(0),
            stop_tokens=[],
        )
        counters = decoded.stats.trimmed
        return (
            list(decoded.tokens) == self.output
            and counters.num_accepted_tokens == counters.num_draft_tokens
        )


MOST_STEPS, STEPS_AT_A_TIME = 300, 25


@pytest.fixture(scope="module")
def overfitted(target: Target) -> Callable[[str], Lesson]:
    """A drafter by name, trained once on one conversation: what the target says after a prompt."""
    prompt = [1, 3, 6, 20, 33, 41, 20]
    plain = autoregressive_decode(
        target, prompt, sampling=GREEDY, max_new_tokens=24, chance=SeededChance(0), stop_tokens=[]
    )
    text = [*prompt, *plain.tokens]
    batch = as_batch(text, mask=[[i >= len(prompt) for i in range(len(text))]])
    counts = torch.bincount(torch.tensor(plain.tokens), minlength=target.spec.vocab_size)

    @functools.cache
    def trained(name: str) -> Lesson:
        torch.manual_seed(0)
        whole = (
            {"draft_vocab_coverage": 1.0}
            if "draft_vocab_coverage" in content_of("drafter", name)
            else {}
        )
        drafter = build(name, target.spec, **whole)
        drafter.prepare(counts, target.readout)
        features = target.features(batch, drafter.captures)
        optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
        for step in range(MOST_STEPS):
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / MOST_STEPS)
            optimizer.zero_grad()
            (weighted_sum(drafter(batch, features, NoChance())) / len(plain.tokens)).backward()
            optimizer.step()
            if (step + 1) % STEPS_AT_A_TIME == 0:
                lesson = Lesson(drafter.eval(), prompt, list(plain.tokens))
                if lesson.learnt(target):
                    break
                drafter.train()
        return lesson

    return trained


@pytest.mark.parametrize("name", TRAINABLE)
def test_overfitting_one_conversation_reaches_full_acceptance_in_the_real_loop(
    name: str, target: Target, overfitted: Callable[[str], Lesson]
) -> None:
    assert overfitted(name).learnt(target)


@pytest.mark.parametrize("name", TRAINABLE)
def test_teacher_forced_replay_accepts_what_the_loop_accepted(
    name: str, target: Target, overfitted: Callable[[str], Lesson]
) -> None:
    lesson = overfitted(name)
    replay_past_the_text(target, lesson.drafter, lesson.prompt, lesson.output)


def replay_past_the_text(
    target: Target, drafter: Drafter, prompt: list[int], output: list[int]
) -> None:
    """Past the trained text, so that acceptance is partial: every cycle again, from nothing."""
    depth, limit = 3, len(output) + 12
    settings: dict[str, Any] = {
        "sampling": GREEDY,
        "max_new_tokens": limit,
        "chance": SeededChance(0),
        "stop_tokens": [],
    }
    decoded = speculative_decode(target, drafter, prompt, policy=depth, **settings)
    # Past the limit the loop still verifies: the recorded text must reach as far.
    settings["max_new_tokens"] = limit + depth + 1
    text = [*prompt, *autoregressive_decode(target, prompt, **settings).tokens]
    root, per_position, num_drafts = len(prompt), [0] * depth, 0
    while root < len(prompt) + limit - 1:
        accepted = 0
        for level in range(1, depth + 1):
            logits = stepped_logits(drafter, target, text, root, level)
            choice = int(logits.argmax())
            if drafter.vocab is not None:
                choice = int(drafter.vocab.target_ids[choice])
            if choice != text[root + level]:
                break
            per_position[level - 1] += 1
            accepted += 1
        num_drafts += 1
        root += accepted + 1
    untrimmed = decoded.stats.untrimmed
    assert untrimmed.num_drafts == num_drafts
    assert untrimmed.num_accepted_tokens_per_position == per_position
    assert 0 < untrimmed.num_accepted_tokens < untrimmed.num_draft_tokens


class OfEightTokens(Drafter):
    """A drafter of one's own, built for a vocabulary of eight tokens."""

    captures = ()

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        self.spec, self.config = spec, DrafterConfig(name="own")
        self.vocab = DraftVocab.of(torch.arange(8), spec.vocab_size)
        self.register_buffer("target_ids", self.vocab.target_ids)

    def _not_drafted(self, *arguments: Any) -> Any:
        raise AssertionError("this test drafts nothing")

    forward = begin = observe = expand = select = _not_drafted


def test_a_drafter_that_is_built_with_a_reduced_vocabulary_loads_its_own_weights(
    target: Target,
) -> None:
    trained = OfEightTokens(target.spec)
    trained.target_ids += 3
    again = OfEightTokens(target.spec)
    again.load_weights(trained.state_dict())
    assert torch.equal(again.get_buffer("target_ids"), trained.get_buffer("target_ids"))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}


@pytest.mark.parametrize("family", ["eagle", "eagle3", "dflash", "early_exit"])
@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({}, ".rope_type must be one of linear, llama3, yarn, got None"),
        ({"rope_type": ["yarn"]}, ".rope_type must be one of linear, llama3, yarn, got ['yarn']"),
        ({"rope_type": "dynamic", "factor": 2.0}, ".rope_type must be one of linear, llama3, yarn"),
        ({"rope_type": "linear"}, " must hold factor for rope_type linear, got None"),
        ({"rope_type": "linear", "factor": "2"}, " must hold factor for rope_type linear, got '2'"),
        (
            {"rope_type": "yarn", "factor": 2.0},
            " must hold original_max_position_embeddings for rope_type yarn, got None",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
            | {"beta_fast": "x"},
            " must hold numbers, got beta_fast=x",
        ),
        (LLAMA3 | {"high_freq_factor": 1.0}, " must have high_freq_factor above low_freq_factor"),
        (LLAMA3 | {"rope_theta": 10.0}, " must not hold rope_theta, got {'rope_type': 'llama3', "),
    ],
)
def test_a_scaling_of_positions_is_checked_before_training(
    family: str, scaling: dict[str, Any], said: str
) -> None:
    """Export's reader would refuse it after training, or a rotation end in a KeyError."""
    with pytest.raises(ValueError, match=re.escape(f"drafter.rope_scaling{said}")):
        drafter_config(family, rope_scaling=scaling)
    drafter_config(family, rope_scaling=LLAMA3)


@pytest.mark.parametrize("family", ["eagle3", "p_eagle", "dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("layers", [[], [1, 1]])
def test_captured_layers_are_named_or_left_to_the_usual(family: str, layers: list[int]) -> None:
    said = rf"drafter\.layers must (not be empty|be distinct values), or null, got {layers}"
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        drafter_config(family, layers=layers)
