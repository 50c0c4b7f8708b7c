"""Every implementation of paged attention equals the oracle, and the oracle equals attention written out."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.serialize_executable import serialize

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import decode, encode
from jaxinfer.arrays.precision import Policy
from jaxinfer.config import AttentionConfig
from jaxinfer.hardware import cpu_features
from jaxinfer.kernels.attention.api import (
    IMPLEMENTATIONS,
    call_form,
    choose_attention,
    form_of,
    paged_attention,
)
from jaxinfer.kernels.attention.cases import CASES, Case, make_inputs
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.reference import paged_attention_reference
from jaxinfer.kernels.native.machine import MACHINES, Machine, register, this_machine
from jaxinfer.model.cache import Pages, token_slots, write_pages

# Compiled whole: op by op, each small operation would compile for itself.
ATTEND = jax.jit(paged_attention, static_argnums=0, static_argnames=("scale", "window", "softcap"))
HERE, WHY = this_machine()
needs_native = pytest.mark.skipif(HERE is None, reason=WHY)
THERE = {"tpu", "tpu-interpret", "gpu", "gpu-interpret"}  # those have tests of their own
RUN_HERE = sorted(set(IMPLEMENTATIONS) - THERE)
ALL = [pytest.param(name, marks=needs_native if name == "native" else ()) for name in RUN_HERE]
FAST = [param for param in ALL if param.values != ("reference",)]
RUNNABLE = [machine for needed, machine in MACHINES if HERE and cpu_features().issuperset(needed)]
if HERE and HERE.has_bf16:
    RUNNABLE.append(HERE)
CODED = ["int8", "fp8_e4m3", "fp8_e5m2", "int4:g16", "int4:g64", "mxfp4", "nvfp4"]
OPENED = [
    "int8",
    "int4:g16",
    "nvfp4",
]  # of each way that XLA opens codes one; native code is another for each
# Of each form that XLA's attention in blocks takes.
FORMS = {"decode", "decode one kv head", "decode many heads", "prefill chunk", "prefill window"}
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


def hold_to_oracle(
    implementation: Any,
    cases: Sequence[Case],
    text: str,
    dtype: str = "float32",
    atol: float = 2e-5,
    lay_down: Callable[[PagedKV, Case], PagedKV] = lambda kv, case: kv,
) -> None:
    """Holds an implementation to the oracle over layer 1 of 2, in pages of a format that ``lay_down`` lays down."""
    fmt = Format.parse(text)
    inputs = [
        {k: a.astype(dtype) if k in "qkv" else a for k, a in make_inputs(case, seed=1).items()}
        for case in cases
    ]
    given = [operands(case, arrays, fmt) for case, arrays in zip(cases, inputs, strict=True)]
    lain = [(q, lay_down(kv, case), *rows) for case, (q, kv, *rows) in zip(cases, given, strict=True)]
    exact = [(q.astype(jnp.float32), *rest) for q, *rest in given]
    outs = attend_all(implementation, cases, lain), attend_all(paged_attention_reference, cases, exact)
    for case, got, want in zip(cases, *outs, strict=True):
        assert np.isfinite(got).all()
        for row, length in enumerate(case.length):
            np.testing.assert_allclose(got[row, :length], want[row, :length], atol=atol, err_msg=case.name)


def attend_all(implementation: Any, cases: Sequence[Case], given: Sequence[tuple]) -> list[np.ndarray]:
    """Runs an implementation over some cases, in one program that is little optimised."""

    def run(given: Sequence[tuple]) -> list[jax.Array]:
        return [implementation(*args, **options_of(case)) for case, args in zip(cases, given, strict=True)]

    return [np.asarray(out, np.float32) for out in jax.jit(run, compiler_options=FEW_PASSES)(given)]


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


def is_few_kernels(case: Case, fmt: Format, dtype: str) -> bool:
    """Whether native attention is held to a case over coded pages: SmolLM2's heads, and others where there is a kernel.

    A kernel for each takes half a second to make.
    """
    if case.heads == (9, 3, 64):
        return True
    is_first = case.name in ("decode one kv head", "decode many heads", "decode with padding rows")
    return is_first and not isinstance(form_of(fmt, jnp.dtype(dtype), case.heads), str)


@needs_native
@pytest.mark.parametrize("text", ["int4:g32", "int4:g64", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(("lanes", "least"), [(8, 16), (16, 32)])
def test_4_bits_need_halves_of_whole_vectors(text: str, lanes: int, least: int):
    """A head's first half lies in the lower bits, its second in the upper ones: no vector may have some of both."""
    from jaxinfer.kernels.attention.form import Form

    machine = Machine("some", lanes, False)
    for H in (8, 16, 32, 48, 64, 96, 128, 256):
        problem = Form(Format.parse(text), 1, "float32", 2, H, machine).problem
        assert (problem is None) == (H % least == 0), (H, problem)


