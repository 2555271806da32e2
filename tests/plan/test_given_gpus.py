"""What `train model=llama70b drafter=eagle` meets on GPUs that are given as facts, not there."""

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafttrain.__main__ import main
from drafttrain.commands.setup import plan as planning
from drafttrain.commands.setup.plan import foresee, plan_of
from drafttrain.commands.train import intentions
from drafttrain.config.compose import compose, load_choice, typed
from drafttrain.config.sections import EvaluateConfig, RegenerateConfig, TrainConfig, TuneConfig
from drafttrain.plan.advice import Plan
from drafttrain.plan.pages import components, headline, what
from drafttrain.runtime.ranks import ALONE, Ranks
from drafttrain.runtime.run_folder import write_config
from drafttrain.target import placement as placing
from drafttrain.target.placement import Placement

GIB = 2**30
HEADLINE = ("model=llama70b", "drafter=eagle")


def given(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    host: int = 512,
    memory: float = 79.1,
    ranks: int = 0,
) -> None:
    """Let this machine have GPUs, and GiB of free memory on each of them and on the host."""
    free = {"cuda": int(memory * GIB), "cpu": host * GIB}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(79.2 * GIB)),
    )
    for module in (placing, planning):
        monkeypatch.setattr(module, "free_bytes", lambda device: free[torch.device(device).type])
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


def configured(*overrides: str) -> TrainConfig:
    return typed(compose("train", [*HEADLINE, *overrides]), TrainConfig)


def planned(*overrides: str, device: str = "cuda") -> tuple[list[str], Placement]:
    """What `train` foresees on rank 0, whose device is a given one."""
    config = configured("hardware.micro_batch=2", *overrides)
    lines, placement = foresee(config, replace(ALONE, device=torch.device(device)))
    assert placement is not None
    return lines, placement


def test_eight_gpus_hold_it_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, 8, ranks=8)
    lines, placement = planned()
    assert placement.kind == "zero3"
    assert "8 ranks, target_placement=zero3" in " ".join(lines)


def test_two_gpus_cannot_hold_it_and_are_refused_before_anything_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch, 2, ranks=2)
    with pytest.raises(ValueError, match=r"at least 87\.5 GiB where each h100 has 79\.1") as error:
        planned()
    assert "hardware.target_placement=device_map fits, in one process" in str(error.value)
    given(monkeypatch, 2, host=20, ranks=2)
    with pytest.raises(ValueError, match=r"at least 87\.5 GiB") as error:
        planned()
    assert "device_map" not in str(error.value), "20 GiB of host cannot take the other layers"


def test_one_gpu_is_told_the_device_map_that_the_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, 1)
    lines, placement = planned()
    assert placement.kind == "device_map"
    told = " ".join(lines)
    assert "and 76.0 GiB of the 358 GiB it may take of each host (1 rank, target_pl" in told
    assert "target_placement=device_map" in told
    given(monkeypatch, 1, host=64)
    with pytest.raises(
        ValueError, match=r"76\.0 GiB of model=llama70b fit on no accelerator"
    ) as error:
        planned()
    assert "the host has room for 44.8 GiB" in str(error.value)
    assert planned("hardware.target_placement=device_map")[1].kind == "device_map", (
        "who asks for it may use the disk"
    )


def test_what_another_process_holds_of_a_gpu_is_not_planned_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch, 1)
    assert planned("model=llama8b")[1].kind == "device"
    given(monkeypatch, 1, memory=14)
    with pytest.raises(ValueError, match=r"where each h100 has 14\.0 GiB"):
        planned("model=llama8b")


