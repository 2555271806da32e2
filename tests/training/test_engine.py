"""Every engine, on any number of ranks, takes the same steps for the same tokens.

Run as a script under torchrun, this file trains on its ranks and writes the losses of rank 0.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import dealt
from paths import PYTHONPATH, ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.config.groups import content_of
from drafttrain.core.types import Losses, LossTerm, weighted_sum
from drafttrain.runtime.deepspeed import import_deepspeed
from drafttrain.runtime.ranks import Ranks
from drafttrain.training.engine.build import build_engine
from drafttrain.training.engine.config import ADAMW, DeepSpeedConfig, OptimizerConfig
from drafttrain.training.engine.engine import Engine, NonFiniteError
from drafttrain.training.engine.optimizer import balanced

ENGINES = ["none", "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
AVERAGED = [f"{name}+average" for name in ENGINES]
MUON = OptimizerConfig(name="muon", muon=True, momentum=0.9)
VOCAB, STEPS = 23, 5


class Model(nn.Module):
    """Predicts the next token and, like a drafter, gives sums over masked positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 12)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.mix = nn.Linear(12, 13)
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, VOCAB, bias=False)
        self.idle = nn.Linear(3, 2)  # trained by name, but no loss reaches it unless awake
        self.awake = False
        self.register_buffer("ids", torch.arange(VOCAB))

    def forward(self, tokens: Tensor, mask: Tensor) -> Losses:
        hidden = torch.tanh(self.frozen(self.embedding(tokens)))
        logits = self.head(self.norm(self.mix(hidden)))[:, :-1].float()
        keep = mask[:, 1:]
        loss = nn.functional.cross_entropy(logits[keep], tokens[:, 1:][keep], reduction="sum")
        size = logits[keep].square().sum()
        if self.awake:
            size = size + self.idle(torch.ones(3)).square().sum()
        return {"ce": LossTerm(1.0, loss, keep.sum()), "size": LossTerm(0.01, size, keep.sum())}


