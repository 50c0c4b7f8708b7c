"""What the kernels for GPUs share: where they can run, and how they open codes of few bits."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jax import lax


def gpu_capability() -> str:
    """Returns the compute capability of the GPU that is here, such as ``9.0``, or ``gfx942``; "" where none is."""
    return jax.devices()[0].compute_capability if jax.default_backend() == "gpu" else ""


def why_no_gpu(version: str, capability: str) -> str | None:
    """Returns why the GPU's kernels cannot be made, or None.

    Args:
      version: of jax; 0.12 says that a later one will not have Triton. capability: of `gpu_capability`.
    """
    if find_spec("jax.experimental.pallas.triton") is None:
        return f"jax {version} has no Pallas by way of Triton, which the GPU's kernels are written in"
    if capability.startswith("gfx"):
        return f"the GPU's kernels are for NVIDIA's, this is a {capability}"
    if capability and float(capability) < 8:
        return f"the GPU's kernels need compute capability 8.0, this one has {capability}"
    return None


def double_fp4(code):
    """Returns twice the numbers of e2m1 codes 0 to 15, in the codes' signed dtype: 0 1 2 3 4 6 8 12, and negatives."""
    size = code & 7
    size = jnp.where(size < 4, size, (2 + (size & 1)) << jnp.maximum((size >> 1) - 1, 0))
    return jnp.where(code < 8, size, -size)


def open_float8(bits, kind: str):
    """Returns 8-bit floats in float32, by way of the float16 whose bits they begin: an A100 has no conversion.

    Args:
      bits: uint8. kind: ``fp8_e4m3`` or ``fp8_e5m2``.
    """
    x = bits.astype(jnp.uint16)
    x = x << 8 if kind == "fp8_e5m2" else ((x & 0x80) << 8) | ((x & 0x7F) << 7)
    number = lax.bitcast_convert_type(x, jnp.float16).astype(jnp.float32)
    return number if kind == "fp8_e5m2" else number * 256
