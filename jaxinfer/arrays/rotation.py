"""Inputs of a weight rotated before they are rounded, so that none of them is far larger than the others.

A few inputs of a layer are a hundred times the rest, and set the scale by which one row's int8 codes are rounded. A
rotation spreads them over all. It is its own inverse, and one that both sides of a product share changes nothing:
``x @ w.T == rotate(x) @ rotate(w).T``. Weights are rotated once, on the host; rows whenever they meet one.

A block of ``n = m * p`` inputs, ``p`` the largest power of two that divides it, is ``m`` runs of ``p``: the Hadamard
matrix of ``p`` mixes each run, a reflection (Householder's, on the vector of ones) the runs. 576 inputs are 9 runs of
64: without the reflection SmolLM2's KL from float32 is 0.0054, with it 0.0044, unrotated 0.0416.

Source: QuaRot (Ashkboos et al. 2024, arXiv:2404.00456) for rotations that undo outliers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.arrays.backend import backend

LEAST = 16  # a run of fewer mixes too little, and is less than a vector of the native kernels
CUT = 128  # inputs of a block at most where a mesh cuts them: shares are whole blocks
_FACTOR = 128  # a longer run takes two products of shorter ones


def block_size(num_in: int, is_cut: bool) -> int | None:
    """Returns how many inputs a weight's rotation mixes; None where they are too odd a number to be rotated.

    Args:
      num_in: length of its last axis. is_cut: whether a mesh cuts that axis.
    """
    run = num_in & -num_in
    if run < LEAST:
        return None
    return min(run, CUT) if is_cut else num_in


def rotate(x: jax.Array, block: int) -> jax.Array:
    """Returns ``[..., I]`` rotated, each block of the last axis for itself; float32."""
    p, m = _runs(block)
    y = x.reshape(-1, max(1, p // _FACTOR), min(p, _FACTOR))
    # Entries of +-1 are exact in 16 bits too, which a CPU multiplies slowly when rows are few.
    narrow = x.dtype.itemsize == 2 and backend() != "cpu"
    y = _dot(y if narrow else y.astype(jnp.float32), hadamard(y.shape[2]), 2)
    if y.shape[1] > 1:
        y = _dot(y, hadamard(y.shape[1]), 1).swapaxes(1, 2)
    y = y.reshape(-1, m, p) * np.float32(p**-0.5)
    if m > 1:
        y = y - y.sum(1, keepdims=True) * np.float32(2 / m)
    y = y.reshape(x.shape)
    # A GPU's XLA would sum over runs and blocks as they are, and lay every weight out anew for that.
    return jax.lax.optimization_barrier(y) if backend() == "gpu" else y


def rotate_host(x: np.ndarray, block: int) -> np.ndarray:
    """Returns what `rotate` does, in numpy: ``[..., I]`` float32.

    By sums and differences, not by a product: numpy's rounds in an order of its own from one array to the next, and a
    weight must have the same codes wherever it is made.
    """
    p, m = _runs(block)
    y, step = x, 1
    while step < p:
        low, high = np.moveaxis(y.reshape(-1, 2, step), 1, 0)
        y = np.stack((low + high, low - high), 1)
        step *= 2
    y = y.reshape(-1, m, p) * np.float32(p**-0.5)
    if m > 1:
        y -= y.sum(1, keepdims=True) * np.float32(2 / m)
    return y.reshape(x.shape)


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """Returns Sylvester's matrix ``[size, size]`` of +-1, for a power of two; symmetric, its square is ``size``."""
    if size == 1:
        return np.ones((1, 1), np.int8)
    half = hadamard(size // 2)
    return np.block([[half, half], [half, -half]])


def _runs(block: int) -> tuple[int, int]:
    """Returns the length of a block's runs and how many there are."""
    p = block & -block
    return p, block // p


def _dot(x: jax.Array, matrix: np.ndarray, axis: int) -> jax.Array:
    """Returns one axis of ``x`` times a symmetric matrix of +-1, as the last axis; float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype.itemsize == 4 else None
    numbers = (((axis,), (0,)), ((), ()))
    return jax.lax.dot_general(
        x, jnp.asarray(matrix, x.dtype), numbers, precision=precision, preferred_element_type=jnp.float32
    )
