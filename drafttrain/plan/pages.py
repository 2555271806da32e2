"""A plan in tables and sentences."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from drafttrain.plan.advice import Plan, ServingPlan
from drafttrain.plan.job import Job
from drafttrain.plan.memory import NAMES, Memory
from drafttrain.plan.serving import FILLED, fitting
from drafttrain.plan.throughput import Cost
from drafttrain.plan.units import GIB, count, disk, gib, hours, money, seconds, three
from drafttrain.report.document import Tile
from drafttrain.report.phrases import NOTHING, things
from drafttrain.report.results import Table
from drafttrain.report.tables import rich_table
from drafttrain.report.tables import texts as texts_of

LONGEST_NUMBER = 26  # characters, with its unit: what is longer is text, and is aligned left
WHERE = {
    "device": "whole on each",
    "device_map": "by device map",
    "zero3": "sharded (zero3)",
    "vllm": "in vLLM",
    "stored": "stored features",
}
ASSUMED = (
    "Memory: weights and optimizer state are counted exactly, activations and features in flight "
    "tensor by tensor (within 15 % of what is measured); validation's caches are left out.",
    "Time: arithmetic at a share of the peak ({efficiency:.0%}: {source}), memory and links at "
    "{bandwidth:.0%} of theirs, and no less than the host takes to launch a step's operations; "
    "loading, validation, saving, waiting for the disk, and the slower update of an optimizer on "
    "the host (offload) are left out.",
    "Serving: predicted speedup = acceptance_length * t_plain / (t_draft + t_verify); the same "
    "acceptance at every depth; arithmetic hides behind reading, or reading behind arithmetic, "
    "whole, which flatters batches where both take long; experts are read as if each token chose "
    "its own at random; prefill left out.",
)


def tables(plan: ServingPlan) -> list[Table]:
    """Return the tables that the terminal shows."""
    if not isinstance(plan, Plan):
        return [what(plan), serving(plan)]
    here = components(plan, plan.chosen.memory.placement)
    return [what(plan), here, ways(plan), time_and_money(plan), serving(plan)]


def headline(plan: ServingPlan) -> str:
    """Return whether it fits, how long it takes, what it costs, and what the drafter brings."""
    first = plan.serving[0]
    speedup, depth = _fastest(plan)
    served = (
        f"Serving {things(first.batch, 'request')} is then {speedup:.2f} times as "
        f"fast at depth {depth}, predicted. The acceptance length{_acceptance(plan)}"
        f"{'' if plan.measured else ': plan.acceptance_length or run.dir takes a measured one'}."
    )
    if not isinstance(plan, Plan):
        needed, there = plan.host.weight_bytes, plan.host.spread * plan.job.chip.memory
        return (
            f"{'Fits' if needed <= FILLED * there else 'Does NOT fit'}: target and drafter take "
            f"{gib(needed)} of the {gib(there)} of {_machines(plan)}. {served}"
        )
    memory = plan.chosen.memory
    price = f" and {money(plan.chosen.dollars)}" if plan.chosen.dollars else ""
    host = ""
    if memory.on_host:
        known = "" if memory.host_room == inf else f" of the {gib(memory.host_room)} it may take"
        host = f" and {gib(memory.on_host)}{known} of each host"
    return (
        f"{'Fits' if memory.fits else 'Does NOT fit'}: {gib(memory.total)} of the "
        f"{gib(memory.limit)} of {plan.job.machine}{host}, {_held(memory.placement)}, "
        f"deepspeed={memory.sharding.name}. Training takes {hours(plan.chosen.hours)}{price}. "
        f"{served}"
    )


def tiles(plan: Plan) -> list[Tile]:
    """Return the headline's numbers."""
    memory, (speedup, depth) = plan.chosen.memory, _fastest(plan)
    dollars = plan.chosen.dollars
    return [
        Tile(
            "Memory",
            "Fits" if memory.fits else "Does not fit",
            "",
            f"{gib(memory.total)} of the {gib(memory.limit)} of {plan.job.machine}, "
            f"{_held(memory.placement)}",
            "good" if memory.fits else "bad",
        ),
        Tile("Training", hours(plan.chosen.hours), "", f"{count(plan.job.trained_tokens)} tokens"),
        Tile("Money", money(dollars) if dollars else NOTHING, "", "for the accelerators"),
        Tile(
            "Predicted speedup",
            f"{speedup:.2f}",
            "\N{MULTIPLICATION SIGN}",
            f"at depth {depth}, serving {things(plan.serving[0].batch, 'request')}; the acceptance "
            f"length{_acceptance(plan)}",
        ),
    ]


