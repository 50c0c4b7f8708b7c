"""The pure steps: arrays in, arrays out.

`prefill` and `decode` are for those who bring their own jit. The engine runs `forward_step`, then `draw` or the
cheaper `draw_greedy` on its logits: apart, so that the sampler is compiled once for a number of rows and not in every
step. Example (it runs, see tests/steps/test_example.py)::

    static = Static(cfg, Policy.parse("float32"))
    sizes = stack_sizes(cfg, 1)
    params = stack_layers(open_model("smollm2-135m").load(static.policy, None, None), sizes)
    cache = init_cache(cfg, static.policy, sizes, num_pages=8, page_size=16)
    pages = jnp.arange(8)[None]
    block = Block(jnp.array([ids]), start=jnp.array([0]), length=jnp.array([len(ids)]), pages=pages)
    logits, cache = jax.jit(prefill, static_argnums=3, donate_argnums=1)(params, cache, block, static)
    token, position = logits.argmax(-1), jnp.array([len(ids)])
    logits, cache = jax.jit(decode, static_argnums=5, donate_argnums=1)(
        params, cache, token, position, pages, static
    )
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.arrays.sharding import num_shards, pass_on, shard_index
from jaxinfer.model.cache import KVCache, init_cache
from jaxinfer.model.decoder import Block, Static, embed, forward, unembed
from jaxinfer.model.layers import norm
from jaxinfer.model.pipeline import cut_rows, join_rows, pick_group
from jaxinfer.model.stacks import run_layers
from jaxinfer.model.stages import plan_flow
from jaxinfer.steps.sampling import Sampled, TokenLogprobs, greedy, sample, token_logprobs
from jaxinfer.steps.slots import Slots, gather_rows, own_slots, write_tokens

MIN_DRAWS = 2  # rows of logits at least: one row is no cheaper, and a count less to compile a sampler for
SCORE_ROWS = 32  # positions whose logits exist at once while prompts are scored: 32 V numbers, not T V


@struct.dataclass
class DecodeRows:
    """Decode rows of a step, one int32 buffer.

    Attributes:
      packed: ``[B, 3 + W]``: slot, position of the input token, 1 for a live row or 0 for padding, W page ids.
    """

    packed: Any


@struct.dataclass
class PrefillRows:
    """Prefill chunks of a step, one int32 buffer.

    Attributes:
      packed: ``[b, 4 + T + W]``: slot, start, length (0 for padding), the known token after the chunk (-1: none, so
        the last position samples), T token ids, W page ids.
    """

    packed: Any


@struct.dataclass
class Ahead:
    """What a forward step leaves on the device for drawing and scoring, for one block of rows.

    Attributes:
      logits: ``[M, V]`` float32 at each row's last token; M is B, but at least `MIN_DRAWS`.
      rows: ``[M, 3]`` int32: slot, position of the token to draw, 1 where one is to be drawn.
      x: ``[B, T, D]`` the block's normed stream.
    """

    logits: jax.Array
    rows: jax.Array
    x: jax.Array


def prefill(
    params: dict[str, Any], cache: KVCache, block: Block, static: Static
) -> tuple[jax.Array, KVCache]:
    """Runs prompt chunks and returns the logits after each row's last token.

    Args:
      params: from `stack_layers`. cache: pages, consumed. block: ``[B, T]`` rows. static: what is compiled for.

    Returns:
      ``[B, V]`` float32 logits and the cache.
    """
    x, cache = forward(params, cache, [block], static)
    return unembed(params, static, _last_rows(x, block)), cache


def decode(
    params: dict[str, Any],
    cache: KVCache,
    tokens: jax.Array,
    positions: jax.Array,
    pages: jax.Array,
    static: Static,
) -> tuple[jax.Array, KVCache]:
    """Runs one token a row against the finished cache.

    Args:
      params: from `stack_layers`. cache: pages, consumed.
      tokens: ``[B]`` ids. positions: ``[B]`` of those tokens. pages: ``[B, W]`` page ids.
      static: what is compiled for.

    Returns:
      ``[B, V]`` float32 logits and the cache.
    """
    block = Block(tokens[:, None], positions, jnp.ones_like(positions), pages)
    x, cache = forward(params, cache, [block], static)
    return unembed(params, static, x), cache


def full_logits(params: dict[str, Any], static: Static, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns the logits at every position of whole prompts: what every other path must equal.

    Args:
      params: from `stack_layers`. static: what is compiled for.
      tokens: ``[B, T]`` ids. lengths: ``[B]`` tokens that count.

    Returns:
      ``[B, T, V]`` float32.
    """
    B, T = tokens.shape
    page_size = 16
    width = -(-T // page_size)
    sizes = [jax.tree.leaves(stack)[0].shape[0] for stack in params["stacks"]]
    cache = init_cache(static.cfg, static.policy, sizes, B * width, page_size)
    pages = jnp.arange(B * width, dtype=jnp.int32).reshape(B, width)
    x, _ = forward(params, cache, [Block(tokens, jnp.zeros_like(lengths), lengths, pages)], static)
    return unembed(params, static, x).reshape(B, T, -1)


def forward_step(
    params: dict[str, Any],
    cache: KVCache,
    slots: Slots,
    decode_rows: DecodeRows | None,
    prefill_rows: PrefillRows | None,
    static: Static,
    width: int,
) -> tuple[tuple[Ahead, ...], KVCache, Slots]:
    """The model's part of an engine step: decode rows and prefill chunks together, so weights are read once for both.

    Args:
      params: from `stack_layers`. cache: pages, consumed. slots: per-request state, consumed.
      decode_rows: rows whose input is the newest token of their slot's history, or None.
      prefill_rows: chunks whose tokens come from the host, or None.
      static: what is compiled for. width: W, page ids a row.

    Returns:
      What `draw` and `score_prompt` take, decode rows first, the cache, and the slots with the prompts in their
      histories.
    """
    blocks: list[Block] = []
    rows: list[jax.Array] = []
    if decode_rows is not None:
        block, slot = _decode_block(decode_rows, slots, width)
        blocks.append(block)
        rows.append(_draw_rows(block, slot, block.length > 0))
    if prefill_rows is not None:
        block, slot, following = _prefill_block(prefill_rows, width)
        slot = own_slots(slots, slot)
        slots = _write_prompt(slots, block, slot)
        blocks.append(block)
        rows.append(_draw_rows(block, slot, (block.length > 0) & (following < 0)))
    x, cache = forward(params, cache, blocks, static)
    sizes = [block.tokens.size for block in blocks]
    streams = jnp.split(x, list(accumulate(sizes))[:-1])
    last = [_at_least(_last_rows(x, block), MIN_DRAWS) for x, block in zip(streams, blocks, strict=True)]
    logits = jnp.split(unembed(params, static, jnp.concatenate(last)), list(accumulate(map(len, last)))[:-1])
    ahead = (
        Ahead(one, row, x.reshape(*block.tokens.shape, -1))
        for one, row, x, block in zip(logits, rows, streams, blocks, strict=True)
    )
    return tuple(ahead), cache, slots


def draw(slots: Slots, logits: jax.Array, rows: jax.Array) -> tuple[Sampled, Slots]:
    """Draws a token a row by its slot's settings and writes it into the slot's history.

    Args:
      slots: consumed. logits, rows: of `Ahead`.

    Returns:
      ``[M]`` draws and the slots.
    """
    slot, position, valid = (rows[:, i] for i in range(3))
    sampled = sample(logits, gather_rows(slots, slot), position)
    return sampled, write_tokens(slots, slot, position, sampled.tokens, valid > 0)


def draw_greedy(slots: Slots, logits: jax.Array, rows: jax.Array) -> tuple[jax.Array, Slots]:
    """As `draw` for rows that ask for nothing but the likeliest token: ``[M]`` int32 and the slots."""
    tokens = greedy(logits, slots.vocab_size)
    return tokens, write_tokens(slots, rows[:, 0], rows[:, 1], tokens, rows[:, 2] > 0)


def decode_steps(
    params: dict[str, Any],
    cache: KVCache,
    slots: Slots,
    decode_rows: DecodeRows,
    static: Static,
    width: int,
    num_steps: int,
) -> tuple[Sampled, KVCache, Slots]:
    """Several decode steps and their draws without return to the host; arguments as for `forward_step`.

    Args:
      num_steps: n; every row must have pages for n more tokens. A row that meets its end goes on, and the host
        drops what it drew after it.

    Returns:
      ``[n, B]`` draws, the cache and the slots.
    """
    if num_shards("layers") > 1:
        return _decode_in_flow(params, cache, slots, decode_rows, static, width, num_steps)

    def body(carry, i):
        cache, slots = carry
        moved = DecodeRows(decode_rows.packed.at[:, 1].add(i * decode_rows.packed[:, 2]))
        (ahead,), cache, slots = forward_step(params, cache, slots, moved, None, static, width)
        sampled, slots = draw(slots, ahead.logits, ahead.rows)
        return (cache, slots), sampled

    (cache, slots), drawn = jax.lax.scan(body, (cache, slots), jnp.arange(num_steps, dtype=jnp.int32))
    return drawn, cache, slots


def _decode_in_flow(
    params: dict[str, Any],
    cache: KVCache,
    slots: Slots,
    decode_rows: DecodeRows,
    static: Static,
    width: int,
    num_steps: int,
) -> tuple[Sampled, KVCache, Slots]:
    """`decode_steps` over stages: groups of rows follow each other, step upon step, without a gap.

    At each tick all stages together embed the group that enters and draw for the one that leaves, whose token is in its
    history when it enters again.
    """
    num_rows = len(decode_rows.packed)
    flow = plan_flow(num_shards("layers"), [(num_rows, 1)], num_steps)
    packed = cut_rows(decode_rows.packed, flow.num_groups)
    stage, last = shard_index("layers"), flow.num_stages - 1

    def block_at(slots: Slots, tick: jax.Array, stage: jax.Array | int) -> tuple[Block, jax.Array]:
        step, group, is_busy = flow.work(tick, stage)
        rows = pick_group(packed, group)
        rows = rows.at[:, 1].add(step * rows[:, 2]).at[:, 2].multiply(is_busy.astype(jnp.int32))
        return _decode_block(DecodeRows(rows), slots, width)

    def body(carry: tuple[jax.Array, KVCache, Slots], tick: jax.Array):
        coming, cache, slots = carry
        entering, _ = block_at(slots, tick, 0)
        x = embed(params, static, entering.tokens[:, 0], entering.start)
        own, _ = block_at(slots, tick, stage)
        x, cache = run_layers(jnp.where(stage == 0, x, coming), params["stacks"], cache, [own], static)
        block, slot = block_at(slots, tick, last)
        slot = jnp.where(block.length > 0, slot, -1)  # who idles asks for nothing
        leaving = norm(x, params["final_norm"], static.cfg.norm)
        logits = unembed(params, static, _at_least(leaving, MIN_DRAWS))
        sampled, slots = draw(slots, logits, _draw_rows(block, slot, block.length > 0))
        sampled = jax.tree.map(lambda leaf: leaf[: len(x)], sampled)
        return (pass_on(x, "layers"), cache, slots), sampled

    nothing = jnp.zeros((packed.shape[1], static.cfg.d_model), static.policy.compute_dtype)
    ticks = jnp.arange(flow.num_ticks, dtype=jnp.int32)
    (_, cache, slots), drawn = jax.lax.scan(body, (nothing, cache, slots), ticks)

    def by_step(leaf: jax.Array) -> jax.Array:
        leaf = leaf[last:]  # from the tick when the first group leaves
        leaf = jnp.pad(leaf, [(0, -len(leaf) % flow.period)] + [(0, 0)] * (leaf.ndim - 1))
        groups = leaf.reshape(num_steps, flow.period, *leaf.shape[1:])[:, : flow.num_groups]
        rows = jax.vmap(lambda own: join_rows(own, num_rows))(groups)
        spare = max(0, MIN_DRAWS - num_rows)
        return jnp.pad(rows, [(0, 0), (0, spare)] + [(0, 0)] * (rows.ndim - 2))

    return jax.tree.map(by_step, drawn), cache, slots


def score_prompt(
    params: dict[str, Any], x: jax.Array, rows: PrefillRows, static: Static, width: int, vocab_size: int
) -> TokenLogprobs:
    """Returns log-probabilities of the token that follows each prefill position.

    Args:
      params: from `stack_layers`. x: ``[b, T, D]`` of `Ahead`. rows: the chunks that it came from.
      static: what is compiled for. width: W. vocab_size: ids at or above it are padding.

    Returns:
      ``[b, T]`` leading; the last position of a chunk that ends its prompt is scored against id 0.
    """
    block, _, following = _prefill_block(rows, width)
    B, T, D = x.shape
    last = jnp.arange(T) == block.length[:, None] - 1
    after = jnp.concatenate([block.tokens[:, 1:], jnp.zeros((B, 1), jnp.int32)], 1)
    targets = jnp.where(last, jnp.maximum(following, 0)[:, None], after)
    spare = -(B * T) % SCORE_ROWS
    stream = jnp.pad(x.reshape(-1, D), ((0, spare), (0, 0))).reshape(-1, SCORE_ROWS, D)
    wanted = jnp.pad(targets.reshape(-1), (0, spare)).reshape(-1, SCORE_ROWS)

    def score(chunk: tuple[jax.Array, jax.Array]) -> TokenLogprobs:
        return token_logprobs(unembed(params, static, chunk[0]), chunk[1], vocab_size)

    out = jax.lax.map(score, (stream, wanted))
    return jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: B * T].reshape(B, T, *leaf.shape[2:]), out
    )


