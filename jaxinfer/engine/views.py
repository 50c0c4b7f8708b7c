"""What is told of an engine from outside: counts of the moment, totals, and why a prefix was not found."""

from __future__ import annotations

from jaxinfer.engine.metrics import EngineMetrics, EngineStats
from jaxinfer.schedule.plan import Plan
from jaxinfer.schedule.request import Request
from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.schedule.shares import SharedScheduler


def read_stats(scheduler: Scheduler | SharedScheduler, num_queued: int, num_compilations: int) -> EngineStats:
    """Returns counts of this moment; ``num_queued`` sequences are on their way to the scheduler."""
    config, pool, host = scheduler.config, scheduler.pool, scheduler.prefix.host
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + num_queued,
        max_num_seqs=config.max_num_seqs,
        max_num_waiting=config.max_num_waiting,
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        pages_used=pool.num_used,
        pages_shared=pool.num_shared,
        pages_cached=pool.num_cached,
        host_pages=host.num_slots,
        host_pages_used=len(host),
        compilations=num_compilations,
    )


def count_step(metrics: EngineMetrics, plan: Plan, scheduler: Scheduler | SharedScheduler) -> None:
    """Brings the totals up to date after a step."""
    metrics.num_steps += 1
    num_tokens = len(plan.decode) * plan.num_decode_steps + sum(len(piece.tokens) for piece in plan.prefill)
    metrics.iteration_tokens.add(num_tokens)
    counts = scheduler.prefix.counts
    metrics.prefix_queries, metrics.prefix_hits = counts.queries, counts.hits
    metrics.preemptions = scheduler.preemptions


def explain(request: Request) -> dict[str, object]:
    """Returns what the prefix cache did for a request, and why not more."""
    report = request.prefix.report
    return {
        "prompt_tokens": len(request.spec.prompt),
        "cached_tokens": None if report is None else report.num_cached,
        "first_missing_page": None if report is None else report.first_missing,
        "reason": "it has not run yet" if report is None else report.reason,
        "salted": request.spec.cache_salt is not None,
    }
