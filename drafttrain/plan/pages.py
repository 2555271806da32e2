"""A plan in sentences and tables, the same in the terminal and on its pages, and as JSON."""

from math import inf
from pathlib import Path
from typing import Any

from drafttrain.drafters.shared.publications import expectation
from drafttrain.plan.advice import Plan, ServingPlan
from drafttrain.plan.job import Job
from drafttrain.plan.memory import NAMES, Memory
from drafttrain.plan.serving import FILLED, fitting
from drafttrain.plan.throughput import Cost
from drafttrain.plan.units import count, disk, duration, gib, money, three
from drafttrain.report.document import Document, Listing, notes
from drafttrain.report.phrases import things
from drafttrain.report.results import Table
from drafttrain.report.write import write_pages

FILES = ("plan.json", "plan.md", "plan.html")


def blocks(plan: ServingPlan) -> list[Listing | Table]:
    """Return everything that a plan says, in order, besides its headline."""
    advice = notes("Advice", list(plan.advice))
    if not isinstance(plan, Plan):
        return [what(plan), serving(plan), advice]
    return [what(plan), components(plan), ways(plan), serving(plan), advice]


def headline(plan: ServingPlan) -> str:
    """Return whether it fits, how long it takes, what it costs, and what the drafter brings."""
    first = plan.serving[0]
    speedup, depth = first.predicted_speedup, plan.depth
    if first.best_depth and first.best_predicted_speedup > speedup:
        speedup, depth = first.best_predicted_speedup, first.best_depth
    source = plan.measured or "assumed: plan.acceptance_length or run.dir takes a measured one"
    served = (
        f"Serving {things(first.batch, 'request')} is then {speedup:.2f} times as fast at depth "
        f"{depth}, predicted. The acceptance length, {first.acceptance_length:.2f} at depth "
        f"{plan.depth}, is {source}."
    )
    if isinstance(plan, Plan):
        memory, time = needs(plan.job, plan.chosen.memory), takes(plan.chosen)
        fits, text = plan.chosen.memory.fits, f"{memory}. Training takes {time}."
    else:
        needed, there = plan.host.weight_bytes, plan.host.spread * plan.job.chip.memory
        fits = needed <= FILLED * there
        text = f"target and drafter take {gib(needed)} of the {gib(there)} of {_machines(plan)}."
    return f"{'Fits' if fits else 'Does NOT fit'}: {text} {served}"


def needs(job: Job, memory: Memory) -> str:
    """Return the memory that training needs, beside what there is, and where the target is."""
    ranks, here, host = things(job.load.ranks, "rank"), job.load.ranks_here, ""
    ranks += f", {here} on each machine" if here < job.load.ranks else ""
    if memory.on_host:
        room = "" if memory.host_room == inf else f" of the {gib(memory.host_room)} it may take"
        host = f" and {gib(memory.on_host)}{room} of each host"
    stored = memory.placement == "stored"
    target = "stored features, no target" if stored else f"target_placement={memory.placement}"
    return (
        f"{gib(memory.total)} of the {gib(memory.limit)} of {job.machine}{host} "
        f"({ranks}, {target}, deepspeed={memory.sharding.name})"
    )


def takes(cost: Cost) -> str:
    """Return the time and the money of training."""
    price = f" and {money(cost.dollars)}" if cost.dollars else ""
    return f"{duration(3600 * cost.hours)}{price}, at {three(cost.speed.tokens_per_s)} tokens/s"


def short_form(job: Job, cost: Cost, plan: str) -> list[str]:
    """Return the lines that `train` prints before it loads anything; plan: the command for more."""
    return [
        f"plan: target {count(job.shape.num_parameters)}, drafter "
        f"{count(job.parts.num_parameters)} parameters; {disk(job.token_bytes)} of features a "
        "token",
        f"  memory: about {needs(job, cost.memory)}",
        f"  time: about {takes(cost)}",
        f"  more: {plan}",
    ]


def _machines(plan: ServingPlan) -> str:
    return f"{plan.host.spread} x " * (plan.host.spread > 1) + plan.job.chip.name


