"""Rows times weights by native kernels: equal to the oracle, row by row the same in any batch, safe with anything."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.serialize_executable import serialize

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import linear, take_rows
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.hardware import cpu_features
from jaxinfer.kernels.matmul.api import call_floats, call_form, choose_matmul, float_form, prepare_native
from jaxinfer.kernels.matmul.cases import CASES, FLOAT_CASES, Case, make_floats, make_inputs
from jaxinfer.kernels.matmul.reference import multiply_reference
from jaxinfer.kernels.native.machine import MACHINES, Machine, register, this_machine

HERE, WHY = this_machine()
needs_native = pytest.mark.skipif(HERE is None, reason=WHY)
RUNNABLE = [machine for needed, machine in MACHINES if HERE and cpu_features().issuperset(needed)]
if HERE and HERE.name == "avx512vnni":
    RUNNABLE.append(Machine("avx512vl", 8, True))  # its 256-bit form, which processors with avx_vnni have too
ORACLE = jax.jit(multiply_reference, static_argnums=2)
CALL = jax.jit(call_form, static_argnums=(0, 3))


FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def form_for(w: Quantized, machine: Machine | None = HERE) -> Any:
    """Returns the kernel's form, its code made and registered."""
    from jaxinfer.kernels.matmul.native import form_of, kernel

    assert machine is not None
    form = form_of(w, machine)
    assert form is not None
    register([kernel(form)])
    return form


def call(x: jax.Array, w: Quantized, out: jnp.dtype = FLOAT32, machine: Machine | None = HERE) -> np.ndarray:
    return np.asarray(CALL(form_for(w, machine), x, w, out), np.float32)


def inputs(case: Case) -> tuple[jax.Array, Quantized]:
    x, w = make_inputs(case)
    return jnp.asarray(x), jax.tree.map(jnp.asarray, w)


@needs_native
@pytest.mark.parametrize("machine", RUNNABLE, ids=lambda machine: machine.name)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.format}-{c.rows}x{c.num_in}x{c.num_out}")
def test_equals_the_oracle(machine: Machine, case: Case):
    x, w = inputs(case)
    for dtype in (jnp.float32, jnp.bfloat16):
        rows = x.astype(dtype)
        want = np.asarray(ORACLE(rows, w, FLOAT32))
        size = np.abs(want).max(1, keepdims=True)
        # Rotated rows are sums in another order: a number halfway between two codes may become the other.
        atol = 2e-3 if w.format.rotation else 1e-6
        np.testing.assert_allclose(call(rows, w, machine=machine) / size, want / size, atol=atol)
        narrow = call(rows, w, BFLOAT16, machine)
        np.testing.assert_array_equal(
            narrow, np.asarray(jnp.asarray(call(rows, w, machine=machine)).astype(jnp.bfloat16))
        )


