"""Where Llama-like checkpoints keep each parameter, and the ways in which families store a matrix otherwise.

Every family starts from one of the two tables here and overlays its own differences.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.weights.families.base import Prepare, Table

_HF_LAYER = "{p}layers.{i}."
_GGUF_LAYER = "blk.{i}."


def _llama_like(
    embed: str, final: str, head: str, layer: str, attn: str, mlp: str, names: dict[str, str]
) -> Table:
    """Returns the table of a naming scheme; ``names`` has what the scheme calls q, k, v, o, gate, up and down."""
    table = {"embed.tokens": embed, "final_norm.scale": final, "head.w": head}
    for leaf in ("q", "k", "v", "o"):
        table[f"layers.attn.{leaf}"] = f"{layer}{attn}{names[leaf]}.weight"
        table[f"layers.attn.{leaf}_bias"] = f"{layer}{attn}{names[leaf]}.bias"
    for leaf in ("gate", "up", "down"):
        table[f"layers.mlp.{leaf}"] = f"{layer}{mlp}{names[leaf]}.weight"
        table[f"layers.mlp.{leaf}_bias"] = f"{layer}{mlp}{names[leaf]}.bias"
    for place in ("pre_attn", "pre_mlp"):
        table[f"layers.norms.{place}.scale"] = f"{layer}{names[place]}.weight"
    for leaf in ("q_norm", "k_norm"):
        table[f"layers.attn.{leaf}"] = f"{layer}{attn}{names[leaf]}.weight"
    return table


HF_LLAMA = _llama_like(
    "{p}embed_tokens.weight",
    "{p}norm.weight",
    "lm_head.weight",
    _HF_LAYER,
    "self_attn.",
    "mlp.",
    {
        **{leaf: f"{leaf}_proj" for leaf in ("q", "k", "v", "o", "gate", "up", "down")},
        "q_norm": "q_norm",
        "k_norm": "k_norm",
        "pre_attn": "input_layernorm",
        "pre_mlp": "post_attention_layernorm",
    },
)
GGUF_LLAMA = _llama_like(
    "token_embd.weight",
    "output_norm.weight",
    "output.weight",
    _GGUF_LAYER,
    "attn_",
    "ffn_",
    {
        **{leaf: leaf for leaf in ("q", "k", "v", "gate", "up", "down", "q_norm", "k_norm")},
        "o": "output",
        "pre_attn": "attn_norm",
        "pre_mlp": "ffn_norm",
    },
)
# Norms after attention and ffn (Gemma 2 and 3, OLMo 2). `post_attention_layernorm` is what it says only there.
HF_POST_NORMS = {
    "layers.norms.post_attn.scale": _HF_LAYER + "post_attention_layernorm.weight",
    "layers.norms.pre_mlp.scale": _HF_LAYER + "pre_feedforward_layernorm.weight",
    "layers.norms.post_mlp.scale": _HF_LAYER + "post_feedforward_layernorm.weight",
}
GGUF_POST_NORMS = {
    "layers.norms.post_attn.scale": _GGUF_LAYER + "post_attention_norm.weight",
    "layers.norms.post_mlp.scale": _GGUF_LAYER + "post_ffw_norm.weight",
}
GGUF_MOE = {
    "layers.moe.router": _GGUF_LAYER + "ffn_gate_inp.weight",
    **{f"layers.moe.{leaf}": f"{_GGUF_LAYER}ffn_{leaf}_exps.weight" for leaf in ("gate", "up", "down")},
}


def hf_experts(room: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Returns the entries of a mixture whose experts are separate matrices below ``room``."""
    names = {"gate": gate, "up": up, "down": down}
    return {
        "layers.moe.router": f"{_HF_LAYER}{room}.gate.weight",
        **{f"layers.moe.{k}": f"{_HF_LAYER}{room}.experts.{{e}}.{name}.weight" for k, name in names.items()},
    }


def prepared(table: Table, prepare: Prepare, *endings: str) -> dict[str, tuple[str, Prepare]]:
    """Returns the entries of a table whose keys have one of the endings, with ``prepare`` put in."""
    return {
        key: (entry if isinstance(entry, str) else entry[0], prepare)
        for key, entry in table.items()
        if key.endswith(endings)
    }


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order of a Llama GGUF: within a head, rows ``j`` and ``j + H/2`` stand side by side there.

    Args:
      array: ``[num_heads * H, D]``, or a bias ``[num_heads * H]``.
      num_heads: N for q, K for k.

    Source: llama.cpp, ``LlamaModel.permute`` of its converter.
    """
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


# Llama's rows are permuted, with the q-head count for q and the kv-head count for k; no other family's are.
GGUF_PERMUTED: Table = {
    **GGUF_LLAMA,
    **prepared(GGUF_LLAMA, lambda a, cfg: unpermute(a, cfg.attention.num_heads), "attn.q", "attn.q_bias"),
    **prepared(GGUF_LLAMA, lambda a, cfg: unpermute(a, cfg.attention.num_kv_heads), "attn.k", "attn.k_bias"),
}


def plus_one(array: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    """Folds Gemma's ``1 + w`` into the weight."""
    return array.astype(np.float32) + 1.0


def qkv_part(index: int) -> Prepare:
    """Returns what cuts q (0), k (1) or v (2) out of the rows of one fused tensor."""

    def cut(array: np.ndarray, cfg: ModelConfig) -> np.ndarray:
        a = cfg.attention
        N, K = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        bounds = (0, N, N + K, N + 2 * K)
        if array.shape[0] != bounds[-1]:
            raise ValueError(f"shape {array.shape}, wanted {bounds[-1]} rows")
        return array[bounds[index] : bounds[index + 1]]

    return cut


def half(index: int) -> Prepare:
    """Returns what cuts the first (0) or second (1) half out of the rows of one fused tensor."""

    def cut(array: np.ndarray, cfg: ModelConfig) -> np.ndarray:
        F = cfg.mlp.ffn_dim
        if array.shape[0] != 2 * F:
            raise ValueError(f"shape {array.shape}, wanted {2 * F} rows")
        return array[index * F : (index + 1) * F]

    return cut
