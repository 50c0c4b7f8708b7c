"""Drawing tokens from logits: every setting a row's own, in one executable, and no sort of the vocabulary.

The order: logit_bias and allowed ids, penalties, min_tokens and bad words, temperature, top_k, top_p, min_p, draw.
A draw is the argmax of logit plus Gumbel noise among the tokens that the filters keep; the noise belongs to the
request, the position and the token id. What is kept is defined by value, so that ties never depend on an order:
top_k keeps a token while fewer than k are likelier; top_p while those likelier hold less than top_p of what top_k
keeps; min_p while it is at least min_p times as likely as the likeliest.

Two paths find the draw, and a row's own settings and logits alone decide which: the C likeliest tokens where the
filters keep only some of these, else all V by trial (`_draw_all`). Work that no row of the batch needs is skipped.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxinfer.schedule.sampling_params import MAX_LOGPROBS
from jaxinfer.steps.noise import fold_in, gumbel
from jaxinfer.steps.slots import Filters, Rows
from jaxinfer.steps.vocab import (
    BANNED,
    argmax,
    count_ids,
    is_finite,
    largest,
    log_total,
    pick,
    scatter,
    smallest,
    token_ids,
    top,
    total,
    unpack_bits,
)

NUM_CANDIDATES = 72  # above 64, the largest top_k in common use
HISTORY_CHUNK = 512  # positions counted at once for penalties
NO_TOKEN = -1  # drawn where there is nothing to draw from; the host ends the request


@struct.dataclass
class TokenLogprobs:
    """Log-probabilities under the model itself: before bias, penalties, temperature and filters. Always finite.

    Attributes:
      logprob: ``[...]`` of the token. rank: ``[...]``, 1 + how many tokens are likelier.
      top_ids: ``[..., C]``, likeliest first, -1 beyond the vocabulary. top_logprobs: ``[..., C]``.
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@struct.dataclass
class Sampled(TokenLogprobs):
    """A draw a row: the tokens, and their `TokenLogprobs` (zeros for rows that did not ask).

    Attributes:
      tokens: ``[B]`` int32.
    """

    tokens: jax.Array


def sample(logits: jax.Array, rows: Rows, position: jax.Array) -> Sampled:
    """Draws one token a row.

    Args:
      logits: ``[B, V]``. rows: the slots' settings. position: ``[B]`` of the token that is drawn.

    Returns:
      Ids below ``rows.vocab_size``, `NO_TOKEN` where logits are not finite.
    """
    logits = _real(logits.astype(jnp.float32), rows.vocab_size)
    edited = _edit(logits, rows, position)
    filters = rows.settings.filters
    tokens = _draw(edited, filters, fold_in(rows.settings.key, position))
    tokens = jnp.minimum(tokens, rows.vocab_size - 1)  # whatever the logits were
    wanted = rows.settings.wants_logprobs > 0

    def score(_) -> TokenLogprobs:
        found = _score(logits, tokens, rows.vocab_size)
        return jax.tree.map(lambda leaf: jnp.where(_column(wanted, leaf), leaf, 0), found)

    def skip(_) -> TokenLogprobs:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(score, None))

    found = lax.cond(jnp.any(wanted), score, skip, None)
    checked = _checked(tokens, logits)
    return Sampled(found.logprob, found.rank, found.top_ids, found.top_logprobs, checked)


