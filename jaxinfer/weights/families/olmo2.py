"""OLMo 2: norms after attention and ffn instead of before, and over all heads of q and k together."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.config import ModelConfig
from jaxinfer.weights.families.base import Family
from jaxinfer.weights.families.llama_like import read_gguf, read_hf
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.tables import GGUF_LLAMA, GGUF_POST_NORMS, HF_LLAMA, HF_POST_NORMS
from jaxinfer.weights.source import TensorSource


def _parse_hf(keys: ConfigReader) -> ModelConfig:
    return _norm_after(read_hf(keys, "olmo2"))


def _parse_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    return _norm_after(read_gguf(keys, source, "olmo2"))


def _norm_after(cfg: ModelConfig) -> ModelConfig:
    return replace(
        cfg,
        attention=replace(cfg.attention, qk_norm="full"),
        norm=replace(cfg.norm, pre=False, post=True),
    )


OLMO2 = Family(
    name="olmo2",
    architectures=("olmo2", "Olmo2ForCausalLM"),
    gguf_architectures=("olmo2",),
    parse_hf=_parse_hf,
    parse_gguf=_parse_gguf,
    tables={"hf": {**HF_LLAMA, **HF_POST_NORMS}, "gguf": {**GGUF_LLAMA, **GGUF_POST_NORMS}},
    defaults={"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
