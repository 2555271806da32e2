"""The distilled draft: where its weights come from, what it learns from, and what it becomes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from builders import draft_model_dir, model_config
from paths import ROOT
from test_drafters import NoChance, as_batch, build

from drafttrain.config.groups import content_of
from drafttrain.core.chance import Chance, SeededChance
from drafttrain.core.ops.layer_calls import dtype_of
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import PAD_DOCUMENT, Batch, Sample, weighted_sum
from drafttrain.data.batches import pack
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.decode.loop import speculative_decode
from drafttrain.drafters.shared.on_policy import answers_to_rewrite, in_own_words
from drafttrain.drafters.small_lm import SmallLMConfig, lasting, narrow_image, with_layers_of
from drafttrain.formats.write.config import ExportSettings
from drafttrain.formats.write.export import Exported, check, export_drafter
from drafttrain.report.card import CardData
from drafttrain.target.model import Target, load_target
from drafttrain.target.pretrained.models import EMBEDDED, load_tokenizer

TOKENS = [1, 3, 6, 20, 33, 41, 20, 52, 60]


def drafter_of(target: Target, **changes: Any) -> Any:
    """A drafter as `train` makes it."""
    torch.manual_seed(0)
    drafter = build("small_lm", target.spec, **changes)
    drafter.initialise(target.model, target.tokenizer)
    drafter.prepare(torch.arange(target.spec.vocab_size), target.readout)
    return drafter


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits


# --- where the first weights come from ---


def test_all_layers_of_the_target_are_the_target(target: Target) -> None:
    drafter = drafter_of(target, layers=[0, 1, 2, 3]).eval()
    assert torch.equal(logits_of(drafter.model), logits_of(target.model))
    decoded = speculative_decode(
        target,
        drafter,
        TOKENS,
        policy=4,
        sampling=GREEDY,
        max_new_tokens=21,
        chance=SeededChance(0),
        stop_tokens=[],
    )
    counters = decoded.stats.trimmed
    assert counters.num_accepted_tokens == counters.num_draft_tokens == 16


def test_chosen_layers_keep_their_order_and_weights(target: Target) -> None:
    drafter = drafter_of(target, layers=[1, 3])
    theirs = target.model.state_dict()
    for name, tensor in drafter.model.state_dict().items():
        source = name.replace("layers.1.", "layers.3.").replace("layers.0.", "layers.1.")
        assert torch.equal(tensor, theirs[source]), name
        assert tensor.data_ptr() != theirs[source].data_ptr(), "training must not touch the target"
    assert len(drafter.model.model.layers) == 2


@pytest.mark.parametrize("depth", [8, 36])
def test_chosen_layers_keep_what_the_target_lists_by_layer(depth: int, target: Target) -> None:
    """SmolLM3 rotates no positions in some layers; of 36, its lists are the class's default."""
    theirs, layers = transformers.SmolLM3Config(num_hidden_layers=depth), [0, 3, 6]
    spec = replace(target.spec, num_layers=depth)
    ours = transformers.SmolLM3Config(**lasting(with_layers_of(theirs, layers, spec)))
    assert ours.num_hidden_layers == 3
    assert ours.no_rope_layers == [theirs.no_rope_layers[layer] for layer in layers] == [1, 0, 1]
    assert ours.layer_types == ["full_attention"] * 3


def test_a_model_of_ones_own_starts_where_it_is_and_gets_the_targets_number_of_ids(
    target: Target,
) -> None:
    for size in (97, 128):
        drafter = drafter_of(target, path=draft_model_dir(size))
        own = transformers.AutoModelForCausalLM.from_pretrained(draft_model_dir(size))
        torch.testing.assert_close(logits_of(drafter.model), logits_of(own)[..., :97])
        assert drafter.to_serving()[0]["vocab_size"] == 97


def test_a_fresh_one_takes_the_shape_asked_for_and_the_targets_positions(target: Target) -> None:
    drafter = drafter_of(target, hidden_size=64, num_layers=3, tie_embeddings=False)
    settings = drafter.model.config
    assert (settings.hidden_size, settings.num_hidden_layers) == (64, 3)
    assert settings.max_position_embeddings == target.spec.max_positions
    assert settings.rope_parameters["rope_theta"] == target.spec.rope_theta
    assert drafter.model.lm_head.weight is not drafter.model.model.embed_tokens.weight


