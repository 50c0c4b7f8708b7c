"""The pass of a stream of tokens through stacks of layers, those of one device.

Layers are a tuple of stacks, each scanned over its leading axis (law 7). Where a mesh has stages, a device has the
layers of its own stage, and what sets these apart from other stages' is looked up by the stage (`_by_stage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.arrays.pages import rotate, turn
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import InStack, Quantized, is_quantized
from jaxinfer.arrays.sharding import num_shards, shard_index
from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.kernels.attention.api import paged_attention
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.model.cache import KVCache, Pages, token_slots, write_pages
from jaxinfer.model.layers import mlp, norm, project_out, project_qkv
from jaxinfer.model.moe import moe
from jaxinfer.model.rope import apply_rope, inv_freq, rotary

Table = tuple[jax.Array, jax.Array]  # cos and sin of every token


@struct.dataclass
class Block:
    """Rows of tokens that attend together: ``T = 1`` decodes, more is a prefill chunk.

    Attributes:
      tokens: ``[B, T]`` int32 ids.
      start: ``[B]`` position of each row's first token; earlier positions are in the cache.
      length: ``[B]`` tokens that count, 0 for a padding row.
      pages: ``[B, W]`` page ids of each row, enough for ``start + length`` tokens; the rest may hold anything
        outside ``[0, P)``.
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    pages: jax.Array


@dataclass(frozen=True)
class Static:
    """What a step is compiled for: everything that is not an array.

    Attributes:
      cfg: the model. policy: number formats. attention: a name from `kernels.attention`.
      context: longest sequence in tokens that the run serves; rope kinds that stretch by length read it.
    """

    cfg: ModelConfig
    policy: Policy
    attention: str = "blocked"
    context: int | None = None


