"""The pure steps: arrays in, arrays out.

`prefill` and `decode` are for those who bring their own jit, `serve_step` is the engine's. Example (it runs, see
tests/steps/test_steps.py)::

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

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.model.cache import KVCache, init_cache
from jaxinfer.model.decoder import Block, Static, forward, unembed
from jaxinfer.steps.sampling import Sampled, TokenLogprobs, sample, token_logprobs
from jaxinfer.steps.slots import Slots, gather_rows, write_tokens

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
class StepOutput:
    """What a step brings back.

    Attributes:
      sampled: one draw a row, ``[n, B]`` leaves for n decode steps (n = 1 with prefill rows, which follow decode rows).
      prompt: log-probabilities of the prompt tokens that follow each prefill position, ``[b, T]`` leaves; zeros
        unless some row asked.
    """

    sampled: Sampled
    prompt: TokenLogprobs | None


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


def serve_step(
    params: dict[str, Any],
    cache: KVCache,
    slots: Slots,
    decode_rows: DecodeRows | None,
    prefill_rows: PrefillRows | None,
    static: Static,
    width: int,
) -> tuple[StepOutput, KVCache, Slots]:
    """One engine step: decode rows and prefill chunks together, each row's next token drawn on the device.

    Args:
      params: from `stack_layers`. cache: pages, consumed. slots: per-request state, consumed.
      decode_rows: rows whose input is the newest token of their slot's history, or None.
      prefill_rows: chunks whose tokens come from the host, or None; with decode rows this is a mixed step, in which
        weights are read once for both.
      static: what is compiled for. width: W, page ids a row.

    Returns:
      Draws (decode rows first, then prefill rows), the cache and the slots.
    """
    blocks: list[Block] = []
    ids: list[jax.Array] = []
    draws: list[jax.Array] = []
    if decode_rows is not None:
        block, slot = _decode_block(decode_rows, slots, width)
        blocks.append(block)
        ids.append(slot)
        draws.append(block.length > 0)
    following = jnp.zeros(0, jnp.int32)
    if prefill_rows is not None:
        block, slot, following = _prefill_block(prefill_rows, width)
        slots = _write_prompt(slots, block, slot)
        blocks.append(block)
        ids.append(slot)
        draws.append((block.length > 0) & (following < 0))
    x, cache = forward(params, cache, blocks, static)
    starts, rows = 0, []
    for block in blocks:
        B, T = block.tokens.shape
        rows.append(_last_rows(x[starts : starts + B * T], block))
        starts += B * T
    position = jnp.concatenate([block.start + block.length for block in blocks])
    slot, valid = jnp.concatenate(ids), jnp.concatenate(draws)
    logits = unembed(params, static, jnp.concatenate(rows))
    drawn = sample(logits, gather_rows(slots, slot), position)
    slots = write_tokens(slots, slot, position, drawn.tokens, valid)
    prompt = None
    if prefill_rows is not None:
        B, T = blocks[-1].tokens.shape
        prompt = _score_prompt(
            params, static, x[-B * T :], blocks[-1], gather_rows(slots, ids[-1]), following
        )
    return StepOutput(jax.tree.map(lambda leaf: leaf[None], drawn), prompt), cache, slots


def decode_steps(
    params: dict[str, Any],
    cache: KVCache,
    slots: Slots,
    decode_rows: DecodeRows,
    static: Static,
    width: int,
    num_steps: int,
) -> tuple[StepOutput, KVCache, Slots]:
    """Several decode steps without return to the host; arguments as for `serve_step`.

    Args:
      num_steps: n; every row must have pages for n more tokens. A row that meets its end goes on, and the host
        drops what it drew after it.
    """

    def body(carry, i):
        cache, slots = carry
        live = decode_rows.packed[:, 2]
        moved = DecodeRows(decode_rows.packed.at[:, 1].add(i * live))
        out, cache, slots = serve_step(params, cache, slots, moved, None, static, width)
        return (cache, slots), jax.tree.map(lambda leaf: leaf[0], out.sampled)

    (cache, slots), drawn = jax.lax.scan(body, (cache, slots), jnp.arange(num_steps, dtype=jnp.int32))
    return StepOutput(drawn, None), cache, slots


def _decode_block(rows: DecodeRows, slots: Slots, width: int) -> tuple[Block, jax.Array]:
    slot, position, live = (rows.packed[:, i] for i in range(3))
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


def _last_rows(x: jax.Array, block: Block) -> jax.Array:
    """Returns ``[B, D]``: the stream at each row's last token that counts."""
    B, T = block.tokens.shape
    if T == 1:
        return x
    return jnp.take_along_axis(x.reshape(B, T, -1), jnp.maximum(block.length - 1, 0)[:, None, None], axis=1)[
        :, 0
    ]


def _score_prompt(
    params: dict[str, Any],
    static: Static,
    x: jax.Array,
    block: Block,
    rows: Any,
    following: jax.Array,
) -> TokenLogprobs:
    """Returns log-probabilities of the token after each prefill position, computed only when a row asked for them."""
    B, T = block.tokens.shape
    spare = -(B * T) % SCORE_ROWS
    last = jnp.arange(T) == block.length[:, None] - 1
    after = jnp.concatenate([block.tokens[:, 1:], jnp.zeros((B, 1), jnp.int32)], 1)
    targets = jnp.where(last, jnp.maximum(following, 0)[:, None], after)
    stream = jnp.pad(x, ((0, spare), (0, 0))).reshape(-1, SCORE_ROWS, x.shape[1])
    wanted = jnp.pad(targets.reshape(-1), (0, spare)).reshape(-1, SCORE_ROWS)

    def score(chunk):
        return token_logprobs(unembed(params, static, chunk[0]), chunk[1], rows.vocab_size)

    shapes = jax.eval_shape(score, (stream[0], wanted[0]))

    def run(_):
        return jax.lax.map(score, (stream, wanted))

    def skip(_):
        return jax.tree.map(lambda s: jnp.zeros((stream.shape[0], *s.shape), s.dtype), shapes)

    out = jax.lax.cond(jnp.any((rows.wants_prompt > 0) & (block.length > 0)), run, skip, None)
    return jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: B * T].reshape(B, T, *leaf.shape[2:]), out
    )