@needs_native
@pytest.mark.parametrize("fmt", ["int8", "int8:rot", "int8:g32", "int4", "int4:g32:zero"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(fmt: str):
    x, w = inputs(Case(fmt, 100, 576, 96))
    whole = call(x, w)
    for rows in (1, 2, 3, 16, 17):
        np.testing.assert_array_equal(call(x[:rows], w), whole[:rows])


@needs_native
@pytest.mark.parametrize("fmt", ["int8", "int4:g32"])
def test_extreme_codes_do_not_overflow(fmt: str):
    """Every product at its largest, of either sign."""
    _, w = inputs(Case(fmt, 2, 256, 32))
    extreme = {"int8": (-127, 127), "int4:g32": (0x88, 0x77)}[fmt]
    for number in extreme:
        full = replace(w, values=jnp.full_like(w.values, number))
        x = jnp.stack([jnp.full(256, 3.0), jnp.full(256, -3.0)])
        want = np.asarray(ORACLE(x, full, FLOAT32))
        for machine in RUNNABLE:
            np.testing.assert_allclose(call(x, full, machine=machine), want, rtol=1e-6)


@needs_native
@pytest.mark.parametrize("machine", RUNNABLE, ids=lambda machine: machine.name)
@pytest.mark.parametrize(("rotation", "num_in"), [("r64", 576), ("r256", 256)])
def test_rotated_rows_become_the_very_codes(machine: Machine, rotation: str, num_in: int):
    """Of small whole numbers, whose sums and halvings are exact in any order."""
    _, w = inputs(Case(f"int8:{rotation}", 1, num_in, 48))
    x = jnp.asarray(np.random.default_rng(1).integers(-9, 10, (7, num_in)) * 3.0, jnp.float32)
    want = np.asarray(ORACLE(x, w, FLOAT32))
    np.testing.assert_allclose(call(x, w, machine=machine), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@needs_native
@pytest.mark.parametrize("fmt", ["int8", "int8:rot"])
def test_what_is_not_finite_stays_in_its_row(fmt: str):
    x, w = inputs(Case(fmt, 5, 128, 64))
    x = x.at[1].set(0).at[2, 7].set(jnp.nan).at[3, 9].set(jnp.inf)
    got, want = call(x, w), np.asarray(ORACLE(x, w, FLOAT32))
    assert (got[1] == 0).all()
    assert np.isnan(got[2]).all()
    assert not np.isfinite(got[3]).any()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got[[0, 4]], want[[0, 4]], rtol=1e-5)
    tiny = x.at[:].set(1e-42)
    assert np.isfinite(call(tiny, w)).all()


@needs_native
def test_many_calls_at_once_do_not_lock_each_other_out():
    """Independent products in one program, which XLA runs side by side on the pool that they share."""
    x, w = inputs(Case("int8", 4, 256, 320))
    form = form_for(w)

    def run(x: jax.Array) -> jax.Array:
        return jnp.stack([call_form(form, x * (i + 1), w, FLOAT32) / (i + 1) for i in range(40)]).sum(0)

    want = 40 * np.asarray(ORACLE(x, w, FLOAT32))
    many = jax.jit(run)
    for _ in range(20):
        np.testing.assert_allclose(np.asarray(many(x)), want, rtol=1e-4, atol=1e-3 * np.abs(want).max())


@needs_native
def test_one_thread_is_enough():
    code = (
        "import jax, jax.numpy as jnp, numpy as np\n"
        "from jaxinfer.kernels.matmul.api import multiply_native, prepare_native\n"
        "from jaxinfer.kernels.matmul.cases import Case, make_inputs\n"
        "prepare_native()\n"
        "x, w = make_inputs(Case('int8', 3, 576, 96))\n"
        "y = jax.jit(multiply_native, static_argnums=2)(x, jax.tree.map(jnp.asarray, w), jnp.dtype('float32'))\n"
        "print(np.asarray(y).tobytes().hex())\n"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **env},
        ).stdout
        for env in ({}, {"NPROC": "1", "PJRT_NPROC": "1"})
    ]
    assert done[0] == done[1]


W8A8 = Policy.parse("w8a8,compute=float32")


@pytest.mark.parametrize(
    ("name", "policy", "devices", "problem"),
    [
        ("nonsense", W8A8, 1, "there are: auto, xla, native"),
        ("native", Policy.parse("weights=int8,compute=float32"), 1, "act=int8.*no plain weights"),
        ("native", Policy.parse("float32"), 1, "XLA multiplies float32 weights"),
        (
            "native",
            Policy.parse("weights=float32,compute=bfloat16"),
            1,
            "no native kernel for float32 weights",
        ),
        ("native", W8A8, 2, "one device"),
    ],
)
def test_what_cannot_run_is_an_error(name: str, policy: Policy, devices: int, problem: str):
    with pytest.raises(ValueError, match=problem):
        choose_matmul(name, policy, devices)


