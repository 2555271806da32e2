"""What follows from a plan: where the target goes, what fits, which drafter pays."""

from collections.abc import Iterator
from dataclasses import replace

from drafttrain.plan.config import PlanSettings
from drafttrain.plan.job import Job, Plan, cost, memory_of
from drafttrain.plan.memory import Memory
from drafttrain.plan.serving import affordable, fitting
from drafttrain.plan.units import count, disk, gib

OVERRIDES = {
    "device": "hardware.target_placement=device",
    "device_map": "hardware.target_placement=device_map",
    "zero3": "hardware.target_placement=zero3",
    "stored": "features=stored features.validate=false",
}
LARGEST_MICRO_BATCH = 256
CHEAP_DRAFT = 0.1  # of a target pass: what a drafted token should cost at most
COSTLY_DRAFT = 0.15  # of a target pass: a drafted token that costs more wants another drafter
SMALL_VOCABULARY = 8_000  # what a draft vocabulary can be cut to
WHOLE_VOCABULARY = 50_000  # draft vocabularies beyond it are worth a word


def advise(plan: Plan, settings: PlanSettings) -> Iterator[str]:
    """Yield sentences that say what to do, numbers in them."""
    yield from about_target(plan)
    yield from about_micro_batch(plan)
    yield from about_features(plan)
    yield from about_drafter(plan, settings)
    yield from about_speculation(plan, settings)


def about_target(plan: Plan) -> Iterator[str]:
    """Whether the target fits whole, and what sharding it costs."""
    job, chosen = plan.job, plan.chosen
    if job.load.ranks == 1 or chosen.memory.placement not in ("device", "zero3"):
        return
    whole = cost(job, memory_of(job, chosen.memory.sharding, "device"))
    shards = cost(job, memory_of(job, chosen.memory.sharding, "zero3"))
    each = gib(job.target_bytes / job.load.ranks)
    if not whole.memory.fits:
        yield (
            f"The target's {gib(job.target_bytes)} do not fit on each {job.chip.name} beside the "
            f"rest: hardware.target_placement=zero3 puts {each} on each of {job.load.ranks}."
        )
        return
    saved = whole.memory.total - shards.memory.total
    slower = whole.speed.tokens_per_s / shards.speed.tokens_per_s
    yield (
        f"The target fits whole on each {job.chip.name}; zero3 would save {gib(saved)} of each and "
        + (f"take {slower:.1f} times as long." if slower > 1.02 else "cost no time.")
    )


def with_rows(job: Job, rows: int) -> Job:
    """Return the job with another micro batch."""
    return replace(job, load=replace(job.load, rows=rows))


def largest_rows(job: Job, found: Memory) -> int:
    """Return the largest micro batch (1, 2, 4, ...) that fits this way; 0: none does."""
    rows, best = 1, 0
    while rows <= LARGEST_MICRO_BATCH:
        if not memory_of(with_rows(job, rows), found.sharding, found.placement).fits:
            break
        best, rows = rows, 2 * rows
    return best


