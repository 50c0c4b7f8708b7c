"""What the device knows of each running request: its token history and its sampling settings, a row a slot.

A row travels and lives packed, one int32 and one float32 vector and the allowed-id bits, so that admitting a request is
three copies and three updates. A new setting is one line in `SlotRow` and one in `describe_row`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxinfer.arrays.sharding import put_shards, shard_index
from jaxinfer.schedule.sampling_params import SamplingParams, SamplingParamsError
from jaxinfer.steps.noise import request_key


@dataclass(frozen=True)
class SlotCaps:
    """How much of each list a slot holds; a request with more is refused at the door.

    Attributes:
      stop_ids: end ids. logit_bias: biased ids. bad_words: banned sequences of at most bad_word_len ids.
    """

    stop_ids: int = 32
    logit_bias: int = 300
    bad_words: int = 32
    bad_word_len: int = 8

    def check(self, params: SamplingParams, stop_ids: Iterable[int]) -> None:
        """Checks that a request fits.

        Args:
          params: sampling settings. stop_ids: every id that ends the request.

        Raises:
          SamplingParamsError: with the length that was given and the capacity.
        """
        words = params.bad_words_ids or ()
        if params.bad_words and not words:
            raise SamplingParamsError(
                "bad_words", params.bad_words, "strings whose bad_words_ids were filled in"
            )
        for name, size, cap, what in (
            ("stop_token_ids", len(frozenset(stop_ids)), self.stop_ids, "ids, the model's own included"),
            ("logit_bias", len(params.logit_bias or ()), self.logit_bias, "ids"),
            ("bad_words", len(words), self.bad_words, "sequences of tokens"),
            ("bad_words", max(map(len, words), default=0), self.bad_word_len, "tokens in a word"),
        ):
            if size > cap:
                raise SamplingParamsError(
                    name, size, f"at most {cap} {what}, the capacity of a slot (SlotCaps)"
                )


@struct.dataclass
class Filters:
    """Which tokens can be drawn, and how flat. Leaves ``[B]``.

    Attributes:
      temperature: 0 takes the argmax. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


@struct.dataclass
class Penalties:
    """What is taken from tokens that were seen. Leaves ``[B]``.

    Attributes:
      repetition: 1 is off. presence, frequency: 0 is off.
    """

    repetition: Any
    presence: Any
    frequency: Any


@struct.dataclass
class SlotRow:
    """The settings of rows, by name; leaves are int32, uint32 or float32 and lead with ``[B]`` on the device.

    Attributes:
      prompt_len: ``[B]`` a position at or beyond it is output. min_len: ``[B]`` positions before it cannot end.
      key: ``[B, 2]`` uint32, ``fold_in(key(seed), choice)``. limited: ``[B]`` whether the allowed-id bits count.
      wants_logprobs: ``[B]`` whether log-probabilities of the output were asked for.
      stop_ids: ``[B, stop_ids]`` padded with -1. bias_ids, bias: ``[B, logit_bias]`` ids (-1 pads) and amounts.
      bad_words: ``[B, bad_words, bad_word_len]`` ids, padded with -1 on the left.
    """

    prompt_len: Any
    min_len: Any
    key: Any
    limited: Any
    wants_logprobs: Any
    stop_ids: Any
    bias_ids: Any
    bias: Any
    bad_words: Any
    filters: Filters
    penalties: Penalties


@struct.dataclass
class PackedRow:
    """One `SlotRow` as it travels: ``ints [I]`` int32, ``floats [F]`` float32, allowed-id bits ``mask [W]`` uint32."""

    ints: Any
    floats: Any
    mask: Any


@struct.dataclass
class Slots:
    """Device state of all slots, R rows and one more that asks for nothing, which padding reads.

    Attributes:
      history: ``[R, S]`` int32, token ids by position, prompt and output. A share of the rows over a mesh is like it.
      packed: `PackedRow` with leading ``[R + 1]``.
      caps: capacities. vocab_size: ids at or above it can never be drawn.
    """

    history: jax.Array
    packed: PackedRow
    caps: SlotCaps = struct.field(pytree_node=False)
    vocab_size: int = struct.field(pytree_node=False)


