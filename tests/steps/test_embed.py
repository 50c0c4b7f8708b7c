"""Hidden states of prompts: what chunks leave adds up to what the whole stream says."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.model.cache import init_cache
from jaxinfer.model.decoder import Static, stack_sizes, stacked_shapes
from jaxinfer.steps.compiled import Compiled, StepTable
from jaxinfer.steps.embed import embed_prompt
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.slots import SlotCaps, init_slots
from jaxinfer.steps.steps import PrefillRows
from tests.steps.test_steps import LLAMA

WIDTH = 2


def packed_rows(lengths: list[int], num_tokens: int) -> PrefillRows:
    packed = np.zeros((len(lengths), 4 + num_tokens + WIDTH), np.int32)
    packed[:, 2] = lengths
    return PrefillRows(jnp.array(packed))


def test_last_and_sum_read_live_positions_only():
    lengths = [5, 1, 0, 3]
    x = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    padded = x.copy()
    for row, length in enumerate(lengths):
        padded[row, length:] = np.nan
    got = np.asarray(embed_prompt(jnp.array(padded), packed_rows(lengths, 5)))
    assert got.shape == (4, 2, 6)
    assert got.dtype == np.float32
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, 1], x[row, :length].sum(0), rtol=1e-6, atol=1e-6)
        if length:
            np.testing.assert_array_equal(got[row, 0], x[row, length - 1])


def test_a_narrow_stream_is_summed_in_float32():
    """A thousand ones and a half: bfloat16 would stand still at 256."""
    x = jnp.concatenate([jnp.ones((1, 1000, 1)), jnp.full((1, 1, 1), 0.5)], 1).astype(jnp.bfloat16)
    got = np.asarray(embed_prompt(x, packed_rows([1001], 1001)))
    np.testing.assert_array_equal(got[0, :, 0], [0.5, 1000.5])


def test_a_table_compiles_it_where_a_run_serves_it():
    cfg, policy = replace(LLAMA, layers=LLAMA.layers[:1]), Policy.parse("float32")
    sizes = stack_sizes(cfg, 1)
    params = stacked_shapes(cfg, policy, sizes)
    cache = jax.eval_shape(lambda: init_cache(cfg, policy, sizes, 4, 16))
    slots = jax.eval_shape(lambda: init_slots(2, 32, cfg.vocab_size, SlotCaps()))
    table = StepTable(Static(cfg, policy), params, cache, slots)
    shapes = [Shape(0, (2, 8), WIDTH), Shape(2, (2, 8), WIDTH), Shape(2, (0, 0), WIDTH)]
    name = "embed 2x8 over 2 pages"
    assert name not in table._wanted(shapes, ("greedy", "sample", "score"))
    wanted = table._wanted(shapes, ("greedy", "embed"))
    assert [one for one in wanted if one.startswith("embed")] == [name]
    with pytest.raises(KeyError, match=name):
        table.embed(shapes[0])
    # Compiled by itself, for the model's steps would take seconds.
    table.executables[name] = Compiled(wanted[name]().compile(), 0.0, 0)
    x = jnp.array(np.random.default_rng(1).normal(size=(2, 8, cfg.d_model)), policy.compute_dtype)
    rows = packed_rows([8, 3], 8)
    np.testing.assert_allclose(
        table.embed(shapes[1])(x, rows), jax.jit(embed_prompt)(x, rows), rtol=1e-6, atol=1e-6
    )
