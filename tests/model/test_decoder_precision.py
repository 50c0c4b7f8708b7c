"""Whole models of codes: near their float32 selves, alike in any stacks, and described before there are arrays."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import is_quantized
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import is_spec, path_name, random_params
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, RopeConfig
from jaxinfer.model import decoder
from jaxinfer.model.decoder import (
    Static,
    param_specs,
    stack_group,
    stack_layers,
    stack_sizes,
    stacked_shapes,
)
from jaxinfer.steps.steps import full_logits

TOY = ModelConfig(
    family="llama",
    vocab_size=96,
    d_model=64,
    max_len=128,
    layers=(LayerKind(),) * 2,
    attention=AttentionConfig(4, 2, 16, 16**-0.5),
    mlp=MlpConfig(128),
    ropes=(RopeConfig(1e4, 16),),
)
EXPERTS = replace(
    TOY,
    layers=(LayerKind(moe=True), LayerKind()),
    mlp=MlpConfig(128, num_experts=4, experts_per_token=2, expert_dim=32),
    tied=True,
)
FULL = jax.jit(full_logits, static_argnums=1)


def draw(cfg: ModelConfig) -> Any:
    """Trap 27's weights: a layer's gate is 1/500 the size of its up, its k 1/200 that of its q."""
    params = random_params(param_specs(cfg), seed=1, dtype=jnp.dtype(jnp.float32), std=0.2)
    for layer in params["layers"]:
        layer["attn"]["k"] = layer["attn"]["k"] / 200
        part = layer["mlp" if "mlp" in layer else "moe"]
        part["gate"] = part["gate"] / 500
    return params


def code(cfg: ModelConfig, params: Any, policy: Policy) -> Any:
    """Parameters in the formats of a policy, as loading makes them."""

    def one(path, spec, leaf):
        fmt = policy.format_of(path_name(path), spec)
        if fmt.is_plain:
            return leaf.astype(fmt.dtype)
        return jax.tree.map(jnp.asarray, quantize(np.asarray(leaf), spec, fmt))

    return jax.tree_util.tree_map_with_path(one, param_specs(cfg), params, is_leaf=is_spec)


def logits_of(cfg: ModelConfig, params: Any, policy: Policy, size: int) -> np.ndarray:
    sizes = stack_sizes(cfg, size, policy)
    stacks = stack_layers(code(cfg, params, policy), sizes)
    shapes = stacked_shapes(cfg, policy, sizes)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), stacks) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 12)).astype(np.int32)
    return np.asarray(FULL(stacks, Static(cfg, policy), tokens, jnp.array([12, 7])))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


POLICIES = [
    ("weights=int8", 0.999),
    ("w8a8", 0.998),
    ("weights=fp8", 0.99),
    ("weights=fp8,act=fp8", 0.99),
    ("weights=fp8_e5m2:g32", 0.97),
    ("w4a16", 0.95),
    ("w4a8", 0.95),
    ("weights=int4:g32:zero", 0.96),
    ("weights=nvfp4", 0.95),
    ("w4a8,layers.1=bf16,*.down=int8,*.k=int8", 0.95),
]


@pytest.mark.parametrize("cfg", [TOY, EXPERTS], ids=["dense", "experts, tied"])
@pytest.mark.parametrize(("text", "least"), POLICIES)
def test_trap_27_small_parts_keep_their_own_scales(text: str, least: float, cfg: ModelConfig):
    """Alone (q, k and v joined) and stacked (apart) give the same, near the float32 model."""
    params, policy = draw(cfg), Policy.parse(text)
    exact = logits_of(cfg, params, Policy(), 1)
    joined, apart = logits_of(cfg, params, policy, 1), logits_of(cfg, params, policy, 2)
    assert np.isfinite(joined).all()
    assert cosine(joined, exact) > least
    assert cosine(joined, apart) > 1 - 1e-4


def test_exceptions_part_stacks_and_keep_unlike_parts_apart():
    cfg = replace(TOY, layers=(LayerKind(),) * 5)
    assert stack_sizes(cfg, 5, Policy.parse("w8a16")) == (5,)
    assert stack_sizes(cfg, 5, Policy.parse("w8a16,layers.1=bf16")) == (1, 1, 3)
    assert stack_sizes(cfg, 2, Policy.parse("w4a16,layers.0=int8,layers.1=int8")) == (2, 2, 1)
    assert stack_sizes(cfg, 5, Policy.parse("w4a16,*.down=int8")) == (5,)
    policy = Policy.parse("w4a16,*.k=int8")
    first = stacked_shapes(cfg, policy, (1,) * 5)["stacks"][0]
    assert {"q", "k", "v"} < set(first["attn"])
    (whole,) = stacked_shapes(cfg, Policy.parse("w4a16"), (5,))["stacks"]
    leaves = jax.tree.leaves(whole, is_leaf=is_quantized)
    assert {leaf.ndim for leaf in leaves} == {2, 3, 4}
    assert whole["mlp"]["up"].values.shape == (5, 128, 32)
    assert whole["mlp"]["up"].scale.shape == (5, 128, 1)


@pytest.mark.parametrize(
    "cfg", [TOY, replace(EXPERTS, layers=EXPERTS.layers[:1] * 2)], ids=["dense", "experts"]
)
def test_what_is_stacked_is_released_before_the_next_is(cfg: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    params = draw(cfg)
    whole = stack_group(params["layers"])
    seen = []

    def stack(group: list[dict[str, Any]]) -> dict[str, Any]:
        assert [ref() for ref in seen if ref() is not None] == []
        seen.extend(map(weakref.ref, jax.tree.leaves(group)))
        return stack_group(group)

    monkeypatch.setattr(decoder, "stack_group", stack)
    monkeypatch.setattr(decoder, "_is_on_host", lambda leaf: False)
    (got,) = stack_layers(params, [2])["stacks"]
    assert len(seen) == len(jax.tree.leaves(param_specs(cfg)["layers"], is_leaf=is_spec))
    jax.tree.map(np.testing.assert_array_equal, got, whole)
