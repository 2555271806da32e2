"""What must hold on a device that is not a CPU: `pytest -m device`, in a process of its own."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config
from safetensors.torch import load_file
from second_device import NAME, Capturing, Wait, counted, install
from second_device import waits as noted
from test_drafters import ALL, FAMILIES, PROMPTS, STOPS, TRAINABLE, build, random_drafter
from test_engine import deepspeed_config
from test_init_from import conversations
from test_unrolled_attention import heads, past

from drafttrain.__main__ import main
from drafttrain.commands.setup.evaluation import use_graphs_as
from drafttrain.core.chance import SeededChance
from drafttrain.core.losses import TokenLossConfig
from drafttrain.core.ops import graphs, room
from drafttrain.core.ops.graphs import CAPTURES
from drafttrain.core.ops.layers import LayerShape, document_mask
from drafttrain.core.ops.ragged_cache import RaggedCache
from drafttrain.core.ops.unrolled_attention import unrolled_attention
from drafttrain.core.placed_batch import placed
from drafttrain.core.sampling_config import GREEDY, Sampling
from drafttrain.core.types import Sample, weighted_sum
from drafttrain.data.batches import Batches, collate
from drafttrain.decode.adaptive import Adaptive
from drafttrain.decode.autoregressive import autoregressive_decode, autoregressive_decode_batch
from drafttrain.decode.costs import Costs
from drafttrain.decode.loop import Cycle, speculative_decode, speculative_decode_batch
from drafttrain.decode.policy import DynamicTree, Policy, chain, tree_of_widths
from drafttrain.decode.verify import LOSSLESS, Block, Lenience, Rule, Typical
from drafttrain.runtime.signals import StopRequest
from drafttrain.target.model import Target, load_target
from drafttrain.training.engine.build import build_engine
from drafttrain.training.engine.engine import NonFiniteError
from drafttrain.training.loop import Meter, StepChance, StopVote, optimizer_step

pytestmark = pytest.mark.device
DEVICES = ("cpu", NAME)
STEPS = 2
QUICK = ["hardware=cpu", "hardware.threads=1", "trainer.tokens_per_step=64", "trainer.log_every=1"]
QUICK += ["trainer.max_steps=2", "trainer.validation_prompts=2", "trainer.validation_tokens=6"]
TIMES = ("time", "perf/tokens_per_s", "perf/data_wait_share", "perf/break_even")
# The norm decides whether the step is taken; Transformers asks whether positions begin anew, which
# would mean several texts in a row (`find_packed_sequence_indices`).
MUST = {("training/engine/engine.py", "_grad_norm"), ("target/model.py", "features")}
VARIANTS: dict[str, tuple[str, dict[str, Any], set[tuple[str, str]]]] = {
    **{name: (name, {}, set()) for name in TRAINABLE},
    "eagle3_whole": ("eagle3", {"draft_vocab_coverage": 1.0, "own_embedding": True}, set()),
    "eagle3_text": ("eagle3", {"losses": {"hard_cross_entropy": 1.0}}, set()),
    "eagle3_lk": ("eagle3", {"losses": {"lk_hybrid": 1.0}}, set()),
    "eagle3_terms": ("eagle3", {"losses": {"negative_log_acceptance": 1.0, "top_k": 0.5}}, set()),
    "eagle3_until": ("eagle3", {"until_first_miss": True}, set()),
    "dflash_until": ("dflash", {"until_first_miss": True}, set()),
    "redrafter_projected": ("redrafter", {"exit_size": 24}, set()),
    "medusa_shared": ("medusa", {"shared_head": True}, set()),
    "small_lm": ("small_lm", {}, {("drafters/small_lm.py", "_hidden")}),
}


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    install()


@pytest.fixture(scope="module")
def targets(_device: None, tiny_target_dir: Path) -> dict[str, Target]:
    return {d: load_target(model_config(tiny_target_dir), torch.float32, d) for d in DEVICES}


def on_device(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).to(NAME)


REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a sum": lambda ours, theirs: ours + theirs,
    "a sum, in place": lambda ours, theirs: theirs.add_(ours),
    "a sum with a number of the device": lambda ours, theirs: theirs + ours[0],
    "a product": lambda ours, theirs: ours @ theirs,
    "a product with a number": lambda ours, theirs: ours.dot(theirs[0].expand(1)),
    "a choice": lambda ours, theirs: torch.where(ours > 0, ours, theirs),
    "joined": lambda ours, theirs: torch.cat([ours, theirs]),
    "gathered": lambda ours, theirs: ours.gather(0, theirs.long()),
    "embedded": lambda ours, theirs: torch.nn.functional.embedding(theirs.long(), ours[:, None]),
    "written": lambda ours, theirs: ours.index_put_((theirs.long(),), theirs),
    "an index of the device": lambda ours, theirs: theirs[ours.long()],
    "NumPy": lambda ours, theirs: ours.numpy(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_device_refuses_what_cuda_refuses(what: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"same device|can't convert"):
        REFUSED[what](on_device([0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 1.0]))


WAITED: dict[str, tuple[Callable[[torch.Tensor], Any], str | None]] = {
    "item": (lambda ours: ours[0].item(), "_local_scalar_dense"),
    "bool": (lambda ours: bool(ours.any()), "_local_scalar_dense"),
    "a number of the device as an index": (
        lambda ours: ours[ours.long()[0]],
        "_local_scalar_dense",
    ),
    "tolist": (lambda ours: ours.tolist(), "tolist"),
    "nonzero": (lambda ours: ours.nonzero(), "nonzero"),
    "a mask": (lambda ours: ours[ours > 0], "nonzero of a mask"),
    "a mask to write to": (lambda ours: ours.masked_select(ours > 0), "masked_select"),
    "a mask to write rows to": (
        lambda ours: ours.index_put_((ours > 0,), ours[1:].clone()),
        "nonzero of a mask",
    ),
    "cpu": (lambda ours: ours.cpu(), "copy to the host"),
    "a copy to the host": (lambda ours: torch.zeros(3).copy_(ours), "copy to the host"),
    "a list": (lambda ours: torch.tensor([1, 2], device=NAME), "copy from the host"),
    "a blocking copy": (lambda ours: torch.zeros(3).pin_memory().to(NAME), "copy from the host"),
    "a copy of other memory": (
        lambda ours: torch.zeros(3).to(NAME, non_blocking=True),
        "copy from the host",
    ),
    "an index of the host": (
        lambda ours: ours[torch.tensor([0, 2])],
        "copy of an index from the host",
    ),
    "a number written to a place": (
        lambda ours: ours.__setitem__(0, 2.0),
        "copy of a number from the host",
    ),
    "a number written to places": (lambda ours: ours.__setitem__(slice(1), 2.0), None),
    "a number of the host": (lambda ours: ours * torch.tensor(2.0), None),
    "a mask filled with a number": (lambda ours: ours.masked_fill_(ours > 0, 2.0), None),
    "a mask to write a number to": (lambda ours: ours.__setitem__(ours > 0, 2.0), None),
    "a shape": (lambda ours: len(ours.view(3, 1)), None),
    "a copy from pinned memory": (
        lambda ours: torch.zeros(3, pin_memory=True)[1:].to(NAME, non_blocking=True),
        None,
    ),
}


@pytest.mark.parametrize("what", WAITED)
def test_the_device_counts_what_the_host_waits_for(what: str) -> None:
    ours, (act, expected) = on_device([0.0, 1.0, 1.0]), WAITED[what]
    with counted() as waits:
        act(ours)
    assert [wait.what for wait in waits] == ([] if expected is None else [expected])


def test_a_scaled_rotation_sends_its_frequencies_once() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    shape = LayerShape(32, 64, 4, 2, 8, 1e-5, 10000.0, scaling, False, False, False)
    positions = torch.arange(6)[None]
    expected = shape.rotation(positions, torch.float32)
    positions = positions.to(NAME)
    shape.rotation(positions, torch.float32)
    with counted() as waits:
        found = shape.rotation(positions, torch.float32)
    assert not waits
    assert torch.equal(found.cos.cpu(), expected.cos)
    Capturing.capture(lambda: shape.rotation(positions, torch.float32), positions.device)


@pytest.mark.parametrize("width", [8, 20, 264])
def test_attention_leaves_what_flash_refuses_to_another_kernel(width: int) -> None:
    """The widths of heads that it takes are the multiples of 8 up to 256."""
    torch.manual_seed(0)
    drawn = [torch.randn(2, n, 9, width, dtype=torch.bfloat16) for n in (4, 2, 2)]
    mixed = unrolled_attention(drawn[0], [(drawn[1], drawn[2])], None)
    sent = [tensor.to(NAME) for tensor in drawn]
    found = unrolled_attention(sent[0], [(sent[1], sent[2])], None)
    torch.testing.assert_close(found.cpu(), mixed, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("depths", [1, 3])
def test_attention_in_half_precision_has_the_gradient_of_the_cpus(depths: int) -> None:
    document = torch.tensor([[0] * 4 + [1] * 7, [2] * 5 + [3] * 3 + [-1] * 3])
    found: dict[str, list[torch.Tensor]] = {}
    for device in DEVICES:
        mask = document_mask(document.to(device), document)
        drawn = heads(depths, 2, torch.bfloat16)
        given = [tensor.detach().to(device).requires_grad_() for tensor in drawn]
        mixed = unrolled_attention(given[0], past(given), mask)
        found[device] = list(torch.autograd.grad(mixed.square().sum(), given))
    for one, other in zip(found["cpu"], found[NAME], strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=3e-2, atol=3e-2)


def samples() -> list[Sample]:
    """Nine conversations of 5 to 24 random tokens: some share a row, and some leave room there."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index, length in enumerate((24, 17, 9, 20, 5, 12, 23, 11, 6)):
        tokens = torch.randint(6, 97, (length,), generator=generator)
        found.append(Sample(tokens, torch.arange(length) >= 3, index))
    return found


