"""Rows through the stages of a pipeline, group after group; see `model.stages` for who works on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.arrays.sharding import num_shards, pass_on, shard_index
from jaxinfer.model.cache import KVCache
from jaxinfer.model.stacks import Block
from jaxinfer.model.stages import cut_shape, plan_flow

Run = Callable[[jax.Array, KVCache, Sequence[Block]], tuple[jax.Array, KVCache]]


def run_stages(x: jax.Array, cache: KVCache, blocks: Sequence[Block], run: Run) -> tuple[jax.Array, KVCache]:
    """Runs a stream through the layers of all stages, each device those of its own.

    Args:
      x: ``[M, D]``, the same on all stages. cache: pages of this stage, consumed. blocks: rows of the stream.
      run: ``(x, cache, blocks)`` runs the layers of this stage over a group's rows.

    Returns:
      The stream ``[M, D]`` on the last stage, numbers without meaning on the others, and the cache.
    """
    shapes = [(len(block.tokens), block.tokens.shape[1]) for block in blocks]
    flow = plan_flow(num_shards("layers"), shapes)
    cuts = [cut_shape(shape, flow.num_groups) for shape in shapes]
    groups = [_cut_block(*pair) for pair in zip(blocks, cuts, strict=True)]
    stream, done = [], 0
    for (B, T), cut in zip(shapes, cuts, strict=True):
        part = _cut(x[done : done + B * T].reshape(B, T, -1), cut)
        stream.append(part.reshape(flow.num_groups, -1, x.shape[1]))
        done += B * T
    entering, stage = jnp.concatenate(stream, 1), shard_index("layers")

    def tick(carry: tuple[jax.Array, KVCache], t: jax.Array):
        coming, cache = carry
        _, group, is_busy = flow.work(t, stage)
        own = [
            block.replace(length=jnp.where(is_busy, block.length, 0)) for block in pick_group(groups, group)
        ]
        x = jnp.where(stage == 0, pick_group(entering, group), coming)
        x, cache = run(x, cache, own)
        return (pass_on(x, "layers"), cache), x

    ticks = jnp.arange(flow.num_ticks, dtype=jnp.int32)
    (_, cache), left = jax.lax.scan(tick, (jnp.zeros_like(entering[0]), cache), ticks)
    left = left[flow.num_stages - 1 :]  # as they leave the last stage
    sizes = [part.shape[1] for part in stream]
    parts = jnp.split(left, [sum(sizes[:i]) for i in range(1, len(sizes))], 1)
    whole = [_join(*each) for each in zip(parts, shapes, cuts, strict=True)]
    return jnp.concatenate(whole), cache


def pick_group(tree: Any, group: jax.Array) -> Any:
    """Returns the arrays of one group of those cut into groups; of one that there is not, some group's."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, group, keepdims=False), tree)


def cut_rows(x: jax.Array, num_groups: int) -> jax.Array:
    """Returns rows ``[B, ..]`` dealt out to groups ``[G, m, ..]``, filled up with zeros: live rows, which lie first,
    come to all groups alike."""
    x = jnp.pad(x, [(0, -len(x) % num_groups)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, num_groups, *x.shape[1:]).swapaxes(0, 1)


def join_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """Returns the rows ``[B, ..]`` that `cut_rows` dealt out."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[:num_rows]


def _cut(x: jax.Array, cut: tuple[int, int]) -> jax.Array:
    """Returns ``[B, T, ..]`` as ``[G, m, t, ..]``, all rows' first tokens in the first groups."""
    rows, tokens = cut
    T = x.shape[1]
    x = jnp.pad(x, [(0, 0), (0, -T % tokens)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(len(x), tokens, -1, *x.shape[2:])
    return jnp.moveaxis(cut_rows(x, rows), 2, 0).reshape(tokens * rows, -1, *x.shape[2:])


def _join(x: jax.Array, shape: tuple[int, int], cut: tuple[int, int]) -> jax.Array:
    """Returns the stream ``[B * T, D]`` of the groups' streams ``[G, m * t, D]``."""
    (B, T), (rows, tokens) = shape, cut
    D = x.shape[-1]
    x = x.reshape(tokens, rows, -(-B // rows), -1, D)
    x = join_rows(jnp.moveaxis(x, 0, 2), B)  # [B, tokens, t, D]
    return x.reshape(B, -1, D)[:, :T].reshape(B * T, D)


def _cut_block(block: Block, cut: tuple[int, int]) -> Block:
    """Returns a block whose arrays lead with the group: its rows, and the part of their tokens."""
    rows, tokens = cut
    part = _cut(block.tokens, cut)
    t = part.shape[2]
    offset = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32) * t, rows)[:, None]

    def every(x: jax.Array) -> jax.Array:
        """Each part of the tokens has all the rows."""
        return jnp.tile(cut_rows(x, rows), (tokens, *[1] * x.ndim))

    start, length = every(block.start) + offset, jnp.clip(every(block.length) - offset, 0, t)
    return Block(part, start, length, every(block.pages))
