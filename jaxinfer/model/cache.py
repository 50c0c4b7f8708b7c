"""The KV cache: pages of Z tokens, one pytree, written in place.

Layout of a stack of l layers: ``k`` and ``v`` are ``[l, P, Z, K*H]`` (heads flat: XLA's CPU backend copies a pool with
an axis of one head into another order at every step), numbers as `arrays.pages` lays them, and where those are codes,
``k_scale`` and ``v_scale`` beside them; on a TPU as slabs where tokens do not fill whole vectors, see
`arrays.pages.value_slab`. A row of a batch owns a list of page ids; token ``i`` of the row lies in page
``pages[i // Z]`` at offset ``i % Z``. Only this module and the attention kernels know the layout, so that other page
formats change nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.formats import BFLOAT16, Format
from jaxinfer.arrays.pages import (
    Slab,
    encode,
    group_size,
    padded_lanes,
    scale_dtype,
    scale_slab,
    stored_dtype,
    token_widths,
    value_slab,
)
from jaxinfer.arrays.precision import Policy
from jaxinfer.config import ModelConfig


@struct.dataclass
class Pages:
    """KV pages of one stack of l layers.

    Attributes:
      k: ``[l, P, Z, K*H]`` keys, rotated (an array, or its description before there is one); half as long in 4 bits.
      v: ``[l, P, Z, K*H]`` values. On a TPU both are ``[l, P, rows, lanes]`` where a token fills no whole vectors.
      k_scale, v_scale: ``[l, P, Z, K*groups]``, on a TPU ``[l, P, rows, lanes]``, None where the format is plain.
      format: of the numbers.
      slab: on a TPU what the shapes of ``k`` and ``v`` may not tell, else None.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    format: Format = struct.field(pytree_node=False)
    slab: Slab | None = struct.field(pytree_node=False, default=None)

    @property
    def num_pages(self) -> int:
        """P, pages a layer."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Z, tokens a page."""
        return self.slab.page_size if self.slab else self.k.shape[2]


KVCache = tuple[Pages, ...]


def cache_shapes(
    cfg: ModelConfig, policy: Policy, stacks: Sequence[int], num_pages: int, page_size: int
) -> KVCache:
    """Returns the cache as abstract arrays, one `Pages` a layer stack.

    Args:
      cfg: the model.
      policy: names the format of pages.
      stacks: layers in each stack, summing to L.
      num_pages: P, pages that every layer has.
      page_size: Z, tokens a page.
    """
    fmt, dtypes = policy.kv, _stored_dtypes(policy.kv)
    parts = _page_shapes(cfg, fmt, page_size)
    slab = Slab(page_size, cfg.attention.num_kv_heads) if backend() == "tpu" else None

    def pages(size: int) -> Pages:
        values, scales = (
            None if part is None else jax.ShapeDtypeStruct((size, num_pages, *part), dtype)
            for part, dtype in zip(parts, dtypes, strict=True)
        )
        return Pages(values, values, scales, scales, fmt, slab)

    return tuple(pages(size) for size in stacks)


def init_cache(
    cfg: ModelConfig, policy: Policy, stacks: Sequence[int], num_pages: int, page_size: int
) -> KVCache:
    """Returns a cache of zeros; arguments as for `cache_shapes`."""
    shapes = cache_shapes(cfg, policy, stacks, num_pages, page_size)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def page_bytes(cfg: ModelConfig, policy: Policy, page_size: int) -> int:
    """Returns the bytes that one page takes over all layers: ``2 L Z K H`` numbers and their scales."""
    parts = zip(_page_shapes(cfg, policy.kv, page_size), _stored_dtypes(policy.kv), strict=True)
    return 2 * cfg.num_layers * sum(math.prod(part) * dtype.itemsize for part, dtype in parts if part)


