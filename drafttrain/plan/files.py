"""A plan on disk: JSON, Markdown, one HTML file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafttrain.plan.job import Cost, Job, Plan
from drafttrain.plan.memory import NAMES
from drafttrain.plan.pages import GIBIBYTE, components, headline, notes, tables
from drafttrain.report.document import Document, Figure
from drafttrain.report.document import notes as listed
from drafttrain.report.html import html
from drafttrain.report.markdown import markdown
from drafttrain.report.write import as_json, write_texts


def write_plan(plan: Plan, folder: Path, source: str) -> None:
    """Write plan.json, plan.md and plan.html, every way to shard by component."""
    from drafttrain.report.plots import memory_plot  # matplotlib takes a second

    # What was asked for first, the rest below it.
    own = plan.chosen.memory.placement
    placements = dict.fromkeys([own, *(cost.memory.placement for cost in plan.others)])
    first, _, *rest = tables(plan)
    shown = [first, *(components(plan, where) for where in placements), *rest]
    title = f"{plan.job.drafter} for {plan.job.target}: the plan"
    document = Document(
        "memory, time, disk and money",
        title,
        [headline(plan)],
        first=[listed("Advice", list(plan.advice))],
        rest=[*shown, listed("What the numbers assume", notes(plan, source))],
    )
    parts = {
        cost.memory.sharding.name: {
            NAMES[name]: value / GIBIBYTE for name, value in cost.memory.parts.items()
        }
        for cost in plan.others
        if cost.memory.placement == own
    }
    figure = Figure(
        "Memory by component",
        "Of one accelerator, for every deepspeed=..., with the target where it was asked for. The "
        "dashed line is what there is.",
        memory_plot(parts, plan.chosen.memory.limit / GIBIBYTE),
    )
    texts = {
        "plan.json": as_json(as_data(plan)),
        "plan.md": markdown(document),
        "plan.html": html(document, [figure]),
    }
    write_texts(texts, folder)


def as_data(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, bytes and seconds."""

    def told(cost: Cost) -> dict[str, Any]:
        memory = cost.memory
        return {
            "deepspeed": memory.sharding.name,
            "target": memory.placement,
            "bytes": {**memory.parts, "total": memory.total},
            "host_bytes": memory.host,
            "fits": memory.fits,
            "headroom_bytes": memory.limit - memory.total,
            "speed": asdict(cost.speed),
            "hours": cost.hours,
            "kilowatt_hours": cost.kilowatt_hours,
            "dollars": cost.dollars,
        }

    job = plan.job
    return {
        "target": {"name": job.target, "num_parameters": job.shape.num_parameters}
        | asdict(job.shape),
        "drafter": {"name": job.drafter} | _drafter(job),
        "accelerator": asdict(job.chip),
        "load": asdict(job.load),
        "feature_bytes_per_token": plan.job.token_bytes,
        "store_tokens": plan.store_tokens,
        "store_bytes": plan.job.token_bytes * plan.store_tokens,
        "headline": headline(plan),
        "chosen": told(plan.chosen),
        "choices": [told(cost) for cost in plan.others],
        "serving": [asdict(row) for row in plan.serving],
        "serving_accelerators": plan.host.spread,
        "break_even_batch": plan.break_even,
        "advice": list(plan.advice),
    }


def _drafter(job: Job) -> dict[str, Any]:
    parts = job.parts
    found = {key: value for key, value in vars(parts).items() if key not in ("step", "draft")}
    found |= asdict(parts.draft())
    step = parts.step(job.load.checkpointing)
    return found | {"flops_per_token": step.flops, "flops_per_key": step.flops_per_key}
