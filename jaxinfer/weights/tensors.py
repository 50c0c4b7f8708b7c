"""One opened checkpoint of somebody else's making: its configuration and its tensors by their own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

SourceKind = Literal["hf", "gguf"]


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
