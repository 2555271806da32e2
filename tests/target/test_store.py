"""Stored features train as online ones do, and a store that does not fit is refused by name."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_capture import ALONE, settings, write
from test_drafters import TRAINABLE, build, random_drafter
from test_engine import deepspeed_config
from test_training import constant, random_samples, recorded, trainer

from drafttrain.__main__ import main
from drafttrain.commands.capture import asked_by
from drafttrain.core.losses import REJECTION
from drafttrain.core.types import FeatureSource, Sample, weighted_sum
from drafttrain.data.batches import Batches, collate, documents_of, pack, token_counts
from drafttrain.data.prefetch import Prefetcher
from drafttrain.drafters.base import Drafter
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import Tell
from drafttrain.runtime.tracker import JsonlTrackerConfig, open_tracker
from drafttrain.target.model import Target
from drafttrain.target.store.config import StoreContents
from drafttrain.target.store.features import StoredTarget
from drafttrain.training.checkpoint import Checkpoints, load_state
from drafttrain.training.engine.build import build_engine
from drafttrain.training.engine.engine import Engine
from drafttrain.training.loop import train
from drafttrain.training.teacher_forced import NoChance, TeacherForced

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of every layer, in float32."""
    place = tmp_path_factory.mktemp("store")
    write(target, place, StoreContents((0, 1, 2, 3, 4), None))
    return place


def open_store(folder: Path, dtype: torch.dtype = torch.float32) -> StoredTarget:
    return StoredTarget(folder, dtype, CPU, checksums=True)


def test_a_store_needs_nothing_else(target: Target, folder: Path) -> None:
    store = open_store(folder)
    assert store.spec == target.spec
    for name in ("embedding", "head", "norm"):
        assert torch.equal(getattr(store.readout, name), getattr(target.readout, name)), name
    for stored, sample in zip(store.samples, random_samples(), strict=True):
        assert torch.equal(stored.tokens, sample.tokens)
        assert torch.equal(stored.loss_mask, sample.loss_mask)
        assert stored.index == sample.index


def test_a_tied_readout_stays_tied(target: Target, folder: Path) -> None:
    half = open_store(folder, torch.bfloat16).readout
    assert half.embedding.dtype == half.head.dtype == torch.bfloat16
    assert half.head is not half.embedding
    tied = type(half)(half.embedding, half.embedding)
    assert tied.to(torch.float32).head.dtype == torch.float32
    assert tied.to(torch.device("meta")).head is not half.head


@pytest.mark.parametrize("packed", [False, True])
def test_features_are_those_of_the_target_wherever_a_conversation_is_packed(
    packed: bool, target: Target, folder: Path
) -> None:
    store, samples = open_store(folder), random_samples()
    chosen = [samples[i] for i in (5, 2, 21, 9, 0, 13)]
    batch = pack(chosen, 40) if packed else collate(chosen)
    layers = (0, 3, 4)
    found, expected = store.features(batch, layers), target.features(batch, layers)
    real = batch.document >= 0
    for layer in layers:
        assert torch.allclose(
            found.captured[layer][real], expected.captured[layer][real], atol=1e-5
        )
    assert torch.allclose(found.final_hidden[real], expected.final_hidden[real], atol=1e-5)
    assert not found.final_hidden[~real].any(), "padding is finite"
    assert len(documents_of(batch)) == len(chosen)


def test_features_of_a_conversation_alone_are_the_very_bits(target: Target, tmp_path: Path) -> None:
    """Computed in the same shape by the same kernels: nothing is lost on the way."""
    samples = random_samples(4)
    store_samples(target, samples, tmp_path)
    store = open_store(tmp_path)
    longest_first = sorted(samples, key=lambda sample: (-len(sample.tokens), sample.index))
    batch = collate(longest_first)
    found, expected = store.features(batch, (1, 2)), target.features(batch, (1, 2))
    real = batch.document >= 0
    assert torch.equal(found.final_hidden[real], expected.final_hidden[real])
    assert torch.equal(found.captured[2][real], expected.captured[2][real])


def store_samples(
    target: Target,
    samples: list[Sample],
    folder: Path,
    asked: StoreContents | None = None,
    **changes: Any,
) -> None:
    from drafttrain.target.store.capture import capture

    capture(
        target,
        samples,
        asked or StoreContents((1, 2), None),
        settings(folder, **changes),
        template="",
        record={},
        micro_batch=8,
        ranks=ALONE,
        stop=StopRequest(),
        say=lambda line: None,
    )


