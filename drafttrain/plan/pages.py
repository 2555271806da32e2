"""A plan in tables and sentences."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from drafttrain.plan.job import Cost, Job, Plan
from drafttrain.plan.memory import NAMES, Memory
from drafttrain.plan.serving import drafter_bytes, fitting
from drafttrain.plan.units import count, disk, gib, hours, seconds, three
from drafttrain.report.results import Table
from drafttrain.report.tables import texts as texts_of
from drafttrain.report.terminal import rich_table

GIBIBYTE = 2**30
LONGEST_NUMBER = 26  # characters, with its unit: what is longer is a text, and stands to the left
WHERE = {
    "device": "whole on each",
    "device_map": "by device map",
    "zero3": "sharded (zero3)",
    "stored": "stored features",
}
ASSUMED = (
    "Memory: weights and optimizer state are counted exactly, activations and features in flight "
    "tensor by tensor (within 15 % of what is measured); validation's caches are left out.",
    "Time: arithmetic at a share of the peak ({efficiency:.0%}: {source}), memory and links at "
    "{bandwidth:.0%} of theirs; loading, validation, saving, waiting for the disk, and the slower "
    "update of an optimizer on the host (offload) are left out.",
    "Serving: predicted speedup = acceptance_length * t_plain / (t_draft + t_verify); the same "
    "acceptance at every depth; arithmetic hides behind reading, or reading behind arithmetic, "
    "whole, which flatters batches where both take long; prefill left out.",
)


def tables(plan: Plan) -> list[Table]:
    """Return what the terminal shows."""
    chosen = plan.chosen.memory.placement
    return [
        what(plan),
        components(plan, chosen),
        ways(plan),
        time_and_money(plan),
        serving(plan),
    ]


def headline(plan: Plan) -> str:
    """Return whether it fits, how long it takes, what it costs, and what the drafter brings."""
    job, cost = plan.job, plan.chosen
    memory = cost.memory
    machine = "this machine" if job.chip.is_cpu else f"each {job.chip.name}"
    fits = "Fits" if memory.fits else "Does NOT fit"
    sizes = f"{gib(memory.total)} of the {gib(memory.limit)} of {machine}"
    price = f" and {money(cost.dollars)}" if cost.dollars else ""
    first = plan.serving[0]
    speedup, depth = first.speedup, f"depth {plan.depth}"
    if first.best_depth and first.best_speedup > first.speedup:
        speedup, depth = first.best_speedup, f"depth {first.best_depth}"
    return (
        f"{fits}: {sizes}, {_held(memory.placement)}, deepspeed={memory.sharding.name}. Training "
        f"takes {hours(cost.hours)}{price}. Serving {first.batch} request"
        f"{'s' * (first.batch > 1)} is then {speedup:.2f} times as fast at {depth}, predicted."
    )


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
    """Yield a table of numbers in as many parts as the width needs, what names a row in each.

    A table whose last column is sentences folds there instead.
    """
    names = 2 if content.columns[1] == "deepspeed" else 1
    folds = max(len(row[-1]) for row in texts_of(content)) > LONGEST_NUMBER
    start, count = names, len(content.columns)
    while start < count:
        end = count
        while (
            not folds and end > start + 1 and _wide(_columns(content, names, start, end), console)
        ):
            end -= 1
        yield _columns(content, names, start, end)
        start = end if not folds else count


def _columns(content: Table, names: int, start: int, end: int) -> Table:
    def cut(cells: Sequence[Any]) -> list[Any]:
        return [*cells[:names], *cells[start:end]]

    caption = content.caption if start == names else "continued"
    rows = [cut(row) for row in content.rows]
    return replace(content, columns=cut(content.columns), rows=rows, caption=caption)


def _wide(content: Table, console: Console) -> bool:
    free = console.options.update(max_width=10_000)
    return Measurement.get(console, free, printed(content)).maximum > console.width


def what(plan: Plan) -> Table:
    """Return target, drafter and features in numbers."""
    job = plan.job
    parts, width = job.parts, plan.host.dtype_bytes
    extra, cache = drafter_bytes(plan.host)
    layers = ", ".join(str(layer) for layer in parts.captures)
    read = f"layers {layers} and the final one" if layers else "the final hidden state"
    rows = [
        [
            f"target: {job.target}",
            f"{job.shape.num_parameters:,} parameters",
            f"{gib(job.target_bytes)} in {job.load.dtype}",
        ],
        [
            f"drafter: {job.drafter}",
            f"{parts.num_parameters:,} parameters",
            f"{parts.num_parameters / job.shape.num_parameters:.2%} of the target"
            + (
                f"; can draft {parts.draft_vocab:,} tokens"
                if parts.draft_vocab < job.shape.vocab_size
                else ""
            ),
        ],
        [
            "features",
            f"{disk(plan.job.token_bytes)} a token",
            f"{read}, {width} bytes a value",
        ],
        [
            "features, stored",
            disk(plan.job.token_bytes * plan.store_tokens),
            f"at most, for {count(plan.store_tokens)} tokens; plan.tokens says how many",
        ],
        [
            "training",
            f"{count(job.max_steps * job.load.tokens_per_step)} tokens",
            f"{job.max_steps:,} steps of {job.load.tokens_per_step:,}",
        ],
        [
            "serving the drafter",
            f"{gib(extra)} more",
            f"and {disk(cache)} of cache a request of {plan.host.context:,} tokens"
            if cache
            else "no cache of its own",
        ],
    ]
    return Table("What is planned", "", ["", "", ""], rows, [])


def components(plan: Plan, placement: str) -> Table:
    """Return memory by component for every `deepspeed`, with the target in one place."""
    costs = [cost for cost in plan.others if cost.memory.placement == placement]
    found = [cost.memory for cost in costs]
    shown = [name for name in NAMES if any(memory.parts[name] for memory in found)]
    rows = [[NAMES[name], *(_gib(memory.parts[name]) for memory in found)] for name in shown]
    rows.append(["total", *(_gib(memory.total) for memory in found)])
    rows.append(["left", *(_left(memory) for memory in found)])
    rows.append(["fits", *("yes" if memory.fits else "no" for memory in found)])
    if any(memory.host for memory in found):
        rows.append(["on the host, all ranks", *(_gib(memory.host) for memory in found)])
    whole = "this machine" if plan.job.chip.is_cpu else f"each {plan.job.chip.name}"
    return Table(
        f"Memory of {whole}, {_held(placement)}, by deepspeed=...",
        f"GiB of {_gib(plan.job.chip.memory)}; {_ranks(plan.job)}, micro batch of "
        f"{plan.job.load.rows} x {plan.job.load.length:,} tokens.",
        ["", *(memory.sharding.name.replace("_", "\n") for memory in found)],
        rows,
        [],
    )


def ways(plan: Plan) -> Table:
    """Return every way to shard: memory, speed, hours and money."""
    rows = [_way(cost, cost.memory == plan.chosen.memory) for cost in plan.others]
    return Table(
        "Every way to shard",
        "> is what was asked for.",
        ["target", "deepspeed", "GiB each", "GiB left", "", "tokens/s", "time", "money"],
        rows,
        [],
    )


def _way(cost: Cost, chosen: bool) -> list[str]:
    memory = cost.memory
    return [
        f"{'> ' if chosen else '  '}{WHERE[memory.placement]}",
        memory.sharding.name,
        _gib(memory.total),
        _left(memory),
        "fits" if memory.fits else "too much",
        three(cost.speed.tokens_per_s),
        hours(cost.hours),
        money(cost.dollars),
    ]


def time_and_money(plan: Plan) -> Table:
    """Return an optimizer step by what it waits for, and the run."""
    job, cost = plan.job, plan.chosen
    speed = cost.speed
    whole = speed.step_s
    rows = [
        [
            "target's pass",
            *_part(speed.target_s, whole),
            f"{count(speed.target_flops)} FLOP a token; waits for {speed.bound}",
        ],
        [
            "drafter",
            *_part(speed.drafter_s, whole),
            f"{count(speed.drafter_flops)} FLOP a token, forward and backward",
        ],
        ["update and all-reduce", *_part(speed.optimizer_s, whole), ""],
        [
            "optimizer step",
            seconds(whole),
            "",
            f"{three(speed.tokens_per_s)} tokens/s over all ranks",
        ],
        [
            "the run",
            hours(cost.hours),
            "",
            f"{three(cost.kilowatt_hours)} kWh, {money(cost.dollars)} at "
            f"${job.price_per_hour:.2f} an hour each",
        ],
    ]
    return Table("Time, energy and money", f"{job.chip.how}.", ["", "time", "", ""], rows, [])


def serving(plan: Plan) -> Table:
    """Return whether speculation pays, by batch."""
    first = plan.serving[0]
    rows = [
        [
            str(row.batch),
            seconds(row.plain_s),
            seconds(row.draft_s),
            seconds(row.verify_s),
            row.bound,
            f"{row.speedup:.2f}x",
            str(row.best_depth) if row.best_depth else "none",
            f"{row.best_speedup:.2f}x",
        ]
        for row in plan.serving
    ]
    spread = plan.host.spread
    machines = f"{spread} x {plan.job.chip.name}" if spread > 1 else plan.job.chip.name
    asked = round(first.acceptance_length, 2)
    return Table(
        f"Serving on {machines}: does speculation pay?",
        f"Acceptance length {asked}, {plan.host.context:,} tokens of context; the memory holds the "
        f"caches of {fitting(plan.host):,} requests.",
        ["requests", "plain step", "draft", "verify", "waits for", "speedup", "best depth", "then"],
        rows,
        [],
    )


def short_form(job: Job, cost: Cost) -> list[str]:
    """Return what `train` says before it loads anything."""
    memory, speed = cost.memory, cost.speed
    held = memory.placement != "stored"
    where = f"target {WHERE[memory.placement]}" if held else "stored features, no target"
    whose = "of this machine" if job.chip.is_cpu else f"on each {job.chip.name}"
    return [
        f"plan: target {count(job.shape.num_parameters)}, drafter "
        f"{count(job.parts.num_parameters)} parameters; {disk(job.token_bytes)} of features a "
        "token",
        f"  memory: about {gib(memory.total)} of {gib(memory.limit)} {whose} "
        f"({_ranks(job)}, {where})",
        f"  time: about {hours(cost.hours)} at {three(speed.tokens_per_s)} tokens/s; "
        f"{three(cost.kilowatt_hours)} kWh"
        + (f", {money(cost.dollars)}" if cost.dollars else "")
        + "; more: python -m drafttrain plan",
    ]


def notes(plan: Plan, source: str) -> list[str]:
    """Return what the numbers assume."""
    chip = plan.job.chip
    values = {"efficiency": chip.efficiency, "bandwidth": chip.bandwidth_efficiency}
    return [text.format(source=source, **values) for text in ASSUMED]


def money(dollars: float) -> str:
    """Return dollars, cents below a hundred."""
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:.2f}"


def _ranks(job: Job) -> str:
    number, here = job.load.ranks, job.load.ranks_here
    told = f"{number} rank{'s' if number > 1 else ''}"
    return f"{told}, {here} on each machine" if here < number else told


def _gib(value: float) -> str:
    return three(value / GIBIBYTE) if value >= 0.005 * GIBIBYTE else "0" if value == 0 else "0.00"


def _left(memory: Memory) -> str:
    room = memory.limit - memory.total
    return _gib(room) if room >= 0 else f"-{_gib(-room)}"


def _part(part: float, whole: float) -> tuple[str, str]:
    return seconds(part), f"{part / whole:.0%}"
