"""The mixture of experts against a loop over tokens and experts in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec
from jaxinfer.config import MlpConfig
from jaxinfer.model.moe import moe, route

D, F = 12, 7
FLOAT32 = Policy.parse("float32")


def config(num_experts: int = 5, experts_per_token: int = 2, *, normalize: bool = True) -> MlpConfig:
    return MlpConfig(
        16,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_dim=F,
        normalize_router=normalize,
    )


def make(cfg: MlpConfig, num_tokens: int, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    E = cfg.num_experts
    shapes = {"router": (E, D), "gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    return rng.standard_normal((num_tokens, D), np.float32), {
        name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }


def exact(x: np.ndarray, p: dict[str, np.ndarray], cfg: MlpConfig) -> np.ndarray:
    """One token, one expert at a time."""
    wide = {name: array.astype(np.float64) for name, array in p.items()}
    out = np.zeros(x.shape)
    for i, row in enumerate(x.astype(np.float64)):
        logits = wide["router"] @ row
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        chosen = np.argsort(-chances)[: cfg.experts_per_token]
        share = chances[chosen].sum() if cfg.normalize_router else 1.0
        for e in chosen:
            gate = wide["gate"][e] @ row
            hidden = gate / (1 + np.exp(-gate)) * (wide["up"][e] @ row)
            out[i] += chances[e] / share * (wide["down"][e] @ hidden)
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize(
    "cfg",
    [config(), config(normalize=False), config(5, 1), config(3, 3), config(8, 2, normalize=False)],
    ids=["two of five", "not normalised", "one of five", "all", "two of eight"],
)
def test_the_mixture_is_the_sum_of_the_experts_that_are_visited(cfg: MlpConfig, num_tokens: int):
    x, p = make(cfg, num_tokens)
    got = jax.jit(moe, static_argnums=(2, 3))(x, p, cfg, FLOAT32)
    np.testing.assert_allclose(got, exact(x, p, cfg), rtol=1e-4, atol=1e-4)


def test_no_token_is_dropped_when_all_want_the_same_expert():
    cfg = config(4, 1)
    x, p = make(cfg, 16)
    x[:, 0] = 5.0
    p["router"][:] = 0
    p["router"][2, 0] = 10.0
    np.testing.assert_array_equal(
        route(jnp.asarray(x), jnp.asarray(p["router"]), cfg)[0], np.full((16, 1), 2)
    )
    np.testing.assert_allclose(moe(x, p, cfg, FLOAT32), exact(x, p, cfg), rtol=1e-4, atol=1e-4)


def test_a_token_is_the_same_alone_and_among_others():
    cfg = config()
    x, p = make(cfg, 9)
    together = moe(x, p, cfg, FLOAT32)
    for i in range(9):
        np.testing.assert_allclose(moe(x[i : i + 1], p, cfg, FLOAT32)[0], together[i], rtol=1e-5, atol=1e-5)


def test_the_router_decides_in_float32_whatever_the_policy():
    """Two experts whose logits differ by less than bfloat16 resolves."""
    cfg = config(2, 1)
    x = np.ones((1, D), np.float32)
    router = np.zeros((2, D), np.float32)
    router[:, 0] = 4.0, 4.001
    experts, weights = route(jnp.asarray(x, jnp.bfloat16), jnp.asarray(router), cfg)
    assert (int(experts[0, 0]), weights.dtype) == (1, jnp.float32)


def test_weights_sum_to_one_only_where_the_model_says_so():
    for normalize in (True, False):
        cfg = config(normalize=normalize)
        x, p = make(cfg, 6)
        _, weights = route(jnp.asarray(x), jnp.asarray(p["router"]), cfg)
        total = np.asarray(weights.sum(-1))
        assert np.allclose(total, 1, atol=1e-6) == normalize


def test_16_bit_experts_are_near_the_exact_ones():
    cfg = config()
    x, p = make(cfg, 9)
    got = moe(
        jnp.asarray(x, jnp.bfloat16), {k: jnp.asarray(v) for k, v in p.items()}, cfg, Policy.parse("bf16")
    )
    assert got.dtype == jnp.bfloat16
    wanted = exact(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32), p, cfg)
    assert np.abs(np.asarray(got, np.float64) - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("text", "act", "bound"),
    [
        ("int8", "compute", 1e-5),
        ("int8:zero", "compute", 1e-5),
        ("fp8_e4m3:g8", "compute", 1e-5),
        ("int4:g8", "compute", 1e-5),
        ("int4:channel", "int8", 0.04),
        ("int8", "int8", 0.04),
        ("fp8_e4m3", "fp8_e4m3", 0.08),
    ],
)
def test_experts_of_codes_are_experts_of_their_numbers(text: str, act: str, bound: float):
    """Within what rounding the rows changes; each expert's outputs have scales of their own."""
    cfg = replace(config(), expert_dim=16)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 16), np.float32)
    p: dict[str, Any] = {"router": rng.standard_normal((5, 16), np.float32)}
    wide = dict(p)
    fmt = Format.parse(text)
    for name in ("gate", "up", "down"):
        w = (
            rng.standard_normal((5, 16, 16), np.float32)
            * np.array([1, 30, 0.1, 2, 5], np.float32)[:, None, None]
        )
        spec = ParamSpec(w.shape, (None,) * 3)
        p[name] = jax.tree.map(jnp.asarray, quantize(w, spec, fmt))
        wide[name] = np.asarray(dequantize(p[name], jnp.dtype(jnp.float32)))
    got = moe(jnp.asarray(x), p, cfg, Policy(*[fmt] * 3, act=act))
    wanted = exact(x, wide, cfg)
    assert np.linalg.norm(got - wanted) <= bound * np.linalg.norm(wanted)
