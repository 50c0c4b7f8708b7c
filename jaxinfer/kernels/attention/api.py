"""Paged attention: the one door to its implementations, chosen by name when a run is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.arrays.backend import backend
from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import group_size
from jaxinfer.arrays.precision import Policy
from jaxinfer.config import AttentionConfig
from jaxinfer.kernels.attention.blocked import paged_attention_blocked
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.reference import paged_attention_reference
from jaxinfer.kernels.native.machine import Machine, register, this_machine
from jaxinfer.kernels.triton import gpu_capability, why_no_gpu

if TYPE_CHECKING:
    from jaxinfer.kernels.attention.form import Form


def paged_attention_native(
    q: jax.Array,
    kv: PagedKV,
    pages: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """As `paged_attention_reference`, by a native kernel; queries after a row's length give 0.

    Raises:
      ValueError: there is no such kernel, with the reason.
    """
    H = q.shape[3]
    form = form_of(kv.format, q.dtype, (q.shape[2], kv.count_heads(H), H))
    if isinstance(form, str):
        raise ValueError(f"attention=native cannot run: {form}; take attention=auto or attention=blocked")
    return call_form(form, q, kv, pages, start, length, scale=scale, window=window, softcap=softcap)


def _on_tpu(*operands: Any, **options: Any) -> jax.Array:
    # Pallas takes a third of a second to import.
    from jaxinfer.kernels.attention.tpu import paged_attention_tpu

    return paged_attention_tpu(*operands, **options)


def _interpreted(*operands: Any, **options: Any) -> jax.Array:
    return _on_tpu(*operands, **options, interpret=True)


def _on_gpu(*operands: Any, **options: Any) -> jax.Array:
    from jaxinfer.kernels.attention.gpu import paged_attention_gpu

    return paged_attention_gpu(*operands, **options)


def _interpreted_gpu(*operands: Any, **options: Any) -> jax.Array:
    return _on_gpu(*operands, **options, interpret=True)


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "blocked": paged_attention_blocked,
    "gpu": _on_gpu,
    "gpu-interpret": _interpreted_gpu,
    "native": paged_attention_native,
    "reference": paged_attention_reference,
    "tpu": _on_tpu,
    "tpu-interpret": _interpreted,
}

_DEVICES = ("gpu", "tpu")  # that have a kernel of their name


def choose_attention(
    name: str, heads: AttentionConfig, policy: Policy, num_devices: int = 1
) -> tuple[str, str]:
    """Returns the implementation that a run will use, and why; what is native is ready when this returns.

    Args:
      name: ``auto`` or a key of `IMPLEMENTATIONS`.
      heads: of the model. policy: of the run. num_devices: that the run's arrays lie on.

    Raises:
      ValueError: an unknown name, or ``native``, ``tpu`` or ``gpu`` where they cannot run: a kernel that was asked for
        runs or is an error.
    """
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f"attention: unknown implementation {name!r}; there are: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if name in _DEVICES and backend() != name:
        raise ValueError(
            f"attention={name} cannot run: its kernel is for {name.upper()}s, this is a {backend()}; take "
            f"attention=auto, or attention={name}-interpret to run it step by step in XLA"
        )
    problem = why_no_gpu(jax.__version__, gpu_capability()) if backend() == "gpu" else None
    if problem and name in ("auto", "gpu"):
        if name == "gpu":
            raise ValueError(f"attention=gpu cannot run: {problem}; take attention=auto or attention=blocked")
        return "blocked", problem
    if name not in ("auto", "native"):
        return name, "asked for"
    if name == "auto" and backend() in _DEVICES:
        return backend(), "it reads pages where they lie, in every format"
    problem = _why_not(heads, policy, num_devices)
    if problem is None:
        return "native", "asked for" if name == "native" else this_machine()[1]
    if name == "native":
        raise ValueError(f"attention=native cannot run: {problem}; take attention=auto or attention=blocked")
    return "blocked", problem


def _why_not(heads: AttentionConfig, policy: Policy, num_devices: int) -> str | None:
    """Makes the kernel that a run needs; returns why there is none, or None."""
    if backend() != "cpu":
        return f"native kernels are for CPUs, this is a {backend()}"
    if num_devices > 1:
        return f"native kernels run on one device, not on {num_devices}"
    form = form_of(policy.kv, policy.compute_dtype, (heads.num_heads, heads.num_kv_heads, heads.head_dim))
    return form if isinstance(form, str) else None


def form_of(
    fmt: Format, dtype: jnp.dtype, heads: tuple[int, int, int], machine: Machine | None = None
) -> Form | str:
    """Returns the native kernel for pages of a format, made and registered, or why there is none.

    Args:
      fmt: of pages. dtype: of queries. heads: ``(N, K, H)``. machine: instructions, this machine's when None.
    """
    here, reason = this_machine()
    machine = machine or here
    if machine is None:
        return reason
    from jaxinfer.kernels.attention.form import Form
    from jaxinfer.kernels.attention.native import kernel

    N, K, H = heads
    scales = 0 if fmt.is_plain else H // group_size(fmt, H)
    form = Form(fmt, scales, dtype.name, N // K, H, machine)
    if form.problem is None:
        register([kernel(form)])
    return form.problem or form


def call_form(
    form: Form,
    q: jax.Array,
    kv: PagedKV,
    *rows: jax.Array,
    scale: float,
    window: jax.Array | int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Returns `paged_attention_native` by one kernel, which must be registered; ``rows``: pages, start, length."""
    from jaxinfer.kernels.attention.native import scratch_bytes

    B, T, N, _ = q.shape
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((scratch_bytes(form, B, T, N),), jnp.uint8),
    )
    none = jnp.zeros(0, jnp.uint8)
    scales = (none if each is None else each for each in (kv.k_scale, kv.v_scale))
    settings = jnp.stack([jnp.asarray(x, jnp.int32) for x in (kv.layer, 0 if window is None else window)])
    call = jax.ffi.ffi_call(form.name, shapes, vmap_method="sequential")
    out, _ = call(
        q, kv.k, kv.v, *scales, *(each.astype(jnp.int32) for each in rows), settings,
        scale=np.float32(scale), softcap=np.float32(softcap or 0),
    )  # fmt: skip
    return out


def paged_attention(
    implementation: str, q: jax.Array, kv: PagedKV, *rows: jax.Array, **options: Any
) -> jax.Array:
    """Attends from query blocks ``[B, T, N, H]`` to paged keys and values; see `paged_attention_reference`."""
    return IMPLEMENTATIONS[implementation](q, kv, *rows, **options)