def what(plan: ServingPlan) -> Listing:
    """Return target and drafter in numbers, and of a drafter that is trained what that takes."""
    job, parts, host = plan.job, plan.job.parts, plan.host
    share = f"{parts.num_parameters / job.shape.num_parameters:.2%} of the target"
    if parts.draft_vocab < job.shape.vocab_size:
        share += f"; can draft {parts.draft_vocab:,} tokens"
    cache = "no cache of its own"
    if host.draft_cache_bytes:
        cache = f"and {disk(host.draft_cache_bytes)} of cache for a request of {host.context:,}"
        cache += " tokens"
    rows = {
        f"target {job.target}": f"{job.shape.num_parameters:,} parameters, "
        f"{gib(job.target_bytes)} in {job.load.dtype}",
        f"drafter {job.drafter}": f"{parts.num_parameters:,} parameters, {share}",
        "accelerator": job.chip.how,
        **(_training(plan) if isinstance(plan, Plan) else {}),
        "serving the drafter": f"{gib(host.drafter_bytes)} more, {cache}",
    }
    if job.origin:
        rows["weights, on disk"] = f"{disk(job.shape.bytes(2, None))} from {job.origin}"
    if job.price_per_hour:
        rows["a million tokens"] = _price(plan)
    return Listing("What is planned", list(rows.items()), "notes")


def _price(plan: ServingPlan) -> str:
    """Return the price of a million tokens at full load, and after how long training is repaid."""
    full, gain = plan.full, plan.full.best_predicted_speedup
    each = plan.host.spread * plan.job.price_per_hour / 3600  # a second
    plain = each * full.plain_s / full.batch * 1e6
    requests = things(full.batch, "request")
    if not full.best_depth:
        return f"{money(plain)}, at {requests}, where no drafter pays"
    text = f"{money(plain / gain)} instead of {money(plain)}, at {requests} and depth "
    text += str(full.best_depth)
    if isinstance(plan, Plan):
        # The tokens of a second with the drafter take `gain` seconds without it.
        text += f"; pays for training in {duration(plan.chosen.dollars / (each * (gain - 1)))}"
    return text


def _training(plan: Plan) -> dict[str, str]:
    """Return what training and evaluating take, by name."""
    job, captures, cost, speed = plan.job, plan.job.parts.captures, plan.chosen, plan.chosen.speed
    layers = ", ".join(str(layer) for layer in captures)
    read = f"layers {layers} and the final one" if layers else "the final hidden state"
    known = plan.settings.tokens or job.data_tokens
    epochs = "plan.tokens tells how many epochs that is"
    if known is not None:
        least = "" if plan.settings.tokens else "at least "
        epochs = f"{least}{three(job.trained_tokens / known)} epochs"
    run = plan.settings.measured
    measured = f"measured in {run}" if run else "a guess, until plan.measured names a run"
    return {
        "features": f"{disk(job.token_bytes)} a token ({read}); stored, at most "
        f"{disk(job.token_bytes * plan.store_tokens)} for {count(plan.store_tokens)} tokens",
        "training": f"{count(job.trained_tokens)} tokens, {job.max_steps:,} steps of "
        f"{job.load.tokens_per_step:,}; {epochs}",
        "acceptance": expectation(job.drafter),
        "a step": f"{duration(speed.step_s)} (target's pass {duration(speed.target_s)}, bound by "
        f"{speed.bound}; drafter {duration(speed.drafter_s)}; update and all-reduce "
        f"{duration(speed.optimizer_s)})",
        "the run": f"{three(cost.kilowatt_hours)} kWh; arithmetic at {job.chip.efficiency:.0%} of "
        f"the peak, {measured}; ${job.price_per_hour:.2f} an hour for each accelerator",
        "checkpoints, on disk": f"{disk(job.checkpoints * job.checkpoint_bytes)}, "
        f"{job.checkpoints} of {disk(job.checkpoint_bytes)}",
        "evaluating": f"{gib(job.target_bytes)}, and {gib(4 * job.shape.num_parameters)} for a "
        "float32 copy, where that fits",
    }


def components(plan: Plan) -> Table:
    """Return the memory of one accelerator by component."""
    job, memory = plan.job, plan.chosen.memory
    rows = [[label, gib(memory.parts[key])] for key, label in NAMES.items() if memory.parts[key]]
    rows += [["total", gib(memory.total)], ["limit", gib(memory.limit)]]
    if memory.on_host:
        disk_too = " or disk" if job.chip.is_cpu else ""  # a map's layers that a CPU cannot hold
        rows.append([f"on the host{disk_too}", gib(memory.on_host)])
    about = f"With a micro batch of {job.load.rows} x {job.load.length:,} tokens."
    return Table(f"Memory of {job.machine}", "", ["", "bytes"], rows, [about])


