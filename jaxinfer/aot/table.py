"""Reports of compiled steps in words, rows and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.aot.report import StepReport
from jaxinfer.aot.targets import GIB, Target

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
        "temporary_bytes": report.temporary,
        "peak_bytes": report.peak,
        "moved_bytes": cost.num_bytes,
        "flops": cost.flops,
        "model_flops": report.model_flops,
        "collectives": dict(cost.collectives),
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
    collectives = ", ".join(f"{count} {name}" for name, count in report.cost.collectives.items())
    return [
        "yes" if report.fits else f"no: {report.why}",
        *(f"{size / GIB:.3f}" if size < GIB else f"{size / GIB:.2f}" for size in sizes),
        f"{report.cost.num_bytes / (report.weights + report.cache):.2f}",
        f"{report.cost.flops / report.model_flops:.2f}",
        collectives or "none",
        str(len(report.copies)) if report.copies else "none",
        f"{report.seconds:.1f}",
    ]


def tell(name: str, report: StepReport, target: Target) -> str:
    """Returns a report in a few lines.

    Args:
      name: of the step. report: of it. target: whose chip gives the times that memory and products take at least.
    """
    cells: Mapping[str, str] = dict(zip(COLUMNS, row_of(report), strict=True))
    if not report.peak:
        return f"{name}: does not fit: {report.why}"
    chip = target.described
    lines = [
        f"{name}: {'fits' if report.fits else 'does not fit: ' + report.why}, "
        f"compiled in {report.seconds:.1f} s",
        f"  arguments {(report.weights + report.cache + report.rest) / GIB:.3f} GiB: weights {cells['weights GiB']}, "
        f"cache {cells['cache GiB']}, rest {cells['rest GiB']}; temporary {cells['temporary GiB']}; "
        f"peak {report.peak / GIB:.3f} of {chip.memory_bytes / GIB:.2f}",
        f"  moved {cells['moved GiB']} GiB ({cells['moved / arguments']} of weights and cache), at least "
        f"{1e3 * report.cost.num_bytes / chip.bandwidth:.1f} ms; {report.cost.flops / 1e12:.2f} TFLOP "
        f"({cells['FLOPs / model']} of the model's), at least {1e3 * report.cost.flops / chip.flops:.1f} ms",
        f"  collectives: {cells['collectives']}; host calls: {report.cost.host_calls}",
    ]
    return "\n".join([*lines, *(f"  {copy}" for copy in report.copies)])
