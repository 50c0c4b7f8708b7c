"""The one matmul that every weight goes through; it knows plain weights now and quantised ones later."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.arrays.precision import Policy

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
    x, w = x.astype(dtype), w.astype(dtype)
    num_in = x.ndim - 1
    if jax.default_backend() == "cpu" and dtype.itemsize < 4 and len(x) <= FEW_ROWS:
        return _few_rows(x.reshape(len(x), -1), w.reshape(*w.shape[: w.ndim - num_in], -1)).astype(out)
    contract = (tuple(range(1, x.ndim)), tuple(range(w.ndim - num_in, w.ndim)))
    precision = jax.lax.Precision.HIGHEST if dtype.itemsize == 4 else None
    # XLA's CPU backend rounds every partial sum of a 16-bit result on jax 0.10, and is ten times slower for it.
    sums = jnp.float32 if jax.default_backend() == "cpu" else out
    y = jax.lax.dot_general(x, w, (contract, ((), ())), precision=precision, preferred_element_type=sums)
    return y.astype(out)


def _few_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """As `linear` for few 16-bit rows on XLA's CPU backend: ``x [M, in]``, ``w [*out, in]``, float32 result.

    The weight on the left runs 1.3 to 1.5 times faster than on the right (2 rows 14 against 22 ms for the layers of
    SmolLM2, 16 rows 18 against 24); the barrier keeps XLA from turning it round again. A single row would fall onto
    a naive loop, so it gets company.
    """
    M = len(x)
    x = jnp.pad(x, ((0, max(0, 2 - M)), (0, 0)))
    flat = w.reshape(-1, w.shape[-1])
    y = jax.lax.dot_general(flat, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T[:M].reshape(M, *w.shape[:-1])
