"""Every format of quantised Hugging Face folders, held against the reading of the program that writes it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.weights.errors import (
    CheckpointError,
    MisshapenTensorsError,
    MissingTensorsError,
    UnsupportedFormatError,
)
from jaxinfer.weights.hf import HFSource
from jaxinfer.weights.packed.expand import expand
from tests.weights import packers
from tests.weights.files import write_hf

OUT, IN, GROUP = 24, 128, 32
NAME = "model.layers.0.mlp.up_proj"


def opened(
    folder: Path, tensors: dict[str, np.ndarray], quantization: dict[str, Any], module: str = NAME
) -> HFSource:
    named = {f"{module}.{leaf}": np.ascontiguousarray(array) for leaf, array in tensors.items()}
    named["model.norm.weight"] = np.ones(IN, np.float32)
    config = {"model_type": "toy", "quantization_config": quantization}
    return HFSource.open(write_hf(folder, named, config))


def check(source: HFSource, wanted: np.ndarray, fmt: str | None, module: str = NAME) -> None:
    """Holds a weight against what another reader makes of it, number by number, and its format and bytes."""
    name = f"{module}.weight"
    assert set(source.tensors) == {name, "model.norm.weight"}
    assert "quantization_config" not in source.config
    info = source.tensors[name]
    assert info.shape == wanted.shape
    assert info.is_coded
    np.testing.assert_array_equal(source.read(name), wanted)
    assert source.read(name, ml_dtypes.bfloat16).dtype == (np.float32 if fmt is None else ml_dtypes.bfloat16)
    if fmt is None:
        assert info.hollow is None
        return
    kept = source.read_coded(name)
    assert kept.format == Format.parse(fmt)
    assert kept.shape == wanted.shape
    np.testing.assert_array_equal(expand(kept, np.float32), wanted)
    assert kept.values.nbytes == math.prod(wanted.shape) * kept.format.bits // 8
    assert info.hollow is not None
    for part in ("values", "scale", "offset", "outer"):
        real, hollow = getattr(kept, part), getattr(info.hollow, part)
        assert (real is None) == (hollow is None)
        if real is not None:
            assert (real.shape, real.dtype, real.ndim) == (hollow.shape, hollow.dtype, 2)


def gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True, "desc_act": False, **more}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(tmp_path: Path, bits: int, v2: bool, symmetric: bool) -> None:
    q, zeros, scales = packers.draw_ints(np.random.default_rng(bits), (OUT, IN), bits, GROUP)
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    tensors = packers.write_gptq(q, zeros, scales, np.arange(IN) // GROUP, bits, v2)
    config = gptq(bits, checkpoint_format="gptq_v2" if v2 else "gptq", dynamic={"-:.*down.*": {}})
    fmt = f"int{bits}:g{GROUP}" + (":f16" if symmetric else ":zero:f32")
    check(opened(tmp_path / "m", tensors, config), packers.read_gptq(tensors, bits, v2), fmt)
    del tensors["g_idx"]  # some writers leave it out where it says nothing
    with_it = packers.write_gptq(q, zeros, scales, np.arange(IN) // GROUP, bits, v2)
    check(opened(tmp_path / "n", tensors, config), packers.read_gptq(with_it, bits, v2), fmt)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_whose_groups_are_not_neighbours_is_expanded_by_its_index(tmp_path: Path, bits: int) -> None:
    rng = np.random.default_rng(0)
    q, zeros, scales = packers.draw_ints(rng, (OUT, IN), bits, GROUP)
    tensors = packers.write_gptq(q, zeros, scales, rng.permutation(np.arange(IN) // GROUP), bits)
    check(opened(tmp_path / "m", tensors, gptq(bits, desc_act=True)), packers.read_gptq(tensors, bits), None)


def test_gptq_with_one_scale_an_output(tmp_path: Path) -> None:
    q, zeros, scales = packers.draw_ints(np.random.default_rng(0), (OUT, IN), 4, IN)
    tensors = packers.write_gptq(q, zeros, scales, np.zeros(IN), 4)
    source = opened(tmp_path / "m", tensors, gptq(group_size=-1))
    check(source, packers.read_gptq(tensors, 4), "int4:channel:zero")


def test_groups_that_are_no_power_of_two_become_ones_that_are(tmp_path: Path) -> None:
    q, zeros, scales = packers.draw_ints(np.random.default_rng(0), (OUT, 192), 4, 96)
    tensors = packers.write_gptq(q, zeros, scales, np.arange(192) // 96, 4)
    source = opened(tmp_path / "m", tensors, gptq(group_size=96))
    check(source, packers.read_gptq(tensors, 4), "int4:g32:zero:f32")


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq(tmp_path: Path, symmetric: bool) -> None:
    q, zeros, scales = packers.draw_ints(np.random.default_rng(1), (OUT, IN), 4, GROUP)
    if symmetric:
        zeros[:] = 8
    tensors = packers.write_awq(q, zeros, scales)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    config["modules_to_not_convert"] = ["lm_head", "visual"]
    fmt = "int4:g32:f16" if symmetric else "int4:g32:zero:f32"
    check(opened(tmp_path / "m", tensors, config), packers.read_awq(tensors), fmt)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [GROUP, IN])
@pytest.mark.parametrize("symmetric", [False, True])
def test_pack_quantized(tmp_path: Path, bits: int, group: int, symmetric: bool) -> None:
    q, zeros, scales = packers.draw_ints(np.random.default_rng(2), (OUT, IN), bits, group)
    middle = 2 ** (bits - 1)
    scales = scales.astype(ml_dtypes.bfloat16)
    tensors = packers.write_compressed(q - middle, scales, bits, None if symmetric else zeros - middle)
    config = compressed(
        "pack-quantized", num_bits=bits, strategy="group", group_size=group, symmetric=symmetric
    )
    grouped = f":g{group}" if group < IN else ":channel" if bits == 4 else ""
    fmt = f"int{bits}{grouped}" + ("" if symmetric else ":zero:f32")
    check(opened(tmp_path / "m", tensors, config), packers.read_compressed(tensors, bits), fmt)


def test_pack_quantized_in_another_order_is_expanded(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    q, _, scales = packers.draw_ints(rng, (OUT, IN), 4, GROUP)
    tensors = packers.write_compressed(q - 8, scales, 4, None, rng.permutation(np.arange(IN) // GROUP))
    config = compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, actorder="group")
    check(opened(tmp_path / "m", tensors, config), packers.read_compressed(tensors, 4), None)


@pytest.mark.parametrize("per", ["channel", "tensor"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_numbers_of_8_bits_beside_their_scales(tmp_path: Path, per: str, kind: str) -> None:
    rng = np.random.default_rng(4)
    weight = (
        rng.integers(-128, 128, (OUT, IN)).astype(np.int8)
        if kind == "int"
        else packers.draw_fp8(rng, (OUT, IN))
    )
    scale = rng.uniform(1e-3, 1e-2, (OUT, 1) if per == "channel" else (1,)).astype(np.float32)
    tensors = {"weight": weight, "weight_scale": scale.astype(ml_dtypes.bfloat16)}
    wanted = weight.astype(np.float32) * tensors["weight_scale"].astype(np.float32)
    config = compressed(f"{kind}-quantized", num_bits=8, type=kind, strategy=per)
    check(opened(tmp_path / "m", tensors, config), wanted, "int8" if kind == "int" else "fp8_e4m3")


def test_a_zero_beside_numbers_of_8_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    weight, zero = rng.integers(-128, 128, (OUT, IN)).astype(np.int8), rng.integers(-128, 128, (OUT, 1))
    scale = rng.uniform(1e-3, 1e-2, (OUT, 1)).astype(np.float16)
    tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.astype(np.int8)}
    wanted = (weight - zero).astype(np.float32) * scale.astype(np.float32)
    source = opened(tmp_path / "m", tensors, compressed("int-quantized", num_bits=8, symmetric=False))
    np.testing.assert_allclose(source.read(f"{NAME}.weight"), wanted, rtol=0, atol=1e-6)
    assert source.read_coded(f"{NAME}.weight").format == Format("int8", offset=True)


@pytest.mark.parametrize("shape", [(256, 256), (200, 144)])
@pytest.mark.parametrize("form", ["fp8", "float-quantized"])
def test_fp8_in_blocks(tmp_path: Path, shape: tuple[int, int], form: str) -> None:
    """The last blocks may be cut in both directions; groups are then the largest that divide what is there."""
    rng = np.random.default_rng(6)
    weight, scale = packers.draw_fp8(rng, shape), rng.uniform(1e-4, 1e-2, (2, 2)).astype(np.float32)
    wanted = packers.read_fp8_blocks(weight, scale, (128, 128))
    name = "weight_scale_inv" if form == "fp8" else "weight_scale"
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    if form != "fp8":
        config = compressed(form, num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    source = opened(tmp_path / "m", {"weight": weight, name: scale}, config)
    check(source, wanted, f"fp8_e4m3:g{math.gcd(shape[1], 128)}:f32")


def test_fp8_with_one_scale_and_scales_of_activations(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    weight, one = packers.draw_fp8(rng, (OUT, IN)), np.array(0.01, np.float32)
    tensors = {"weight": weight, "weight_scale": one, "input_scale": one, "k_scale": one}
    source = opened(tmp_path / "m", tensors, {"quant_method": "fp8", "activation_scheme": "static"})
    check(source, weight.astype(np.float32) * np.float32(0.01), "fp8_e4m3")
    assert source.notes == (
        "2 scales of activations and KV pages in the checkpoint are left aside: ours follow the data",
    )


def test_mxfp4(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    blocks = rng.integers(0, 256, (OUT, IN // 32, 16)).astype(np.uint8)
    scales = rng.integers(100, 140, (OUT, IN // 32)).astype(np.uint8)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    wanted = packers.read_mxfp4(blocks, scales)
    check(opened(tmp_path / "a", {"weight_blocks": blocks, "weight_scales": scales}, config), wanted, "mxfp4")
    packed = {"weight_packed": blocks.reshape(OUT, -1), "weight_scale": scales}
    config = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
    check(opened(tmp_path / "b", packed, config), wanted, "mxfp4")


def test_nvfp4(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    packed = rng.integers(0, 256, (OUT, IN // 2)).astype(np.uint8)
    scale = rng.uniform(1, 400, (OUT, IN // 16)).astype(ml_dtypes.float8_e4m3fn)
    one = np.array(
        [1024], np.float32
    )  # a power of two: dividing by it and multiplying by its inverse are the same
    tensors = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": one,
        "input_global_scale": one,
    }
    config = compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    check(opened(tmp_path / "m", tensors, config), packers.read_nvfp4(packed, scale, one), "nvfp4")


def test_groups_of_a_configuration_are_told_apart_by_their_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    q, _, scales = packers.draw_ints(rng, (OUT, IN), 4, GROUP)
    four, eight = packers.write_compressed(q - 8, scales, 4), {"weight": packers.draw_fp8(rng, (OUT, IN))}
    eight["weight_scale"] = np.ones((OUT, 1), np.float32)
    tensors = {f"a.up.{k}": v for k, v in four.items()} | {f"a.down.{k}": v for k, v in eight.items()}
    config = compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP)
    group = {
        "targets": ["re:.*down$"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float"},
    }
    config["config_groups"]["group_1"] = group
    source = HFSource.open(
        write_hf(tmp_path / "m", tensors, {"model_type": "toy", "quantization_config": config})
    )
    kept = {name: source.read_coded(name).format for name in source.tensors}
    assert kept == {"a.up.weight": Format.parse("int4:g32:f16"), "a.down.weight": Format("fp8_e4m3")}


def some() -> tuple[dict[str, np.ndarray], ...]:
    q, zeros, scales = packers.draw_ints(np.random.default_rng(11), (OUT, IN), 4, GROUP)
    weight = packers.draw_fp8(np.random.default_rng(12), (OUT, IN))
    return packers.write_gptq(q, zeros, scales, np.arange(IN) // GROUP, 4), {"weight": weight}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not read; known: gptq, awq, compressed",
        ),
        ({}, "quant_method None is not read"),
        (gptq(3), "bits 3 is not read; known: 4, 8"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not read; known: 'gptq'"),
        (gptq(dynamic={"+:.*up.*": {"bits": 8}}), "dynamic .* modules left out"),
        (gptq(group_size=3), "group_size 3 is not read"),
        ({"quant_method": "awq", "version": "GEMV"}, "version 'gemv' is not read; known: 'gemm'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend 'llm-awq'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size .* as .128, 128."),
        (
            compressed("marlin-24", num_bits=4),
            "config_groups.group_0 'marlin-24 int4' is not read; known: pack-q",
        ),
        (compressed("pack-quantized", num_bits=3), "config_groups.group_0 'pack-quantized int3'"),
        (
            compressed("int-quantized", num_bits=8) | {"sparsity_config": {"format": "sparse-24"}},
            "sparsity_config",
        ),
        (compressed("int-quantized", num_bits=8) | {"transform_config": {"a": {"b": 1}}}, "transform_config"),
        (
            compressed("int-quantized", num_bits=8) | {"quantization_status": "calibration"},
            "quantization_status",
        ),
        (compressed("int-quantized", num_bits=8) | {"config_groups": {}}, "config_groups"),
    ],
)
def test_what_is_not_read_is_refused_by_name_with_what_is(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    config = config or {"bits": 4}
    with pytest.raises(UnsupportedFormatError, match=rf"config.json: quantization_config: {says}"):
        opened(tmp_path / "m", some()[0], config)


def test_parts_that_are_absent_are_all_named(tmp_path: Path) -> None:
    tensors, weight = some()
    with pytest.raises(MissingTensorsError) as missing:
        opened(tmp_path / "m", {"qweight": tensors["qweight"]}, gptq())
    assert missing.value.names == (f"{NAME}.qzeros", f"{NAME}.scales")
    with pytest.raises(MissingTensorsError, match=r"up_proj.weight_scale: beside .*weight of float8_e4m3fn"):
        opened(tmp_path / "n", weight, {"quant_method": "fp8"})


def test_modules_that_are_said_to_be_left_alone_must_be(tmp_path: Path) -> None:
    _, weight = some()
    tensors = weight | {"weight_scale": np.ones(1, np.float32)}
    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "up_proj"]}
    with pytest.raises(
        CheckpointError, match=r"left alone, yet they are quantised: model.layers.0.mlp.up_proj"
    ):
        opened(tmp_path / "m", tensors, config)
    plain = {"weight": np.ones((OUT, IN), np.float32)}
    source = opened(tmp_path / "n", plain, config)
    assert not source.tensors[f"{NAME}.weight"].is_coded


@pytest.mark.parametrize(
    ("part", "array", "says"),
    [
        ("qzeros", np.zeros((3, 3), np.int32), r"GPTQ: qzeros has shape \(3, 3\), wanted \(4, 3\)"),
        ("scales", np.zeros((2, OUT), np.float16), "GPTQ: .*wanted"),
        ("g_idx", np.full(IN, 9, np.int32), "g_idx has groups 9 to 9, the scales have 4"),
        ("g_idx", np.full(7, 0, np.int32), "g_idx has shape"),
    ],
)
def test_parts_of_other_shapes_are_refused_by_name(
    tmp_path: Path, part: str, array: np.ndarray, says: str
) -> None:
    with pytest.raises(MisshapenTensorsError, match=rf"{NAME}.weight: {says}|{NAME}.weight: GPTQ: {says}"):
        opened(tmp_path / "m", some()[0] | {part: array}, gptq())


def test_nothing_is_read_of_a_folder_that_keeps_its_numbers_in_pickles(tmp_path: Path) -> None:
    """A scheme's name alone opens no other files."""
    folder = write_hf(
        tmp_path / "m", {"a": np.zeros(2, np.float32)}, {"model_type": "toy", "quantization_config": gptq()}
    )
    (folder / "quantize.pt").write_bytes(b"\x80\x04never read")
    assert set(HFSource.open(folder).tensors) == {"a"}
