"""A whole plan, and what follows from it: where the target goes, what fits, which drafter pays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from drafttrain.plan.config import PlanSettings
from drafttrain.plan.job import Job
from drafttrain.plan.memory import Memory, Sharding, combinations, memory_of, place
from drafttrain.plan.serving import (
    LARGEST_BATCH,
    Host,
    Serving,
    affordable,
    fitting,
    host_of,
    paying,
    rate_of,
    serve,
)
from drafttrain.plan.throughput import Cost, cost
from drafttrain.plan.units import count, disk, gib

OVERRIDES = {
    "device": "hardware.target_placement=device",
    "device_map": "hardware.target_placement=device_map",
    "zero3": "hardware.target_placement=zero3",
    "vllm": "hardware.target_placement=vllm",
    "stored": "features=stored features.dir=outputs/store features.validate=false",
}
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # those that are tried
CHEAP_DRAFT = 0.1  # of a target pass: what a drafted token should cost at most
COSTLY_DRAFT = 0.15  # of a target pass: if a drafted token costs more, another drafter is advised
SMALL_VOCABULARY = 8_000  # what a draft vocabulary can be cut to
WHOLE_VOCABULARY = 50_000  # larger draft vocabularies are worth a note


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What `plan` reports of a target and its drafter while they serve."""

    job: Job
    depth: int  # while serving: as asked for, or as deep as the drafter goes
    measured: str  # whose acceptance length is counted with; "": an assumed one
    host: Host
    serving: tuple[Serving, ...]
    full: Serving  # with as many requests as the memory holds
    paying: tuple[tuple[int, int], ...]  # ranges of batches, first and last
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan(ServingPlan):
    """Everything that `plan` reports of a drafter that is trained first."""

    chosen: Cost
    others: tuple[Cost, ...]
    given_tokens: int | None  # of the data, by plan.tokens
    store_tokens: int
    stored: bool  # features are read from the disk; a target that is loaded only validates


def plan_serving(job: Job, settings: PlanSettings, measured: str) -> ServingPlan:
    """Return the plan of serving a target with its drafter; measured: see `ServingPlan`."""
    host = host_of(job, settings)
    rate, length = settings.conditional_acceptance, settings.acceptance_length
    deepest = job.parts.max_depth or settings.depth  # such as the number of heads
    depth = min(settings.depth, deepest)
    if length is not None and depth < settings.depth:
        rate, length = rate_of(length, settings.depth), None
    acceptance = depth, rate, length
    plan = ServingPlan(
        job=job,
        depth=depth,
        measured=measured,
        host=host,
        serving=tuple(serve(host, batch, *acceptance) for batch in settings.batch_sizes),
        full=serve(host, min(fitting(host), LARGEST_BATCH), *acceptance),
        paying=paying(host, *acceptance),
    )
    return replace(plan, advice=(*about_drafter(plan), *about_speculation(plan)))


def build_plan(
    job: Job,
    settings: PlanSettings,
    sharding: Sharding,
    placement: str,
    shardings: Sequence[Sharding],
    measured: str = "",
    stored: bool = False,
) -> Plan:
    """Return the plan of a job: its own sharding, all others, serving, and advice.

    measured: see `ServingPlan`. stored: see `Plan`.
    """
    ways = combinations(shardings, job, placement)
    once = min(job.trained_tokens, job.data_tokens or job.trained_tokens)
    plan = Plan(
        **vars(plan_serving(job, settings, measured)),
        chosen=cost(job, place(job, sharding, placement), stored),
        others=tuple(cost(job, memory_of(job, *way), stored) for way in ways),
        stored=stored,
        given_tokens=settings.tokens,
        store_tokens=settings.tokens or once,
    )
    about = (about_target, about_micro_batch, about_features)
    training = tuple(text for part in about for text in part(plan))
    return replace(plan, advice=training + plan.advice)


def at_rows(job: Job, rows: int) -> Job:
    """Return the job with another micro batch."""
    return replace(job, load=replace(job.load, rows=rows))


def about_target(plan: Plan) -> Iterator[str]:
    """Yield advice on whether the target fits whole, and what sharding it costs."""
    job, sharding = plan.job, plan.chosen.memory.sharding
    if job.load.ranks == 1 or plan.chosen.memory.placement not in ("device", "zero3"):
        return
    whole, shards = (
        cost(job, memory_of(job, sharding, way), plan.stored) for way in ("device", "zero3")
    )
    if not whole.memory.fits:
        yield (
            f"The target's {gib(job.target_bytes)} do not fit on each {job.chip.name} beside the "
            "rest: hardware.target_placement=zero3 puts "
            f"{gib(job.target_bytes / job.load.ranks)} on each of {job.load.ranks}."
        )
        return
    saved = whole.memory.total - shards.memory.total
    slower = whole.speed.tokens_per_s / shards.speed.tokens_per_s
    yield (
        f"The target fits whole on each {job.chip.name}; zero3 would save {gib(saved)} of each and "
        + (f"take {slower:.1f} times as long." if slower > 1.02 else "cost no time.")
    )