def trained(
    variant: str, target: Target, first_weight: float | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """Metrics and weights after two steps of two micro batches each, and the waits of the steps."""
    family, changes, _ = VARIANTS[variant]
    torch.manual_seed(3)
    drafter = build(family, target.spec, **changes)
    drafter.prepare(torch.arange(target.spec.vocab_size), target.readout)
    if first_weight is not None:
        next(drafter.parameters()).data[0, 0] = first_weight
    engine = build_engine(
        drafter,
        deepspeed_config("none"),
        device=str(target.device),
        dtype=torch.float32,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.01,
        max_grad_norm=0.5,
    )
    batches, meter = Batches(samples(), 64, 2, 0), Meter(engine)
    norms = []
    with counted() as waits:
        for step in range(STEPS):
            group, vote = batches.next_group(), StopVote(engine.ranks, StopRequest())
            chance = StepChance(0, step)
            norms.append(optimizer_step(engine, target, group, chance, 1e-3, meter, vote))
    with counted() as logged:
        metrics = {name: value for name, value in meter.read().items() if name not in TIMES}
    assert [wait.what for wait in logged] == ([] if target.device.type == "cpu" else ["tolist"])
    return (
        metrics | {f"norm {step}": norm for step, norm in enumerate(norms)},
        engine.weights(),
        waits,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_the_cpus_and_the_host_waits_in_it_for_the_norm_alone(
    variant: str, targets: dict[str, Target]
) -> None:
    expected, expected_weights, none = trained(variant, targets["cpu"])
    metrics, weights, waits = trained(variant, targets[NAME])
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert not none
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5)
    assert places(waits) == MUST | VARIANTS[variant][2]
    assert places(waits, times=True)["training/engine/engine.py", "_grad_norm"] == STEPS


def places(waits: Any, times: bool = False) -> Any:
    found: dict[tuple[str, str], int] = {}
    for wait, count in waits.items():
        assert isinstance(wait, Wait)
        found[wait.file, wait.function] = found.get((wait.file, wait.function), 0) + count
    return found if times else set(found)


def test_logits_without_a_number_cost_what_they_cost_on_the_cpu(
    targets: dict[str, Target],
) -> None:
    """Minus infinity where the target's probability is zero, and where it is not."""
    config = build("eagle", targets["cpu"].spec).config
    assert isinstance(config, TokenLossConfig)
    logits = torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf, 1.0, 2.0], [0.5, 1.0, 2.0]])
    probs = torch.tensor([[0.25, 0.0, 0.75], [0.25, 0.0, 0.75], [0.25, 0.0, 0.75]])
    found = []
    for device in DEVICES:
        own, labels = logits.to(device, copy=True), torch.zeros(3, dtype=torch.long).to(device)
        losses, _ = config.token_loss_and_gradient(own, probs.to(device), labels)
        found.append((losses.cpu(), own.cpu()))
    assert torch.isinf(found[0][0]).tolist() == [False, True, False]
    torch.testing.assert_close(found[1], found[0])


