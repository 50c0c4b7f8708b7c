"""GGUF files: metadata, mapped tensors, and their expansion through the ``gguf`` package, imported only here.

The package's own reader makes numpy views of every vocabulary entry (9 s for Gemma's 262,144), so headers are parsed
here; block formats are expanded by the package.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxinfer.arrays.quantized import Quantized
from jaxinfer.weights.buffers import empty
from jaxinfer.weights.errors import (
    CheckpointError,
    CorruptFileError,
    DoubledTensorsError,
    MissingFilesError,
    UnsupportedFormatError,
    UnsupportedTensorsError,
)
from jaxinfer.weights.packed.blocks import KEPT_BLOCKS, hollow_blocks, read_blocks
from jaxinfer.weights.tensors import TensorInfo

PLAIN_DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
BLOCK_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
# Numbers expanded at once: the working arrays of the package then stay in the cache (twice as fast as whole tensors).
CHUNK_NUMBERS = 1 << 16
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
# struct letters of the scalar value types by their number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class _Tensor:
    """What a tensor is and where it lies in a mapped file."""

    info: TensorInfo
    mapped: mmap.mmap
    start: int

    @property
    def data(self) -> np.ndarray:
        return np.frombuffer(self.mapped, np.uint8, self.info.num_bytes, self.start)

    def release(self) -> None:
        """Lets go of the mapped pages inside the tensor; a later read maps them again."""
        first = -(-self.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (self.start + self.info.num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED, first, length)


@dataclass(frozen=True)
class GGUFSource:
    """A `TensorSource` over a GGUF file, or over all parts of a split one."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    _held: Mapping[str, _Tensor]
    kind: Literal["gguf"] = "gguf"
    notes: tuple[str, ...] = ()

    @property
    def generation(self) -> dict[str, Any]:
        """Empty: GGUF has no such file."""
        return {}

    @classmethod
    def open(cls, path: Path) -> GGUFSource:
        """Opens a ``.gguf`` file, or a folder that holds exactly one (or the parts of one).

        Raises:
          CheckpointError: several models in the folder, or a file that is not what it should be.
        """
        parts = _find_parts(path)
        opened = [_open_file(part) for part in parts]
        count = opened[0][0].get("split.count", 1)
        if count not in (0, 1, len(parts)):
            raise CheckpointError(
                f"{parts[0]}: is one part of {count!r} of a split model; lay all parts side by side and name them "
                "as they were, NAME-00001-of-0000N.gguf"
            )
        held: dict[str, _Tensor] = {}
        for part, (_, tensors) in zip(parts, opened, strict=True):
            doubled = [(name, f"again in {part.name}") for name in tensors if name in held]
            if doubled:
                raise DoubledTensorsError(parts[0], doubled)
            held.update(tensors)
        return cls(parts[0], opened[0][0], {name: tensor.info for name, tensor in held.items()}, held)

    def read(self, name: str, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Returns a tensor: plain numbers as a read-only view of the mapped file, blocks expanded to ``dtype``.

        Args:
          name: a key of ``tensors``.
          dtype: of the result of a block format; the expansion itself is float32.
        """
        tensor = self._held[name]
        info = tensor.info
        if info.dtype in PLAIN_DTYPES:
            return tensor.data.view(PLAIN_DTYPES[info.dtype]).reshape(info.shape)
        expanded = _expand(tensor.data, GGMLQuantizationType[info.dtype], np.dtype(dtype)).reshape(info.shape)
        tensor.release()
        return expanded

    def read_coded(self, name: str) -> Quantized:
        """Returns a tensor of `KEPT_BLOCKS` in codes and scales, bit by bit the file's own."""
        tensor = self._held[name]
        coded = read_blocks(tensor.data, tensor.info.dtype, tensor.info.shape)
        tensor.release()
        return coded


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns the metadata of a GGUF file as Python values: numbers, strings, and lists of them.

    Raises:
      CorruptFileError, UnsupportedFormatError: it is not a whole GGUF file of a known version.
    """
    metadata, _ = _read_header(_Cursor(path, _map(path)))
    return metadata


def _expand(data: np.ndarray, block_format: GGMLQuantizationType, dtype: np.dtype) -> np.ndarray:
    block_size, block_bytes = GGML_QUANT_SIZES[block_format]
    out = empty((data.size // block_bytes * block_size,), dtype)
    step = CHUNK_NUMBERS // block_size
    with np.errstate(all="ignore"):  # what is not finite is reported by name, by those who load
        for block in range(0, data.size // block_bytes, step):
            chunk = data[block * block_bytes : (block + step) * block_bytes]
            out[block * block_size : (block + step) * block_size] = dequantize(chunk[None], block_format)[0]
    return out


def _find_parts(path: Path) -> list[Path]:
    """Returns the files of the one model that ``path`` names, the first part first."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        models = sorted({m["stem"] if (m := _SPLIT.fullmatch(f.name)) else f.name for f in files})
        if len(models) != 1:
            raise CheckpointError(
                f"{path}: holds {len(models)} GGUF models ({', '.join(models)}); name the file to open"
            )
        path = files[0]
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["parts"])
    parts = [path.parent / f"{split['stem']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise MissingFilesError(path, absent)
    return parts


def _map(path: Path) -> mmap.mmap:
    if path.stat().st_size == 0:
        raise CorruptFileError(path, "is empty")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _open_file(path: Path) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    mapped = _map(path)
    cursor = _Cursor(path, mapped)
    metadata, num_tensors = _read_header(cursor)
    entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
    _check_entries(path, entries)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CorruptFileError(path, f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment
    beyond = [name for name, info, offset in entries if start + offset + info.num_bytes > len(mapped)]
    if beyond:
        raise CorruptFileError(
            path, f"{len(beyond)} tensor(s) end beyond the file: {', '.join(sorted(beyond))}"
        )
    return metadata, {name: _Tensor(info, mapped, start + offset) for name, info, offset in entries}


def _check_entries(path: Path, entries: list[tuple[str, TensorInfo, int]]) -> None:
    known = (*PLAIN_DTYPES, *BLOCK_FORMATS)
    unread = [(name, info.dtype) for name, info, _ in entries if info.dtype not in known]
    if unread:
        raise UnsupportedTensorsError(path, unread)
    names = [name for name, _, _ in entries]
    if len(set(names)) != len(names):
        raise DoubledTensorsError(path, [(name, "in one file") for name in names if names.count(name) > 1])


class _Cursor:
    """Reads little-endian values off a mapped header, never beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def fail(self, problem: str) -> CorruptFileError:
        return CorruptFileError(self.path, f"at byte {self.at}: {problem}")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.at:
            raise self.fail(f"{what} needs {num_bytes} bytes, {self.size - self.at} are left")

    def numbers(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{letter}"
        num_bytes = struct.calcsize(f"<{letter}") * count
        self.need(num_bytes, f"{count} number(s)")
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += num_bytes
        return values

    def strings(self, count: int) -> list[str]:
        self.need(8 * count, f"{count} string(s)")
        data, at, length, found = self.data, self.at, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                (num_bytes,) = length(data, at)
                at += 8
                if num_bytes > self.size - at:
                    raise self.fail(f"a string of {num_bytes} bytes ends beyond the file")
                found.append(data[at : at + num_bytes].decode())
                at += num_bytes
        except (struct.error, UnicodeDecodeError) as error:
            raise self.fail(f"a string cannot be read ({error})") from error
        self.at = at
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.strings(1)[0]
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind != _ARRAY or depth > 4:
            raise self.fail(f"value type {kind} at depth {depth} is not one of the format")
        inner, count = (*self.numbers("I"), *self.numbers("Q"))
        if inner == _STRING:
            return self.strings(count)
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        self.need(12 * count, f"{count} array(s)")
        return [self.value(inner, depth + 1) for _ in range(count)]


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    """Returns the metadata and the number of tensors, with the cursor at the first tensor's entry."""
    path = cursor.path
    if cursor.data[:4] != b"GGUF":
        raise CorruptFileError(path, f"begins with {cursor.data[:4]!r}, not b'GGUF'")
    cursor.at = 4
    (version,) = cursor.numbers("I")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedFormatError(
            f"{path}: is big-endian GGUF, which is not read; convert it to little-endian"
        )
    if version not in VERSIONS:
        raise UnsupportedFormatError(f"{path}: GGUF version {version} is not read; versions read: {VERSIONS}")
    num_tensors, num_values = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.strings(1)[0]
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} stands twice")
        metadata[key] = cursor.value(*cursor.numbers("I"))
    return metadata, num_tensors


def _read_tensor_entry(cursor: _Cursor) -> tuple[str, TensorInfo, int]:
    """Returns a tensor's name, what it is, and its offset from the start of the data."""
    name = cursor.strings(1)[0]
    (num_dims,) = cursor.numbers("I")
    if num_dims > MAX_DIMS:
        raise cursor.fail(f"{name} has {num_dims} dimensions, the format allows {MAX_DIMS}")
    shape = tuple(reversed(cursor.numbers("Q", num_dims)))  # the file has the fastest dimension first
    (number,), (offset,) = cursor.numbers("I"), cursor.numbers("Q")
    try:
        block_format = GGMLQuantizationType(number)
    except ValueError:
        return name, TensorInfo(shape, f"type {number}", 0), offset
    block_size, block_bytes = GGML_QUANT_SIZES[block_format]
    if shape and shape[-1] % block_size:
        raise cursor.fail(
            f"{name} has rows of {shape[-1]}, {block_format.name} needs a multiple of {block_size}"
        )
    num_bytes = math.prod(shape) // block_size * block_bytes
    if block_format.name in PLAIN_DTYPES:
        return name, TensorInfo(shape, block_format.name, num_bytes), offset
    kept = block_format.name in KEPT_BLOCKS and shape
    hollow = hollow_blocks(block_format.name, shape) if kept else None
    return name, TensorInfo(shape, block_format.name, num_bytes, is_coded=True, hollow=hollow), offset
