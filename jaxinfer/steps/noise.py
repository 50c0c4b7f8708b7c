"""Random numbers that belong to a request, a position and a token id, and to nothing else.

Threefry is written out because noise must not depend on shapes, on neighbours or on jax's flags, and because XLA fuses
these elementwise operations into what reads them. The same code runs on numpy and on jax arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key0: Any, key1: Any, count0: Any, count1: Any) -> tuple[Any, Any]:
    """Encrypts counters, elementwise: 20 rounds of Threefry-2x32, the cipher of `jax.random`.

    Args:
      key0, key1, count0, count1: uint32 arrays of numpy or jax that broadcast together.

    Returns:
      Two uint32 arrays.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = count0 + key0, count1 + key1
    for block in range(5):
        for shift in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(shift)) | (x1 >> np.uint32(32 - shift))) ^ x0
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + schedule[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def request_key(seed: int, choice: int) -> np.ndarray:
    """Returns ``fold_in(key(seed), choice)`` of a request, on the host.

    Args:
      seed: from -2**63 to 2**63 - 1. choice: index among the n of one prompt.

    Returns:
      uint32 ``[2]``.
    """
    words = np.array([[seed >> 32 & 0xFFFFFFFF], [seed & 0xFFFFFFFF]], np.uint32)
    zero = np.zeros(1, np.uint32)
    return np.concatenate(threefry(words[0], words[1], zero, zero + np.uint32(choice)))


def fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    """Returns a key for each number, as `jax.random.fold_in` does.

    Args:
      key: uint32 ``[..., 2]``. data: integers ``[...]``.
    """
    data = data.astype(jnp.uint32)
    return jnp.stack(threefry(key[..., 0], key[..., 1], jnp.zeros_like(data), data), axis=-1)


def gumbel(key: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the Gumbel noise of each token id under a row's key: the first word of ``fold_in(key, id)``.

    Args:
      key: uint32 ``[B, 2]``. ids: integers ``[B, C]`` or ``[1, C]``.

    Returns:
      float32 ``[B, C]``, from -2.9 to 16.7.
    """
    ids = ids.astype(jnp.uint32)
    bits, _ = threefry(key[:, :1], key[:, 1:], jnp.zeros_like(ids), ids)
    # 23 bits and a half: exact in float32, and never 0 or 1.
    uniform = ((bits >> np.uint32(9)).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))
