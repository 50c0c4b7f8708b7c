"""GGUF blocks, taken apart into our layout: the numbers are the file's own, bit by bit, and so are the scales.

A row of the file is a row of blocks, scale first; ours has all numbers of the tensor in one array and all scales in
another. In a 4-bit block byte j holds number j in its low nibble and number j + 16 in its high one:

  file  | d | 0,16 | 1,17 | 2,18 | ... | 15,31 |      ours  | 0,1 | 2,3 | ... | 30,31 |

Blocks of 5 bits become 8-bit numbers. A block of Q4_K is 256 numbers in 8 groups; the scales and offsets of its groups
are products of a half and a number of 6 bits, which only float32 holds.

Source: ggml-quants.c of llama.cpp, ``dequantize_row_q8_0``, ``.._q4_0``, ``.._q4_1``, ``.._q5_0``, ``.._q5_1`` and
``.._q4_K``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.weights.buffers import empty
from jaxinfer.weights.packed.bits import hollow, recentre

GROUP = 32
KEPT_BLOCKS: Mapping[str, Format] = {
    "Q8_0": Format("int8", GROUP, scale="float16"),
    "Q4_0": Format("int4", GROUP, scale="float16"),
    "Q4_1": Format("int4", GROUP, offset=True, scale="float16"),
    "Q5_0": Format("int8", GROUP, scale="float16"),
    "Q5_1": Format("int8", GROUP, offset=True, scale="float16"),
    "Q4_K": Format("int4", GROUP, offset=True, scale="float32"),
}
_CHUNK_GROUPS = 1 << 12  # taken apart at once, so that they stay in the cache
_K_GROUPS = 8  # groups of 32 in a block of Q4_K


def read_blocks(data: np.ndarray, block_format: str, shape: tuple[int, ...]) -> Quantized:
    """Returns a tensor of blocks in our layout.

    Args:
      data: its bytes as they lie in the file.
      block_format: a key of `KEPT_BLOCKS`.
      shape: of the tensor, ``[..., in]`` with ``in`` a multiple of the block's numbers.
    """
    fmt = KEPT_BLOCKS[block_format]
    parts = hollow_blocks(block_format, shape)
    out = [empty(p.shape, p.dtype) for p in (parts.values, parts.scale, parts.offset) if p is not None]
    values, *scales = out[0].reshape(-1, GROUP * fmt.bits // 8), *(part.reshape(-1) for part in out[1:])
    groups_a_block = _K_GROUPS if block_format == "Q4_K" else 1
    blocks = data.reshape(len(values) // groups_a_block, -1)
    step = _CHUNK_GROUPS // groups_a_block
    for at in range(0, len(blocks), step):
        taken = slice(at * groups_a_block, (at + step) * groups_a_block)
        read = _read_k if block_format == "Q4_K" else _read_simple
        numbers, *sizes = read(blocks[at : at + step], block_format)
        values[taken] = numbers
        for part, size in zip(scales, sizes, strict=True):
            part[taken] = size
    return Quantized(out[0], out[1], out[2] if fmt.offset else None, None, fmt)


def hollow_blocks(block_format: str, shape: tuple[int, ...]) -> Quantized:
    """Returns shapes and dtypes of what `read_blocks` gives, as arrays without memory of their own."""
    fmt = KEPT_BLOCKS[block_format]
    *lead, last = shape
    values = hollow((*lead, last * fmt.bits // 8), fmt.dtype)
    scale = hollow((*lead, last // GROUP), fmt.scale)
    return Quantized(values, scale, scale if fmt.offset else None, None, fmt)


def _read_simple(blocks: np.ndarray, block_format: str) -> tuple[np.ndarray, ...]:
    """Returns numbers, scale and, where there is one, offset of blocks of 32: the halves d and m lie first."""
    fmt = KEPT_BLOCKS[block_format]
    num_halves = 2 if fmt.offset else 1
    halves = np.ascontiguousarray(blocks[:, : 2 * num_halves]).view("<f2").T
    stored = blocks[:, 2 * num_halves :]
    if block_format == "Q8_0":
        return stored.view(np.int8), *halves
    if block_format in ("Q4_0", "Q4_1"):
        paired = _pair(stored)
        return paired if fmt.offset else recentre(paired, 4), *halves
    # Bit j of 32 is the fifth of number j.
    fifth = np.unpackbits(stored[:, :4], axis=1, bitorder="little") << 4
    low = np.concatenate((stored[:, 4:] & 15, stored[:, 4:] >> 4), axis=1)
    numbers = (low | fifth).view(np.int8)
    return numbers if fmt.offset else numbers - np.int8(16), *halves


def _read_k(blocks: np.ndarray, block_format: str) -> tuple[np.ndarray, ...]:
    """Returns numbers, scales and offsets of blocks of 256: ``d``, ``dmin``, 8 scales and 8 minima, the numbers.

    The 12 bytes after the halves hold 6 bits of each: of the first four the low bits of bytes 0 to 3 (scales) and 4 to
    7 (minima), of the others the nibbles of bytes 8 to 11 under the two high bits of those.
    """
    d, dmin = np.ascontiguousarray(blocks[:, :4]).view("<f2").astype(np.float32).T
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=1)
    # 32 bytes hold two groups: one in the low nibbles, the next in the high ones.
    even, odd = blocks[:, 16::2].reshape(-1, 16), blocks[:, 17::2].reshape(-1, 16)
    paired = np.stack(((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)), axis=1)
    with np.errstate(all="ignore"):  # what is not finite is reported by name, by those who load
        scale, offset = d[:, None] * scales, -dmin[:, None] * minima
    return paired.reshape(-1, 16), scale.reshape(-1), offset.reshape(-1)


def _pair(stored: np.ndarray) -> np.ndarray:
    """Returns blocks of 16 bytes, number j beside number j + 16, as number 2i beside number 2i + 1."""
    even, odd = stored[:, 0::2], stored[:, 1::2]
    return np.concatenate(((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)), axis=1)
