"""Reports of compiled steps in words, rows and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.aot.report import StepReport
from jaxinfer.aot.targets import GIB, Target
from jaxinfer.steps.compiled import Compiled

COLUMNS = (
    *("fits", "weights GiB", "cache GiB", "rest GiB", "temporary GiB", "moved GiB"),
    *("moved / arguments", "FLOPs / model", "collectives", "copies", "compile s"),
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
    sizes = [report.weights, report.cache, report.rest, report.temporary, report.cost.num_bytes]
    if not report.fits and not report.peak:
        return [
            f"no: {report.why}",
            *(f"{size / GIB:.2f}" for size in sizes[:2]),
            *["-"] * (len(COLUMNS) - 3),
        ]
    return [
        "yes" if report.fits else f"no: {report.why}",
        *(f"{size / GIB:.3f}" if size < GIB else f"{size / GIB:.2f}" for size in sizes),
        f"{report.cost.num_bytes / (report.weights + report.cache):.2f}",
        f"{report.cost.flops / report.model_flops:.2f}",
        tell_collectives(report),
        str(len(report.copies)) if report.copies else "none",
        f"{report.seconds:.1f}",
    ]


def tell_collectives(report: StepReport) -> str:
    """Returns what crosses devices in one run: ``65 all-reduce (33 MiB)``."""
    cost = report.cost
    parts = [
        f"{count} {name} ({cost.collective_bytes[name] / 2**20:.3g} MiB)"
        for name, count in cost.collectives.items()
    ]
    return ", ".join(parts) or "none"


def tell(name: str, report: StepReport, target: Target) -> str:
    """Returns a report in a few lines.

    Args:
      name: of the step. report: of it. target: whose chip gives the times that memory and products take at least.
    """
    cells: Mapping[str, str] = dict(zip(COLUMNS, row_of(report), strict=True))
    if not report.peak:
        return f"{name}: does not fit: {report.why}; weights {cells['weights GiB']}, cache {cells['cache GiB']} GiB"
    chip = target.described
    lines = [
        f"{name}: {'fits' if report.fits else 'does not fit: ' + report.why}, "
        f"compiled in {report.seconds:.1f} s",
        f"  arguments {(report.weights + report.cache + report.rest) / GIB:.3f} GiB: weights {cells['weights GiB']}, "
        f"cache {cells['cache GiB']}, rest {cells['rest GiB']}; temporary {cells['temporary GiB']}; "
        f"peak {report.peak / GIB:.3f} of {chip.memory_bytes / GIB:.2f}",
        "  weights: " + ", ".join(f"{role} {size / GIB:.3f}" for role, size in report.roles.items()),
        f"  moved {cells['moved GiB']} GiB ({cells['moved / arguments']} of weights and cache), at least "
        f"{1e3 * report.cost.num_bytes / chip.bandwidth:.1f} ms; {report.cost.flops / 1e12:.2f} TFLOP "
        f"({cells['FLOPs / model']} of the model's), at least {1e3 * report.cost.flops / chip.flops:.1f} ms",
        f"  collectives: {cells['collectives']}; host calls: {report.cost.host_calls}",
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