def about_micro_batch(plan: Plan) -> Iterator[str]:
    """What to change where it does not fit; a larger micro batch where that is faster."""
    job, chosen = plan.job, plan.chosen
    if not chosen.memory.fits:
        ways = list(ways_that_fit(plan))
        yield "It does not fit. " + (
            "It does with " + "; or ".join(dict.fromkeys(ways[:4])) + "."
            if ways
            else "Nothing here makes it fit."
        )
        return
    enough = -(-job.load.tokens_per_step // (job.load.length * job.load.ranks))
    rows = min(largest_rows(job, chosen.memory), enough)
    if rows <= job.load.rows:
        return
    larger = with_rows(job, rows)
    faster = cost(larger, memory_of(larger, chosen.memory.sharding, chosen.memory.placement))
    gain = faster.speed.tokens_per_s / chosen.speed.tokens_per_s
    if gain > 1.05:
        yield f"hardware.micro_batch={rows} fits as well, and is {gain:.1f} times as fast."


def ways_that_fit(plan: Plan) -> Iterator[str]:
    """Yield overrides that make it fit, the least change first."""
    job, mine = plan.job, plan.chosen.memory
    sparing = replace(job, load=replace(job.load, checkpointing=True))
    less = {
        "hardware.micro_batch=1": with_rows(job, 1),
        "hardware.gradient_checkpointing=true": sparing,
        "hardware.micro_batch=1 hardware.gradient_checkpointing=true": with_rows(sparing, 1),
    }
    for words, changed in less.items():
        if changed != job and memory_of(changed, mine.sharding, mine.placement).fits:
            yield words
            break
    for extra, changed in {"": job, **less}.items():
        found = [cost.memory for cost in plan.others]
        ways = [way for way in found if memory_of(changed, way.sharding, way.placement).fits]
        for way in ways:
            parts = [OVERRIDES[way.placement]] if way.placement != mine.placement else []
            parts += [f"deepspeed={way.sharding.name}"] if way.sharding != mine.sharding else []
            if parts:
                yield " ".join([*parts, extra]).strip()
        if ways:
            return


def about_features(plan: Plan) -> Iterator[str]:
    """What stored features would take and save."""
    job, chosen = plan.job, plan.chosen
    if chosen.memory.placement == "stored":
        return
    stored = cost(job, memory_of(job, chosen.memory.sharding, "stored"))
    share = chosen.speed.target_s / chosen.speed.step_s
    reading = disk(job.token_bytes * stored.speed.tokens_per_s)
    yield (
        f"The target's pass is {share:.0%} of the time. Stored features would take at most "
        f"{disk(job.token_bytes * plan.store_tokens)} of disk for {count(plan.store_tokens)} "
        f"tokens; training from them {stored.hours / chosen.hours:.0%} of the time, each run "
        f"after the first, from a disk that reads {reading}/s."
    )


def about_drafter(plan: Plan, settings: PlanSettings) -> Iterator[str]:
    """Which size a drafter should have: what a drafted token costs beside a target pass."""
    job, host = plan.job, plan.host
    share = job.parts.num_parameters / job.shape.num_parameters
    plain, _ = host.target_pass(1, 1)
    each = host.draft(1, settings.depth) / settings.depth / plain
    yield (
        f"The drafter has {share:.1%} of the target's weights, and a drafted token costs "
        f"{each:.0%} of a target pass at batch 1; below 10% is about right: one layer of the "
        "target's width, or a few narrow ones."
    )
    most = affordable(host, CHEAP_DRAFT)
    yield (
        f"Up to about {count(most)} weights keep a drafted token below {CHEAP_DRAFT:.0%} of a "
        "target pass."
        if most > 1e6
        else f"No drafter keeps a drafted token below {CHEAP_DRAFT:.0%} of a target pass: it "
        "takes as long before it computes anything."
    )
    cuts_vocabulary, vocabulary = "draft_vocab_size" in job.knobs, job.parts.draft_vocab
    if each > COSTLY_DRAFT:
        if cuts_vocabulary and vocabulary > SMALL_VOCABULARY:
            smaller = f"drafter.draft_vocab_size={SMALL_VOCABULARY}"
        else:
            narrow = "a smaller drafter.intermediate_size"
            smaller = "fewer layers" if "num_layers" in job.knobs else narrow
        yield f"A drafted token is dear here: try {smaller}, or chains of depth 1 or 2."
    if cuts_vocabulary and vocabulary > WHOLE_VOCABULARY:
        yield (
            f"A draft vocabulary of {vocabulary:,} makes the head most of a drafted token; 32,000 "
            "cover 99% of most text: drafter.draft_vocab_size=32000."
        )


def about_speculation(plan: Plan, settings: PlanSettings) -> Iterator[str]:
    """Up to which batch speculation pays, and what acceptance it needs beyond."""
    length = plan.serving[0].acceptance_length
    given = f"at depth {settings.depth} and an acceptance length of {length:.2f}"
    most = fitting(plan.host)
    if plan.break_even is None or plan.break_even >= most:
        yield (
            f"Speculation pays at every batch whose cache fits ({most} requests of "
            f"{plan.host.context:,} tokens), {given}."
        )
    elif plan.break_even == 0:
        yield f"Speculation does not pay at any batch, {given}."
    else:
        yield (
            f"Speculation pays up to {plan.break_even} requests side by side, {given}; beyond, "
            "verification waits for arithmetic and shorter chains, or none, are faster."
        )
    last = plan.serving[-1]
    cycle = (last.draft_s + last.verify_s) / last.plain_s
    if last.speedup < 1:
        yield (
            f"At {last.batch} requests a cycle takes {cycle:.2f} plain steps: chains of "
            f"{settings.depth} need an acceptance length above that to pay."
        )
