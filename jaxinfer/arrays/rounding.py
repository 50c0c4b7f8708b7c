"""Numbers on the host to codes and scales: round to nearest, saturate, never NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.quantized import Quantized, fit_format, scale_dtype
from jaxinfer.arrays.rotation import rotate_host
from jaxinfer.arrays.specs import ParamSpec

_CHUNK = 1 << 20  # numbers rounded together, so that what is computed of them stays small
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = (
    2.0**126
)  # what larger weights become, so that neither a range nor a scale times a code is infinite


def quantize(x: np.ndarray, spec: ParamSpec, fmt: Format) -> Quantized:
    """Returns a weight in a format, rounded to the nearest code.

    Args:
      x: ``[*out, *in]``, of any floating-point format; NaN becomes 0, and what exceeds 2**126 that.
      spec: its description.
      fmt: not plain; groups that do not fit are replaced by `fit_format`'s.

    Returns:
      Components in numpy, row-major, ``format`` being the one that was taken.
    """
    fmt = fit_format(spec, fmt)
    rows = max(1, _CHUNK * len(x) // max(1, x.size))
    parts = [_quantize(x[at : at + rows], spec.num_in, fmt) for at in range(0, len(x), rows)]
    joined = [None if one[0] is None else np.concatenate(one) for one in zip(*parts, strict=True)]
    return Quantized(*joined, format=fmt)


def requantize(x: np.ndarray, like: Quantized) -> Quantized:
    """Returns a weight in the codes nearest to it under scales that are given.

    Args:
      x: ``[*out, *in]``, finite. like: numpy components of that shape; its scales, offsets and format are kept.
    """
    fmt = like.format
    x = np.asarray(x, np.float32)
    grouped = (rotate_host(x, fmt.rotation) if fmt.rotation else x).reshape(*like.scale.shape, -1)
    scale, offset = wide_scales(like)
    codes = round_codes(_divide(grouped - offset[..., None], scale[..., None]), fmt).reshape(x.shape)
    if fmt.bits == 4:
        codes = codes[..., ::2] & 15 | codes[..., 1::2] << 4
    return replace(like, values=codes)


def snap(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Returns the numbers that a format's codes stand for which are nearest to ``x``, float32."""
    if fmt.is_integer:
        return np.rint(x).clip(*_code_range(fmt))
    codes = round_codes(x, fmt)
    return (codes.view(ml_dtypes.float4_e2m1fn) if fmt.bits == 4 else codes).astype(np.float32)


def wide_scales(w: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Returns what multiplies a weight's codes on the host, and what is added then, float32, shaped as its scale."""
    scale = _wide(w.scale, w.format) * (1 if w.outer is None else w.outer)
    return scale, np.zeros_like(scale) if w.offset is None else w.offset.astype(np.float32)


def _quantize(x: np.ndarray, num_in: int, fmt: Format) -> tuple[np.ndarray | None, ...]:
    """Returns the components of some outputs: values, scale, offset, outer."""
    y = np.asarray(x, np.float32)
    if not np.abs(y).max(initial=0) <= _LARGEST:
        y = np.nan_to_num(y, nan=0.0).clip(-_LARGEST, _LARGEST)
    y = rotate_host(y, fmt.rotation) if fmt.rotation else y
    out = y.shape[: y.ndim - num_in]
    channel = (*out, *[1] * num_in)
    if fmt.group is None:
        grouped, kept = y.reshape(*out, math.prod(y.shape[len(out) :])), channel
    else:
        grouped = y.reshape(*y.shape[:-1], -1, fmt.group)
        kept = grouped.shape[:-1]
    outer = None
    if fmt.kind == "nvfp4":
        # The largest scale of a group just fits fp8. A power of two: dividing by it is exact.
        most = np.abs(y).max(axis=tuple(range(len(out), y.ndim)), keepdims=True)
        outer = _power_of_two(most / (fmt.largest * float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)))
        grouped = _divide(grouped, outer[..., None])
    scale, offset = scales_between(grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True), fmt)
    codes = round_codes(
        _divide(grouped - (0 if offset is None else _wide(offset, fmt)), _wide(scale, fmt)), fmt
    )
    codes = codes.reshape(y.shape)
    if fmt.bits == 4:
        codes = codes[..., ::2] & 15 | codes[..., 1::2] << 4
    return codes, scale.reshape(kept), None if offset is None else offset.reshape(kept), outer


def scales_between(low: np.ndarray, high: np.ndarray, fmt: Format) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the scales of groups of numbers from ``low`` to ``high``, and their offsets, as they are stored."""
    dtype = np.dtype(scale_dtype(fmt))
    if fmt.offset:
        steps = 2**fmt.bits - 1
        scale = _narrow(high / steps - low / steps, dtype)
        return scale, _narrow(low + (0 if fmt.bits == 4 else 128) * scale.astype(np.float32), dtype)
    most = np.maximum(high, -low)
    if fmt.kind == "int4":  # the number of the largest magnitude is -8, which has no positive counterpart
        return _narrow(np.where(high > -low, -most, most) / 8, dtype), None
    if fmt.kind == "mxfp4":
        # The largest number still rounds to 6, not beyond: below 7.
        return _power_of_two(most / 7).astype(ml_dtypes.float8_e8m0fnu).view(dtype), None
    return _narrow(most / fmt.largest, dtype), None


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """Returns the least normal powers of two that are not below ``x``, 1 for 0; float32."""
    fraction, exponent = np.frexp(x)
    exponent = np.where(x > 0, exponent - (fraction == 0.5), 0)
    return np.ldexp(np.float32(1), exponent.clip(-126, 127)).astype(np.float32)


def _narrow(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    largest = float(ml_dtypes.finfo(dtype).max)
    return x.clip(-largest, largest).astype(dtype)


def _wide(scale: np.ndarray, fmt: Format) -> np.ndarray:
    """Returns scales as float32."""
    if fmt.kind == "mxfp4":
        return scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return scale.astype(np.float32)


def _divide(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns ``x / scale``, 0 where the scale is too small to divide by."""
    usable = np.abs(scale) >= _SMALLEST
    return np.where(usable, x, 0) / np.where(usable, scale, 1)


def round_codes(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Returns the codes nearest to ``x``, ties to even: int8, uint8 with 4 bits each, or fp8."""
    if fmt.is_integer:
        return np.rint(x).clip(*_code_range(fmt)).astype(np.int8).view(np.dtype(fmt.dtype))
    x = x.clip(-fmt.largest, fmt.largest)
    return (
        x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) if fmt.bits == 4 else x.astype(np.dtype(fmt.dtype))
    )


def _code_range(fmt: Format) -> tuple[int, int]:
    """Returns the least and the largest code of integers."""
    if fmt.offset:
        return (0, 15) if fmt.bits == 4 else (-128, 127)
    return (-8, 7) if fmt.bits == 4 else (-127, 127)
