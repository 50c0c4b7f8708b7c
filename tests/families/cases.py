"""Tiny checkpoints of every family with what transformers computes on them.

`scripts/make_goldens.py` wrote ``goldens/``: a configuration, the tensors' names and shapes, and logits. The weights
are not stored: `make_arrays` draws them from a seed, there and here alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens"
NAMES = tuple(sorted(path.stem for path in GOLDENS.glob("*.json")))


@dataclass(frozen=True)
class Case:
    """One checkpoint and the reference's results.

    Attributes:
      config: config.json as transformers 5 writes it. old_config: as transformers 4 wrote it, where it differs.
      shapes: every tensor's, by its name in the file.
      seed, std, norm_center: of the weights, see `make_arrays`.
      rows: prompts' ids, of mixed lengths. logits: for each row ``[T, V]`` float32.
      hidden: ``[L + 1, T, D]`` of row ``hidden_row``: the embedding, then the stream after each layer; the last is
        normed.
    """

    name: str
    config: dict[str, Any]
    old_config: dict[str, Any] | None
    shapes: dict[str, tuple[int, ...]]
    seed: int
    std: float
    norm_center: float
    rows: tuple[np.ndarray, ...]
    logits: tuple[np.ndarray, ...]
    hidden: np.ndarray
    hidden_row: int

    def make_arrays(self) -> dict[str, np.ndarray]:
        """Returns the checkpoint's tensors."""
        return make_arrays(self.shapes, self.seed, self.std, self.norm_center)


def make_arrays(
    shapes: dict[str, tuple[int, ...]], seed: int, std: float, norm_center: float
) -> dict[str, np.ndarray]:
    """Draws weights: names in sorted order, each normal from one `RandomState` (whose stream numpy never changes).

    Args:
      shapes: of the tensors by name. seed: of the stream.
      std: of matrices; vectors (norms and biases) have 0.1.
      norm_center: added to norms' weights: 1, or 0 where the model adds it itself.
    """
    stream = np.random.RandomState(seed)
    arrays = {}
    for name in sorted(shapes):
        draw = stream.standard_normal(shapes[name]).astype(np.float32)
        if len(shapes[name]) > 1:
            arrays[name] = np.float32(std) * draw
        else:
            center = 0.0 if name.endswith("bias") else norm_center
            arrays[name] = np.float32(center) + np.float32(0.1) * draw
    return arrays


@cache
def load_case(name: str) -> Case:
    """Returns a stored case by its name."""
    told = json.loads((GOLDENS / f"{name}.json").read_text())
    with np.load(GOLDENS / f"{name}.npz") as data:
        ends = np.cumsum(data["lengths"])[:-1]
        rows, logits = np.split(data["tokens"], ends), np.split(data["logits"], ends)
        hidden = data["hidden"]
    told["shapes"] = {key: tuple(shape) for key, shape in told["shapes"].items()}
    return Case(name=name, rows=tuple(rows), logits=tuple(logits), hidden=hidden, **told)


def write_checkpoint(folder: Path, arrays: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    """Writes a Hugging Face folder: config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_checkpoint(case: str | Case, folder: Path, *, old: bool = False) -> Path:
    """Writes a case's checkpoint.

    Args:
      case: the case or its name.
      folder: where to.
      old: with the configuration as transformers 4 spelled it.
    """
    case = load_case(case) if isinstance(case, str) else case
    config = case.old_config if old else case.config
    if config is None:
        raise ValueError(f"{case.name} has no old spelling")
    return write_checkpoint(folder, case.make_arrays(), config)
