"""What a policy makes of a model's parameters: formats and bytes by role, in numbers and in words."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import jax

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import abstract, fit_format
from jaxinfer.arrays.specs import FLOAT32_ROLES, flatten_specs

_NAMES = {"matrix": "matrices", "embedding": "embedding", "head": "head"}


def count_bytes(specs: Any, policy: Policy) -> dict[str, Counter[Format]]:
    """Returns the bytes of parameters by role (matrices, embedding, head, the rest) and format, scales included.

    Args:
      specs: tree of `ParamSpec`. policy: names the format of each.
    """
    counts: dict[str, Counter[Format]] = {}
    for path, spec in flatten_specs(specs):
        fmt = fit_format(spec, policy.format_of(path, spec))
        leaves = jax.tree.leaves(abstract(spec, fmt))
        role = "the rest" if spec.role in FLOAT32_ROLES else _NAMES[spec.role]
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        counts.setdefault(role, Counter())[fmt] += size
    return counts


def tell_weights(specs: Any, policy: Policy) -> str:
    """Returns a line on the bytes that each role takes: ``weights 133 MiB: matrices int4:g64 36.1 MiB, ...``."""
    counts = count_bytes(specs, policy)
    roles = [
        f"{role} " + " + ".join(f"{fmt} {size / 2**20:.4g} MiB" for fmt, size in by.most_common())
        for role, by in counts.items()
    ]
    return f"weights {sum(map(Counter.total, counts.values())) / 2**20:.0f} MiB: {', '.join(roles)}"


def tell_fitted(specs: Any, policy: Policy) -> list[str]:
    """Returns a line on each format that does not suit a weight's inputs, and what takes its place."""
    fitted: dict[tuple[Format, Format, int], list[str]] = {}
    for path, spec in flatten_specs(specs):
        fmt = policy.format_of(path, spec)
        got = fit_format(spec, fmt)
        if got != (replace(fmt, rotation=got.rotation) if got.rotation else fmt):
            fitted.setdefault((fmt, got, spec.shape[-1]), []).append(path)
    return [
        f"{got} in place of {fmt}, which does not suit {last} inputs: {len(paths)} weights ({paths[0]}, ...)"
        for (fmt, got, last), paths in fitted.items()
    ]