def _decode_block(rows: DecodeRows, slots: Slots, width: int) -> tuple[Block, jax.Array]:
    slot, position, live = (rows.packed[:, i] for i in range(3))
    slot = own_slots(slots, slot)
    token = slots.history.at[slot, position].get(mode="fill", fill_value=0)
    return Block(token[:, None], position, live, rows.packed[:, 3 : 3 + width]), slot


def _prefill_block(rows: PrefillRows, width: int) -> tuple[Block, jax.Array, jax.Array]:
    slot, start, length, following = (rows.packed[:, i] for i in range(4))
    tokens = rows.packed[:, 4:-width]
    return Block(tokens, start, length, rows.packed[:, -width:]), slot, following


def _write_prompt(slots: Slots, block: Block, slot: jax.Array) -> Slots:
    """Returns the slots with the chunk's tokens in their histories."""
    T = block.tokens.shape[1]
    offsets = jnp.arange(T, dtype=jnp.int32)
    where = jnp.broadcast_to(slot[:, None], block.tokens.shape).reshape(-1)
    position = (block.start[:, None] + offsets).reshape(-1)
    valid = (offsets < block.length[:, None]).reshape(-1)
    return write_tokens(slots, where, position, block.tokens.reshape(-1), valid)


def _draw_rows(block: Block, slot: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns ``[M, 3]``: slot, position of the next token, whether to draw it; rows added to fill up draw nothing."""
    rows = jnp.stack([slot, block.start + block.length, valid.astype(jnp.int32)], 1)
    spare = max(0, MIN_DRAWS - len(rows))
    return jnp.concatenate([rows, jnp.tile(jnp.array([[-1, 0, 0]], jnp.int32), (spare, 1))])


def _at_least(x: jax.Array, num_rows: int) -> jax.Array:
    return jnp.pad(x, ((0, max(0, num_rows - len(x))), (0, 0)))


def _last_rows(x: jax.Array, block: Block) -> jax.Array:
    """Returns ``[B, D]``: the stream at each row's last token that counts."""
    B, T = block.tokens.shape
    if T == 1:
        return x
    return jnp.take_along_axis(x.reshape(B, T, -1), jnp.maximum(block.length - 1, 0)[:, None, None], axis=1)[
        :, 0
    ]
