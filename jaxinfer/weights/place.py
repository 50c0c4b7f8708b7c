"""Tensors of codes arranged as the parameter that they make: every component as the weight itself would be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxinfer.arrays.quantized import Quantized
from jaxinfer.arrays.specs import ParamSpec
from jaxinfer.weights.buffers import all_finite
from jaxinfer.weights.tensors import TensorSource


class Recipe(Protocol):
    """How a leaf comes out of a checkpoint: ``transform`` of the arrays of ``names``, in that order.

    ``rows`` does the same to the rows of matrices, whatever their columns; None where the leaf is no matrix.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def transform(self) -> Callable[..., np.ndarray]: ...
    @property
    def rows(self) -> Callable[..., np.ndarray] | None: ...


def hold(source: TensorSource, recipe: Recipe, spec: ParamSpec) -> Quantized | None:
    """Returns shapes and dtypes of a parameter as its checkpoint has it in codes; None where it cannot lie so.

    Args:
      source: the opened checkpoint. recipe: of the parameter. spec: its description.
    """
    infos = [source.tensors.get(name) for name in recipe.names]
    hollow = [info.hollow for info in infos if info is not None and info.hollow is not None]
    return place(hollow, recipe, spec) if len(hollow) == len(infos) else None


def place(parts: Sequence[Quantized], recipe: Recipe, spec: ParamSpec) -> Quantized | None:
    """Returns tensors of codes arranged as a parameter, every component by the recipe's own rows.

    Groups that would reach across the last axis (two heads of 64 under one scale of 128) become smaller ones of the
    same scale.

    Returns:
      None where the parts differ in format, or the recipe does not leave rows whole.
    """
    fmt, last = parts[0].format, spec.shape[-1]
    if recipe.rows is None or any(part.format != fmt for part in parts) or last * fmt.bits % 8:
        return None
    times = 1
    if fmt.group is not None and last % fmt.group:
        step = math.gcd(last, fmt.group)
        if step < 8 or fmt.kind in ("mxfp4", "nvfp4"):
            return None
        times, fmt = fmt.group // step, replace(fmt, group=step)
    num_out, rows_of = len(spec.shape) - spec.num_in, recipe.rows

    def arrange(name: str, per_channel: bool = False) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        if arrays[0] is None:
            return None
        if times > 1 and not per_channel and name != "values":
            arrays = [array.repeat(times, axis=-1) for array in arrays]
        rows = rows_of(*arrays)
        if rows.shape[-1] != arrays[0].shape[-1] or rows.dtype != arrays[0].dtype:
            raise ValueError(f"{rows.shape} of {rows.dtype} are not the rows of {arrays[0].shape}")
        front = spec.shape[:num_out] if per_channel else spec.shape[:-1]
        return rows.reshape(*front, *([1] * spec.num_in if per_channel else [-1]))

    try:
        channel = fmt.group is None
        scale, offset = arrange("scale", channel), arrange("offset", channel)
        return Quantized(arrange("values"), scale, offset, arrange("outer", per_channel=True), fmt)
    except ValueError:
        return None


def find_fault(coded: Quantized) -> str:
    """Returns what is not finite in host arrays of codes and scales, in words; "" for nothing."""
    for name in ("scale", "offset", "outer"):
        part = getattr(coded, name)
        if part is None:
            continue
        if coded.format.kind == "mxfp4":
            part = part.view(ml_dtypes.float8_e8m0fnu)
        if not all_finite(np.ascontiguousarray(part).astype(np.float32)):
            return f"its {name}s hold NaN or infinity"
    if coded.format.kind.startswith("fp8") and not all_finite(np.ascontiguousarray(coded.values)):
        return "NaN or infinity"
    return ""
