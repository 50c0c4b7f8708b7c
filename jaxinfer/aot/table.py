"""Reports of compiled steps in words, rows and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.aot.report import StepReport
from jaxinfer.aot.targets import GIB, Target
from jaxinfer.steps.compiled import Compiled

COLUMNS = (
    *("fits", "weights GiB", "cache GiB", "arguments / (weights + cache)", "moved / (weights + cache)"),
    *("temporary / weights", "FLOPs / model", "all-reduces", "other collectives", "copies", "compile s"),
)


def describe_step(report: StepReport) -> dict[str, Any]:
    """Returns a report as plain values: bytes, seconds, counts and text."""
    cost = report.cost
    return {
        "fits": report.fits,
        "why": report.why,
        "seconds": round(report.seconds, 2),
        "argument_bytes": {"weights": report.weights, "cache": report.cache, "rest": report.rest},
        "weight_bytes": dict(report.roles),
        "temporary_bytes": report.temporary,
        "peak_bytes": report.peak,
        "moved_bytes": cost.num_bytes,
        "flops": cost.flops,
        "model_flops": report.model_flops,
        "collectives": dict(cost.collectives),
        "collective_bytes": dict(cost.collective_bytes),
        "host_calls": cost.host_calls,
        "copies": [str(copy) for copy in report.copies],
    }


def row_of(report: StepReport) -> list[str]:
    """Returns a report as a row of `COLUMNS`."""
    sizes = [f"{size / GIB:.2f}" for size in (report.weights, report.cache)]
    if not report.fits and not report.peak:
        return [f"no: {report.why}", *sizes, *["-"] * (len(COLUMNS) - 3)]
    reduces = report.cost.collectives.get("all-reduce", 0)
    return [
        "yes" if report.fits else f"no: {report.why}",
        *sizes,
        *(f"{ratio:.3f}" for ratio in (report.arguments_ratio, report.moved_ratio, report.temporary_ratio)),
        f"{report.flops_ratio:.2f}",
        str(reduces) if reduces else "none",
        _tell_collectives(report, but="all-reduce"),
        str(len(report.copies)) if report.copies else "none",
        f"{report.seconds:.1f}",
    ]


def find_misses(report: StepReport, *, is_prefill: bool) -> list[str]:
    """Returns which bounds of a step that serves well a report misses, in words; none for one that does not fit.

    Arguments are the weights and the cache, within 1 %; nothing that is stored is copied, nothing asked of the host.
    Decode moves them once, with 15 % more for all else, and its temporary memory is under a tenth of the weights;
    prefill multiplies at most a tenth more than the model. What crosses a mesh stands in columns of its own.
    """
    if not report.peak:
        return []
    bounds = {
        "arguments": abs(report.arguments_ratio - 1) <= 0.01,
        "moved": is_prefill or report.moved_ratio <= 1.15,
        "FLOPs": not is_prefill or report.flops_ratio <= 1.1,
        "temporary": is_prefill or report.temporary_ratio < 0.1,
        "copies": not report.copies,
        "host calls": not report.cost.host_calls,
    }
    return [name for name, is_met in bounds.items() if not is_met]


def _tell_collectives(report: StepReport, but: str = "") -> str:
    """Returns what crosses devices in one run, all ``but`` one kind: ``65 all-reduce (33 MiB)``."""
    cost = report.cost
    parts = [
        f"{count} {name} ({cost.collective_bytes[name] / 2**20:.3g} MiB)"
        for name, count in cost.collectives.items()
        if name != but
    ]
    return ", ".join(parts) or "none"


def tell(name: str, report: StepReport, target: Target) -> str:
    """Returns a report in a few lines.

    Args:
      name: of the step. report: of it. target: whose chip gives the times that memory and products take at least.
    """
    weights, cache, rest, temporary, moved, arguments = (
        f"{size / GIB:.3f}" if size < GIB else f"{size / GIB:.2f}"
        for size in (
            *(report.weights, report.cache, report.rest, report.temporary, report.cost.num_bytes),
            report.weights + report.cache + report.rest,
        )
    )
    if not report.peak:
        return f"{name}: does not fit: {report.why}; weights {weights}, cache {cache} GiB"
    chip = target.described
    lines = [
        f"{name}: {'fits' if report.fits else 'does not fit: ' + report.why}, "
        f"compiled in {report.seconds:.1f} s",
        f"  arguments {arguments} GiB: weights {weights}, cache {cache}, rest {rest}; temporary {temporary}; "
        f"peak {report.peak / GIB:.3f} of {chip.memory_bytes / GIB:.2f}",
        "  weights: " + ", ".join(f"{role} {size / GIB:.3f}" for role, size in report.roles.items()),
        f"  moved {moved} GiB ({report.moved_ratio:.2f} of weights and cache), at least "
        f"{1e3 * report.cost.num_bytes / chip.bandwidth:.1f} ms; {report.cost.flops / 1e12:.2f} TFLOP "
        f"({report.flops_ratio:.2f} of the model's), at least {1e3 * report.cost.flops / chip.flops:.1f} ms",
        f"  collectives: {_tell_collectives(report)}; host calls: {report.cost.host_calls}",
    ]
    return "\n".join([*lines, *(f"  {copy}" for copy in report.copies)])


def tell_table(executables: Mapping[str, Compiled], seconds: float) -> str:
    """Returns the executables of a run in lines, and what they took together.

    Args:
      executables: by name. seconds: from the first to the last, several at once.
    """
    lines = [f"  {name}: {made}" for name, made in executables.items()]
    alone = sum(made.seconds for made in executables.values())
    last = f"{len(executables)} executables of the bucket table compiled in {seconds:.0f} s ({alone:.0f} one by one)"
    return "\n".join([*lines, last])


def describe_executables(executables: Mapping[str, Compiled], seconds: float) -> dict[str, Any]:
    """Returns what `tell_table` tells as plain values."""
    each = {
        name: {"seconds": round(made.seconds, 2), "temporary_bytes": made.temp_bytes}
        for name, made in executables.items()
    }
    return {"count": len(each), "seconds": round(seconds, 2), "each": each}
