"""One opened checkpoint of somebody else's making: its configuration and its tensors by their own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from jaxinfer.arrays.quantized import Quantized

SourceKind = Literal["hf", "gguf"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor, not yet read.

    Attributes:
      shape: row-major as numpy and Hugging Face have it, e.g. ``[out, in]``.
      dtype: the format's own name, e.g. ``BF16`` or ``Q4_1``.
      num_bytes: its size in the file.
      is_coded: whether it lies in codes and scales, so that ``dtype`` is no dtype.
      hollow: shapes and dtypes of what `TensorSource.read_coded` gives; None where no format of ours holds it as it is.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_coded: bool = False
    hollow: Quantized | None = field(default=None, compare=False)


class TensorSource(Protocol):
    """A checkpoint whose headers are read and checked, and whose tensors are read one by one.

    Attributes:
      kind: whose names the tensors and the configuration have.
      path: the folder (hf) or the first file (gguf).
      config: config.json (hf) or the metadata, e.g. ``llama.block_count`` (gguf).
      generation: generation_config.json, empty when there is none.
      tensors: every tensor by name.
      notes: what is to be said of the checkpoint when it is loaded.
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
    @property
    def notes(self) -> tuple[str, ...]: ...

    def read(self, name: str, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Returns a tensor, read-only and mapped where the file holds plain numbers.

        Args:
          name: a key of ``tensors``.
          dtype: what a quantised tensor is expanded to; plain numbers come as they are stored.
        """
        ...

    def read_coded(self, name: str) -> Quantized:
        """Returns a tensor in codes and scales, bit by bit the file's own, in our layout.

        Args:
          name: a key of ``tensors`` whose ``hollow`` is not None.
        """
        ...
