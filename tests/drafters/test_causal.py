"""A whole model as a drafter: its cache, its vocabulary, and the exact distribution."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import draft_model_dir, model_config
from distribution_replay import EXACT, distance, replay
from distribution_support import PLAIN, Case, Small, target_distribution
from test_drafters import NoChance, as_batch, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from drafttrain.core.chance import SeededChance
from drafttrain.core.ops.layer_calls import dtype_of
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import TargetFeatures
from drafttrain.decode.loop import speculative_decode
from drafttrain.decode.policy import tree_of_widths
from drafttrain.drafters.shared.causal import CausalDrafter
from drafttrain.drafters.shared.vocabularies import check_same, intersection
from drafttrain.target.model import Target, load_target


def letters(*tokens: str, merges: Any = (), **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of these tokens, ids in this order; merges make the longer ones."""
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, list(merges), unk_token=special.get("unk_token")))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


THEIRS = letters("a", "b", "c", "ac", "d", merges=[("a", "c")])
# Of the small target's words (a, b, ab, c, <end>) three, by other ids; "ab" is two tokens.
OURS = letters("?", "c", "b", "z", "a", "y", unk_token="?")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small.make(tmp_path_factory.mktemp("causal"), 5)


@pytest.fixture(scope="module")
def small_target(small: Small) -> Target:
    return small.target


def two_model(target: Target, vocab_size: int, **overrides: Any) -> Any:
    path = draft_model_dir(vocab_size)
    return build("two_model", target.spec, path=path, **overrides).eval()


def intersecting(target: Target) -> Any:
    """A drafter that shares three words of five."""
    drafter = two_model(target, 6, vocabulary="intersection")
    drafter.tokenizer = OURS
    drafter.attach(target.tokenizer)
    assert drafter.vocab.target_ids.tolist() == [0, 1, 3]
    assert drafter.columns.tolist() == [4, 2, 1]
    assert drafter.spelled[2] == [4, 2]  # "ab"
    assert drafter.reading.tolist() == [4, 2, -1, 1, -1]
    return drafter.double()


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(0.7, 0, 0.8), GREEDY], ids=str)
@pytest.mark.parametrize("kind", ["padded", "cut", "spelled"])
def test_the_loop_emits_exactly_the_distribution_of_the_target(
    kind: str, sampling: Sampling, small: Small
) -> None:
    """Where the drafter has more logits than the target, or fewer, or reads one token as two."""
    if kind == "spelled":
        drafter = intersecting(small.target)
    else:
        drafter = two_model(small.target, {"padded": 7, "cut": 4}[kind]).double()
    case = Case(prompts=((0, 1, 2, 3),), limit=2, sampling=sampling)
    replayed = replay(small, drafter, case, 1000)
    assert sum(replayed.distribution.values()) == pytest.approx(1, abs=EXACT)
    assert distance(replayed.distribution, target_distribution(small, case)) <= EXACT


def test_a_tree_may_draw_a_token_that_reads_as_two(small: Small) -> None:
    """Top-1 drafts leave nothing for the second child: it is any of the target's tokens."""
    only, policy = Sampling(1.0, 1, 1.0), tree_of_widths([2, 2])
    sampling = Sampling(1.0, 2, 1.0)
    case = Case(((0, 1, 2, 3),), 2, policy=policy, sampling=sampling, draft_sampling=only)
    replayed = replay(small, intersecting(small.target), case, 1000)
    assert distance(replayed.distribution, target_distribution(small, case)) <= EXACT


