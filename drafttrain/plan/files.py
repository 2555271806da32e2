"""A plan on disk: JSON, Markdown, one HTML file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafttrain.plan.advice import Plan, ServingPlan
from drafttrain.plan.memory import NAMES
from drafttrain.plan.pages import components, headline, notes, tables, tiles
from drafttrain.plan.shapes import BIASES
from drafttrain.plan.throughput import Cost
from drafttrain.plan.units import GIB
from drafttrain.report.document import Document
from drafttrain.report.document import notes as listed
from drafttrain.report.plots import memory_figure
from drafttrain.report.write import write_pages

FILES = ("plan.json", "plan.md", "plan.html")


def write_plan(plan: ServingPlan, folder: Path, source: str) -> None:
    """Write plan.json, plan.md and plan.html, with every way to shard by component."""
    first, *rest = tables(plan)
    figures = []
    if isinstance(plan, Plan):
        # The placement that was asked for comes first.
        own = plan.chosen.memory.placement
        placements = dict.fromkeys([own, *(cost.memory.placement for cost in plan.others)])
        rest[:1] = [components(plan, where) for where in placements]
        parts = {
            cost.memory.sharding.name: {
                NAMES[name]: value / GIB for name, value in cost.memory.parts.items()
            }
            for cost in plan.others
            if cost.memory.placement == own
        }
        figures = [memory_figure(parts, plan.chosen.memory.limit / GIB)]
    document = Document(
        "memory, time, disk and money",
        f"{plan.job.drafter} for {plan.job.target}: the plan",
        [headline(plan)],
        tiles=tiles(plan) if isinstance(plan, Plan) else [],
        first=[listed("Advice", list(plan.advice))],
        rest=[first, *rest, listed("What the numbers assume", notes(plan, source))],
    )
    write_pages(folder, "plan", document, figures, as_data(plan))


SHAPE = (
    *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_embeddings"),
    *("max_positions", "rope_theta", "rms_norm_eps", *BIASES),
)


def as_data(plan: ServingPlan) -> dict[str, Any]:
    """Return the plan as plain data, in bytes and seconds."""
    job, shape, parts = plan.job, plan.job.shape, plan.job.parts
    counted = {key: value for key, value in vars(parts).items() if key not in ("step", "draft")}
    served: dict[str, Any] = {
        "target": {"name": job.target, "num_parameters": shape.num_parameters}
        | {key: getattr(shape, key) for key in SHAPE}
        | {"layer": asdict(shape.layer)},
        "drafter": {"name": job.drafter, **counted, **asdict(parts.draft())},
        "accelerator": asdict(job.chip),
        "load": asdict(job.load),
        "headline": headline(plan),
        "serving": [asdict(row) for row in plan.serving],
        "serving_accelerators": plan.host.spread,
        "paying_batches": plan.paying,
        "full_load": asdict(plan.full),
        "advice": list(plan.advice),
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
        "speed": asdict(cost.speed),
        "hours": cost.hours,
        "kilowatt_hours": cost.kilowatt_hours,
        "dollars": cost.dollars,
    }
