"""A mesh's logits are one device's, and what crosses devices is what must."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.sharding import num_shards, parse_mesh
from jaxinfer.arrays.specs import ParamSpec, is_spec, path_name
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, NormConfig, RopeConfig
from jaxinfer.model import moe
from jaxinfer.model.decoder import Static, param_specs, stack_sizes
from jaxinfer.model.layout import Layout, lay_out
from jaxinfer.steps.compiled import StepTable
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.state import make_state, stack_params
from jaxinfer.steps.steps import PrefillRows
from jaxinfer.weights.load import fit_sharding

ROWS, TOKENS, PAGE = 8, 8, 4
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


def gemma(heads: tuple[int, int] = (6, 2), num_layers: int = 2) -> ModelConfig:
    """Gemma 3's form: two kinds of layers, norms around everything, tied and scaled embeddings."""
    cfg = llama(heads, tied=True, embed_scale=32**0.5, norm=NormConfig(post=True), final_softcap=30.0)
    kinds = LayerKind(window=4, rope=0), LayerKind(window=4, rope=0), LayerKind(rope=1)
    return replace(
        cfg,
        layers=tuple(kinds[i % 3] for i in range(num_layers)),
        attention=replace(cfg.attention, qk_norm="head"),
        mlp=MlpConfig(40, activation="gelu_tanh"),
        ropes=(RopeConfig(1e4, 8), RopeConfig(1e6, 8)),
    )


def mixture(heads: tuple[int, int] = (8, 4), num_layers: int = 2) -> ModelConfig:
    """Qwen3-MoE's form."""
    cfg = llama(heads)
    return replace(
        cfg,
        layers=(LayerKind(moe=True),) * num_layers,
        attention=replace(cfg.attention, qk_norm="head"),
        mlp=MlpConfig(40, num_experts=8, experts_per_token=2, expert_dim=24),
    )


def mixtral(heads: tuple[int, int] = (8, 4), num_layers: int = 2) -> ModelConfig:
    cfg = mixture(heads, num_layers)
    return replace(cfg, attention=replace(cfg.attention, qk_norm="none"))


def make_params(cfg: ModelConfig, policy: Policy, layout: Layout | None) -> Any:
    rng = np.random.default_rng(0)

    def draw(path: Any, spec: ParamSpec) -> Any:
        x = rng.normal(0, 0.3, spec.shape).astype(np.float32)
        fmt = policy.format_of(path_name(path), spec)
        w = x.astype(fmt.dtype) if fmt.is_plain else quantize(x, spec, fmt)
        return w if layout is None else layout.fill(spec, w)

    specs = param_specs(cfg)
    drawn = jax.tree_util.tree_map_with_path(draw, specs, is_leaf=is_spec)
    if layout is None:
        return jax.tree.map(jnp.asarray, drawn)

    def put(where: NamedSharding, leaf: Any) -> Any:
        return jax.tree.map(lambda part: jax.device_put(part, fit_sharding(where, part.shape)), leaf)

    return jax.tree.map(put, layout.shardings(specs), drawn)


def run(cfg: ModelConfig, policy_text: str, mesh_text: str, size: int = 1) -> tuple[np.ndarray, Any]:
    """Returns the logits after prompts of different lengths, and the executable."""
    policy, mesh = Policy.parse(policy_text), parse_mesh(mesh_text)
    layout = lay_out(cfg, policy, mesh) if mesh else None
    num = num_shards("rows", mesh=mesh) if mesh else 1
    sizes = stack_sizes(cfg, size, policy, layout.deal if layout else ())
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


