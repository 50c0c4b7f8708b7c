"""A mesh's logits are one device's, and what crosses devices is what must."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.sharding import num_shards, parse_mesh, partition
from jaxinfer.arrays.specs import ParamSpec, is_spec, path_name
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, NormConfig, RopeConfig
from jaxinfer.model.decoder import Static, param_specs, stack_sizes
from jaxinfer.model.layout import Layout, lay_out
from jaxinfer.steps.compiled import Shape, StepTable
from jaxinfer.steps.state import make_state, stack_params
from jaxinfer.steps.steps import PrefillRows

ROWS, TOKENS, PAGE = 4, 8, 4
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def llama(
    heads: tuple[int, int] = (8, 4), num_layers: int = 2, vocab_size: int = 61, **fields: Any
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        d_model=32,
        max_len=64,
        layers=(LayerKind(),) * num_layers,
        attention=AttentionConfig(*heads, 8, 8**-0.5),
        mlp=MlpConfig(40),
        ropes=(RopeConfig(1e4, 8),),
        **fields,
    )


def gemma(heads: tuple[int, int] = (6, 2)) -> ModelConfig:
    """Gemma 3's form: two kinds of layers, norms around everything, tied and scaled embeddings."""
    cfg = llama(heads, tied=True, embed_scale=32**0.5, norm=NormConfig(post=True), final_softcap=30.0)
    return replace(
        cfg,
        layers=(LayerKind(window=4, rope=0), LayerKind(rope=1)),
        attention=replace(cfg.attention, qk_norm="head"),
        mlp=MlpConfig(40, activation="gelu_tanh"),
        ropes=(RopeConfig(1e4, 8), RopeConfig(1e6, 8)),
    )


def mixture(heads: tuple[int, int] = (8, 4)) -> ModelConfig:
    """Qwen3-MoE's form."""
    cfg = llama(heads)
    return replace(
        cfg,
        layers=(LayerKind(moe=True),) * 2,
        attention=replace(cfg.attention, qk_norm="head"),
        mlp=MlpConfig(40, num_experts=8, experts_per_token=2, expert_dim=24),
    )


def make_params(cfg: ModelConfig, policy: Policy, layout: Layout | None) -> Any:
    rng = np.random.default_rng(0)

    def leaf(path: Any, spec: ParamSpec) -> Any:
        x = rng.normal(0, 0.3, spec.shape).astype(np.float32)
        fmt = policy.format_of(path_name(path), spec)
        w = x.astype(fmt.dtype) if fmt.is_plain else quantize(x, spec, fmt)
        if layout is None:
            return jax.tree.map(jnp.asarray, w)
        mesh = layout.mesh

        def put(part: np.ndarray) -> jax.Array:
            return jax.device_put(part, NamedSharding(mesh, partition(spec.axes, part.shape)))

        return jax.tree.map(put, layout.fill(spec, w))

    return jax.tree_util.tree_map_with_path(leaf, param_specs(cfg), is_leaf=is_spec)


