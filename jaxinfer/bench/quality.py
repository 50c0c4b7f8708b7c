"""Policies beside each other: a table for people, and a picture of quality against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.bench.table import align

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = Mapping[str, Any]  # as `jaxinfer score --policies --json` writes them


def format_quality(found: Sequence[Figures]) -> str:
    """Returns a table, a policy a line; the first is the reference.

    Args:
      found: the figures of each policy.
    """
    roles = list(dict.fromkeys(role for one in found for role in one["weight_bytes"]))
    speeds = list(dict.fromkeys(name for one in found for name in one["tokens_per_second"]))
    header = ["policy", *(f"{role} MiB" for role in roles), "KV B/token", "perplexity", "KL nats", "top-1"]
    rows = [[*header, *(f"{name} tok/s" for name in speeds)]]
    for one in found:
        sizes = [f"{one['weight_bytes'].get(role, 0) / 2**20:.1f}" for role in roles]
        quality = [f"{one['perplexity']:.4f}", f"{one['kl']:.5f}", f"{one['top1']:.2%}"]
        fast = [_speed(one["tokens_per_second"].get(name)) for name in speeds]
        rows.append([one["policy"], *sizes, f"{one['kv_bytes_a_token']:,.0f}", *quality, *fast])
    return align(rows)


def draw_quality(found: Sequence[Figures], path: str, title: str) -> None:
    """Writes a picture: KL to the reference, and perplexity, against the bytes of weights and a window's KV.

    Args:
      found: the figures of each policy, the reference first. path: the file. title: what was measured.

    Raises:
      ValueError: matplotlib is not installed, or has no such format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'jaxinfer[plots]'") from None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_points(left, found, "kl")
    # A policy that gives the reference's own numbers has no place on a logarithmic axis.
    left.set(yscale="log", ylabel="mean KL to the reference, nats (0 is not shown)")
    _draw_points(right, found, "perplexity")
    right.legend(fontsize=8)
    right.axhline(found[0]["perplexity"], color="#999999", linestyle=":", linewidth=1)
    right.set(ylabel="perplexity (dotted: the reference)")
    for axes in (left, right):
        axes.set(xlabel="MiB of weights and of a window's KV")
        axes.margins(x=0.12, y=0.12)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_points(axes: Axes, found: Sequence[Figures], name: str) -> None:
    """Each policy as a point, told by its form and colour: names are long and points lie close."""
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
    markers = "osD^vPX"
    for i, one in enumerate(found):
        if one[name] > 0:
            axes.plot(
                one["bytes"] / 2**20, one[name], markers[i % len(markers)], color=colours[i % len(colours)],
                markersize=7, linestyle="none", label=one["policy"],
            )  # fmt: skip


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:,.{0 if value >= 100 else 1}f}"
