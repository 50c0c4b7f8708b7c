"""Paged attention in blocks of context with a running softmax: plain XLA, any backend, one executable for every length.

The number of blocks is the longest row's, counted on the device, so that memory and time follow the context that is
there and not the longest that could be. A context of one block needs no loop. The forms are those that XLA's CPU
backend runs fastest (measured with SmolLM2's heads on two cores, jax 0.12): pages are gathered by a flat index of
whole pages, at the speed of a copy (0.10 ms a layer against 0.20 by page and token); decode rows multiply all heads
at once; prefill chunks multiply a batch over rows and kv heads (572 ms for 512 tokens, against 1,906 grouped).

Coded pages are opened a block at a time. Decode rows multiply the codes as they are and apply the scales to the scores
and to the weights, a number each where a block of keys or values is ``H`` of them; chunks have more scores than keys,
so theirs are multiplied out first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.arrays.pages import (
    code_places,
    decode,
    from_slab,
    group_size,
    read_codes,
    read_scales,
    token_widths,
)
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.reference import MASKED, visible

BLOCK = 256  # tokens of context at a time: their scores and pages stay in the cache of a core
LEAST_BLOCK = 64
BLOCK_BYTES = 2**20  # of keys that decode rows read at a time: what two cores hold
TILE = 256  # queries of a chunk at a time
FIXED = 127 * 128  # the largest number of a row in two parts of 8 bits
SPREAD_HEADS = 4  # up to here all kv heads are multiplied at once, most of it zeros, rather than one by one


Stored = tuple[jax.Array, jax.Array | None]  # values [B, S, ..] and scales [B, S, ..] as they lie in pages


class _Form(NamedTuple):
    """How queries, keys and values meet: two products and the way back.

    Attributes:
      q: queries, ready to multiply. scores: of ``(q, keys)``, ``[B, N, T, S]`` float32.
      mix: ``(weights [B, N, T, S], values) -> [B, N, T, Y]`` float32.
      finish: ``[B, N, T, Y]`` to ``[B, T, N, H]``.
      width: Y. weights: their dtype.
    """

    q: jax.Array
    scores: Callable[[jax.Array, Stored], jax.Array]
    mix: Callable[[jax.Array, Stored], jax.Array]
    finish: Callable[[jax.Array], jax.Array]
    width: int
    weights: jnp.dtype


def paged_attention_blocked(
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
    """As `paged_attention_reference`.

    Long chunks go tile by tile, so that a tile's scores stay in cache and no tile multiplies keys after its last query.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    options = {"scale": scale, "window": window, "softcap": softcap}
    B, T, N, H = q.shape
    if T <= TILE:
        return _attend(q, kv, pages, start, length, **options)
    num_tiles = -(-T // TILE)
    tiles = jnp.pad(q, ((0, 0), (0, -T % TILE), (0, 0), (0, 0))).reshape(B, num_tiles, TILE, N, H)

    def attend(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, done = tile
        left = jnp.clip(length - done, 0, TILE)
        return _attend(queries, kv, pages, start + done, left, **options)

    offsets = jnp.arange(num_tiles, dtype=jnp.int32) * TILE
    out = jax.lax.map(attend, (tiles.swapaxes(0, 1), offsets))
    return out.swapaxes(0, 1).reshape(B, num_tiles * TILE, N, H)[:, :T]


def _attend(
    q: jax.Array,
    kv: PagedKV,
    pages: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None,
    softcap: float | None,
) -> jax.Array:
    """`paged_attention_blocked` for one tile of queries."""
    B, T, N, H = q.shape
    num_layers, P = kv.k.shape[:2]
    Z, K = kv.page_size, kv.count_heads(H)
    width, num_scales = token_widths(kv.format, K, H)
    q = q * jnp.asarray(scale, q.dtype)
    form = _choose_form(q, kv, K)
    step = min(pages.shape[1], max(1, (BLOCK if T > 1 else _decode_block(B * K * H * q.dtype.itemsize)) // Z))
    S = step * Z
    pages = jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % step)), constant_values=-1)
    end = start + length
    position = start[:, None] + jnp.arange(T, dtype=jnp.int32)

    def gather(pool: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns whole pages of the layer, ``[B * step, ..]``."""
        index = kv.layer * P + jnp.clip(ids.reshape(-1), 0, P - 1)
        # [.., Z, C] as it lies: a row of Z*C has other tiles, and a TPU copied the whole pool into them at every layer.
        flat = pool.reshape(num_layers * P, *pool.shape[2:])
        return flat.at[index].get(mode="promise_in_bounds")

    def read(ids: jax.Array, values: jax.Array, scales: jax.Array | None) -> Stored:
        stored = from_slab(gather(values, ids), Z, width).reshape(B, S, -1)
        if scales is None:
            return stored, None
        return stored, from_slab(gather(scales, ids), Z, num_scales).reshape(B, S, -1)

    def block(i: jax.Array | int) -> tuple[jax.Array, Stored]:
        """Returns a block's masked scores and its values."""
        ids = jax.lax.dynamic_slice_in_dim(pages, i * step, step, axis=1)
        index = i * S + jnp.arange(S, dtype=jnp.int32)
        scores = form.scores(form.q, read(ids, kv.k, kv.k_scale))
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        x_mask = visible(position[:, :, None], index, window) & (index < end[:, None])[:, None]
        return jnp.where(x_mask[:, None], scores, MASKED), read(ids, kv.v, kv.v_scale)

    def weigh(scores: jax.Array, top: jax.Array, values: Stored) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of a block's weights and its weighted values."""
        # Summed as they are multiplied, rounded; the barrier keeps XLA from taking every exponential twice.
        weights = jax.lax.optimization_barrier(jnp.exp(scores - top).astype(form.weights))
        return weights.astype(jnp.float32).sum(-1, keepdims=True), form.mix(weights, values)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        # A row that saw no key yet weighs masked ones by exp(0); its first visible key shrinks that to nothing.
        top, total, out = carry
        scores, values = block(i)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        shrink = jnp.exp(top - new_top)
        added, mixed = weigh(scores, new_top, values)
        return new_top, total * shrink + added, out * shrink + mixed

    if pages.shape[1] == step:
        scores, values = block(0)
        total, out = weigh(scores, scores.max(-1, keepdims=True), values)
        return form.finish(out / total).astype(q.dtype)
    rows = (B, N, T)
    nothing = jnp.full((*rows, 1), MASKED, jnp.float32), jnp.zeros((*rows, 1)), jnp.zeros((*rows, form.width))
    last = -(-jnp.max(jnp.where(length > 0, end, 0)) // S)
    _, total, out = jax.lax.fori_loop(_first_block(start, length, window, S), last, body, nothing)
    return form.finish(out / jnp.maximum(total, 1e-30)).astype(q.dtype)


def _choose_form(q: jax.Array, kv: PagedKV, K: int) -> _Form:
    if q.shape[1] > 1 or K > SPREAD_HEADS:
        return _by_kv_head(q, kv, K)
    return _all_heads(q, kv, K) if kv.format.is_plain else _all_heads_of_codes(q, kv, K)


def _all_heads(q: jax.Array, kv: PagedKV, K: int) -> _Form:
    """Decode rows: each query head lies in its kv head's slot of a K*H wide row of zeros, one product serves all."""
    _, _, N, H = q.shape
    G = N // K
    slots = [
        jnp.pad(q[:, 0, i * G : (i + 1) * G], ((0, 0), (0, 0), (i * H, (K - 1 - i) * H))) for i in range(K)
    ]

    def read(stored: Stored) -> jax.Array:
        return read_codes(stored[0], kv.format, q.dtype).astype(q.dtype)

    def scores(q: jax.Array, keys: Stored) -> jax.Array:
        if q.dtype.itemsize < 4:
            return _product("bnc,bsc->bns", q, read(keys))[:, :, None]
        # Keys on the left: 0.27 against 0.93 ms (16 rows, AVX2); the barrier keeps XLA from turning it round again.
        return jax.lax.optimization_barrier(_product("bsc,bnc->bsn", read(keys), q)).swapaxes(1, 2)[
            :, :, None
        ]

    def mix(weights: jax.Array, values: Stored) -> jax.Array:
        return _product("bns,bsc->bnc", weights[:, :, 0], read(values))[:, :, None]

    def finish(out: jax.Array) -> jax.Array:
        heads = [out[:, i * G : (i + 1) * G, 0, i * H : (i + 1) * H] for i in range(K)]
        return jnp.concatenate(heads, 1)[:, None]

    return _Form(jnp.concatenate(slots, 1), scores, mix, finish, K * H, q.dtype)


def _all_heads_of_codes(q: jax.Array, kv: PagedKV, K: int) -> _Form:
    """As `_all_heads` over coded pages: a row of zeros for each query head and scale of its kv head.

    Scales apply to the scores and to the weights, in float32; the codes meet them as they are (`_product_of_codes`).
    """
    B, _, N, H = q.shape
    fmt = kv.format
    head, number = code_places(fmt, K, H)
    per_head = H // group_size(fmt, H)
    group = np.arange(per_head)[:, None]
    mine = (head == np.arange(N)[:, None, None] // (N // K)) & (
        number * per_head // H == group
    )  # [N, groups, C]
    halves = 8 // fmt.bits
    apart = (B, N, per_head, halves, K, H // halves)  # the order of codes

    def open_pages(stored: Stored) -> tuple[jax.Array, jax.Array]:
        """Returns codes ``[B, S, C]`` and the scale of each query head's groups, ``[B, N, groups, S]``."""
        values, scales = stored
        assert scales is not None
        S = values.shape[1]
        by_group = jnp.moveaxis(read_scales(scales, fmt), 1, 2).reshape(B, K, 1, per_head, S)
        by_group = jnp.broadcast_to(by_group, (B, K, N // K, per_head, S)).reshape(B, N, per_head, S)
        return read_codes(values, fmt, q.dtype), by_group

    def scores(q: jax.Array, keys: Stored) -> jax.Array:
        codes, scale = open_pages(keys)
        return (_product_of_codes("bmc,bsc->bms", q, codes, q.dtype) * scale).sum(2)[:, :, None]

    def mix(weights: jax.Array, values: Stored) -> jax.Array:
        codes, scale = open_pages(values)
        out = _product_of_codes("bms,bsc->bmc", weights * scale, codes, q.dtype)
        return jnp.where(mine, out, 0).reshape(apart).sum((2, 4)).reshape(B, N, 1, H)

    placed = jnp.broadcast_to(q.reshape(B, N, 1, halves, 1, -1), apart).reshape(B, N, per_head, K * H)
    return _Form(
        jnp.where(mine, placed, 0), scores, mix, lambda out: out.swapaxes(1, 2), H, jnp.dtype(jnp.float32)
    )


def _by_kv_head(q: jax.Array, kv: PagedKV, K: int) -> _Form:
    """Any rows: a batch of products over rows and kv heads, the queries of a kv head's group together."""
    B, T, N, H = q.shape
    G = N // K
    grouped = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)

    def read(stored: Stored) -> jax.Array:
        return decode(*stored, kv.format, K, H).astype(q.dtype)

    def scores(q: jax.Array, keys: Stored) -> jax.Array:
        return _product("bkqh,bskh->bkqs", q, read(keys)).reshape(B, N, T, -1)

    def mix(weights: jax.Array, values: Stored) -> jax.Array:
        return _product("bkqs,bskh->bkqh", weights.reshape(B, K, G * T, -1), read(values)).reshape(B, N, T, H)

    return _Form(grouped, scores, mix, lambda out: out.transpose(0, 2, 1, 3), H, q.dtype)


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = "highest" if x.dtype.itemsize == 4 else None
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32, precision=precision)


def _product_of_codes(spec: str, x: jax.Array, codes: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiplies rows ``[B, N, groups, X]`` by codes, in ``dtype`` or exactly; the result has the rows' axes.

    Whole codes meet 16-bit compute as they are: a row is written as ``(128 high + low) * scale`` with high and low in 8
    bits, closer than floats of 16 bits are to its largest numbers, and the products are exact. Making floats of codes
    takes as long again as multiplying them (67 and 71 us for 16 x 128 tokens of SmolLM2; 8 bits and twice the rows 75).
    """
    B, N, groups, X = x.shape
    if codes.dtype != jnp.int8 or dtype.itemsize == 4:
        y = _product(spec, x.reshape(B, N * groups, X).astype(dtype), codes.astype(dtype))
        return y.reshape(B, N, groups, -1)
    x = x.astype(jnp.float32)
    step = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) / FIXED
    fixed = jnp.round(x / step).astype(jnp.int32)
    high = (fixed + 64) >> 7
    parts = jnp.stack([high, fixed - (high << 7)], 1).astype(jnp.int8).reshape(B, -1, X)
    y = jnp.einsum(spec, parts, codes, preferred_element_type=jnp.int32)
    y = y.astype(jnp.float32).reshape(B, 2, N, groups, -1)
    return (128 * y[:, 0] + y[:, 1]) * step


def _decode_block(token_bytes: int) -> int:
    """Returns the tokens of context at a time, of ``token_bytes`` each over all rows.

    With 16 rows, 96 tokens of context: 72, 80 and 100 ms a step by 64, 128 and 256; with 2 rows they are equal.
    """
    S = BLOCK
    while S > LEAST_BLOCK and S * token_bytes > BLOCK_BYTES:
        S //= 2
    return S


def _first_block(start: jax.Array, length: jax.Array, window: jax.Array | int | None, S: int) -> jax.Array:
    """Returns the first block that any live row's window reaches."""
    if window is None:
        return jnp.int32(0)
    reach = jnp.asarray(window, jnp.int32)
    oldest = jnp.min(jnp.where(length > 0, start - reach + 1, jnp.iinfo(jnp.int32).max))
    return jnp.where(reach == 0, 0, jnp.clip(oldest, 0) // S).astype(jnp.int32)
