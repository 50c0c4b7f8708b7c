"""Rotary embedding against transformers' own numbers, and what a rotation must be."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import RopeConfig
from jaxinfer.model.rope import apply_rope, inv_freq, rotary

STORIES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "rope.json").read_text())


def read_story(story: dict[str, Any]) -> RopeConfig:
    fields = {k: v for k, v in story.items() if k not in ("length", "inv_freq", "attention")}
    extra = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.pop("extra", {}).items()}
    return RopeConfig(**fields, extra=tuple(sorted(extra.items())))


@pytest.mark.parametrize("story", STORIES, ids=lambda s: f"{s['kind']}-{s['rotary_dim']}-{s.get('length')}")
def test_trap_19_20_frequencies_are_those_of_transformers(story):
    frequencies, factor = inv_freq(read_story(story), story.get("length"))
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, story["inv_freq"], rtol=1e-6)
    assert factor == pytest.approx(story["attention"], rel=1e-6)


def test_trap_20_yarn_keeps_fast_dimensions_and_scales_attention():
    yarn = RopeConfig(10_000.0, 64, "yarn", factor=4.0, original_max_len=4096)
    frequencies, factor = inv_freq(yarn)
    plain, _ = inv_freq(RopeConfig(10_000.0, 64))
    assert factor == pytest.approx(1.1386, abs=1e-4)
    np.testing.assert_array_equal(frequencies[:2], plain[:2])
    np.testing.assert_allclose(frequencies[-1], plain[-1] / 4, rtol=1e-6)


def test_freq_factors_divide_every_frequency():
    divisors = (1.0, 1.0, 2.0, 8.0)
    frequencies, factor = inv_freq(RopeConfig(10_000.0, 8, extra=(("freq_factors", divisors),)))
    plain, _ = inv_freq(RopeConfig(10_000.0, 8))
    np.testing.assert_array_equal(frequencies, plain / np.array(divisors, np.float32))
    assert factor == 1.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_that_depend_on_length_are_one_table_within_the_trained_length(kind):
    extra = (("long_factor", (4.0,) * 8), ("short_factor", (1.0,) * 8)) if kind == "longrope" else ()
    rope = RopeConfig(10_000.0, 16, kind, factor=2.0, original_max_len=32, extra=extra)
    for length in (1, 31, 32):
        np.testing.assert_array_equal(inv_freq(rope, length)[0], inv_freq(rope)[0])
    assert (inv_freq(rope, 33)[0][1:] < inv_freq(rope)[0][1:]).all()


def test_a_kind_without_its_trained_length_is_refused():
    with pytest.raises(ValueError, match=r"original_max_len is None; kind 'llama3'"):
        inv_freq(RopeConfig(10_000.0, 16, "llama3", factor=8.0))


def test_rotary_counts_from_zero_and_carries_the_factor():
    cos, sin = rotary(jnp.array([[0, 1], [5, 9]], jnp.int32), np.array([1.0, 0.5], np.float32), 2.0)
    assert cos.shape == sin.shape == (2, 2, 2)
    assert cos.dtype == jnp.float32
    np.testing.assert_array_equal(cos[0, 0], [2.0, 2.0])
    np.testing.assert_allclose(sin[1, 1], 2 * np.sin([9.0, 4.5]), atol=1e-6)


def test_apply_rope_turns_halves_together_and_passes_the_tail():
    x = jnp.arange(12, dtype=jnp.float32).reshape(1, 1, 2, 6)
    cos, sin = rotary(jnp.array([[3]], jnp.int32), np.array([1.0, 0.1], np.float32), 1.0)
    y = np.asarray(apply_rope(x, cos, sin))
    for head in range(2):
        a, b, tail = x[0, 0, head, :2], x[0, 0, head, 2:4], x[0, 0, head, 4:]
        turned = (a + 1j * b) * np.exp(1j * np.array([3.0, 0.3]))
        np.testing.assert_allclose(y[0, 0, head, :4], np.r_[turned.real, turned.imag], rtol=1e-6)
        np.testing.assert_array_equal(y[0, 0, head, 4:], tail)


def test_apply_rope_computes_in_float32_and_returns_the_dtype():
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    cos, sin = rotary(jnp.array([[1]], jnp.int32), np.array([1.0, 0.5], np.float32), 1.0)
    y = apply_rope(x, cos, sin)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, apply_rope(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))


def test_scores_depend_on_the_distance_alone():
    q, k = np.random.RandomState(0).standard_normal((2, 1, 1, 16)).astype(np.float32)
    table = inv_freq(RopeConfig(10_000.0, 16))

    def score(i: int, j: int) -> float:
        turned = [
            apply_rope(jnp.asarray(x), *rotary(jnp.array([p], jnp.int32), *table))
            for x, p in ((q, i), (k, j))
        ]
        return float(jnp.vdot(*turned))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)
