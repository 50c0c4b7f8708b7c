"""What `bench_cpu.py` measured, as tables for people: figures, ratios beside their targets, and the limit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.bench.table import align

OURS = "jaxinfer"
RATES = ("prefill", "x1", "x8", "x16")  # tokens a second; `start_*` are seconds
STARTS = ("start_cold", "start_warm")

Samples = Mapping[str, Mapping[str, Sequence[float]]]  # by engine, then case


class Target(NamedTuple):
    """The least ratio of our best engine to a peer's best in a case."""

    case: str
    peer: str
    least: float


TARGETS: dict[str, tuple[Target, ...]] = {
    "smollm2": (
        Target("prefill", "llama.cpp", 2.5),
        Target("x1", "llama.cpp", 0.3),
        Target("x8", "llama.cpp", 1.0),
        Target("x16", "llama.cpp", 1.3),
        Target("prefill", "transformers", 1.0),
        Target("x1", "transformers", 1.5),
        Target("x8", "transformers", 2.0),
        Target("x16", "transformers", 2.0),
    ),
    "gemma": tuple(Target(case, "transformers", 0.8) for case in RATES),
}
MOST_SECONDS = {"start_cold": 8.0, "start_warm": 4.0}


@dataclass(frozen=True)
class Ratio:
    """Our best against a peer's best: medians, the engines they are of, and the target, None where there is none."""

    case: str
    ours: str
    peer: str
    value: float
    least: float | None


def targets_of(model: str) -> tuple[Target, ...]:
    """Returns the targets of a model by its name or file name, none for a model that has none."""
    lowered = model.lower().replace("-", "").replace("_", "")
    return next((targets for word, targets in TARGETS.items() if word in lowered), ())


def compare(samples: Samples, targets: Iterable[Target]) -> list[Ratio]:
    """Returns our best engine's ratio to the best of each group of peers (the engine's name before the space)."""
    least = {(target.case, target.peer): target.least for target in targets}
    groups = list(dict.fromkeys(engine.split()[0] for engine in samples if engine.split()[0] != OURS))
    ratios = []
    for group in groups:
        for case in RATES:
            ours, theirs = _best(samples, OURS, case), _best(samples, group, case)
            if ours and theirs:
                ratios.append(Ratio(case, ours[0], theirs[0], ours[1] / theirs[1], least.get((case, group))))
    return ratios


def _best(samples: Samples, group: str, case: str) -> tuple[str, float] | None:
    """The engine of a group with the highest median in a case."""
    medians = [
        (engine, statistics.median(cases[case]))
        for engine, cases in samples.items()
        if engine.split()[0] == group and cases.get(case)
    ]
    return max(medians, key=lambda pair: pair[1], default=None)


def format_figures(samples: Samples, peaks: Mapping[str, float]) -> str:
    """Returns a line an engine: medians, the range below them, and the most memory in MB (10^6 bytes)."""
    cases = [case for case in (*RATES, *STARTS) if any(measured.get(case) for measured in samples.values())]
    header = ["median (least-most)", *(_title(case) for case in cases), *(["peak MB"] if peaks else [])]
    rows = [header]
    for engine, measured in samples.items():
        row = [engine, *(_spread(measured.get(case, ()), case in STARTS) for case in cases)]
        if peaks:
            row.append(f"{peaks[engine] / 1e6:.0f}" if engine in peaks else "-")
        rows.append(row)
    return align(rows)


def _title(case: str) -> str:
    return {"prefill": "prefill tok/s", "start_cold": "start s, cold", "start_warm": "start s, warm"}.get(
        case, f"{case} tok/s"
    )


def _spread(values: Sequence[float], seconds: bool) -> str:
    if not values:
        return "-"
    digits = 2 if seconds else 0 if min(values) >= 100 else 1
    median, low, high = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low}-{high})"


def format_ratios(ratios: Sequence[Ratio], samples: Samples, has_targets: bool) -> str:
    """Returns a line a ratio with its target and a verdict, then our start times with theirs."""
    rows = [["case", "ours / peer", "got", "target", ""]]
    for ratio in ratios:
        names = f"{ratio.ours} / {ratio.peer}"
        if ratio.least is None:
            rows.append([ratio.case, names, f"{ratio.value:.2f}", "-", ""])
        else:
            passed = ratio.value >= ratio.least
            rows.append([ratio.case, names, f"{ratio.value:.2f}", f">= {ratio.least}", _verdict(passed)])
    for case in STARTS if has_targets else ():
        for engine, measured in samples.items():
            if engine.split()[0] == OURS and measured.get(case):
                seconds, most = statistics.median(measured[case]), MOST_SECONDS[case]
                rows.append([case, engine, f"{seconds:.2f} s", f"< {most} s", _verdict(seconds < most)])
    return align(rows)


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def limit_rate(case: str, weight_bytes: float, bandwidth: float) -> float:
    """Returns the tokens a second of decode when a step does nothing but read the weights once."""
    return int(case.removeprefix("x")) * bandwidth / weight_bytes


def format_limits(
    samples: Samples, weight_bytes: Mapping[str, float], bandwidths: Mapping[str, float]
) -> str:
    """Returns what reading the weights allows, and our share of it.

    Args:
      samples: tokens a second. weight_bytes: that a step reads, by engine. bandwidths: bytes a second measured over
        a buffer of that size, by engine.
    """
    rows = [["limit by memory", "weights MB", "read GB/s", "case", "limit tok/s", "reached"]]
    for engine, num_bytes in weight_bytes.items():
        for case in RATES[1:]:
            values = samples[engine].get(case)
            if values:
                limit = limit_rate(case, num_bytes, bandwidths[engine])
                reached = statistics.median(values) / limit
                numbers = [f"{num_bytes / 1e6:.0f}", f"{bandwidths[engine] / 1e9:.1f}"]
                rows.append([engine, *numbers, case, f"{limit:.0f}", f"{reached:.0%}"])
    return align(rows)