def test_a_gpu_without_bfloat16_is_planned_in_the_dtype_that_the_run_trains_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An 8B has 30 GiB in float32, of which 0.7 of 40 are too few, and 15 in bfloat16."""
    given(monkeypatch, 1, memory=40)
    assert planned("model=llama8b")[1].kind == "device"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    lines, placement = planned("model=llama8b")
    assert placement.kind == "device_map"
    assert "of features a token" in lines[0]
    assert planned("model=llama8b", "hardware.train_dtype=bfloat16")[1].kind == "device"
    assert planned("model=llama8b", "hardware.accelerator=h100")[1].kind == "device_map", "it runs"


def test_the_plan_that_is_printed_is_the_placement_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from drafttrain.commands.setup import target_and_drafter as setup

    given(monkeypatch, 1)
    _, placement = planned()
    taken = []
    monkeypatch.setattr(setup, "load_on_ranks", lambda *found: taken.append(found[-1]))
    setup.open_features(configured(), True, torch.bfloat16, ALONE, placement)
    assert taken == [placement]


def test_the_pointer_plans_this_very_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, 8, ranks=8)
    changed = ("trainer.max_steps=500", "drafter.unroll=2", "data.template_kwargs={a: 1}")
    config = configured("hardware.micro_batch=2", *changed)
    lines, _ = planned(*changed)
    pointer = lines[-1].split("more: ")[1]
    words = pointer.split("drafttrain plan ")[1]
    words = shlex.split(words)
    assert {"model=llama70b", "drafter=eagle", "hardware.micro_batch=2"} <= set(words)
    again = typed(compose("plan", words), planning.PlanConfig)
    for section in ("model", "data", "drafter", "trainer", "hardware", "deepspeed", "vllm"):
        assert getattr(again, section) == getattr(config, section), section


def test_without_a_gpu_the_refusal_names_the_plan_of_a_machine_that_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch, 0, host=20)
    command = r"`python -m drafttrain plan model=llama70b hardware=h100x8 drafter=eagle`"
    with pytest.raises(ValueError, match=command):
        planned(device="cpu")


@pytest.mark.parametrize(
    ("model", "gpus", "memory", "spread"),
    [
        ("llama70b", 8, 79.1, 4),  # two would leave 0.13 of their memory for caches and the rest
        ("llama70b", 0, 79.1, 4),  # without a GPU here, as on H100s
        ("llama70b", 8, 140.0, 2),
        ("llama8b", 8, 79.1, 1),
        ("llama8b", 4, 16.0, 2),
    ],
)
def test_serve_commands_are_for_as_many_gpus_as_hold_the_target(
    model: str, gpus: int, memory: float, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, gpus, memory=memory)
    total = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(memory * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
    config, hardware = load_choice("model", model), load_choice("hardware", "auto")
    assert planning.spread_to_serve(config, hardware, "auto") == spread
    assert planning.spread_to_serve(config, hardware, 8) == 8, "it can be set"


@pytest.mark.parametrize(
    ("gpus", "ranks", "share", "visible", "spread"),
    [
        (8, 1, 0.8, None, 4),
        (2, 1, 0.8, None, 2),  # no more than are there: vLLM says what does not fit
        (8, 1, 0.4, None, 8),  # vllm.memory=0.5
        (8, 8, 0.8, None, 1),  # each rank has one
        (8, 8, 0.8, "4,5,6,7", 4),
    ],
)
def test_an_engine_of_ours_spreads_the_target_over_the_gpus_that_hold_it(
    gpus: int,
    ranks: int,
    share: float,
    visible: str | None,
    spread: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch, gpus, ranks=ranks)
    config = load_choice("model", "llama70b")
    monkeypatch.setattr(placing, "weight_bytes", lambda *_: 141_107_412_992)
    monkeypatch.setattr(placing, "load_model_config", planning.settings_of)
    where = torch.device("cuda", 0)
    found = placing.engine_gpus("auto", config, torch.bfloat16, where, share, visible)
    assert found == spread
    assert placing.engine_gpus(3, config, torch.bfloat16, where, share) == 3
    assert placing.engine_gpus("auto", config, torch.bfloat16, torch.device("cpu"), share) == 1


@pytest.mark.parametrize("command", ["evaluate", "tune"])
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("gpus", "left", "copied"),
    [
        (8, 79.1 - 16.4, True),  # 263 GiB of float32 beside 131 of bfloat16
        (2, 79.1 - 55.4, False),
        (1, 79.1 - 55.4, False),
    ],
)
def test_what_follows_training_decodes_one_target_over_the_gpus_and_copies_what_fits(
    command: str,
    gpus: int,
    left: float,
    copied: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What train suggests next, and then: a 70B over all GPUs, in the dtype that is served.

    The run recorded that its several ranks had partitioned the target.
    """
    from drafttrain.commands.setup import evaluation
    from drafttrain.commands.setup import target_and_drafter as setup

    given(monkeypatch, gpus)
    monkeypatch.setattr(placing, "weight_bytes", lambda _, dtype: 70_553_706_496 * dtype.itemsize)
    monkeypatch.setattr(placing, "load_model_config", planning.settings_of)
    gpu, loaded, told = torch.device("cuda", 0), [], []

    def load(_: object, dtype: torch.dtype, ranks: Ranks, placement: Placement) -> SimpleNamespace:
        loaded.append((dtype, ranks.world_size, placement.kind))
        return SimpleNamespace(
            dtype=dtype, device=gpu, num_parameters=70_553_706_496, use_graphs=lambda: "no graphs"
        )

    monkeypatch.setattr(setup, "load_placed", load)
    write_config(configured("hardware.target_placement=zero3"), tmp_path / "config.yaml")
    schema = {"evaluate": EvaluateConfig, "tune": TuneConfig}[command]
    config = typed(compose(command, [f"run.dir={tmp_path}"]), schema)
    target, choice = setup.load_target_to_decode(config.model, config.hardware, gpu)
    assert (choice.dtype, loaded) == (torch.bfloat16, [(torch.bfloat16, 1, "device_map")])
    given(monkeypatch, gpus, memory=left)
    exact = evaluation.in_float32(config, target, told.append)
    assert (exact is not target) == copied
    assert loaded[1:] == [(torch.float32, 1, "device_map")] * copied
    if not copied:
        assert "losslessness is checked in bfloat16" in told[0]


