"""Rows times weights of codes: the one door to what multiplies them, chosen by name when a run is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import MULTIPLIERS
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.kernels.native.machine import register, this_machine

if TYPE_CHECKING:
    from jaxinfer.kernels.matmul.native import Form

IMPLEMENTATIONS = ("xla", "native")
_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))  # that kernels read and write


def choose_matmul(name: str, policy: Policy, num_devices: int = 1) -> tuple[str, str]:
    """Returns what multiplies rows by codes in a run, and why; what is native is ready when this returns.

    Args:
      name: ``auto`` or one of `IMPLEMENTATIONS`. policy: of the run. num_devices: that the run's arrays lie on.

    Raises:
      ValueError: an unknown name, or ``native`` where it cannot run, with the reason.
    """
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f"matmul: unknown implementation {name!r}; there are: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if name == "xla":
        return name, "asked for"
    problem = _why_not(policy, num_devices)
    if problem is None:
        prepare_native()
        return "native", "asked for" if name == "native" else this_machine()[1]
    if name == "native":
        raise ValueError(f"matmul=native cannot run: {problem}; take matmul=auto or matmul=xla")
    return "xla", problem


def _why_not(policy: Policy, num_devices: int) -> str | None:
    """Returns why native kernels cannot run, or None where they can."""
    if backend() != "cpu":
        return f"native kernels are for CPUs, this is a {backend()}"
    if policy.act != "int8":
        return f"native kernels multiply rows of int8 by codes (act=int8), the policy has act={policy.act}"
    if num_devices > 1:
        return f"native kernels run on one device, not on {num_devices}"
    machine, reason = this_machine()
    return reason if machine is None else None


def prepare_native() -> None:
    """Makes the native kernels; executables that call them can be loaded afterwards.

    Raises:
      ValueError: they cannot run here, with the reason.
    """
    machine, reason = this_machine()
    if machine is None:
        raise ValueError(f"matmul=native cannot run: {reason}")
    from jaxinfer.kernels.matmul.native import Form, kernel

    forms = [Form(bits, grouped, machine) for bits, grouped in ((8, False), (8, True), (4, True))]
    register(kernel(form) for form in forms)
    MULTIPLIERS["native"] = multiply_native


def multiply_native(x: jax.Array, w: Quantized, out: jnp.dtype) -> jax.Array | None:
    """Multiplies rows, rounded to int8, by codes with a native kernel.

    Args:
      x: ``[M, in]``. w: ``[out, in]`` of int8 or int4. out: dtype of the result.

    Returns:
      ``[M, out]``, or None where the kernels cannot take such a weight: a small or odd one, that XLA multiplies.
    """
    from jaxinfer.kernels.matmul.native import form_of

    machine, _ = this_machine()
    form = None if machine is None or len(x) == 0 else form_of(w, machine)
    return None if form is None else call_form(form, x, w, out)


def call_form(form: Form, x: jax.Array, w: Quantized, out: jnp.dtype) -> jax.Array:
    """Returns rows ``x [M, in]`` times codes ``w [out, in]`` by one kernel, which must be registered."""
    from jaxinfer.kernels.matmul.native import scratch_bytes

    M, num_in = x.shape
    num_out, groups = w.scale.shape
    x = x if x.dtype in _FLOATS else x.astype(_FLOATS[0])
    shapes = (
        jax.ShapeDtypeStruct((M, num_out), out if out in _FLOATS else _FLOATS[0]),
        jax.ShapeDtypeStruct((scratch_bytes(M, num_in, groups),), jnp.uint8),
    )
    offset = jnp.zeros((0, groups), w.scale.dtype) if w.offset is None else w.offset.astype(w.scale.dtype)
    call = jax.ffi.ffi_call(form.name, shapes, vmap_method="sequential")
    return call(x, w.values, w.scale, offset)[0].astype(out)