def test_the_default_has_at_most_a_fifth_of_the_embedded_targets_parameters() -> None:
    target = load_target(replace(model_config(EMBEDDED), name="tiny"), torch.float32, "cpu")
    values = content_of("drafter", "small_lm")
    del values["_target_"]
    drafter = SmallLMConfig(**values).build(target.spec)
    share = sum(p.numel() for p in drafter.parameters()) / sum(
        p.numel() for p in target.model.parameters()
    )
    assert 0.1 < share <= 0.2


def test_a_narrow_image_keeps_the_angles_of_frequent_rows(seeded: None) -> None:
    basis = torch.randn(3, 12)
    table = torch.randn(50, 3) @ basis  # of rank 3: three directions hold all of it
    image = narrow_image(table, torch.ones(50, dtype=torch.long), 3)
    torch.testing.assert_close(image @ image.T, table @ table.T, atol=1e-3, rtol=1e-3)
    table = torch.randn(50, 12)
    counts = torch.zeros(50, dtype=torch.long)
    counts[:4] = 10**7
    image = narrow_image(table, counts, 4)
    torch.testing.assert_close(
        (image @ image.T)[:4, :4], (table @ table.T)[:4, :4], atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "x", "layers": [0]}, r"drafter\.layers must be null with drafter\.path"),
        ({"layers": [3, 1]}, r"drafter\.layers must be distinct and ascend.*\[3, 1\]"),
        ({"layers": []}, r"drafter\.layers must not be empty"),
        ({"layers": [0, 4]}, r"drafter\.layers must lie in 0\.\.3 for tiny_test, got \[0, 4\]"),
        ({"hidden_size": 20}, r"even multiple of drafter\.num_attention_heads \(4\), got 20"),
        ({"num_key_value_heads": 3}, r"must divide drafter\.num_attention_heads \(4\), got 3"),
        ({"num_layers": 0}, r"drafter\.num_layers must be at least 1, got 0"),
        ({"on_policy": 1.5}, r"drafter\.on_policy must be in \[0, 1\], got 1\.5"),
        ({"on_policy_temperature": -1.0}, r"on_policy_temperature must be 0 .*or in .*, got -1"),
        ({"lora_rank": -1}, r"drafter\.lora_rank must be at least 0"),
        ({"lora_rank": 2}, r"drafter\.lora_rank must be 0 for a fresh model, got 2"),
        ({"lora_rank": 2, "layers": [0], "lora_alpha": 0}, r"lora_alpha must be at least 1"),
        (
            {"on_policy": 0.5, "losses": {"hard_cross_entropy": 1.0}},
            r"drafter\.losses must compare with the target where drafter\.on_policy is above 0",
        ),
        ({"path": "/no/model"}, r"^drafter\.path=/no/model must be a directory .* not exist"),
    ],
)
def test_what_cannot_be_made_is_refused_by_key(
    changes: dict[str, Any], message: str, target: Target
) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_of(target, **changes)


def test_a_model_of_other_tokens_is_refused(target: Target, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(draft_model_dir(97), tmp_path / "model"))
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"a":', '"ä":'))
    with pytest.raises(ValueError, match=r"1 of 97 ids differ: id \d+ is 'a' for the target, 'ä'"):
        drafter_of(target, path=str(folder))


# --- checkpoints ---