def greedy(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Returns the likeliest id of each row, the lowest on ties: all that a batch of plain greedy rows needs.

    Args:
      logits: ``[B, V]``; where they are not finite, `NO_TOKEN` is returned. vocab_size: ids at or above it are padding.
    """
    logits = _real(logits.astype(jnp.float32), vocab_size)
    return _checked(argmax(logits), logits)


def _checked(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    """Tokens, but `NO_TOKEN` in rows whose logits overflowed."""
    return jnp.where(is_finite(logits), tokens, NO_TOKEN)


def token_logprobs(logits: jax.Array, targets: jax.Array, vocab_size: int | None = None) -> TokenLogprobs:
    """Scores given tokens, a prompt's for instance.

    Args:
      logits: ``[T, V]``. targets: ``[T]`` ids.
      vocab_size: ids at or above it are padding; None for V.
    """
    vocab_size = vocab_size or count_ids(logits)
    return _score(_real(logits.astype(jnp.float32), vocab_size), targets, vocab_size)


def _real(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Bans the padding of the vocabulary."""
    if count_ids(logits) <= vocab_size:
        return logits
    return jnp.where(token_ids(logits) < vocab_size, logits, BANNED)


def _column(mask: jax.Array, like: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def _score(logits: jax.Array, tokens: jax.Array, vocab_size: int) -> TokenLogprobs:
    norm = log_total(logits)[:, None]
    chosen = pick(logits, tokens[:, None])
    rank = 1 + total((logits > chosen).astype(jnp.int32))
    best, ids = top(logits, min(MAX_LOGPROBS, vocab_size))
    spare = ((0, 0), (0, MAX_LOGPROBS - best.shape[1]))
    best = jnp.pad(best, spare, constant_values=BANNED)
    ids = jnp.pad(ids, spare, constant_values=-1)
    logprob, best = (_at_least_banned(x - norm) for x in (chosen, best))
    return TokenLogprobs(logprob[:, 0], rank, ids, best)


def _at_least_banned(x: jax.Array) -> jax.Array:
    return jnp.where(x > BANNED, x, BANNED)  # NaN too, which a maximum would keep


def _edit(logits: jax.Array, rows: Rows, position: jax.Array) -> jax.Array:
    """Applies what comes before temperature, each only if some row uses it."""
    settings = rows.settings
    penalties = settings.penalties
    V = count_ids(logits)
    ending = position < settings.min_len
    edits: tuple[tuple[jax.Array, Callable[[jax.Array], jax.Array]], ...] = (
        (settings.bias_ids >= 0, lambda x: scatter(x, settings.bias_ids).add(settings.bias, mode="drop")),
        (settings.limited > 0, lambda x: _keep_allowed(x, rows)),
        (penalties.repetition != 1, lambda x: _penalise_repetition(x, rows, position)),
        (
            (penalties.presence != 0) | (penalties.frequency != 0),
            lambda x: _penalise_output(x, rows, position),
        ),
        (ending, lambda x: _ban(x, jnp.where(ending[:, None], settings.stop_ids, V))),
        (settings.bad_words >= 0, lambda x: _ban(x, _completing(rows, position, V))),
    )
    used = [jnp.any(uses) for uses, _ in edits]

    def run(x: jax.Array) -> jax.Array:
        for use, (_, edit) in zip(used, edits, strict=True):
            x = lax.cond(use, edit, lambda x: x, x)
        return x

    return lax.cond(jnp.any(jnp.stack(used)), run, lambda x: x, logits)


def _ban(x: jax.Array, ids: jax.Array) -> jax.Array:
    return scatter(x, ids).set(BANNED, mode="drop")


def _keep_allowed(x: jax.Array, rows: Rows) -> jax.Array:
    allowed = unpack_bits(rows.mask[rows.slot], x) > 0
    return jnp.where(allowed | (rows.settings.limited == 0)[:, None], x, BANNED)


def _count(x: jax.Array, rows: Rows, position: jax.Array, start: jax.Array) -> jax.Array:
    """Counts each id in the histories from ``start`` to before ``position``.

    Returns:
      int32 ``[B, V]``. Histories are walked only as far as the longest row reaches.
    """
    V = count_ids(x)
    S = rows.history.shape[1]
    chunk = min(HISTORY_CHUNK, S)
    slot = jnp.minimum(rows.slot, rows.history.shape[0] - 1)

    def body(i: jax.Array, counts: jax.Array) -> jax.Array:
        begin = jnp.minimum(i * chunk, S - chunk)
        where = begin + jnp.arange(chunk, dtype=jnp.int32)
        tokens = rows.history[slot[:, None], where]
        # The last chunk is moved back to end at S: what it shares with the one before is not counted twice.
        fresh = (where >= i * chunk) & (where >= start[:, None]) & (where < position[:, None])
        return scatter(counts, jnp.where(fresh, tokens, V)).add(1, mode="drop")

    longest = jnp.minimum(jnp.max(position), S)
    return lax.fori_loop(0, (longest + chunk - 1) // chunk, body, jnp.zeros(x.shape, jnp.int32))


def _penalise_repetition(x: jax.Array, rows: Rows, position: jax.Array) -> jax.Array:
    penalty = rows.settings.penalties.repetition[:, None]
    seen = _count(x, rows, position, jnp.zeros_like(position)) > 0
    return jnp.where(seen, jnp.where(x > 0, x / penalty, x * penalty), x)


def _penalise_output(x: jax.Array, rows: Rows, position: jax.Array) -> jax.Array:
    penalties = rows.settings.penalties
    counts = _count(x, rows, position, rows.settings.prompt_len)
    return x - penalties.frequency[:, None] * counts - penalties.presence[:, None] * (counts > 0)


def _completing(rows: Rows, position: jax.Array, V: int) -> jax.Array:
    """Returns ``[B, bad_words]``: the id that would complete each bad word within the output, V for none."""
    words = rows.settings.bad_words
    before = words.shape[-1] - 1
    where = position[:, None] + jnp.arange(-before, 0, dtype=jnp.int32)
    tail = rows.history[jnp.minimum(rows.slot, rows.history.shape[0] - 1)[:, None], jnp.maximum(where, 0)]
    tail = jnp.where(where >= rows.settings.prompt_len[:, None], tail, -2)  # equals no id and no padding
    head = words[..., :-1]
    complete = jnp.all((head < 0) | (head == tail[:, None]), axis=-1)
    return jnp.where(complete & (words[..., -1] >= 0), words[..., -1], V)


def _draw(x: jax.Array, filters: Filters, key: jax.Array) -> jax.Array:
    """Draws from edited logits: temperature, filters, noise."""
    is_greedy = filters.temperature == 0
    x = x / jnp.where(is_greedy, 1.0, filters.temperature)[:, None]
    filtered = (filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)
    nothing = jnp.zeros(x.shape[0], jnp.int32), jnp.zeros(x.shape[0], bool)
    tokens, done = lax.cond(
        jnp.any(is_greedy | filtered), lambda: _draw_candidates(x, filters, key), lambda: nothing
    )
    return lax.cond(
        jnp.all(done), lambda: tokens, lambda: jnp.where(done, tokens, _draw_all(x, filters, key, ~done))
    )


def _draw_candidates(x: jax.Array, filters: Filters, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws among the C likeliest tokens.

    Returns:
      ``[B]`` ids, and whether each is exact: the filters keep nothing beyond the candidates.
    """
    best, ids = top(x, NUM_CANDIDATES)
    C = best.shape[1]
    first, last = best[:, 0], best[:, -1]
    kth = jnp.take_along_axis(best, jnp.clip(filters.top_k - 1, 0, C - 1)[:, None], 1)[:, 0]
    # Beyond the last candidate, or in ties with it, what top_k keeps is not known here.
    has_k = (filters.top_k > 0) & (filters.top_k <= C) & (kth > last)
    kept = (best >= _min_p_floor(first, filters)[:, None]) & ((best >= kth[:, None]) | ~has_k[:, None])
    weight = jnp.exp(best - first[:, None])
    in_k = jnp.sum(jnp.where(best >= kth[:, None], weight, 0), axis=-1)
    nucleus = filters.top_p < 1
    in_all = lax.cond(
        jnp.any(nucleus & (filters.top_k == 0)),
        lambda: total(jnp.exp(x - first[:, None])),
        lambda: jnp.ones_like(first),
    )
    likelier = jnp.sum(jnp.where(best[:, None, :] > best[:, :, None], weight[:, None, :], 0), axis=-1)
    bound = jnp.where(nucleus, filters.top_p * jnp.where(has_k, in_k, in_all), jnp.inf)
    kept &= likelier < bound[:, None]
    noisy = jnp.where(kept, best + gumbel(key, ids), -jnp.inf)
    most = jnp.max(noisy, axis=-1, keepdims=True)
    drawn = jnp.min(jnp.where(noisy == most, ids, count_ids(x) - 1), axis=-1)
    exact = ~kept[:, -1] & (has_k | (filters.top_k == 0) | ~nucleus)
    is_greedy = filters.temperature == 0
    return jnp.where(is_greedy, ids[:, 0], drawn), is_greedy | exact


def _draw_all(x: jax.Array, filters: Filters, key: jax.Array, pending: jax.Array) -> jax.Array:
    """Draws among all V tokens by trial, for the rows that are pending.

    The draw is the first token, by falling logit plus noise, that the filters keep. top_p is tried on one token at a
    time, by one sum over those likelier; a token that it drops takes all that are no likelier with it, so there are
    about 1 / top_p trials and no sort. What top_k and min_p keep is a floor from the start.
    """
    first = largest(x)
    top_k = jnp.where(pending, filters.top_k, 0)
    nucleus = pending & (filters.top_p < 1)
    lowest = jnp.full_like(first, -jnp.inf)
    kth = lax.cond(jnp.any(top_k > 0), lambda: _kth_largest(x, top_k), lambda: lowest)
    noisy = x + gumbel(key, token_ids(x)[None])
    noisy = jnp.where(x >= jnp.maximum(kth, _min_p_floor(first, filters))[:, None], noisy, -jnp.inf)

    def mass(keeps: jax.Array) -> jax.Array:
        return total(jnp.where(keeps, jnp.exp(x - first[:, None]), 0))

    bound = filters.top_p * lax.cond(jnp.any(nucleus), lambda: mass(x >= kth[:, None]), lambda: first)

    def trial(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        pending, tokens, dropped = carry
        token = argmax(jnp.where(x > dropped[:, None], noisy, -jnp.inf))
        value = pick(x, token[:, None])
        tried = pending & nucleus
        likelier = lax.cond(jnp.any(tried), lambda: mass(x > value), lambda: lowest)
        drops = tried & (likelier >= bound)  # false for NaN, so that a broken row ends too
        tokens = jnp.where(pending, token, tokens)
        return pending & drops, tokens, jnp.where(drops, value[:, 0], dropped)

    start = (pending, jnp.zeros_like(top_k), lowest)
    return lax.while_loop(lambda carry: jnp.any(carry[0]), trial, start)[1]


def _min_p_floor(first: jax.Array, filters: Filters) -> jax.Array:
    """Returns ``[B]``: the least logit that min_p keeps, given the largest; -inf when it is off."""
    return first + jnp.log(filters.min_p)


def _kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """Returns ``[B]`` thresholds that exactly the k largest of a row reach, and ties with the k-th; k < 1 is V.

    Bisection over float32 patterns in their order as integers: at most 32 counts, fewer once k are told apart.
    """
    V = count_ids(x)
    k = jnp.clip(jnp.where(k < 1, V, k), 1, V)

    def flip(bits: jax.Array) -> jax.Array:
        return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def as_float(order: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(flip(order), jnp.float32)

    def as_order(value: jax.Array) -> jax.Array:
        return flip(lax.bitcast_convert_type(value, jnp.int32))

    def halve(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = carry
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count = total((x >= as_float(middle)[:, None]).astype(jnp.int32))
        low = jnp.where(count >= k, middle, low)
        return low, jnp.where(count == k, low + 1, jnp.where(count > k, high, middle))

    low = as_order(smallest(x))
    low, _ = lax.while_loop(
        lambda carry: jnp.any(carry[1] > carry[0] + 1), halve, (low, as_order(largest(x)) + 1)
    )
    return as_float(low)
