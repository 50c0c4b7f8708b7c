"""Qwen 3: every head of q and k is normalised; its mixture sends tokens to many small experts."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.config import ModelConfig
from jaxinfer.weights.families.base import Family
from jaxinfer.weights.families.llama_like import read_gguf, read_hf
from jaxinfer.weights.families.mixtral import mix_all
from jaxinfer.weights.families.qwen2 import DEFAULTS, slide_upper
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.tables import GGUF_LLAMA, GGUF_MOE, HF_LLAMA, hf_experts
from jaxinfer.weights.source import TensorSource


def _parse_hf(keys: ConfigReader) -> ModelConfig:
    return norm_heads(slide_upper(read_hf(keys, "qwen3"), keys))


def norm_heads(cfg: ModelConfig) -> ModelConfig:
    """Returns the model with q and k normalised head by head."""
    return replace(cfg, attention=replace(cfg.attention, qk_norm="head"))


def _parse_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    return norm_heads(read_gguf(keys, source, "qwen3"))


def _parse_moe(keys: ConfigReader) -> ModelConfig:
    keys.require("use_sliding_window", False)
    for unused in ("sliding_window", "max_window_layers"):
        keys.get(unused)
    cfg = norm_heads(read_hf(keys, "qwen3_moe"))
    experts = keys.get("num_experts") or keys.need("num_local_experts")
    keys.require("num_local_experts", experts)
    cfg = mix_all(
        cfg,
        experts,
        keys.need("num_experts_per_tok"),
        keys.need("moe_intermediate_size"),
        normalize=keys.get("norm_topk_prob", False),
    )
    dense, step = set(keys.get("mlp_only_layers", ())), keys.get("decoder_sparse_step", 1)
    moe = [i not in dense and (i + 1) % step == 0 for i in range(cfg.num_layers)]
    return replace(cfg, layers=tuple(replace(kind, moe=m) for kind, m in zip(cfg.layers, moe, strict=True)))


def _parse_moe_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    cfg = norm_heads(read_gguf(keys, source, "qwen3_moe"))
    expert_dim = keys.get("expert_feed_forward_length", cfg.mlp.ffn_dim)
    keys.require("expert_weights_norm", True)  # llama.cpp too normalises where the key is absent
    return mix_all(cfg, keys.need("expert_count"), keys.need("expert_used_count"), expert_dim)


QWEN3 = Family(
    name="qwen3",
    architectures=("qwen3", "Qwen3ForCausalLM"),
    gguf_architectures=("qwen3",),
    parse_hf=_parse_hf,
    parse_gguf=_parse_gguf,
    tables={"hf": HF_LLAMA, "gguf": GGUF_LLAMA},
    defaults={**DEFAULTS, "head_dim": 128},
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("qwen3_moe", "Qwen3MoeForCausalLM"),
    gguf_architectures=("qwen3moe",),
    parse_hf=_parse_moe,
    parse_gguf=_parse_moe_gguf,
    tables={
        "hf": {**HF_LLAMA, **hf_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")},
        "gguf": {**GGUF_LLAMA, **GGUF_MOE},
    },
    defaults=DEFAULTS,
)
