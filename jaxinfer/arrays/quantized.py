"""A weight of codes and scales as it lies in memory: what it holds, and its abstract form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.rotation import block_size
from jaxinfer.arrays.sharding import RULES
from jaxinfer.arrays.specs import ParamSpec


@struct.dataclass
class InStack:
    """The codes of one layer where they lie, in their stack: a kernel reads them there, what is sliced may be copied.

    Attributes:
      stack: ``[l, *out, in or bytes]``. index: int32, the layer's place.
    """

    stack: jax.Array
    index: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's codes."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """The rank of the layer's codes."""
        return self.stack.ndim - 1

    def reshape(self, *shape: int) -> InStack:
        """Returns the layer's codes in another shape."""
        return InStack(self.stack.reshape(len(self.stack), *shape), self.index)

    def take(self) -> jax.Array:
        """Returns the layer's codes, sliced."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.index, keepdims=False)


@struct.dataclass
class Quantized:
    """A weight ``[*out, *in]``; every component has its rank, so it inherits its axes, stacks, joins and shards.

    ``w = codes * scale + offset``, each scale and offset repeated over its group; `rotate` of that where the format is
    rotated.

    Attributes:
      values: codes. 8 bits: ``[*out, *in]``. 4 bits: uint8 ``[*out, *in[:-1], in[-1] // 2]``, number 2i in the low half
        of a byte and 2i + 1 in the high one; int4 without offset in two's complement, with one 0 to 15. In a scan whose
        kernel reads stacks an `InStack` of these.
      scale: per channel ``[*out, 1, ..., 1]`` float32; groups ``[*out, *in[:-1], in[-1] // group]``, bfloat16 where we
        round ourselves (files bring float16 or float32), for mxfp4 the bits of e8m0 (uint8), for nvfp4 fp8 e4m3.
      offset: like scale, or None.
      outer: nvfp4's second scale, ``[*out, 1, ..., 1]`` float32, which multiplies ``scale``; else None.
      format: how to read them.
    """

    values: Any
    scale: Any
    offset: Any = None
    outer: Any = None
    format: Format = struct.field(pytree_node=False, default=Format("int8"))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *front, last = self.values.shape
        return (*front, last * 2 if self.format.bits == 4 else last)

    @property
    def ndim(self) -> int:
        """The rank of the weight and of each component."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """How many numbers the weight has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all components."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def is_quantized(node: Any) -> bool:
    """Returns whether a tree node is a weight of codes."""
    return isinstance(node, Quantized)


def fit_format(spec: ParamSpec, fmt: Format) -> Format:
    """Returns the format that a weight can take: groups that do not divide its last axis become smaller ones that do.

    A rotation of no size gets the weight's own, or is left out where its inputs are too odd a number.

    Raises:
      ValueError: no power of two from 8 divides it (for a format of fixed groups: those do not), or a rotation does
        not.
    """
    if fmt.is_plain:
        return fmt
    last, group = spec.shape[-1], fmt.group
    fixed = fmt.kind in ("mxfp4", "nvfp4")
    while group is not None and last % group and group > 8 and not fixed:
        group //= 2
    if last % (group or (2 if fmt.bits == 4 else 1)):
        fits = "int8 or a 16-bit format" if fmt.bits == 4 else "no groups"
        raise ValueError(
            f"{fmt}: {last} inputs of a weight {list(spec.shape)} cannot be grouped; take {fits} for it"
        )
    rotation = fmt.rotation
    if rotation == 0:
        rotation = block_size(last, is_cut=bool(RULES.get(spec.axes[-1] or "")))
    elif rotation and (last % rotation or block_size(rotation, is_cut=False) is None):
        raise ValueError(
            f"{fmt}: {last} inputs of a weight {list(spec.shape)} cannot be rotated by {rotation}; take "
            f"{replace(fmt, rotation=0)}, which is what suits each weight"
        )
    return replace(fmt, group=group, rotation=rotation)


def abstract(spec: ParamSpec, fmt: Format) -> Any:
    """Returns the abstract form of a weight: a `ShapeDtypeStruct`, or a `Quantized` of them."""
    if fmt.is_plain:
        return jax.ShapeDtypeStruct(spec.shape, fmt.dtype)
    fmt = fit_format(spec, fmt)
    *front, last = spec.shape
    out = spec.shape[: len(spec.shape) - spec.num_in]
    channel = (*out, *[1] * spec.num_in)
    grouped = channel if fmt.group is None else (*front, last // fmt.group)
    scale = jax.ShapeDtypeStruct(grouped, scale_dtype(fmt))
    return Quantized(
        values=jax.ShapeDtypeStruct((*front, last // 2 if fmt.bits == 4 else last), fmt.dtype),
        scale=scale,
        offset=scale if fmt.offset else None,
        outer=jax.ShapeDtypeStruct(channel, jnp.float32) if fmt.kind == "nvfp4" else None,
        format=fmt,
    )


def scale_dtype(fmt: Format) -> jnp.dtype:
    """Returns the dtype of a weight's scales: the format's own, or what we round to."""
    if fmt.scale:
        return jnp.dtype(fmt.scale)
    fixed = {"mxfp4": jnp.uint8, "nvfp4": jnp.float8_e4m3fn}
    return jnp.dtype(fixed.get(fmt.kind, jnp.float32 if fmt.group is None else jnp.bfloat16))
