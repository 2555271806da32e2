"""A plan on disk: JSON, Markdown, one HTML file."""

from pathlib import Path
from typing import Any

from drafttrain.plan.advice import Plan, ServingPlan
from drafttrain.plan.pages import blocks, headline
from drafttrain.plan.throughput import Cost
from drafttrain.report.document import Document
from drafttrain.report.write import write_pages

FILES = ("plan.json", "plan.md", "plan.html")


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
