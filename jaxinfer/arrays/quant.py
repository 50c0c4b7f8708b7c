"""The one matmul that every weight goes through, plain or of codes, and the rows of a table."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import ACTS, Policy
from jaxinfer.arrays.quantized import InStack, Quantized
from jaxinfer.arrays.rotation import rotate
from jaxinfer.arrays.sharding import max_shards, sum_shards
from jaxinfer.hardware import cpu_features

_FLOAT32 = jnp.dtype(jnp.float32)
# Kernels of higher floors, by the name that a policy chooses them by: ``(x [M, in], w [out, in], dtype) -> [M, out]``,
# or None for a weight that they leave to XLA. Rows that meet codes are rounded to int8 there, but for `_WIDENING`.
Multiply = Callable[[jax.Array, jax.Array | Quantized, jnp.dtype], jax.Array | None]
MULTIPLIERS: dict[str, Multiply] = {"xla": lambda x, w, dtype: None}
_WIDENING = ("tpu", "gpu")  # whose kernels have rows of 16 bits meet codes
FEW_ROWS = 32  # on a CPU, up to here the weight is the better left operand


def linear(
    x: jax.Array,
    w: jax.Array | Quantized,
    policy: Policy,
    out_dtype: jnp.dtype | None = None,
    over: str | None = None,
) -> jax.Array:
    """Multiplies a stream of rows by a weight, in the policy's compute format.

    A weight of codes is never expanded as a whole where XLA can widen its codes on the way into the product; on a CPU
    it cannot, so there only ``act=int8`` reads a weight of 8 bits without writing a wide copy first.

    Args:
      x: ``[M, *in]`` activations.
      w: ``[*out, *in]``, as it lies in memory.
      policy: names the compute format, and what rows are rounded to before they meet codes; sums are float32.
      out_dtype: of the result; the compute format when None.
      over: the logical axis of the inputs where a mesh cuts it: then the shares' products are summed.

    Returns:
      ``[M, *out]`` in ``out_dtype``.
    """
    dtype = policy.compute_dtype
    shared = () if over is None else (over,)
    out = dtype if out_dtype is None else out_dtype
    out_shape = w.shape[: w.ndim - x.ndim + 1]
    rows = x.reshape(len(x), -1)
    # Two flat matrices: given several dimensions, XLA's CPU backend copies weights into another order first.
    multiply = MULTIPLIERS[policy.matmul]
    if isinstance(w, Quantized):
        flat = _flatten(w, x.ndim - 1)
        y = multiply(rows, flat, out) if policy.act == "int8" or policy.matmul in _WIDENING else None
        if y is None:
            if isinstance(flat.values, InStack):
                flat = replace(flat, values=flat.values.take())
            y = _multiply_codes(rows, flat, policy, shared)
    else:
        rows, flat = rows.astype(dtype), w.reshape(-1, rows.shape[1])
        y = multiply(rows, flat, out)
        if y is None:
            y = _multiply_plain(rows, flat.astype(dtype), out)
    return sum_shards(y.astype(out), *shared).reshape(len(x), *out_shape)


def take_rows(w: jax.Array | Quantized, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns rows ``[M, D]`` of a table ``[V, D]``, only they are widened; ids out of range take the nearest row."""
    rows = jax.tree.map(lambda part: jnp.take(part, ids, axis=0, mode="clip"), w)
    return dequantize(rows, dtype) if isinstance(rows, Quantized) else rows.astype(dtype)


def dequantize(w: Quantized, dtype: jnp.dtype) -> jax.Array:
    """Returns a weight's numbers, ``[*out, *in]``."""
    if w.format.rotation:
        return rotate(_widen(w.values, w, _FLOAT32), w.format.rotation).astype(dtype)
    if w.format.bits == 8:
        return _widen(w.values, w, dtype)
    halves = [_widen(half, w, dtype) for half in unpack(w.values, w.format)]
    return jnp.stack(halves, -1).reshape(w.shape)


