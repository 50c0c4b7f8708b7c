"""Where the kernels for GPUs can run."""

from __future__ import annotations

from importlib.util import find_spec

import jax


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
