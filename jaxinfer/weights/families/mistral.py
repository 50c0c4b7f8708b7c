"""Mistral: Llama whose every layer may look through one window."""

from __future__ import annotations

from jaxinfer.config import ModelConfig
from jaxinfer.weights.families.base import Family
from jaxinfer.weights.families.llama_like import read_hf, with_windows
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.tables import HF_LLAMA
from jaxinfer.weights.source import TensorSource


def _parse_hf(keys: ConfigReader) -> ModelConfig:
    keys.require("attention_bias", False)
    return slide_all(read_hf(keys, "mistral"), keys)


def slide_all(cfg: ModelConfig, keys: ConfigReader) -> ModelConfig:
    """Returns the model with ``sliding_window`` (null is off) on every layer, as ``layer_types`` must then agree."""
    window = keys.get("sliding_window")
    wanted = ["full_attention" if window is None else "sliding_attention"] * cfg.num_layers
    keys.require("layer_types", wanted)
    return with_windows(cfg, [window] * cfg.num_layers)


def _parse_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    raise keys.refuse("general.architecture", "mistral", "llama, which is what converters write for Mistral")


MISTRAL = Family(
    name="mistral",
    architectures=("mistral", "MistralForCausalLM"),
    gguf_architectures=(),
    parse_hf=_parse_hf,
    parse_gguf=_parse_gguf,
    tables={"hf": HF_LLAMA},
    defaults={"hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6},
)
