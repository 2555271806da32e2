"""A target in pieces says what the whole one says, wherever its pieces are.

Run as a script, this file is one rank that holds its part of a target, and compares.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import EXACT, build
from builders import drafter_config, model_config
from paths import PYTHONPATH
from test_model import save
from test_ranks import run_ranks
from torch import Tensor, nn

from drafttrain.commands.setup.target_and_drafter import load_alone, load_drafter
from drafttrain.config.compose import recorded
from drafttrain.config.sections import TrainConfig
from drafttrain.core.types import Batch, Sample
from drafttrain.data.conversations import SelfgenConfig
from drafttrain.drafters.small_lm import with_layers
from drafttrain.runtime.ranks import ALONE, Ranks, join_ranks
from drafttrain.runtime.signals import StopRequest
from drafttrain.target import placement as placing
from drafttrain.target.answers.selfgen import selfgen
from drafttrain.target.device_map import device_map, load_spread
from drafttrain.target.model import Target, load_target
from drafttrain.target.placement import Placement, choose_placement, load_placed
from drafttrain.target.pretrained.config import RandomModelConfig
from drafttrain.target.pretrained.models import EMBEDDED, load_model_config
from drafttrain.target.pretrained.shards import places, skeleton, weight_bytes
from drafttrain.target.sharded import ShardedTarget, load_sharded, refuse_unless_shardable
from drafttrain.training.engine.build import build_engine
from drafttrain.training.validation import Validation, held_out_prompts

CAPTURES = (0, 1, 4)
# The target whose loading is measured: 381 MB, in files of at most 100 MB.
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}


def batch(packed: bool, vocab: int = 97) -> Batch:
    """Three rows: a document each, padded on the right; or two documents in the first of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(6, vocab, (3, 12), generator=generator)
    document = torch.tensor([[0] * 12, [1] * 9 + [-1] * 3, [2] * 5 + [-1] * 7])
    positions = torch.arange(12).repeat(3, 1)
    if packed:
        document[0, 7:] = 3
        positions[0, 7:] = torch.arange(5)
    return Batch(tokens, document >= 0, positions, document)


def outputs_of(target: Target) -> dict[str, Tensor]:
    """What is asked of a target: features of both kinds of batches, and steps with a cache."""
    found = {}
    for packed in (False, True):
        features = target.features(batch(packed), CAPTURES)
        real = batch(packed).document >= 0
        found[f"final, packed={packed}"] = features.final_hidden[real]
        for layer, hidden in features.captured.items():
            found[f"layer {layer}, packed={packed}"] = hidden[real]
    cache = target.begin()
    tokens = batch(False).tokens
    for name, new, counts in (("prompt", tokens[:, :6], [6, 3, 5]), ("next", tokens[:, :3], None)):
        logits, features = target.step(cache, new, CAPTURES, counts)
        real = torch.ones_like(new, dtype=torch.bool)
        if counts is not None:
            real = torch.arange(new.shape[1]) < torch.tensor(counts)[:, None]
        found[f"logits, {name}"] = logits[real]
        found[f"captured, {name}"] = features.captured[1][real]
    target.rollback(cache, [7, 5, 6])
    target.select(cache, [2, 0])
    found["logits, last"] = target.step(cache, tokens[:2, :1], last_only=True)[0]
    return found


def differences(target: Target, whole: Target) -> dict[str, float]:
    mine, theirs = outputs_of(target), outputs_of(whole)
    return {key: (mine[key].float() - theirs[key].float()).abs().max().item() for key in theirs}


def selfgen_config(folder: Path, count: int = 11) -> SelfgenConfig:
    return SelfgenConfig(
        name="selfgen",
        max_length=64,
        holdout=0,
        template_kwargs={},
        template_date="2024-07-26",
        roles={},
        preview=0,
        train_on="answers",
        template="chat",
        seed=5,
        num_conversations=count,
        batch_size=3,
        user_temperature=1.3,
        answer_temperature=0.9,
        top_k=0,
        top_p=0.97,
        max_user_tokens=9,
        max_answer_tokens=12,
        cache_dir=str(folder),
    )