def test_the_device_stops_at_losses_that_are_weighted_otherwise(targets: dict[str, Target]) -> None:
    target = targets[NAME]
    drafter = random_drafter("eagle3", targets["cpu"]).to(NAME)
    batch = placed(collate(samples()), target.device)
    features = target.features(batch, drafter.captures)
    terms = drafter(batch, features, StepChance(0, 0))
    weighted_sum(terms).backward(retain_graph=True)
    once = drafter.fc.weight.grad.cpu()
    (3 * weighted_sum(terms)).backward(retain_graph=True)  # computed a second time
    torch.testing.assert_close(drafter.fc.weight.grad.cpu(), 4 * once)
    with pytest.raises(RuntimeError, match="must be weighted by its weights"):
        terms["depth_2"].sum.backward()


def test_a_step_that_is_not_finite_is_refused_on_the_device_too(targets: dict[str, Target]) -> None:
    with pytest.raises(NonFiniteError, match="loss nan"):
        trained("eagle3", targets[NAME], first_weight=torch.nan)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversations(tmp_path_factory.mktemp("data") / "data.jsonl", "It is {}.")


class Place:
    """A folder for each device, and the commands run there with the same arguments."""

    def __init__(self, device: str, folder: Path, target: Path, data: Path) -> None:
        self.device, self.folder = device, folder / device
        self.common = [f"hardware.device={device}", f"model.path={target}"]
        self.jsonl = ["data=jsonl", "data.holdout=2", f"data.path={data}"]

    def train(self, run: str, *arguments: str) -> Path:
        folder = self.folder / run
        # Muon multiplies in bfloat16: there a difference of rounding becomes one of 0.4 %.
        told = ["train", f"run.dir={folder}", *QUICK, *self.common, "optimizer=adamw", *arguments]
        assert main([argument.replace("HERE", str(self.folder)) for argument in told]) == 0
        return folder

    def capture(self, store: str, *arguments: str) -> Path:
        folder = self.folder / store
        told = ["capture", f"store.dir={folder}", *QUICK[:2], *self.common, *self.jsonl]
        assert main([*told, *arguments]) == 0
        return folder