def ways(plan: Plan) -> Table:
    """Return every way to shard: memory, hours and money."""
    rows = [
        [
            f"{'> ' if cost.memory == plan.chosen.memory else ''}{cost.memory.placement}",
            cost.memory.sharding.name,
            gib(cost.memory.total),
            "yes" if cost.memory.fits else "no",
            duration(3600 * cost.hours),
            money(cost.dollars),
        ]
        for cost in plan.others
    ]
    columns = ["target", "deepspeed", "memory", "fits", "time", "money"]
    return Table("Every way to shard", "", columns, rows, ["> is what was asked for."])


def serving(plan: ServingPlan) -> Table:
    """Return whether speculation pays, by batch, and from which acceptance length on."""
    rows = [
        [
            str(row.batch),
            *(duration(part) for part in (row.plain_s, row.draft_s, row.verify_s)),
            f"{(row.draft_s + row.verify_s) / row.plain_s:.2f}",
            f"{row.predicted_speedup:.2f}",
            str(row.best_depth) if row.best_depth else "none",
            f"{row.best_predicted_speedup:.2f}",
        ]
        for row in plan.serving
    ]
    ranges = " and ".join(f"{first} to {last}" for first, last in plan.paying)
    length = plan.serving[0].acceptance_length
    about = (
        f"At depth {plan.depth}, speculation pays from an acceptance length of (draft + verify) / "
        f"plain on: {length:.2f} pays at {ranges or 'no number of'} requests side by side. The "
        f"memory holds the caches of {fitting(plan.host):,}, each of {plan.host.context:,} tokens."
    )
    columns = ["batch", "plain", "draft", "verify", "pays from", "gain", "best depth", "then"]
    title = f"Serving on {_machines(plan)}: does speculation pay?"
    return Table(title, "", columns, rows, [about])


def write_plan(plan: ServingPlan, folder: Path) -> None:
    """Write plan.json, plan.md and plan.html."""
    title = f"{plan.job.drafter} for {plan.job.target}: the plan"
    subject = "memory, time, disk and money"
    document = Document(subject, title, [headline(plan)], rest=list(blocks(plan)))
    write_pages(folder, "plan", document, [], as_data(plan))


def as_data(plan: ServingPlan) -> dict[str, Any]:
    """Return what plan.json holds, in bytes and seconds."""
    job, parts = plan.job, plan.job.parts
    counted = {key: value for key, value in vars(parts).items() if key not in ("step", "draft")}
    size = {"name": job.target, "num_parameters": job.shape.num_parameters}
    served: dict[str, Any] = {
        "target": vars(job.shape) | size,
        "drafter": {"name": job.drafter, **counted, **vars(parts.draft())},
        "accelerator": job.chip,
        "load": job.load,
        "headline": headline(plan),
        "serving": plan.serving,
        "serving_accelerators": plan.host.spread,
        "paying_batches": plan.paying,
        "full_load": plan.full,
        "advice": plan.advice,
    }
    if not isinstance(plan, Plan):
        return served
    step = parts.step(job.load.checkpointing)
    served["drafter"] |= {"flops_per_token": step.flops, "flops_per_key": step.flops_per_key}
    return served | {
        "feature_bytes_per_token": job.token_bytes,
        "store_tokens": plan.store_tokens,
        "store_bytes": job.token_bytes * plan.store_tokens,
        "chosen": _cost(plan.chosen),
        "choices": [_cost(cost) for cost in plan.others],
    }


def _cost(cost: Cost) -> dict[str, Any]:
    memory = cost.memory
    return {
        "deepspeed": memory.sharding.name,
        "target_placement": memory.placement,
        "bytes": {**memory.parts, "total": memory.total},
        "host_bytes": memory.on_host,
        "fits": memory.fits,
        "headroom_bytes": memory.limit - memory.total,
        "speed": cost.speed,
        "hours": cost.hours,
        "kilowatt_hours": cost.kilowatt_hours,
        "dollars": cost.dollars,
    }
