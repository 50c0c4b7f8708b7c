"""A mixture of experts: a router sends each token to a few of E feed-forward blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import ragged_linear
from jaxinfer.arrays.sharding import (
    gather_shards,
    max_shards,
    num_shards,
    scatter_sum,
    shard_index,
    sum_shards,
    swap_shards,
)
from jaxinfer.config import MlpConfig
from jaxinfer.model.layers import ACTIVATIONS, Params

# Halves of a fair share that a bucket holds: routers are not fair, and a second round costs as much.
SLACK = 3
FEW_TOKENS = 32  # of a device, below which all tokens come to all devices


def route(x: jax.Array, router: jax.Array, cfg: MlpConfig) -> tuple[jax.Array, jax.Array]:
    """Returns each token's experts and their weights, in float32.

    Args:
      x: ``[M, D]``. router: ``[E, D]`` float32.
      cfg: says how many experts a token visits and whether their probabilities are scaled to sum to 1.

    Returns:
      ``[M, experts_per_token]`` expert ids (int32) and weights (float32).
    """
    logits = jnp.einsum("md,ed->me", x.astype(jnp.float32), router, precision="highest")
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, -1), cfg.experts_per_token)
    if cfg.normalize_router:
        weights = weights / weights.sum(-1, keepdims=True)
    return experts, weights


def moe(x: jax.Array, p: Params, cfg: MlpConfig, policy: Policy, live: jax.Array | None = None) -> jax.Array:
    """Returns the mixture's output for a stream of tokens; no token is dropped.

    Tokens are sorted by expert and each expert multiplies its own run of rows (ragged matmuls), so the work is that
    of the experts that are visited. Where a mesh cuts the experts, tokens and experts come together in buckets of a
    fixed size, in as many rounds as the fullest one needs: see `choose_bucket`.

    Args:
      x: ``[M, D]``.
      p: ``router [E, D]``, ``gate`` and ``up`` ``[E, F, D]``, ``down [E, D, F]``, this device's share of them.
      live: ``[M]`` tokens that count, None for all; the others visit nobody and get zeros.
    """
    experts, weights = route(x, p["router"], cfg)
    num, k = num_shards("experts"), cfg.experts_per_token
    if live is not None:
        experts = jnp.where(live[:, None], experts, num * p["gate"].shape[0])
    if num > 1 and (bucket := choose_bucket(len(x), k, num)):
        return sum_shards(_exchange(x, experts, weights, bucket, p, cfg, policy).astype(x.dtype), "ffn")
    x, experts, weights = (gather_shards(part, "experts", dim=0) for part in (x, experts, weights))
    bucket = _fair_share(len(x) * k, num) if num > 1 else len(x) * k
    out = _visit(x, experts - shard_index("experts") * p["gate"].shape[0], weights, bucket, p, cfg, policy)
    return scatter_sum(sum_shards(out.astype(x.dtype), "ffn"), "experts", dim=0)


def choose_bucket(num_tokens: int, experts_per_token: int, num_devices: int) -> int:
    """Returns how many rows a device sends to each other one at a time, 0 to bring all tokens to all devices.

    Sending a token to its experts and back moves ``experts_per_token`` rows each way, bringing it to all devices
    ``num_devices``. Sending pays where two rounds of buckets move no more, and where there are tokens enough that the
    buckets are not mostly padding.
    """
    bucket = _fair_share(num_tokens * experts_per_token, num_devices)
    return bucket if num_tokens >= FEW_TOKENS and 2 * bucket <= num_tokens else 0


def _fair_share(num_visits: int, num_devices: int) -> int:
    """Returns a device's share of visits to experts, with some to spare."""
    return -(-num_visits * SLACK // (2 * num_devices))


def _visit(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    bucket: int,
    p: Params,
    cfg: MlpConfig,
    policy: Policy,
) -> jax.Array:
    """Returns what this device's experts give to tokens ``[M, D]``, float32, ``bucket`` visits at a time.

    Args:
      experts: ``[M, k]`` as this device counts them; those out of range are not its own.
    """
    E, k = p["gate"].shape[0], cfg.experts_per_token
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < E), flat, E)  # those of other devices lie last
    order = jnp.argsort(flat, stable=True)
    ends = jnp.cumsum(jnp.bincount(flat, length=E + 1)[:E].astype(jnp.int32))

    def run_bucket(done: jax.Array | int, out: jax.Array) -> jax.Array:
        index = jax.lax.dynamic_slice_in_dim(order, done, bucket)
        sizes = jnp.diff(jnp.clip(ends - done, 0, bucket), prepend=0)
        y = _apply(x[index // k], sizes, p, cfg, policy) * weights.reshape(-1)[index][:, None]
        y = jnp.where((jnp.arange(bucket) < ends[-1] - done)[:, None], y, 0)
        return out.at[index // k].add(y)

    nothing = jnp.zeros(x.shape, jnp.float32)
    if bucket >= len(order):
        bucket = len(order)
        return run_bucket(0, nothing)
    order = jnp.pad(order, (0, bucket))
    rounds = -(-ends[-1] // bucket)
    return jax.lax.fori_loop(0, rounds, lambda i, out: run_bucket(i * bucket, out), nothing)


def _exchange(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    bucket: int,
    p: Params,
    cfg: MlpConfig,
    policy: Policy,
) -> jax.Array:
    """Returns the output of own tokens ``[M, D]``, float32, which go to their experts' devices and come back.

    Args:
      experts: ``[M, k]`` counted over all devices. bucket: C, rows that go to each device in a round.
    """
    E, k, num = p["gate"].shape[0], cfg.experts_per_token, num_shards("experts")
    dtype = policy.compute_dtype
    flat, shares = experts.reshape(-1), weights.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat // E, length=num + 1)[:num].astype(jnp.int32)
    starts = jnp.cumsum(counts) - counts

    def run_round(i: jax.Array, out: jax.Array) -> jax.Array:
        offset = i * bucket + jnp.arange(bucket, dtype=jnp.int32)
        there = (offset < counts[:, None]).reshape(-1)
        index = order[jnp.where(there, (starts[:, None] + offset).reshape(-1), 0)]
        rows = swap_shards(x.astype(dtype)[index // k], "experts")
        own = swap_shards(jnp.where(there, flat[index] % E, E), "experts")
        sort = jnp.argsort(own, stable=True)
        sizes = jnp.bincount(own, length=E + 1)[:E].astype(jnp.int32)
        y = jnp.where((own[sort] < E)[:, None], _apply(rows[sort], sizes, p, cfg, policy), 0).astype(dtype)
        y = swap_shards(jnp.zeros_like(y).at[sort].set(y), "experts").astype(jnp.float32)
        return out.at[index // k].add(jnp.where(there[:, None], y * shares[index][:, None], 0))

    rounds = max_shards(-(-counts.max() // bucket), "experts")
    return jax.lax.fori_loop(0, rounds, run_round, jnp.zeros(x.shape, jnp.float32))


def _apply(rows: jax.Array, sizes: jax.Array, p: Params, cfg: MlpConfig, policy: Policy) -> jax.Array:
    """Returns ``[R, D]`` float32: rows, sorted by expert, through their experts, ``sizes [E]`` each."""

    def project(rows: jax.Array, name: str) -> jax.Array:
        return ragged_linear(rows, p[name], sizes, policy, ("ffn",) if name == "down" else ())

    rows = rows.astype(policy.compute_dtype)
    hidden = ACTIVATIONS[cfg.activation](project(rows, "gate")) * project(rows, "up")
    return project(hidden.astype(policy.compute_dtype), "down")
