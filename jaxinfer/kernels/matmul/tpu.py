"""Rows times weights of 4 bits in groups on a TPU, in Pallas: codes are widened on the way into the product.

XLA multiplies such a weight by writing it out in 16 bits first, a matrix at a time: four times its bytes written and
read again. Here a tile of bytes comes into VMEM, is opened and multiplied there. It comes from where the whole stack of
layers lies: of a layer sliced out before, a TPU v5p writes a copy. Even and odd numbers, which share a byte, meet even
and odd columns of the rows. A group's scale reaches the lanes of its codes by a product with a matrix of zeros and
ones, which is exact.

Few rows only: many make the product the longer part, and each tile of them would open every code again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.quantized import InStack, Quantized

MOST_ROWS = 512
OUT_TILE = 256
BYTES_TILE = 2048  # of a row of codes at a time
LANES = 128
VMEM_BYTES = 48 * 2**20


def multiply_tpu(
    x: jax.Array, w: jax.Array | Quantized, out: jnp.dtype, *, interpret: Any = False
) -> jax.Array | None:
    """Multiplies rows by codes of 4 bits in groups.

    Args:
      x: ``[M, in]`` in the dtype that products are made in. w: ``[out, in]``, its codes alone or `InStack`.
      out: dtype of the result.
      interpret: what `pallas_call` takes: True runs the kernel in XLA, on any backend.

    Returns:
      ``[M, out]``, or None for what XLA multiplies as well: other formats, and more than 512 rows.
    """
    if not isinstance(w, Quantized) or w.format.bits != 4 or w.format.group is None or len(x) > MOST_ROWS:
        return None
    is_done = w.outer is None and w.offset is None
    y = _call(x, w, out if is_done else jnp.dtype(jnp.float32), interpret)[: len(x)]
    if w.outer is not None:
        y = y * w.outer.T
    if w.offset is not None:
        sums = x.astype(jnp.float32).reshape(len(x), w.offset.shape[1], -1).sum(-1)
        y = y + jnp.dot(sums, w.offset.astype(jnp.float32).T, precision="highest")
    return y.astype(out)


def _call(x: jax.Array, w: Quantized, out: jnp.dtype, interpret: Any) -> jax.Array:
    """Returns rows times codes and scales."""
    num_out, num_bytes = w.values.shape
    in_stack = isinstance(w.values, InStack)
    layers, layer = (w.values.stack, w.values.index) if in_stack else (w.values[None], 0)
    M = -(-len(x) // 16) * 16
    step = _tile(num_bytes, w.scale.shape[1])
    tiles = num_bytes // step
    x = jnp.pad(x, ((0, M - len(x)), (0, 0)))
    scale = _multipliers(w).T.reshape(tiles, -1, num_out)
    rows = pl.BlockSpec((M, step), lambda o, i, _: (0, i))
    tile = min(OUT_TILE, num_out)
    size = num_out * num_bytes + sum(part.nbytes for part in (w.scale, w.offset, w.outer) if part is not None)
    y = pl.pallas_call(
        functools.partial(_kernel, fmt=w.format),
        out_shape=jax.ShapeDtypeStruct((M, num_out), out),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-num_out // OUT_TILE), tiles),
            in_specs=[
                rows,
                rows,
                pl.BlockSpec((None, tile, step), lambda o, i, layer: (layer[0], o, i)),
                pl.BlockSpec((1, scale.shape[1], tile), lambda o, i, _: (i, 0, o)),
            ],
            out_specs=pl.BlockSpec((M, tile), lambda o, i, _: (0, o)),
            scratch_shapes=[pltpu.VMEM((M, tile), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * M * num_out * num_bytes,
            transcendentals=0,
            bytes_accessed=size + x.size * x.dtype.itemsize + out.itemsize * M * num_out,
        ),
        interpret=interpret,
        name="multiply_codes",
    )(jnp.asarray(layer, jnp.int32)[None], x[:, ::2], x[:, 1::2], layers, scale)
    return y


def _tile(num_bytes: int, groups: int) -> int:
    """Returns how many bytes of each output are opened at a time: whole vectors and whole groups, or all."""
    fits = [
        n
        for n in range(LANES, BYTES_TILE + 1, LANES)
        if num_bytes % n == 0 and n % (num_bytes // groups) == 0
    ]
    return max(fits, default=num_bytes)


def _multipliers(w: Quantized) -> jax.Array:
    """Returns scales in bfloat16 where it holds them, else in float32; those of fp4 halved, as codes are doubled."""
    if w.format.kind == "mxfp4":
        bits = w.scale.astype(jnp.uint32)
        scale = lax.bitcast_convert_type(jnp.where(bits == 0, 1 << 22, bits << 23), jnp.float32)
        return (scale * 0.5).astype(jnp.bfloat16)
    if w.format.kind == "nvfp4":
        return (w.scale.astype(jnp.float32) * 0.5).astype(jnp.bfloat16)
    return w.scale if w.scale.dtype == jnp.bfloat16 else w.scale.astype(jnp.float32)


def _kernel(_, even, odd, codes, scale, y_ref, sum_ref, *, fmt: Format) -> None:
    """Adds a tile of inputs to a tile of outputs.

    Args:
      even, odd: ``[M, bytes]`` columns of rows. codes: ``[outputs, bytes]``. scale: ``[1, groups, outputs]``.
      y_ref: ``[M, outputs]``. sum_ref: the same in float32.
    """

    @pl.when(pl.program_id(1) == 0)
    def _():
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    groups, step = scale.shape[1], codes.shape[1]
    shape = (groups, step)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    mine = lax.div(lane, step // groups) == lax.broadcasted_iota(jnp.int32, shape, 0)
    spread = _product(scale[0], mine.astype(scale.dtype), 0, 0)  # [outputs, bytes]
    bits = codes[...].astype(jnp.int32)
    for plane, rows in enumerate((even, odd)):
        number = _open(bits, fmt, plane).astype(jnp.float32) * spread
        sum_ref[...] += _product(rows[...], number.astype(rows.dtype), 1, 1)

    @pl.when(pl.program_id(1) + 1 == pl.num_programs(1))
    def _():
        y_ref[...] = sum_ref[...].astype(y_ref.dtype)


def _open(bits, fmt: Format, plane: int):
    """Returns the lower or the upper codes of bytes, int32; those of fp4 doubled."""
    if fmt.kind == "int4" and not fmt.offset:
        return (bits << (28 - 4 * plane)) >> 28
    code = (bits >> (4 * plane)) & 15
    if fmt.kind == "int4":
        return code
    size = code & 7
    size = jnp.where(size < 2, size, (2 | (size & 1)) << jnp.maximum((size >> 1) - 1, 0))
    return jnp.where(code < 8, size, -size)


def _product(x, y, over_x: int, over_y: int):
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((over_x,), (over_y,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