def describe_pages(cfg: ModelConfig, policy: Policy) -> str:
    """Returns the format of pages in words, with its scales and how many tokens it holds for one in bfloat16."""
    fmt = policy.kv
    if fmt.is_plain:
        return str(fmt)
    # Of long pages: what fills up a TPU's slab would weigh in a short one.
    plain, coded = (page_bytes(cfg, replace(policy, kv=each), 256) for each in (BFLOAT16, fmt))
    group = group_size(fmt, cfg.attention.head_dim)
    return f"{fmt} ({scale_dtype(fmt)} scales, one for {group} numbers; {plain / coded:.2f} times bfloat16's tokens)"


def _page_shapes(
    cfg: ModelConfig, fmt: Format, page_size: int
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Returns the shapes of a page's values and scales in a layer, None where there are no scales."""
    heads = cfg.attention.num_kv_heads, cfg.attention.head_dim
    if backend() == "tpu":
        slab = None if fmt.is_plain else scale_slab(fmt, *heads, page_size)
        return value_slab(fmt, *heads, page_size), slab
    values, scales = token_widths(fmt, *heads)
    return (page_size, values), (page_size, scales) if scales else None


def _stored_dtypes(fmt: Format) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the dtypes of the arrays of values and of scales."""
    return stored_dtype(fmt.dtype), stored_dtype(scale_dtype(fmt))


def token_slots(
    pages: jax.Array, start: jax.Array, length: jax.Array, num_tokens: int, cache: Pages
) -> jax.Array:
    """Returns where the tokens of a block lie in a layer's pages, flattened to ``P * Z`` slots.

    Args:
      pages: ``[B, W]`` page ids of each row.
      start: ``[B]`` position of the block's first token.
      length: ``[B]`` tokens of the block that count; the rest is padding.
      num_tokens: T, tokens a row of the block.
      cache: says P and Z.

    Returns:
      ``[B, T]`` int32; padding and page ids outside ``[0, P)`` give ``P * Z``, which a write drops.
    """
    steps = jnp.arange(num_tokens, dtype=jnp.int32)
    position = start[:, None] + steps
    column = position // cache.page_size
    page = jnp.take_along_axis(pages, column, axis=1, mode="fill", fill_value=-1)
    valid = (steps < length[:, None]) & (page >= 0) & (page < cache.num_pages)
    slot = page * cache.page_size + position % cache.page_size
    return jnp.where(valid, slot, cache.num_pages * cache.page_size)


def write_pages(
    cache: Pages,
    layer: jax.Array | int,
    slots: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q: jax.Array | None = None,
) -> Pages:
    """Writes new keys and values of one layer into their pages.

    Args:
      cache: the stack's pages; consumed (donate it to update in place).
      layer: index of the layer in its stack.
      slots: ``[M]`` from `token_slots`; out of range is dropped, never clamped onto a live page.
      k: ``[M, K, H]`` keys. v: ``[M, K, H]`` values. q: ``[M, N, H]`` queries, which `encode` fits keys to; or None.

    Returns:
      The pages after the write.
    """
    num_slots = cache.num_pages * cache.page_size
    # One flat axis: XLA's CPU backend writes rows of it in place, and other forms not.
    total = cache.k.shape[0] * num_slots
    rows = jnp.where((slots >= 0) & (slots < num_slots), layer * num_slots + slots, total)
    # A single row would become a dynamic update of a copied pool (133 against 45 ms a step): it gets company.
    spare = max(0, 2 - len(rows))
    rows = jnp.pad(rows, (0, spare), constant_values=total)

    def write(pool: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
        if pool is None or new is None:
            return None
        height, lanes = pool.shape[2:]
        if height != cache.page_size or lanes >= 2 * padded_lanes(new.shape[1]):
            return _write_slabs(pool, new, rows, cache.page_size)
        new = jnp.pad(new, ((0, 0), (0, lanes - new.shape[1])))
        return pool.reshape(total, lanes).at[rows].set(new, mode="drop").reshape(pool.shape)

    more = ((0, spare), (0, 0), (0, 0))
    k_new, k_scale = encode(jnp.pad(k, more), cache.format, None if q is None else jnp.pad(q, more))
    v_new, v_scale = encode(jnp.pad(v, more), cache.format)
    return Pages(
        write(cache.k, k_new), write(cache.v, v_new), write(cache.k_scale, k_scale), write(cache.v_scale, v_scale),
        cache.format, cache.slab,
    )  # fmt: skip


def _write_slabs(pool: jax.Array, new: jax.Array, rows: jax.Array, page_size: int) -> jax.Array:
    """Writes numbers or scales ``[M, ..]`` of tokens at ``rows`` of all layers' slots into their lanes of slabs.

    A TPU scatters whole rows as fast as it copies, and pieces of them one after the other in a loop. So what is written
    are rows: old ones, with what is new of all tokens that lie in them. These are neighbours in the stream, and find
    each other in steps of 1, 2, 4, ...
    """
    height, lanes = pool.shape[2:]
    width = padded_lanes(new.shape[1])
    fill = lanes // width  # tokens a row
    page, place = rows // page_size, rows % page_size
    row = page * height + place // fill
    is_new = jnp.arange(lanes) // width == (place % fill)[:, None]
    found = jnp.where(is_new, jnp.tile(jnp.pad(new, ((0, 0), (0, width - new.shape[1]))), fill), 0)
    for sign in (1, -1):
        step = 1
        while step < min(fill, page_size, len(rows)):
            there = (jnp.roll(row, sign * step) == row)[:, None] & jnp.roll(is_new, sign * step, 0)
            found, is_new = jnp.where(there, jnp.roll(found, sign * step, 0), found), is_new | there
            step *= 2
    flat = pool.reshape(-1, lanes)
    kept = jnp.where(is_new, found, flat.at[row].get(mode="clip"))
    return flat.at[row].set(kept, mode="drop").reshape(pool.shape)


def copy_widths(cache: KVCache) -> tuple[tuple[int, jnp.dtype], ...]:
    """Returns what one page is over all layers, outside the pool: ``(numbers, dtype)`` for each dtype of the cache."""
    widths: dict[jnp.dtype, int] = {}
    for pool in jax.tree.leaves(cache):
        widths[pool.dtype] = widths.get(pool.dtype, 0) + pool.size // pool.shape[1]
    return tuple((width, dtype) for dtype, width in widths.items())


def read_pages(cache: KVCache, pages: jax.Array) -> tuple[jax.Array, ...]:
    """Returns whole pages of all layers, as they are stored.

    Args:
      cache: the pools. pages: ``[n]`` page ids; one out of range gives some page's content.

    Returns:
      ``[n, X]`` for each of `copy_widths`.
    """
    parts: dict[jnp.dtype, list[jax.Array]] = {}
    for pool in jax.tree.leaves(cache):
        rows = jnp.take(pool, pages, axis=1, mode="clip")  # [l, n, Z, ...]
        parts.setdefault(pool.dtype, []).append(jnp.moveaxis(rows, 1, 0).reshape(len(pages), -1))
    return tuple(jnp.concatenate(each, 1) for each in parts.values())


def replace_pages(cache: KVCache, pages: jax.Array, content: tuple[jax.Array, ...]) -> KVCache:
    """Returns the cache with whole pages replaced by what `read_pages` gave.

    Args:
      cache: consumed. pages: ``[n]`` page ids; one out of range is dropped. content: ``[n, X]`` for each dtype.
    """
    rest = {part.dtype: part for part in content}

    def put(pool: jax.Array) -> jax.Array:
        size, P = pool.shape[:2]
        width = pool.size // P
        part, rest[pool.dtype] = rest[pool.dtype][:, :width], rest[pool.dtype][:, width:]
        layers = jnp.arange(size, dtype=pages.dtype)[:, None]
        inside = (pages >= 0) & (pages < P)
        rows = jnp.where(inside, layers * P + pages, size * P)  # one flat axis, see `write_pages`
        new = jnp.moveaxis(part.reshape(len(pages), size, -1), 1, 0).reshape(size * len(pages), -1)
        flat = pool.reshape(size * P, -1).at[rows.reshape(-1)].set(new, mode="drop")
        return flat.reshape(pool.shape)

    return jax.tree.map(put, cache)
