"""THE training loop: one function, for every drafter, engine and source of features.

`engine.losses` calls the drafter's `forward`, through DeepSpeed if that is the engine.
"""

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.chance import Chance, SeededChance
from drafttrain.core.placed_batch import host_of, placed
from drafttrain.core.types import FeatureSource, LossTerm, TargetSpec, changed_part, weighted_sum
from drafttrain.data.batches import Batches, StepGroup
from drafttrain.data.prefetch import Prefetcher
from drafttrain.drafters.base import Drafter, TrainingChance
from drafttrain.runtime.hardware import dtype_name
from drafttrain.runtime.load import SpeedWatch
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import Tell, console, progress, silently
from drafttrain.runtime.tracker import ACCEPTANCE_LENGTH, LOSS, SPEED, TOKENS, Tracker
from drafttrain.runtime.untrusted_input import Count, typed
from drafttrain.training.checkpoint import Checkpoints, TrainState
from drafttrain.training.config import TrainerConfig
from drafttrain.training.engine.engine import Engine, NonFiniteError

# Two multipliers and three shifts with the least known bias for a hash of 32 bits (Wellons, "Hash
# Prospector", 2018). Integers of 32 bits wrap around, on every device alike.
MULTIPLIERS = 0x21F0AAAD, 0x735A2D97
METRIC = ACCEPTANCE_LENGTH  # it defines "best", and is measured in the real decode loop
ERROR = "_error"  # ends the name of a metric's standard error