def deepspeed_config(name: str) -> DeepSpeedConfig:
    values = content_of("deepspeed", name)
    if name == "zero3_offload":  # the other keeps parameters as small as ours whole
        values["config"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return DeepSpeedConfig(**values)


def make_engine(
    name: str,
    max_grad_norm: float = 0.8,
    dtype: torch.dtype = torch.float32,
    module: nn.Module | None = None,
) -> Engine:
    """Return an engine by its name in ENGINES, with what follows a plus: `none+muon+average`."""
    name, *others = name.split("+")
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # other weights on other ranks: unified
    module = Model() if module is None else module
    module.awake = "awake" in others
    return build_engine(
        module,
        deepspeed_config(name),
        device="cpu",
        dtype=dtype,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        max_grad_norm=max_grad_norm,
        optimizer=MUON if "muon" in others else ADAMW,
        ema_decay=0.5 if "average" in others else 0.0,
    )


def rows_of(step: int) -> tuple[Tensor, Tensor]:
    """Eight rows of which few or many positions count, some rows with none at all."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCAB, (8, 1), generator=generator)
    tokens = (start + 5 * torch.arange(9)) % VOCAB  # a rule that can be learnt
    share = torch.rand(8, 1, generator=generator)
    mask = torch.rand(8, 9, generator=generator) < share
    mask[step % 8] = False
    return tokens, mask


def train(
    engine: Engine, micro_batch: int, steps: int = STEPS, first: int = 0
) -> list[list[float]]:
    """Train, each rank on its share of the rows; return loss and gradient norm of each step."""
    curve = []
    for step in range(first, first + steps):
        tokens, mask = rows_of(step)
        denominator = mask[:, 1:].sum()
        mine = range(engine.rank, 8, engine.world_size)
        parts = [list(mine)[i : i + micro_batch] for i in range(0, len(mine), micro_batch)]
        total = torch.zeros(())
        for number, rows in enumerate(parts):
            loss = weighted_sum(engine.losses(tokens[rows], mask[rows])) / denominator
            engine.backward(loss, last=number == len(parts) - 1)
            total += loss.detach()
        norm = engine.step(lr=0.02)
        curve.append([engine.ranks.sum_over_ranks(total).item(), norm])
    return curve


def weights(engine: Engine) -> dict[str, Tensor]:
    return engine.weights()


def assert_same_curve(curve: list[list[float]], expected: list[list[float]], rel: float) -> None:
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=rel, atol=0)


def torchrun(
    engines: list[str], micro_batch: int, output: Path, ranks: int = 2
) -> dict[str, list[list[float]]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), __file__, ",".join(engines), str(micro_batch)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [*command, str(output)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


def test_the_curve_falls_and_clipping_is_at_work() -> None:
    curve = train(make_engine("none"), micro_batch=8, steps=25)
    assert curve[-1][0] < 0.8 * curve[0][0]
    assert any(norm > 0.8 for _, norm in curve)


@pytest.mark.parametrize("name", ENGINES)
def test_micro_batches_of_any_size_give_the_same_steps(name: str) -> None:
    expected = train(make_engine("none"), micro_batch=8)
    for micro_batch in (1, 3, 8):
        # float32 sums in another order; the same micro batches under DeepSpeed differ as little.
        assert_same_curve(train(make_engine(name), micro_batch), expected, rel=2e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_without_clipping_the_norm_is_only_reported(name: str) -> None:
    unclipped = train(make_engine(name, max_grad_norm=0.0), 8)
    assert_same_curve(unclipped, train(make_engine("none", max_grad_norm=1e9), 8), rel=2e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_a_micro_batch_with_nothing_to_learn_counts_for_nothing(name: str) -> None:
    expected = train(make_engine("none"), 8, steps=1)
    engine = make_engine(name)
    tokens, mask = rows_of(0)
    engine.losses(tokens, mask & False)
    engine.backward(torch.zeros(()), last=False)  # a constant: no gradient flows from it
    engine.backward(weighted_sum(engine.losses(tokens, mask)) / mask[:, 1:].sum(), last=False)
    engine.losses(tokens, mask & False)
    engine.backward(torch.zeros(()), last=True)
    assert engine.step(lr=0.02) == pytest.approx(expected[0][1], rel=2e-6)


@pytest.mark.parametrize("name", ENGINES[1:])
def test_what_only_some_micro_batches_reach_is_updated_by_those(name: str) -> None:
    plain, engine = make_engine("none"), make_engine(name)
    for step, awake in enumerate([(False, True), (True, False), (False, False), (False, True)]):
        tokens, mask = rows_of(step)
        for each in (plain, engine):
            for number, rows in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
                each.module.awake = awake[number]
                loss = weighted_sum(each.losses(tokens[rows], mask[rows])) / 20
                each.backward(loss, last=number == 1)
        assert engine.step(lr=0.02) == pytest.approx(plain.step(lr=0.02), rel=2e-6)
        for key, value in plain.weights().items():
            torch.testing.assert_close(engine.weights()[key], value, rtol=1e-5, atol=1e-6)


def test_sharding_a_drafter_leaves_torch_as_it_is_for_the_target() -> None:
    before = nn.functional.linear
    train(make_engine("zero3"), 8, steps=1)
    assert nn.functional.linear is before


@pytest.mark.parametrize("name", ENGINES[1:])
def test_bfloat16_computes_low_keeps_float32_weights_and_is_the_same_under_deepspeed(
    name: str,
) -> None:
    plain = make_engine("none", dtype=torch.bfloat16)
    expected = train(plain, 3)
    engine = make_engine(name, dtype=torch.bfloat16)
    assert_same_curve(train(engine, 3), expected, rel=2e-3)
    assert_same_curve(train(make_engine("none"), 3), expected, rel=2e-2)
    assert train(make_engine("none"), 3) != expected  # autocast did something
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())


def test_two_ranks_take_the_steps_of_one_and_share_the_matrices_of_muon(tmp_path: Path) -> None:
    muon = ["none+muon+awake", "none+muon+awake+average"]
    curves = torchrun(
        ["none", *muon], 2, tmp_path / "curve.json"
    )  # which saves and resumes as well
    assert_same_curve(curves["none"], train(make_engine("none"), micro_batch=8), rel=2e-6)
    expected = train(make_engine(muon[0]), micro_batch=8)
    for name in muon:
        assert curves[name] == curves[f"{name}, each rank all"], "to the bit"
        assert_same_curve(curves[name], expected, rel=2e-3)  # of products in bfloat16


def test_matrices_are_shared_by_their_cost() -> None:
    assert balanced([1, 5, 2, 5, 1], 2) == [1, 0, 0, 1, 1]
    assert balanced([3, 2], 4) == [0, 1], "ranks may have none"
    assert balanced([], 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_engine_on_several_ranks_takes_the_steps_of_one(ranks: int, tmp_path: Path) -> None:
    expected = train(make_engine("none"), micro_batch=8)
    # One row per micro batch: on some steps a rank has a micro batch without a position to learn.
    micro_batch = 1 if ranks == 2 else 3
    names = [*ENGINES, *AVERAGED]
    curves = torchrun(names, micro_batch, tmp_path / "curve.json", ranks)
    assert list(curves) == names
    for curve in curves.values():
        assert_same_curve(curve, expected, rel=2e-6)


@pytest.mark.parametrize(("name", "bad"), dealt(ENGINES, [float("nan"), float("inf")]))
def test_a_loss_that_is_not_finite_changes_nothing(name: str, bad: float, tmp_path: Path) -> None:
    engine, other = make_engine(name), make_engine(name)
    train(engine, 4, steps=2)
    train(other, 4, steps=2)
    before = weights(engine)
    tokens, mask = rows_of(2)
    loss = weighted_sum(engine.losses(tokens, mask))
    engine.backward(loss / 20, last=False)
    # Only the value is bad, its gradient is not: it still must not pass.
    engine.backward(weighted_sum(engine.losses(tokens, mask)) + bad, last=True)
    with pytest.raises(NonFiniteError, match=r"optimizer step 2 must .* finite .* trainer\.lr"):
        engine.step(lr=0.02)
    for key, value in weights(engine).items():
        assert torch.equal(value, before[key]), key
    # As if it had never been seen: the steps that follow are those of an engine that never saw it.
    assert train(engine, 4, steps=3, first=2) == train(other, 4, steps=3, first=2)


@pytest.mark.parametrize("name", ENGINES)
def test_a_gradient_that_is_not_finite_changes_nothing(name: str) -> None:
    engine = make_engine(name)
    before = weights(engine)
    tokens, mask = rows_of(0)
    finite = weighted_sum(engine.losses(tokens, mask))
    root = (finite - finite.detach()).sqrt()
    engine.backward(finite + root, last=True)  # sqrt at 0: value 0, gradient inf
    with pytest.raises(NonFiniteError, match=r"loss [0-9.]+ and gradient norm (inf|nan)"):
        engine.step(lr=0.02)
    for key, value in weights(engine).items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize(
    ("first", "second"),
    [pair for name in ENGINES for pair in ((name, name), (name, "none"), ("none", name))][2:]
    + [(name, name) for name in ("none+muon", "none+muon+average")]
    + [pair for name in AVERAGED for pair in ((name, name), (name, "none+average"))],
)
def test_a_saved_state_goes_on_in_any_engine(first: str, second: str, tmp_path: Path) -> None:
    saving = make_engine(first)
    train(saving, 4, steps=3)
    saving.save(tmp_path)
    kept = weights(saving)
    expected = train(saving, 4, steps=3, first=3)
    loading = make_engine(second)
    loading.load_weights(kept)
    loading.load(tmp_path)
    assert loading.steps_taken == 3
    curve = train(loading, 4, steps=3, first=3)
    if first == second:
        assert curve == expected  # bitwise
    assert_same_curve(curve, expected, rel=2e-6)


def test_the_state_of_another_drafter_is_refused_by_name(tmp_path: Path) -> None:
    make_engine("none").save(tmp_path)
    engine = make_engine("none")
    del engine._trainable["mix.weight"]
    with pytest.raises(
        ValueError, match=r"optimizer\.safetensors must hold .*mix\.weight is unknown"
    ):
        engine.load(tmp_path)


@pytest.mark.parametrize("name", AVERAGED)
def test_the_result_is_an_average_of_the_weights_after_each_step(name: str) -> None:
    engine, plain = make_engine(name), make_engine("none")
    averages: dict[str, Tensor] = {}
    for key, value in plain.weights().items():  # before the first step, the weights themselves
        assert torch.equal(engine.weights()[key], value)
    for step in range(12):
        train(engine, 8, steps=1, first=step)
        train(plain, 8, steps=1, first=step)
        kept = min(0.5, step / (step + 9))
        for key, value in plain.weights().items():
            averages[key] = kept * averages.get(key, 0) + (1 - kept) * value
    for key, value in engine.weights().items():
        torch.testing.assert_close(value, averages[key].to(value.dtype), rtol=1e-5, atol=1e-6)
    copied = engine.copy_of_module().state_dict()
    assert all(torch.equal(copied[key], value) for key, value in engine.weights().items())
    assert not torch.allclose(averages["mix.weight"], plain.weights()["mix.weight"], atol=1e-4)


def test_muon_updates_the_matrices_within_layers_and_adamw_the_rest() -> None:
    engine, plain = make_engine("none+muon"), make_engine("none")
    before = engine.weights()
    own = nn.Parameter(before["mix.weight"].clone())
    muon = torch.optim.Muon(
        [own], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    engine.module.mix.weight.register_post_accumulate_grad_hook(
        lambda weight: setattr(own, "grad", weight.grad.clone())
    )
    (curve,), _ = train(engine, 8, steps=1), train(plain, 8, steps=1)
    assert own.grad is not None
    own.grad *= min(1.0, 0.8 / (curve[1] + 1e-6))  # as clipped
    muon.step()
    after, others = engine.weights(), plain.weights()
    torch.testing.assert_close(after["mix.weight"], own.data)
    assert not torch.equal(after["mix.weight"], others["mix.weight"])
    for key in set(after) - {"mix.weight", "idle.weight"}:
        assert torch.equal(after[key], others[key]), key


def test_muon_learns_and_two_kinds_of_moments_are_saved(tmp_path: Path) -> None:
    engine = make_engine("none+muon")
    curve = train(engine, 8, steps=25)
    assert curve[-1][0] < 0.8 * curve[0][0]
    engine.save(tmp_path)
    saved = set(load_file(tmp_path / "optimizer.safetensors"))
    assert {"momentum_buffer.mix.weight", "exp_avg.head.weight", "exp_avg_sq.mix.bias"} <= saved
    assert "exp_avg.mix.weight" not in saved
    with pytest.raises(ValueError, match=r"settings that the run was started with"):
        make_engine("none").load(tmp_path)


def test_muon_needs_no_vectors_beside_its_matrices(tmp_path: Path) -> None:
    def engine() -> Engine:
        torch.manual_seed(0)
        return make_engine("none+muon", module=nn.Linear(4, 4, bias=False))

    first, again = engine(), engine()
    for _ in range(2):
        first.backward(first.module(torch.ones(2, 4)).square().sum(), last=True)
        first.step(0.1)
    assert not torch.equal(first.module.weight, again.module.weight)
    first.save(tmp_path)
    again.load(tmp_path)
    moments = [e._moment(e.module.weight, "momentum_buffer") for e in (first, again)]
    assert torch.equal(*moments)
    assert again.steps_taken == 2


def test_muon_is_refused_where_matrices_are_cut() -> None:
    with pytest.raises(ValueError, match=r"optimizer must be adamw with deepspeed=zero2"):
        make_engine("zero2+muon")


@pytest.mark.parametrize("key", ["gradient_clipping", "bf16", "train_batch_size", "optimizer"])
def test_a_key_of_deepspeeds_that_follows_from_ours_is_refused_with_ours(key: str) -> None:
    with pytest.raises(ValueError, match=rf"deepspeed\.config\.{key} must not be set.* use \w+"):
        DeepSpeedConfig(name="mine", enabled=True, config={key: 1})


@pytest.mark.parametrize(
    ("enabled", "zero", "message"),
    [
        (True, {"stage": 4}, r"stage must be 0, 1, 2 or 3, got 4"),
        (True, {"offload_optimizer": {"device": "cpu"}}, r"needs stage 1 or above, got 0"),
        (True, {"stage": 2, "offload_param": {"device": "cpu"}}, r"offload_param needs stage 3"),
        (True, {"stage": 3, "offload_param": {"device": "nvme"}}, r"must be none or cpu, got nvme"),
        (True, {"stage": 2, "zenflow": {"topk_ratio": 0.1}}, r"zenflow must not be set"),
        (False, {"stage": 1}, r"deepspeed\.enabled must be true"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_key(
    enabled: bool, zero: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedConfig(name="mine", enabled=enabled, config={"zero_optimization": zero})


def test_float16_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"hardware\.train_dtype must be .* or bfloat16, got float16"
    ):
        make_engine("none", dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "told"), [("cuda:1", "1"), ("cpu", "0")])
def test_deepspeed_is_told_the_gpu_that_the_user_names(
    device: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")  # as a launcher of one process says
    import_deepspeed(Ranks(0, 0, 1, torch.device(device)))
    assert os.environ["LOCAL_RANK"] == told


@pytest.mark.slow
def test_plain_torch_does_not_import_deepspeed_and_deepspeed_is_quiet() -> None:
    script = (
        "import sys; import test_engine as t\n"
        "t.train(t.make_engine('none'), 4); assert 'deepspeed' not in sys.modules\n"
        "t.train(t.make_engine('zero1'), 4); assert 'deepspeed' in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def main() -> None:
    """Train on this rank with one engine after another; rank 0 writes the curves."""
    names, micro_batch, output = sys.argv[1:]
    curves = {}
    for name in names.split(","):
        engine = make_engine(name)
        curves[name] = train(engine, int(micro_batch))
        if "muon" in name:
            shared, alone = engine._rank_of, make_engine(name)
            assert sorted(shared.values()) == [0, 1]
            alone._rank_of = {}
            curves[f"{name}, each rank all"] = train(alone, int(micro_batch))
        folder = Path(output).parent / name
        folder.mkdir(exist_ok=True)
        engine.save(folder)
        weights = engine.weights()
        if engine.is_main:
            save_file(weights, folder / "weights.safetensors")
        engine.ranks.barrier()
        resumed = make_engine(name)
        resumed.load_weights(load_file(folder / "weights.safetensors"))
        resumed.load(folder)
        goes_on, expected = (train(e, 4, steps=2, first=STEPS) for e in (resumed, engine))
        assert goes_on == expected, name  # bitwise
    if engine.is_main:
        Path(output).write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
