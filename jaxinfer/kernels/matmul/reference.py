"""Rows rounded to int8 times codes, in plain jnp: the oracle. Sums of a group are exact, then everything is float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.arrays.quant import round_rows, scales, unpack
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.arrays.rotation import rotate


def multiply_reference(x: jax.Array, w: Quantized, out: jnp.dtype) -> jax.Array:
    """Multiplies rows, each rounded to int8 with a scale of its own, by a weight of codes.

    Args:
      x: ``[M, in]``. w: ``[out, in]`` of int8 or int4. out: dtype of the result.

    Returns:
      ``[M, out]``; a row that holds what is not finite is NaN wherever that leaves nothing to say.
    """
    num_out, groups = w.scale.shape
    x = rotate(x, w.format.rotation) if w.format.rotation else x
    rows, row_scale = round_rows(x, jnp.dtype(jnp.int8))
    codes = w.values
    if w.format.bits == 4:
        codes = jnp.stack(unpack(codes, w.format), -1).reshape(num_out, -1)
    rows, codes = (a.reshape(len(a), groups, -1).astype(jnp.int32) for a in (rows, codes))
    sums = jnp.einsum("mgi,ogi->mog", rows, codes).astype(jnp.float32)
    y = (sums * scales(w)).sum(-1)
    if w.offset is not None:
        totals = rows.sum(-1).astype(jnp.float32)
        y = y + (totals[:, None] * w.offset.astype(jnp.float32)).sum(-1)
    return (y * row_scale).astype(out)