@pytest.mark.parametrize(
    ("name", "text", "dtype", "atol"),
    [
        pytest.param(name, text, dtype, atol, marks=needs_native if name == "native" else ())
        for name in RUN_HERE
        for text in CODED
        for dtype, atol in (("float32", 2e-5), ("bfloat16", 0.03))
        if dtype == "float32" or name == "native" or text in OPENED
    ],
)
def test_coded_pages_give_attention_over_their_numbers(name: str, text: str, dtype: str, atol: float):
    """Every case: the oracle reads the numbers that the codes stand for, so only attention's rounding is left."""
    fmt = Format.parse(text)
    few = {
        "reference": lambda case: case.T == 1,
        "native": lambda case: is_few_kernels(case, fmt, dtype),
        "blocked": lambda case: text in OPENED or case.name in FORMS,
    }
    cases = [case for case in CASES if few.get(name, bool)(case)]
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


@pytest.mark.parametrize("name", ALL)
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


@pytest.mark.parametrize("name", ALL)
def test_padding_rows_are_finite(name: str):
    for case in CASES:
        arrays = make_inputs(case)
        arrays["k"], arrays["v"] = np.nan_to_num(arrays["k"]), np.nan_to_num(arrays["v"])
        assert np.isfinite(run(name, case, arrays)).all(), case.name


@pytest.mark.parametrize("name", ALL)
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


HEADS = AttentionConfig(9, 3, 64, 64**-0.5)
BF16, F32 = Policy.parse("bfloat16"), Policy.parse("float32")


@pytest.mark.parametrize(
    ("name", "heads", "policy", "devices", "problem"),
    [
        ("nothere", HEADS, BF16, 1, "auto, blocked, gpu, gpu-interpret, native"),
        ("native", HEADS, BF16, 2, "one device"),
        ("native", replace(HEADS, head_dim=63), BF16, 1, "even number"),
        ("native", replace(HEADS, head_dim=40), Policy.parse("bfloat16,kv=int4:g8"), 1, "whole vectors"),
    ],
)
def test_what_cannot_run_is_refused(
    name: str, heads: AttentionConfig, policy: Policy, devices: int, problem: str
):
    if HERE is None and devices == 1 and name == "native":
        problem = "native kernels"
    with pytest.raises(ValueError, match=problem):
        choose_attention(name, heads, policy, devices)


def test_auto_says_why(monkeypatch: pytest.MonkeyPatch):
    assert choose_attention("blocked", HEADS, F32) == ("blocked", "asked for")
    name, why = choose_attention("auto", HEADS, F32, 8)
    assert name == "blocked"
    assert "8" in why
    monkeypatch.setattr("jaxinfer.kernels.native.machine.find_spec", lambda name: None)
    name, why = choose_attention("auto", HEADS, F32)
    assert name == "blocked"
    assert "llvmlite" in why or "x86" in why


@needs_native
@pytest.mark.parametrize("machine", RUNNABLE, ids=lambda m: m.name + "_bf16" * m.has_bf16)
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-5), ("bfloat16", 0.02)])
def test_native_code_of_every_machine_equals_the_oracle(machine: Machine, dtype: str, atol: float):
    form = form_of(Format(dtype), jnp.dtype(dtype), (9, 3, 64), machine)
    assert not isinstance(form, str)
    for case in CASES:
        if case.heads == (9, 3, 64):
            arrays = {k: a.astype(dtype) if k in "qkv" else a for k, a in make_inputs(case).items()}
            attend = jax.jit(partial(call_form, form, **options_of(case)))
            got = np.asarray(attend(*operands(case, arrays, Format(dtype))), np.float32)
            wide = {k: a.astype(np.float32) if k in "qkv" else a for k, a in arrays.items()}
            want = run("reference", case, wide)
            for row, length in enumerate(case.length):
                np.testing.assert_allclose(got[row, :length], want[row, :length], atol=atol)


