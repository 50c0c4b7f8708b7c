"""Quantised modules as other programs write them, and what those programs read out of them.

Writers and readers follow the cited sources line by line, in numpy, and share no code with the package: a reader here
is what a weight of the package is held against.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]
F4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def write_gptq(
    q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray, bits: int, v2: bool = False
) -> Tensors:
    """Packs ``q [out, in]``, ``zeros`` and ``scales [out, G]``.

    Source: AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py, ``pack``; GPTQModel leaves out the "zeros -= 1" of
    the first version in ``gptq_v2``.
    """
    per = 32 // bits
    ints = q.T.astype(np.uint32)
    qweight = np.zeros((ints.shape[0] // per, ints.shape[1]), np.uint32)
    for row in range(qweight.shape[0]):
        for j in range(per):
            qweight[row] |= ints[row * per + j] << np.uint32(bits * j)
    stored = zeros.T.astype(np.int64) - (0 if v2 else 1)
    stored = (stored % 2**bits).astype(np.uint32)
    qzeros = np.zeros((stored.shape[0], stored.shape[1] // per), np.uint32)
    for col in range(qzeros.shape[1]):
        for j in range(per):
            qzeros[:, col] |= stored[:, col * per + j] << np.uint32(bits * j)
    return {
        "qweight": qweight.view(np.int32),
        "qzeros": qzeros.view(np.int32),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": g_idx.astype(np.int32),
    }


def read_gptq(t: Tensors, bits: int, v2: bool = False) -> np.ndarray:
    """Returns ``[out, in]``.

    Source: AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, ``forward``: the zeros are added one and only
    then masked.
    """
    wf = np.arange(0, 32, bits, dtype=np.int32)
    zeros = np.right_shift(t["qzeros"][:, :, None], wf[None, None, :]) + (0 if v2 else 1)
    zeros = (zeros & (2**bits - 1)).reshape(t["scales"].shape)
    weight = np.right_shift(t["qweight"][:, None, :], wf[None, :, None]) & (2**bits - 1)
    weight = weight.reshape(-1, weight.shape[-1])
    g = t["g_idx"]
    return (t["scales"].astype(np.float32)[g] * (weight - zeros[g]).astype(np.float32)).T


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
AWQ_REVERSE_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def write_awq(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Tensors:
    """Packs ``q [out, in]``, ``zeros`` and ``scales [out, G]``.

    Source: AutoAWQ, awq/modules/linear/gemm.py, ``WQLinear_GEMM.from_linear``.
    """

    def pack(ints: np.ndarray) -> np.ndarray:
        words = np.zeros((ints.shape[0], ints.shape[1] // 8), np.uint32)
        for col in range(words.shape[1]):
            for i in range(8):
                words[:, col] |= ints[:, col * 8 + AWQ_ORDER[i]].astype(np.uint32) << np.uint32(4 * i)
        return words.view(np.int32)

    return {"qweight": pack(q.T), "qzeros": pack(zeros.T), "scales": np.ascontiguousarray(scales.T)}


def read_awq(t: Tensors) -> np.ndarray:
    """Returns ``[out, in]``.

    Source: AutoAWQ, awq/utils/packing_utils.py, ``dequantize_gemm``.
    """
    shifts = np.arange(0, 32, 4, dtype=np.int32)

    def unpack(words: np.ndarray) -> np.ndarray:
        ints = np.right_shift(words[:, :, None], shifts).reshape(len(words), -1)
        order = np.arange(ints.shape[1]).reshape(-1, 8)[:, AWQ_REVERSE_ORDER].reshape(-1)
        return ints[:, order] & 15

    weight, zeros = unpack(t["qweight"]), unpack(t["qzeros"])
    group = len(weight) // len(zeros)
    scales = t["scales"].astype(np.float32).repeat(group, 0)
    return ((weight - zeros.repeat(group, 0)).astype(np.float32) * scales).T


def pack_to_int32(value: np.ndarray, bits: int, packed_dim: int = 1) -> np.ndarray:
    """Packs signed numbers.

    Source: compressed-tensors, compressors/pack_quantized/helpers.py, ``pack_to_int32``.
    """
    if packed_dim == 0:
        return np.ascontiguousarray(pack_to_int32(value.T, bits).T)
    unsigned = value.astype(np.int64) + (1 << (bits - 1))
    rows, cols = unsigned.shape
    words = -(-cols * bits // 32)
    out = np.zeros((rows, words), np.uint64)
    for i in range(cols):
        out[:, i * bits // 32] |= unsigned[:, i].astype(np.uint64) << np.uint64(i * bits % 32)
    return out.astype(np.uint32).view(np.int32)


def unpack_from_int32(
    value: np.ndarray, bits: int, shape: tuple[int, ...], packed_dim: int = 1
) -> np.ndarray:
    """Unpacks signed numbers.

    Source: compressed-tensors, compressors/pack_quantized/helpers.py, ``unpack_from_int32``.
    """
    if packed_dim == 0:
        return unpack_from_int32(value.T, bits, shape[::-1]).T
    out = np.zeros((len(value), shape[1]), np.int64)
    for i in range(shape[1]):
        out[:, i] = np.right_shift(value[:, i * bits // 32], i * bits % 32) & ((1 << bits) - 1)
    return out - (1 << (bits - 1))


def write_compressed(
    q: np.ndarray,
    scales: np.ndarray,
    bits: int,
    zeros: np.ndarray | None = None,
    g_idx: np.ndarray | None = None,
) -> Tensors:
    """Packs signed ``q [out, in]`` and signed ``zeros [out, G]``.

    Source: compressed-tensors, compressors/pack_quantized/base.py, ``compress``.
    """
    tensors = {
        "weight_packed": pack_to_int32(q, bits),
        "weight_scale": scales,
        "weight_shape": np.array(q.shape, np.int64),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = pack_to_int32(zeros, bits, 0)
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    return tensors


def read_compressed(t: Tensors, bits: int) -> np.ndarray:
    """Returns ``[out, in]``.

    Source: compressed-tensors, compressors/pack_quantized/base.py, ``decompress``, and quantization/lifecycle/
    forward.py, ``_dequantize``.
    """
    shape = (int(t["weight_shape"][0]), int(t["weight_shape"][1]))
    q = unpack_from_int32(t["weight_packed"], bits, shape)
    scale = t["weight_scale"].astype(np.float32)
    zeros = np.zeros(scale.shape, np.int64)
    if "weight_zero_point" in t:
        zeros = unpack_from_int32(t["weight_zero_point"], bits, scale.shape, 0)
    g = t.get("weight_g_idx", np.arange(shape[1]) // (shape[1] // scale.shape[1]))
    return (q - zeros[:, g]).astype(np.float32) * scale[:, g]


def read_fp8_blocks(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns ``[out, in]``.

    Source: transformers, integrations/finegrained_fp8.py: block ``[i, j]`` of the weight is multiplied by
    ``weight_scale_inv[i, j]``.
    """
    out = weight.astype(np.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows, cols = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            out[rows, cols] *= scale[i, j]
    return out


def read_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns ``[.., in]`` of ``blocks [.., G, 16]`` and ``scales [.., G]``.

    Source: transformers, integrations/mxfp4.py, ``convert_moe_packed_tensors``.
    """
    exponent = scales.astype(np.int32) - 127
    sub = np.empty((*blocks.shape[:-1], 32), np.float32)
    sub[..., 0::2] = F4[blocks & 0x0F]
    sub[..., 1::2] = F4[blocks >> 4]
    return np.ldexp(sub, exponent[..., None]).reshape(*blocks.shape[:-2], -1)


def read_nvfp4(packed: np.ndarray, scale: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """Returns ``[out, in]``.

    Source: compressed-tensors, compressors/nvfp4/base.py, ``decompress``: the scale is divided by the global one.
    """
    values = np.stack((F4[packed & 15], F4[packed >> 4]), -1).reshape(len(packed), -1)
    return values * np.repeat(scale.astype(np.float32) / global_scale, 16, 1)


def draw_ints(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int
) -> tuple[np.ndarray, ...]:
    """Returns unsigned ``q [out, in]``, ``zeros`` and float16 ``scales [out, in / group]``; the ends are among them."""
    groups = (shape[0], shape[1] // group)
    q, zeros = rng.integers(0, 2**bits, shape), rng.integers(0, 2**bits, groups)
    q[0, :2], zeros[0, 0] = (0, 2**bits - 1), 2**bits - 1
    zeros[-1, -1] = 0
    return q, zeros, rng.uniform(1e-3, 2e-2, groups).astype(np.float16)


def draw_fp8(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Returns numbers of e4m3 of every size, the largest among them."""
    numbers = (rng.standard_normal(shape) * 40).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    numbers[0, 0], numbers[-1, -1] = 448, -448
    return numbers
