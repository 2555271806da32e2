"""The cost and benefit of a drafter in serving: memory, and speedup by batch from the roofline."""

from dataclasses import dataclass, replace

from drafttrain.plan.config import PlanSettings
from drafttrain.plan.job import Job
from drafttrain.plan.shapes import Shape
from drafttrain.plan.trace import DraftCost, DrafterCost, Pass
from drafttrain.target.placement import gpus_to_serve

DEEPEST = 8  # of the chains that are compared for the best depth
LARGEST_BATCH = 4096
FILLED = 0.9  # of the memory: what engines fill with weights and cache; the rest is work space


@dataclass(frozen=True)
class Serving:
    """Speculation at one batch size, with the seconds of a cycle."""

    batch: int
    plain_s: float
    draft_s: float
    verify_s: float
    bound: str  # what verification waits for: memory or arithmetic
    acceptance_length: float
    predicted_speedup: float  # at the depth that was asked for
    best_depth: int  # 0: do not speculate
    best_predicted_speedup: float


@dataclass(frozen=True)
class Host:
    """Target and drafter as they are served, over `spread` accelerators: bytes and operations."""

    job: Job
    context: int
    spread: int

    @property
    def rates(self) -> tuple[float, float]:
        """Operations and bytes per second, of all accelerators together."""
        chip, speed = self.job.chip, self.job.chip.flops[self.job.load.dtype]
        return (
            self.spread * speed * chip.serving_efficiency,
            self.spread * chip.bandwidth * chip.bandwidth_efficiency,
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of both models' weights."""
        return self.job.target_bytes + self.drafter_bytes

    @property
    def draft_width(self) -> float:
        """Bytes of a number of the drafter."""
        return self.job.parts.served_width or self.job.load.width

    @property
    def drafter_bytes(self) -> float:
        """Bytes of the weights that the drafter adds to the target."""
        return self.job.parts.num_served * self.draft_width

    @property
    def draft_cache_bytes(self) -> float:
        """Bytes of the drafter's cache for one request."""
        return float(self.context * self.job.parts.draft().key_values * self.job.load.width)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's cache for one request."""
        shape = self.job.shape
        each = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim
        return self.context * each * self.job.load.width

    def target_pass(self, batch: int, new: int) -> tuple[float, str]:
        """Return the seconds of a pass over `new` tokens of each row, and what it waits for."""
        shape = self.job.shape
        query = shape.num_attention_heads * shape.head_dim
        per_token = 2 * (shape.num_layers * round(shape.layer.active) + shape.table_parameters)
        per_token += 4 * query * self.context * shape.num_layers
        embedding = 0 if shape.tie_embeddings else shape.table_parameters * self.job.load.width
        read = self.job.target_bytes * shape.share_read(batch * new)
        read += batch * self.cache_bytes - embedding  # only some rows of it are read
        return self.one_pass(float(batch * new * per_token), read, 2 * shape.num_layers)

    def draft(self, batch: int, depth: int) -> float:
        """Return the seconds that the drafter takes for chains of `depth`, reading included."""
        first, further = self.job.parts.draft().first, self.job.parts.draft().further
        more = self._drafted(batch, further) if further.flops else 0.0
        return self._drafted(batch, first) + (depth - 1) * more

    def _drafted(self, batch: int, one: Pass) -> float:
        flops = batch * (one.flops + one.flops_per_key * self.context)
        read = one.weights * self.draft_width
        if one.layers:
            read += batch * self.draft_cache_bytes
        return self.one_pass(float(flops), read, 2 * max(one.layers, 1))[0]

    def one_pass(self, flops: float, read: float, collectives: int) -> tuple[float, str]:
        """Return the seconds of a pass that computes and reads so much, and what it waits for."""
        speed, bandwidth = self.rates
        arithmetic, memory = flops / speed, read / bandwidth
        fixed = self.job.chip.pass_s
        if self.spread > 1:
            fixed += collectives * self.job.chip.collective_s
        bound = "memory" if memory > arithmetic else "arithmetic"
        return max(arithmetic, memory) + fixed, bound


def host_of(job: Job, settings: PlanSettings) -> Host:
    """Return target and drafter on as few accelerators (1, 2, 4, ...) as hold them with room."""
    heads = job.shape.num_attention_heads
    alone = Host(job, settings.context, 1)
    enough = settings.serving_gpus or gpus_to_serve(alone.weight_bytes, job.chip.memory, heads)
    return replace(alone, spread=enough)


def as_it_is(shape: Shape, target: Shape, served_bytes: float) -> DrafterCost:
    """Return the cost of a language model that drafts as it is, served in so many bytes.

    A pass reads all its weights but an untied embedding; of experts all, whichever are chosen.
    """
    query = shape.num_layers * shape.num_attention_heads * shape.head_dim
    each = Pass(
        flops=2 * (shape.num_layers * round(shape.layer.active) + shape.table_parameters),
        flops_per_key=4 * query,
        weights=shape.num_parameters - (0 if shape.tie_embeddings else shape.table_parameters),
        layers=shape.num_layers,
    )
    key_values = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim
    return DrafterCost(
        num_parameters=shape.num_parameters,
        draft_vocab=min(shape.vocab_size, target.vocab_size),
        draft=lambda: DraftCost(key_values, each, each),
        served_width=served_bytes / shape.num_parameters,
    )


def accepted(rate: float, length: float | None, at: int, depth: int) -> float:
    """Return the acceptance length of chains of `depth`.

    (1 - rate^(depth+1)) / (1 - rate) with the same probability at every depth (Leviathan et al.,
    2022, arXiv:2211.17192, equation 1). A given `length`, at depth `at`, determines the rate.
    """
    if length is not None:
        if depth == at:
            return length
        rate = rate_of(length, at)
    return sum(rate**i for i in range(depth + 1))


def rate_of(length: float, depth: int) -> float:
    """Return the rate at which chains of `depth` have this acceptance length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle, None, 0, depth) < length else (low, middle)
    return (low + high) / 2


def serve(host: Host, batch: int, depth: int, rate: float, length: float | None) -> Serving:
    """Return acceptance_length * t_plain / (t_draft + t_verify) at `depth`, and the best depth."""

    def speedup(k: int) -> float:
        cycle = host.draft(batch, k) + host.target_pass(batch, k + 1)[0]
        return accepted(rate, length, depth, k) * plain / cycle

    plain, _ = host.target_pass(batch, 1)
    deepest = host.job.parts.max_depth or DEEPEST
    best = max(range(1, deepest + 1), key=speedup)
    verify, bound = host.target_pass(batch, depth + 1)
    pays = speedup(best) > 1
    return Serving(
        batch=batch,
        plain_s=plain,
        draft_s=host.draft(batch, depth),
        verify_s=verify,
        bound=bound,
        acceptance_length=accepted(rate, length, depth, depth),
        predicted_speedup=speedup(depth),
        best_depth=best if pays else 0,
        best_predicted_speedup=speedup(best) if pays else 1.0,
    )


def paying(
    host: Host, depth: int, rate: float, length: float | None
) -> tuple[tuple[int, int], ...]:
    """Return the first and the last batch of each range, up to LARGEST_BATCH, in which it pays.

    There may be several: a larger batch reads more experts, and then its arithmetic takes longer.
    """
    gain = accepted(rate, length, depth, depth)
    found: list[tuple[int, int]] = []
    for batch in range(1, LARGEST_BATCH + 1):
        cycle = host.draft(batch, depth) + host.target_pass(batch, depth + 1)[0]
        if gain * host.target_pass(batch, 1)[0] <= cycle:
            continue
        if found and found[-1][1] == batch - 1:
            found[-1] = found[-1][0], batch
        else:
            found.append((batch, batch))
    return tuple(found)


def fitting(host: Host) -> int:
    """Return how many requests' caches fit in memory next to target and drafter; at least 1."""
    room = host.spread * host.job.chip.memory * FILLED - host.weight_bytes
    return max(1, int(room / (host.cache_bytes + host.draft_cache_bytes)))


def affordable(host: Host, share: float) -> float:
    """Return how many weights a drafter may have to draft in this share of a plain step (batch 1).

    They are one layer, read or multiplied once; 0 where a pass without weights takes longer.
    """
    plain, _ = host.target_pass(1, 1)
    fixed, _ = host.one_pass(0.0, 0.0, 2)
    speed, bandwidth = host.rates
    each = max(host.job.load.width / bandwidth, 2 / speed)
    return max(0.0, (share * plain - fixed) / each)
