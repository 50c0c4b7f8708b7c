"""Weights of codes in full, on the host."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxinfer.arrays.quantized import Quantized
from jaxinfer.weights.buffers import empty
from jaxinfer.weights.packed.bits import unpack_nibbles

_CHUNK = 1 << 18  # numbers expanded at once, so that the working arrays stay in the cache


def expand(w: Quantized, dtype: npt.DTypeLike) -> np.ndarray:
    """Returns ``codes * scale + offset`` of host arrays, computed in float32.

    Args:
      w: ``[*out, in]``, whose scales lie along the last axis alone.
      dtype: of the result.
    """
    out = empty(w.shape, np.dtype(dtype))
    last = w.shape[-1]
    flat = out.reshape(-1, last)
    values, scale = w.values.reshape(len(flat), -1), w.scale.reshape(len(flat), -1)
    offset, outer = (None if part is None else part.reshape(len(flat), -1) for part in (w.offset, w.outer))
    step = max(1, _CHUNK // last)
    with np.errstate(all="ignore"):  # what is not finite is reported by name, by those who load
        for at in range(0, len(flat), step):
            rows = slice(at, at + step)
            numbers = read_codes(values[rows], w)
            size = read_scale(scale[rows], w)
            if outer is not None:
                size = size * outer[rows]
            groups = numbers.reshape(*size.shape, -1)
            groups *= size[..., None]
            if offset is not None:
                groups += offset[rows].astype(np.float32)[..., None]
            flat[rows] = numbers
    return out


def read_codes(values: np.ndarray, w: Quantized) -> np.ndarray:
    """Returns the codes of a weight's values as float32."""
    fmt = w.format
    if fmt.bits == 8:
        return values.astype(np.float32)
    numbers = unpack_nibbles(values)
    if fmt.kind != "int4":
        return numbers.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (numbers if fmt.offset else (numbers ^ 8).astype(np.int8) - np.int8(8)).astype(np.float32)


def read_scale(scale: np.ndarray, w: Quantized) -> np.ndarray:
    """Returns a weight's scales as float32."""
    return (scale.view(ml_dtypes.float8_e8m0fnu) if w.format.kind == "mxfp4" else scale).astype(np.float32)
