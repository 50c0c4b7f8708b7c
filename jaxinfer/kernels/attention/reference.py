"""Paged attention in plain jnp: the oracle. Gathers every page of a row and masks; slow, simple, float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.arrays.pages import decode, from_slab, token_widths
from jaxinfer.kernels.attention.paged import PagedKV

MASKED = -1e30  # finite, so that a row with no visible key gives numbers, not NaN


def visible(query: jax.Array, key: jax.Array, window: jax.Array | int | None) -> jax.Array:
    """Returns which keys a query sees: itself and at most ``window - 1`` keys before it.

    Args:
      query: positions of queries. key: positions of keys, broadcastable against them.
      window: keys seen, the query's own included; None or 0 sees all before it.
    """
    seen = key <= query
    if window is None:
        return seen
    return seen & ((key > query - window) | (jnp.asarray(window) == 0))


def paged_attention_reference(
    q: jax.Array,
    kv: PagedKV,
    pages: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attends from a block of queries to the pages of their rows.

    Args:
      q: ``[B, T, N, H]`` queries at positions ``start + t``.
      kv: keys and values, those of the block's own tokens already written.
      pages: ``[B, W]`` page ids a row, in ``[0, P)`` wherever a query sees; behind the window and after the end
        they may be anything. Only this implementation hides other ids where queries see; the others trust the table.
      start: ``[B]`` position of each row's first query.
      length: ``[B]`` queries that count; keys at or after ``start + length`` are not read, and a row of length 0
        is padding.
      scale: multiplies q.k. window: see `visible`. softcap: ``cap * tanh(score / cap)`` when set.

    Returns:
      ``[B, T, N, H]`` in the dtype of ``q``.
    """
    B, T, N, H = q.shape
    P, Z = kv.k.shape[1], kv.page_size
    K = kv.count_heads(H)
    width, num_scales = token_widths(kv.format, K, H)

    def gather(pool: jax.Array) -> jax.Array:
        return jnp.take(pool[kv.layer], pages, axis=0, mode="clip")

    def read(values: jax.Array, scales: jax.Array | None) -> jax.Array:
        scales = None if scales is None else from_slab(gather(scales), Z, num_scales)
        values = from_slab(gather(values), Z, width)
        return decode(values, scales, kv.format, K, H).reshape(B, -1, K, H).astype(jnp.float32)

    keys, values = read(kv.k, kv.k_scale), read(kv.v, kv.v_scale)
    grouped = q.reshape(B, T, K, N // K, H).astype(jnp.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, keys, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    position = start[:, None] + jnp.arange(T)
    index = jnp.arange(keys.shape[1])
    live = (index < (start + length)[:, None]) & jnp.repeat((pages >= 0) & (pages < P), Z, axis=1)
    x_mask = visible(position[:, :, None], index, window) & live[:, None]
    x_mask = x_mask[:, None, None]
    scores = jnp.where(x_mask, scores, MASKED)
    weights = jnp.where(x_mask, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bkgts,bskh->btkgh", weights / jnp.maximum(total, 1e-30), values, precision="highest")
    return out.reshape(B, T, N, H).astype(q.dtype)
