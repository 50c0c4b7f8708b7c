"""How each format of Hugging Face folders lies in its tensors, and the same numbers as ours lie.

A codec takes the tensors of one module, by what follows the module's name and a dot, and gives its weight. All shapes
of the weight are ``[out, in]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.quantized import Quantized
from jaxinfer.weights.packed.bits import (
    hollow,
    pack_nibbles,
    recentre,
    unpack_nibbles,
    unpack_words,
    word_bytes,
)

Parts = Mapping[str, np.ndarray]
Values = Callable[[], np.ndarray]


class LayoutError(ValueError):
    """A module's tensors do not lie as their format says; the message is what was got and what is wanted."""


@dataclass(frozen=True)
class Packed:
    """A weight whose scales are read and whose numbers are not yet.

    Attributes:
      shape: ``[out, in]``, experts before it.
      format: the format of ours that holds it as it is, None where none does.
      values: gives the codes as ours lie; where ``format`` is None the weight itself, in float32.
      scale, offset, outer: as in `Quantized`.
      why: in words, why no format holds it.
    """

    shape: tuple[int, ...]
    format: Format | None
    values: Values
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None
    outer: np.ndarray | None = None
    why: str = ""

    def read(self) -> Quantized:
        """Returns the weight in our layout; only where a format holds it."""
        return self._make(self.values(), lambda part: part)

    def hollow(self) -> Quantized | None:
        """Returns the shapes and dtypes of what `read` gives, without reading it; None where no format holds it."""
        if self.format is None:
            return None
        *lead, last = self.shape
        values = hollow((*lead, last * self.format.bits // 8), self.format.dtype)
        return self._make(values, lambda part: hollow(part.shape, part.dtype))

    def _make(self, values: np.ndarray, keep: Callable[[np.ndarray], np.ndarray]) -> Quantized:
        if self.format is None:
            raise ValueError(self.why)
        scale, offset, outer = (None if p is None else keep(p) for p in (self.scale, self.offset, self.outer))
        return Quantized(values, scale, offset, outer, self.format)


def read_gptq(parts: Parts, settings: Mapping[str, Any]) -> Packed:
    """Returns the weight of a GPTQ module: ``w[o, i] = scales[g, o] * (q[i, o] - zero[g, o])``, ``g = g_idx[i]``.

    ``qweight [in * bits / 32, out]`` packs along the inputs, ``qzeros [G, out * bits / 32]`` along the outputs,
    ``scales [G, out]``. Files of the first version hold each zero less one, modulo ``2 ** bits``.

    Source: AutoGPTQ, ``qlinear_cuda_old.py`` (forward); GPTQModel, ``convert_gptq_v1_to_v2_format_module``.
    """
    bits, scales, words = settings["bits"], parts["scales"], parts["qweight"]
    (G, out), ins = scales.shape, words.shape[0] * 32 // bits
    _wanted("qweight", words, (ins * bits // 32, out))
    _wanted("qzeros", parts["qzeros"], (G, out * bits // 32))
    group = settings["group_size"] or ins
    if -(-ins // group) != G:
        raise LayoutError(f"scales have {G} groups, wanted {-(-ins // group)} of {group} for {ins} inputs")
    zeros = unpack_words(parts["qzeros"], bits) + np.uint8(0 if settings["zeros_as_they_are"] else 1)
    zeros = zeros.T & np.uint8(2**bits - 1)
    return _integers(
        (out, ins), bits, lambda: word_bytes(words.T), scales.T, zeros, group, parts.get("g_idx")
    )


# Word by word AWQ interleaves the outputs: nibble i of a word is output `_AWQ_ORDER[i]` of its eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read_awq(parts: Parts, settings: Mapping[str, Any]) -> Packed:
    """Returns the weight of an AWQ module of the ``gemm`` version: ``w[o, i] = scales[g, o] * (q[i, o] - zero[g, o])``.

    ``qweight [in, out / 8]`` and ``qzeros [G, out / 8]`` pack along the outputs, interleaved; ``scales [G, out]``.

    Source: AutoAWQ, ``awq/utils/packing_utils.py`` and ``awq/modules/linear/gemm.py``.
    """
    scales, words = parts["scales"], parts["qweight"]
    (G, out), ins = scales.shape, words.shape[0]
    _wanted("qweight", words, (ins, out // 8))
    zeros = np.full((out, G), 8, np.uint8)
    if "qzeros" in parts:
        _wanted("qzeros", parts["qzeros"], (G, out // 8))
        zeros = _deinterleave(parts["qzeros"]).T

    def values() -> np.ndarray:
        return pack_nibbles(np.ascontiguousarray(_deinterleave(words).T))

    return _integers((out, ins), 4, values, scales.T, zeros, _group(ins, G))


def _deinterleave(words: np.ndarray) -> np.ndarray:
    numbers = unpack_words(words, 4).reshape(len(words), -1, 8)
    ordered = np.empty_like(numbers)
    ordered[..., _AWQ_ORDER] = numbers
    return ordered.reshape(len(words), -1)


def read_packed(parts: Parts, settings: Mapping[str, Any]) -> Packed:
    """Returns the weight of a compressed-tensors module of format ``pack-quantized``: ``w = scale * (q - zero)``.

    ``weight_packed [out, in * bits / 32]`` holds ``q + 2 ** (bits - 1)``, ``weight_zero_point [out * bits / 32, G]``
    the zeros likewise but along the outputs, ``weight_scale [out, G]``, ``weight_shape [2]``.

    Source: compressed-tensors, ``compressors/pack_quantized`` (``pack_to_int32``, ``decompress``).
    """
    bits, words = settings["bits"], parts["weight_packed"]
    out, ins = (int(n) for n in parts["weight_shape"])
    _wanted("weight_packed", words, (out, -(-ins * bits // 32)))
    scale = _rows("weight_scale", parts["weight_scale"], out)
    G = scale.shape[1]
    zeros = np.full((out, G), 2 ** (bits - 1), np.uint8)
    if "weight_zero_point" in parts:
        _wanted("weight_zero_point", parts["weight_zero_point"], (-(-out * bits // 32), G))
        zeros = unpack_words(parts["weight_zero_point"].T, bits)[:, :out].T

    def values() -> np.ndarray:
        return word_bytes(words)[:, : ins * bits // 8]

    return _integers((out, ins), bits, values, scale, zeros, _group(ins, G), parts.get("weight_g_idx"))


SCALED_KINDS = {
    np.dtype(np.int8): "int8",
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8_e4m3",
    np.dtype(ml_dtypes.float8_e5m2): "fp8_e5m2",
}


def read_scaled(parts: Parts, settings: Mapping[str, Any]) -> Packed:
    """Returns a weight of 8-bit numbers beside their scales: ``w = weight * scale``, or ``(weight - zero) * scale``.

    The scale is one number, ``[out, 1]``, ``[out, G]`` for groups of inputs or ``[out / 128, in / 128]`` for blocks (of
    ``settings["block"]``), whose last ones may be cut. It is called ``weight_scale`` or ``weight_scale_inv``.

    Source: compressed-tensors, ``compressors/naive_quantized``; transformers, ``integrations/finegrained_fp8.py``.
    """
    weight = parts["weight"]
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    out, ins = weight.shape
    if weight.dtype not in SCALED_KINDS:
        raise LayoutError(f"weight is of {weight.dtype}, wanted {' or '.join(map(str, SCALED_KINDS))}")
    scale = scale.astype(np.float32)
    if block := settings.get("block"):
        _wanted("the scale", scale, (-(-out // block[0]), -(-ins // block[1])))
        scale, group = np.repeat(scale, block[0], axis=0)[:out], block[1]
    else:
        scale = _rows("the scale", scale, out)
        group = _group(ins, scale.shape[1])
    offset, zero = None, parts.get("weight_zero_point")
    if zero is not None and zero.any():
        offset = -_rows("weight_zero_point", zero.astype(np.float32), out) * scale
    return _grouped((out, ins), SCALED_KINDS[weight.dtype], lambda: weight, scale, offset, group)


def read_mxfp4(parts: Parts, settings: Mapping[str, Any]) -> Packed:
    """Returns a weight of fp4 numbers in groups of 32 under a power of two: ``w = e2m1(nibble) * 2 ** (scale - 127)``.

    ``weight_blocks [.., out, in / 32, 16]`` and ``weight_scales [.., out, in / 32]``, both bytes, low nibble first; or
    ``weight_packed [out, in / 2]`` and ``weight_scale [out, in / 32]``.

    Source: transformers, ``integrations/mxfp4.py`` (``convert_moe_packed_tensors``); compressed-tensors,
    ``compressors/mxfp4``.
    """
    if "weight_blocks" in parts:
        values, scale = parts["weight_blocks"], parts["weight_scales"]
        if values.ndim < 3 or values.shape[-1] != 16:
            raise LayoutError(f"weight_blocks has shape {values.shape}, wanted (.., out, in / 32, 16)")
        values = values.reshape(*values.shape[:-2], -1)
    else:
        values, scale = parts["weight_packed"], parts["weight_scale"]
    *lead, half = values.shape
    _wanted("the scale", scale, (*lead, half // 16))
    return Packed((*lead, 2 * half), Format("mxfp4"), lambda: values, scale.view(np.uint8))


def read_nvfp4(parts: Parts, settings: Mapping[str, Any]) -> Packed:
    """Returns a weight of fp4 numbers in groups of 16: ``w = e2m1(nibble) * weight_scale / weight_global_scale``.

    ``weight_packed [out, in / 2]`` bytes, low nibble first, ``weight_scale [out, in / 16]`` e4m3,
    ``weight_global_scale [1]``.

    Source: compressed-tensors, ``compressors/nvfp4``.
    """
    values, scale = parts["weight_packed"], parts["weight_scale"]
    out, half = values.shape
    _wanted("weight_scale", scale, (out, half // 8))
    outer = 1 / parts["weight_global_scale"].astype(np.float32).reshape(1, 1)
    return Packed(
        (out, 2 * half), Format("nvfp4"), lambda: values, scale, None, np.repeat(outer, out, axis=0)
    )


def _integers(
    shape: tuple[int, int],
    bits: int,
    values: Values,
    scale: np.ndarray,
    zeros: np.ndarray,
    group: int,
    g_idx: np.ndarray | None = None,
) -> Packed:
    """Returns ``scale * (q - zero)`` of unsigned ``q``, without offsets where every zero is in the middle.

    Args:
      shape: ``[out, in]``. values: gives ``[out, in * bits / 8]`` bytes, as ours lie.
      scale, zeros: ``[out, G]``. group: inputs that share one. g_idx: ``[in]`` the group of each input, where the file
        says it: groups that are not neighbours have no format of ours.
    """
    ins, G, middle = shape[1], scale.shape[1], 2 ** (bits - 1)
    if ins * bits % 8:
        raise LayoutError(f"{ins} inputs of {bits} bits do not fill bytes")
    if g_idx is not None and not np.array_equal(g_idx, np.arange(ins) // group):
        _wanted("g_idx", g_idx, (ins,))
        if g_idx.min() < 0 or g_idx.max() >= G:
            raise LayoutError(f"g_idx has groups {g_idx.min()} to {g_idx.max()}, the scales have {G}")

        def expand() -> np.ndarray:
            q = values() if bits == 8 else unpack_nibbles(values())
            return scale.astype(np.float32)[:, g_idx] * (q - zeros.astype(np.float32)[:, g_idx])

        return Packed(shape, None, expand, why="groups that are not neighbours (act-order)")
    kind = f"int{bits}"
    if (zeros == middle).all():
        return _grouped(shape, kind, lambda: recentre(values(), bits), scale, None, group)
    scale, zeros = scale.astype(np.float32), zeros.astype(np.float32)
    # The product of a half and a number of up to 8 bits is exact in float32, and would not be in float16.
    if bits == 4:
        return _grouped(shape, kind, values, scale, -zeros * scale, group)
    return _grouped(shape, kind, lambda: recentre(values(), 8), scale, (middle - zeros) * scale, group)


def _grouped(
    shape: tuple[int, int],
    kind: str,
    values: Values,
    scale: np.ndarray,
    offset: np.ndarray | None,
    group: int,
) -> Packed:
    """Returns a weight with a scale for each ``group`` of inputs; one for all of them is a scale per channel.

    A group that is no power of two is cut into such ones with the same scale: 96 into three of 32.
    """
    ins, step = shape[1], None
    if scale.shape[1] > 1:
        step = math.gcd(ins, group)
        step &= -step
        if step < 8:
            raise LayoutError(f"groups of {group} of {ins} inputs have no power of two from 8 in common")

    def fit(part: np.ndarray) -> np.ndarray:
        return (
            part.astype(np.float32) if step is None else part.repeat(group // step, axis=1)[:, : ins // step]
        )

    scale, offset = fit(scale), None if offset is None else fit(offset)
    fmt = Format(kind, step, offset is not None, scale.dtype.name)
    return Packed(shape, fmt, lambda: values().view(fmt.dtype), scale, offset)


def _rows(name: str, array: np.ndarray, out: int) -> np.ndarray:
    """Returns one number, a row, or a row for each output as ``[out, G]``."""
    array = array.reshape(1, 1) if array.size == 1 else array.reshape(len(array), -1)
    if array.shape[0] not in (1, out):
        raise LayoutError(f"{name} has shape {array.shape}, wanted one number or {out} rows")
    return np.broadcast_to(array, (out, array.shape[1]))


def _group(ins: int, num_groups: int) -> int:
    if ins % num_groups:
        raise LayoutError(f"{num_groups} groups of scales do not divide {ins} inputs")
    return ins // num_groups


def _wanted(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise LayoutError(f"{name} has shape {array.shape}, wanted {shape}")