def unpack(values: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Returns the even and the odd numbers of packed codes, each ``[..., n / 2]`` int8; codes of fp4 doubled."""
    low, high = (values & 15).astype(jnp.int8), (values >> 4).astype(jnp.int8)
    if fmt.kind == "int4":
        # Two's complement of 4 bits: 8 to 15 are -8 to -1.
        return (low, high) if fmt.offset else ((low ^ 8) - 8, (high ^ 8) - 8)

    def double(code: jax.Array) -> jax.Array:
        # Sign, two bits of exponent, one of mantissa: 0 .5 1 1.5 2 3 4 6, as whole numbers 0 1 2 3 4 6 8 12.
        size = code & 7
        size = jnp.where(size < 2, size, (2 | (size & 1)) << jnp.maximum((size >> 1) - 1, 0))
        return jnp.where(code < 8, size, -size)

    return double(low), double(high)


def scales(w: Quantized) -> jax.Array:
    """Returns what multiplies a weight's codes as `unpack` gives them, float32, shaped as ``w.scale``."""
    if w.format.kind == "mxfp4":
        bits = w.scale.astype(jnp.uint32)
        # e8m0 is the exponent of a float32; its least, 2**-127, has no exponent there.
        bits = jnp.where(bits == 0, 1 << 22, bits << 23)
        return 0.5 * jax.lax.bitcast_convert_type(bits, jnp.float32)
    scale = w.scale.astype(jnp.float32)
    return scale if w.outer is None else 0.5 * w.outer * scale


def _widen(codes: jax.Array, w: Quantized, dtype: jnp.dtype) -> jax.Array:
    """Returns codes of a weight (all, or its even or odd ones) times their scales."""
    grouped = codes.astype(jnp.float32)
    if w.format.group is None:
        y = grouped * scales(w)
        return (y if w.offset is None else y + w.offset).astype(dtype)
    grouped = grouped.reshape(*w.scale.shape, -1)
    y = grouped * scales(w)[..., None]
    if w.offset is not None:
        y = y + w.offset[..., None].astype(jnp.float32)
    return y.astype(dtype).reshape(codes.shape)


def _flatten(w: Quantized, num_in: int) -> Quantized:
    """Returns a weight with one axis of outputs and one of inputs."""
    out = math.prod(w.values.shape[: w.ndim - num_in])
    return jax.tree.map(lambda part: part.reshape(out, -1), w, is_leaf=lambda node: isinstance(node, InStack))


def _multiply_codes(x: jax.Array, w: Quantized, policy: Policy, over: tuple[str, ...]) -> jax.Array:
    """Returns ``x [M, in]`` times ``w [out, in]`` transposed, float32; ``over`` cuts the inputs."""
    M, dtype = len(x), policy.compute_dtype
    if M == 1:  # a single row would fall onto a naive loop of XLA's CPU backend
        x = jnp.pad(x, ((0, 1), (0, 0)))
    codes = _halves(w)
    x, row_scale = _round_for(x, w.format, policy, over)
    if x.dtype == jnp.int8:
        multiply = _multiply_integers if w.format.group is None else _multiply_groups
        y = multiply(_split(x, len(codes)), codes, w)
    else:
        parts = zip(_split(x.astype(dtype), len(codes)), codes, strict=True)
        if _scales_after(w):
            sums = [_multiply_plain(rows, part.astype(dtype), _FLOAT32) for rows, part in parts]
            y = _sum(sums) * scales(w).T
        else:
            y = _sum(_multiply_plain(rows, _widen(part, w, dtype), _FLOAT32) for rows, part in parts)
    return (y if row_scale is None else y * row_scale)[:M]


def ragged_linear(
    x: jax.Array, w: jax.Array | Quantized, sizes: jax.Array, policy: Policy, over: tuple[str, ...] = ()
) -> jax.Array:
    """Multiplies runs of rows, each by the weight of its own expert.

    Args:
      x: ``[R, in]`` rows, those of the first expert first.
      w: ``[E, out, in]``. sizes: ``[E]`` rows of each expert, int32.
      policy: as in `linear`; rows and codes of 8 bits are multiplied in the compute format, which holds both exactly.
      over: logical axes of the inputs where a mesh cuts them; the caller sums the shares' products.

    Returns:
      ``[R, out]`` float32.
    """
    dtype = policy.compute_dtype
    precision = jax.lax.Precision.HIGHEST if dtype.itemsize == 4 else None

    def multiply(rows: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(
            rows.astype(dtype), part.astype(dtype).swapaxes(1, 2), sizes,
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip

    if not isinstance(w, Quantized):
        return multiply(x, w)
    codes = _halves(w)
    x, row_scale = _round_for(x, w.format, policy, over)
    parts = zip(_split(x, len(codes)), codes, strict=True)
    if _scales_after(w):
        own = jnp.repeat(scales(w)[:, :, 0], sizes, axis=0, total_repeat_length=len(x))
        y = _sum(multiply(rows, part) for rows, part in parts) * own
    else:
        y = _sum(multiply(rows, _widen(part, w, dtype)) for rows, part in parts)
    return y if row_scale is None else y * row_scale


def _halves(w: Quantized) -> tuple[jax.Array, ...]:
    return (w.values,) if w.format.bits == 8 else unpack(w.values, w.format)


def _scales_after(w: Quantized) -> bool:
    """Returns whether scales can follow the sum: codes are exact in any compute format."""
    return w.format.group is None and w.offset is None


def _round_for(
    x: jax.Array, fmt: Format, policy: Policy, over: tuple[str, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns rows as the policy has them meet codes of a format, and their scales where they are codes too."""
    x = rotate(x, fmt.rotation) if fmt.rotation else x
    if policy.act == "int8" and fmt.kind in ACTS[policy.act]:
        return round_rows(x, jnp.dtype(jnp.int8), over)
    if policy.act == "fp8_e4m3" and fmt.kind in ACTS[policy.act]:
        return round_rows(x, jnp.dtype(jnp.float8_e4m3fn), over)
    return x, None


def _split(x: jax.Array, num_parts: int) -> tuple[jax.Array, ...]:
    """Returns rows cut as codes are: whole, or even and odd columns, which spares the codes' being laced together."""
    return (x,) if num_parts == 1 else (x[:, ::2], x[:, 1::2])


def round_rows(x: jax.Array, dtype: jnp.dtype, over: tuple[str, ...] = ()) -> tuple[jax.Array, jax.Array]:
    """Returns rows ``[M, I]`` as codes, and a float32 scale ``[M, 1]`` for each; a row of zeros is zeros.

    Args:
      x: activations. dtype: int8 or an 8-bit float. over: logical axes that cut rows over a mesh, whose scale is one.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = 127 if is_integer else float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    most = max_shards(jnp.max(jnp.abs(x), -1, keepdims=True), *over)
    scale = most / largest
    # Denormal scales, which processors may take for 0, divide nothing.
    y = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0, x / scale)
    y = jnp.round(y) if is_integer else y
    return y.clip(-largest, largest).astype(dtype), scale


def _multiply_integers(rows: tuple[jax.Array, ...], codes: tuple[jax.Array, ...], w: Quantized) -> jax.Array:
    """Returns the product of int8 rows and codes with one scale an output."""
    pairs = list(zip(rows, codes, strict=True))
    y = (
        _sum(_multiply(r, c, preferred_element_type=jnp.int32) for r, c in pairs).astype(jnp.float32)
        * scales(w).T
    )
    if w.offset is not None:
        y = y + _sum(r.sum(1, dtype=jnp.int32) for r in rows)[:, None] * w.offset.T
    return y


def _multiply_groups(rows: tuple[jax.Array, ...], codes: tuple[jax.Array, ...], w: Quantized) -> jax.Array:
    """Returns the product of int8 rows and codes with a scale a group: a product a group, then their weighted sum."""
    num_out, groups = w.scale.shape
    rows = tuple(r.reshape(len(r), groups, -1) for r in rows)
    parts = [
        jax.lax.dot_general(
            r, c.reshape(num_out, groups, -1), (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.int32
        )
        for r, c in zip(rows, codes, strict=True)
    ]
    y = jnp.einsum("gmo,og->mo", _sum(parts).astype(jnp.float32), scales(w), precision="highest")
    if w.offset is not None:
        totals = _sum(r.sum(2, dtype=jnp.int32) for r in rows).astype(jnp.float32)
        y = y + jnp.einsum("mg,og->mo", totals, w.offset.astype(jnp.float32), precision="highest")
    return y


def _sum(parts: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _multiply_plain(x: jax.Array, w: jax.Array, out: jnp.dtype) -> jax.Array:
    """Returns ``x [M, in]`` times ``w [out, in]`` transposed, both of the compute format, as ``out`` or float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype.itemsize == 4 else None
    if backend() != "cpu":
        return _multiply(x, w, precision=precision, preferred_element_type=out)
    # A 16-bit result takes ten times as long on XLA's CPU backend of jax 0.10.
    multiply = _few_rows if len(x) <= FEW_ROWS else _multiply
    return multiply(x, w, precision=precision, preferred_element_type=jnp.float32)


def _multiply(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    """Returns ``x [A, I]`` times ``y [B, I]`` transposed, ``[A, B]``."""
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), **options)


def _few_rows(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
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
    if x.dtype.itemsize < 4 and not _has_tiles():
        return _multiply(x, w, **options)[:M]
    return jax.lax.optimization_barrier(_multiply(w, x, **options)).T[:M]


@functools.cache
def _has_tiles() -> bool:
    return "amx_bf16" in cpu_features()
