"""Paged attention: the one door to its implementations, chosen by name when a run is built."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxinfer.arrays.pages import decode
from jaxinfer.kernels.attention.blocked import paged_attention_blocked
from jaxinfer.kernels.attention.reference import paged_attention_reference


def _reference(q, k, v, layer, pages, start, length, *, kv_dtype, **options):
    k, v = (decode(pool[layer], kv_dtype) for pool in (k, v))
    return paged_attention_reference(q, k, v, pages, start, length, **options)


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "blocked": paged_attention_blocked,
    "reference": _reference,
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


def paged_attention(implementation: str, *args: jax.Array | int, **options) -> jax.Array:
    """Attends from query blocks ``[B, T, N, H]`` to paged keys and values; see `paged_attention_blocked`."""
    return IMPLEMENTATIONS[implementation](*args, **options)