# Each mesh of powers of two up to eight devices once (19 without experts, 15 with), and some of 3, 5, 6 and 7; each
# number of layers once, families in turn, and each pair of heads with two of them or three.
@pytest.mark.parametrize(
    ("make", "heads", "num_layers", "meshes"),
    [
        (llama, (8, 4), 1, ("tensor=2", "tensor=8", "data=8")),
        (gemma, (6, 2), 2, ("stage=2", "tensor=4", "data=2,tensor=4")),
        (mixture, (12, 4), 3, ("expert=2", "expert=8", "tensor=4,expert=2", "stage=2,expert=4")),
        (llama, (9, 3), 4, ("stage=4", "tensor=2,stage=4", "data=2,tensor=2,stage=2")),
        (gemma, (8, 8), 5, ("tensor=2,stage=2", "data=2,stage=4", "stage=5")),
        (mixtral, (8, 2), 6, ("expert=4", "data=2,expert=4", "tensor=2,expert=2", "data=2,stage=2,expert=2")),
        (llama, (6, 2), 7, ("data=2,stage=2", "tensor=4,stage=2", "stage=7")),
        (gemma, (12, 4), 8, ("data=2", "stage=8", "data=4,tensor=2")),
        (
            mixture,
            (9, 3),
            9,
            ("stage=2,expert=2", "data=4,expert=2", "tensor=2,expert=4", "stage=4,expert=2"),
        ),
        (llama, (8, 8), 10, ("data=2,tensor=2", "data=4,stage=2", "tensor=3,stage=2")),
        (gemma, (8, 2), 11, ("data=4", "stage=3", "tensor=3")),
        (mixtral, (8, 4), 12, ("data=2,expert=2", "tensor=2,stage=2,expert=2", "data=2,tensor=2,expert=2")),
        (llama, (12, 4), 13, ("tensor=4", "tensor=2,stage=3")),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_mesh_gives_the_logits_of_one_device_and_gathers_no_weights(
    make: Callable[..., ModelConfig], heads: tuple[int, int], num_layers: int, meshes: tuple[str, ...]
):
    cfg = make(heads, num_layers)
    wanted, _ = run(cfg, "float32", "", 16)
    for number, mesh in enumerate(meshes):
        # One scan, or layers unrolled where they are few, or several scans.
        size = 16 if number % 2 == 0 else 1 if num_layers < 4 else 4
        got, compiled = run(cfg, "float32", mesh, size)
        np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=mesh)
        crossing = count(compiled)
        assert crossing.get("collective-permute", 0) == ("stage" in mesh)
        if "expert" not in mesh:
            assert crossing.keys() <= {"all-reduce", "collective-permute"}


@pytest.mark.parametrize("make", [mixture, mixtral])
def test_tokens_that_are_sent_to_their_experts_give_the_same_logits(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., ModelConfig]
):
    wanted, _ = run(make(), "float32", "")
    monkeypatch.setattr(moe, "FEW_TOKENS", 1)
    got, compiled = run(make(), "float32", "expert=8")
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert count(compiled).keys() == {"all-to-all", "all-reduce"}  # which has the number of rounds


@pytest.mark.parametrize("policy", ["weights=int4:g8,kv=int8", "w8a16,kv=int4", "weights=fp8,kv=fp8"])
def test_codes_over_a_mesh_are_the_same_codes(policy: str):
    """Three layers on two stages: one is filled up with codes of zero."""
    cfg = llama((9, 3), 3)
    wanted, _ = run(cfg, policy, "")
    got, _ = run(cfg, policy, "tensor=2,data=2,stage=2")
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


def test_stages_hand_on_and_meet_for_the_vocabulary_only():
    _, compiled = run(llama(num_layers=5), "float32", "stage=2")
    assert count(compiled) == {"collective-permute": 1, "all-reduce": 2}  # a tick; embedding and last tokens
    _, compiled = run(llama(num_layers=5), "float32", "tensor=2,stage=2")
    assert count(compiled) == {"collective-permute": 1, "all-reduce": 2 * 3 + 2}  # three places of layers


def test_a_layer_and_its_pages_lie_on_the_devices_of_its_stage_alone():
    cfg, policy = llama(num_layers=3), Policy.parse("float32")
    mesh = parse_mesh("tensor=2,stage=2")
    assert mesh is not None
    layout = lay_out(cfg, policy, mesh)
    assert layout.deal == ((0, 1), (2, -1))
    loaded = make_params(cfg, policy, layout)
    for layer, stage in enumerate((0, 0, 1)):
        own = set(mesh.devices[0, stage].flat)
        assert all(leaf.sharding.device_set == own for leaf in jax.tree.leaves(loaded["layers"][layer]))
    up = [np.asarray(layer["mlp"]["up"]) for layer in loaded["layers"]]
    sizes = stack_sizes(cfg, 4, policy, layout.deal)
    state = make_state(cfg, policy, sizes, (16, PAGE), (ROWS, 32), layout)
    stacked = stack_params(loaded, sizes, layout)
    for described, leaf in zip(jax.tree.leaves(state.shapes), jax.tree.leaves(stacked), strict=True):
        assert described.shape == leaf.shape
        assert leaf.sharding.is_equivalent_to(described.sharding, leaf.ndim)
    np.testing.assert_array_equal(stacked["stacks"][0]["mlp"]["up"], np.stack([*up, 0 * up[0]]))
    for leaf in jax.tree.leaves((stacked["stacks"], state.cache)):
        assert {len(shard.data) for shard in leaf.addressable_shards} == {2}
