"""GGUF blocks of 32 numbers, taken apart into our layout: the numbers and scales are the file's own, bit by bit.

A row of the file is a row of blocks, scale first; ours has all numbers of the tensor in one array and all scales in
another. In a 4-bit block byte j holds number j in its low nibble and number j + 16 in its high one:

  file  | d | 0,16 | 1,17 | 2,18 | ... | 15,31 |      ours  | 0,1 | 2,3 | ... | 30,31 |

Source: ggml-quants.c of llama.cpp, ``dequantize_row_q8_0``, ``dequantize_row_q4_0`` and ``dequantize_row_q4_1``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.weights.buffers import empty
from jaxinfer.weights.packed.bits import hollow, recentre

BLOCK = 32
# w = d * q; d * (q - 8); d * q + m. The halves d and m lie before the numbers.
KEPT_BLOCKS: Mapping[str, Format] = {
    "Q8_0": Format("int8", BLOCK, scale="float16"),
    "Q4_0": Format("int4", BLOCK, scale="float16"),
    "Q4_1": Format("int4", BLOCK, offset=True, scale="float16"),
}
_CHUNK_BLOCKS = 1 << 12  # taken apart at once, so that they stay in the cache


def read_blocks(data: np.ndarray, block_format: str, shape: tuple[int, ...]) -> Quantized:
    """Returns a tensor of blocks in our layout.

    Args:
      data: its bytes as they lie in the file.
      block_format: a key of `KEPT_BLOCKS`.
      shape: of the tensor, ``[..., in]`` with ``in`` a multiple of 32.
    """
    fmt = KEPT_BLOCKS[block_format]
    parts = hollow_blocks(block_format, shape)
    num_halves = 2 if fmt.offset else 1
    out = [
        empty(part.shape, part.dtype)
        for part in (parts.values, parts.scale, parts.offset)
        if part is not None
    ]
    values, halves = out[0].reshape(-1, BLOCK * fmt.bits // 8), [half.reshape(-1) for half in out[1:]]
    blocks = data.reshape(len(values), -1)
    for at in range(0, len(blocks), _CHUNK_BLOCKS):
        part = slice(at, at + _CHUNK_BLOCKS)
        head = np.ascontiguousarray(blocks[part, : 2 * num_halves]).view("<f2")
        for i, half in enumerate(halves):
            half[part] = head[:, i]
        stored = blocks[part, 2 * num_halves :]
        if fmt.bits == 8:
            values[part] = stored.view(np.int8)
            continue
        even, odd = stored[:, 0::2], stored[:, 1::2]
        paired = np.concatenate(((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)), axis=1)
        values[part] = paired if fmt.offset else recentre(paired, 4)
    return Quantized(out[0], out[1], out[2] if fmt.offset else None, None, fmt)


def hollow_blocks(block_format: str, shape: tuple[int, ...]) -> Quantized:
    """Returns shapes and dtypes of what `read_blocks` gives, as arrays without memory of their own."""
    fmt = KEPT_BLOCKS[block_format]
    *lead, last = shape
    values = hollow((*lead, last * fmt.bits // 8), fmt.dtype)
    half = hollow((*lead, last // BLOCK), np.float16)
    return Quantized(values, half, half if fmt.offset else None, None, fmt)
