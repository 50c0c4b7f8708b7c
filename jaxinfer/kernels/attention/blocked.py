"""Paged attention in blocks of context with a running softmax: plain XLA, any backend, one executable for every length.

The number of blocks is the longest row's, counted on the device, so that memory and time follow the context that is
there and not the longest that could be.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.attention.reference import MASKED, visible


def paged_attention_blocked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array | int,
    pages: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """As `paged_attention_reference`, over ``k, v [l, P, Z, K, H]`` of a stack at ``layer``.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    B, T, N, H = q.shape
    Z, K = k.shape[2:4]
    G = N // K
    step_pages = min(pages.shape[1], max(1, _block_tokens(T) // Z))
    S = step_pages * Z
    spare = -pages.shape[1] % step_pages
    pages = jnp.pad(pages, ((0, 0), (0, spare)), constant_values=-1)
    end = start + length
    position = start[:, None] + jnp.arange(T, dtype=jnp.int32)
    grouped = (
        (q * jnp.asarray(scale, q.dtype))
        .reshape(B, T, K, G, H)
        .transpose(0, 2, 3, 1, 4)
        .reshape(B, K, G * T, H)
    )

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        top, total, out = carry
        ids = jax.lax.dynamic_slice_in_dim(pages, i * step_pages, step_pages, axis=1)
        index = i * S + jnp.arange(S, dtype=jnp.int32)
        live = index < end[:, None]
        keys = k.at[layer, ids].get(mode="clip").reshape(B, S, K, H)
        values = v.at[layer, ids].get(mode="clip").reshape(B, S, K, H)
        # Stale lanes of a page may hold NaN, and 0 * NaN is NaN.
        values = jnp.where(live[:, :, None, None], values, 0).astype(q.dtype)
        scores = jnp.einsum(
            "bkqh,bskh->bkqs",
            grouped,
            keys.astype(q.dtype),
            preferred_element_type=jnp.float32,
            precision="highest",
        ).reshape(B, K, G, T, S)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        x_mask = (visible(position[:, :, None], index, window) & live[:, None])[:, None, None]
        scores = jnp.where(x_mask, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(x_mask, jnp.exp(scores - new_top[..., None]), 0)
        shrink = jnp.exp(top - new_top)
        added = jnp.einsum(
            "bkqs,bskh->bkqh",
            weights.astype(q.dtype).reshape(B, K, G * T, S),
            values,
            preferred_element_type=jnp.float32,
            precision="highest",
        ).reshape(B, K, G, T, H)
        return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + added

    first = _first_block(start, length, window, S)
    last = -(-jnp.max(jnp.where(length > 0, end, 0)) // S)
    zeros = jnp.zeros((B, K, G, T), jnp.float32)
    carry = (zeros + MASKED, zeros, jnp.zeros((B, K, G, T, H), jnp.float32))
    _, total, out = jax.lax.fori_loop(first, last, body, carry)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q.dtype)


def _block_tokens(T: int) -> int:
    """Returns tokens of context a block: wide for decode rows, narrower where scores are ``T`` times as many."""
    return 256 if T <= 16 else 128


def _first_block(start: jax.Array, length: jax.Array, window: jax.Array | int | None, S: int) -> jax.Array:
    """Returns the first block that any live row's window reaches."""
    if window is None:
        return jnp.int32(0)
    reach = jnp.asarray(window, jnp.int32)
    oldest = jnp.min(jnp.where(length > 0, start - reach + 1, jnp.iinfo(jnp.int32).max))
    return jnp.where(reach == 0, 0, jnp.clip(oldest, 0) // S).astype(jnp.int32)