def run_layers(
    x: jax.Array,
    stacks: Sequence[dict[str, Any]],
    cache: KVCache,
    blocks: Sequence[Block],
    static: Static,
    keep: list[jax.Array] | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs the layers that this device has over a stream, writing its keys and values into the cache.

    Args:
      x: ``[M, D]``, block after block, rows of a block in order. stacks: of `stack_layers`. cache: pages, consumed.
      blocks: rows, whose tokens are not read here. static: what the step is compiled for.
      keep: is given the stream as each stack leaves it; None for nothing.

    Returns:
      The stream ``[M, D]``, not normed, and the cache.
    """
    cfg = static.cfg
    spans = [b.start[:, None] + jnp.arange(b.tokens.shape[1], dtype=jnp.int32) for b in blocks]
    positions = jnp.concatenate([s.reshape(-1) for s in spans])
    # Behind a barrier, or XLA computes each cosine anew in every layer that reads it.
    tables = jax.lax.optimization_barrier(
        [rotary(positions, *inv_freq(rope, static.context)) for rope in cfg.ropes]
    )
    each = cfg.num_layers // num_shards("layers")
    done = 0
    new_cache = []
    for stack, pages in zip(stacks, cache, strict=True):
        size = pages.k.shape[0]
        kinds = [cfg.layers[first + done :][:size] for first in range(0, cfg.num_layers, each)]
        x, pages = _run_stack(x, stack, pages, kinds, blocks, tables, static)
        new_cache.append(pages)
        if keep is not None:
            keep.append(x)
        done += size
    return x, tuple(new_cache)


def _run_stack(
    x: jax.Array,
    stack: dict[str, Any],
    pages: Pages,
    kinds: Sequence[Sequence[LayerKind]],
    blocks: Sequence[Block],
    tables: list[Table],
    static: Static,
) -> tuple[jax.Array, Pages]:
    """Runs the layers of one stack, of ``kinds`` by stage: a scan with the cache in its carry, or the one layer."""
    slots = jnp.concatenate(
        [token_slots(b.pages, b.start, b.length, b.tokens.shape[1], pages).reshape(-1) for b in blocks]
    )
    size = len(kinds[0])
    if size == 1 and all(own == kinds[0] for own in kinds):
        kind = kinds[0][0]
        angles = None if kind.rope is None else tables[kind.rope]
        layer = jax.tree.map(lambda leaf: leaf[0], stack)
        return _layer_once(x, pages, layer, 0, kind.window, angles, blocks, slots, static)
    windows = None
    if any(kind.window for own in kinds for kind in own):
        windows = _by_stage([[kind.window or 0 for kind in own] for own in kinds])
    rows = [[-1 if kind.rope is None else kind.rope for kind in own] for own in kinds]
    ropes = sorted({rope for row in rows for rope in row})
    choices = _rope_choices(tables, ropes)
    which = _by_stage([[ropes.index(rope) for rope in row] for row in rows])

    def body(carry, layer_in, run=_layer):
        layer, index, window, rope = layer_in
        angles = None if choices is None else jax.tree.map(lambda t: t[rope], choices)
        x, pages = carry
        layer = _give_codes(layer, stack, index)
        return run(x, pages, layer, index, window, angles, blocks, slots, static), None

    layers = (_leave_codes(stack, static.policy), jnp.arange(size), windows, which)
    if size == 1:
        return body((x, pages), jax.tree.map(lambda leaf: leaf[0], layers), _layer_by_stage)[0]
    (x, pages), _ = jax.lax.scan(body, (x, pages), layers)
    return x, pages


def _leave_codes(stack: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Returns what a scan slices of a stack: all but codes that a TPU's kernel reads where they lie (`InStack`)."""

    def leave(leaf: Any) -> Any:
        return replace(leaf, values=None) if isinstance(leaf, Quantized) and leaf.format.bits == 4 else leaf

    if policy.matmul != "tpu":
        return stack
    dense = {name: part for name, part in stack.items() if name != "moe"}  # experts are XLA's
    return stack | jax.tree.map(leave, dense, is_leaf=is_quantized)


def _give_codes(layer: dict[str, Any], stack: dict[str, Any], index: jax.Array) -> dict[str, Any]:
    """Returns a layer of `_leave_codes` with its codes in their stack."""

    def give(part: Any, whole: Any) -> Any:
        is_left = isinstance(part, Quantized) and part.values is None
        return replace(part, values=InStack(whole.values, index)) if is_left else part

    return jax.tree.map(give, layer, stack, is_leaf=is_quantized)


def _by_stage(rows: list[list[int]]) -> jax.Array:
    """Returns this stage's row of whole numbers, int32."""
    return jnp.array(rows, jnp.int32)[shard_index("layers")]


def _rope_choices(tables: list[Table], ropes: Sequence[int]):
    """Returns the cos and sin tables that a stack's layers choose from, stacked; -1 rotates by nothing."""
    if ropes == [-1]:
        return None
    like = tables[max(ropes)]
    still = (jnp.ones_like(like[0]), jnp.zeros_like(like[1]))
    return jax.tree.map(lambda *t: jnp.stack(t), *[still if r < 0 else tables[r] for r in ropes])


def _layer(
    x: jax.Array,
    pages: Pages,
    p: dict[str, Any],
    index: jax.Array | int,
    window: jax.Array | int | None,
    angles: Table | None,
    blocks: Sequence[Block],
    slots: jax.Array,
    static: Static,
) -> tuple[jax.Array, Pages]:
    """Runs one layer over the stream ``x [M, D]``."""
    cfg, policy = static.cfg, static.policy
    norms = p["norms"]

    def before(part: str) -> jax.Array:
        return norm(x, norms[f"pre_{part}"], cfg.norm) if cfg.norm.pre else x

    def after(part: str, y: jax.Array) -> jax.Array:
        return norm(y, norms[f"post_{part}"], cfg.norm) if cfg.norm.post else y

    q, k, v = project_qkv(before("attn"), p["attn"], cfg.attention, cfg.norm.eps, policy)
    if angles is not None:
        q, k = apply_rope(q, *angles), apply_rope(k, *angles)
    if not policy.kv.is_plain:
        q, k = turn(q, k, p["attn"].get("q_norm"), p["attn"].get("k_norm"))
    # Rotated, a value's numbers are alike; what attention makes of them is rotated back, once for all keys.
    turns_values = policy.kv.bits == 4
    if turns_values:
        v = rotate(v).astype(v.dtype)
    pages = write_pages(pages, index, slots, k, v, q)
    kv = PagedKV(pages.k, pages.v, pages.k_scale, pages.v_scale, index, pages.format, pages.slab)
    heads = []
    done = 0
    for block in blocks:
        B, T = block.tokens.shape
        mine = q[done : done + B * T].reshape(B, T, *q.shape[1:])
        out = paged_attention(
            static.attention, mine, kv, block.pages, block.start, block.length,
            scale=cfg.attention.scale, window=window, softcap=cfg.attention.softcap,
        )  # fmt: skip
        heads.append(out.reshape(B * T, *q.shape[1:]))
        done += B * T
    mixed = jnp.concatenate(heads)
    if turns_values:
        mixed = rotate(mixed).astype(mixed.dtype)
    x = x + after("attn", project_out(mixed, p["attn"], policy))
    y = before("mlp")
    if "moe" in p:
        y = moe(y, p["moe"], cfg.mlp, policy, slots < pages.num_pages * pages.page_size)
    else:
        y = mlp(y, p["mlp"], cfg.mlp, policy)
    return x + after("mlp", y), pages


# Unrolled layers of one kind are traced once and called (30 of them lower in 0.2 s instead of 1.1); XLA inlines the
# calls, and the step it makes is the same in time, memory and pages written in place.
_layer_once = jax.jit(_layer, static_argnames=("index", "window", "static"))
_layer_by_stage = jax.jit(
    _layer, static_argnames="static"
)  # where a place has other windows or ropes on other stages
