"""Mixtral: Mistral whose feed-forward blocks are mixtures; its GGUF files call themselves ``llama`` with experts."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.config import ModelConfig
from jaxinfer.weights.families.base import Family
from jaxinfer.weights.families.llama_like import read_gguf, read_hf
from jaxinfer.weights.families.mistral import slide_all
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.tables import GGUF_MOE, GGUF_PERMUTED, HF_LLAMA, hf_experts
from jaxinfer.weights.source import TensorSource


def _parse_hf(keys: ConfigReader) -> ModelConfig:
    keys.require("attention_bias", False)
    cfg = slide_all(read_hf(keys, "mixtral", theta=1_000_000.0), keys)
    return mix_all(cfg, keys.need("num_local_experts"), keys.need("num_experts_per_tok"), cfg.mlp.ffn_dim)


def _parse_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    cfg = read_gguf(keys, source, "mixtral")
    expert_dim = keys.get("expert_feed_forward_length", cfg.mlp.ffn_dim)
    return mix_all(cfg, keys.need("expert_count"), keys.need("expert_used_count"), expert_dim)


def mix_all(
    cfg: ModelConfig, num_experts: int, experts_per_token: int, expert_dim: int, *, normalize: bool = True
) -> ModelConfig:
    """Returns the model with a mixture in every layer.

    Args:
      cfg: the dense model.
      num_experts, experts_per_token, expert_dim, normalize: as in `MlpConfig`.
    """
    mlp = replace(
        cfg.mlp,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_dim=expert_dim,
        normalize_router=normalize,
    )
    return replace(cfg, mlp=mlp, layers=tuple(replace(kind, moe=True) for kind in cfg.layers))


MIXTRAL = Family(
    name="mixtral",
    architectures=("mixtral", "MixtralForCausalLM"),
    gguf_architectures=("llama",),
    parse_hf=_parse_hf,
    parse_gguf=_parse_gguf,
    tables={
        "hf": {**HF_LLAMA, **hf_experts("block_sparse_moe", gate="w1", up="w3", down="w2")},
        "gguf": {**GGUF_PERMUTED, **GGUF_MOE},
    },
    defaults={"hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
)
