"""Rows times weights: the one door to what multiplies them, chosen by name when a run is built."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import MULTIPLIERS, Multiply
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.hardware import cpu_features
from jaxinfer.kernels.native.machine import register, this_machine
from jaxinfer.kernels.triton import gpu_capability, why_no_gpu

if TYPE_CHECKING:
    from jaxinfer.kernels.matmul.floats import FloatForm
    from jaxinfer.kernels.matmul.native import Form

IMPLEMENTATIONS = ("xla", "native", "tpu", "gpu")
_DEVICES = ("tpu", "gpu")  # that have a kernel of their name
_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))  # that kernels read and write


def choose_matmul(name: str, policy: Policy, num_devices: int = 1) -> tuple[str, str]:
    """Returns what multiplies in a run, and what of it and why; what is native is ready when this returns.

    Args:
      name: ``auto`` or one of `IMPLEMENTATIONS`. policy: of the run. num_devices: that the run's arrays lie on.

    Raises:
      ValueError: an unknown name, or ``native``, ``tpu`` or ``gpu`` where they cannot run, with the reason.
    """
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f"matmul: unknown implementation {name!r}; there are: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if name == "xla":
        return name, "asked for"
    if name in _DEVICES or backend() in _DEVICES:
        return _choose_on_device(name, policy)
    problem = _why_not(num_devices)
    reasons = [problem] if problem else [_why_no_codes(policy), _why_no_floats(policy)]
    if None in reasons:
        prepare_native(policy)
        return "native", "asked for" if name == "native" else this_machine()[1]
    why = "; ".join(filter(None, reasons))
    if name == "native":
        raise ValueError(f"matmul=native cannot run: {why}; take matmul=auto or matmul=xla")
    return "xla", why


def _choose_on_device(name: str, policy: Policy) -> tuple[str, str]:
    """As `choose_matmul`, where there is a TPU or a GPU or a kernel of theirs is asked for."""
    device = backend()
    problem = None
    if name in _DEVICES and device != name:
        problem = f"its kernel is for {name.upper()}s, this is a {device}"
    elif name == "native":
        problem = f"native kernels are for CPUs, this is a {device}"
    elif policy.weights.bits != 4 or policy.weights.group is None or policy.act != "compute":
        kind = f"weights of {policy.weights} and act={policy.act}"
        problem = f"its kernel opens weights of 4 bits in groups for rows of 16 bits, the policy has {kind}"
    elif device == "gpu":
        problem = why_no_gpu(jax.__version__, gpu_capability())
    if problem is None:
        MULTIPLIERS[device] = _load_multiply(device)
        return device, "asked for" if name == device else "XLA writes weights of 4 bits out in 16 first"
    if name != "auto":
        raise ValueError(f"matmul={name} cannot run: {problem}; take matmul=auto or matmul=xla")
    return "xla", problem


def _load_multiply(device: str) -> Multiply:
    if device == "tpu":
        from jaxinfer.kernels.matmul.tpu import multiply_tpu

        return multiply_tpu
    from jaxinfer.kernels.matmul.gpu import multiply_gpu

    return multiply_gpu


def _why_not(num_devices: int) -> str | None:
    """Returns why no native kernel can run, or None where they can."""
    if backend() != "cpu":
        return f"native kernels are for CPUs, this is a {backend()}"
    if num_devices > 1:
        return f"native kernels run on one device, not on {num_devices}"
    machine, reason = this_machine()
    return reason if machine is None else None


def _why_no_codes(policy: Policy) -> str | None:
    """Returns why a policy's codes are not for native kernels, or None."""
    if policy.act == "int8":
        return None
    return f"native kernels multiply rows of int8 by codes (act=int8), the policy has act={policy.act}"


def _why_no_floats(policy: Policy) -> str | None:
    """Returns why a policy's plain weights are not for native kernels, or None where some are."""
    reasons = sorted(float_form(*pair)[1] for pair in _float_pairs(policy))
    return None if "" in reasons else "; ".join(reasons) or "the policy has no plain weights"


