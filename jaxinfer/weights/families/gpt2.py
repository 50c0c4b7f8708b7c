"""GPT-2: learned positions, layer norms, biases everywhere, matrices stored as ``[in, out]``."""

from __future__ import annotations

import numpy as np

from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, NormConfig
from jaxinfer.weights.families.base import Family, Prepare, Table
from jaxinfer.weights.families.llama_like import ACTIVATIONS
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.tables import qkv_part
from jaxinfer.weights.source import TensorSource


def _parse_hf(keys: ConfigReader) -> ModelConfig:
    D, N = keys.need("n_embd"), keys.need("n_head")
    if D % N:
        raise keys.refuse("n_embd", D, f"a multiple of n_head, {N}")
    keys.require("scale_attn_by_inverse_layer_idx", False)
    keys.require("add_cross_attention", False)
    positions = keys.need("n_positions")
    keys.require("n_ctx", positions)
    return _build(
        V=keys.need("vocab_size"),
        D=D,
        N=N,
        L=keys.need("n_layer"),
        max_len=positions,
        mlp=MlpConfig(
            keys.get("n_inner", 4 * D),
            activation=keys.choose("activation_function", ACTIVATIONS),
            gated=False,
            bias=True,
        ),
        eps=keys.need("layer_norm_epsilon"),
        scaled=keys.get("scale_attn_weights", True),
        tied=bool(keys.get("tie_word_embeddings", True)),
    )


def _parse_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    return _build(
        V=source.tensors["token_embd.weight"].shape[0],
        D=keys.need("embedding_length"),
        N=keys.need("attention.head_count"),
        L=keys.need("block_count"),
        max_len=keys.need("context_length"),
        mlp=MlpConfig(keys.need("feed_forward_length"), activation="gelu_tanh", gated=False, bias=True),
        eps=keys.need("attention.layer_norm_epsilon"),
        tied="output.weight" not in source.tensors,
    )


def _build(
    *,
    V: int,
    D: int,
    N: int,
    L: int,
    max_len: int,
    mlp: MlpConfig,
    eps: float,
    tied: bool,
    scaled: bool = True,
) -> ModelConfig:
    H = D // N
    return ModelConfig(
        family="gpt2",
        vocab_size=V,
        d_model=D,
        max_len=max_len,
        layers=(LayerKind(rope=None),) * L,
        attention=AttentionConfig(N, N, H, scale=H**-0.5 if scaled else 1.0, qkv_bias=True, out_bias=True),
        mlp=mlp,
        norm=NormConfig(kind="layer", eps=eps),
        tied=tied,
        learned_positions=True,
    )


def _turned(array: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    return array.T


def _turned_part(index: int) -> Prepare:
    cut = qkv_part(index)
    return lambda array, cfg: cut(array.T, cfg)


def _table(layer: str, names: dict[str, str], turn: bool) -> Table:
    """Returns the entries that both spellings share; ``turn`` says whether matrices are ``[in, out]``."""
    table: dict[str, str | tuple[str, Prepare]] = {}
    for i, leaf in enumerate("qkv"):
        name = layer + names["qkv"]
        table[f"layers.attn.{leaf}"] = (f"{name}.weight", _turned_part(i) if turn else qkv_part(i))
        table[f"layers.attn.{leaf}_bias"] = (f"{name}.bias", qkv_part(i))
    for leaf in ("attn.o", "mlp.up", "mlp.down"):
        name = layer + names[leaf]
        table[f"layers.{leaf}"] = (f"{name}.weight", _turned) if turn else f"{name}.weight"
        table[f"layers.{leaf}_bias"] = f"{name}.bias"
    for place in ("pre_attn", "pre_mlp"):
        table[f"layers.norms.{place}.scale"] = f"{layer}{names[place]}.weight"
        table[f"layers.norms.{place}.bias"] = f"{layer}{names[place]}.bias"
    return table


GPT2 = Family(
    name="gpt2",
    architectures=("gpt2", "GPT2LMHeadModel"),
    gguf_architectures=("gpt2",),
    parse_hf=_parse_hf,
    parse_gguf=_parse_gguf,
    tables={
        "hf": {
            "embed.tokens": "{p}wte.weight",
            "embed.positions": "{p}wpe.weight",
            "final_norm.scale": "{p}ln_f.weight",
            "final_norm.bias": "{p}ln_f.bias",
            "head.w": "lm_head.weight",
            **_table(
                "{p}h.{i}.",
                {
                    "qkv": "attn.c_attn",
                    "attn.o": "attn.c_proj",
                    "mlp.up": "mlp.c_fc",
                    "mlp.down": "mlp.c_proj",
                    "pre_attn": "ln_1",
                    "pre_mlp": "ln_2",
                },
                turn=True,
            ),
        },
        "gguf": {
            "embed.tokens": "token_embd.weight",
            "embed.positions": "position_embd.weight",
            "final_norm.scale": "output_norm.weight",
            "final_norm.bias": "output_norm.bias",
            "head.w": "output.weight",
            **_table(
                "blk.{i}.",
                {
                    "qkv": "attn_qkv",
                    "attn.o": "attn_output",
                    "mlp.up": "ffn_up",
                    "mlp.down": "ffn_down",
                    "pre_attn": "attn_norm",
                    "pre_mlp": "ffn_norm",
                },
                turn=False,
            ),
        },
    },
    prefixes=("transformer.", ""),
    defaults={"activation_function": "gelu_new", "n_positions": 1024, "layer_norm_epsilon": 1e-5},
)
