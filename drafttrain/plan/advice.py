"""A whole plan, and what to change where a run does not fit or could be faster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from drafttrain.plan.config import PlanSettings
from drafttrain.plan.job import Job
from drafttrain.plan.memory import combinations, memory_of, place
from drafttrain.plan.serving import LARGEST_BATCH, Host, Serving, fitting, host_of, paying, serve
from drafttrain.plan.throughput import Cost, cost
from drafttrain.training.engine.config import DeepSpeedConfig

STORED = "features=stored features.dir=outputs/store features.validate=false"
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # those that are tried


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What `plan` reports of a target and its drafter while they serve."""

    job: Job
    settings: PlanSettings
    depth: int  # while serving: plan.depth, or the deepest that the drafter goes, as by its heads
    measured: str  # whose acceptance is counted with; "": an assumed one
    host: Host
    serving: tuple[Serving, ...]
    full: Serving  # with as many requests as the memory holds
    paying: tuple[tuple[int, int], ...]  # ranges of batches that fit, first and last
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan(ServingPlan):
    """Everything that `plan` reports of a drafter that is trained first."""

    chosen: Cost
    others: tuple[Cost, ...]
    store_tokens: int
    stored: bool  # features are read from the disk; a target that is loaded only validates


def plan_serving(job: Job, settings: PlanSettings, rate: float, measured: str) -> ServingPlan:
    """Return the plan of serving a target with its drafter.

    rate: the chance that a token is accepted if the one before it was. measured: see `ServingPlan`.
    """
    host = host_of(job, settings)
    depth = min(
        settings.depth, job.parts.max_depth or settings.depth
    )  # such as the number of heads
    most = min(fitting(host), LARGEST_BATCH)
    return ServingPlan(
        job=job,
        settings=settings,
        depth=depth,
        measured=measured,
        host=host,
        serving=tuple(serve(host, batch, depth, rate) for batch in settings.batch_sizes),
        full=serve(host, most, depth, rate),
        paying=paying(host, most, depth, rate),
    )


def plan_training(
    serving: ServingPlan,
    sharding: DeepSpeedConfig,
    placement: str,
    shardings: Sequence[DeepSpeedConfig],
    stored: bool = False,
) -> Plan:
    """Return the plan of a drafter that is trained: its own sharding, all others, and advice.

    serving: its plan after training. stored: see `Plan`.
    """
    job = serving.job
    ways = combinations(shardings, job, placement)
    once = min(job.trained_tokens, job.data_tokens or job.trained_tokens)
    plan = Plan(
        **vars(serving),
        chosen=cost(job, place(job, sharding, placement), stored),
        others=tuple(cost(job, memory_of(job, *way), stored) for way in ways),
        stored=stored,
        store_tokens=serving.settings.tokens or once,
    )
    return replace(plan, advice=tuple(about_micro_batch(plan)))


def at_rows(job: Job, rows: int) -> Job:
    """Return the job with another micro batch."""
    return replace(job, load=replace(job.load, rows=rows))


def about_micro_batch(plan: Plan) -> Iterator[str]:
    """Yield what to change where the run does not fit, or a larger micro batch if it is faster."""
    job, load, mine = plan.job, plan.job.load, plan.chosen.memory
    if not mine.fits:
        ways = sorted(dict.fromkeys(ways_that_fit(plan)), key=lambda way: way.count("="))
        found = f"It does with {'; or '.join(ways[:4])}." if ways else "Nothing here makes it fit."
        yield f"It does not fit. {found}"
        return

    def with_rows(rows: int) -> Cost:
        changed = at_rows(job, rows)
        return cost(changed, memory_of(changed, mine.sharding, mine.placement), plan.stored)

    enough = -(-load.tokens_per_step // (load.length * load.ranks))
    sizes = [rows for rows in MICRO_BATCHES if load.rows < rows <= enough]
    larger = list(takewhile(lambda found: found.memory.fits, map(with_rows, sizes)))
    gain = larger[-1].speed.tokens_per_s / plan.chosen.speed.tokens_per_s if larger else 1.0
    if gain > 1.05:
        rows = sizes[len(larger) - 1]
        yield f"hardware.micro_batch={rows} fits as well, and is {gain:.1f} times as fast."


def ways_that_fit(plan: Plan) -> Iterator[str]:
    """Yield overrides that make the run fit, the smallest change first."""
    job, mine = plan.job, plan.chosen.memory
    sparing = replace(job, load=replace(job.load, checkpointing=True))
    less = {
        "hardware.micro_batch=1": at_rows(job, 1),
        "hardware.gradient_checkpointing=true": sparing,
        "hardware.micro_batch=1 hardware.gradient_checkpointing=true": at_rows(sparing, 1),
    }
    for words, changed in less.items():
        if changed != job and memory_of(changed, mine.sharding, mine.placement).fits:
            yield words
            break
    found = [(other.memory.sharding, other.memory.placement) for other in plan.others]
    found.sort(key=lambda way: way[0] != mine.sharding)
    seen: set[str] = set()  # one way for each placement
    for extra, changed in {"": job, **less}.items():
        for sharding, placement in found:
            if placement in seen or not memory_of(changed, sharding, placement).fits:
                continue
            seen.add(placement)
            moved = STORED if placement == "stored" else f"hardware.target_placement={placement}"
            parts = [moved] if placement != mine.placement else []
            parts += [f"deepspeed={sharding.name}"] if sharding != mine.sharding else []
            if job.muon and sharding.enabled:
                parts += ["optimizer=adamw"]  # DeepSpeed has no Muon
            if parts:
                yield " ".join([*parts, extra]).strip()
