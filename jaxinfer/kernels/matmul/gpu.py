"""Rows times weights of 4 bits in groups on a GPU, in Pallas by way of Triton: codes are widened on their way.

XLA's own products widen codes of 8 bits in registers and write nothing. Of 4 bits they read a copy that is written out
in 16 first: 115 MiB for a weight of 28 (14,336 x 4,096, H100). Here a tile of bytes is opened and multiplied where it
comes to. Even and odd numbers, which share a byte, meet even and odd columns of the rows.

Weights with fewer outputs than a GPU has work for are cut along their inputs too, and the sums joined afterwards. Few
rows only: many make the product the longer part, and each tile of them would open every code again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import double_fp4, open_float8
from jaxinfer.arrays.quantized import Quantized

MOST_ROWS = 512
ROW_TILE = 128
LEAST_ROWS = 16  # of the smallest product
BYTES_TILE = 64  # of a row of codes at a time
PROGRAMS = 132  # that fill a GPU: multiprocessors of an H100


def multiply_gpu(
    x: jax.Array, w: jax.Array | Quantized, out: jnp.dtype, *, interpret: bool = False
) -> jax.Array | None:
    """Multiplies rows by codes of 4 bits in groups.

    Args:
      x: ``[M, in]`` in the dtype that products are made in. w: ``[out, in]``. out: dtype of the result.
      interpret: runs the kernel in XLA, on any backend.

    Returns:
      ``[M, out]``, or None for what XLA multiplies as well: other formats, and more than 512 rows (or none).
    """
    if not isinstance(w, Quantized) or w.format.bits != 4 or w.format.group is None:
        return None
    if not 0 < len(x) <= MOST_ROWS:
        return None
    is_whole = w.outer is None and w.offset is None
    y = _call(x, w, out if is_whole else jnp.dtype(jnp.float32), interpret)
    if w.outer is not None:
        y = y * w.outer.T
    if w.offset is not None:
        sums = x.astype(jnp.float32).reshape(len(x), w.offset.shape[1], -1).sum(-1)
        y = y + jnp.dot(sums, w.offset.astype(jnp.float32).T, precision="highest")
    return y.astype(out)


def _call(x: jax.Array, w: Quantized, out: jnp.dtype, interpret: bool) -> jax.Array:
    """Returns rows times codes and scales."""
    M, (num_out, num_bytes) = len(x), w.values.shape
    rows = min(ROW_TILE, max(LEAST_ROWS, 1 << (M - 1).bit_length()))
    # Sums of 128 x 128 are more than an A100 has registers for.
    wide = 128 if num_out >= 128 * PROGRAMS and rows < ROW_TILE else 64
    steps, programs = -(-num_bytes // BYTES_TILE), -(-num_out // wide) * -(-M // rows)
    # The sums of parts go to memory and back: at most half as many bytes as the codes.
    splits = max(1, min(PROGRAMS // programs, steps, num_bytes // (16 * M)))
    dtype = out if splits == 1 else jnp.dtype(jnp.float32)
    moved = w.values.nbytes + w.scale.nbytes + x.nbytes + splits * M * num_out * dtype.itemsize
    whole = pl.BlockSpec(memory_space=pl.ANY)
    y = pl.pallas_call(
        functools.partial(_kernel, fmt=w.format, tile=(rows, wide)),
        out_shape=jax.ShapeDtypeStruct((splits, M, num_out), dtype),
        grid=(-(-M // rows), -(-num_out // wide), splits),
        in_specs=[whole] * 4,
        out_specs=whole,
        compiler_params=plgpu.CompilerParams(num_warps=8 if rows > 64 else 4, num_stages=3),
        metadata={"flops": str(4 * M * num_out * num_bytes), "bytes_accessed": str(moved)},
        interpret=interpret,
        name="multiply_codes",
    )(x[:, ::2], x[:, 1::2], w.values, w.scale)
    return y[0] if splits == 1 else y.sum(0)


def _kernel(even, odd, codes, scales, y_ref, *, fmt: Format, tile: tuple[int, int]) -> None:
    """One tile of rows times one of outputs, over all inputs or a part of them.

    Args:
      even, odd: ``[M, bytes]`` columns of rows. codes: ``[out, bytes]``. scales: ``[out, groups]``.
      y_ref: ``[splits, M, out]``.
    """
    rows, wide = tile
    (M, num_bytes), (num_out, groups) = even.shape, scales.shape
    split, splits = pl.program_id(2), pl.num_programs(2)
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)[:, None]
    column = pl.program_id(1) * wide + jnp.arange(wide, dtype=jnp.int32)[:, None]
    group = num_bytes // groups  # bytes of one
    together = max(1, BYTES_TILE // group)
    steps = -(-num_bytes // BYTES_TILE)
    share = lax.div(steps + splits - 1, splits)

    def body(i, total):
        byte = i * BYTES_TILE + jnp.arange(BYTES_TILE, dtype=jnp.int32)[None]
        live = byte < num_bytes
        bits = plgpu.load(codes.at[column, byte], mask=(column < num_out) & live, other=jnp.uint8(0))
        n = lax.div(i * BYTES_TILE, group) + jnp.arange(together, dtype=jnp.int32)[None]
        mask = (column < num_out) & (n < groups)
        scale = plgpu.load(scales.at[column, n], mask=mask, other=jnp.zeros((), scales.dtype))
        scale = _open_scales(scale, fmt)[:, :, None]
        for plane, columns in enumerate((even, odd)):
            x = plgpu.load(columns.at[row, byte], mask=(row < M) & live, other=jnp.zeros((), columns.dtype))
            number = _open(bits, fmt, plane).astype(jnp.float32).reshape(wide, together, -1) * scale
            total += _product(x, number.reshape(wide, BYTES_TILE).astype(x.dtype))
        return total

    first = split * share
    last = jnp.minimum(first + share, steps)
    total = lax.fori_loop(first, last, body, jnp.zeros((rows, wide), jnp.float32))
    column = pl.program_id(1) * wide + jnp.arange(wide, dtype=jnp.int32)[None]
    mask = (row < M) & (column < num_out)
    plgpu.store(y_ref.at[split, row, column], total.astype(y_ref.dtype), mask=mask)


def _open(bits, fmt: Format, plane: int):
    """Returns the lower or the upper codes of bytes, int8; those of fp4 doubled."""
    x = lax.bitcast_convert_type(bits, jnp.int8)
    if fmt.kind == "int4" and not fmt.offset:
        return ((x << 4) if plane == 0 else x) >> 4
    code = (x >> (4 * plane)) & 15
    return code if fmt.kind == "int4" else double_fp4(code)


def _open_scales(scale, fmt: Format):
    """Returns scales in float32; those of fp4 halved, as codes are doubled."""
    if fmt.kind == "mxfp4":
        bits = scale.astype(jnp.int32)
        return lax.bitcast_convert_type(jnp.where(bits == 0, 1 << 22, bits << 23), jnp.float32) * 0.5
    if fmt.kind == "nvfp4":
        return open_float8(lax.bitcast_convert_type(scale, jnp.uint8), "fp8_e4m3") * 0.5
    return scale.astype(jnp.float32)


def _product(x: Any, y: Any) -> Any:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
