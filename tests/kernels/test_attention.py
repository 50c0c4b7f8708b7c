"""Every implementation of paged attention equals the oracle, and the oracle equals attention written out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import decode, encode
from jaxinfer.kernels.attention.api import IMPLEMENTATIONS, choose_attention, paged_attention
from jaxinfer.kernels.attention.cases import CASES, Case, make_inputs
from jaxinfer.kernels.attention.paged import PagedKV

# Compiled whole: op by op, each small operation would compile for itself.
ATTEND = jax.jit(paged_attention, static_argnums=0, static_argnames=("scale", "window", "softcap"))
FAST = sorted(set(IMPLEMENTATIONS) - {"reference"})
CODED = ["int8", "fp8_e4m3", "fp8_e5m2", "int4:g16", "int4:g64", "mxfp4", "nvfp4"]
ENCODE, DECODE = jax.jit(encode, static_argnums=1), jax.jit(decode, static_argnums=(2, 3, 4))
# All cases of a format in one program, little optimised: that takes a tenth of the time of compiling each for itself.
FEW_PASSES = {"xla_backend_optimization_level": 0}


def run(name: str, case: Case, arrays: dict[str, np.ndarray], fmt: str | None = None) -> np.ndarray:
    """Runs an implementation over layer 1 of a stack of 2 whose layer 0 is zeros, in pages of ``fmt``."""
    stored = Format.parse(fmt or arrays["k"].dtype.name)
    return np.asarray(ATTEND(name, *operands(case, arrays, stored), **options_of(case)), np.float32)


def operands(case: Case, arrays: dict[str, np.ndarray], fmt: Format) -> tuple:
    """Returns an implementation's arguments."""
    stacked = [jnp.asarray(np.stack([np.zeros_like(arrays[x]), arrays[x]])) for x in "kv"]
    (k, k_scale), (v, v_scale) = (ENCODE(x.reshape(*x.shape[:-1], *case.heads[1:]), fmt) for x in stacked)
    kv = PagedKV(k, v, k_scale, v_scale, 1, fmt)
    return jnp.asarray(arrays["q"]), kv, *(jnp.asarray(arrays[x]) for x in ("pages", "start", "length"))


def options_of(case: Case) -> dict[str, Any]:
    return {"scale": case.heads[2] ** -0.5, "window": case.window, "softcap": case.softcap}


