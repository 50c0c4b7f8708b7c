"""Codes and scales: rounding as ml_dtypes', bounds of the error, saturation, packing, and their abstract forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.quant import dequantize, round_rows, unpack
from jaxinfer.arrays.quantized import Quantized, abstract, fit_format
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec

NAMES = """int8 int8:g32 int8:zero int8:g64:zero fp8_e4m3 fp8_e5m2 fp8_e4m3:g128 fp8_e5m2:g32 int4:channel int4:g32
int4:g64 int4:g128 int4:g32:zero int4:channel:zero mxfp4 nvfp4"""
FORMATS = [Format.parse(text) for text in NAMES.split()]
FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
FP4 = ml_dtypes.float4_e2m1fn
MATRIX, OUT, EXPERTS = (
    ParamSpec(shape, (None,) * len(shape), num_in=num_in)
    for shape, num_in in (((6, 128), 1), ((5, 3, 128), 2), ((2, 3, 128), 1))
)


def draw(spec: ParamSpec, seed: int = 0) -> np.ndarray:
    """Normal numbers whose outputs differ in size by up to a million."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 4, (spec.shape[0], *[1] * (len(spec.shape) - 1)))
    return (rng.standard_normal(spec.shape) * sizes).astype(np.float32)


def groups_of(x: np.ndarray, spec: ParamSpec, fmt: Format) -> np.ndarray:
    """The numbers that share a scale, on the last axis."""
    if fmt.group:
        return x.reshape(*x.shape[:-1], -1, fmt.group)
    return x.reshape(*x.shape[: x.ndim - spec.num_in], -1)


def widen(w: Quantized) -> np.ndarray:
    return np.asarray(dequantize(jax.tree.map(jnp.asarray, w), jnp.dtype(jnp.float32)))


