"""Phi-3, Phi-4 and Phi-4-mini: q, k, v in one tensor, gate and up in another, LongRoPE, heads rotated in part."""

from __future__ import annotations

from jaxinfer.config import ModelConfig
from jaxinfer.weights.families.base import Family, Table
from jaxinfer.weights.families.llama_like import read_gguf, read_hf, with_windows
from jaxinfer.weights.families.mistral import slide_all
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.tables import GGUF_LLAMA, HF_LLAMA, half, qkv_part
from jaxinfer.weights.source import TensorSource


def _parse_hf(keys: ConfigReader) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.require(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini's own code
        keys.require(key, 1)
    cfg = read_hf(keys, "phi3", old_rope_kinds={"su": "longrope", "yarn": "longrope"})
    return slide_all(cfg, keys)


def _parse_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    cfg = read_gguf(keys, source, "phi3")
    return with_windows(cfg, [keys.get("attention.sliding_window") or None] * cfg.num_layers)  # 0 is off


def _fuse(qkv: str, gate_up: str) -> Table:
    return {
        **{f"layers.attn.{leaf}": (qkv, qkv_part(i)) for i, leaf in enumerate("qkv")},
        **{f"layers.mlp.{leaf}": (gate_up, half(i)) for i, leaf in enumerate(("gate", "up"))},
    }


PHI3 = Family(
    name="phi3",
    architectures=("phi3", "Phi3ForCausalLM"),
    gguf_architectures=("phi3",),
    parse_hf=_parse_hf,
    parse_gguf=_parse_gguf,
    tables={
        "hf": {
            **HF_LLAMA,
            **_fuse("{p}layers.{i}.self_attn.qkv_proj.weight", "{p}layers.{i}.mlp.gate_up_proj.weight"),
        },
        "gguf": {**GGUF_LLAMA, **_fuse("blk.{i}.attn_qkv.weight", "blk.{i}.ffn_up.weight")},
    },
    defaults={"hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