def test_auto_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxinfer.kernels.native.machine.find_spec", lambda name: None)
    name, why = choose_matmul("auto", W8A8)
    assert name == "xla"
    assert "llvmlite" in why or "x86" in why


@needs_native
def test_an_executable_that_calls_kernels_can_be_kept():
    """Saved and loaded in the process that made the kernels, and in one that makes them first."""
    code = (
        "import pickle, sys, jax\n"
        "from jax.experimental.serialize_executable import deserialize_and_load\n"
        "from jaxinfer.kernels.matmul.api import prepare_native\n"
        "prepare_native()\n"
        "body, x, w = pickle.load(sys.stdin.buffer)\n"
        "run = deserialize_and_load(*body, execution_devices=jax.devices()[:1])\n"
        "sys.stdout.write(jax.device_get(run(x, *w)).tobytes().hex())\n"
    )
    x, w = inputs(Case("int8", 3, 576, 96))
    parts = w.values, w.scale
    form = form_for(w)

    def multiply(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        return call_form(form, x, replace(w, values=values, scale=scale), FLOAT32)

    compiled = jax.jit(multiply).lower(x, *parts).compile()
    kept = pickle.dumps((serialize(compiled), *jax.device_get((x, parts))))
    done = subprocess.run([sys.executable, "-c", code], input=kept, check=True, capture_output=True)
    assert bytes.fromhex(done.stdout.decode()) == call(x, w).tobytes()


# Every kernel of plain weights that runs here: widened with each set of vectors, and pairs of bfloat16 where there is
# an instruction for them.
WIDENED = [(machine, False) for machine in RUNNABLE]
PAIRED = [(HERE, True)] if HERE and HERE.lanes == 16 and "avx512_bf16" in cpu_features() else []
FLOAT_CALL = jax.jit(call_floats, static_argnums=(0, 3))


def ways(name: str) -> list[tuple[Machine, bool]]:
    return WIDENED + PAIRED if name == "bfloat16" else WIDENED


def call_plain(
    x: np.ndarray, w: np.ndarray, way: tuple[Machine, bool], out: jnp.dtype = FLOAT32
) -> np.ndarray:
    from jaxinfer.kernels.matmul.floats import FloatForm, kernel

    machine, has_dots = way
    form = FloatForm(str(w.dtype), has_dots, machine)
    register([kernel(form)])
    assert form.takes(*w.shape[::-1])
    return np.asarray(FLOAT_CALL(form, jnp.asarray(x, w.dtype), jnp.asarray(w), out), np.float32)


@needs_native
@pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda c: f"{c.format}-{c.rows}x{c.num_in}x{c.num_out}")
def test_plain_weights_equal_float64(case: Case):
    """Within the roundings of a sum in float32, of which there is one an input; 16 bits are that sum rounded."""
    x, w = make_floats(case)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    bound = case.num_in * 2.0**-24 * (np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T)
    for way in ways(case.format):
        got = call_plain(x, w, way)
        assert (np.abs(got - exact) <= bound).all(), way
        narrow = call_plain(x, w, way, BFLOAT16)
        np.testing.assert_array_equal(narrow, np.asarray(jnp.asarray(got).astype(jnp.bfloat16), np.float32))


@needs_native
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_row_of_plain_weights_has_the_same_bits_alone_and_in_any_batch(name: str):
    x, w = make_floats(Case(name, 600, 576, 80))
    for way in ways(name):
        whole = call_plain(x, w, way)
        for rows in (1, 2, 3, 5, 9, 16, 17, 31, 100, 513):
            np.testing.assert_array_equal(call_plain(x[-rows:], w, way), whole[-rows:])


@needs_native
def test_what_is_not_finite_passes_as_in_a_plain_product():
    x, w = make_floats(Case("bfloat16", 20, 160, 40))
    x[1, 3], x[2, 5], x[3, 9] = np.nan, np.inf, 0.0
    w[7, 9], w[8, 0] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float64) @ w.astype(np.float64).T
    for way in ways("bfloat16"):
        for rows in (4, 20):
            got = call_plain(x[:rows], w, way)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want[:rows]))
            np.testing.assert_array_equal(np.isinf(got), np.isinf(want[:rows]))