class StepChance(TrainingChance):
    """Randomness of one optimizer step, keyed by conversation, wherever that is batched."""

    def __init__(self, seed: int, step: int) -> None:
        self.seed, self.step = seed, step

    def uniform_like(
        self, values: Float[Tensor, "batch seq hidden"], document: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq hidden"]:
        """Return uniforms in [0, 1), keyed by conversation; zeros at padding."""
        return uniforms(hash((self.seed, self.step)), document, values.shape[-1]).to(values)

    def decoding(self) -> Chance:
        """Return the chance of this step alone."""
        return SeededChance(hash((self.seed, self.step)))


def resumed(
    engine: Engine,
    batches: Batches | Prefetcher,
    checkpoints: Checkpoints,
    spec: TargetSpec,
    metric: str = METRIC,
    yardstick: dict[str, int] | None = None,
    say: Tell = silently,
) -> TrainState:
    """Load the latest checkpoint into engine and batches, and return its state; fresh without one.

    spec: of the target. yardstick: what `metric` is measured by. say: is told what differs from
    before. Nothing is written. ValueError where the run cannot be resumed.
    """
    now = {"metric": metric, "yardstick": yardstick, "dtype": dtype_name(engine.dtype)}
    fresh = TrainState(0, 0, batches.state_dict(), None, spec.fingerprint, now)
    state = checkpoints.resume(engine) or fresh
    before = {key: state.extra.get(key) for key in now}
    if before["metric"] != metric:
        raise ValueError(
            f"a resumed run must be validated as before, by {before['metric']}, got {metric}: set "
            f"features.validate={str(before['metric'] == METRIC).lower()}, or start another run by "
            "run.name=ANOTHER_NAME"
        )
    if state.fingerprint != spec.fingerprint:
        raise ValueError(
            f"a resumed run must have the target of its checkpoint, got {spec.name}, of which "
            f"{changed_part(state.fingerprint, spec.fingerprint)}; point model.path (and "
            "model.adapter) at the old one, or start another run from this one's weights by "
            f"run.name=ANOTHER_NAME run.init_from={checkpoints.folder.parent}"
        )
    batches.load_state_dict(state.data)
    if before["dtype"] != now["dtype"]:
        say(
            f"products in training are {now['dtype']} from here on, and were {before['dtype']} "
            f"until step {state.step}: see hardware.train_dtype"
        )
    if before["yardstick"] != yardstick:
        say(
            f"validation is by {_listed(yardstick)}, and was by {_listed(before['yardstick'])} "
            f"until step {state.step}: the best checkpoint is chosen anew from here on"
        )
        state = replace(state, best_metric=None)
    return replace(state, extra=state.extra | now)


def _listed(yardstick: dict[str, int] | None) -> str:
    return ", ".join(f"{name} {number}" for name, number in (yardstick or {}).items())


def train(
    engine: Engine,
    target: FeatureSource,
    batches: Batches | Prefetcher,
    checkpoints: Checkpoints,
    tracker: Tracker,
    config: TrainerConfig,
    validate: Callable[[Tell], dict[str, float] | None],
    seed: int,
    stop: StopRequest,
    metric: str = METRIC,
    state: TrainState | None = None,
) -> TrainState:
    """Train the engine's drafter on the features of `target`, from what `resumed` has loaded.

    Losses are sums over the trained positions of the whole optimizer step, divided once by their
    number: the loss curve depends on neither ranks nor micro batches. `validate` runs on every rank
    and returns metrics, among them `metric` and, where it is known, its standard error, or None if
    `stop` was requested meanwhile; what it tells is shown beside the bar. state: that of `resumed`,
    which is called here where none is given. Raises NonFiniteError, with the step not taken, and
    Stopped, with the last step saved, if any rank was asked to stop.
    """
    state = state or resumed(engine, batches, checkpoints, target.spec, metric)
    meter = Meter(engine)
    meter.load_state_dict(state.extra.get("meter", {}))
    saved = state.step
    agreement = StopVote(engine.ranks, stop)
    watch = SpeedWatch("training", console.print if engine.is_main else silently)
    with (
        progress("train", max(config.max_steps, saved), saved, show=engine.is_main) as tick,
        stop.deferred(meanwhile="this step is saved first"),
        engine.ranks.naming_a_loss(),
    ):
        while True:
            # The end validates and saves as well; a resumed run may be past it already.
            last = state.step >= config.max_steps
            stopping = agreement.to_stop()
            improved = False
            early = state.step == config.max_steps // 10 >= 10  # which tells what is ahead
            regular = state.step > 0 and state.step % config.validate_every == 0
            if not stopping and (last or early or regular):
                metrics = validate(partial(tick, 0))
                stopping = metrics is None  # validation was interrupted; a resumed run repeats it
                if metrics is not None:
                    tracker.log(state.step, metrics)
                    now, error = metrics[metric], metrics.get(f"{metric}{ERROR}", 0.0)
                    # Of two that the prompts cannot tell apart, the one trained longer is better.
                    # The highest is kept too, or a slow decline would pass for no difference.
                    best = state.best_metric
                    highest = None if best is None else state.extra.get("highest")
                    improved = highest is None or now >= highest - error
                    # A finished run that is resumed measures its best weights again.
                    if improved and best is not None and state.step == saved:
                        improved = not checkpoints.resumed_best(engine)
                    if improved:
                        highest = now if highest is None else max(now, highest)
                        extra = state.extra | {"highest": highest}
                        state = replace(state, best_metric=now, extra=extra)
                meter.forget_time()
            due = last or stopping or state.step % config.save_every == 0
            if improved or (due and state.step != saved):
                tick(0, "saving a checkpoint")
                state = replace(state, extra=state.extra | {"meter": meter.state_dict()})
                checkpoints.save(engine, state, best=improved)
                saved = state.step
                meter.forget_time()
            if stopping or last:
                engine.ranks.part()
            if stopping:
                raise stop.stopped(
                    f" after step {state.step} of {config.max_steps}, which is saved; resume with "
                    "run.resume=true"
                )
            if last:
                return state
            asked = time.monotonic()
            group = batches.next_group()
            meter.wait_s += time.monotonic() - asked
            lr = config.lr_at(state.step)
            chance = StepChance(seed, state.step)
            seed_generators(seed, state.step, engine.rank)
            try:
                grad_norm = optimizer_step(engine, target, group, chance, lr, meter, agreement)
            except NonFiniteError as error:
                tracker.log(state.step + 1, {LOSS: math.nan, "train/lr": lr})
                raise NonFiniteError(
                    f"{error}. Its conversations, counted from 0 among the usable ones of data: "
                    f"{', '.join(map(str, group.documents))}"
                ) from error
            state = replace(
                state,
                step=state.step + 1,
                tokens=state.tokens + group.tokens,
                data=batches.state_dict(),
            )
            if state.step % config.log_every == 0 or state.step >= config.max_steps:
                told = {"train/lr": lr, "train/grad_norm": grad_norm, TOKENS: state.tokens}
                watch.add(meter.tokens, meter.busy_s)
                metrics = meter.read() | told
                tracker.log(state.step, metrics)
                meter.note = f"loss {metrics[LOSS]:.3f}  {metrics[SPEED]:.0f} tokens/s"
            tick(1, meter.note)


def optimizer_step(
    engine: Engine,
    target: FeatureSource,
    group: StepGroup,
    chance: TrainingChance,
    lr: float,
    meter: "Meter",
    agreement: "StopVote",
) -> float:
    """Accumulate the micro batches of one step and take the step; return the gradient's norm."""
    drafter = engine.module
    assert isinstance(drafter, Drafter)
    batches = [placed(batch, engine.device) for batch in group.batches]
    loss_tokens = group.loss_tokens
    if (source := drafter.text_source) is not None:
        writer = engine.whole_module()
        with torch.no_grad(), engine.precision:
            batches = [source.rewrite(writer, batch, chance) for batch in batches]
        own = torch.stack([host_of(batch).loss_mask.sum() for batch in batches]).sum()
        loss_tokens = int(engine.ranks.sum_over_ranks(own))
    denominator = max(loss_tokens, 1)
    for index, batch in enumerate(batches):
        if group.features:  # read ahead
            features = group.features[index].to(engine.device)
        else:
            features = target.features(batch, drafter.captures)
        losses = engine.losses(batch, features, chance)
        engine.backward(weighted_sum(losses) / denominator, last=index == len(batches) - 1)
        for name, term in losses.items():
            meter.add(name, term)
    meter.steps(loss_tokens, group.tokens)
    agreement.ask()
    return engine.step(lr)


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed every global generator for one step, so that a resumed run draws the same numbers.

    Our own code does not draw from them; dropout in a drafter, or a library, may.
    """
    words = np.random.SeedSequence([seed, step, rank]).generate_state(2)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    np.random.seed(words[0])
    random.seed(int(words[1]))


class StopVote:
    """A vote on whether any rank was asked to stop, known to all ranks after the same step.

    It runs while the step does, on the CPU: no rank waits for it.
    """

    def __init__(self, ranks: Ranks, stop: StopRequest) -> None:
        self.ranks, self.stop = ranks, stop
        self._answer: Callable[[], int] = lambda: 0

    def ask(self) -> None:
        """Tell the other ranks whether this one was asked to stop."""
        self._answer = self.ranks.sum_soon(int(self.stop.asked))

    def to_stop(self) -> bool:
        """Return the result of the last vote."""
        return self.stop.asked if self.ranks.world_size == 1 else self._answer() > 0


@dataclass(frozen=True)
class MeterState:
    """The sums of a meter in a checkpoint: by rank, by term, four each."""

    names: list[str]
    sums: list[list[tuple[float, float, float, float]]]
    weights: dict[str, float]
    judged: list[str]
    loss_tokens: Count
    tokens: Count
    busy_s: float
    wait_s: float


class Meter:
    """Sums of loss terms since the last metrics were read, reduced over ranks when read."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.note = ""
        self._reset()

    def _reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weights: dict[str, float] = {}
        self.judged: set[str] = set()  # terms that count correct choices
        self.loss_tokens = self.tokens = 0
        self.busy_s = self.wait_s = 0.0
        self.forget_time()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of every rank separately: adding them up now would round differently."""
        names, ranks = sorted(self.sums), self.engine.ranks
        table = torch.zeros(
            ranks.world_size, len(names), 4, dtype=torch.float64, device=ranks.device
        )
        for place, name in enumerate(names):
            table[ranks.rank, place] = self.sums[name]
        if names:
            table = ranks.sum_over_ranks(table)
        return {
            "names": names,
            "sums": table.tolist(),
            "weights": self.weights,
            "judged": sorted(self.judged),
            "loss_tokens": self.loss_tokens,
            "tokens": self.tokens,
            "busy_s": self.busy_s,
            "wait_s": self.wait_s,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the sums of `state`, if any; if the number of ranks changed, on rank 0."""
        if not state:
            return
        saved = typed(MeterState, json.dumps(state), "a checkpoint's sums of losses")
        unknown = set(saved.names) - set(saved.weights)
        if not saved.sums or unknown or any(len(row) != len(saved.names) for row in saved.sums):
            raise ValueError("a checkpoint's sums of losses must be of each of its names, by rank")
        table = torch.tensor(saved.sums, dtype=torch.float64, device=self.engine.device)
        if len(table) == self.engine.world_size:
            own = table[self.engine.rank]
        else:
            own = table.sum(0) if self.engine.is_main else torch.zeros_like(table[0])
        self.sums = dict(zip(saved.names, own, strict=True))
        self.weights, self.judged = dict(saved.weights), set(saved.judged)
        self.loss_tokens, self.tokens = saved.loss_tokens, saved.tokens
        self.busy_s, self.wait_s = saved.busy_s, saved.wait_s

    def forget_time(self) -> None:
        """Exclude the time since the last step (validation, saving) from tokens/s."""
        self.since = time.monotonic()

    def add(self, name: str, term: LossTerm) -> None:
        """Add one term of one micro batch."""
        if term.correct is not None:
            self.judged.add(name)
        zero = torch.zeros((), device=term.sum.device)
        values = [term.sum.detach(), term.count, term.correct, term.uncovered]
        row = torch.stack([(zero if v is None else v).double() for v in values])
        self.sums[name] = self.sums.get(name, torch.zeros_like(row)) + row
        self.weights[name] = term.weight

    def steps(self, loss_tokens: int, tokens: int) -> None:
        """Count one optimizer step (numbers over all ranks)."""
        self.loss_tokens += loss_tokens
        self.tokens += tokens
        now = time.monotonic()
        self.busy_s += now - self.since
        self.since = now

    def read(self) -> dict[str, float]:
        """Return the metrics since the last reading, and reset the sums."""
        names = sorted(self.sums)
        rows = torch.stack([self.sums[name] for name in names])
        positions = max(self.loss_tokens, 1)
        metrics: dict[str, float] = {}
        loss, uncovered, counted = 0.0, 0.0, 0.0
        for name, (total, count, correct, left_out) in zip(
            names, self.engine.ranks.sum_over_ranks(rows).tolist(), strict=True
        ):
            loss += self.weights[name] * total
            uncovered, counted = uncovered + left_out, counted + count
            metrics[f"{LOSS}_{name}"] = total / positions
            if name in self.judged:
                metrics[f"train/accuracy_{name}"] = correct / max(count, 1)
        metrics[LOSS] = loss / positions
        if uncovered:
            metrics["train/uncovered"] = uncovered / max(counted, 1)
        busy_s = max(self.busy_s, 1e-9)
        metrics[SPEED] = self.tokens / busy_s
        metrics["perf/data_wait_share"] = self.wait_s / busy_s
        self._reset()
        return metrics


def uniforms(
    seed: int, document: Int[Tensor, "batch seq"], width: int
) -> Float[Tensor, "batch seq width"]:
    """Return uniforms in [0, 1), keyed by seed, conversation and place in it; zeros at padding."""
    places = torch.arange(document.shape[1], device=document.device)
    begins = document != document.roll(1, dims=1)
    begins[:, 0] = True
    first = torch.where(begins, places, 0).cummax(dim=1).values
    tokens = _hashed(_hashed(document.int() ^ (seed & 0x7FFFFFFF)) + (places - first).int())
    channels = _hashed(torch.arange(width, dtype=torch.int32, device=document.device))
    bits = _hashed(tokens[..., None] ^ channels) >> 8
    drawn = bits.float().mul_(2.0**-24).add_(0.5)
    return drawn.mul_((document >= 0)[..., None])


def _hashed(values: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    mixed = _folded(values, 16).mul_(MULTIPLIERS[0])
    mixed = _folded(mixed, 15).mul_(MULTIPLIERS[1])
    return _folded(mixed, 15)


def _folded(values: Tensor, shift: int) -> Tensor:
    # A shift to the right repeats the sign; the mask makes it a shift of plain bits.
    shifted = (values >> shift).bitwise_and_((1 << (32 - shift)) - 1)
    return shifted.bitwise_xor_(values)