def float_form(rows: jnp.dtype, weights: jnp.dtype) -> tuple[FloatForm | None, str]:
    """Returns the kernel for plain weights, or None, and why there is none.

    Args:
      rows: the compute format. weights: their dtype in memory.
    """
    machine, reason = this_machine()
    if machine is None:
        return None, reason
    from jaxinfer.kernels.matmul.floats import FloatForm

    features = cpu_features()
    pair = f"{weights} weights in {rows}"
    if rows.itemsize == 2 and "amx_bf16" in features:
        return None, f"{pair} are left to XLA, which has the processor's tiles (amx_bf16) multiply them"
    if rows != weights and (weights.itemsize > 2 or rows.itemsize == 2):
        return None, f"there is no native kernel for {pair}"
    if weights.itemsize > 2:
        return None, f"XLA multiplies {pair}"
    has_dots = rows == jnp.bfloat16 and machine.lanes == 16 and "avx512_bf16" in features
    return FloatForm(str(weights), has_dots, machine), ""


def prepare_native(policy: Policy | None = None) -> None:
    """Makes the native kernels of a policy, or all; executables that call them can be loaded afterwards.

    Raises:
      ValueError: they cannot run here, with the reason.
    """
    machine, reason = this_machine()
    if machine is None:
        raise ValueError(f"matmul=native cannot run: {reason}")
    from jaxinfer.kernels.matmul import floats, native

    if policy is None or policy.act == "int8":
        forms = [native.Form(bits, grouped, machine) for bits, grouped in ((8, False), (8, True), (4, True))]
        register(native.kernel(form) for form in forms)
    pairs = _float_pairs(policy) if policy else product(_FLOATS, (*_FLOATS, jnp.dtype(jnp.float16)))
    register(floats.kernel(form) for form in {float_form(*pair)[0] for pair in pairs} if form is not None)
    MULTIPLIERS["native"] = multiply_native


def _float_pairs(policy: Policy) -> set[tuple[jnp.dtype, jnp.dtype]]:
    """Returns the compute format with the dtype of each plain weight that a policy has."""
    return {(policy.compute_dtype, fmt.dtype) for fmt in policy.weight_formats() if fmt.is_plain}


def multiply_native(x: jax.Array, w: jax.Array | Quantized, out: jnp.dtype) -> jax.Array | None:
    """Multiplies rows by plain weights, or rows rounded to int8 by codes, with a native kernel.

    Args:
      x: ``[M, in]``. w: ``[out, in]`` of int8 or int4, or of floats. out: dtype of the result.

    Returns:
      ``[M, out]``, or None where the kernels cannot take such a weight: a small or odd one, that XLA multiplies.
    """
    machine, _ = this_machine()
    if machine is None or len(x) == 0:
        return None
    if isinstance(w, Quantized):
        from jaxinfer.kernels.matmul.native import form_of

        coded = form_of(w, machine)
        return None if coded is None else call_form(coded, x, w, out)
    form, _ = float_form(x.dtype, w.dtype)
    return call_floats(form, x, w, out) if form is not None and form.takes(*w.shape[::-1]) else None


def call_floats(form: FloatForm, x: jax.Array, w: jax.Array, out: jnp.dtype) -> jax.Array:
    """Returns rows ``x [M, in]`` times floats ``w [out, in]`` by one kernel, which must be registered."""
    M = len(x)
    padded = next((rows for rows in form.few if rows >= M), M)
    x = jnp.pad(x.astype(form.rows), ((0, padded - M), (0, 0)))
    shape = jax.ShapeDtypeStruct((padded, len(w)), out if out in _FLOATS else _FLOATS[0])
    return jax.ffi.ffi_call(form.name, shape, vmap_method="sequential")(x, w)[:M].astype(out)


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
    rotation = jnp.zeros((0, w.format.rotation or 0), jnp.int8)
    call = jax.ffi.ffi_call(form.name, shapes, vmap_method="sequential")
    return call(x, w.values, w.scale, offset, rotation)[0].astype(out)
