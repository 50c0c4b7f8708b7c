"""Paged attention: the one door to its implementations, chosen by name when a run is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.kernels.attention.blocked import paged_attention_blocked
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.reference import paged_attention_reference

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "blocked": paged_attention_blocked,
    "reference": paged_attention_reference,
}


def choose_attention(name: str = "auto") -> str:
    """Returns the implementation that a run will use.

    Args:
      name: ``auto`` or a key of `IMPLEMENTATIONS`.

    Raises:
      ValueError: an unknown name; a kernel that was asked for runs or is an error.
    """
    if name == "auto":
        return "blocked"
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: unknown implementation {name!r}; there are: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    return name


def paged_attention(
    implementation: str, q: jax.Array, kv: PagedKV, *rows: jax.Array, **options: Any
) -> jax.Array:
    """Attends from query blocks ``[B, T, N, H]`` to paged keys and values; see `paged_attention_reference`."""
    return IMPLEMENTATIONS[implementation](q, kv, *rows, **options)