def test_a_run_on_another_models_answers_says_how_to_get_the_targets_own() -> None:
    (line,) = [line for line in intentions(configured()) if "another's" in line]
    assert line.startswith(
        "  the answers of data=ultrachat are another's; training on the target's"
    )
    assert line.endswith(": python -m drafttrain regenerate data=ultrachat model=llama70b")
    columns = (
        "data.column=null",
        "data.prompt_column=question",
        "data.response_column=answer",
        "data.limit=500",
    )
    own = configured("data=hub", "data.repo=ada/chats", *columns)
    (line,) = [line for line in intentions(own) if "another's" in line]
    words = shlex.split(line.partition("drafttrain regenerate ")[2])
    assert {"data=hub", "data.repo=ada/chats", *columns} <= set(words), "it reads the same prompts"
    assert typed(compose("regenerate", words), RegenerateConfig).data == own.data
    for data in ("data=selfgen", "data=jsonl data.path=own.jsonl"):
        config = configured(*data.split())
        assert not any("another's" in line for line in intentions(config)), data


def test_a_capture_of_another_models_answers_says_so_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["data=hub", "data.repo=ada/chats", "hardware=cpu", "hardware.threads=1"]
    assert main(["capture", f"store.dir={tmp_path / 'store'}", *data]) == 2  # the Hub is far
    said = " ".join(capsys.readouterr().out.split())
    assert "the answers of data=hub are another's" in said
    assert "python -m drafttrain regenerate data=hub data.repo=ada/chats" in said


