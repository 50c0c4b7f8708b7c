"""A mixture of experts: a router sends each token to a few of E feed-forward blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import ragged_linear
from jaxinfer.arrays.sharding import gather_shards, scatter_sum, shard_index, sum_shards
from jaxinfer.config import MlpConfig
from jaxinfer.model.layers import ACTIVATIONS, Params


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


def moe(x: jax.Array, p: Params, cfg: MlpConfig, policy: Policy) -> jax.Array:
    """Returns the mixture's output for a stream of tokens; no token is dropped.

    Tokens are sorted by expert and each expert multiplies its own run of rows (ragged matmuls), so the work is that
    of the experts that are visited. Where experts lie over a mesh, all its tokens go to every device, which runs those
    that visit its own experts, and the sums go back to whose tokens they are.

    Args:
      x: ``[M, D]``.
      p: ``router [E, D]``, ``gate`` and ``up`` ``[E, F, D]``, ``down [E, D, F]``, this device's share of them.
    """
    x = gather_shards(x, "experts", dim=0)
    M, E, k = x.shape[0], p["gate"].shape[0], cfg.experts_per_token
    experts, weights = route(x, p["router"], cfg)
    flat = experts.reshape(-1) - shard_index("experts") * E
    flat = jnp.where((flat >= 0) & (flat < E), flat, E)  # those of other devices lie last
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=E + 1)[:E].astype(jnp.int32)
    dtype = policy.compute_dtype

    def project(rows: jax.Array, name: str) -> jax.Array:
        return ragged_linear(rows, p[name], sizes, policy, ("ffn",) if name == "down" else ())

    rows = x.astype(dtype)[order // k]
    hidden = (ACTIVATIONS[cfg.activation](project(rows, "gate")) * project(rows, "up")).astype(dtype)
    out = project(hidden, "down") * weights.reshape(-1)[order][:, None]
    out = jnp.where((flat[order] < E)[:, None], out, 0)
    out = jnp.zeros((M, x.shape[1]), jnp.float32).at[order // k].add(out).astype(x.dtype)
    return scatter_sum(sum_shards(out, "ffn"), "experts", dim=0)