@pytest.mark.parametrize("changes", [{}, {"layers": [0, 2]}, {"path": "own"}])
def test_weights_describe_themselves(
    changes: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    """Neither the target nor the model that it began as is needed again."""
    if "path" in changes:
        folder = shutil.copytree(draft_model_dir(97), tmp_path / "model")
        changes = {"path": str(folder)}
    drafter = drafter_of(target, **changes).eval()
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    again = build("small_lm", target.spec, **changes)
    again.load_weights(weights)
    assert torch.equal(logits_of(again.eval().model), logits_of(drafter.model))
    assert again.state_dict().keys() == weights.keys()
    del weights["settings"]
    with pytest.raises(ValueError, match="not small_lm's: settings is missing"):
        again.load_weights(weights)


def test_bfloat16_rounds_weights_and_not_positions(target: Target) -> None:
    drafter = drafter_of(target)
    before = drafter.model.model.rotary_emb.inv_freq.clone()
    drafter.to(torch.bfloat16)
    assert dtype_of(drafter) == torch.bfloat16
    assert torch.equal(drafter.model.model.rotary_emb.inv_freq, before)


# --- LoRA ---


def trained_lora(target: Target) -> Any:
    drafter = drafter_of(target, layers=[0, 3], lora_rank=2)
    batch = as_batch(TOKENS)
    features = target.features(batch, ())
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        weighted_sum(drafter(batch, features, NoChance())).backward()
        optimizer.step()
    return drafter.eval()


def test_adapters_alone_are_trained_and_begin_as_nothing(target: Target) -> None:
    plain = drafter_of(target, layers=[0, 3])
    untrained = drafter_of(target, layers=[0, 3], lora_rank=2)
    assert torch.equal(logits_of(untrained.model), logits_of(plain.model))
    learning = {n for n, p in untrained.named_parameters() if p.requires_grad}
    assert len(learning) == 2 * 2 * 7  # two factors, two layers, seven matrices
    drafter = trained_lora(target)
    assert not torch.equal(logits_of(drafter.model), logits_of(plain.model))
    own = {name.replace(".base_layer", ""): p for name, p in drafter.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert torch.equal(own[name], parameter), name


def test_adapters_are_merged_before_decoding_and_on_export(target: Target) -> None:
    drafter = trained_lora(target)
    expected = logits_of(drafter.model)
    loaded = build("small_lm", target.spec, layers=[0, 3], lora_rank=2)
    loaded.load_weights({n: t.clone() for n, t in drafter.state_dict().items()})
    config, tensors = drafter.to_serving()
    assert not [name for name in tensors if "lora" in name or "base_layer" in name]
    exported = build("small_lm", target.spec, layers=[0, 3], lora_rank=2)
    exported.from_serving(config, tensors)
    for merged in (loaded, exported):
        assert not [name for name, _ in merged.named_parameters() if "lora" in name]
        torch.testing.assert_close(logits_of(merged.eval().model), expected)
    assert torch.equal(logits_of(drafter.model), expected), "it can be trained further"


# --- its own words ---


def conversations(count: int = 12) -> list[Sample]:
    """Two answers each, after a prompt and after a second question."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for index in range(count):
        tokens = torch.randint(6, 97, (int(torch.randint(14, 30, (), generator=generator)),))
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        mask[4:8] = True
        mask[11:] = True
        samples.append(Sample(tokens, mask, index))
    return samples


def documents(batch: Batch) -> dict[int, dict[str, list[Any]]]:
    """Each conversation of a batch, wherever it stands."""
    found = {}
    for index in batch.document.unique().tolist():
        if index != PAD_DOCUMENT:
            place = batch.document == index
            found[index] = {
                "tokens": batch.tokens[place].tolist(),
                "mask": batch.loss_mask[place].tolist(),
                "positions": batch.positions[place].tolist(),
            }
    return found


@pytest.fixture
def talker(target: Target, seeded: None) -> Any:
    drafter = drafter_of(target, on_policy=0.5)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def rewritten(drafter: Any, batch: Batch, fraction: float, chance: Chance | None = None) -> Batch:
    return in_own_words(drafter, batch, fraction, 1.0, chance or SeededChance(4))


def test_the_fraction_is_of_conversations_and_each_answer_has_its_turn(talker: Any) -> None:
    batch = pack([replace(s, index=i) for i, s in enumerate(conversations() * 30)], 60)
    assert answers_to_rewrite(batch, 0.0, SeededChance(0)) == []
    every = answers_to_rewrite(batch, 1.0, SeededChance(0))
    assert {a.conversation for a in every} == set(range(360))
    assert {a.start - a.first for a in every} == {4, 11}
    some = answers_to_rewrite(batch, 0.3, SeededChance(0))
    assert 80 <= len(some) <= 136
    assert rewritten(talker, batch, 0.0) is batch


def test_own_words_do_not_depend_on_how_conversations_are_batched(talker: Any) -> None:
    samples = conversations()
    together = documents(rewritten(talker, pack(samples, 90), 0.6))
    changed = 0
    for sample in samples:
        alone = documents(rewritten(talker, pack([sample], 30), 0.6))[sample.index]
        assert alone == together[sample.index]
        changed += alone["tokens"] != sample.tokens.tolist()
    assert 3 <= changed <= 11
    later = documents(rewritten(talker, pack(samples, 90), 0.6, SeededChance(5)))
    assert later != together


def test_own_words_are_the_drafters_and_what_stands_before_them_stays(talker: Any) -> None:
    samples = conversations()
    batch = pack(samples, 90)
    greedy = in_own_words(talker, batch, 1.0, 0.0, SeededChance(4))
    found = documents(greedy)
    ends = talker.spec.eos_token_ids
    for answer in answers_to_rewrite(batch, 1.0, SeededChance(4)):
        sample = samples[answer.conversation]
        new, start = found[answer.conversation], answer.start - answer.first
        assert new["tokens"][:start] == sample.tokens[:start].tolist()
        assert new["mask"][:start] == sample.loss_mask[:start].tolist()
        assert all(new["mask"][start:])
        assert new["positions"] == list(range(len(new["tokens"])))
        with torch.no_grad():
            logits = talker.model(torch.tensor([new["tokens"]])).logits[0]
        assert new["tokens"][start:] == logits.argmax(-1)[start - 1 : -1].tolist()
        said = new["tokens"][start:]
        assert len(new["tokens"]) == len(sample.tokens) or said[-1] in ends
        assert not set(said[:-1]) & set(ends)
    assert greedy.tokens.shape == batch.tokens.shape


def test_an_answer_that_ends_early_leaves_padding(talker: Any) -> None:
    talker.spec = replace(talker.spec, eos_token_ids=tuple(range(6, 60)))
    batch = pack(conversations(), 90)
    new = rewritten(talker, batch, 1.0)
    freed = (batch.document != PAD_DOCUMENT) & (new.document == PAD_DOCUMENT)
    assert int(freed.sum()) > 30
    assert not new.loss_mask[freed].any()
    assert not new.tokens[freed].any()
    assert not new.positions[freed].any()


def test_the_loss_of_own_words_is_that_of_the_same_text_unpacked(
    talker: Any, target: Target
) -> None:
    talker.spec = replace(talker.spec, eos_token_ids=tuple(range(6, 30)))
    new = rewritten(talker, pack(conversations(), 90), 1.0)
    packed = talker(new, target.features(new, ()), NoChance())["depth_1"]
    rows = [(d["tokens"], d["mask"]) for d in documents(new).values()]
    alone = as_batch(*(tokens for tokens, _ in rows), mask=[mask for _, mask in rows])
    other = talker(alone, target.features(alone, ()), NoChance())["depth_1"]
    torch.testing.assert_close(packed.sum, other.sum)
    assert packed.count == other.count


@pytest.mark.parametrize("what", ["micro_batch", "resume"])
def test_training_on_own_words_is_one_training_however_it_is_run(
    what: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import test_drafters
    from test_training import constant, interrupt, recorded, start, trainer

    own = {**test_drafters.TINY["small_lm"], "on_policy": 0.7}
    monkeypatch.setitem(test_drafters.TINY, "small_lm", own)
    start("small_lm", target, tmp_path / "one", trainer(), constant)
    expected = recorded(tmp_path / "one")
    if what == "resume":
        broken = trainer(save_every=3, validate_every=4)
        with pytest.raises(KeyboardInterrupt):
            start("small_lm", target, tmp_path / "two", broken, interrupt)
        start("small_lm", target, tmp_path / "two", broken, constant)
        assert recorded(tmp_path / "two") == expected
    else:
        start("small_lm", target, tmp_path / "two", trainer(), constant, micro_batch=1)
        values = [value for _, value in recorded(tmp_path / "two")]
        assert values == pytest.approx([value for _, value in expected], rel=1e-4)
    own["on_policy"] = 0.0
    start("small_lm", target, tmp_path / "data", trainer(), constant)
    assert recorded(tmp_path / "data") != expected


def test_the_denominator_of_own_words_is_their_number(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of one everywhere is one in the mean, also where answers end early."""
    import test_drafters
    from test_training import constant, recorded, start, trainer

    def one(self: Any, logits: torch.Tensor, probs: Any, labels: Any) -> tuple[Any, float]:
        return 1 + 0 * logits.sum(-1), 0.0

    own = {**test_drafters.TINY["small_lm"], "on_policy": 1.0}
    monkeypatch.setitem(test_drafters.TINY, "small_lm", own)
    monkeypatch.setattr(SmallLMConfig, "token_loss_and_gradient", one)
    ending = replace(target.spec, eos_token_ids=tuple(range(6, 30)))
    monkeypatch.setattr(target, "spec", ending)
    start("small_lm", target, tmp_path, trainer(max_steps=2), constant)
    assert [value for _, value in recorded(tmp_path)] == pytest.approx([1.0, 1.0])


# --- what it becomes ---


def exported(drafter: Any, target: Target, folder: Path, **changes: Any) -> Exported:
    values = yaml.safe_load((ROOT / "conf/export/vllm.yaml").read_text())
    config = ExportSettings(**{**values, "dtype": "float32", **changes})
    card = CardData("a draft", "small_lm", None, "tiny", None, "other", {}, {}, {})
    return export_drafter(drafter, "tiny", folder, config, card, lambda: target.tokenizer)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"layers": [0, 3]}])