def run(cfg: ModelConfig, policy_text: str, mesh_text: str, size: int = 1) -> tuple[np.ndarray, Any]:
    """Returns the logits after four prompts of different lengths, and the executable."""
    policy, mesh = Policy.parse(policy_text), parse_mesh(mesh_text)
    layout = lay_out(cfg, policy, mesh) if mesh else None
    num = num_shards("rows", mesh=mesh) if mesh else 1
    sizes = stack_sizes(cfg, size, policy)
    pages = ROWS * TOKENS // PAGE // num
    state = make_state(cfg, policy, sizes, (pages, PAGE), (ROWS, 32), layout)
    params = stack_params(make_params(cfg, policy, layout), sizes, layout)
    static = Static(layout.local if layout else cfg, policy, "blocked", 64)
    table = StepTable(static, state.shapes, state.cache, state.slots, mesh=mesh)
    shape = Shape(0, (ROWS, TOKENS), TOKENS // PAGE)
    compiled = table.lower(shape).compile()
    rng = np.random.default_rng(1)
    packed = np.zeros((ROWS, 4 + TOKENS + shape.width), np.int32)
    for i in range(ROWS):
        packed[i, :4] = i, 0, TOKENS - i, -1
        packed[i, 4 : 4 + TOKENS] = rng.integers(0, cfg.vocab_size, TOKENS)
        packed[i, -shape.width :] = np.arange(shape.width) + (i * shape.width) % pages
    ahead, *_ = compiled(params, state.cache, state.slots, table.put(PrefillRows(packed), "rows"))
    logits = np.asarray(ahead[0].logits)
    if num > 1 and logits.shape[0] > ROWS:  # a share of one row is filled up to two
        logits = logits.reshape(num, -1, logits.shape[1])[:, : ROWS // num].reshape(ROWS, -1)
    return logits[:, : cfg.vocab_size], compiled


def count(compiled: Any) -> dict[str, int]:
    text = compiled.as_text()
    return {name: found for name in COLLECTIVES if (found := len(re.findall(rf" {name}(?:-start)?\(", text)))}


@pytest.mark.parametrize(
    ("heads", "meshes"),
    [
        ((8, 4), ("tensor=2", "tensor=8")),
        ((8, 8), ("tensor=4,data=2",)),
        ((12, 4), ("tensor=8",)),
        ((9, 3), ("tensor=2", "tensor=4")),
        ((8, 2), ("tensor=4", "data=4")),
        ((6, 2), ("tensor=4", "tensor=2,data=2")),
    ],
    ids=str,
)
def test_heads_that_divide_and_that_do_not_give_the_same_logits(
    heads: tuple[int, int], meshes: tuple[str, ...]
):
    wanted, _ = run(llama(heads), "float32", "")
    for number, mesh in enumerate(meshes):
        got, compiled = run(llama(heads), "float32", mesh, 1 + number % 2)
        np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=mesh)
        assert count(compiled).keys() <= {"all-reduce"}


@pytest.mark.parametrize(
    ("cfg", "meshes"),
    [
        (gemma(), ("tensor=4", "tensor=2,data=2")),
        (mixture(), ("tensor=2,expert=2", "expert=4", "data=2,expert=2,tensor=2")),
    ],
    ids=["gemma", "mixture"],
)
def test_families_give_the_same_logits(cfg: ModelConfig, meshes: tuple[str, ...]):
    wanted, _ = run(cfg, "float32", "")
    for number, mesh in enumerate(meshes):
        got, _ = run(cfg, "float32", mesh, 1 + number % 2)
        np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=mesh)


@pytest.mark.parametrize("policy", ["weights=int4:g8,kv=int8", "w8a16,kv=int4", "weights=fp8,kv=fp8"])
def test_codes_over_a_mesh_are_the_same_codes(policy: str):
    cfg = llama((9, 3))
    wanted, _ = run(cfg, policy, "")
    got, _ = run(cfg, policy, "tensor=2,data=2")
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize("policy", ["weights=int8:rot,kv=int8", "w8a8"])
def test_rotations_stay_on_their_device(policy: str):
    """48 inputs of down in blocks of 16: a share of two devices is filled up to two blocks."""
    cfg = replace(llama((9, 3)), mlp=MlpConfig(48))
    mesh = parse_mesh("tensor=2,data=2")
    assert mesh is not None
    assert lay_out(cfg, Policy.parse(policy), mesh).whole.mlp.ffn_dim == 64
    wanted, _ = run(cfg, policy, "")
    got, _ = run(cfg, policy, "tensor=2,data=2")
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_two_sums_a_layer_cross_and_one_for_the_embedding():
    _, compiled = run(llama(num_layers=5), "float32", "tensor=8")
    assert count(compiled) == {"all-reduce": 2 * 5 + 1}
    _, compiled = run(llama(num_layers=5), "float32", "tensor=8", 5)
    assert count(compiled) == {"all-reduce": 2 + 1}  # a scan's body, and the embedding
