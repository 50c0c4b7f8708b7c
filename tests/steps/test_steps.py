"""The pure steps: cached equals full, chunked equals whole, batch equals solo, stacked equals unrolled."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.specs import random_params
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, NormConfig, RopeConfig
from jaxinfer.model.cache import init_cache, page_bytes, token_slots, write_pages
from jaxinfer.model.decoder import Block, Static, param_specs, stack_layers, stack_sizes
from jaxinfer.steps.steps import decode, full_logits, prefill

LLAMA = ModelConfig(
    family="llama",
    vocab_size=97,
    d_model=32,
    max_len=128,
    layers=(LayerKind(),) * 3,
    attention=AttentionConfig(4, 2, 8, 8**-0.5),
    mlp=MlpConfig(48),
    ropes=(RopeConfig(1e4, 8),),
)
MODELS = {
    "llama": LLAMA,
    "windows, two ropes, sandwich norms, caps": replace(
        LLAMA,
        layers=(LayerKind(window=8, rope=1), LayerKind(), LayerKind(window=8, rope=1), LayerKind(rope=None)),
        attention=AttentionConfig(4, 1, 16, 0.2, softcap=10.0, qk_norm="head"),
        norm=NormConfig(post=True),
        ropes=(RopeConfig(1e6, 16), RopeConfig(1e4, 16)),
        tied=True,
        embed_scale=5.0,
        final_softcap=9.0,
    ),
    "learned positions, biases, layer norm": replace(
        LLAMA,
        layers=(LayerKind(rope=None),) * 2,
        attention=AttentionConfig(4, 4, 8, 8**-0.5, qkv_bias=True, out_bias=True),
        mlp=MlpConfig(48, "gelu_tanh", gated=False, bias=True),
        norm=NormConfig("layer"),
        ropes=(),
        learned_positions=True,
    ),
    "experts after a dense layer": replace(
        LLAMA,
        layers=(LayerKind(), LayerKind(moe=True), LayerKind(moe=True)),
        mlp=MlpConfig(48, num_experts=4, experts_per_token=2, expert_dim=16),
    ),
}
LENGTHS = np.array([40, 1, 17, 16, 33, 5, 31, 32])
FLOAT32 = Policy.parse("float32")
PREFILL = jax.jit(prefill, static_argnums=3, donate_argnums=1)
DECODE = jax.jit(decode, static_argnums=5, donate_argnums=1)
FULL = jax.jit(full_logits, static_argnums=1)


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def model(request) -> tuple[ModelConfig, dict[str, Any], np.ndarray, np.ndarray]:
    """A random model, tokens ``[8, 40]`` and the logits of whole prompts."""
    cfg = MODELS[request.param]
    params = random_params(param_specs(cfg), seed=3, dtype=jnp.dtype(jnp.float32), std=0.3)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (8, 40)).astype(np.int32)
    logits = FULL(stacked(cfg, params, 1), Static(cfg, FLOAT32), tokens, jnp.array(LENGTHS))
    return cfg, params, tokens, np.asarray(logits)


def stacked(cfg: ModelConfig, params: dict[str, Any], size: int) -> dict[str, Any]:
    return stack_layers(dict(params), stack_sizes(cfg, size))


def test_stack_sizes_hold_only_layers_of_one_structure():
    assert stack_sizes(MODELS["experts after a dense layer"], 9) == (1, 2)
    assert stack_sizes(LLAMA, 2) == (2, 1)
    assert stack_sizes(LLAMA, 1) == (1, 1, 1)
    ropes = (RopeConfig(1e4, 8), RopeConfig(1e4, 4))
    kinds = (LayerKind(), LayerKind(rope=None), LayerKind(rope=1), LayerKind(rope=1))
    assert stack_sizes(replace(LLAMA, layers=kinds, ropes=ropes), 9) == (2, 2)


@pytest.mark.parametrize("size", [2, 99])
def test_scanned_layers_equal_unrolled(model, size: int):
    cfg, params, tokens, logits = model
    got = FULL(stacked(cfg, params, size), Static(cfg, FLOAT32), tokens, jnp.array(LENGTHS))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got[row, :length], logits[row, :length], atol=2e-4)


@pytest.mark.parametrize("chunk", [16, 40])
def test_trap_18_chunks_and_decode_equal_whole_prompts(model, chunk: int):
    """Rows of mixed lengths, in chunks of 16 or whole, then token by token: last-token logits are the full ones."""
    cfg, params, tokens, logits = model
    static = Static(cfg, FLOAT32, context=48)
    weights = stacked(cfg, params, 2)
    pages = jnp.array(np.random.default_rng(1).permutation(24).reshape(8, 3).astype(np.int32))
    cache = init_cache(cfg, FLOAT32, stack_sizes(cfg, 2), 24, 16)
    prompt = np.maximum(LENGTHS - 4, 1)
    for start in range(0, 40, chunk):
        length = np.clip(prompt - start, 0, chunk).astype(np.int32)
        padded = np.zeros((8, chunk), np.int32)
        padded[:, : 40 - start] = tokens[:, start : start + chunk]
        block = Block(jnp.array(padded), jnp.full(8, start, jnp.int32), jnp.array(length), pages)
        got, cache = PREFILL(weights, cache, block, static)
        for row in np.flatnonzero((prompt > start) & (prompt <= start + chunk)):
            np.testing.assert_allclose(got[row], logits[row, prompt[row] - 1], atol=2e-4)
    for step in range(4):
        position = np.minimum(prompt + step, LENGTHS - 1).astype(np.int32)
        got, cache = DECODE(
            weights, cache, jnp.array(tokens[np.arange(8), position]), jnp.array(position), pages, static
        )
        for row in range(8):
            np.testing.assert_allclose(got[row], logits[row, position[row]], atol=2e-4)


def test_a_row_alone_equals_itself_in_a_batch(model):
    cfg, params, tokens, logits = model
    weights, static = stacked(cfg, params, 99), Static(cfg, FLOAT32)
    for row, length in enumerate(LENGTHS[:3]):
        got = FULL(weights, static, tokens[row : row + 1, :length], jnp.array([length]))
        np.testing.assert_allclose(got[0], logits[row, :length], atol=2e-4)


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("size", [1, 99])
def test_the_cache_is_updated_in_place(kv: str, size: int):
    """A step needs no second copy of the pool: its temporary memory is far below the pool's bytes.

    What it is given is what the formula of a page says.
    """
    cfg, policy = LLAMA, Policy.parse(f"kv={kv},compute=float32")
    sizes = stack_sizes(cfg, size)
    params = stacked(cfg, random_params(param_specs(cfg), seed=0, dtype=jnp.dtype(jnp.float32)), size)
    cache = init_cache(cfg, policy, sizes, 2048, 16)
    args = (jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((2, 8), jnp.int32))
    memory = DECODE.lower(params, cache, *args, Static(cfg, policy)).compile().memory_analysis()
    assert memory is not None
    pool = 2048 * page_bytes(cfg, policy, 16)
    assert pool == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    others = sum(leaf.nbytes for leaf in jax.tree.leaves((params, args)))
    assert memory.argument_size_in_bytes - others == pytest.approx(pool, rel=0.01)
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 4


def test_trap_15_a_write_out_of_range_is_dropped():
    pages = init_cache(LLAMA, FLOAT32, (2,), 3, 4)[0]
    ids = jnp.array([[-1], [3], [7], [1]])
    slots = token_slots(ids, jnp.zeros(4, jnp.int32), jnp.ones(4, jnp.int32), 1, pages).reshape(-1)
    ones = jnp.ones((4, 2, 8))
    for layer in (0, 1):
        written = np.asarray(write_pages(pages, layer, slots, ones, ones).k)
        assert written[layer, 1, 0].all()
        assert written.sum() == written[layer, 1, 0].size