def test_the_export_is_a_model_that_transformers_loads_and_drafts_with(
    changes: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter = drafter_of(target, **changes).eval()
    done = exported(drafter, target, tmp_path / "out")
    assert done.method == "draft_model"
    assert '"method": "draft_model"' in done.commands["vLLM"]
    assert "--speculative-algorithm STANDALONE" in done.commands["SGLang"]
    assert set(done.sizes) == {file.name for file in (tmp_path / "out").iterdir()}
    assert {"generation_config.json", "tokenizer.json", "chat_template.jinja"} <= set(done.sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(model), logits_of(drafter.model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == target.tokenizer.get_vocab()
    config = model_config(tmp_path / "out")
    assert load_tokenizer(config).chat_template == target.tokenizer.chat_template
    plain = autoregressive_decode(
        target, TOKENS, sampling=GREEDY, max_new_tokens=16, chance=SeededChance(0), stop_tokens=[]
    )
    text = target.model.generate(
        torch.tensor([TOKENS]),
        attention_mask=torch.ones(1, len(TOKENS)),
        assistant_model=model,
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=None,
    )
    assert text[0, len(TOKENS) :].tolist() == list(plain.tokens)


def test_two_model_drafts_with_the_export_as_the_drafter_itself_does(
    target: Target, tmp_path: Path
) -> None:
    drafter = drafter_of(target, layers=[0, 3]).eval()
    exported(drafter, target, tmp_path / "out")
    other = build("two_model", target.spec, path=str(tmp_path / "out"))
    other.attach(target.tokenizer)
    settings: dict[str, Any] = {
        "policy": 3,
        "sampling": GREEDY,
        "max_new_tokens": 24,
        "stop_tokens": [],
    }
    one, two = (
        speculative_decode(target, d, TOKENS, chance=SeededChance(0), **settings)
        for d in (drafter, other)
    )
    assert one.tokens == two.tokens
    assert one.stats.untrimmed == two.stats.untrimmed


def test_an_export_is_replaced_if_asked_and_anothers_model_never(
    target: Target, tmp_path: Path
) -> None:
    drafter = drafter_of(target).eval()
    exported(drafter, target, tmp_path / "out")
    exported(drafter, target, tmp_path / "out", overwrite=True)
    own = Path(shutil.copytree(draft_model_dir(97), tmp_path / "own"))
    with pytest.raises(ValueError, match=r"export\.dir must be empty or hold only an earlier"):
        exported(drafter, target, own, overwrite=True)


def test_every_missing_unknown_or_misshapen_tensor_is_named(target: Target) -> None:
    drafter = drafter_of(target)
    config, tensors = drafter.to_serving()

    def complaint(config: dict[str, Any], tensors: dict[str, Any]) -> str:
        try:
            check(config, tensors, target.spec, (), SmallLMConfig.layout)
        except ValueError as error:
            return str(error)
        return ""

    assert complaint(config, tensors) == ""
    for name, tensor in tensors.items():
        without = {other: value for other, value in tensors.items() if other != name}
        assert f"missing {name} of shape {list(tensor.shape)}" in complaint(config, without)
        wide = {**tensors, name: torch.cat([tensor, tensor])}
        assert f"{name} must be {list(tensor.shape)}" in complaint(config, wide)
    assert "unknown lm_head.weight" in complaint(
        config, {**tensors, "lm_head.weight": torch.zeros(97, 48)}
    )
    assert "vocab_size must be 97, got 98" in complaint({**config, "vocab_size": 98}, tensors)
