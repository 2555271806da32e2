"""A whole plan from a run's configuration: no weight, no data, no network."""

from collections.abc import Sequence
from dataclasses import replace

from drafttrain.plan.advice import advise
from drafttrain.plan.config import PlanSettings
from drafttrain.plan.job import Job, Plan, cost, memory_of, place
from drafttrain.plan.memory import Sharding, combinations
from drafttrain.plan.serving import Host, break_even, serve, spread_of


def host_of(job: Job, settings: PlanSettings) -> Host:
    """Return target and drafter as they are served, on as few accelerators as hold them."""
    width = 2 if job.load.dtype == "bfloat16" else 4
    return Host(
        shape=job.shape,
        parts=job.parts,
        chip=job.chip,
        target_bytes=job.target_bytes,
        dtype=job.load.dtype,
        dtype_bytes=width,
        context=settings.context,
        spread=settings.serving_gpus or spread_of(job.target_bytes, job.chip),
    )


def build_plan(
    job: Job,
    settings: PlanSettings,
    sharding: Sharding,
    placement: str,
    shardings: Sequence[Sharding],
) -> Plan:
    """Return the plan of a job: its own way to shard, all others, serving, and advice."""
    chosen = cost(job, place(job, sharding, placement))
    others = tuple(
        cost(job, memory_of(job, way, where))
        for way, where in combinations(shardings, job.load.ranks)
    )
    host = host_of(job, settings)
    acceptance = settings.depth, settings.acceptance_rate, settings.acceptance_length
    plan = Plan(
        job=job,
        chosen=chosen,
        others=others,
        store_tokens=settings.tokens
        or min(job.trained_tokens, job.data_tokens or job.trained_tokens),
        depth=settings.depth,
        host=host,
        serving=tuple(serve(host, batch, *acceptance) for batch in settings.batch_sizes),
        break_even=break_even(host, *acceptance),
        advice=(),
    )
    return replace(plan, advice=tuple(advise(plan, settings)))