def test_a_batch_may_begin_inside_a_conversation(target: Target, folder: Path) -> None:
    from drafttrain.core.types import Batch

    store, batch = open_store(folder), collate(random_samples()[:3])
    whole = store.features(batch, (1,))
    rest = Batch(*(tensor[:, 4:] for tensor in vars(batch).values()))
    assert torch.equal(store.features(rest, (1,)).final_hidden, whole.final_hidden[:, 4:])


def test_features_come_in_the_dtype_that_is_trained_in(target: Target, tmp_path: Path) -> None:
    for stored in ("float32", "bfloat16", "float8"):
        write(target, tmp_path / stored, dtype=stored)
        for dtype in (torch.float32, torch.bfloat16):
            store = open_store(tmp_path / stored, dtype)
            features = store.features(collate(store.samples[:2]), (1,))
            assert features.captured[1].dtype == features.final_hidden.dtype == dtype
            assert features.readout.logits(features.final_hidden).dtype == dtype


def run_training(
    name: str,
    source: FeatureSource,
    folder: Path,
    *,
    validate: Callable[[Tell], dict[str, float]] | None = None,
    ahead: int = 2,
    held_out: int = 4,
    **changes: Any,
) -> Engine:
    """Train as the command does, from new objects; `validate` None is teacher-forced."""
    torch.manual_seed(0)
    samples = random_samples()[held_out:]
    drafter = build(name, source.spec)
    drafter.prepare(token_counts(samples, source.spec.vocab_size), source.readout)
    config = trainer(**changes)
    engine = build_engine(
        drafter,
        deepspeed_config("none"),
        device="cpu",
        dtype=torch.float32,
        betas=(config.beta1, config.beta2),
        eps=1e-8,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
    read = None
    metric = "val/acceptance_length"
    if isinstance(source, StoredTarget):

        def read(batch: Any) -> Any:
            return source.read(batch, drafter.captures)

        if validate is None:
            validate = TeacherForced(
                source, engine, random_samples()[:held_out], num_conversations=4, micro_batch=3
            )
            metric = TeacherForced.metric
    assert validate is not None
    checkpoints = Checkpoints(folder / "checkpoints", config.keep_checkpoints)
    latest = checkpoints.latest()
    step = None if latest is None else load_state(latest).step
    kind = JsonlTrackerConfig(name="none")
    tracker = open_tracker(kind, folder, config={}, resume_step=step, is_main=True)
    batches = Batches(samples, config.tokens_per_step, 4, seed=3)
    with Prefetcher(batches, ahead, read) as steps:
        train(
            engine, source, steps, checkpoints, tracker, config, validate, 7, StopRequest(), metric
        )
    tracker.finish()
    return engine


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_loss_curve_is_that_of_online_features(
    name: str, target: Target, folder: Path, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"validate": constant, "max_steps": 3}
    run_training(name, target, tmp_path / "online", ahead=0, **told)
    run_training(name, open_store(folder), tmp_path / "stored", **told)
    for key in ("train/loss", "train/grad_norm"):
        online = [value for _, value in recorded(tmp_path / "online", key)]
        stored = [value for _, value in recorded(tmp_path / "stored", key)]
        assert len(stored) == 3
        assert stored == pytest.approx(online, rel=1e-5)


def test_a_killed_stored_run_resumed_records_the_same_bits(folder: Path, tmp_path: Path) -> None:
    def interrupt(tell: Tell) -> dict[str, float]:
        raise KeyboardInterrupt

    store = open_store(folder)
    whole = run_training("eagle3", store, tmp_path / "whole", validate=constant, save_every=3)
    broken = {"save_every": 3, "validate_every": 4}
    with pytest.raises(KeyboardInterrupt):
        run_training("eagle3", store, tmp_path / "broken", validate=interrupt, **broken)
    resumed = run_training(
        "eagle3", open_store(folder), tmp_path / "broken", validate=constant, ahead=1, **broken
    )
    assert recorded(tmp_path / "broken") == recorded(tmp_path / "whole")
    for key, value in whole.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[key], value), key


def test_the_share_of_time_that_data_was_waited_for_is_recorded(
    folder: Path, tmp_path: Path
) -> None:
    run_training("medusa", open_store(folder), tmp_path, validate=constant)
    shares = [value for _, value in recorded(tmp_path, "perf/data_wait_share")]
    assert len(shares) == 6
    assert all(0 <= share <= 1 for share in shares)


