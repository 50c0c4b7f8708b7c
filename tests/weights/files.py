"""Tiny checkpoints, written with the formats' own libraries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy


def write_hf(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None = None
) -> Path:
    """Writes a folder with one safetensors file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "toy"}))
    safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_shards(
    folder: Path, shards: Mapping[str, Mapping[str, np.ndarray]], weight_map: Mapping[str, str]
) -> Path:
    """Writes a folder with several safetensors files and an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "toy"}')
    for name, tensors in shards.items():
        safetensors.numpy.save_file(dict(tensors), folder / name)
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "toy",
    **options: Any,
) -> Path:
    """Writes a GGUF file; a tensor is plain, or the bytes of its blocks and their format."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        data, block_format = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=block_format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
