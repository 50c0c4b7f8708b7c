"""Host arrays on their way to a device: aligned, row-major, checked to be finite."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

_ALIGNMENT = 64  # bytes; XLA's CPU client adopts a buffer so aligned instead of copying it
_TILE_COLUMNS = (
    128  # a transposing copy by tiles of so many columns stays in the cache (two to four times faster)
)
_CHUNK = 1 << 18  # numbers looked at together, so that what is computed of them stays in the cache
# Bits of the exponent: all set is infinity or NaN.
_EXPONENTS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns a new row-major array, aligned so that the CPU client adopts it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def pack(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns an array's numbers row-major in ``dtype``: the array itself if it is so already and a buffer of its own.

    Raises:
      OverflowError: a finite number is infinite in ``dtype``.
    """
    if array.dtype == dtype and array.flags.c_contiguous and _owns_buffer(array):
        return array
    packed = empty(array.shape, dtype)
    with np.errstate(over="ignore"):
        _copy(packed, array)
    if may_overflow(array.dtype, dtype) and not all_finite(packed):
        raise OverflowError(f"overflows {dtype}")
    return packed


def may_overflow(given: np.dtype, wanted: np.dtype) -> bool:
    """Returns whether a finite number of one format can be infinite in another, no wider one."""
    return wanted != given and wanted.itemsize <= given.itemsize


def all_finite(array: np.ndarray) -> bool:
    """Returns whether a row-major array of floating-point numbers holds neither NaN nor infinity."""
    exponent = _EXPONENTS.get(array.dtype)
    # The bits of a 16-bit type are five times faster to look at than isfinite of it.
    flat = array.reshape(-1) if exponent is None else array.reshape(-1).view(np.uint16)
    for at in range(0, flat.size, _CHUNK):
        part = flat[at : at + _CHUNK]
        if not (np.isfinite(part).all() if exponent is None else ((part & exponent) != exponent).all()):
            return False
    return True


def _owns_buffer(array: np.ndarray) -> bool:
    """Returns whether adopting the array keeps no more memory alive than it needs (a slice or a mapped file would)."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return root.base is None and root.nbytes <= array.nbytes + _ALIGNMENT


def _copy(target: np.ndarray, array: np.ndarray) -> None:
    """Copies into a row-major array, a transposed source (as most matrices of a checkpoint) by tiles."""
    for axis in range(1, array.ndim):
        try:
            source = np.reshape(array, (math.prod(array.shape[:axis]), -1), copy=False)
        except ValueError:
            continue
        if source.strides[0] < source.strides[1]:
            flat = target.reshape(source.shape)
            for at in range(0, flat.shape[1], _TILE_COLUMNS):
                flat[:, at : at + _TILE_COLUMNS] = source[:, at : at + _TILE_COLUMNS]
            return
    target[...] = array