class Watched:
    """Asks the drafter's model itself, without a cache, whatever the drafter answers."""

    def __init__(self, drafter: CausalDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.texts: list[list[int]] = []
        begin, observe, expand = drafter.begin, drafter.observe, drafter.expand

        def watched_begin(access: Any, first: torch.Tensor, capacity: int) -> Any:
            self.texts = [[token] for token in first.tolist()]
            return begin(access, first, capacity)

        def watched_observe(state: Any, tokens: Any, counts: Any, features: Any) -> None:
            for text, row, count in zip(self.texts, tokens.tolist(), counts, strict=True):
                text.extend(row[:count])
            self.drafted: list[list[int]] = [[] for _ in self.texts]
            observe(state, tokens, counts, features)

        def watched_expand(state: Any, newest: torch.Tensor | None) -> Any:
            if newest is not None:
                for drafted, (token,) in zip(self.drafted, newest.tolist(), strict=True):
                    drafted.append(token)
            found = expand(state, newest)
            for row, (text, drafted) in enumerate(zip(self.texts, self.drafted, strict=True)):
                own = [
                    part
                    for token in [*text, *drafted]
                    for part in drafter.spelled.get(token, [int(drafter.reading[token])])
                ]
                logits = drafter.model(torch.tensor([own])).logits[0, -1]
                # What the target calls a, b and c.
                torch.testing.assert_close(found[row, 0], logits[[4, 2, 1]])
                self.asked += 1
            return found

        monkeypatch.setattr(drafter, "begin", watched_begin)
        monkeypatch.setattr(drafter, "observe", watched_observe)
        monkeypatch.setattr(drafter, "expand", watched_expand)


def test_every_answer_is_the_models_own_after_the_text(
    small_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through rejections, partial and full acceptance, and tokens that read as several."""
    drafter = intersecting(small_target)
    watched = Watched(drafter, monkeypatch)
    accepted: set[int] = set()
    for row, prompt in enumerate([[0], [2, 1, 2], [3, 0, 1, 2, 2]]):
        decoded = speculative_decode(
            small_target,
            drafter,
            prompt,
            row=row,
            policy=3,
            sampling=Sampling(1.0, 0, 1.0),
            max_new_tokens=50,
            chance=SeededChance(1),
            stop_tokens=[],
        )
        accepted |= {accepted for _, _, accepted in decoded.stats.cycles}
    assert accepted == {0, 1, 2, 3}
    assert watched.asked >= 100


def test_observing_costs_no_forward(small_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = two_model(small_target, 5).double()
    calls: list[int] = []
    decoder = drafter.model.get_decoder()
    forward = decoder.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(decoder, "forward", counted)
    features = TargetFeatures({}, torch.zeros(1, 4, 8), small_target.readout)
    state = drafter.begin(small_target.readout, torch.tensor([0]), 32)
    drafter.observe(state, torch.tensor([[1, 2, 3, 1]]), [4], features)
    assert calls == []
    drafter.expand(state, None)
    for token in (2, 0):
        drafter.expand(state, torch.tensor([[token]]))
    assert calls == [5, 1, 1]
    # Of three drafted tokens two were read; all accepted, the third is read with the bonus.
    drafter.observe(state, torch.tensor([[2, 0, 1, 3]]), [4], features.slice(0, 4))
    drafter.expand(state, None)
    assert calls == [5, 1, 1, 2]
    assert state.cache.lengths == [9]


# --- vocabularies ---


def test_a_difference_of_vocabularies_is_shown_token_by_token() -> None:
    other = letters("a", "c", "b", "ac", merges=[("a", "c")])
    message = (
        r"drafter.path=/m must have the target's vocabulary, but 3 of 5 ids differ: "
        r"id 1 is 'b' for the target, 'c' for the drafter; id 2 is 'c' for the target, 'b' for the "
        r"drafter; id 4 is 'd' for the target, nothing for the drafter; set "
        r"drafter\.vocabulary=intersection to draft the tokens that both have$"
    )
    with pytest.raises(ValueError, match=message):
        check_same(THEIRS, other, "drafter.path=/m")
    check_same(THEIRS, letters("a", "b", "c", "ac", "d", merges=[("a", "c")]), "")


def test_only_the_first_differences_are_listed() -> None:
    with pytest.raises(ValueError, match=r"but 20 of 20 ids differ: (id \d+ is [^;]*; ){5}\.\.\.;"):
        check_same(letters(*"abcdefghijklmnopqrst"), letters(*"uvwxyzABCDEFGHIJKLMN"), "it")


def byte_level() -> PreTrainedTokenizerFast:
    """Llama 3's and Qwen's kind: a space is written `Ġ`, a newline `Ċ`."""
    words = ["!", "a", "the", "Ġthe", "Ċ", "Ã", "©", "<|end|>", "Ġ", "t", "h", "e"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocab = {word: i for i, word in enumerate([*words, "th"])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Llama 2's and Gemma's kind: a space is written `▁`."""
    words = ["<unk>", "</s>", "▁the", "a", "!", "\n", "▁", "q"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_families_of_tokenizers_meet_by_the_text_of_their_tokens() -> None:
    target, own = byte_level(), sentence_pieces()
    found = intersection(target, own, 13, 8, "it")
    names, pieces = target.convert_ids_to_tokens, own.convert_ids_to_tokens
    pairs = zip(names(found.target_ids.tolist()), pieces(found.draft_ids.tolist()), strict=True)
    assert dict(pairs) == {
        "!": "!",
        "a": "a",
        "Ġthe": "▁the",
        "Ċ": "\n",
        "Ġ": "▁",
        "<|end|>": "</s>",  # by their role
    }
    # Half a character has no text: the unknown token stands for it.
    assert found.spelled[target.convert_tokens_to_ids("Ã")] == [own.unk_token_id]
    assert set(found.spelled) == set(range(13)) - set(found.target_ids.tolist())


def test_vocabularies_that_share_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"drafter.path=/m shares no token with the target"):
        intersection(letters("a", "b"), letters("c", "d"), 2, 2, "drafter.path=/m")


def test_ids_that_a_model_has_no_logits_for_are_not_shared() -> None:
    tokenizer = letters("a", "b", "c")
    assert intersection(tokenizer, tokenizer, 2, 3, "it").target_ids.tolist() == [0, 1]
    assert intersection(tokenizer, tokenizer, 3, 1, "it").target_ids.tolist() == [0]


def test_a_target_of_other_tokens_is_refused_before_decoding(tiny_target_dir: Path) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    drafter = two_model(target, 97)
    drafter.attach(target.tokenizer)
    drafter.tokenizer = letters(*"abc")
    with pytest.raises(ValueError, match=r"ids differ: id 0 is '<\|pad\|>' for the target, 'a' fo"):
        drafter.attach(target.tokenizer)


# --- what cannot be loaded, and how dtypes are kept ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": None}, r"drafter\.path must say which model drafts for drafter=two_model"),
        (
            {"path": "./nowhere"},
            r"^drafter\.path=nowhere must be a directory .* does not exist|^dr",
        ),
        ({"path": "owner/no-such"}, r"^drafter=two_model: cannot reach .* point drafter\.path at"),
        ({"path": "a/b/c"}, r"^drafter\.path=a/b/c must be a directory that holds a model"),
        ({"vocabulary": "other"}, r"drafter\.vocabulary must be one of same, intersection, got"),
        ({"dtype": "int4"}, r"drafter\.dtype must be one of auto, float32, bfloat16, float16"),
    ],
)
def test_a_drafter_that_cannot_be_built_says_which_key(
    changes: dict[str, Any], message: str, small_target: Target
) -> None:
    with pytest.raises(ValueError, match=message):
        build("two_model", small_target.spec, **changes)


