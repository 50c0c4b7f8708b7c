"""Qwen 2 and 2.5: biases on q, k and v; the upper layers may look through a window."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.config import ModelConfig
from jaxinfer.weights.families.base import Family
from jaxinfer.weights.families.llama_like import read_gguf, read_hf, read_windows, with_windows
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.tables import GGUF_LLAMA, HF_LLAMA
from jaxinfer.weights.source import TensorSource


def _parse_hf(keys: ConfigReader) -> ModelConfig:
    keys.require("attention_bias", True)
    keys.require("use_mrope", False)
    cfg = slide_upper(read_hf(keys, "qwen2"), keys)
    return replace(cfg, attention=replace(cfg.attention, qkv_bias=True, out_bias=False))


def slide_upper(cfg: ModelConfig, keys: ConfigReader) -> ModelConfig:
    """Returns the model with the window on layers from ``max_window_layers`` up, if ``use_sliding_window`` is set."""
    on, first = keys.get("use_sliding_window"), keys.need("max_window_layers")
    window = keys.given("sliding_window", 4096)
    slides = [bool(on) and window is not None and i >= first for i in range(cfg.num_layers)]
    return with_windows(cfg, read_windows(keys, window if on else None, slides))


def _parse_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    return read_gguf(keys, source, "qwen2")


DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
QWEN2 = Family(
    name="qwen2",
    architectures=("qwen2", "Qwen2ForCausalLM"),
    gguf_architectures=("qwen2",),
    parse_hf=_parse_hf,
    parse_gguf=_parse_gguf,
    tables={"hf": HF_LLAMA, "gguf": GGUF_LLAMA},
    defaults=DEFAULTS,
)
