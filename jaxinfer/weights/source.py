"""One opened checkpoint of somebody else's making: its configuration and its tensors by their own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from jaxinfer.weights.errors import CheckpointError, UnsupportedFormatError

SourceKind = Literal["hf", "gguf"]
STORE_FILE = (
    "jaxinfer.json"  # marks a folder that store.py wrote; kept here so that looking does not import orbax
)
HALF_WRITTEN = ".half-written-"  # in the name of the folder that store.py is still writing
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_ACCEPTED = (
    "a folder with *.safetensors and config.json, a *.gguf file or a folder with one, or a folder that "
    "`jaxinfer convert` wrote"
)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor, not yet read.

    Attributes:
      shape: row-major as numpy and Hugging Face have it, e.g. ``[out, in]``.
      dtype: the format's own name, e.g. ``BF16`` or ``Q4_1``.
      num_bytes: its size in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class TensorSource(Protocol):
    """A checkpoint whose headers are read and checked, and whose tensors are read one by one.

    Attributes:
      kind: whose names the tensors and the configuration have.
      path: the folder (hf) or the first file (gguf).
      config: config.json (hf) or the metadata, e.g. ``llama.block_count`` (gguf).
      generation: generation_config.json, empty when there is none.
      tensors: every tensor by name.
    """

    @property
    def kind(self) -> SourceKind: ...
    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def generation(self) -> dict[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Returns a tensor, read-only and mapped where the file holds plain numbers.

        Args:
          name: a key of ``tensors``.
          dtype: what a quantised tensor is expanded to; plain numbers come as they are stored.
        """
        ...


def find_kind(path: str | Path) -> SourceKind | Literal["store"]:
    """Returns what a file or folder is, by its names alone.

    Raises:
      CheckpointError: nothing is there, or nothing that is read here.
      UnsupportedFormatError: only pickle files are there.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; wanted {_ACCEPTED}")
    names = [p.name for p in path.iterdir()] if path.is_dir() else [path.name]
    if path.is_dir() and (STORE_FILE in names or HALF_WRITTEN in path.name):
        return "store"
    suffixes = {Path(name).suffix.lower() for name in names}
    if ".safetensors" in suffixes or any(name.endswith(".safetensors.index.json") for name in names):
        return "hf"
    if ".gguf" in suffixes:
        return "gguf"
    if suffixes & set(PICKLE_SUFFIXES):
        pickles = sorted(name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES)
        raise UnsupportedFormatError(
            f"{path}: holds its weights only as pickle ({', '.join(pickles)}), which can run code and is never read; "
            "convert it to safetensors (transformers: model.save_pretrained(folder, safe_serialization=True))"
        )
    raise CheckpointError(f"{path}: holds no checkpoint that is read here; wanted {_ACCEPTED}")


def open_source(path: str | Path) -> TensorSource:
    """Opens a Hugging Face or GGUF checkpoint: headers are read and checked, tensors are not.

    Args:
      path: a folder or a file, see `find_kind`.

    Raises:
      CheckpointError: what is wrong with it; a folder of the store is restored with ``store.restore`` instead.
    """
    path = Path(path)
    kind = find_kind(path)
    if kind == "hf":
        from jaxinfer.weights.hf import HFSource

        return HFSource.open(path)
    if kind == "gguf":
        from jaxinfer.weights.gguf import GGUFSource

        return GGUFSource.open(path)
    raise CheckpointError(
        f"{path}: is a converted checkpoint; it is restored (weights/store.py), not opened as a source"
    )
