"""A checkpoint that lives in memory, for tests of what families read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxinfer.arrays.quantized import Quantized
from jaxinfer.weights.source import SourceKind, TensorInfo


@dataclass(frozen=True)
class DictSource:
    """Arrays and a configuration as a `TensorSource`."""

    kind: SourceKind
    config: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    path: Path = Path("memory")
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(a.shape, "F32", a.nbytes) for name, a in self.arrays.items()}

    def read(self, name: str, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        return self.arrays[name]

    def read_coded(self, name: str) -> Quantized:
        raise AssertionError(f"{name} lies in full")
