"""Codes of KV pages against ml_dtypes' own rounding, bit by bit, and the rotation of keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import decode, encode, group_size, read_codes, rotate, turn

ENCODE = jax.jit(encode, static_argnums=1)
FLOATS = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}


def finite(dtype: np.typing.DTypeLike) -> np.ndarray:
    """Returns every number of a float of 8 or 4 bits."""
    bits = np.arange(256 if dtype is not ml_dtypes.float4_e2m1fn else 16, dtype=np.uint8)
    numbers = bits.view(dtype).astype(np.float32)
    return np.unique(numbers[np.isfinite(numbers)])


@pytest.mark.parametrize("kind", FLOATS)
def test_codes_round_as_ml_dtypes_does(kind: str):
    """Every number that there is, what lies halfway and just beside; each group's scale is 1, by a largest number."""
    numbers = finite(FLOATS[kind])
    halfway = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, halfway, np.nextafter(halfway, -np.inf), np.nextafter(halfway, np.inf)])
    x = np.concatenate([x, np.zeros(-len(x) % 15, np.float32)]).reshape(-1, 15)
    x = np.concatenate([np.full((len(x), 1), numbers[-1]), x], 1).astype(np.float32)
    fmt = Format.parse(kind)
    values, scales = ENCODE(x[:, None], fmt)
    got = np.asarray(jax.jit(decode, static_argnums=(2, 3, 4))(values, scales, fmt, 1, 16))[:, 0]
    want = x.astype(FLOATS[kind]).astype(np.float32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_float_of_8_bits_is_read_as_it_is(kind: str, dtype: str):
    bits = np.arange(256, dtype=np.uint8)
    want = bits.view(FLOATS[kind]).astype(np.float32)
    got = np.asarray(read_codes(jnp.asarray(bits), Format(kind), jnp.dtype(dtype)), np.float32)
    there = np.isfinite(want)
    np.testing.assert_array_equal(got[there], want[there])


@pytest.mark.parametrize("text", ["int8", "int8:g32", "int4:g32", "int4:g64", "nvfp4"])
def test_no_number_is_off_by_more_than_half_a_step(text: str):
    fmt = Format.parse(text)
    x = np.random.default_rng(0).standard_normal((40, 3, 64)).astype(np.float32)
    values, scales = ENCODE(x, fmt)
    got = np.asarray(jax.jit(decode, static_argnums=(2, 3, 4))(values, scales, fmt, 3, 64))
    grouped = np.abs(x.reshape(40, 3, -1, group_size(fmt, 64))).max(-1, keepdims=True)
    # The last code of one side of int4 is 7/8 of the largest number; e2m1 steps by 2 of 6 at its top.
    bound = {"int8": 0.5 / 127, "int4": 1 / 8, "nvfp4": 1 / 6}[fmt.kind] * 1.02
    assert (
        np.abs(got - x).reshape(40, 3, -1, group_size(fmt, 64)) <= grouped * bound + grouped * 2**-8
    ).all()


@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
def test_rotated_queries_meet_rotated_keys_as_before(head_dim: int):
    q, k = np.random.default_rng(2).standard_normal((2, 5, 2, head_dim)).astype(np.float32)
    k[..., 3] = 50
    turned = np.asarray(rotate(jnp.asarray(k)))
    np.testing.assert_allclose(
        (np.asarray(rotate(jnp.asarray(q))) * turned).sum(-1), (q * k).sum(-1), atol=1e-3
    )
    assert np.abs(turned).max() < 0.5 * 50


def test_balanced_scores_are_the_same_and_need_no_norms():
    q, k, norms = np.split(np.random.default_rng(3).standard_normal((14, 64)).astype(np.float32), (6, 12))
    q, k, norms = jnp.asarray(q)[:, None], jnp.asarray(k)[:, None], jnp.asarray(norms).at[:, 5].set(0)
    for given in ((norms[0], norms[1]), (None, None)):
        new_q, new_k = turn(q, k, *given)
        np.testing.assert_allclose((new_q * new_k).sum(-1), (q * k).sum(-1), atol=1e-3)
        assert not np.allclose(new_k, k, atol=0.1)


def test_pages_of_another_format_are_refused():
    with pytest.raises(TypeError, match=r"pages of int8 lie as int8, got uint8"):
        read_codes(jnp.zeros(4, jnp.uint8), Format("int8"), jnp.dtype(jnp.float32))