MIXED = Case("mixed", 1, (9, 3, 64), (700, 3, 129, 0, 255, 40), (1, 1, 1, 0, 1, 1))


@needs_native
@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype: str, T: int):
    case = replace(MIXED, T=T, length=tuple(n * T for n in MIXED.length))
    arrays = {k: a.astype(dtype) if k in "qkv" else a for k, a in make_inputs(case).items()}
    whole = run("native", case, arrays)
    for rows in ([0], [1], [4, 0], [2, 3, 5]):
        some = {k: a if k in "kv" else a[rows] for k, a in arrays.items()}
        np.testing.assert_array_equal(run("native", case, some), whole[rows])


@needs_native
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_have_the_bits_of_the_whole(dtype: str, window: int | None):
    case = Case("", 300, (4, 2, 16), (0, 0), (300, 177), window=window)
    arrays = {k: a.astype(dtype) if k in "qkv" else a for k, a in make_inputs(case).items()}
    whole = run("native", case, arrays)
    for chunk in (16, 100):
        for first in range(0, 300, chunk):
            start = np.full(2, first, np.int32)
            length = np.clip(arrays["length"] - first, 0, chunk)
            part = arrays | {"q": arrays["q"][:, first : first + chunk], "start": start, "length": length}
            got = run("native", case, part)
            for row, n in enumerate(length):
                np.testing.assert_array_equal(got[row, :n], whole[row, first : first + n])


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_read_may_be_nan(dtype: str):
    for case in CASES:
        if case.heads == (4, 2, 16):
            arrays = {k: a.astype(dtype) if k in "qkv" else a for k, a in make_inputs(case).items()}
            want = run("native", case, arrays)
            unread = np.asarray(arrays["k"], np.float32) == np.float32(np.asarray(1e4, dtype))
            for x in "kv":
                arrays[x] = np.where(unread, np.nan, np.asarray(arrays[x], np.float32)).astype(dtype)
            # Past the encoder, which makes 0 of NaN.
            q, kv, *rows = operands(case, arrays, Format(dtype))
            bits = {x: jnp.asarray(np.stack([arrays[x]] * 2)).view(getattr(kv, x).dtype) for x in "kv"}
            got = ATTEND("native", q, replace(kv, **bits), *rows, **options_of(case))
            np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@needs_native
def test_a_query_of_nan_spoils_its_own_result_only():
    case = CASES[0]
    arrays = make_inputs(case)
    want = run("native", case, arrays)
    arrays["q"][3, 0, 4, 7] = np.nan
    got = run("native", case, arrays).copy()
    assert np.isnan(got[3, 0, 4]).all()
    got[3, 0, 4] = want[3, 0, 4]
    np.testing.assert_array_equal(got, want)


@needs_native
def test_windows_of_layers_may_be_arrays_in_a_scan():
    case = next(case for case in CASES if case.name == "decode window")
    args = operands(case, make_inputs(case), Format("float32"))

    def attend(name: str) -> np.ndarray:
        def layer(carry: None, layer: tuple[jax.Array, jax.Array]):
            index, window = layer
            kv = replace(args[1], layer=index)
            return carry, paged_attention(name, args[0], kv, *args[2:], scale=0.25, window=window)

        layers = jnp.array([1, 0, 1]), jnp.array([8, 3, 0])
        return np.asarray(jax.jit(lambda: jax.lax.scan(layer, None, layers)[1])())

    np.testing.assert_allclose(attend("native"), attend("reference"), atol=2e-5)


@needs_native
def test_the_pool_is_written_and_read_in_place():
    """Two layers of a donated cache: no copy of the pool in the program, nor room for one."""
    P, Z, K, H = 256, 16, 3, 64
    pool = jnp.zeros((2, P, Z, K * H), jnp.uint16)
    cache = Pages(pool, pool + 0, None, None, Format("bfloat16"))
    rows = jnp.zeros((2, 8), jnp.int32), jnp.array([5, 9]), jnp.ones(2, jnp.int32)

    def step(cache: Pages, x: jax.Array) -> tuple[jax.Array, Pages]:
        for layer in range(2):
            slots = token_slots(*rows, 1, cache).reshape(-1)
            cache = write_pages(cache, layer, slots, x[:, 0, :K], x[:, 0, :K])
            kv = PagedKV(cache.k, cache.v, None, None, layer, cache.format)
            x = paged_attention("native", x, kv, *rows, scale=0.1)
        return x, cache

    x = jnp.ones((2, 1, 9, H), jnp.bfloat16)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, x).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 4
    lines = (compiled.as_text() or "").splitlines()
    assert not [line for line in lines if f" = u16[2,{P},{Z}" in line and " copy(" in line]