def _fastest(plan: ServingPlan) -> tuple[float, int]:
    """Return the best predicted speedup at the smallest batch, and its depth."""
    first = plan.serving[0]
    if first.best_depth and first.best_predicted_speedup > first.predicted_speedup:
        return first.best_predicted_speedup, first.best_depth
    return first.predicted_speedup, plan.depth


def _acceptance(plan: ServingPlan) -> str:
    told = f", {plan.serving[0].acceptance_length:.2f} at depth {plan.depth}, is "
    return told + (plan.measured or "assumed")


def _held(placement: str) -> str:
    return "features from the disk" if placement == "stored" else f"target {WHERE[placement]}"


def printed(content: Table) -> RichTable:
    """Return a table for the terminal, its caption on top, texts to the left."""
    shown = rich_table(content)
    shown.title = Text.assemble((content.title, "bold"), "\n" if content.caption else "")
    shown.title.append(content.caption)
    shown.title_style = ""
    shown.show_header = any(content.columns)
    for place, column in enumerate(shown.columns):
        column.header = content.columns[place]
        cells = [row[place] for row in texts_of(content)]
        numbers = sum(cell[:1].isdigit() or cell[:1] in "-$" for cell in cells)
        texts = max(len(cell) for cell in cells) > LONGEST_NUMBER
        column.justify = "right" if place and numbers > len(cells) / 2 and not texts else "left"
        column.no_wrap = place != len(content.columns) - 1
        column.overflow = "fold"  # a word that is too long is broken, not cut
    return shown


def pieces(content: Table, console: Console) -> Iterator[Table]:
    """Yield a table of numbers in as many parts as the width needs, each with the names of rows.

    A table whose last column is sentences wraps there instead.
    """
    names, count = 2 if content.columns[1] == "deepspeed" else 1, len(content.columns)
    if max(len(row[-1]) for row in texts_of(content)) > LONGEST_NUMBER:
        yield content
        return

    def cut(start: int, end: int) -> Table:
        columns = [*content.columns[:names], *content.columns[start:end]]
        rows = [[*row[:names], *row[start:end]] for row in content.rows]
        return replace(content, columns=columns, rows=rows)

    end = count
    free = console.options.update(max_width=10_000)
    while end > names + 1 and (
        Measurement.get(console, free, printed(cut(names, end))).maximum > console.width
    ):
        end -= 1
    yield cut(names, end)
    if end < count:
        yield from pieces(replace(cut(end, count), caption="continued"), console)


def what(plan: ServingPlan) -> Table:
    """Return target and drafter in numbers, and of a drafter that is trained what that takes."""
    job, parts, host = plan.job, plan.job.parts, plan.host
    share = f"{parts.num_parameters / job.shape.num_parameters:.2%} of the target"
    if parts.draft_vocab < job.shape.vocab_size:
        share += f"; can draft {parts.draft_vocab:,} tokens"
    cache = "no cache of its own"
    if host.draft_cache_bytes:
        each = disk(host.draft_cache_bytes)
        cache = f"and {each} of cache a request of {host.context:,} tokens"
    rows = {
        f"target: {job.target}": (
            f"{job.shape.num_parameters:,} parameters",
            f"{gib(job.target_bytes)} in {job.load.dtype}",
        ),
        f"drafter: {job.drafter}": (f"{parts.num_parameters:,} parameters", share),
        **(_training(plan) if isinstance(plan, Plan) else {}),
        "serving the drafter": (f"{gib(host.drafter_bytes)} more", cache),
    }
    if job.origin:
        rows["weights, on disk"] = (disk(job.shape.bytes(2, None)), f"from {job.origin}")
    if job.price_per_hour:
        rows["a million tokens"] = _price(plan)
    cells = [[name, *texts] for name, texts in rows.items()]
    return Table("What is planned", "", ["", "", ""], cells, [])


