"""How a model is filled up to lie over a mesh: which head lies where, and that what is added is nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize
from jaxinfer.arrays.quantized import abstract
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.sharding import AXES, num_shards, partition
from jaxinfer.arrays.specs import flatten_specs
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, RopeConfig
from jaxinfer.model.decoder import param_specs
from jaxinfer.model.layout import lay_out, place_heads

CFG = ModelConfig(
    family="llama",
    vocab_size=61,
    d_model=32,
    max_len=64,
    layers=(LayerKind(), LayerKind(moe=True)),
    attention=AttentionConfig(6, 2, 8, 8**-0.5, qkv_bias=True, qk_norm="head"),
    mlp=MlpConfig(40, num_experts=4, experts_per_token=2, expert_dim=24),
    ropes=(RopeConfig(1e4, 8),),
)


def mesh_of(**ways: int) -> Any:
    return AbstractMesh(tuple(ways.get(axis, 1) for axis in AXES), AXES)


@pytest.mark.parametrize(
    ("heads", "ways", "q", "kv"),
    [
        ((8, 4), 4, list(range(8)), [0, 1, 2, 3]),
        ((8, 2), 4, list(range(8)), [0, 0, 1, 1]),  # kv heads are there twice
        ((6, 2), 4, [0, 1, 2, -1, 3, 4, 5, -1], [0, 0, 1, 1]),
        ((9, 3), 2, [*range(9), -1, -1, -1], [0, 1, 2, -1]),  # a whole group of zeros
        ((9, 3), 8, [0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, -1, -1, -1, -1], [0, 0, 1, 1, 2, 2, -1, -1]),
    ],
)
def test_heads_lie_with_their_kv_head(heads: tuple[int, int], ways: int, q: list[int], kv: list[int]):
    got = place_heads(*heads, ways)
    assert [places.tolist() for places in got] == [q, kv]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_every_head_is_there_once_and_meets_its_own_kv_head(group: int, num_kv: int, ways: int):
    q, kv = place_heads(group * num_kv, num_kv, ways)
    assert len(q) % ways == 0
    assert len(kv) % ways == 0
    assert sorted(q[q >= 0]) == list(range(group * num_kv))
    each = len(q) // len(kv)
    met = np.repeat(kv, each)
    assert all(met[q >= 0] == q[q >= 0] // group)


@pytest.mark.parametrize("policy", ["float32", "weights=int4:g8", "w8a16", "weights=int4:g8:zero", "mxfp4w"])
@pytest.mark.parametrize("ways", [2, 4])
def test_filling_up_keeps_every_number_and_adds_zeros(policy: str, ways: int):
    cfg = CFG if policy != "mxfp4w" else replace(CFG, mlp=replace(CFG.mlp, ffn_dim=96, expert_dim=32))
    asked = Policy.parse("weights=mxfp4,embedding=int8" if policy == "mxfp4w" else policy)
    if policy == "mxfp4w":
        cfg = replace(cfg, attention=replace(cfg.attention, head_dim=32))
    layout = lay_out(cfg, asked, mesh_of(tensor=ways))
    rng = np.random.default_rng(0)
    filled = dict(flatten_specs(param_specs(layout.whole)))
    for path, spec in flatten_specs(param_specs(cfg)):
        fmt = asked.format_of(path, spec)
        x = rng.normal(0, 1, spec.shape).astype(np.float32)
        w: Any = x if fmt.is_plain else quantize(x, spec, fmt)
        got = layout.fill(spec, w)
        shapes = layout.fill(spec, abstract(spec, fmt))
        assert jax.tree.map(lambda a: a.shape, got) == jax.tree.map(lambda a: a.shape, shapes), path
        for part in jax.tree.leaves(got):
            cuts = partition(spec.axes, part.shape)
            whole = [
                size % ways == 0 for size, cut in zip(part.shape, cuts, strict=True) if cut == ("tensor",)
            ]
            assert all(whole), path
        before, after = (
            np.asarray(p if fmt.is_plain else dequantize(p, np.dtype("float32"))) for p in (w, got)
        )
        assert after.shape == filled[path].shape
        assert np.abs(after).sum() >= np.abs(before).sum() * (1 - 1e-6)
        index = [
            layout.places.get((axis or "", size), np.arange(size))
            for axis, size in zip(spec.axes, spec.shape, strict=True)
        ]
        mask = np.ix_(*(places >= 0 for places in index))
        zeros = np.ones(after.shape, bool)
        zeros[mask] = False
        assert not after[zeros].any()
        np.testing.assert_array_equal(after[mask], before[np.ix_(*(p[p >= 0] for p in index))])


def test_a_share_is_the_whole_divided():
    mesh = mesh_of(tensor=4, expert=2)
    layout = lay_out(CFG, Policy.parse("float32"), mesh)
    whole, local = layout.whole, layout.local
    assert (whole.attention.num_heads, whole.attention.num_kv_heads) == (8, 4)
    assert (local.attention.num_heads, local.attention.num_kv_heads) == (2, 1)
    assert (whole.vocab_size, local.vocab_size) == (128, 32)
    assert (local.mlp.ffn_dim, local.mlp.expert_dim, local.mlp.num_experts) == (10, 6, 4)
    assert num_shards("rows", mesh=mesh) == 2


@pytest.mark.parametrize(
    ("cfg", "ways", "says"),
    [
        (CFG, {"expert": 3}, "the model has 4 experts, which 3 do not divide"),
        (replace(CFG, mlp=MlpConfig(40)), {"expert": 2}, "the model has no experts"),
        (
            replace(CFG, attention=replace(CFG.attention, qk_norm="full")),
            {"tensor": 4},
            "norms all heads together",
        ),
    ],
)
def test_a_mesh_that_the_model_cannot_lie_over_is_refused(cfg: ModelConfig, ways: dict[str, int], says: str):
    with pytest.raises(ValueError, match=says):
        lay_out(cfg, Policy.parse("float32"), mesh_of(**ways))