def texts(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def validated(target: Target) -> tuple[dict[str, float], list[list[float]]]:
    """Validate a drafter on five prompts, which no two ranks can share evenly."""
    from test_engine import deepspeed_config

    torch.manual_seed(3)
    engine = build_engine(
        drafter_config("eagle3").build(target.spec),
        deepspeed_config("none"),
        device="cpu",
        dtype=torch.float32,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    generator = torch.Generator().manual_seed(2)
    held_out = [
        Sample(torch.randint(6, 97, (20,), generator=generator), torch.arange(20) >= 5 + i, i)
        for i in range(5)
    ]
    validation = Validation(
        target,
        engine,
        held_out_prompts(held_out),
        most=5,
        depth=3,
        max_new_tokens=17,
        draft_dtype=torch.float32,
        stop=StopRequest(),
    )
    return validation(), validation.table()[1]


# --- in one process


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_target_on_host_and_disk_says_what_the_whole_one_says(
    kind: str, tmp_path: Path, tiny_target_dir: Path
) -> None:
    folder = save(kind, tmp_path, tiny_target_dir)
    config = model_config(folder)
    layer = 4 * sum(
        p.numel() for p in load_target(config, torch.float32, "cpu").layers[0].parameters()
    )
    room: dict[int | str, int] = {"cpu": 97 * 32 * 4 * 2 + int(3.9 * layer)}
    target = load_spread(config, torch.float32, "cpu", room)
    on_disk = [layer for layer in target.layers if next(layer.parameters()).device.type == "meta"]
    assert 0 < len(on_disk) < 4
    assert (
        target.where == f"device_map: of 4 layers {4 - len(on_disk)} on cpu, {len(on_disk)} on disk"
    )
    whole = load_target(config, torch.float32, "cpu")
    for key, difference in differences(target, whole).items():
        assert difference <= 1e-5, (key, difference)
    assert target.num_parameters == whole.num_parameters
    assert target.spec == whole.spec


def test_layers_go_where_there_is_room_and_the_readout_where_the_tokens_are(
    tiny_target_dir: Path,
) -> None:
    config = model_config(tiny_target_dir)
    model = skeleton(config, load_model_config(config), torch.float32)
    layer = 4 * sum(p.numel() for p in model.get_decoder().layers[0].parameters())
    tables = 4 * sum(p.numel() for p in model.lm_head.parameters())
    # Accelerate keeps room for one more layer wherever some are brought from elsewhere.
    room: dict[int | str, int] = {0: 2 * tables + int(2.2 * layer), "cpu": int(2.2 * layer)}
    chosen = device_map(model, "cuda:0", room)
    where = [chosen[f"model.layers.{layer}"] for layer in range(4)]
    assert where == [0, "cpu", "disk", "disk"]
    others = {name: place for name, place in chosen.items() if "layers" not in name}
    assert others == {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}


def test_quantisation_makes_linear_modules_small_and_no_experts(tmp_path: Path) -> None:
    model = build(*EXACT["mixtral"]).model
    model.save_pretrained(tmp_path)
    shutil.copy(EMBEDDED / "tokenizer.json", tmp_path)
    config = model_config(tmp_path)
    layers = model.get_decoder().layers.modules()
    linear = sum(part.weight.numel() for part in layers if isinstance(part, nn.Linear))
    whole = weight_bytes(config, torch.bfloat16)
    small = weight_bytes(replace(config, quantization="bnb-8bit"), torch.bfloat16)
    assert whole - small == pytest.approx(0.99 * linear, rel=0.1)  # the router is no linear module


def test_auto_takes_the_first_place_with_room_and_says_why(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config(tiny_target_dir)
    size = weight_bytes(config, torch.float32)
    parameters = load_target(config, torch.float32, "cpu").num_parameters
    assert size == 4 * parameters == 2 * weight_bytes(config, torch.bfloat16)
    eighth = weight_bytes(replace(config, quantization="torchao-int8"), torch.bfloat16)
    assert parameters < eighth < 1.5 * parameters, "what quantises it counts"
    chosen = choose_placement("auto", config, torch.float32, ALONE)
    assert chosen.kind == "device"
    assert str(chosen).startswith(f"target placement: device ({size / 1e3:.1f} kB of weights, ")
    monkeypatch.setattr(placing, "free_bytes", lambda device: size)
    half = choose_placement("auto", config, torch.bfloat16, ALONE)
    assert half.kind == "device"
    alone = choose_placement("auto", config, torch.float32, ALONE)
    assert alone.kind == "device_map"
    assert "may take 70%; spread over" in alone.reason
    settings = load_model_config(config)
    together = placing.placement_of("auto", config, settings, size, size, 4)
    assert together.kind == "zero3"
    assert together.reason.endswith("partitioned over 4 ranks")
    for asked in ("device", "device_map", "zero3"):
        assert choose_placement(asked, config, torch.float32, ALONE).kind == asked
    assert choose_placement("vllm", config, torch.float32, ALONE).kind == "device_map"


def test_free_memory_is_what_a_container_leaves_and_is_shared_among_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "memory.max": "1000000",
        "memory.current": "700000",
        "memory.stat": "anon 5\ninactive_file 200000\nslab 1\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(placing, "CGROUP", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert placing.free_bytes(torch.device("cpu")) == 500000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert placing.free_bytes(torch.device("cpu")) == 125000
    assert placing.room_of(torch.device("cpu")) == {"cpu": 87500}
    (tmp_path / "memory.max").write_text("max")
    assert placing.free_bytes(torch.device("cpu")) > 10**7


def random_config(**changes: Any) -> RandomModelConfig:
    shape: dict[str, Any] = {"vocab_size": 5000, "hidden_size": 16, "intermediate_size": 32}
    shape |= {"num_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    base = vars(model_config(Path("."))) | {"name": "random", "path": None, "max_positions": 64}
    drawn = {"architecture": "llama", "rope_theta": 1e4, "tie_embeddings": False, "seed": 0}
    return RandomModelConfig(**base | shape | drawn | {"initializer_range": 0.1} | changes)


def test_what_cannot_be_in_pieces_is_refused_by_name(tiny_target_dir: Path) -> None:
    config, two = model_config(tiny_target_dir), replace(ALONE, world_size=2)
    settings = load_model_config(config)
    for refused, message in (
        (
            replace(config, quantization="torchao-int8"),
            "partitions plain weights, got torchao-int8",
        ),
        (random_config(), "model=random draws its weights"),
    ):
        with pytest.raises(ValueError, match=message):
            refuse_unless_shardable(refused, settings, two)
    with pytest.raises(ValueError, match=r"over several ranks, got 1; use hardware\.target_pl"):
        load_placed(config, torch.float32, ALONE, Placement("zero3", ""))
    with pytest.raises(ValueError, match="device_map reads weights, and model=random draws them"):
        load_placed(random_config(), torch.float32, ALONE, Placement("device_map", ""))
    for asked in ("zero3", "device_map", "vllm"):
        said = rf"model\.inflate must be null for hardware\.target_placement={asked}, .*got 1M"
        with pytest.raises(ValueError, match=said):
            choose_placement(asked, replace(config, inflate="1M"), torch.float32, ALONE)
    assert choose_placement("auto", random_config(), torch.float32, ALONE).kind == "device"


def test_a_drafter_made_of_the_targets_layers_is_told_that_they_are_in_pieces(
    tiny_target_dir: Path,
) -> None:
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    assert target.own_model is target.model
    spread = load_spread(model_config(tiny_target_dir), torch.float32, "cpu", {"cpu": 10**9})
    assert spread.where == "device_map: of 4 layers 4 on cpu"
    with pytest.raises(ValueError, match=r"needs them whole .* of 4 layers 4 on cpu"):
        with_layers(spread.own_model, [0, 2], spread.spec)


def test_weights_are_looked_up_by_name_and_a_misfit_is_named(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = save("qwen3", tmp_path, tiny_target_dir, tie_word_embeddings=True)
    config = model_config(folder)
    model = skeleton(config, load_model_config(config), torch.float32)
    found = places(config, model)
    assert ("model.embed_tokens.weight", "lm_head.weight") in [place.names for place in found]
    assert len(found) == len(list(model.parameters()))
    file = folder / "model.safetensors"
    weights = load_file(file)
    base = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(base, file)  # as a decoder alone is saved
    assert {place.names for place in places(config, model)} == {place.names for place in found}
    save_file({key: value for key, value in weights.items() if "layers.1.mlp" not in key}, file)
    with pytest.raises(ValueError, match=r"missing: .*layers.1.mlp.*\(3\)"):
        places(config, model)
    save_file(weights | {"model.norm.weight": torch.ones(3)}, file)
    with pytest.raises(ValueError, match=r"model.norm.weight is \[3\] instead of \[32\] \(1\)"):
        places(config, model)


# --- on two ranks

FAMILIES = ("llama", "gemma2", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """One folder with a target of every family; Gemma's and Qwen's weights are tied."""
    folder = tmp_path_factory.mktemp("families")
    for kind in FAMILIES:
        save(kind, folder / kind, tiny_target_dir, tie_word_embeddings=kind != "llama")
        template = (tiny_target_dir / "chat_template.jinja").read_text()
        (folder / kind / "chat_template.jinja").write_text(template)
    save("llama", folder / "torn", tiny_target_dir, num_hidden_layers=3)
    (folder / "torn" / "config.json").write_text((folder / "llama" / "config.json").read_text())
    return folder


@pytest.mark.slow
def test_two_ranks_with_a_part_each_say_what_the_whole_target_says(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_FOLDERS", str(folders))
    monkeypatch.setenv("PLACEMENT_SELFGEN", str(tmp_path / "two"))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    outputs = [json.loads(text.splitlines()[-1]) for text in run_ranks("equal", script=__file__)]
    for found in outputs:
        for name, difference in found["differences"].items():
            assert difference <= 1e-5, (name, difference)
        assert "fit config.json; missing: model.layers.3." in found["torn"]
        assert "zero3: each of 2 ranks holds" in found["pieces"]
        assert found["parameters"] == found["all parameters"]
        assert found["held"] == pytest.approx(found["in all"] / 2, rel=0.01)
        assert found["left gathered"] <= 32  # vectors
        assert found["linear is torch's"]
    for found in outputs:
        assert not any(found["differences"].values()), found["differences"]
    whole = load_target(model_config(folders / "llama"), torch.float32, "cpu")
    expected, _ = selfgen(whole, selfgen_config(tmp_path / "one"), show=False)
    metrics, table = validated(whole)
    for found in outputs:
        assert found["texts"] == texts(expected)
        assert found["metrics"] == metrics
        assert found["table"] == table
    files = [next((tmp_path / name).rglob("conversations.jsonl")) for name in ("one", "two")]
    assert files[0].read_text() == files[1].read_text()


@pytest.mark.slow
def test_no_rank_holds_the_whole_target_while_it_is_loaded(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", vocab_size=2000, **LARGE)
    model = AutoModelForCausalLM.from_config(config)
    size = 4 * sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="100MB")
    del model
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    for file in tiny_target_dir.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("PLACEMENT_FOLDERS", str(tmp_path))
    # glibc keeps freed blocks of less than 32 MB for itself; these matrices are of that size.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    for text in run_ranks("memory", script=__file__):
        found = json.loads(text.splitlines()[-1])
        print(size, found)
        assert size * 0.5 < found["anonymous"] < 0.75 * size
        assert found["file"] < 0.5 * size


@pytest.mark.slow
def test_training_with_target_and_drafter_in_pieces_takes_the_steps_of_whole_ones(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    curves = {}
    small = "+deepspeed.config.zero_optimization.stage3_param_persistence_threshold=0"
    for kind, *more in (("device",), ("zero3", "deepspeed=zero3", small)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [
            "--nproc_per_node",
            "2",
            "-m",
            "drafttrain",
            "train",
            f"model.path={tiny_target_dir}",
        ]
        command += ["hardware=cpu", "hardware.threads=1", f"hardware.target_placement={kind}"]
        command += ["trainer.max_steps=3", "trainer.tokens_per_step=256", "trainer.log_every=1"]
        command += ["trainer.validation_prompts=3", "trainer.validation_tokens=6"]
        command += ["data=selfgen", "data.num_conversations=12", "data.batch_size=4"]
        command += ["data.max_user_tokens=8", "data.max_answer_tokens=16", "data.holdout=4"]
        command += [f"data.cache_dir={tmp_path / kind}", f"run.dir={tmp_path / kind / 'run'}"]
        command += [*more, "trainer.save_every=1", "drafter.intermediate_size=40"]
        command += ["optimizer=adamw"]  # which DeepSpeed runs
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"target placement: {kind} (set by hardware.target_placement)" in done.stdout
        rows = (tmp_path / kind / "run" / "metrics.jsonl").read_text().splitlines()
        kept = [
            {key: value for key, value in json.loads(row).items() if key.startswith(("tra", "val"))}
            for row in rows
        ]
        curves[kind] = kept
    assert any("val/acceptance_length" in row for row in curves["zero3"])
    assert any("train/loss" in row for row in curves["zero3"])
    # Features are the same to the bit; DeepSpeed adds gradients up in another order than torch.
    for found, expected in zip(curves["zero3"], curves["device"], strict=True):
        assert found == pytest.approx(expected, rel=2e-6)
    # One process evaluates, with what the run recorded.
    config = recorded(tmp_path / "zero3" / "run", TrainConfig, "run.dir")
    assert config.hardware.target_placement == "zero3"
    target = load_alone(config.model, config.hardware, torch.float32, torch.device("cpu"))
    best = {}
    for kind in curves:
        run = tmp_path / kind / "run"
        drafter, checkpoint = load_drafter(run, config.drafter, target.spec)
        assert checkpoint is not None
        best[kind] = dict(drafter.named_parameters())
    for name, weight in best["device"].items():
        torch.testing.assert_close(best["zero3"][name], weight, rtol=1e-4, atol=1e-6)


# --- one rank


def memory() -> dict[str, int]:
    """Return this process's resident bytes: of its own (anonymous), and of mapped files."""
    names = {"RssAnon:": "anonymous", "RssFile:": "file"}
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {names[line[0]]: 1024 * int(line[1]) for line in lines if line and line[0] in names}


def peak_of(work: Callable[[], Any]) -> dict[str, int]:
    """Return the most that `work` adds to this process's memory, looked at every 2 ms."""
    before, most, done = memory(), memory(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            for kind, size in memory().items():
                most[kind] = max(most[kind], size)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return {kind: most[kind] - before[kind] for kind in most}


def measure_memory(ranks: Ranks) -> dict[str, Any]:
    """Load a large target in pieces, after a small one has had everything imported."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from drafttrain.runtime.deepspeed import import_deepspeed

    import_deepspeed(ranks)
    config = model_config(Path(os.environ["PLACEMENT_FOLDERS"]))
    kept = []
    started = time.monotonic()
    found: dict[str, Any] = peak_of(lambda: kept.append(load_sharded(config, torch.float32, ranks)))
    found["seconds"] = time.monotonic() - started
    return found


def compare(ranks: Ranks) -> dict[str, Any]:
    """Compare what this rank is told by targets in pieces with what whole ones say."""
    folders = Path(os.environ["PLACEMENT_FOLDERS"])
    linear = torch.nn.functional.linear
    found: dict[str, Any] = {"differences": {}}
    for kind, dtype in [(kind, torch.float32) for kind in FAMILIES] + [("llama", torch.bfloat16)]:
        config = model_config(folders / kind)
        sharded, whole = load_sharded(config, dtype, ranks), load_target(config, dtype, "cpu")
        assert sharded.spec == whole.spec
        for key, difference in differences(sharded, whole).items():
            found["differences"][f"{kind} {dtype} {key}"] = difference
        if (kind, dtype) == ("llama", torch.float32):
            target = sharded
            found["parameters"], found["all parameters"] = (
                each.num_parameters for each in (sharded, whole)
            )
    parts = [p for p in target.decoder.layers.parameters()]
    found["held"] = sum(p.ds_tensor.nbytes for p in parts)
    found["in all"] = sum(4 * p.ds_numel for p in parts)
    found["left gathered"] = max(p.numel() for p in parts)
    found["linear is torch's"] = torch.nn.functional.linear is linear
    samples, _ = selfgen(
        target, selfgen_config(Path(os.environ["PLACEMENT_SELFGEN"])), False, ranks
    )
    found["texts"] = texts(samples)
    found["metrics"], found["table"] = validated(target)
    for name, work in {
        "torn": lambda: load_sharded(model_config(folders / "torn"), torch.float32, ranks),
        "pieces": lambda: with_layers(target.own_model, [0], target.spec),
    }.items():
        try:
            work()
        except ValueError as error:
            found[name] = str(error)
    assert isinstance(target, ShardedTarget)
    return found


if __name__ == "__main__":
    joined = join_ranks("cpu")
    done = compare(joined) if sys.argv[1] == "equal" else measure_memory(joined)
    print(json.dumps(done))
    joined.barrier()