@needs_native
def test_sums_do_not_round_to_16_bits_on_the_way():
    """A sum of 4,096 ones and one of 2**-7, which bfloat16 could not hold together."""
    x, w = np.ones((3, 4098), np.float32), np.ones((32, 4098), jnp.bfloat16)
    w[:, -1] = 2.0**-7
    for way in ways("bfloat16"):
        np.testing.assert_array_equal(call_plain(x, w, way), np.float32(4097 + 2.0**-7))


NATIVE_BFLOAT16 = replace(Policy.parse("bfloat16"), matmul="native")


@pytest.fixture
def native_bfloat16() -> None:
    if HERE is None or float_form(BFLOAT16, BFLOAT16)[0] is None:
        pytest.skip("no native kernel for bfloat16 here")
    prepare_native(NATIVE_BFLOAT16)


@pytest.mark.usefixtures("native_bfloat16")
@pytest.mark.parametrize("num_layers", [1, 3])
def test_weights_reach_the_kernel_as_they_lie(num_layers: int):
    """No copy and no wide form of a table that is embedding and head, nor of layers' weights that stand alone."""
    V, D, F = 320, 64, 96

    def step(table: jax.Array, up: tuple[jax.Array, ...], down: tuple[jax.Array, ...], ids: jax.Array):
        x = take_rows(table, ids, BFLOAT16)
        for u, d in zip(up, down, strict=True):
            x = linear(linear(x, u[0], NATIVE_BFLOAT16), d[0], NATIVE_BFLOAT16)
        return linear(x, table, NATIVE_BFLOAT16, FLOAT32)

    shape = jax.ShapeDtypeStruct
    up = (shape((1, F, D), BFLOAT16),) * num_layers
    down = (shape((1, D, F), BFLOAT16),) * num_layers
    text = jax.jit(step).lower(shape((V, D), BFLOAT16), up, down, shape((8,), jnp.int32)).compile().as_text()
    assert text is not None
    assert text.count("custom-call(") == 2 * num_layers + 1
    # Inside a fusion (jax 0.10 widens there what a gather reads) a shape is not an array that is written.
    for line in text[text.index("ENTRY") :].splitlines():
        made = line.partition(" = ")[2]
        if made.partition("{")[0] in ("bf16[320,64]", "bf16[96,64]", "bf16[64,96]"):
            assert " parameter(" in made or " bitcast(" in made, line
        assert "f32[320,64]" not in made


@pytest.mark.usefixtures("native_bfloat16")
def test_small_and_odd_weights_are_left_to_xla():
    x = jnp.ones((3, 30), jnp.bfloat16)
    assert (linear(x, jnp.ones((40, 30), jnp.bfloat16), NATIVE_BFLOAT16) == 30).all()
    assert (linear(x[:, :29], jnp.ones((8, 29), jnp.bfloat16), NATIVE_BFLOAT16) == 29).all()


@pytest.mark.usefixtures("native_bfloat16")
def test_auto_takes_native_kernels_for_bfloat16():
    assert choose_matmul("auto", Policy.parse("bfloat16"))[0] == "native"
    assert choose_matmul("auto", Policy.parse("weights=bfloat16,compute=float32"))[0] == "native"


@needs_native
def test_tiles_of_16_bits_are_left_to_xla(monkeypatch: pytest.MonkeyPatch):
    features = cpu_features() | {"amx_bf16"}
    monkeypatch.setattr("jaxinfer.kernels.matmul.api.cpu_features", lambda: features)
    name, why = choose_matmul("auto", Policy.parse("bfloat16"))
    assert name == "xla"
    assert "amx_bf16" in why
