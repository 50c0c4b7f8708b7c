"""The door to checkpoints of somebody else's making: what a path holds, and it opened."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jaxinfer.weights.errors import CheckpointError, UnsupportedFormatError
from jaxinfer.weights.hub import PICKLE_SUFFIXES
from jaxinfer.weights.tensors import SourceKind, TensorInfo, TensorSource

__all__ = ["SourceKind", "TensorInfo", "TensorSource", "find_kind", "open_source"]

STORE_FILE = (
    "jaxinfer.json"  # marks a folder that store.py wrote; kept here so that looking does not import orbax
)
HALF_WRITTEN = ".half-written-"  # in the name of the folder that store.py is still writing
_ACCEPTED = (
    "a folder with *.safetensors and config.json, a *.gguf file or a folder with one, or a folder that "
    "`jaxinfer convert` wrote"
)


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
    # Imported as needed: the gguf package alone takes a tenth of a second.
    if kind == "hf":
        from jaxinfer.weights.hf import HFSource

        return HFSource.open(path)
    if kind == "gguf":
        from jaxinfer.weights.gguf import GGUFSource

        return GGUFSource.open(path)
    raise CheckpointError(
        f"{path}: is a converted checkpoint; it is restored (weights/store.py), not opened as a source"
    )