@pytest.mark.parametrize("name", ["medusa", "small_lm"])
def test_what_reads_single_positions_loses_nothing_by_assistant_only(
    name: str, target: Target, tmp_path: Path
) -> None:
    drafter = random_drafter(name, target, losses={"forward_kl": 1.0})
    asked = asked_by([drafter], settings(tmp_path, assistant_only=True))
    # Trained late, so that most of a prompt is out of reach; one shard each, to the same bits.
    texts = [
        Sample(s.tokens, torch.arange(len(s.tokens)) >= len(s.tokens) - 3, s.index)
        for s in random_samples()
        if len(s.tokens) > 12
    ]
    store_samples(target, texts, tmp_path / "some", asked, assistant_only=True, shard_mb=1.0)
    store_samples(target, texts, tmp_path / "all", StoreContents((), None), shard_mb=1.0)
    some, every = open_store(tmp_path / "some"), open_store(tmp_path / "all")
    assert some.manifest.num_rows < every.manifest.num_rows
    some.require(name, drafter.captures, drafter.reach)
    batch = pack(texts, 30)
    drafter.eval()
    losses = []
    for store in (some, every):
        features = store.features(batch, ())
        drafter.zero_grad()
        loss = weighted_sum(drafter(batch, features, NoChance()))
        loss.backward()
        losses.append([loss, *(p.grad for p in drafter.parameters() if p.grad is not None)])
    for a, b in zip(*losses, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"drafter=eagle reads the whole conversation; capture"):
        some.require("eagle", (), None)
    with pytest.raises(ValueError, match=r"and drafter=medusa reads 9 positions"):
        some.require("medusa", (), 9)


def test_what_a_drafter_lacks_in_a_store_is_named(target: Target, tmp_path: Path) -> None:
    write(target, tmp_path / "some", StoreContents((1, 2), None), final_hidden=False)
    store = open_store(tmp_path / "some")
    said = r"must hold layers \[1, 3\] for drafter=x, but lacks \[3\] .*store\.layers=\[1, 2, 3\]"
    with pytest.raises(ValueError, match=said):
        store.require("x", (1, 3), None)
    with pytest.raises(
        ValueError, match=r"again into another folder with store\.final_hidden=true"
    ):
        store.require("x", (1, 2), None)
    with pytest.raises(ValueError, match=r"must be a folder that `capture` made, got .*nothing"):
        open_store(tmp_path / "nothing")
    said = r"must be of model\.path=x, got one of tiny_test: fingerprints .* cannot be compared"
    with pytest.raises(ValueError, match=said):
        store.check_target("other", "of a template", "model.path=x")
    with pytest.raises(ValueError, match=r"of tiny_test: the chat template differs"):
        store.check_target(target.spec.fingerprint, "other", "model.path=x")
    manifest = tmp_path / "some" / "manifest.json"
    plain = json.loads(manifest.read_text())
    plain["settings"]["store.layers"] = [1, 3]
    manifest.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=r"manifest\.json must be a manifest as `capture` wrote"):
        open_store(tmp_path / "some")


