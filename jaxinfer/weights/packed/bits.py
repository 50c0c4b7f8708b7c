"""Small numbers in large words: how other formats pack them, and how ours do (number 2i in the low nibble)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SIGN_BITS = {4: np.uint8(0x88), 8: np.uint8(0x80)}  # of both nibbles of a byte, or of the byte


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the numbers of 32-bit words, the lowest bits first.

    Args:
      words: ``[..., n]`` int32.
      bits: of a number, 4 or 8.

    Returns:
      ``[..., n * 32 / bits]`` uint8.
    """
    stored = word_bytes(words)
    return stored if bits == 8 else unpack_nibbles(stored)


def word_bytes(words: np.ndarray) -> np.ndarray:
    """Returns the bytes of ``[..., n]`` 32-bit words, the lowest first, as ``[..., 4 n]`` uint8."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)


def unpack_nibbles(stored: np.ndarray) -> np.ndarray:
    """Returns the numbers 0 to 15 of ``[..., n]`` bytes, the low nibble first, as ``[..., 2 n]`` uint8."""
    numbers = np.empty((*stored.shape[:-1], 2 * stored.shape[-1]), np.uint8)
    numbers[..., 0::2] = stored & 15
    numbers[..., 1::2] = stored >> 4
    return numbers


def pack_nibbles(numbers: np.ndarray) -> np.ndarray:
    """Returns ``[..., n]`` numbers 0 to 15 two in a byte, the low nibble first, as ``[..., n / 2]`` uint8."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


def recentre(stored: np.ndarray, bits: int) -> np.ndarray:
    """Returns bytes of numbers ``u`` as those of ``u - 2 ** (bits - 1)`` in two's complement: only sign bits turn."""
    return stored ^ SIGN_BITS[bits]


def hollow(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Returns an array of zeros that all lie at one place: a shape and a dtype that transforms can be tried on."""
    return np.broadcast_to(np.zeros((), dtype), shape)