@struct.dataclass
class Rows:
    """The slots of a step's rows, gathered; big parts stay where they are until a row needs them.

    Attributes:
      slot: ``[B]``, R for padding. settings: `SlotRow` of ``[B]``.
      history: ``[R, S]`` of all slots. mask: ``[R + 1, W]`` of all slots.
      vocab_size: ids at or above it can never be drawn.
    """

    slot: jax.Array
    settings: SlotRow
    history: jax.Array
    mask: jax.Array
    vocab_size: int = struct.field(pytree_node=False)


def describe_row(
    params: SamplingParams,
    caps: SlotCaps,
    *,
    prompt_len: int = 0,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    choice: int = 0,
) -> SlotRow:
    """Returns a request's settings as numpy arrays without a row axis; arguments as for `pack_row`."""
    words = params.bad_words_ids or ()
    bad_words = np.full((caps.bad_words, caps.bad_word_len), -1, np.int32)
    for row, word in zip(bad_words, words, strict=False):
        row[caps.bad_word_len - len(word) :] = word
    bias = params.logit_bias or {}
    greedy = params.is_greedy
    # A share too small for float32 still keeps one token: it must not round to 0, which is off.
    top_p = max(params.top_p, 1e-30) if params.top_p else 1.0
    return SlotRow(
        prompt_len=np.int32(prompt_len),
        min_len=np.int32(prompt_len + params.min_tokens if params.min_tokens else 0),
        key=request_key(seed, choice),
        limited=np.int32(params.allowed_token_ids is not None),
        wants_logprobs=np.int32(params.logprobs is not None),
        stop_ids=_pad(sorted(stop_ids), caps.stop_ids, -1, np.int32),
        bias_ids=_pad([int(token) for token in bias], caps.logit_bias, -1, np.int32),
        bias=_pad(list(bias.values()), caps.logit_bias, 0, np.float32),
        bad_words=bad_words,
        filters=Filters(
            temperature=np.float32(0 if greedy else params.temperature),
            top_k=np.int32(0 if greedy else max(params.top_k, 0)),
            top_p=np.float32(1 if greedy else top_p),
            min_p=np.float32(0 if greedy else params.min_p),
        ),
        penalties=Penalties(
            repetition=np.float32(params.repetition_penalty),
            presence=np.float32(params.presence_penalty),
            frequency=np.float32(params.frequency_penalty),
        ),
    )


def pack_row(
    params: SamplingParams,
    caps: SlotCaps,
    *,
    vocab_size: int,
    prompt_len: int,
    stop_ids: Iterable[int] = (),
    seed: int,
    choice: int = 0,
) -> PackedRow:
    """Returns a request's settings as the buffers that `install_row` takes, on the host.

    Args:
      params: sampling settings, ``bad_words_ids`` filled in. caps: capacities.
      vocab_size: ids below it can be drawn. prompt_len: tokens of the prompt, output of a preemption not counted.
      stop_ids: every id that ends the request (`SamplingParams.end_ids`). seed: never None here.
      choice: index among the n of one prompt.

    Raises:
      SamplingParamsError: more stop ids, biases or bad words than a slot holds.
    """
    stop_ids = frozenset(stop_ids)
    caps.check(params, stop_ids)
    row = describe_row(params, caps, prompt_len=prompt_len, stop_ids=stop_ids, seed=seed, choice=choice)
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    if params.allowed_token_ids is not None:
        bits[list(params.allowed_token_ids)] = 1
    leaves = [np.atleast_1d(leaf) for leaf in jax.tree.leaves(row)]
    floats = [leaf.ravel() for leaf in leaves if leaf.dtype == np.float32]
    ints = [leaf.ravel().view(np.int32) for leaf in leaves if leaf.dtype != np.float32]
    mask = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    return PackedRow(np.concatenate(ints), np.concatenate(floats), mask)


def init_slots(
    max_num_seqs: int,
    max_len: int,
    vocab_size: int,
    caps: SlotCaps | None = None,
    num_shares: int = 1,
    sharding: Any = None,
) -> Slots:
    """Returns slots whose rows ask for nothing.

    Args:
      max_num_seqs: R. max_len: S, most tokens of prompt and output.
      vocab_size: ids at or above it can never be drawn, whatever the width of the logits. caps: capacities.
      num_shares: of the rows over a mesh, which divide R, and sharding: of rows there; None is the default device.
    """
    caps = caps or SlotCaps()
    nothing = pack_row(SamplingParams(temperature=0.0), caps, vocab_size=vocab_size, prompt_len=0, seed=0)
    num_rows = max_num_seqs + num_shares
    put = jax.device_put if sharding is None else lambda array: put_shards(array, sharding)
    # Made on the host: on the device each shape would cost a compilation.
    packed = jax.tree.map(lambda leaf: put(np.tile(leaf, (num_rows, 1))), nothing)
    history = put(np.zeros((max_num_seqs, max_len), np.int32))
    return Slots(history, packed, caps, vocab_size)


