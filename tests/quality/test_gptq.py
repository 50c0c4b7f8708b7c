"""Weights rounded for what they multiply."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.quant import dequantize
from jaxinfer.arrays.rounding import quantize, requantize, snap
from jaxinfer.arrays.specs import ParamSpec
from jaxinfer.quality.gptq import round_weight, search_scales

FORMATS = [
    "int4:g32",
    "int4:g16:zero",
    "int4:channel",
    "int8",
    "int8:g16:f16",
    "fp8",
    "e5m2:g64",
    "mxfp4",
    "nvfp4",
]
OUT, IN, SEEN = 24, 128, 400


def draw() -> tuple[np.ndarray, np.ndarray]:
    """Returns a weight, and the moment of inputs that go together and differ in size."""
    stream = np.random.default_rng(0)
    w = stream.standard_normal((OUT, IN)).astype(np.float32)
    mix = stream.standard_normal((IN, IN)) * np.exp(stream.standard_normal(IN))
    x = stream.standard_normal((SEEN, IN)) @ mix
    return w, x.T @ x


def read(made: Any) -> np.ndarray:
    return np.asarray(dequantize(made, jnp.dtype(jnp.float32)))


def loss(made: Any, w: np.ndarray, moment: np.ndarray) -> float:
    error = read(made) - w
    return float(np.einsum("oi,ij,oj->", error, moment, error))


@pytest.mark.parametrize("name", FORMATS)
def test_products_stray_less_than_when_rounded_to_nearest(name: str):
    fmt, (w, moment) = Format.parse(name), draw()
    plain, made = quantize(w, ParamSpec(w.shape, (None, None)), fmt), round_weight(w, moment, fmt)
    assert jax.tree.structure(made) == jax.tree.structure(plain)
    shapes = [[(p.shape, p.dtype) for p in jax.tree.leaves(one)] for one in (made, plain)]
    assert shapes[0] == shapes[1]
    assert loss(made, w, moment) < 0.4 * loss(plain, w, moment)


@pytest.mark.parametrize("name", FORMATS)
def test_searched_scales_are_no_worse_for_any_group(name: str):
    fmt, (w, _) = Format.parse(name), draw()
    importance = np.exp(np.random.default_rng(1).standard_normal(IN)).astype(np.float32)
    plain, made = quantize(w, ParamSpec(w.shape, (None, None)), fmt), search_scales(w, importance, fmt)
    errors = [
        (((read(one) - w) ** 2) * importance).reshape(OUT, -1, fmt.group or IN).sum(-1)
        for one in (made, plain)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_inputs_that_were_never_seen_stay_finite(name: str):
    fmt, (w, moment) = Format.parse(name), draw()
    w[0], w[:, :32] = 0, 0
    moment[:, -16:] = moment[-16:] = 0
    made = read(round_weight(w, moment, fmt))
    assert np.isfinite(made).all()
    assert not made[0].any()
    nothing = read(round_weight(w, np.zeros_like(moment), fmt))
    assert np.isfinite(nothing).all()


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_of_codes_come_back_under_their_own_scales(name: str):
    fmt, (w, _) = Format.parse(name), draw()
    plain = quantize(w, ParamSpec(w.shape, (None, None)), fmt)
    again = requantize(read(plain), plain)
    np.testing.assert_array_equal(read(again), read(plain))
    np.testing.assert_array_equal(again.scale, plain.scale)


def test_long_weights_are_rounded_in_parts_alike(monkeypatch: pytest.MonkeyPatch):
    fmt, (w, moment) = Format.parse("int4:g32"), draw()
    whole = round_weight(w, moment, fmt)
    monkeypatch.setattr("jaxinfer.quality.gptq._NUMBERS", 5 * IN)
    for part, other in zip(
        jax.tree.leaves(round_weight(w, moment, fmt)), jax.tree.leaves(whole), strict=True
    ):
        np.testing.assert_array_equal(part, other)


@pytest.mark.parametrize("name", ["int4", "int4:zero", "int8", "fp8", "e5m2", "mxfp4"])
def test_snap_keeps_what_codes_stand_for_and_saturates(name: str):
    fmt = Format.parse(name)
    kept = snap(np.linspace(-500, 500, 4001, dtype=np.float32), fmt)
    np.testing.assert_array_equal(snap(kept, fmt), kept)
    assert np.abs(kept).max() <= (fmt.largest if not fmt.offset else 15)
