"""Numbers by token id, ``[B, V]``, and what is asked of all of them.

A mesh cuts the vocabulary: each device has the ids from ``first_id`` on, and what is asked is answered by a number or
by k candidates of each share, never by bringing the logits together. Without a mesh a share is all there is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.arrays.sharding import (
    gather_shards,
    max_shards,
    min_shards,
    num_shards,
    shard_index,
    sum_shards,
)

BANNED = (
    -1e30
)  # a banned token's logit: finite, so that no mask makes NaN, and below what temperature could lift
GROUP = 32  # ids that share a maximum when the likeliest are looked for


def count_ids(x: jax.Array) -> int:
    """Returns how many ids all shares have together."""
    return x.shape[-1] * num_shards("vocab")


def token_ids(x: jax.Array) -> jax.Array:
    """Returns the ids of this share, int32 ``[V]``."""
    return _first_id(x) + jnp.arange(x.shape[-1], dtype=jnp.int32)


def largest(x: jax.Array) -> jax.Array:
    """Returns the largest number of each row, ``[B]``."""
    return max_shards(x.max(-1), "vocab")


def smallest(x: jax.Array) -> jax.Array:
    """Returns the smallest number of each row, ``[B]``."""
    return min_shards(x.min(-1), "vocab")


def total(x: jax.Array) -> jax.Array:
    """Returns the sum of each row, ``[B]``."""
    return sum_shards(jnp.sum(x, axis=-1), "vocab")


def log_total(x: jax.Array) -> jax.Array:
    """Returns the logarithm of the sum of each row's exponentials, ``[B]``."""
    if num_shards("vocab") == 1:
        return jax.nn.logsumexp(x, axis=-1)
    first = largest(x)
    return first + jnp.log(total(jnp.exp(x - first[:, None])))


def is_finite(x: jax.Array) -> jax.Array:
    """Returns whether the largest number of each row is finite, ``[B]``; a NaN anywhere is the largest."""
    return min_shards(jnp.isfinite(x.max(-1)).astype(jnp.int32), "vocab") > 0


def argmax(x: jax.Array) -> jax.Array:
    """Returns the lowest id among the largest; two plain passes are faster than XLA's argmax on a CPU."""
    V = count_ids(x)
    best = largest(x)[:, None]
    found = min_shards(jnp.min(jnp.where(x == best, token_ids(x), V), axis=-1), "vocab")
    return jnp.minimum(found, V - 1)  # a row of NaN must not leave the vocabulary


def pick(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the numbers of ids ``[B, n]``, which some share has."""
    if num_shards("vocab") == 1:
        return jnp.take_along_axis(x, ids, 1)
    where = ids - _first_id(x)
    inside = (where >= 0) & (where < x.shape[-1])
    found = jnp.take_along_axis(x, jnp.where(inside, where, 0), 1)
    return sum_shards(jnp.where(inside, found, 0), "vocab")


def scatter(x: jax.Array, ids: jax.Array) -> Any:
    """Addresses ``x[b, ids[b]]``; ids that are negative, too large or another share's are out of range, not wrapped."""
    B, V = x.shape
    where = ids if num_shards("vocab") == 1 else ids - _first_id(x)
    return x.at[jnp.arange(B)[:, None], jnp.where((ids < 0) | (where < 0), V, where)]


def unpack_bits(words: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the bit of each id of this share, ``[B, V]``; 0 beyond the last word.

    Args:
      words: uint32 ``[B, W]``, 32 ids each; a share is whole words. x: ``[B, V]``, says which ids.
    """
    B, V = x.shape
    if num_shards("vocab") > 1:
        words = jnp.pad(words, ((0, 0), (0, count_ids(x) // 32 - words.shape[1])))
        words = lax.dynamic_slice_in_dim(words, _first_id(x) // 32, V // 32, 1)
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    bits = bits.reshape(B, -1)[:, :V]
    return jnp.pad(bits, ((0, 0), (0, V - bits.shape[1])))


def top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest of each row and their ids, largest first; the first has the lowest id on ties."""
    values, ids = _top_of_share(x, k)
    if num_shards("vocab") == 1:
        return values, ids
    values, ids = (gather_shards(part, "vocab", dim=1) for part in (values, ids + _first_id(x)))
    values, index = _top_k(values, min(k, values.shape[1]))
    return values, jnp.take_along_axis(ids, index, 1)


def _first_id(x: jax.Array) -> jax.Array | int:
    return shard_index("vocab") * x.shape[-1]


def _top_of_share(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """As `top`, of this share and by its own counting.

    The k largest lie in the k groups with the largest maxima, so only those are searched: on a CPU that halves the
    time of `lax.top_k` over everything.
    """
    B, V = x.shape
    if 2 * k * GROUP >= V:
        return _top_k(x, min(k, V))
    padded = jnp.pad(x, ((0, 0), (0, -V % GROUP)), constant_values=BANNED) if V % GROUP else x
    groups = padded.reshape(B, -1, GROUP)
    _, chosen = _top_k(groups.max(-1), k)
    values, index = _top_k(jnp.take_along_axis(groups, chosen[..., None], 1).reshape(B, -1), k)
    ids = jnp.take_along_axis(chosen, index // GROUP, 1) * GROUP + index % GROUP
    return values, ids


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    # Without a barrier XLA's CPU backend sees slices of the result and sorts everything: 3 ms more at [16, 49152]. One
    # for each, for one around both would take the pair itself: jax 0.10 aborts on that where it sorts after all.
    values, index = lax.top_k(x, k)
    return lax.optimization_barrier(values), lax.optimization_barrier(index)