@pytest.fixture
def both(
    tmp_path: Path, tiny_target_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[list[Place]]:
    """The CPU and the second device; what is printed names the one that was asked for."""
    yield [Place(device, tmp_path, tiny_target_dir, data) for device in DEVICES]
    assert f") on {NAME}" in capsys.readouterr().out


def assert_same_runs(expected: Path, found: Path) -> None:
    """The same metrics, those of validation included, and the same weights, to rounding."""
    curves = [
        [{key: value for key, value in row.items() if key not in TIMES} for row in rows_of(run)]
        for run in (expected, found)
    ]
    assert len(curves[0]) >= 3, "two steps and a validation"
    for row, other in zip(*curves, strict=True):
        tables = [torch.tensor(line.pop("rows", [])) for line in (row, other)]
        torch.testing.assert_close(*tables, rtol=1e-3, atol=0.0)
        # The divergence of a target that is not changed yet is zero but for rounding.
        moved = [line.pop("train/loss_target", 0.0) for line in (row, other)]
        assert moved[1] == pytest.approx(moved[0], rel=1e-3, abs=1e-6)
        assert other == (row if "table" in row else pytest.approx(row, rel=1e-3))
    weights = [
        load_file(run / "checkpoints/step-000002/drafter.safetensors") for run in (expected, found)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-5)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_trains_and_validates_as_on_the_cpu(family: str, both: list[Place]) -> None:
    assert_same_runs(*(place.train("run", *place.jsonl, f"drafter={family}") for place in both))


def test_a_drafter_is_adapted_as_on_the_cpu(both: list[Place]) -> None:
    runs = []
    for place in both:
        place.train("run", *place.jsonl, "drafter=eagle3")
        runs.append(place.train("adapted", *place.jsonl, "run.init_from=HERE/run"))
    assert_same_runs(*runs)


@pytest.mark.parametrize(("dtype", "validate"), [("float32", "true"), ("float8", "false")])
def test_a_store_is_captured_and_trained_from_as_on_the_cpu(
    dtype: str, validate: str, both: list[Place]
) -> None:
    runs = []
    for place in both:
        place.capture("store", "store.drafters=[eagle3]", f"store.dtype={dtype}")
        told = ["drafter=eagle3", "data.holdout=2", "features=stored", "features.dir=HERE/store"]
        with counted() as waits:
            runs.append(place.train("run", *told, f"features.validate={validate}"))
        # Batches, and the features that were read ahead, are copied while the host goes on.
        assert not [wait for wait in waits if wait.file == "core/types.py"]
    assert_same_runs(*runs)


def test_a_target_writes_its_own_data_as_on_the_cpu(both: list[Place]) -> None:
    told = ["data=selfgen", "data.num_conversations=12", "data.batch_size=5", "data.holdout=2"]
    told += ["data.max_user_tokens=9", "data.max_answer_tokens=12", "data.cache_dir=HERE/selfgen"]
    runs, written = [], []
    for place in both:
        runs.append(place.train("run", *told, "drafter=medusa"))
        written.append([f.read_text() for f in (place.folder / "selfgen").rglob("*.jsonl")])
    assert written[0]
    assert written[0] == written[1]
    assert_same_runs(*runs)


@pytest.mark.parametrize(
    "told",
    [["eval.policy=static_tree", "eval.tree=[3,2]"], ["eval.temperature=0.8", "eval.batch_size=2"]],
    ids=["greedy_tree", "sampled_batch"],
)
def test_a_run_is_evaluated_as_on_the_cpu(
    told: list[str], both: list[Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device by captured passes."""
    monkeypatch.setitem(CAPTURES, NAME, Capturing.capture)
    monkeypatch.setattr(Capturing, "num_replayed", 0)
    prompts, found = tmp_path / "prompts.jsonl", []
    asked_for = [{"id": str(n), "task": "one", "turns": [f"Say {n}."]} for n in range(2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in asked_for))
    for place, asked in zip(both, ("auto", "true"), strict=True):
        run = place.train("run", *place.jsonl, "drafter=eagle3")
        settings = [f"run.dir={run}", f"hardware.device={place.device}", "hardware.threads=1"]
        settings += ["hardware.dtype=float32", f"hardware.graphs={asked}", "eval.depth=2"]
        settings += ["eval.policy=chain"]
        settings += [f"eval.prompts={prompts}", "eval.max_new_tokens=12", "eval.resamples=100"]
        assert main(["evaluate", *settings, "eval.blocks=1", *told]) == 0
        (file,) = (run / "evaluations").rglob("*.measurements.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        measured = {tuple(line["key"]): line["results"] for line in lines}  # the last one counts
        flat = [result for key in sorted(measured) for result in measured[key]]
        found.append([(each["tokens"], each["stats"]["untrimmed"]) for each in flat])
    assert len(found[0]) >= 6  # plain, with the drafter, and by prompt lookup
    assert found[0] == found[1]
    assert Capturing.num_replayed > 20


def test_graphs_are_refused_where_passes_cannot_be_captured(
    tmp_path: Path, tiny_target_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device in DEVICES:
        common = Place(device, tmp_path, tiny_target_dir, data).common
        told = ["evaluate", "drafter=ngram", *common, *QUICK[1:2], "hardware.graphs=true"]
        told += ["hardware.dtype=float32", f"run.dir={tmp_path / device}"]
        assert main(told) == 2
        assert f"must be auto or false: {device} is not a device" in capsys.readouterr().err


DECODED = {"greedy": GREEDY, "sampled": Sampling(1.0, 0, 0.9), "top_k": Sampling(0.8, 5, 1.0)}
CELLS = {(depth, 1, 8): 0.1 * depth for depth in (1, 2, 3)}
PASSES = Costs([1], [8], {(1, 8): 1.0}, dict.fromkeys(CELLS, 1.0), CELLS, {(1, 8): 0.1})
POLICIES: list[Policy] = [chain(3), tree_of_widths([3, 2]), DynamicTree(3, 2, 6)]
POLICIES += [Adaptive(3, PASSES, (0.3,)), Adaptive(3, PASSES, (0.09,))]  # drafts; hardly drafts
FEW = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]


def settings_of(sampling: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"sampling": DECODED[sampling], "chance": SeededChance(3)}
    return settings | {"max_new_tokens": 8, "stop_tokens": STOPS}


@pytest.mark.parametrize("sampling", DECODED)
def test_plain_decoding_writes_what_it_writes_on_the_cpu(
    sampling: str, targets: dict[str, Target]
) -> None:
    settings, written = settings_of(sampling), []
    for target in targets.values():
        alone = autoregressive_decode(target, FEW[0], **settings)
        together = autoregressive_decode_batch(target, FEW, rows=range(3), **settings)
        written.append([decoded.tokens for decoded in (alone, *together)])
    assert written[0] == written[1]


@pytest.mark.parametrize(
    "policy", POLICIES, ids=["chain", "static", "dynamic", "adaptive", "hardly"]
)
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("family", ALL)
def test_drafts_are_decoded_as_on_the_cpu(
    family: str, sampling: str, policy: Policy, targets: dict[str, Target]
) -> None:
    settings, written = settings_of(sampling) | {"policy": policy}, []
    if isinstance(policy, DynamicTree):
        settings["draft_sampling"] = GREEDY
    for device, target in targets.items():
        drafter = random_drafter(family, targets["cpu"]).to(device)
        alone = speculative_decode(target, drafter, FEW[0], **settings)
        together = speculative_decode_batch(target, drafter, FEW, rows=range(3), **settings)
        written.append([(one.tokens, one.stats.untrimmed) for one in (alone, *together)])
    assert written[0] == written[1]


@pytest.fixture
def capturing(targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(CAPTURES, NAME, Capturing.capture)
    monkeypatch.setattr(graphs, "USES", 1)
    assert targets[NAME].use_graphs() is None
    Capturing.num_captured = Capturing.num_replayed = 0
    yield
    targets[NAME].rooms = None


CACHED = ["dflash", "dspark", "eagle", "eagle3", "hydra_pp", "mtp", "p_eagle", "small_lm"]
CACHED += ["two_model", "early_exit", "ensemble", "dflash2"]


@pytest.mark.parametrize(
    "policy", [POLICIES[0], POLICIES[1], POLICIES[4]], ids=["chain", "tree", "hardly"]
)
@pytest.mark.parametrize("family", CACHED)
def test_captured_passes_write_what_others_write(
    family: str,
    policy: Policy,
    targets: dict[str, Target],
    capturing: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In rooms that become too narrow, used by one text after another."""
    monkeypatch.setattr(room, "NARROWEST", 16)
    settings, written = settings_of("sampled") | {"policy": policy, "max_new_tokens": 20}, []
    for device, target in targets.items():
        drafter = random_drafter(family, targets["cpu"]).to(device)
        if target.rooms is not None:
            drafter.use_graphs(Capturing.capture)
        alone = [speculative_decode(target, drafter, text, **settings) for text in FEW[:2]]
        together = speculative_decode_batch(target, drafter, FEW, rows=range(3), **settings)
        written.append([(one.tokens, one.stats.untrimmed) for one in (*alone, *together)])
    assert written[0] == written[1]
    assert Capturing.num_replayed > Capturing.num_captured > 0


@pytest.mark.parametrize("limit", [("WIDEST", 32), ("MOST_ROWS", 2)], ids=["long", "many"])
def test_texts_too_large_for_graphs_go_on_without(
    limit: tuple[str, int],
    targets: dict[str, Target],
    capturing: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "NARROWEST", 16)
    monkeypatch.setattr(room, *limit)
    settings, written = settings_of("greedy") | {"policy": chain(3), "max_new_tokens": 30}, []
    for device, target in targets.items():
        drafter = random_drafter("eagle3", targets["cpu"]).to(device)
        if target.rooms is not None:
            drafter.use_graphs(Capturing.capture)
        together = speculative_decode_batch(target, drafter, FEW, rows=range(3), **settings)
        written.append([(one.tokens, one.stats.untrimmed) for one in together])
    assert written[0] == written[1]


@pytest.mark.parametrize("family", CACHED[1:4])
def test_the_host_waits_once_in_a_cycle_of_captured_passes(
    family: str, targets: dict[str, Target], capturing: None
) -> None:
    assert_one_wait(family, DECODED["top_k"], chain(4), LOSSLESS, targets)


def test_a_drafter_that_cannot_be_captured_is_told_once(
    targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(function: Any, device: torch.device) -> Any:
        raise RuntimeError("operation not permitted")

    target, told = targets[NAME], list[str]()
    drafter = random_drafter("eagle3", targets["cpu"]).to(NAME)
    with monkeypatch.context() as patch:
        patch.setattr(target, "rooms", room.Rooms(refuses))
        use_graphs_as(target, [drafter], told.append)
    settings = settings_of("greedy") | {"policy": chain(3), "max_new_tokens": 20}
    found = speculative_decode(target, drafter, FEW[0], **settings)
    alone = random_drafter("eagle3", targets["cpu"])
    assert found.tokens == speculative_decode(targets["cpu"], alone, FEW[0], **settings).tokens
    assert told == ["eagle3 drafts without graphs, which takes longer: operation not permitted"]


def test_a_captured_pass_that_asks_the_device_is_refused(
    targets: dict[str, Target], capturing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(self: RaggedCache, places: torch.Tensor) -> torch.Tensor:
        assert bool((places >= 0).all())
        return visible(self, places)

    def stays(self: RaggedCache, places: torch.Tensor) -> torch.Tensor:
        """As at the length that the pass was captured at."""
        return visible(self, 4 + torch.arange(2, device=NAME)[None] if Capturing.now else places)

    visible = RaggedCache.visible
    for wrong, told in (
        (asks, "cannot be captured: operation not permitted"),
        (stays, "answers otherwise by graphs"),
    ):
        monkeypatch.setattr(RaggedCache, "visible", wrong)
        problem = targets[NAME].use_graphs()
        assert problem is not None
        assert told in problem
        assert targets[NAME].rooms is None


def lines_of(waits: Counter[Wait]) -> str:
    """Each line that waited and how often, for messages."""
    return "\n".join(
        f"{count} at {wait.file}:{wait.line} {wait.function}: {wait.what}"
        for wait, count in waits.most_common()
    )


WAITING = [chain(4), tree_of_widths([3, 2, 1]), DynamicTree(4, 3, 8)]


@pytest.mark.parametrize("policy", WAITING, ids=lambda policy: policy.describe())
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("family", ALL)
def test_the_host_waits_once_in_a_cycle(
    family: str, sampling: str, policy: Policy, targets: dict[str, Target]
) -> None:
    assert_one_wait(family, DECODED[sampling], policy, LOSSLESS, targets)


@pytest.mark.parametrize("rule", [Block(), Typical(0.3, 0.6), Lenience(0.5)], ids=lambda r: r.name)
def test_the_host_waits_once_in_a_cycle_under_every_rule(
    rule: Rule, targets: dict[str, Target]
) -> None:
    for policy in WAITING[: 1 if isinstance(rule, Block) else None]:
        assert_one_wait("eagle3", DECODED["top_k"], policy, rule, targets)


def assert_one_wait(
    family: str, sampling: Sampling, policy: Policy, rule: Rule, targets: dict[str, Target]
) -> None:
    """From one verification to the next of the same rows; a cycle in which rows end may wait."""
    target, drafter = targets[NAME], random_drafter(family, targets["cpu"]).to(NAME)
    if target.rooms is not None:
        drafter.use_graphs(Capturing.capture)
    settings: dict[str, Any] = {"sampling": sampling, "chance": SeededChance(3), "rule": rule}
    settings |= {"policy": policy, "max_new_tokens": 14, "stop_tokens": ()}
    if isinstance(policy, DynamicTree):
        settings["draft_sampling"] = GREEDY
    for prompts in (FEW[:1], FEW):  # rows of one length, and of several
        before: Sequence[int] = ()
        num_cycles, found, seen = 0, Counter[Wait](), Counter[Wait]()

        def count(cycle: Cycle) -> None:
            nonlocal before, num_cycles, found, seen
            now = Counter(noted)
            if list(cycle.rows) == before:
                num_cycles, found = num_cycles + 1, found + (now - seen)
            before, seen = list(cycle.rows), now

        names = range(len(prompts))
        noted.clear()
        speculative_decode_batch(target, drafter, prompts, rows=names, record=count, **settings)
        assert num_cycles > 2
        # Prompt lookup reads the committed tokens into its lists: a wait of its own.
        # An ensemble takes the tokens and the shape of each of its four members to the host.
        allowed = num_cycles * {"ngram": 2, "ensemble": 10}.get(family, 1)
        assert found.total() <= allowed, f"in {num_cycles} cycles:\n{lines_of(found)}"


@pytest.mark.parametrize("sampling", DECODED)
def test_the_host_waits_once_for_a_token_of_the_plain_loop(
    sampling: str, targets: dict[str, Target]
) -> None:
    for prompts in (FEW[:1], FEW):
        counts = []
        for limit in (6, 14):
            settings = settings_of(sampling) | {"max_new_tokens": limit, "stop_tokens": ()}
            with counted() as waits:
                autoregressive_decode_batch(
                    targets[NAME], prompts, rows=range(len(prompts)), **settings
                )
            counts.append(waits)
        found = counts[1] - counts[0]
        assert found.total() <= 8, f"for 8 tokens:\n{lines_of(found)}"
