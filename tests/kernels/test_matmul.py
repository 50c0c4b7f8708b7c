"""Rows times codes by native kernels: equal to the oracle, row by row the same in any batch, and safe with anything."""

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
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.hardware import cpu_features
from jaxinfer.kernels.matmul.api import call_form, choose_matmul
from jaxinfer.kernels.matmul.cases import CASES, Case, make_inputs
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
        np.testing.assert_allclose(call(rows, w, machine=machine) / size, want / size, atol=1e-6)
        narrow = call(rows, w, BFLOAT16, machine)
        np.testing.assert_array_equal(
            narrow, np.asarray(jnp.asarray(call(rows, w, machine=machine)).astype(jnp.bfloat16))
        )


@needs_native
@pytest.mark.parametrize("fmt", ["int8", "int8:g32", "int4", "int4:g32:zero"])
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
def test_what_is_not_finite_stays_in_its_row():
    x, w = inputs(Case("int8", 5, 128, 64))
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
        ("native", Policy.parse("bfloat16"), 1, "act=int8"),
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