def install_row(slots: Slots, slot: jax.Array, row: PackedRow) -> Slots:
    """Returns the slots with a request's settings in a slot; its history is written as its prompt is run.

    Args:
      slots: consumed (jit with donation). slot: int32 scalar; out of ``0 .. R - 1`` nothing is written.
      row: from `pack_row`.
    """
    slot = own_slots(slots, slot)
    where = _in_range(slot, slots.history.shape[0], len(slots.packed.ints))
    packed = jax.tree.map(lambda old, new: old.at[where].set(new, mode="drop"), slots.packed, row)
    return replace(slots, packed=packed)


def recall_history(slots: Slots, slot: jax.Array, tokens: jax.Array, count: jax.Array) -> Slots:
    """Returns the slots with the ids of a prompt's beginning whose KV is there already in a slot's history.

    Args:
      slots: consumed (jit with donation). slot: int32 scalar; out of range nothing is written.
      tokens: ``[S]`` ids. count: int32 scalar, how many of them count.
    """
    S = slots.history.shape[1]
    positions = jnp.arange(S, dtype=jnp.int32)
    return write_tokens(slots, jnp.full(S, own_slots(slots, slot)), positions, tokens, positions < count)


def own_slots(slots: Slots, slot_ids: jax.Array) -> jax.Array:
    """Returns slot ids as this share of the rows counts them; those of other shares are out of range."""
    return slot_ids - shard_index("rows") * slots.history.shape[0]


def gather_rows(slots: Slots, slot_ids: jax.Array) -> Rows:
    """Returns the settings of a step's rows by name.

    Args:
      slots: all slots. slot_ids: ``[B]``; out of ``0 .. R - 1`` is padding, whose settings ask for nothing.
    """
    R = slots.history.shape[0]
    slot = _in_range(slot_ids, R, R)
    template = _template(slots.caps)
    packed = {np.dtype(np.float32): slots.packed.floats[slot], np.dtype(np.int32): slots.packed.ints[slot]}
    taken = dict.fromkeys(packed, 0)

    def take(leaf: np.ndarray) -> jax.Array:
        kind = np.dtype(np.float32) if leaf.dtype == np.float32 else np.dtype(np.int32)
        begin, taken[kind] = taken[kind], taken[kind] + leaf.size
        part = packed[kind][:, begin : taken[kind]].reshape(-1, *leaf.shape)
        return jax.lax.bitcast_convert_type(part, leaf.dtype) if leaf.dtype == np.uint32 else part

    settings = jax.tree.map(take, template)
    return Rows(slot, settings, slots.history, slots.packed.mask, slots.vocab_size)


def write_tokens(
    slots: Slots, slot_ids: jax.Array, positions: jax.Array, tokens: jax.Array, valid: jax.Array
) -> Slots:
    """Returns the slots with tokens in their histories.

    Args:
      slots: consumed (jit with donation). slot_ids, positions, tokens: integers ``[M]``.
      valid: ``[M]``, False writes nothing; nor does a slot or position out of range.
    """
    R, S = slots.history.shape
    inside = valid & (positions >= 0) & (positions < S)
    where = jnp.where(inside, _in_range(slot_ids, R, R), R)
    history = slots.history.at[where, positions].set(tokens, mode="drop")
    return replace(slots, history=history)


def _in_range(slot: jax.Array, R: int, otherwise: int) -> jax.Array:
    return jnp.where((slot >= 0) & (slot < R), slot, otherwise)


def _pad(values: Sequence[float], size: int, fill: int, dtype: Any) -> np.ndarray:
    padded = np.full(size, fill, dtype)
    padded[: len(values)] = values
    return padded


@cache
def _template(caps: SlotCaps) -> SlotRow:
    return describe_row(SamplingParams(temperature=0.0), caps)