def about_micro_batch(plan: Plan) -> Iterator[str]:
    """Yield what to change where the run does not fit, or a larger micro batch if it is faster."""
    job, load, mine = plan.job, plan.job.load, plan.chosen.memory
    if not mine.fits:
        ways = sorted(dict.fromkeys(ways_that_fit(plan)), key=lambda way: way.count("="))
        found = f"It does with {'; or '.join(ways[:4])}." if ways else "Nothing here makes it fit."
        yield f"It does not fit. {found}"
        return

    def held(rows: int) -> Memory:
        return memory_of(at_rows(job, rows), mine.sharding, mine.placement)

    enough = -(-load.tokens_per_step // (load.length * load.ranks))
    fit = takewhile(lambda rows: held(rows).fits, MICRO_BATCHES)
    rows = min(max(fit, default=0), enough)
    if rows > load.rows:
        faster = cost(at_rows(job, rows), held(rows), plan.stored).speed.tokens_per_s
        gain = faster / plan.chosen.speed.tokens_per_s
        if gain > 1.05:
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
            parts = [OVERRIDES[placement]] if placement != mine.placement else []
            parts += [f"deepspeed={sharding.name}"] if sharding != mine.sharding else []
            if job.muon and sharding.stage is not None:
                parts += ["optimizer=adamw"]  # DeepSpeed has no Muon
            if parts:
                yield " ".join([*parts, extra]).strip()


def about_features(plan: Plan) -> Iterator[str]:
    """Yield advice on stored features: the disk they take and the time they save."""
    job, chosen = plan.job, plan.chosen
    if plan.stored:
        return
    stored = cost(job, memory_of(job, chosen.memory.sharding, "stored"))
    yield (
        f"The target's pass is {chosen.speed.target_s / chosen.speed.step_s:.0%} of the time. "
        f"Stored features would take at most {disk(job.token_bytes * plan.store_tokens)} of disk "
        f"for {count(plan.store_tokens)} tokens; training from them "
        f"{stored.hours / chosen.hours:.0%} of the time, each run after the first, from a disk "
        f"that reads {disk(job.token_bytes * stored.speed.tokens_per_s)}/s."
    )


def about_drafter(plan: ServingPlan) -> Iterator[str]:
    """Yield advice on the size of the drafter: the cost of a drafted token in target passes."""
    job, host = plan.job, plan.host
    each = host.draft(1, plan.depth) / plan.depth / host.target_pass(1, 1)[0]
    yield (
        f"The drafter has {job.parts.num_served / job.shape.num_parameters:.1%} of the "
        f"target's weights, and a drafted token costs {each:.0%} of a target pass at batch 1; "
        f"below {CHEAP_DRAFT:.0%} is about right: one layer of the target's width, or a few narrow "
        "ones."
    )
    most = affordable(host, CHEAP_DRAFT)
    yield (
        f"Up to about {count(most)} weights keep a drafted token below {CHEAP_DRAFT:.0%} of a "
        "target pass."
        if most > 1e6
        else f"No drafter keeps a drafted token below {CHEAP_DRAFT:.0%} of a target pass: starting "
        "its operations alone takes as long."
    )
    cuts_vocabulary, vocabulary = "draft_vocab_size" in job.knobs, job.parts.draft_vocab
    if each > COSTLY_DRAFT:
        if cuts_vocabulary and vocabulary > SMALL_VOCABULARY:
            smaller = f"drafter.draft_vocab_size={SMALL_VOCABULARY}"
        elif "num_layers" in job.knobs:
            smaller = "fewer layers"
        else:
            narrow = "intermediate_size" in job.knobs
            smaller = "a smaller drafter.intermediate_size" if narrow else "a smaller drafter"
        yield f"A drafted token is expensive here: try {smaller}, or chains of depth 1 or 2."
    if cuts_vocabulary and vocabulary > WHOLE_VOCABULARY:
        yield (
            f"A draft vocabulary of {vocabulary:,} makes the head most of a drafted token; 32,000 "
            "cover 99% of most text: drafter.draft_vocab_size=32000."
        )


def about_speculation(plan: ServingPlan) -> Iterator[str]:
    """Yield the largest batch at which speculation pays, and the acceptance it needs beyond."""
    length = plan.serving[0].acceptance_length
    given = f"at depth {plan.depth} and an acceptance length of {length:.2f}"
    most = fitting(plan.host)
    ranges = [(first, last) for first, last in plan.paying if first <= most]
    if ranges and ranges[0][0] == 1 and ranges[0][1] >= min(most, LARGEST_BATCH):
        yield (
            f"Speculation pays at every batch whose cache fits ({most} requests of "
            f"{plan.host.context:,} tokens), {given}."
        )
    elif not ranges:
        yield f"Speculation does not pay at any batch, {given}."
    else:
        where = " and ".join(f"{first} to {min(last, most)}" for first, last in ranges)
        reads = ", or reads more experts," if plan.job.shape.share_read(1) < 1 else ""
        yield (
            f"Speculation pays at {where} requests side by side, {given}; at others verification "
            f"waits for arithmetic{reads} and shorter chains, or none, are faster."
        )
    last = plan.serving[-1]
    cycle = (last.draft_s + last.verify_s) / last.plain_s
    if last.predicted_speedup < 1:
        yield (
            f"At {last.batch} requests a cycle takes {cycle:.2f} plain steps: chains of "
            f"{plan.depth} need an acceptance length above that to pay."
        )
