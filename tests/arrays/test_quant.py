"""The one matmul: every form of weight, every format, few rows and many, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import FEW_ROWS, linear

FORMS = {
    "matrix": ((24,), (40,)),
    "heads out": ((24,), (4, 10)),
    "heads in": ((4, 6), (40,)),
    "several both": ((2, 3, 4), (5, 2, 4)),
}
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}


def make(num_rows: int, form: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``[M, *in]`` and a weight ``[*out, in]``, float32."""
    rng = np.random.default_rng(seed)
    in_shape, out_shape = FORMS[form]
    x = rng.standard_normal((num_rows, *in_shape), np.float32)
    return x, rng.standard_normal((*out_shape, *in_shape), np.float32)


def exact(x: jax.Array, w: jax.Array) -> np.ndarray:
    """The product of the numbers as they are, in float64."""
    rows = np.asarray(x, np.float64)
    return np.tensordot(
        rows, np.asarray(w, np.float64), (range(1, rows.ndim), range(w.ndim - rows.ndim + 1, w.ndim))
    )


@pytest.mark.parametrize("num_rows", [1, 2, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TOLERANCE)
def test_products_are_those_of_float64(name: str, form: str, num_rows: int):
    """A result in the compute format is the exact one rounded once: sums are float32, not rounded on the way."""
    policy = Policy.parse(name)
    x, w = (jnp.asarray(a).astype(policy.compute_dtype) for a in make(num_rows, form))
    got = jax.jit(linear, static_argnums=2)(x, w, policy)
    wanted = exact(x, w)
    assert got.shape == wanted.shape
    assert got.dtype == policy.compute_dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=TOLERANCE[name], atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS + 1])
def test_a_float32_result_of_16_bit_operands_is_not_rounded(num_rows: int):
    policy = Policy.parse("bfloat16")
    x, w = (jnp.asarray(a).astype(jnp.bfloat16) for a in make(num_rows, "matrix"))
    got = linear(x, w, policy, jnp.dtype(jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact(x, w), rtol=1e-5, atol=1e-5)


def test_operands_are_cast_to_the_compute_format():
    x, w = map(jnp.asarray, make(3, "matrix"))
    policy = Policy.parse("weights=float32,kv=float32,compute=bfloat16")
    np.testing.assert_array_equal(
        linear(x, w, policy), linear(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), policy)
    )


@pytest.mark.parametrize("name", TOLERANCE)
def test_a_row_is_the_same_among_any_number_of_rows(name: str):
    """Within a rounding of the result: what shares the matmul with a row is not seen by it."""
    policy = Policy.parse(name)
    x, w = map(jnp.asarray, make(FEW_ROWS + 8, "matrix"))
    alone = np.asarray(linear(x[:1], w, policy), np.float64)
    for num_rows in (2, FEW_ROWS, FEW_ROWS + 8):
        among = np.asarray(linear(x[:num_rows], w, policy)[:1], np.float64)
        np.testing.assert_allclose(among, alone, rtol=2 * TOLERANCE[name], atol=1e-5)


def test_nothing_of_a_bad_row_reaches_its_neighbours():
    x, w = make(4, "matrix")
    x[1] = np.nan
    policy = Policy.parse("bfloat16")
    got = np.asarray(linear(jnp.asarray(x), jnp.asarray(w), policy), np.float32)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2, 3]]).all()
