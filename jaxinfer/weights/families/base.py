"""What a family is, and how its tables become a recipe for every parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.arrays.specs import FLOAT32_ROLES, ParamSpec, flatten_specs
from jaxinfer.config import ModelConfig
from jaxinfer.model.decoder import param_specs
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.source import SourceKind, TensorSource

Prepare = Callable[[np.ndarray, ModelConfig], np.ndarray]
Table = Mapping[str, str | tuple[str, Prepare]]

# Tensors that a checkpoint may hold beside its parameters (`re.fullmatch`): tables that the configuration implies,
# masks, a copy of a tied head, the other towers of a multimodal model.
IGNORABLE: Mapping[SourceKind, tuple[str, ...]] = {
    "hf": (
        r".*rotary_emb\..*",
        r".*\.attn\.(masked_)?bias",
        r"(.*\.)?lm_head\.weight",
        r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    ),
    "gguf": (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight", r"blk\.\d+\.attn_rot_embd"),
}


@dataclass(frozen=True)
class Recipe:
    """How one parameter comes out of a checkpoint.

    Attributes:
      names: tensors to read.
      transform: gives the parameter from their arrays, in that order, as a view where it can; a ValueError says
        which shape it wanted.
      rows: does the same to the rows of matrices ``[out, in]`` whatever their columns are, and gives
        ``[*out, columns]``: so weights of codes are arranged, whose scales have fewer columns than numbers. It fails,
        or gives another number of columns, where the transform does not leave rows whole. None for what is no matrix.
    """

    names: tuple[str, ...]
    transform: Callable[..., np.ndarray]
    rows: Callable[..., np.ndarray] | None = None


@dataclass(frozen=True)
class Family:
    """A kind of model: how its checkpoints are named and configured.

    Attributes:
      name: its own, as in `ModelConfig.family`.
      architectures: what ``model_type`` and ``architectures`` of a Hugging Face configuration say.
      gguf_architectures: what ``general.architecture`` of a GGUF file says.
      parse_hf: reads a Hugging Face configuration; the caller finishes the reader.
      parse_gguf: reads GGUF metadata; tensors say what it does not (biases, a tied head, rope factors).
      tables: where each parameter stands, by kind of checkpoint. Keys are paths without the layer number
        (``layers.attn.q``). Values are a name, with ``{p}`` for the prefix, ``{i}`` for the layer and ``{e}`` for the
        expert, and optionally what makes a plain ``[out, in]`` matrix of that tensor.
      prefixes: what ``{p}`` may stand for, the usual one first.
      defaults: values of Hugging Face keys that are absent.
      text_section: the key of a multimodal configuration that holds the text model's.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    parse_hf: Callable[[ConfigReader], ModelConfig]
    parse_gguf: Callable[[ConfigReader, TensorSource], ModelConfig]
    tables: Mapping[SourceKind, Table]
    prefixes: tuple[str, ...] = ("model.",)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text_section: str | None = None

    def mapping(self, cfg: ModelConfig, kind: SourceKind, names: Collection[str] = ()) -> dict[str, Recipe]:
        """Returns for every parameter (``layers.3.attn.q``) how it is read from a checkpoint.

        Args:
          cfg: what the checkpoint's configuration says.
          kind: whose names to use.
          names: the checkpoint's tensors, which choose among ``prefixes``; the first one where they do not tell.
        """
        table = self.tables[kind]
        embedding, _ = _entry(table, "embed.tokens")
        prefix = next((p for p in self.prefixes if embedding.format(p=p) in names), self.prefixes[0])
        made: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray] | None]] = {}
        recipes = {}
        for path, spec in flatten_specs(param_specs(cfg)):
            key, layer = _split_layer(path)
            name, prepare = _entry(table, key)
            experts = range(cfg.mlp.num_experts) if "{e}" in name else (0,)
            if key not in made:
                made[key] = _transform(key, spec, prepare, cfg), _rows(spec, prepare, cfg)
            recipes[path] = Recipe(tuple(name.format(p=prefix, i=layer, e=e) for e in experts), *made[key])
        return recipes

    def ignorable(self, kind: SourceKind) -> tuple[str, ...]:
        """Returns patterns (of `re.fullmatch`) of tensor names that are harmless beside the parameters."""
        return IGNORABLE[kind]


def _entry(table: Table, key: str) -> tuple[str, Prepare]:
    entry = table[key]
    return (entry, lambda array, cfg: array) if isinstance(entry, str) else entry


def _split_layer(path: str) -> tuple[str, int]:
    """Returns ``("layers.attn.q", 3)`` of ``layers.3.attn.q``."""
    room, _, rest = path.partition(".")
    if room != "layers":
        return path, 0
    layer, _, leaf = rest.partition(".")
    return f"layers.{leaf}", int(layer)


def _transform(key: str, spec: ParamSpec, prepare: Prepare, cfg: ModelConfig) -> Callable[..., np.ndarray]:
    shape = spec.shape
    if key.startswith("layers.moe.") and spec.role == "matrix":
        return lambda *arrays: _experts([prepare(a, cfg) for a in arrays], shape)
    if spec.role in ("norm", "bias", "embedding"):
        wanted = shape if spec.role == "embedding" else (math.prod(shape),)
        return lambda array: _checked(prepare(array, cfg), wanted).reshape(shape)
    wide = math.prod(shape[:1]) if key.endswith(".o") else math.prod(shape[:-1])
    return lambda array: _checked(prepare(array, cfg), (wide, math.prod(shape) // wide)).reshape(shape)


def _rows(spec: ParamSpec, prepare: Prepare, cfg: ModelConfig) -> Callable[..., np.ndarray] | None:
    if spec.role in FLOAT32_ROLES:
        return None
    out = spec.shape[: len(spec.shape) - spec.num_in]

    def rows(*arrays: np.ndarray) -> np.ndarray:
        made = [prepare(array, cfg) for array in arrays]
        whole = made[0] if len(made) == 1 else np.stack(made)
        return whole.reshape(*out, whole.shape[-1])

    return rows


def _experts(arrays: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``[E, out, in]`` of E matrices ``[out, in]``, which may already be one array."""
    if len(arrays) == 1 and arrays[0].ndim == 3:
        return _checked(arrays[0], shape)
    return np.stack([_checked(a, shape[1:]) for a in arrays])


def _checked(array: np.ndarray, wanted: tuple[int, ...]) -> np.ndarray:
    if array.shape != wanted:
        raise ValueError(f"shape {array.shape}, wanted {wanted}")
    return array
