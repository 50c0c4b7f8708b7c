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
DECODE = jax.jit(decode, static_argnums=(2, 3, 4))
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
    got = np.asarray(DECODE(values, scales, fmt, 1, 16))[:, 0]
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
    got = np.asarray(DECODE(values, scales, fmt, 3, 64))
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


def keys_and_queries(H: int, G: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys ``[2000, 2, H]`` and queries ``[2000, 2 * G, H]``; a head's are alike, as a trained model's."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2000, 2 * G, H)) + 2 * rng.standard_normal((2 * G, H))
    return rng.standard_normal((2000, 2, H)).astype(np.float32), q.astype(np.float32)


def read_back(k: np.ndarray, q: np.ndarray | None, fmt: Format) -> np.ndarray:
    values, scales = ENCODE(k, fmt, q)
    return np.asarray(DECODE(values, scales, fmt, *k.shape[1:]))


@pytest.mark.parametrize(("text", "group", "share"), [("int4:g32", 1, 0.62), ("int4:g16", 3, 0.72)])
def test_scales_fitted_to_a_tokens_own_queries_serve_those_of_others(text: str, group: int, share: float):
    fmt = Format.parse(text)
    k, q = keys_and_queries(64, group)
    plain, fitted = (read_back(k, given, fmt) - k for given in (None, q))
    later = np.roll(q, 7, 0).reshape(2000, 2, group, 64)  # queries of other tokens
    before, after = (((later * error[:, :, None]).sum(-1) ** 2).mean() for error in (plain, fitted))
    assert after < share * before
    assert (fitted**2).mean() < 1.4 * (plain**2).mean()


def test_fitted_scales_stay_near_those_that_rounded():
    """Whatever the queries: no number is off by more than five steps, NaN and overflow move nothing."""
    fmt = Format("int4", 32)
    k, q = keys_and_queries(64, 2)
    k[5, 0], q[6], q[7, 1], q[8], q[9] = 0, np.nan, np.inf, 3e38, 0
    k[10, 1] = 1e30
    plain, fitted = (ENCODE(k, fmt, given) for given in (None, q))
    np.testing.assert_array_equal(np.asarray(fitted[0]), np.asarray(plain[0]))
    old, new = (np.asarray(x[1]).view(ml_dtypes.bfloat16).astype(np.float32) for x in (plain, fitted))
    assert np.isfinite(new).all()
    assert (np.abs(new - old) <= 0.51 * np.abs(old)).all()
    assert (new != old).mean() > 0.5
    np.testing.assert_array_equal(new[6], old[6])
    assert (new[5, :2] == 0).all()


def test_only_int4_is_fitted():
    k, q = keys_and_queries(64, 2)
    for text in ("int8", "fp8", "mxfp4", "nvfp4"):
        fmt = Format.parse(text)
        np.testing.assert_array_equal(read_back(k, q, fmt), read_back(k, None, fmt))


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
