"""The one matmul: every form of weight, every format, few rows and many, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import FEW_ROWS, dequantize, linear, round_rows, take_rows
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec

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


CODES = """int8 int8:zero int8:g32 int8:g32:zero fp8_e4m3 fp8_e5m2 fp8_e4m3:g32 int4:channel int4:g8 int4:g32
int4:g32:zero mxfp4 nvfp4"""
CODED = {text: Format.parse(text) for text in CODES.split()}
CODED_FORMS = {"matrix": ((24,), (96,)), "heads out": ((4, 6), (64,)), "heads in": ((24,), (3, 32))}


def make_coded(fmt: Format, num_rows: int, form: str) -> tuple[jax.Array, Quantized]:
    """Rows ``[M, *in]`` with one of zeros, and a weight of codes whose outputs differ a thousandfold."""
    rng = np.random.default_rng(1)
    out_shape, in_shape = CODED_FORMS[form]
    x = rng.standard_normal((num_rows, *in_shape), np.float32)
    x[2:3] = 0
    w = rng.standard_normal((*out_shape, *in_shape), np.float32)
    w *= 10.0 ** rng.integers(-1, 3, (out_shape[0], *[1] * (w.ndim - 1)))
    spec = ParamSpec(w.shape, (None,) * w.ndim, num_in=len(in_shape))
    return jnp.asarray(x), jax.tree.map(jnp.asarray, quantize(w, spec, fmt))


def rounded(x: jax.Array, act: str) -> jax.Array:
    """Rows as a format of activations leaves them, float32."""
    if act == "compute":
        return x
    codes, scale = round_rows(
        x.reshape(len(x), -1), jnp.dtype({"int8": "int8", "fp8_e4m3": "float8_e4m3fn"}[act])
    )
    return (codes.astype(jnp.float32) * scale).reshape(x.shape)


def acts_of(fmt: Format) -> list[str]:
    if fmt.is_integer:
        return ["compute", "int8"]
    return ["compute", "fp8_e4m3"] if fmt.bits == 8 else ["compute"]


@pytest.mark.parametrize(
    ("form", "num_rows"),
    [("matrix", 1), ("matrix", 2), ("heads out", 5), ("heads in", 5), ("matrix", FEW_ROWS + 1)],
)
@pytest.mark.parametrize(
    ("text", "act"), [(text, act) for text, fmt in CODED.items() for act in acts_of(fmt)]
)
def test_products_of_codes_are_those_of_their_numbers(text: str, act: str, form: str, num_rows: int):
    """In float32 compute, of rows as the format of activations rounds them: only the order of sums differs."""
    fmt = CODED[text]
    x, w = make_coded(fmt, num_rows, form)
    policy = Policy(*[fmt] * 3, act=act)
    got = jax.jit(linear, static_argnums=2)(x, w, policy)
    wanted = exact(rounded(x, act), dequantize(w, jnp.dtype(jnp.float32)))
    assert got.shape == wanted.shape == (num_rows, *CODED_FORMS[form][0])
    assert got.dtype == jnp.float32
    size = exact(jnp.abs(rounded(x, act)), jnp.abs(dequantize(w, jnp.dtype(jnp.float32))))
    assert (np.abs(got - wanted) <= 2e-6 * size).all()


@pytest.mark.parametrize(
    ("text", "act"), [(text, act) for text, fmt in CODED.items() for act in acts_of(fmt)]
)
def test_products_of_codes_in_16_bits_are_near(text: str, act: str):
    fmt = CODED[text]
    x, w = make_coded(fmt, 5, "matrix")
    policy = Policy(*[fmt] * 3, act=act, compute="bfloat16")
    x = x.astype(policy.compute_dtype)
    got = linear(x, w, policy)
    assert got.dtype == policy.compute_dtype
    wanted = exact(rounded(x, act), dequantize(w, jnp.dtype(jnp.float32)))
    size = np.abs(wanted).max(0, keepdims=True)
    assert (np.abs(np.asarray(got, np.float64) - wanted) <= 0.02 * size).all()


@pytest.mark.parametrize("act", ["int8", "fp8_e4m3"])
def test_rows_of_zeros_and_of_any_size_keep_their_own_scale(act: str):
    """Each row's largest number is exact; a row of zeros or of denormals gives zeros; nothing overflows."""
    x = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    x *= np.array([[1], [0], [1e-42], [1e-30], [1e30], [3e37]], np.float32)
    dtype = jnp.dtype("int8" if act == "int8" else "float8_e4m3fn")
    codes, scale = round_rows(jnp.asarray(x), dtype)
    back = np.asarray(codes, np.float32) * np.asarray(scale)
    assert np.isfinite(back).all()
    assert (back[1:3] == 0).all()
    most = np.abs(x).max(1, keepdims=True)
    sized = [0, 3, 4, 5]
    np.testing.assert_allclose(np.abs(back).max(1, keepdims=True)[sized], most[sized], rtol=1e-6)
    assert (np.abs(back - x)[sized] <= (most / (254 if act == "int8" else 28))[sized] * 1.001).all()


