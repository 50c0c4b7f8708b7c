"""A bench as a picture: when requests ran, and how TTFT and ITL are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxinfer.bench.report import percentile
from jaxinfer.bench.results import Result
from jaxinfer.bench.run import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by people who see few colours
_MOST_BARS = 400


def draw_plot(targets: Sequence[Target], path: str) -> None:
    """Writes a PNG (or what the path's ending says).

    Args:
      targets: measured. path: the file.

    Raises:
      ValueError: matplotlib is not installed, or has no such format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'jaxinfer[plots]'") from None
    num_rows = len(targets)
    figure = Figure(figsize=(11, 3.4 + 2.6 * num_rows), layout="constrained")
    grid = figure.add_gridspec(1 + num_rows, 2, height_ratios=[1.2, *[1] * num_rows])
    for column, name in enumerate(("ttft", "itl")):
        _draw_distributions(figure.add_subplot(grid[0, column]), targets, name)
    end = max((result.end for target in targets for result in target.runs[0]), default=0.0)
    for row, (target, colour) in enumerate(zip(targets, _cycle(num_rows), strict=True)):
        _draw_timeline(figure.add_subplot(grid[1 + row, :]), target, colour, end)
    figure.savefig(path, dpi=120)


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _good(target: Target) -> list[Result]:
    return [result for run in target.runs for result in run if result.error is None]


def _draw_distributions(axes: Axes, targets: Sequence[Target], name: str) -> None:
    """Cumulative, with the 99th percentile marked: the tail shows, and no bin hides anything."""
    right = 0.0
    for target, colour in zip(targets, _cycle(len(targets)), strict=True):
        good = _good(target)
        seconds = [r.ttft for r in good] if name == "ttft" else [gap for r in good for gap in r.gaps]
        if not seconds:
            axes.plot([], [], color=colour, label=f"{target.name}: none")
            continue
        values = sorted(1e3 * value for value in seconds)
        p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
        shares = [i / len(values) for i in range(len(values) + 1)]
        label = f"{target.name}: p50 {p50:.1f}, p99 {p99:.1f}"
        axes.step([values[0], *values], shares, where="post", color=colour, label=label)
        axes.axvline(p99, color=colour, linestyle=":", linewidth=1)
        right = max(right, 1.5 * p99)  # the last of all may lie far out
    title, unit = {"ttft": ("Time to first token", "requests"), "itl": ("Inter-token latency", "gaps")}[name]
    axes.set(title=title, xlabel="milliseconds (dotted: p99)", ylabel=f"share of {unit}")
    axes.set_xlim(0, right or 1.0)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)


def _draw_timeline(axes: Axes, target: Target, colour: str, end: float) -> None:
    """A line a request of the first repetition: waiting for the first token pale, then its tokens."""
    results = target.runs[0][:_MOST_BARS]
    for place, result in enumerate(results):
        if result.error is not None:
            axes.plot([result.end], [place], "x", color="#c00000", markersize=4)
            continue
        axes.hlines(place, result.sent, result.times[0], color="#bbbbbb", linewidth=1.6)
        axes.hlines(place, result.times[0], result.end, color=colour, linewidth=1.6)
    rest = len(target.runs[0]) - len(results)
    axes.set(
        title=f"{target.name}: requests over time (grey waits for the first token, x failed)",
        xlabel="seconds after the start",
        ylabel="request" + (f" (first {_MOST_BARS})" if rest else ""),
    )
    axes.set_xlim(0, 1.02 * end or 1.0)
    axes.invert_yaxis()
