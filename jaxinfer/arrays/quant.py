"""The one matmul that every weight goes through; it knows plain weights now and quantised ones later."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.precision import Policy
from jaxinfer.hardware import cpu_features

FEW_ROWS = 32  # on a CPU, up to here the weight is the better left operand


def linear(x: jax.Array, w: jax.Array, policy: Policy, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Multiplies a stream of rows by a weight, in the policy's compute format.

    Args:
      x: ``[M, *in]`` activations.
      w: ``[*out, *in]``, as it lies in memory.
      policy: names the compute format; sums are float32.
      out_dtype: of the result; the compute format when None.

    Returns:
      ``[M, *out]`` in ``out_dtype``.
    """
    dtype = policy.compute_dtype
    out = dtype if out_dtype is None else out_dtype
    out_shape = w.shape[: w.ndim - x.ndim + 1]
    # Two flat matrices: given several dimensions, XLA's CPU backend copies weights into another order first.
    rows = x.reshape(len(x), -1).astype(dtype)
    flat = w.reshape(-1, rows.shape[1]).astype(dtype)
    on_cpu = backend() == "cpu"
    precision = jax.lax.Precision.HIGHEST if dtype.itemsize == 4 else None
    if on_cpu and len(x) <= FEW_ROWS:
        y = _few_rows(rows, flat, precision)
    else:
        # A 16-bit result takes ten times as long on XLA's CPU backend of jax 0.10.
        sums = jnp.float32 if on_cpu else out
        y = _multiply(rows, flat, precision=precision, preferred_element_type=sums)
    return y.astype(out).reshape(len(x), *out_shape)


def _multiply(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    """Returns ``x [A, I]`` times ``y [B, I]`` transposed, ``[A, B]``."""
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), **options)


def _few_rows(x: jax.Array, w: jax.Array, precision: jax.lax.Precision | None) -> jax.Array:
    """As `linear` for few rows on XLA's CPU backend: ``x [M, in]``, ``w [out, in]``, float32 result.

    The weight on the left runs faster in float32 (layers and head of SmolLM2 on Zen 4: 2 rows 26 against 37 ms, 16
    rows 39 against 56), and in bfloat16 on a processor whose tiles multiply it (AMX: 2 rows 14 against 22 ms, 16 rows
    18 against 24). Vector instructions have it the other way round in 16 bits (Zen 4: 62 against 20 ms, 59 against 34).
    The barrier keeps XLA from turning it round again. A single row would fall onto a naive loop in 16-bit types, so it
    gets company.
    """
    M = len(x)
    if x.dtype.itemsize < 4:
        x = jnp.pad(x, ((0, max(0, 2 - M)), (0, 0)))
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": jnp.float32}
    if x.dtype.itemsize < 4 and not _has_tiles():
        return _multiply(x, w, **options)[:M]
    return jax.lax.optimization_barrier(_multiply(w, x, **options)).T[:M]


@cache
def _has_tiles() -> bool:
    return "amx_bf16" in cpu_features()
