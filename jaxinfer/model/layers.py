"""The parts of a decoder layer, as functions over a stream of tokens ``[M, D]``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import linear
from jaxinfer.arrays.sharding import num_shards, sum_shards
from jaxinfer.config import AttentionConfig, MlpConfig, NormConfig

Params = dict[str, jax.Array]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    axes: int | tuple[int, ...] = -1,
    over: str | None = None,
) -> jax.Array:
    """Divides by the root mean square over ``axes`` and scales, in float32; returns the dtype of ``x``.

    ``over`` is the logical axis of one of them where a mesh cuts it evenly.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    y = x.astype(jnp.float32)
    square = jnp.mean(y * y, axes, keepdims=True)
    if over is not None:
        square = sum_shards(square, over) / num_shards(over)
    y = y * jax.lax.rsqrt(square + eps)
    return (y * scale).astype(x.dtype)


def norm(x: jax.Array, p: Params, cfg: NormConfig) -> jax.Array:
    """Normalises ``x [M, D]`` as the model does (`NormConfig.kind`), in float32; returns the dtype of ``x``."""
    if cfg.kind == "rms":
        return rms_norm(x, p["scale"], cfg.eps)
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + cfg.eps)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def project_qkv(
    x: jax.Array, p: Params, cfg: AttentionConfig, eps: float, policy: Policy
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries ``[M, N, H]``, keys and values ``[M, K, H]``, normalised where the model does, not rotated.

    The three weights may lie joined as ``qkv [N+2K, H, D]``.
    """
    N, K = cfg.num_heads, cfg.num_kv_heads
    joined = None
    if "qkv" in p:
        y = linear(x, p["qkv"], policy)
        if backend() != "cpu":  # where XLA would compute all of it once for each part (TPU v6e, 2,048 tokens)
            y = jax.lax.optimization_barrier(y)
        joined = jnp.split(y, (N, N + K), axis=1)

    def project(name: str) -> jax.Array:
        y = linear(x, p[name], policy) if joined is None else joined["qkv".index(name)]
        if cfg.qkv_bias:
            y = (y + p[f"{name}_bias"]).astype(y.dtype)
        if cfg.qk_norm != "none" and name != "v":
            axes, over = (-1, None) if cfg.qk_norm == "head" else ((-2, -1), "heads")
            y = rms_norm(y, p[f"{name}_norm"], eps, axes, over)
        return y

    return project("q"), project("k"), project("v")


def project_out(x: jax.Array, p: Params, policy: Policy) -> jax.Array:
    """Returns ``[M, D]`` from the heads' outputs ``[M, N, H]``."""
    y = linear(x.reshape(len(x), -1), p["o"], policy, over="heads")
    return (y + p["o_bias"]).astype(y.dtype) if "o_bias" in p else y


def mlp(x: jax.Array, p: Params, cfg: MlpConfig, policy: Policy) -> jax.Array:
    """Returns the dense feed-forward block of ``x [M, D]``."""
    return _project("down", mlp_hidden(x, p, cfg, policy), p, cfg, policy)


def mlp_hidden(x: jax.Array, p: Params, cfg: MlpConfig, policy: Policy) -> jax.Array:
    """Returns ``[M, F]``, what the dense feed-forward block projects down."""
    up = _project("up", x, p, cfg, policy)
    gate = _project("gate", x, p, cfg, policy) if cfg.gated else None
    return _activate(cfg.activation, up, gate)


def _project(name: str, x: jax.Array, p: Params, cfg: MlpConfig, policy: Policy) -> jax.Array:
    y = linear(x, p[name], policy, over="ffn" if name == "down" else None)
    return (y + p[f"{name}_bias"]).astype(y.dtype) if cfg.bias else y


@partial(jax.jit, static_argnums=0)
def _activate(activation: str, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Returns ``act(gate) * up``, or ``act(up)`` without a gate, in float32; returns the dtype of ``up``.

    It is a jit so that its result has the usual order of axes. `linear` may leave ``up`` and ``gate`` transposed; XLA's
    CPU backend would carry that order on to the next product, find that it cannot read it, and widen the product to
    float32, weight and all (Gemma 3, 2 rows: 55 against 32 ms a step).
    """
    act = ACTIVATIONS[activation]
    y = up.astype(jnp.float32)
    y = act(y) if gate is None else act(gate.astype(jnp.float32)) * y
    return y.astype(up.dtype)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns ``cap * tanh(x / cap)``, or ``x`` when there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
