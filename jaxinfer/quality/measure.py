"""A model under one policy over a text: its bytes, how far it strays from a reference, and how fast it is.

The reference is kept as its last stream ``[tokens, D]`` and its table, not as log-probabilities ``[tokens, V]``, and
its logits are made again, `ROWS` positions at a time, beside those that they are compared with: exact, and for 2,000
tokens of Gemma 3 2.6 MB and a table of 336 MB in bfloat16 where float32 log-probabilities would take 2.1 GB.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.arrays.account import count_bytes
from jaxinfer.arrays.precision import Policy
from jaxinfer.build import default_stack_size
from jaxinfer.kernels.attention.api import choose_attention
from jaxinfer.kernels.matmul.api import choose_matmul
from jaxinfer.model.cache import KVCache, init_cache, page_bytes
from jaxinfer.model.decoder import Block, Static, forward, param_specs, stack_layers, stack_sizes, unembed
from jaxinfer.quality.compare import Comparison, compare_logits
from jaxinfer.steps.steps import decode
from jaxinfer.weights.model import Model

ROWS = 64  # positions whose logits exist at once, twice
CHUNK = 512  # tokens of a prefill
_PAGE = 16
_PROMPT, _STEPS, _REPEATS = 64, 8, 3  # of the measurement of speed


@dataclass(frozen=True)
class Reference:
    """What is kept of a reference: enough to make its logits again.

    Attributes:
      streams: ``[T, D]`` of each window. table: the parameters that `unembed` reads. static: what it was compiled for.
    """

    streams: tuple[np.ndarray, ...]
    table: dict[str, Any]
    static: Static


@dataclass(frozen=True)
class Quality:
    """One policy, measured.

    Attributes:
      policy: as it was settled against the checkpoint.
      weight_bytes: by role, see `count_bytes`.
      kv_bytes: of a token over all layers, scales included.
      nats: mean negative log-probability of a token. kl: mean ``KL(reference || policy)`` in nats.
      agreement: share of positions where both find the same token likeliest.
      speeds: tokens a second by what is run (``prefill 512``, ``decode x1``); empty where it was not asked for.
    """

    policy: str
    weight_bytes: dict[str, int]
    kv_bytes: float
    nats: float
    kl: float
    agreement: float
    speeds: dict[str, float]

    @property
    def perplexity(self) -> float:
        """``exp(nats)``."""
        return math.exp(self.nats)


def measure(
    model: Model,
    policy: Policy,
    windows: Sequence[Sequence[int]],
    reference: Reference | None = None,
    rows: Sequence[int] = (),
    tick: Callable[[], None] = lambda: None,
) -> tuple[Quality, Reference]:
    """Runs a model over a text; its parameters are let go of at the end, but for the table that `Reference` holds.

    Args:
      model: opened. policy: as the user gave it.
      windows: ids, each window read from its first token with an empty cache.
      reference: to compare with; None makes this run its own.
      rows: numbers of decode rows whose speed is measured; none measures no speed.
      tick: called after each prefill of at most `CHUNK` tokens.

    Returns:
      What was measured, and the run as a reference for others.
    """
    settled, _ = model.settle(policy)
    cfg, context = model.cfg, max(map(len, windows))
    matmul, _ = choose_matmul("auto", settled)
    attention, _ = choose_attention("auto", cfg.attention, settled)
    static = Static(cfg, replace(settled, matmul=matmul), attention, context)
    params = model.load(settled, None, None)
    table = {name: params[name] for name in ("embed", "head") if name in params}
    # Where no speed is asked for, one scan, which compiles in a tenth of the time.
    sizes = stack_sizes(cfg, default_stack_size(cfg) if rows else cfg.num_layers, settled)
    params = stack_layers(params, sizes)
    num_pages = max(-(-context // _PAGE), max(rows, default=0) * (_PROMPT + _STEPS * (_REPEATS + 1)) // _PAGE)
    cache = init_cache(cfg, settled, sizes, num_pages, _PAGE)
    streams, speeds = _run(params, cache, windows, static, rows, tick)
    own = Reference(tuple(streams), table, static)
    nats, kl, agreement = (
        float(part.mean(dtype=np.float64)) for part in _judge(own, reference or own, windows)
    )
    quality = Quality(
        str(settled),
        {role: by.total() for role, by in count_bytes(param_specs(cfg), settled).items()},
        page_bytes(cfg, settled, _PAGE) / _PAGE,
        nats=nats,
        kl=kl,
        agreement=agreement,
        speeds=speeds,
    )
    return quality, own


def _block(tokens: Sequence[int], start: int, chunk: int, context: int) -> Block:
    """Returns a prefill of one row whose pages are the pool's first."""
    padded = np.zeros((1, chunk), np.int32)
    padded[0, : len(tokens)] = tokens
    pages = np.arange(-(-context // _PAGE), dtype=np.int32)[None]
    numbers = (padded, np.array([start], np.int32), np.array([len(tokens)], np.int32), pages)
    return Block(*map(jnp.asarray, numbers))


def _run(
    params: Any,
    cache: KVCache,
    windows: Sequence[Sequence[int]],
    static: Static,
    rows: Sequence[int],
    tick: Callable[[], None],
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Returns the stream of each window, and the speeds that were asked for."""
    context = max(map(len, windows))
    chunk = min(CHUNK, 1 << (context - 1).bit_length())
    block = _block(windows[0][:chunk], 0, chunk, context)
    step = jax.jit(_forward, static_argnums=3, donate_argnums=1).lower(params, cache, block, static).compile()
    streams, speeds = [], {}
    for window in windows:
        parts = []
        for start in range(0, len(window), chunk):
            x, cache = step(params, cache, _block(window[start : start + chunk], start, chunk, context))
            parts.append(np.asarray(x[: len(window) - start]))
            tick()
        streams.append(np.concatenate(parts))
    if rows:
        seconds = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            x, cache = step(params, cache, block)
            x.block_until_ready()
            seconds.append(time.perf_counter() - began)
        speeds[f"prefill {chunk}"] = chunk / statistics.median(seconds)
        speeds |= {f"decode x{B}": _time_decode(params, cache, B, static) for B in rows}
    return streams, speeds


def _forward(params: Any, cache: KVCache, block: Block, static: Static) -> tuple[jax.Array, KVCache]:
    return forward(params, cache, [block], static)


def _time_decode(params: Any, cache: KVCache, num_rows: int, static: Static) -> float:
    """Returns the tokens a second of some rows that hold a prompt; what the cache holds of it does not matter."""
    width = num_pages = jax.tree.leaves(cache)[0].shape[1] // num_rows
    pages = jnp.arange(num_pages * num_rows, dtype=jnp.int32).reshape(num_rows, width)
    tokens = jnp.zeros(num_rows, jnp.int32)
    at = jnp.full(num_rows, _PROMPT, jnp.int32)
    # The pool is not donated here: it is the caller's. One that is copied would weigh on the time, so a copy is given.
    cache = jax.tree.map(jnp.copy, cache)
    step = jax.jit(decode, static_argnums=5, donate_argnums=1)
    step = step.lower(params, cache, tokens, at, pages, static).compile()
    seconds = []
    for repeat in range(_REPEATS + 1):  # the first warms up
        began = time.perf_counter()
        for i in range(_STEPS):
            logits, cache = step(params, cache, tokens, at + repeat * _STEPS + i, pages)
            logits.block_until_ready()  # the next token would wait for it too
        seconds.append(time.perf_counter() - began)
    return num_rows * _STEPS / statistics.median(seconds[1:])


def _judge(own: Reference, reference: Reference, windows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns the parts of a `Comparison` at every position that has a token after it, window after window."""
    targets = np.concatenate([np.asarray(window[1:], np.int32) for window in windows])
    sides = [np.concatenate([x[:-1] for x in side.streams]) for side in (own, reference)]
    spare = -len(targets) % ROWS
    targets = np.pad(targets, (0, spare))
    sides = [np.pad(side, ((0, spare), (0, 0))) for side in sides]

    @jax.jit
    def judge(table: Any, other: Any, x: jax.Array, y: jax.Array, targets: jax.Array) -> Comparison:
        logits = unembed(table, own.static, x)
        return compare_logits(logits, unembed(other, reference.static, y), targets)

    def at(first: int) -> Comparison:
        part = slice(first, first + ROWS)
        x, y = (side[part] for side in sides)
        return jax.tree.map(np.asarray, judge(own.table, reference.table, x, y, targets[part]))

    found = [at(first) for first in range(0, len(targets), ROWS)]
    return [np.concatenate(parts)[: len(targets) - spare] for parts in zip(*found, strict=True)]
