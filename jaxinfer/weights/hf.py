"""Hugging Face folders: safetensors mapped into memory, in one file, several, or by an index."""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxinfer.arrays.quantized import Quantized
from jaxinfer.weights.errors import (
    CheckpointError,
    CorruptFileError,
    DoubledTensorsError,
    ExtraTensorsError,
    MissingFilesError,
    MissingTensorsError,
    UnsupportedTensorsError,
)
from jaxinfer.weights.packed.config import read_scheme
from jaxinfer.weights.packed.expand import expand
from jaxinfer.weights.packed.modules import Module, gather_modules, open_modules
from jaxinfer.weights.records import parse_object, read_json
from jaxinfer.weights.tensors import TensorInfo

DTYPES: dict[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # as the format's own library


@dataclass(frozen=True)
class HFSource:
    """A `TensorSource` over a Hugging Face folder; ``config`` comes without ``quantization_config``, read here."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    _arrays: Mapping[str, np.ndarray]
    _modules: Mapping[str, Module] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kind: Literal["hf"] = "hf"

    @classmethod
    def open(cls, path: Path) -> HFSource:
        """Opens a folder, one ``.safetensors`` file, or an index.

        Raises:
          CheckpointError: config.json is absent, a file is not what its header or the index says, or the checkpoint is
            quantised in a way that is not read.
        """
        folder = path if path.is_dir() else path.parent
        config, quantization = _split_config(read_json(folder / "config.json"))
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        index, files = _find_files(path)
        opened = {file.name: _open_file(file) for file in files}
        _check_names(index or folder, {name: list(arrays) for name, arrays in opened.items()})
        if index is not None:
            _check_index(index, {name: file for file, arrays in opened.items() for name in arrays})
        arrays = {name: array for held in opened.values() for name, array in held.items()}
        modules, notes = {}, ()
        if quantization:
            scheme = read_scheme(folder / "config.json", quantization)
            modules, arrays, notes = gather_modules(folder / "config.json", scheme, arrays)
        names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
        tensors = {n: TensorInfo(a.shape, names[a.dtype], a.nbytes) for n, a in arrays.items()}
        for name, packed in open_modules(folder, modules).items():
            module = modules[name]
            hollow = packed.hollow()
            tensors[name] = TensorInfo(packed.shape, module.codec.name, module.num_bytes, True, hollow)
        return cls(folder, config, generation, tensors, arrays, modules, notes)

    def read(self, name: str, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Returns a tensor: as it is stored, a read-only view of the mapped file; or codes expanded to ``dtype``."""
        if name not in self._modules:
            return self._arrays[name]
        packed = self._modules[name].open()
        return packed.values() if packed.format is None else expand(packed.read(), dtype)

    def read_coded(self, name: str) -> Quantized:
        """Returns a weight in codes and scales, bit by bit the file's own."""
        return self._modules[name].open().read()


def _split_config(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a configuration without its ``quantization_config``, and that; multimodal ones keep it either way."""
    found: dict[str, Any] = {}
    rest = dict(config)
    for section in (None, "text_config"):
        held = rest if section is None else rest.get(section)
        if isinstance(held, dict) and held.get("quantization_config"):
            found = held["quantization_config"]
        if isinstance(held, dict) and "quantization_config" in held:
            held = {key: value for key, value in held.items() if key != "quantization_config"}
            rest = held if section is None else rest | {section: held}
    return rest, found


def _refuse_doubled(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Returns a parser hook that refuses a name which stands twice; a plain dict would keep the last silently."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
        if doubled:
            raise DoubledTensorsError(path, [(key, "in one header") for key in doubled])
        return dict(pairs)

    return hook


def _find_files(path: Path) -> tuple[Path | None, list[Path]]:
    """Returns the index, if one is used, and the tensor files, in transformers' order of preference."""
    if path.is_file() and path.suffix == ".safetensors":
        return None, [path]
    if path.is_file():
        index = path
    elif (single := path / "model.safetensors").exists():
        return None, [single]
    elif not (indices := sorted(path.glob(f"*{INDEX_SUFFIX}"))):
        return None, sorted(path.glob("*.safetensors"))
    elif len(indices) > 1:
        raise CheckpointError(
            f"{path}: several indices ({', '.join(i.name for i in indices)}); name the one to open"
        )
    else:
        index = indices[0]
    files = sorted(set(_weight_map(index).values()))
    absent = [name for name in files if not (index.parent / name).is_file()]
    if absent:
        raise MissingFilesError(index, absent)
    return index, [index.parent / name for name in files]


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, _refuse_doubled(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(index, "has no weight_map")
    for name, file in weight_map.items():
        # A name with a folder in it could point anywhere on this machine.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CorruptFileError(
                index, f"weight_map[{name!r}] is {file!r}, not the name of a safetensors file beside it"
            )
    return weight_map


def _check_names(where: Path, held: dict[str, list[str]]) -> None:
    files_of: dict[str, list[str]] = {}
    for file, names in held.items():
        for name in names:
            files_of.setdefault(name, []).append(file)
    doubled = [(name, f"in {', '.join(files)}") for name, files in files_of.items() if len(files) > 1]
    if doubled:
        raise DoubledTensorsError(where, doubled)


def _check_index(index: Path, file_of: dict[str, str]) -> None:
    weight_map = _weight_map(index)
    missing = [(n, f"the index says in {file}") for n, file in weight_map.items() if file_of.get(n) != file]
    if missing:
        raise MissingTensorsError(index, missing)
    extra = [
        (name, f"in {file}, not in the index") for name, file in file_of.items() if name not in weight_map
    ]
    if extra:
        raise ExtraTensorsError(index, extra)


def _open_file(path: Path) -> dict[str, np.ndarray]:
    """Returns every tensor of one file as a read-only view of its mapping."""
    size = path.stat().st_size
    if size < 8:
        raise CorruptFileError(path, f"has {size} bytes, too few for a safetensors header")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (header_bytes,) = struct.unpack_from("<Q", mapped)
    if header_bytes > min(size - 8, MAX_HEADER_BYTES):
        raise CorruptFileError(path, f"its header claims {header_bytes} bytes of a file of {size}")
    header = parse_object(path, mapped[8 : 8 + header_bytes], "header", _refuse_doubled(path))
    header.pop("__metadata__", None)
    entries = {name: _check_entry(path, name, entry) for name, entry in header.items()}
    unread = [(name, dtype) for name, (dtype, _, _, _) in entries.items() if dtype not in DTYPES]
    if unread:
        raise UnsupportedTensorsError(path, unread)
    data = np.frombuffer(mapped, np.uint8, offset=8 + header_bytes)
    _check_ranges(path, entries, data.size)
    try:
        return {
            n: data[a:b].view(DTYPES[dtype]).reshape(shape) for n, (dtype, shape, a, b) in entries.items()
        }
    except ValueError as error:  # an empty tensor whose other dimensions are beyond any machine
        raise CorruptFileError(path, f"a shape cannot be: {error}") from error


def _check_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Returns dtype, shape, begin and end of one header entry, once its types are sound."""

    def counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)

    if not (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and counts(entry.get("shape"))
        and counts(entry.get("data_offsets"))
        and len(entry["shape"]) <= 32
        and len(entry["data_offsets"]) == 2
    ):
        raise CorruptFileError(path, f"header entry of {name!r} lacks a sound dtype, shape or data_offsets")
    begin, end = entry["data_offsets"]
    return entry["dtype"], tuple(entry["shape"]), begin, end


def _check_ranges(path: Path, entries: dict[str, tuple[str, tuple[int, ...], int, int]], size: int) -> None:
    """Holds the format's rule: the tensors' ranges tile the data, without hole or overlap."""
    beyond = [name for name, (_, _, _, end) in entries.items() if end > size]
    if beyond:
        raise CorruptFileError(
            path, f"{len(beyond)} tensor(s) end beyond the file's data: {', '.join(sorted(beyond))}"
        )
    at = 0
    for name, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        wanted = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if end - begin != wanted:
            raise CorruptFileError(
                path, f"{name} has {end - begin} bytes, {dtype} {list(shape)} needs {wanted}"
            )
        if begin != at:
            raise CorruptFileError(path, f"{name} begins at byte {begin}, the tensor before it ends at {at}")
        at = end
    if at != size:
        raise CorruptFileError(path, f"{size - at} bytes lie after the last tensor")
