"""A model's configuration without its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxinfer.arrays.quantized import Quantized
from jaxinfer.config import ModelConfig
from jaxinfer.model.decoder import param_specs
from jaxinfer.weights.families import read_config
from jaxinfer.weights.model import Settle, open_model
from jaxinfer.weights.settle import Held, settle_formats
from jaxinfer.weights.tensors import SourceKind, TensorInfo

_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
# By their makers' config.json.
PRESETS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA_3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3-70b": _LLAMA_3
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@dataclass(frozen=True)
class Headers:
    """A checkpoint of which there is the configuration only; see `TensorSource`."""

    path: Path
    config: dict[str, Any]
    kind: SourceKind = "hf"
    generation: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def read(self, name: str, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """Raises KeyError: there are no tensors."""
        raise KeyError(f"{self.path}: has no tensor {name}, only a configuration")

    def read_coded(self, name: str) -> Quantized:
        """Raises KeyError: there are no tensors."""
        raise KeyError(f"{self.path}: has no tensor {name}, only a configuration")


class Described(NamedTuple):
    """A model, of which there may be the configuration alone.

    Attributes:
      cfg: the decoder. settle, policy: see `Model`; without a checkpoint none of its weights lies in codes.
    """

    cfg: ModelConfig
    settle: Settle
    policy: str | None


def read_model(name: str) -> ModelConfig:
    """Returns what a model is; see `describe_model`."""
    return describe_model(name).cfg


def describe_model(name: str) -> Described:
    """Returns what is known of a model without its weights.

    Args:
      name: a key of `PRESETS`, a config.json of Hugging Face's form, or any name that `open_model` takes.

    Raises:
      ValueError: what is wrong with its configuration. FetchError: no such model.
    """
    path = Path(name)
    if name.lower() in PRESETS:
        headers = Headers(path, PRESETS[name.lower()])
    elif path.suffix == ".json" and path.is_file():
        headers = Headers(path.parent, json.loads(path.read_text(encoding="utf-8")))
    else:
        model = open_model(name)
        return Described(model.cfg, model.settle, model.policy)
    cfg, _ = read_config(headers)
    plain = Held("", is_coded=False, format=None)
    return Described(cfg, lambda policy: settle_formats(policy, param_specs(cfg), lambda *_: plain), None)