@needs_native
def test_exp_is_exact_to_the_last_places():
    """Every size that scores have, against float64; LLVM's code by way of a kernel that does nothing else."""
    from jaxinfer.kernels.native.code import F32, Code, Value, vec
    from jaxinfer.kernels.native.ffi import Frame, Kernel, Slots
    from jaxinfer.kernels.native.floats import exp, tanh

    def prepare(frame: Frame) -> tuple[Slots, tuple[Value, Value]]:
        code = frame.code
        slots = {"x": frame.arg(0), "exp": frame.result(0), "tanh": frame.result(1), "n": frame.dim(0, 0)}
        return slots, (code.int(1), code.int(0))

    def run_all(code: Code, slots: Slots, piece: Value) -> None:
        with code.loop(0, slots["n"], 8) as i:
            x = slots["x"].at(i, F32).load(vec(F32, 8))
            slots["exp"].at(i, F32).store(exp(code, x))
            slots["tanh"].at(i, F32).store(tanh(code, x))

    name = "jaxinfer_test_exp"
    register([Kernel(name, prepare, (run_all, lambda code, slots, piece: None))])
    x = np.concatenate([-np.geomspace(1e-8, 87, 40000), np.linspace(-86, 20, 40000)]).astype(np.float32)
    x = np.concatenate([x, np.array([0, -88, -1e30, np.nan, -np.inf, 9.5, 50, -50], np.float32)])
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    e, t = map(np.asarray, jax.jit(jax.ffi.ffi_call(name, (shape, shape)))(x))
    special = {0: 1, 1: 0, 2: 0, 4: 0}
    for i, number in special.items():
        assert e[len(x) - 8 + i] == number
    assert np.isnan(e[-5])
    assert np.isnan(t[-5])
    x, e, t = x[:-8].astype(np.float64), e[:-8], t[:-8]
    assert np.max(np.abs(e - np.exp(x)) / np.spacing(np.exp(x).astype(np.float32))) < 1.5
    assert np.max(np.abs(t - np.tanh(x))) < 1.5e-7


@needs_native
def test_an_executable_that_calls_the_kernel_can_be_kept():
    """Saved and loaded in a process that makes the kernel first, of one thread: the bits are the same."""
    code = (
        "import pickle, sys, jax, numpy as np\n"
        "from jax.experimental.serialize_executable import deserialize_and_load\n"
        "from jaxinfer.arrays.precision import Policy\n"
        "from jaxinfer.config import AttentionConfig\n"
        "from jaxinfer.kernels.attention.api import choose_attention\n"
        "choose_attention('native', AttentionConfig(9, 3, 64, 1.0), Policy.parse('float32'))\n"
        "body, args = pickle.load(sys.stdin.buffer)\n"
        "run = deserialize_and_load(*body, execution_devices=jax.devices()[:1])\n"
        "sys.stdout.write(jax.device_get(run(*args)).tobytes().hex())\n"
    )
    case = replace(MIXED, T=2, length=(2, 2, 2, 0, 2, 1))
    args = operands(case, make_inputs(case), Format("float32"))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> jax.Array:
        return paged_attention("native", q, PagedKV(k, v, None, None, 1, Format("float32")), *rows, scale=0.1)

    flat = (args[0], args[1].k, args[1].v, *args[2:])
    compiled = jax.jit(attend).lower(*flat).compile()
    kept = pickle.dumps((serialize(compiled), jax.device_get(flat)))
    env = {**os.environ, "NPROC": "1", "PJRT_NPROC": "1"}
    done = subprocess.run([sys.executable, "-c", code], input=kept, check=True, capture_output=True, env=env)
    assert bytes.fromhex(done.stdout.decode()) == np.asarray(compiled(*flat)).tobytes()
