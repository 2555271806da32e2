"""The cost and benefit of a drafter in serving: memory, and speedup by batch from the roofline."""

from dataclasses import dataclass

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
    draft_width: float  # bytes of a number of the drafter
    drafter_bytes: float  # of the weights that the drafter adds to the target
    cache_bytes: int  # of the target, for one request
    draft_cache_bytes: float

    @property
    def weight_bytes(self) -> float:
        """Bytes of both models' weights."""
        return self.job.target_bytes + self.drafter_bytes

    def target_pass(self, batch: int, new: int) -> float:
        """Return the seconds of a pass over `new` tokens of each row."""
        shape = self.job.shape
        query = shape.num_attention_heads * shape.head_dim
        per_token = 2 * (shape.num_layers * round(shape.layer.active) + shape.table_parameters)
        per_token += 4 * query * self.context * shape.num_layers
        embedding = 0 if shape.tie_embeddings else shape.table_parameters * self.job.load.width
        read = self.job.target_bytes * shape.share_read(batch * new)
        read += batch * self.cache_bytes - embedding  # only some rows of it are read
        return self._seconds(float(batch * new * per_token), read, 2 * shape.num_layers)

    def draft(self, batch: int, depth: int) -> float:
        """Return the seconds that the drafter takes for chains of `depth`, reading included."""
        first, further = self.job.parts.draft().first, self.job.parts.draft().further
        more = self._drafted(batch, further) if further.flops else 0.0
        return self._drafted(batch, first) + (depth - 1) * more

    def cycle(self, batch: int, depth: int) -> float:
        """Return the seconds of drafting chains of `depth` and verifying them."""
        return self.draft(batch, depth) + self.target_pass(batch, depth + 1)

    def _drafted(self, batch: int, one: Pass) -> float:
        flops = batch * (one.flops + one.flops_per_key * self.context)
        read = one.weights * self.draft_width
        if one.layers:
            read += batch * self.draft_cache_bytes
        return self._seconds(float(flops), read, 2 * max(one.layers, 1))

    def _seconds(self, flops: float, read: float, collectives: int) -> float:
        # Reading and arithmetic hide behind each other, whole: optimistic where both take long.
        chip, fixed = self.job.chip, self.job.chip.pass_s
        speed = self.spread * chip.flops[self.job.load.dtype] * chip.serving_efficiency
        bandwidth = self.spread * chip.bandwidth * chip.bandwidth_efficiency
        if self.spread > 1:
            fixed += collectives * chip.collective_s
        return max(flops / speed, read / bandwidth) + fixed


def host_of(job: Job, settings: PlanSettings) -> Host:
    """Return target and drafter on as few accelerators (1, 2, 4, ...) as hold them with room."""
    shape, parts, context, width = job.shape, job.parts, settings.context, job.load.width
    each = 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim
    draft_width = parts.served_width or width
    added = parts.num_served * draft_width
    heads, memory = shape.num_attention_heads, job.chip.memory
    return Host(
        job=job,
        context=context,
        spread=settings.serving_gpus or gpus_to_serve(job.target_bytes + added, memory, heads),
        draft_width=draft_width,
        drafter_bytes=added,
        cache_bytes=context * each * width,
        draft_cache_bytes=float(context * parts.draft().key_values * width),
    )


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


def accepted(rate: float, depth: int) -> float:
    """Return the acceptance length of chains of `depth` at the same rate in every position.

    (1 - rate^(depth+1)) / (1 - rate) (Leviathan et al., 2022, arXiv:2211.17192, equation 1).
    """
    return sum(rate**i for i in range(depth + 1))


def rate_of(length: float, depth: int) -> float:
    """Return the rate at which chains of `depth` have this acceptance length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle, depth) < length else (low, middle)
    return (low + high) / 2


def serve(host: Host, batch: int, depth: int, rate: float) -> Serving:
    """Return acceptance_length * t_plain / (t_draft + t_verify) at `depth`, and the best depth."""
    plain = host.target_pass(batch, 1)
    depths = range(1, (host.job.parts.max_depth or DEEPEST) + 1)
    speedups = {k: accepted(rate, k) * plain / host.cycle(batch, k) for k in (depth, *depths)}
    best = max(depths, key=lambda k: speedups[k])
    pays = speedups[best] > 1
    return Serving(
        batch=batch,
        plain_s=plain,
        draft_s=host.draft(batch, depth),
        verify_s=host.target_pass(batch, depth + 1),
        acceptance_length=accepted(rate, depth),
        predicted_speedup=speedups[depth],
        best_depth=best if pays else 0,
        best_predicted_speedup=speedups[best] if pays else 1.0,
    )


def paying(host: Host, most: int, depth: int, rate: float) -> tuple[tuple[int, int], ...]:
    """Return the first and the last batch of each range, up to `most`, in which it pays.

    There may be several: a larger batch reads more experts, and then its arithmetic takes longer.
    """
    length = accepted(rate, depth)
    found: list[tuple[int, int]] = []
    for batch in range(1, most + 1):
        if length * host.target_pass(batch, 1) > host.cycle(batch, depth):
            first = found.pop()[0] if found and found[-1][1] == batch - 1 else batch
            found.append((first, batch))
    return tuple(found)


def fitting(host: Host) -> int:
    """Return how many requests' caches fit in memory next to target and drafter; at least 1."""
    room = host.spread * host.job.chip.memory * FILLED - host.weight_bytes
    return max(1, int(room / (host.cache_bytes + host.draft_cache_bytes)))
