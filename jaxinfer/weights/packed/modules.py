"""The tensors of a quantised Hugging Face folder, gathered into the weights that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinfer.weights.errors import CheckpointError, MisshapenTensorsError, MissingTensorsError
from jaxinfer.weights.packed.codecs import SCALED_KINDS, LayoutError, Packed
from jaxinfer.weights.packed.config import SCALE_MARKS, UNUSED, Codec, Scheme


@dataclass(frozen=True)
class Module:
    """The tensors that make one weight, not yet read.

    Attributes:
      codec: how they lie. parts: by what follows the module's name.
    """

    codec: Codec
    parts: Mapping[str, np.ndarray]

    def open(self) -> Packed:
        """Returns the weight with its scales read; raises LayoutError."""
        return self.codec.read(self.parts, self.codec.settings)

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return sum(part.nbytes for part in self.parts.values())


def gather_modules(
    where: Path, scheme: Scheme, arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, Module], dict[str, np.ndarray], tuple[str, ...]]:
    """Returns the weights in few bits by their usual names, the tensors that are left, and what is to be said.

    Args:
      where: the file whose configuration says how it is quantised.
      scheme: what it says.
      arrays: every tensor of the folder.

    Raises:
      MissingTensorsError: parts of a weight are absent. CheckpointError: a weight is quantised that the configuration
        says is not.
    """
    rooms: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        module, _, leaf = name.rpartition(".")
        rooms.setdefault(module, {})[leaf] = array
    modules: dict[str, Module] = {}
    plain: dict[str, np.ndarray] = {}
    missing, ignored, unused = [], [], 0
    for module, leaves in rooms.items():
        codec = scheme.codec_of(module)
        used = {leaf for leaf in leaves if leaf in UNUSED}
        unused += len(used)
        mark = None if codec is None else next((m for m in codec.marks if m in leaves), None)
        if codec is not None and mark is not None:
            absent = [part for part in codec.parts if part not in leaves]
            missing += [(f"{module}.{part}", f"beside {module}.{mark}") for part in absent]
            ignored += [f"{module}.{mark}"] if scheme.ignores(module) else []
            parts = {leaf: leaves[leaf] for leaf in (mark, *codec.parts, *codec.optional) if leaf in leaves}
            used |= parts.keys()
            modules[f"{module}.weight"] = Module(codec, parts)
        elif codec is not None and codec.marks == SCALE_MARKS and _is_coded(leaves.get("weight")):
            missing.append((f"{module}.weight_scale", f"beside {module}.weight of {leaves['weight'].dtype}"))
        plain |= {f"{module}.{leaf}".lstrip("."): a for leaf, a in leaves.items() if leaf not in used}
    if missing:
        raise MissingTensorsError(where, missing)
    if ignored:
        raise CheckpointError(
            f"{where}: quantization_config says that these modules are left alone, yet they are quantised: "
            f"{', '.join(sorted(ignored))}; the configuration is another checkpoint's"
        )
    notes = scheme.notes
    if unused:
        notes += (
            f"{unused} scales of activations and KV pages in the checkpoint are left aside: ours follow the data",
        )
    return modules, plain, notes


def open_modules(where: Path, modules: Mapping[str, Module]) -> dict[str, Packed]:
    """Returns every weight with its scales read, to be asked for its shape and format.

    Raises:
      MisshapenTensorsError: tensors that do not lie as their format says, all of them.
    """
    opened, bad = {}, []
    for name, module in modules.items():
        try:
            opened[name] = module.open()
        except LayoutError as error:
            bad.append((name, f"{module.codec.name}: {error}"))
    if bad:
        raise MisshapenTensorsError(where, bad)
    return opened


def _is_coded(weight: np.ndarray | None) -> bool:
    return weight is not None and weight.dtype in SCALED_KINDS
