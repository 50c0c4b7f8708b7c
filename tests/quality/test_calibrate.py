"""Whole models rounded layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import abstract, is_quantized
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import flatten_specs
from jaxinfer.model.decoder import Static, param_specs, stack_layers, stack_sizes, unembed
from jaxinfer.model.layers import norm
from jaxinfer.quality.calibrate import calibrate, embed_windows, pick_windows, run_layer
from jaxinfer.steps.steps import full_logits
from jaxinfer.weights.families import find_family, read_config
from jaxinfer.weights.load import load_params
from jaxinfer.weights.source import open_source
from tests.families.cases import make_checkpoint

FLOAT32 = Policy.parse("float32")
T = 20


def load(case: str, folder: Path) -> tuple[Any, Any]:
    source = open_source(make_checkpoint(case, folder))
    cfg, _ = read_config(source)
    family = find_family(source)
    recipes = family.mapping(cfg, "hf", source.tensors)
    params = load_params(source, param_specs(cfg), recipes, policy=FLOAT32, ignorable=family.ignorable("hf"))
    return cfg, params


def draw_windows(cfg: Any, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, cfg.vocab_size, (count, T)).astype(np.int32)


def logits_of(cfg: Any, params: Any, policy: Policy, windows: np.ndarray) -> np.ndarray:
    stacks = stack_layers(dict(params), stack_sizes(cfg, 1, policy))
    lengths = np.full(len(windows), T, np.int32)
    return np.asarray(
        jax.jit(full_logits, static_argnums=1)(stacks, Static(cfg, policy, context=T), windows, lengths)
    )


# Norms before and after, of heads and of all; positions learned; windows; experts.
@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt2", "olmo2", "qwen3_moe"])
def test_layer_by_layer_is_the_decoder(case: str, tmp_path: Path):
    cfg, params = load(case, tmp_path)
    static, windows = Static(cfg, FLOAT32, context=T), draw_windows(cfg, 2)
    x = embed_windows(params, static, windows)
    for layer, kind in zip(params["layers"], cfg.layers, strict=True):
        x, _ = run_layer(x, layer, kind, static)
    found = unembed(params, static, norm(x.reshape(2 * T, -1), params["final_norm"], cfg.norm))
    np.testing.assert_allclose(
        np.asarray(found).reshape(2, T, -1), logits_of(cfg, params, FLOAT32, windows), atol=1e-4
    )


@pytest.mark.parametrize("case", ["llama_tied", "gpt2", "qwen3_moe"])
def test_rounded_models_have_the_formats_and_stray_less(case: str, tmp_path: Path):
    policy = Policy.parse("weights=int4:g32,head=int4:g32,layers.0.attn=int8,compute=float32")
    cfg, params = load(case, tmp_path)
    windows, specs, ticks = draw_windows(cfg, 64), param_specs(cfg), []
    plain = {
        path: leaf
        if (fmt := policy.format_of(path, spec)).is_plain
        else quantize(np.asarray(leaf), spec, fmt)
        for (path, spec), leaf in zip(flatten_specs(specs), jax.tree.leaves(params), strict=True)
    }
    nearest = jax.tree.unflatten(jax.tree.structure(params), list(plain.values()))
    exact = logits_of(cfg, params, FLOAT32, windows[:4])
    made = calibrate(cfg, params, policy, windows, lambda: ticks.append(1))
    assert len(ticks) == cfg.num_layers
    leaves = jax.tree.leaves(made, is_leaf=is_quantized)
    for (path, spec), leaf in zip(flatten_specs(specs), leaves, strict=True):
        wanted = abstract(spec, policy.format_of(path, spec))
        assert jax.tree.structure(leaf) == jax.tree.structure(wanted), path
        for part, like in zip(jax.tree.leaves(leaf), jax.tree.leaves(wanted), strict=True):
            assert (part.shape, part.dtype) == (like.shape, like.dtype), path
    strayed = [
        np.square(logits_of(cfg, jax.tree.map(jnp.asarray, one), policy, windows[:4]) - exact).mean()
        for one in (made, nearest)
    ]
    assert strayed[0] < 0.97 * strayed[1]  # inputs drawn at random have little in common


@pytest.mark.parametrize("bos_id", [None, 7])
@pytest.mark.parametrize("count", [1, 30, 100])
def test_windows_are_spread_over_the_text(bos_id: int | None, count: int):
    ids = [7, *range(100, 100 + count)]
    windows = pick_windows(ids, 10, 3, bos_id)
    assert windows.shape[0] <= 3
    assert windows.shape[1] <= 10
    assert windows[0, 0] == 7
    assert windows[-1, -1] == ids[-1]
    if bos_id is not None:
        assert (windows[:, 0] == 7).all()