def written_out(case: Case, arrays: dict[str, np.ndarray], row: int, t: int) -> np.ndarray:
    """Attention of one query in float64, key by key."""
    N, K, H = case.heads
    position = case.context[row] + t
    first = 0 if case.window is None else max(0, position - case.window + 1)
    where = [
        (arrays["pages"][row, i // case.page_size], i % case.page_size) for i in range(first, position + 1)
    ]
    keys = np.stack([arrays["k"][w] for w in where]).astype(np.float64).reshape(-1, K, H)
    values = np.stack([arrays["v"][w] for w in where]).astype(np.float64).reshape(-1, K, H)
    out = np.empty((N, H))
    for n in range(N):
        scores = keys[:, n * K // N] @ arrays["q"][row, t, n].astype(np.float64) * H**-0.5
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        weights = np.exp(scores - scores.max())
        out[n] = weights @ values[:, n * K // N] / weights.sum()
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_oracle_is_attention_written_out(case: Case):
    arrays = make_inputs(case)
    got = run("reference", case, arrays)
    for row, length in enumerate(case.length):
        for t in {0, length // 2, length - 1} if length else ():
            np.testing.assert_allclose(got[row, t], written_out(case, arrays, row, t), atol=2e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", FAST)
def test_implementation_equals_oracle(name: str, case: Case):
    arrays = make_inputs(case, seed=1)
    got, want = run(name, case, arrays), run("reference", case, arrays)
    for row, length in enumerate(case.length):
        np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-5)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-5), ("bfloat16", 0.03)])
@pytest.mark.parametrize("text", CODED)
@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_coded_pages_give_attention_over_their_numbers(name: str, text: str, dtype: str, atol: float):
    """Every case: the oracle reads the numbers that the codes stand for, so only attention's rounding is left."""
    fmt = Format.parse(text)
    cases = [case for case in CASES if name != "reference" or case.T == 1]
    wanted, given = [], []
    for case in cases:
        arrays = {k: a.astype(dtype) if k in "qkv" else a for k, a in make_inputs(case, seed=1).items()}
        args = operands(case, arrays, fmt)
        given.append(args)
        kv = args[1]
        heads = case.heads[1:]
        numbers = {
            "k": DECODE(kv.k[1], kv.k_scale[1], fmt, *heads),
            "v": DECODE(kv.v[1], kv.v_scale[1], fmt, *heads),
        }
        plain = {x: np.asarray(a).reshape(arrays[x].shape) for x, a in numbers.items()}
        wanted.append(run("reference", case, arrays | plain | {"q": arrays["q"].astype(np.float32)}))

    def attend(given: list[tuple]) -> list[jax.Array]:
        return [
            paged_attention(name, *args, **options_of(case)) for case, args in zip(cases, given, strict=True)
        ]

    for case, want, got in zip(
        cases, wanted, jax.jit(attend, compiler_options=FEW_PASSES)(given), strict=True
    ):
        for row, length in enumerate(case.length):
            found = np.asarray(got[row, :length], np.float32)
            np.testing.assert_allclose(found, want[row, :length], atol=atol, err_msg=case.name)


@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("nowhere", [-1, 10**6])
def test_trap_15_pages_that_no_query_sees_may_have_any_id(name: str, nowhere: int):
    case = next(case for case in CASES if case.name == "decode window")
    arrays = make_inputs(case)
    want = run(name, case, arrays)
    arrays["pages"][arrays["pages"] == len(arrays["k"])] = nowhere
    for row, context in enumerate(case.context):
        arrays["pages"][row, : max(0, context - (case.window or 0) + 1) // case.page_size] = nowhere
    np.testing.assert_array_equal(run(name, case, arrays), want)


@pytest.mark.parametrize("name", FAST)
def test_bfloat16_stays_near_float32(name: str):
    case = CASES[0]
    arrays = make_inputs(case)
    want = run("reference", case, arrays)
    got = run(name, case, {k: a.astype(jnp.bfloat16) if k in "qkv" else a for k, a in arrays.items()})
    np.testing.assert_allclose(got, want, atol=0.05)


@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_padding_rows_are_finite(name: str):
    for case in CASES:
        arrays = make_inputs(case)
        arrays["k"], arrays["v"] = np.nan_to_num(arrays["k"]), np.nan_to_num(arrays["v"])
        assert np.isfinite(run(name, case, arrays)).all(), case.name


@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("window", [1, 3, 8])
def test_trap_21_a_window_counts_the_current_token(name: str, window: int):
    """Row i sees min(i + 1, window) keys: with equal scores the output is the mean of that many values."""
    T, H = 12, 4
    v = np.arange(16, dtype=np.float32)[None, :, None] * np.ones((1, 16, H), np.float32)
    arrays = {
        "q": np.zeros((1, T, 1, H), np.float32), "k": np.zeros_like(v), "v": v,
        "pages": np.zeros((1, 1), np.int32), "start": np.zeros(1, np.int32), "length": np.full(1, T, np.int32),
    }  # fmt: skip
    got = run(name, Case("", T, (1, 1, H), (0,), (T,), window=window), arrays)
    for i in range(T):
        seen = range(max(0, i + 1 - window), i + 1)
        assert len(seen) == min(i + 1, window)
        np.testing.assert_allclose(got[0, i], np.mean(seen), rtol=1e-6)


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"nothere.*blocked"):
        choose_attention("nothere")