def test_teacher_forced_alpha_is_the_overlap_of_the_distributions(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    """Against the definition, for heads on a whole vocabulary: E sum min(target, draft)."""
    store, samples = open_store(folder), random_samples()[:5]
    drafter = random_drafter("medusa", target)
    validation = TeacherForced(
        store, engine_of(drafter), samples, num_conversations=5, micro_batch=2
    )
    metrics = validation()
    expected, so_far = 1.0, 1.0
    for k in range(4):
        overlaps = []
        for sample in samples:
            final = target.features(collate([sample]), ()).final_hidden[0]
            for ahead in range(2 + k, len(sample.tokens)):
                if sample.loss_mask[ahead]:
                    theirs = target.readout.logits(final[ahead - 1]).softmax(-1)
                    ours = drafter._predict(k, final[ahead - 2 - k]).softmax(-1)  # type: ignore[operator]
                    overlaps.append(float(torch.minimum(theirs, ours).sum().detach()))
        alpha = sum(overlaps) / len(overlaps)
        assert metrics[f"val/alpha_{k + 1}"] == pytest.approx(alpha, rel=1e-4)
        so_far *= alpha
        expected += so_far
    assert metrics["val/expected_acceptance_length"] == pytest.approx(expected, rel=1e-4)
    assert drafter.config.losses != REJECTION, "the drafter's own loss is untouched"
    columns, rows = validation.table()
    assert columns == ["depth", "alpha", "positions"]
    assert [row[0] for row in rows] == [1, 2, 3, 4]


def test_teacher_forced_alpha_counts_what_a_reduced_vocabulary_lacks(
    target: Target, folder: Path
) -> None:
    """A uniform drafter of 24 tokens: its overlap with the target's distribution, everywhere."""
    samples = random_samples()[:5]
    drafter = random_drafter("eagle3", target, draft_vocab_size=64, draft_vocab_coverage=1.0)
    assert drafter.vocab is not None
    with torch.no_grad():
        drafter.get_parameter("lm_head.weight").zero_()
    validation = TeacherForced(
        open_store(folder), engine_of(drafter), samples, num_conversations=5, micro_batch=2
    )
    metrics = validation()
    overlaps = []
    for sample in samples:
        final = target.features(collate([sample]), ()).final_hidden[0]
        distributions = target.readout.logits(final).softmax(-1)[:, drafter.vocab.target_ids]
        overlap = distributions.clamp(max=1 / drafter.vocab.size).sum(-1).detach()
        overlaps += [
            float(overlap[t - 1]) for t in range(2, len(sample.tokens)) if sample.loss_mask[t]
        ]
    assert metrics["val/alpha_1"] == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_drafter_that_names_no_depths_is_judged_by_drafting_along_the_text(
    name: str, target: Target, folder: Path
) -> None:
    """A family of the user's own, whose terms have other names, was judged 1.0 whatever it did."""
    found = []
    for terms in (None, ()):
        drafter = random_drafter(name, target)
        drafter.depth_terms = drafter.depth_terms if terms is None else terms
        judge = TeacherForced(
            open_store(folder),
            engine_of(drafter),
            random_samples()[:5],
            num_conversations=5,
            micro_batch=2,
        )
        found.append((judge(), judge.rows))
    (by_losses, rows), (along, others) = found
    assert along == pytest.approx(by_losses, rel=1e-4)
    assert [row[2] for row in rows] == [row[2] for row in others]  # positions
    assert 1.01 < along["val/expected_acceptance_length"] < 3


def engine_of(drafter: Drafter) -> Engine:
    return build_engine(
        drafter,
        deepspeed_config("none"),
        device="cpu",
        dtype=torch.float32,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )


def test_training_from_a_store_is_validated_by_what_is_rejected_over_the_whole_vocabulary(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    engine = run_training("eagle3", open_store(folder), tmp_path, max_steps=1)
    drafter = engine.module
    assert drafter.vocab is not None
    assert drafter.vocab.size < 97
    held_out = collate(random_samples()[:4])
    drafter.eval().config = dataclasses.replace(drafter.config, losses=REJECTION)
    features = open_store(folder).features(held_out, drafter.captures)
    term = drafter(held_out, features, NoChance())["depth_1"]
    assert term.uncovered == 0, "no position is left out"
    shared = float((term.count - term.sum).detach())
    (_, alpha), *_ = recorded(tmp_path, "val/alpha_1")
    assert alpha == pytest.approx(shared / int(term.count), rel=1e-4)
    (_, length), *_ = recorded(tmp_path, "val/expected_acceptance_length")
    assert 1 < length < 4


def test_a_run_is_validated_as_it_was_before(folder: Path, tmp_path: Path) -> None:
    store = open_store(folder)
    run_training("medusa", store, tmp_path, max_steps=2, validate_every=1)
    best = Checkpoints(tmp_path / "checkpoints", 2).best()
    assert best is not None
    assert load_state(best).best_metric == max(
        value for _, value in recorded(tmp_path, TeacherForced.metric)
    )
    said = r"must be validated as before, by val/expected_acceptance_length, got val/acceptance_len"
    with pytest.raises(ValueError, match=said):
        run_training("medusa", store, tmp_path, validate=constant, max_steps=3)


def conversations(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(24):
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": f"{number} plus {number} is {2 * number}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def test_from_the_command_line_a_store_is_written_and_trained_from(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    data = conversations(tmp_path / "data.jsonl")
    store = tmp_path / "store"
    common = [f"model.path={tiny_target_dir}", "hardware=cpu", "hardware.threads=1"]
    common += ["hardware.train_dtype=float32"]
    capture = ["capture", f"store.dir={store}", "store.drafters=[eagle,medusa]", *common]
    capture += ["data=jsonl", f"data.path={data}", "store.dtype=float32", "store.shard_mb=0.1"]
    assert main(capture) == 0
    said = capsys.readouterr().out
    assert "store: 24 conversations of" in said
    assert "time: about" in said
    following = next(line for line in said.splitlines() if line.startswith("next: "))
    assert following.startswith("next: python -m drafttrain train ")
    assert f"features=stored features.dir={store}" in following
    command = json.loads((store / "provenance.json").read_text())["command"]
    assert command.startswith("python -m drafttrain")
    short = ["trainer.max_steps=2", "trainer.tokens_per_step=256", "trainer.log_every=1"]
    short += ["trainer.validation_prompts=2", "trainer.validation_tokens=4", "data.holdout=4"]
    stored = ["features=stored", f"features.dir={store}"]
    train = ["train", *common, *short, "drafter=eagle"]
    online = ["data=jsonl", f"data.path={data}"]
    curves = {}
    for name, more in {
        "online": online,
        "stored": stored,
        "alone": [*stored, "features.validate=false"],
    }.items():
        if name == "alone":  # the target's model is gone, and nobody asks for it
            away = "drafttrain.commands.setup.target_and_drafter.load_placed"
            monkeypatch.setattr(away, lambda *a: pytest.fail("the target was loaded"))
        run = tmp_path / name
        assert main([*train, f"run.dir={run}", *more]) == 0, name
        curves[name] = [value for _, value in recorded(run)]
    assert curves["stored"] == curves["alone"]
    assert curves["stored"] == pytest.approx(curves["online"], rel=1e-5)
    record = json.loads((tmp_path / "alone" / "provenance.json").read_text())
    assert record["features"]["store.dtype"] == "float32"
    lengths = recorded(tmp_path / "alone", "val/expected_acceptance_length")
    assert [step for step, _ in lengths] == [2]
    capsys.readouterr()
    assert main([*train, f"run.dir={tmp_path / 'no'}", *stored, "drafter=eagle3"]) == 2
    assert "but lacks [" in capsys.readouterr().err
    train_the_embedded = [text for text in train if not text.startswith("model.path=")]
    assert main([*train_the_embedded, *stored, f"run.dir={tmp_path / 'no'}"]) == 2
    assert "model must be tiny_target0, the target of features.dir=" in capsys.readouterr().err
    layered = ["drafter=small_lm", "drafter.layers=[0,1]", f"run.dir={tmp_path / 'no'}"]
    assert main([*train, *stored, "features.validate=false", *layered]) == 2
    assert "features.validate must be true for drafter=small_lm" in capsys.readouterr().err


def test_a_store_of_whole_texts_trains_on_all_tokens_and_another_refuses(
    tiny_target_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    data = ["data=jsonl", f"data.path={conversations(tmp_path / 'data.jsonl')}"]
    common = [f"model.path={tiny_target_dir}", "hardware=cpu", "hardware.threads=1"]
    common += ["hardware.train_dtype=float32"]
    for drafter in ("eagle", "medusa"):
        store = [f"store.dir={tmp_path / drafter}", f"store.drafters=[{drafter}]"]
        store += [f"store.assistant_only={drafter == 'medusa'}".lower()]
        assert main(["capture", *store, "store.dtype=float32", *common, *data]) == 0
    train = ["train", *common, "trainer.max_steps=1", "trainer.tokens_per_step=256"]
    train += ["trainer.validation_prompts=2", "trainer.validation_tokens=4", "data.holdout=4"]
    train += ["trainer.log_every=1", "data.train_on=all"]
    stored = ["features=stored", f"features.dir={tmp_path / 'eagle'}"]
    losses = {}
    for name, more in {"online": data, "stored": stored}.items():
        run = tmp_path / name
        assert main([*train, "drafter=eagle", f"run.dir={run}", *more]) == 0
        losses[name] = [value for _, value in recorded(run)]
    assert losses["stored"] == pytest.approx(losses["online"], rel=1e-5)
    heads = ["features=stored", f"features.dir={tmp_path / 'medusa'}", "drafter=medusa"]
    capsys.readouterr()
    assert main([*train, *heads, f"run.dir={tmp_path / 'no'}"]) == 2
    assert "data.train_on must be answers with this store" in capsys.readouterr().err