@pytest.mark.parametrize("spec", [MATRIX, OUT, EXPERTS], ids=["matrix", "two inputs", "experts"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_number_comes_back_within_half_a_step(fmt: Format, spec: ParamSpec):
    """A step is that of the group's scale, and of the number's own exponent in floating-point codes."""
    x = draw(spec)
    w = quantize(x, spec, fmt)
    error = np.abs(groups_of(widen(w) - x, spec, fmt))
    grouped = groups_of(x, spec, fmt)
    most = np.abs(grouped).max(-1, keepdims=True)
    spread = np.ptp(grouped, axis=-1, keepdims=True)
    rounded = 2**-8 * most if fmt.group else 0  # the scale's own rounding to bfloat16
    bound = {
        "int8": (spread / 255 if fmt.offset else most / 127) / 2 + rounded,
        # The largest number of the other sign may be +8 steps, where codes end at 7.
        "int4": spread / 15 / 2 + rounded if fmt.offset else most / 8 + rounded,
        "fp8_e4m3": np.maximum(np.abs(grouped) / 16, most / 448 / 1024) + rounded,
        "fp8_e5m2": np.maximum(np.abs(grouped) / 8, most / 57344 / 2**17) + rounded,
        # Scales of powers of two: 6 steps may be as little as 6/7 of the largest number.
        "mxfp4": np.maximum(np.abs(grouped) / 4, most / 12),
        # Scales of three bits.
        "nvfp4": np.maximum(np.abs(grouped) / 4, most / 12) + most / 16,
    }[fmt.kind]
    assert (error <= bound * 1.001).all()
    inside = np.abs(grouped) < most * 7.4 / 8
    if fmt.kind == "int4" and not fmt.offset:
        assert (error <= most / 8 / 2 + rounded)[inside].all()


@pytest.mark.parametrize("spec", [MATRIX, OUT, EXPERTS], ids=["matrix", "two inputs", "experts"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_abstract_forms_are_those_of_real_ones(fmt: Format, spec: ParamSpec):
    w, form = quantize(draw(spec), spec, fmt), abstract(spec, fmt)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), w) == jax.tree.map(lambda a: (a.shape, a.dtype), form)
    assert {leaf.ndim for leaf in jax.tree.leaves(w)} == {len(spec.shape)}
    assert (w.shape, w.ndim, w.size) == (spec.shape, len(spec.shape), np.prod(spec.shape))
    assert form.nbytes == w.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(w))


def test_four_bits_are_half_a_byte():
    spec = ParamSpec((64, 1024), (None, None))
    numbers = 64 * 1024
    x = draw(spec)
    assert quantize(x, spec, Format("int4", 64)).nbytes == numbers // 2 + numbers // 64 * 2
    assert quantize(x, spec, Format("int4", 32, offset=True)).nbytes == numbers // 2 + numbers // 32 * 4
    assert quantize(x, spec, Format("mxfp4")).nbytes == numbers // 2 + numbers // 32
    assert quantize(x, spec, Format("nvfp4")).nbytes == numbers // 2 + numbers // 16 + 64 * 4
    assert quantize(x, spec, Format("int8")).nbytes == numbers + 64 * 4
    assert quantize(x, spec, Format("fp8_e4m3", 128)).nbytes == numbers + numbers // 128 * 2


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_overflows_saturates_and_nothing_is_nan(fmt: Format):
    x = draw(MATRIX)
    x[0, :4] = np.inf, -np.inf, np.nan, 3e38
    x[1] = 0
    x[2] = 1e-44
    x[3] *= 0
    x[3, 5] = -3.4e38
    w = widen(quantize(x, MATRIX, fmt))
    assert np.isfinite(w).all()
    assert (w[1] == 0).all()
    assert np.abs(w[2]).max() < 1e-36
    assert w[3, 5] < -0.99 * 2.0**126 * (1 if "fp4" not in fmt.kind else 0.75)
    np.testing.assert_array_equal(w[4:], widen(quantize(draw(MATRIX), MATRIX, fmt))[4:])


def edges(dtype: type) -> np.ndarray:
    """Every finite code of a float format, the middles between neighbours, and a float32 either side of those."""
    bits = 4 if dtype is FP4 else 8
    codes = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    middles = (codes[1:] + codes[:-1]) / 2
    points = np.concatenate([codes, middles])
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    largest = codes[-1]
    return np.concatenate([points, up, down]).clip(-largest, largest)


@pytest.mark.parametrize("kind", FP8)
def test_fp8_rounds_as_ml_dtypes_on_host_and_device(kind: str):
    """Weights on the host and activations on the device, every code and every tie, under a scale of one."""
    dtype = FP8[kind]
    largest = float(ml_dtypes.finfo(dtype).max)
    x = edges(dtype)
    x = np.concatenate([x, np.full(2, largest, np.float32)])  # sizes the scale: one
    wanted = x.astype(dtype).view(np.uint8)
    spec = ParamSpec((1, x.size), (None, None))
    w = quantize(x[None], spec, Format(kind))
    assert w.scale == 1
    np.testing.assert_array_equal(w.values[0].view(np.uint8), wanted)
    rows, scale = jax.jit(round_rows, static_argnums=1)(x[None], jnp.dtype(dtype))
    assert scale == 1
    np.testing.assert_array_equal(np.asarray(rows)[0].view(np.uint8), wanted)
    np.testing.assert_array_equal(widen(w)[0], x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4"])
def test_fp4_rounds_as_ml_dtypes(text: str):
    """Each group holds the largest number, so that its scale is one (nvfp4: 448 of its second scale's 1/448)."""
    fmt = Format.parse(text)
    assert fmt.group is not None
    each = fmt.group - 1
    x = edges(FP4)
    x = np.pad(x, (0, -x.size % each)).reshape(-1, each)
    x = np.concatenate([x, np.full((len(x), 1), 6, np.float32)], 1).reshape(1, -1)
    w = quantize(x, ParamSpec(x.shape, (None, None)), fmt)
    wanted = x.astype(FP4)
    codes = np.stack([w.values & 15, w.values >> 4], -1).reshape(x.shape)
    np.testing.assert_array_equal(codes, wanted.view(np.uint8) & 15)
    np.testing.assert_array_equal(widen(w), wanted.astype(np.float32))


def test_every_code_of_4_bits_is_read_as_ml_dtypes_reads_it():
    packed = np.arange(256, dtype=np.uint8)
    both = np.stack([packed & 15, packed >> 4])
    for kind, dtype, times in (("mxfp4", FP4, 2), ("int4", ml_dtypes.int4, 1)):
        halves = np.stack(unpack(jnp.asarray(packed), Format(kind)))
        assert halves.dtype == np.int8
        # A byte of ml_dtypes' int4 is signed: its upper half repeats the sign.
        signed = (both ^ 8) - 8 if kind == "int4" else both
        np.testing.assert_array_equal(halves, times * signed.astype(np.uint8).view(dtype).astype(np.float32))
    np.testing.assert_array_equal(
        np.stack(unpack(jnp.asarray(packed), Format("int4", 32, offset=True))), both
    )


def test_every_scale_of_mxfp4_is_read_as_ml_dtypes_reads_it():
    bits = np.arange(255, dtype=np.uint8)  # 255 is NaN
    ones = np.full((255, 16), 0x22, np.uint8)
    w = jax.tree.map(jnp.asarray, Quantized(ones, bits[:, None], format=Format("mxfp4")))
    wanted = bits.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = np.asarray(dequantize(w, jnp.dtype(jnp.float32)))[:, 0]
    # XLA's CPU backend takes denormal numbers for 0: the scales below 2**-125, which `unpack`'s doubling halves.
    np.testing.assert_array_equal(got[2:], wanted[2:])
    assert (got[:2] <= wanted[:2]).all()


@given(st.integers(-126, 120), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_int8_of_a_scaled_weight_is_the_scaled_int8(exponent: int, seed: int):
    """No scale underflows: sizes from 1e-36 to 1e36 round alike."""
    x = np.random.default_rng(seed).standard_normal((2, 64), np.float32).clip(-4, 4)
    spec = ParamSpec((2, 64), (None, None))
    small = np.float32(2.0 ** max(exponent, -100))
    for text in ("int8", "int8:g32", "int4:g32", "int4:g32:zero", "fp8_e4m3", "mxfp4"):
        fmt = Format.parse(text)
        np.testing.assert_array_equal(
            quantize(x * small, spec, fmt).values, quantize(x, spec, fmt).values, err_msg=text
        )


@pytest.mark.parametrize(
    ("last", "text", "got"),
    [
        (96, "int4:g64", "int4:g32"),
        (40, "int4:g64", "int4:g8"),
        (128, "int4:g64", "int4:g64"),
        (9, "int8", "int8"),
    ],
)
def test_groups_that_do_not_fit_become_smaller(last: int, text: str, got: str):
    assert str(fit_format(ParamSpec((2, last), (None, None)), Format.parse(text))) == got


@pytest.mark.parametrize(
    ("last", "text", "says"),
    [
        (12, "int4:g32", "12 inputs of a weight .* cannot be grouped; take int8 or a 16-bit"),
        (48, "mxfp4", "cannot be grouped"),
        (9, "int4:channel", "cannot be grouped"),
        (12, "fp8:g32", "take no groups"),
    ],
)
def test_weights_that_cannot_be_grouped_are_refused(last: int, text: str, says: str):
    with pytest.raises(ValueError, match=says):
        fit_format(ParamSpec((2, last), (None, None)), Format.parse(text))
