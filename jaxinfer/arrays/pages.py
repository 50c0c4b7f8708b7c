"""Number formats of KV pages: how a number lies in a page, there and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def stored_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of the array that holds pages of ``dtype``.

    16-bit floats lie as their bits: the CPU backend of jax 0.10 would convert a whole pool to float32 and back to
    write a row of it (250 against 22 ms a step for SmolLM2 with 1,024 pages). The bits cost nothing elsewhere.
    """
    return jnp.dtype(jnp.uint16) if dtype.itemsize == 2 else dtype


def encode(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns numbers as they lie in pages of ``dtype``: what overflows saturates and NaN is 0.

    A page outlives its request, and attention multiplies lanes that it masks by 0, which must give 0: so the numbers
    of a request that went wrong cannot reach another.
    """
    largest = float(jnp.finfo(dtype).max)
    x = jnp.where(jnp.isnan(x), 0, x.astype(jnp.float32).clip(-largest, largest)).astype(dtype)
    return jax.lax.bitcast_convert_type(x, stored_dtype(dtype))


def decode(stored: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the numbers of ``dtype`` that lie in pages; they must be of ``stored_dtype(dtype)``.

    Raises:
      TypeError: they are of another.
    """
    if stored.dtype != stored_dtype(dtype):
        raise TypeError(f"pages of {dtype} lie as {stored_dtype(dtype)}, got {stored.dtype}")
    return jax.lax.bitcast_convert_type(stored, dtype)
