"""Rotary position embedding: the frequencies of every kind of stretching, the angles, and the rotation.

Frequencies are numpy on the host (they depend on the configuration alone and become constants of a step); angles and
rotation are float32 on the device. Rotation is the half-split form: number ``j`` of the rotary part turns with number
``j + rotary_dim / 2``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import RopeConfig


def inv_freq(rope: RopeConfig, length: int | None = None) -> tuple[np.ndarray, float]:
    """Returns the angular frequencies of a rotary embedding, and the factor of its cos and sin.

    Two kinds have a table for short sequences and another beyond the trained length: ``dynamic`` (the base grows
    with the length) and ``longrope`` (its long factors). transformers picks by the length of the running batch and
    picks again as it grows, so keys cached before the change keep angles that the queries after it do not share.
    Here one table holds for the whole life of a cache: that of ``length``. It equals transformers exactly for a
    prompt of ``length`` tokens run at once, and for every sequence while ``length`` is within the trained one.

    Args:
      rope: the configuration.
      length: longest sequence in tokens that the table serves; None is the trained length. Kinds other than
        ``dynamic`` and ``longrope`` do not read it.

    Returns:
      ``[rotary_dim / 2]`` float32, radians a token, highest first; and the attention factor.
    """
    frequencies, factor = _KINDS[rope.kind](rope, length)
    if rope.attention_factor is not None:
        factor = rope.attention_factor
    divisors = np.asarray(rope.get("freq_factors", 1.0), np.float32)  # GGUF's rope_freqs tensor
    return (frequencies / divisors).astype(np.float32), float(factor)


def rotary(positions: jax.Array, frequencies: np.ndarray, factor: float) -> tuple[jax.Array, jax.Array]:
    """Returns ``(cos, sin)`` of every position, each ``[..., T, rotary_dim / 2]`` float32.

    Args:
      positions: ``[..., T]`` int32, counted from 0.
      frequencies: ``[rotary_dim / 2]``, radians a token.
      factor: multiplies cos and sin.
    """
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first ``rotary_dim`` numbers of every head and passes the rest through.

    Args:
      x: ``[..., T, N, H]``.
      cos, sin: ``[..., T, rotary_dim / 2]`` float32.

    Returns:
      As ``x``, in its dtype; the products are float32.
    """
    half = cos.shape[-1]
    # (a, b) cos + (-b, a) sin over whole heads: halves apart are several loops for XLA, and other tiles on a TPU.
    cos, sin = (jnp.concatenate(halves, -1)[..., None, :] for halves in ((cos, cos), (-sin, sin)))
    y = x[..., : 2 * half].astype(jnp.float32)
    turned = (y * cos + jnp.roll(y, half, -1) * sin).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], -1) if 2 * half < x.shape[-1] else turned


def _default(rope: RopeConfig, length: int | None = None) -> tuple[np.ndarray, float]:
    """Source: Su et al. 2021 (arXiv:2104.09864)."""
    return _geometric(rope.theta, rope.rotary_dim), 1.0


def _geometric(theta: float, dim: int) -> np.ndarray:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1) / np.float32(theta) ** exponents


def _linear(rope: RopeConfig, length: int | None) -> tuple[np.ndarray, float]:
    """Source: Chen et al. 2023 (arXiv:2306.15595)."""
    return _geometric(rope.theta, rope.rotary_dim) / np.float32(rope.factor), 1.0


def _dynamic(rope: RopeConfig, length: int | None) -> tuple[np.ndarray, float]:
    """Source: transformers, ``_compute_dynamic_ntk_parameters``."""
    trained, dim = _trained(rope), rope.rotary_dim
    stretch = rope.factor * max(length or 0, trained) / trained - (rope.factor - 1)
    return _geometric(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(rope: RopeConfig, length: int | None) -> tuple[np.ndarray, float]:
    """Source: Peng et al. 2023 (arXiv:2309.00071).

    Dimensions that turn often within the trained length keep the original frequency, slow ones are interpolated by
    ``factor``, and a linear ramp joins them.
    """
    trained, dim = _trained(rope), rope.rotary_dim

    def dimension_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.get("beta_fast", 32.0)), dimension_of(rope.get("beta_slow", 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp has a width
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    original = _geometric(rope.theta, dim)
    mscale, mscale_all_dim = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    factor = _yarn_scale(rope.factor)
    if mscale and mscale_all_dim:
        factor = _yarn_scale(rope.factor, mscale) / _yarn_scale(rope.factor, mscale_all_dim)
    return original / np.float32(rope.factor) * ramp + original * (1 - ramp), factor


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope: RopeConfig, length: int | None) -> tuple[np.ndarray, float]:
    """Source: meta-llama/llama-models, ``apply_scaling``."""
    trained, low, high = _trained(rope), rope.get("low_freq_factor"), rope.get("high_freq_factor")
    original = _geometric(rope.theta, rope.rotary_dim)
    turns = trained * original / np.float32(2 * math.pi)  # within the trained length
    keep = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - keep) * original / np.float32(rope.factor) + keep * original, 1.0


def _longrope(rope: RopeConfig, length: int | None) -> tuple[np.ndarray, float]:
    """Source: Ding et al. 2024 (arXiv:2402.13753)."""
    trained = _trained(rope)
    name = "long_factor" if length is not None and length > trained else "short_factor"
    divisors = np.asarray(rope.get(name), np.float32)
    factor = math.sqrt(1 + math.log(rope.factor) / math.log(trained)) if rope.factor > 1 else 1.0
    return _geometric(rope.theta, rope.rotary_dim) / divisors, factor


def _trained(rope: RopeConfig) -> int:
    if rope.original_max_len is None:
        raise ValueError(
            f"RopeConfig.original_max_len is None; kind {rope.kind!r} needs the trained length in tokens"
        )
    return rope.original_max_len


_KINDS: dict[str, Callable[[RopeConfig, int | None], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
