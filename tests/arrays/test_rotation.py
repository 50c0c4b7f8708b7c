"""Rotations: their own inverse, alike on host and device, and nothing to a product that both sides share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize, linear, take_rows
from jaxinfer.arrays.quantized import abstract, fit_format
from jaxinfer.arrays.rotation import block_size, hadamard, rotate, rotate_host
from jaxinfer.arrays.rounding import quantize, requantize
from jaxinfer.arrays.specs import ParamSpec

FLOAT32 = jnp.dtype(jnp.float32)
# Inputs, and blocks of them: one run, several, a run of two factors, blocks beside each other.
BLOCKS = [(64, 64), (576, 576), (576, 64), (80, 80), (1536, 128), (2048, 2048), (640, 640), (768, 256)]


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("num_in", "block"), BLOCKS)
def test_twice_is_nothing_and_lengths_stay(num_in: int, block: int):
    x = draw(3, num_in)
    y = np.asarray(rotate(jnp.asarray(x), block))
    np.testing.assert_allclose(rotate(jnp.asarray(y), block), x, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    np.testing.assert_allclose(rotate_host(x, block), y, atol=1e-5)


@pytest.mark.parametrize(("num_in", "block"), BLOCKS)
def test_a_product_of_rotated_sides_is_the_product(num_in: int, block: int):
    x, w = draw(5, num_in), draw(7, num_in)[::-1].copy()
    y = np.asarray(rotate(jnp.asarray(x), block), np.float64) @ rotate_host(w, block).astype(np.float64).T
    want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(y / np.abs(want).max(), want / np.abs(want).max(), atol=1e-5)


def test_one_large_number_is_spread_over_its_block():
    x = np.zeros((1, 1152), np.float32)
    x[0, 577] = 100
    y = np.abs(rotate_host(x, 576))
    assert (y[0, :576] == 0).all()
    assert (y[0, 576:] > 0).all()
    assert y.max() < 10  # 7/9 of 100 over the root of 64


def test_a_matrix_of_hadamard_is_one():
    matrix = hadamard(64).astype(int)
    assert (matrix @ matrix == 64 * np.eye(64)).all()
    assert (matrix == matrix.T).all()


@pytest.mark.parametrize(
    ("spec", "block"),
    [
        (ParamSpec((1536, 576), ("ffn", "embed")), 576),
        (ParamSpec((576, 1536), ("embed", "ffn")), 128),  # which a mesh cuts: 2, 4 ways stay whole
        (ParamSpec((576, 192), ("embed", "ffn")), 64),
        (ParamSpec((576, 9, 64), ("embed", "heads", None), num_in=2), 64),
        (ParamSpec((4, 24), ("ffn", "embed")), None),  # runs of 8: left as it is
    ],
)
def test_a_rotation_suits_its_weight(spec: ParamSpec, block: int | None):
    fmt = fit_format(spec, Format.parse("int8:rot"))
    assert fmt.rotation == block
    assert fit_format(spec, fmt) == fmt
    assert abstract(spec, fmt).format == fmt


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"576 inputs .* cannot be rotated by 128; take int8:rot"):
        fit_format(ParamSpec((8, 576), (None, "embed")), Format.parse("int8:r128"))
    with pytest.raises(ValueError, match="cannot be rotated by 8"):
        fit_format(ParamSpec((8, 576), (None, "embed")), Format.parse("int8:r8"))
    assert block_size(1000, is_cut=False) is None


@pytest.mark.parametrize("fmt", ["int8:rot", "int8:g32:rot", "int8:g32:zero:rot"])
def test_rows_with_outliers_lose_less(fmt: str):
    """And a table of them gives its rows back as they were."""
    spec = ParamSpec((48, 576), ("vocab", "embed"))
    x, w = draw(6, 576), draw(48, 576) * np.linspace(0.1, 1, 576, dtype=np.float32)
    x[:, 100] *= 200
    want, errors = x @ w.T, {}
    for name in (fmt, fmt.replace(":rot", "")):
        made = jax.tree.map(jnp.asarray, quantize(w, spec, Format.parse(name)))
        for text in ("weights=int8,act=int8,compute=float32", "weights=int8,compute=float32"):
            y = jax.jit(linear, static_argnums=2)(jnp.asarray(x), made, Policy.parse(text))
            errors[name, text] = np.abs(np.asarray(y) - want).max() / np.abs(want).max()
        wide = np.asarray(dequantize(made, FLOAT32))
        np.testing.assert_allclose(wide, w, atol=0.04)
        np.testing.assert_allclose(take_rows(made, jnp.array([5, 0]), FLOAT32), wide[[5, 0]], atol=1e-6)
    rounded = "weights=int8,act=int8,compute=float32"
    assert errors[fmt, rounded] < errors[fmt.replace(":rot", ""), rounded] / 2
    assert max(error for (_, text), error in errors.items() if text != rounded) < 0.01


def test_codes_under_given_scales_are_of_rotated_numbers():
    w = draw(8, 576)
    made = quantize(w, ParamSpec(w.shape, (None, None)), Format.parse("int8:rot"))
    np.testing.assert_array_equal(requantize(w, made).values, made.values)