def test_nothing_of_a_bad_row_reaches_its_neighbours_through_codes():
    for text, act in (("int8", "int8"), ("int4:g32", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("mxfp4", "compute")):
        x, w = make_coded(CODED[text], 4, "matrix")
        policy = Policy(*[CODED[text]] * 3, act=act, compute="bfloat16")
        bad = x.at[1].set(jnp.nan).at[0, 3].set(jnp.inf)
        np.testing.assert_array_equal(linear(bad, w, policy)[2:], linear(x, w, policy)[2:])
        assert not np.isfinite(np.asarray(linear(bad, w, policy)[1], np.float32)).any()


@pytest.mark.parametrize("text", ["bfloat16", *CODED])
def test_rows_of_a_table_are_widened_alone(text: str):
    table = np.random.default_rng(0).standard_normal((9, 64), np.float32)
    if text == "bfloat16":
        w = jnp.asarray(table, jnp.bfloat16)
        wide = np.asarray(w, np.float32)
    else:
        w = jax.tree.map(jnp.asarray, quantize(table, ParamSpec((9, 64), (None, None)), CODED[text]))
        wide = np.asarray(dequantize(w, jnp.dtype(jnp.float32)))
    ids = jnp.array([3, 0, 8, 3, 99, -1])
    got = take_rows(w, ids, jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(got, wide[[3, 0, 8, 3, 8, 0]])


@pytest.mark.parametrize("text", CODED)
def test_stacked_and_joined_weights_keep_each_parts_scales(text: str):
    """Trap 27: a small part joined to one 500 times its size is rounded as it would be alone."""
    fmt = CODED[text]
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((8, 64), np.float32) * size for size in (1.0, 0.002)]
    coded = [jax.tree.map(jnp.asarray, quantize(p, ParamSpec((8, 64), (None, None)), fmt)) for p in parts]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *coded)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *coded)
    x = jnp.asarray(rng.standard_normal((3, 64), np.float32))
    policy = Policy(*[fmt] * 3, act=acts_of(fmt)[-1])
    alone = [linear(x, w, policy) for w in coded]
    np.testing.assert_allclose(linear(x, joined, policy), jnp.concatenate(alone, 1), rtol=1e-5, atol=1e-6)
    _, scanned = jax.lax.scan(lambda carry, w: (carry, linear(x, w, policy)), None, stacked)
    np.testing.assert_allclose(scanned, jnp.stack(alone), rtol=1e-5, atol=1e-6)
    for part, y in zip(parts, alone, strict=True):
        wanted = exact(x, jnp.asarray(part))
        cosine = (wanted * y).sum() / np.linalg.norm(wanted) / np.linalg.norm(y)
        assert cosine > (0.99 if fmt.bits == 8 else 0.97)