def _price(plan: ServingPlan) -> tuple[str, str]:
    """Return the price of a million tokens at full load, and after how long training is repaid."""
    full, gain = plan.full, plan.full.best_predicted_speedup
    each = plan.host.spread * plan.job.price_per_hour  # an hour
    plain = each / 3600 * full.plain_s / full.batch * 1e6
    if not full.best_depth:
        return money(plain), f"at {things(full.batch, 'request')}, where no drafter pays"
    # The tokens of an hour with the drafter take `gain` hours without it.
    text = f"not {money(plain)}, at {things(full.batch, 'request')} and depth {full.best_depth}"
    if isinstance(plan, Plan):
        text += f"; pays for training in {hours(plan.chosen.dollars / (each * (gain - 1)))}"
    return money(plain / gain), text


def _training(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return the rows of what training and evaluating take."""
    job, captures = plan.job, plan.job.parts.captures
    layers = ", ".join(str(layer) for layer in captures)
    read = f"layers {layers} and the final one" if layers else "the final hidden state"
    stored = f"at most, for {count(plan.store_tokens)} tokens; plan.tokens says how many"
    return {
        "features": (f"{disk(job.token_bytes)} a token", f"{read}, {job.load.width} bytes a value"),
        "features, stored": (disk(job.token_bytes * plan.store_tokens), stored),
        "training": (
            f"{count(job.trained_tokens)} tokens",
            f"{job.max_steps:,} steps of {job.load.tokens_per_step:,}; {_epochs(plan)}",
        ),
        "checkpoints, on disk": (
            disk(job.checkpoints * job.checkpoint_bytes),
            f"{job.checkpoints} of {disk(job.checkpoint_bytes)}",
        ),
        "evaluating": (
            gib(job.target_bytes),
            f"and {gib(4 * job.shape.num_parameters)} for a float32 copy, where that fits",
        ),
    }


def _epochs(plan: Plan) -> str:
    """Return how often the data is read, as far as its size is known without reading it."""
    known = plan.given_tokens or plan.job.data_tokens
    if known is None:
        return "plan.tokens tells how many epochs that is"
    least = "" if plan.given_tokens else "at least "
    return f"{least}{three(plan.job.trained_tokens / known)} epochs"


def components(plan: Plan, placement: str) -> Table:
    """Return memory by component for every `deepspeed`, with the target in one place."""
    job = plan.job
    found = [cost.memory for cost in plan.others if cost.memory.placement == placement]
    rows = {
        label: [_gib(memory.parts[name]) for memory in found]
        for name, label in NAMES.items()
        if any(memory.parts[name] for memory in found)
    }
    rows["total"] = [_gib(memory.total) for memory in found]
    rows["left"] = [_left(memory) for memory in found]
    rows["fits"] = ["yes" if memory.fits else "no" for memory in found]
    if any(memory.on_host for memory in found):
        disk_too = " or disk" if job.chip.is_cpu else ""  # a map's layers that a CPU cannot hold
        rows[f"on the host{disk_too}"] = [_gib(memory.on_host) for memory in found]
    return Table(
        f"Memory of {job.machine}, {_held(placement)}, by deepspeed=...",
        f"GiB of {_gib(job.chip.memory)}; {_ranks(job)}, micro batch of "
        f"{job.load.rows} x {job.load.length:,} tokens.",
        ["", *(memory.sharding.name.replace("_", "\n") for memory in found)],
        [[name, *cells] for name, cells in rows.items()],
        [],
    )


def ways(plan: Plan) -> Table:
    """Return every way to shard: memory, speed, hours and money."""
    rows = [
        [
            f"{'> ' if memory == plan.chosen.memory else '  '}{WHERE[memory.placement]}",
            memory.sharding.name,
            _gib(memory.total),
            _left(memory),
            "fits" if memory.fits else "too much",
            three(cost.speed.tokens_per_s),
            hours(cost.hours),
            money(cost.dollars),
        ]
        for cost, memory in ((cost, cost.memory) for cost in plan.others)
    ]
    columns = ["target", "deepspeed", "GiB each", "GiB left", "", "tokens/s", "time", "money"]
    return Table("Every way to shard", "> is what was asked for.", columns, rows, [])


def time_and_money(plan: Plan) -> Table:
    """Return the time of an optimizer step by its parts, and the time and money of the run."""
    job, cost, speed = plan.job, plan.chosen, plan.chosen.speed
    about_target = f"{count(speed.target_flops)} FLOP a token; waits for {speed.bound}"
    about_drafter = f"{count(speed.drafter_flops)} FLOP a token, forward and backward"
    energy = f"{three(cost.kilowatt_hours)} kWh, {money(cost.dollars)}"
    parts = {
        "target's pass": (speed.target_s, about_target),
        "drafter": (speed.drafter_s, about_drafter),
        "update and all-reduce": (speed.optimizer_s, ""),
    }
    rows = [
        *(
            [name, seconds(part), f"{part / speed.step_s:.0%}", about]
            for name, (part, about) in parts.items()
        ),
        [
            "optimizer step",
            seconds(speed.step_s),
            "",
            f"{three(speed.tokens_per_s)} tokens/s over all ranks",
        ],
        ["the run", hours(cost.hours), "", f"{energy} at ${job.price_per_hour:.2f} an hour each"],
    ]
    return Table("Time, energy and money", f"{job.chip.how}.", ["", "time", "", ""], rows, [])


def serving(plan: ServingPlan) -> Table:
    """Return whether speculation pays, by batch."""
    rows = [
        [
            str(row.batch),
            *(seconds(part) for part in (row.plain_s, row.draft_s, row.verify_s)),
            row.bound,
            f"{row.predicted_speedup:.2f}x",
            str(row.best_depth) if row.best_depth else "none",
            f"{row.best_predicted_speedup:.2f}x",
        ]
        for row in plan.serving
    ]
    host = plan.host
    return Table(
        f"Serving on {_machines(plan)}: does speculation pay?",
        f"Acceptance length {round(plan.serving[0].acceptance_length, 2)}, {host.context:,} tokens "
        f"of context; the memory holds the caches of {fitting(host):,} requests.",
        ["requests", "plain", "draft", "verify", "waits for", "predicted", "best depth", "then"],
        rows,
        [],
    )


def _machines(plan: ServingPlan) -> str:
    return f"{plan.host.spread} x " * (plan.host.spread > 1) + plan.job.chip.name


def short_form(job: Job, cost: Cost, plan: str) -> list[str]:
    """Return the lines that `train` prints before it loads anything; plan: the command for more."""
    memory, speed = cost.memory, cost.speed
    held = memory.placement != "stored"
    where = _held(memory.placement) if held else "stored features, no target"
    where += f", {gib(memory.spilled)} of it on the host" if memory.spilled else ""
    whose = f"{'of' if job.chip.is_cpu else 'on'} {job.machine}"
    price = f", {money(cost.dollars)}" if cost.dollars else ""
    return [
        f"plan: target {count(job.shape.num_parameters)}, drafter "
        f"{count(job.parts.num_parameters)} parameters; {disk(job.token_bytes)} of features a "
        "token",
        f"  memory: about {gib(memory.total)} of {gib(memory.limit)} {whose} "
        f"({_ranks(job)}, {where})",
        f"  time: about {hours(cost.hours)} at {three(speed.tokens_per_s)} tokens/s; "
        f"{three(cost.kilowatt_hours)} kWh{price}",
        f"  more: {plan}",
    ]


def notes(plan: ServingPlan, source: str) -> list[str]:
    """Return what the numbers assume."""
    if not isinstance(plan, Plan):
        return [ASSUMED[-1]]
    chip = plan.job.chip
    values = {"efficiency": chip.efficiency, "bandwidth": chip.bandwidth_efficiency}
    return [text.format(source=source, **values) for text in ASSUMED]


def _ranks(job: Job) -> str:
    told, here = things(job.load.ranks, "rank"), job.load.ranks_here
    return f"{told}, {here} on each machine" if here < job.load.ranks else told


def _gib(value: float) -> str:
    return three(value / GIB) if value >= 0.005 * GIB else "0" if value == 0 else "0.00"


def _left(memory: Memory) -> str:
    room = memory.limit - memory.total
    return _gib(room) if room >= 0 else f"-{_gib(-room)}"
