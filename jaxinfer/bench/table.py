"""A bench for people: one column a target, one line a number, ratios where there are two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxinfer.bench.report import Report, compare_reports, median_numbers

_ROWS = {
    "system_tps": "output tokens/s",
    "total_tps": "prompt and output tokens/s",
    "user_tps": "tokens/s a stream",
    "request_rate": "requests/s",
    "goodput": "good requests/s",
    "hit_rate": "prompt tokens cached",
}
_LATENCIES = {"ttft": "TTFT", "itl": "ITL", "e2e": "end to end"}


def format_reports(runs: Mapping[str, Sequence[Report]]) -> str:
    """Returns the medians over repetitions of each target, and ratios to the second where there are two.

    Args:
      runs: the repetitions of each target, by its name.
    """
    numbers = {name: median_numbers(reports) for name, reports in runs.items()}
    shown = [key for key in _names() if any(key in one for one in numbers.values())]
    repeat = max(map(len, runs.values()))
    header = [f"median of {repeat} runs" if repeat > 1 else "", *runs]
    ratios: dict[str, tuple[float, float, float]] = {}
    if len(runs) == 2:
        ratios = compare_reports(*runs.values())
        header.append("first / second" + (" (least-most)" if repeat > 1 else ""))
    rows = [header]
    for key in shown:
        cells = [_format(key, one.get(key)) for one in numbers.values()]
        if len(runs) == 2:
            cells.append(_format_ratio(ratios.get(key), repeat))
        rows.append([_title(key), *cells])
    counts = [["answered", *(_counts(reports) for reports in runs.values())]]
    counts += [
        ["late at p99, ms", *(f"{1e3 * max(r.late for r in reports):.1f}" for reports in runs.values())]
    ]
    if any(r.client_cores is not None for reports in runs.values() for r in reports):
        counts.append(["load generator, cores", *map(_cores, runs.values())])
    width = len(header)
    return align([*rows, *([*row, *[""] * (width - len(row))] for row in counts)])


def _names() -> list[str]:
    return [*_ROWS, *(f"{name}.{key}" for name in _LATENCIES for key in ("mean", "p50", "p90", "p99"))]


def _title(key: str) -> str:
    name, _, statistic = key.partition(".")
    return f"{_LATENCIES[name]} {statistic}, ms" if statistic else _ROWS[key]


def _format(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "hit_rate":
        return f"{value:.1%}"
    value = 1e3 * value if "." in key else value
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"


def _format_ratio(ratio: tuple[float, float, float] | None, repeat: int) -> str:
    if ratio is None:
        return "-"
    median, least, most = ratio
    return f"{median:.2f}" + (f" ({least:.2f}-{most:.2f})" if repeat > 1 else "")


def _counts(reports: Sequence[Report]) -> str:
    return f"{sum(r.num_ok for r in reports)} of {sum(r.num_requests for r in reports)}"


def _cores(reports: Sequence[Report]) -> str:
    known = [report.client_cores for report in reports if report.client_cores is not None]
    return f"{max(known):.2f}" if known else "-"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