def test_a_drafter_that_cannot_forget_is_refused(small_target: Target, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(draft_model_dir(5), tmp_path / "model"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "mamba"}))
    message = r"^drafter=two_model \(mamba\) cannot be a drafter: it keeps a recurrent state"
    with pytest.raises(ValueError, match=message):
        build("two_model", small_target.spec, path=str(folder))


def test_logits_of_an_unknown_kind_are_refused(
    small_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalDrafter, "head", lambda self, hidden: hidden.sum(-1, keepdim=True))
    with pytest.raises(ValueError, match=r"drafter=two_model \(llama\) computes logits in a way"):
        two_model(small_target, 5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
        ("gemma2", {"final_logit_softcapping": 2.0, "sliding_window": 64}),
        ("gpt2", {}),
        ("qwen3", {}),
    ],
)
def test_architectures_of_other_kinds_draft_as_they_say(
    kind: str, changes: dict[str, Any], small_target: Target, tmp_path: Path
) -> None:
    """Scaled and capped logits, learned positions, attention that only adds its masks."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=5,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **changes,
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    OURS.save_pretrained(tmp_path)
    drafter = build("two_model", small_target.spec, path=str(tmp_path)).eval()
    features = TargetFeatures({}, torch.zeros(2, 3, 8), small_target.readout)
    state = drafter.begin(small_target.readout, torch.tensor([0, 3]), 32)
    drafter.observe(state, torch.tensor([[1, 2, 3], [2, 0, 0]]), [3, 1], features)
    drafter.expand(state, None)
    logits = drafter.expand(state, torch.tensor([[4], [1]]))[:, 0]
    for row, text in enumerate(([0, 1, 2, 3, 4], [3, 2, 1])):
        with torch.no_grad():
            expected = drafter.model(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(logits[row], expected)


def test_a_chosen_dtype_is_kept_and_an_automatic_one_follows(small_target: Target) -> None:
    assert dtype_of(two_model(small_target, 5).to(torch.bfloat16)) == torch.bfloat16
    chosen = two_model(small_target, 5, dtype="float32")
    assert dtype_of(chosen.to("cpu", torch.bfloat16)) == torch.float32
    assert dtype_of(chosen.to(torch.bfloat16)) == torch.float32


def test_a_context_too_short_for_the_drafter_is_refused(small_target: Target) -> None:
    drafter = two_model(small_target, 5)
    with pytest.raises(ValueError, match=r"made for 512 positions, but .* need 513"):
        drafter.begin(small_target.readout, torch.tensor([0]), 513)


def test_training_it_is_refused_with_the_drafter_that_can(small_target: Target) -> None:
    drafter, batch = two_model(small_target, 5), as_batch([0, 1, 2])
    with pytest.raises(ValueError, match=r"choose drafter=small_lm drafter\.path="):
        drafter(batch, small_target.features(batch, ()), NoChance())