def test_muon_is_planned_by_its_products_and_its_state() -> None:
    """A 70B's EAGLE: 193 TFLOP in Newton-Schulz, a momentum of four bytes instead of two."""
    said = ["model=llama70b", "drafter=eagle", "hardware=h100x8"]
    muon, adamw = (
        planning.plan_of(typed(compose("plan", [*said, *more]), planning.PlanConfig))
        for more in ([], ["optimizer=adamw"])
    )
    parts = muon.job.parts
    assert sum(parts.muon_flops) == pytest.approx(193e12, rel=0.01)
    largest = 5 * (4 * 8192**2 * 28672 + 2 * 8192**3)  # each of the three gets a rank of its own
    assert max(parts.muon_flops) == largest
    more = muon.chosen.speed.optimizer_s - adamw.chosen.speed.optimizer_s
    chip = muon.job.chip
    sent = 4 * parts.num_muon * 7 / 8 / (chip.interconnect * chip.bandwidth_efficiency)
    assert more == pytest.approx(largest / (0.4 * 989.4e12) + sent)
    zero = [other for other in muon.others if other.memory.sharding.enabled]
    assert {other.speed.optimizer_s for other in zero} == {adamw.chosen.speed.optimizer_s}
    held = [plan.chosen.memory.parts["moments"] for plan in (adamw, muon)]
    assert held[0] - held[1] == 4 * parts.num_muon
    assert parts.num_muon == pytest.approx(parts.num_trained, rel=0.001)


def test_plan_says_disk_login_epochs_and_what_evaluating_takes() -> None:
    said = ["model=llama70b", "drafter=eagle", "hardware=h100x8", "plan.tokens=262144000"]
    plan = planning.plan_of(typed(compose("plan", said), planning.PlanConfig))
    rows = dict(what(plan).items)
    assert rows["weights, on disk"] == (
        "141 GB from meta-llama/Llama-3.3-70B-Instruct, gated: needs a login (hf auth login)"
    )
    assert rows["checkpoints, on disk"].startswith("23.8 GB")  # of weights and Muon's momentum
    assert rows["training"].endswith("; 5.00 epochs")
    assert rows["evaluating"] == "131 GiB, and 263 GiB for a float32 copy, where that fits"
    plan = planning.plan_of(typed(compose("plan", said[:3]), planning.PlanConfig))
    assert "plan.tokens tells how many epochs that is" in str(what(plan))


def test_a_plan_obeys_stored_features_as_the_check_before_training_does() -> None:
    def plan(*words: str) -> Plan:
        told = ["hardware=h100x8", *words] if "=stored_70b" not in words[0] else words
        found = plan_of(typed(compose("plan", told), planning.PlanConfig))
        assert isinstance(found, Plan)
        return found

    online = plan("model=llama70b")
    stored = plan("+experiment=stored_70b")
    assert stored.chosen.memory.placement == "stored"
    assert stored.chosen.speed.target_s == 0
    validated = plan("model=llama70b", "features=stored", "features.dir=outputs/store")
    assert validated.chosen.memory == online.chosen.memory
    assert validated.chosen.hours < online.chosen.hours
    two = (*HEADLINE, "hardware.ranks=2")
    (told,) = (text for text in plan(*two).advice if text.startswith("It does not fit"))
    ways = told.split("with ")[1].rstrip(".").split("; or ")
    assert all(plan(*two, *way.split()).chosen.memory.fits for way in ways), ways
    assert any("device_map" in way for way in ways), ways


def test_a_device_map_counts_the_memory_of_the_host() -> None:
    def plan(*words: str) -> Plan:
        base = [*HEADLINE, "hardware=h100x1", "hardware.target_placement=device_map"]
        told = [*base, "hardware.micro_batch=1", *words]
        found = plan_of(typed(compose("plan", told), planning.PlanConfig))
        assert isinstance(found, Plan)
        return found

    assert plan().chosen.memory.spilled > 70 * 2**30
    assert "GiB of each host" in headline(plan())
    assert plan("plan.host_gib=256").chosen.memory.fits
    assert not plan("plan.host_gib=64").chosen.memory.fits
    assert headline(plan("plan.host_gib=64")).startswith("Does NOT fit")
    assert any(row[0] == "on the host" for row in components(plan()).rows)
