"""The one einsum that every weight goes through; it knows plain weights now and quantised ones later."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.arrays.precision import Policy


def einsum(
    spec: str, x: jax.Array, w: jax.Array, policy: Policy, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """Multiplies a stream of rows by a weight, in the policy's compute format.

    Args:
      spec: einsum of two operands; the first letter of ``x`` and of the result is the row axis.
      x: ``[M, ...]`` activations.
      w: the weight, as it lies in memory.
      policy: names the compute format; sums are float32.
      out_dtype: of the result; the compute format when None.

    Returns:
      ``[M, ...]`` in ``out_dtype``.
    """
    dtype = policy.compute_dtype
    out = dtype if out_dtype is None else out_dtype
    rows = x.shape[0]
    x = x.astype(dtype)
    if rows == 1 and dtype.itemsize < 4 and jax.default_backend() == "cpu":
        # XLA's CPU backend sends a single 16-bit row to a naive loop, 20 times slower than two rows.
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    precision = jax.lax.Precision.HIGHEST if dtype.itemsize == 4 else None
    y = jnp.einsum(spec, x, w.astype(dtype), precision=precision, preferred_element_type=out)
    return y[:rows]
