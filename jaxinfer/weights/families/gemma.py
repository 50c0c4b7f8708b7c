"""Gemma 1, 2 and 3 (text): scaled embeddings, norms that multiply by ``1 + w``, tied heads; from 2 on windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.weights.families.base import Family, Table
from jaxinfer.weights.families.llama_like import read_gguf, read_head_dim, read_hf, read_windows, with_windows
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.ropes import read_rope_block
from jaxinfer.weights.families.tables import (
    GGUF_LLAMA,
    GGUF_POST_NORMS,
    HF_LLAMA,
    HF_POST_NORMS,
    plus_one,
    prepared,
)
from jaxinfer.weights.source import TensorSource

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # Gemma 3; its GGUF files do not hold the local one
WINDOW_PATTERN = 6  # Gemma 3: every sixth layer sees everything; nor do they hold this


def _parse_hf1(keys: ConfigReader) -> ModelConfig:
    cfg = _scaled(_read_hf(keys, "gemma"))
    if cfg.mlp.activation == "gelu":  # the first configurations said so and meant the approximation
        cfg = replace(cfg, mlp=replace(cfg.mlp, activation="gelu_tanh"))
    return cfg


def _read_hf(keys: ConfigReader, family: str, ropes: Sequence[RopeConfig] | None = None) -> ModelConfig:
    keys.require("use_bidirectional_attention", False)
    old, new = keys.get("hidden_act"), keys.get("hidden_activation")  # the newer one holds where both are
    key = "hidden_act" if old is not None and new is None else "hidden_activation"
    return read_hf(keys, family, ropes=ropes, activation_key=key)


def _scaled(cfg: ModelConfig) -> ModelConfig:
    return replace(cfg, embed_scale=math.sqrt(cfg.d_model))


def _parse_hf2(keys: ConfigReader) -> ModelConfig:
    cfg = _norm_around(_scaled(_read_hf(keys, "gemma2")))
    window = keys.given("sliding_window", 4096)
    keys.require("sliding_window_size", window)
    cfg = with_windows(cfg, read_windows(keys, window, _all_but_every(2, cfg)))
    caps = keys.given("attn_logit_softcapping", 50.0), keys.given("final_logit_softcapping", 30.0)
    return _capped(cfg, *caps, _read_scale(keys))


def _parse_hf3(keys: ConfigReader) -> ModelConfig:
    cfg = _norm_around(_scaled(_read_hf(keys, "gemma3", ropes=_read_ropes(keys))))
    every = keys.get("sliding_window_pattern") or keys.get("_sliding_window_pattern", WINDOW_PATTERN)
    keys.require("_sliding_window_pattern", every)
    windows = read_windows(keys, keys.given("sliding_window", 4096), _all_but_every(every, cfg))
    keys.require("attn_logit_softcapping")  # transformers reads it and does not apply it
    cfg = _capped(cfg, None, keys.get("final_logit_softcapping"), _read_scale(keys))
    return _local_ropes(with_windows(cfg, windows))


def _read_scale(keys: ConfigReader) -> float:
    return keys.need("query_pre_attn_scalar") ** -0.5


def _read_ropes(keys: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """Returns the rotary embedding of layers that see everything, and of those with a window (never stretched)."""
    H = read_head_dim(keys)
    whole, local = keys.get("rope_theta", GLOBAL_THETA), keys.get("rope_local_base_freq", LOCAL_THETA)
    scaling, parameters = keys.section("rope_scaling"), keys.section("rope_parameters")
    if not parameters.values:
        nothing = ConfigReader({}, keys.where)
        return read_rope_block(keys, scaling, H, theta=whole), read_rope_block(keys, nothing, H, theta=local)
    if scaling.values:
        raise keys.refuse("rope_scaling", dict(scaling.values), "absent where rope_parameters is given")
    ropes = (
        read_rope_block(keys, parameters.section("full_attention"), H, theta=whole),
        read_rope_block(keys, parameters.section("sliding_attention"), H, theta=local),
    )
    parameters.finish()
    return ropes


def _all_but_every(n: int, cfg: ModelConfig) -> list[bool]:
    return [bool((i + 1) % n) for i in range(cfg.num_layers)]


def _norm_around(cfg: ModelConfig) -> ModelConfig:
    head = "head" if cfg.family == "gemma3" else "none"
    return replace(cfg, norm=replace(cfg.norm, post=True), attention=replace(cfg.attention, qk_norm=head))


def _capped(cfg: ModelConfig, scores: float | None, logits: float | None, scale: float) -> ModelConfig:
    return replace(cfg, attention=replace(cfg.attention, softcap=scores, scale=scale), final_softcap=logits)


def _local_ropes(cfg: ModelConfig) -> ModelConfig:
    """Returns the model whose layers with a window use the second rotary embedding."""
    return replace(
        cfg, layers=tuple(replace(kind, rope=0 if kind.window is None else 1) for kind in cfg.layers)
    )


def _parse_gguf1(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    return _scaled(read_gguf(keys, source, "gemma", "gelu_tanh"))


def _parse_gguf2(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    cfg = _norm_around(_scaled(read_gguf(keys, source, "gemma2", "gelu_tanh")))
    window = keys.get("attention.sliding_window", 4096)
    cfg = with_windows(cfg, [window if slides else None for slides in _all_but_every(2, cfg)])
    caps = keys.get("attn_logit_softcapping", 50.0), keys.get("final_logit_softcapping", 30.0)
    return _capped(cfg, *caps, _gguf_scale(cfg, layers_of_27b=46))


def _parse_gguf3(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    cfg = _norm_around(_scaled(read_gguf(keys, source, "gemma3", "gelu_tanh")))
    whole = replace(cfg.ropes[0], theta=float(keys.get("rope.freq_base", GLOBAL_THETA)))
    local = RopeConfig(float(keys.get("rope.freq_base_swa", LOCAL_THETA)), cfg.ropes[0].rotary_dim)
    pattern = keys.get("attention.sliding_window_pattern", WINDOW_PATTERN)
    slides = pattern if isinstance(pattern, list | tuple) else _all_but_every(pattern, cfg)
    window = keys.need("attention.sliding_window")
    cfg = with_windows(cfg, [window if s else None for s in slides])
    cfg = _capped(cfg, None, keys.get("final_logit_softcapping"), _gguf_scale(cfg, layers_of_27b=62))
    return _local_ropes(replace(cfg, ropes=(whole, local)))


def _gguf_scale(cfg: ModelConfig, layers_of_27b: int) -> float:
    """Returns the scale of scores, which GGUF does not hold: only the 27B models have another than H ** -0.5.

    Source: llama.cpp, the ``LLM_TYPE_27B`` cases of Gemma 2 and 3.
    """
    a = cfg.attention
    return (cfg.d_model / a.num_heads if cfg.num_layers == layers_of_27b else a.head_dim) ** -0.5


_HF2: Table = {**HF_LLAMA, **HF_POST_NORMS}
_GGUF2: Table = {**GGUF_LLAMA, **GGUF_POST_NORMS}


def _tables(hf: Table, gguf: Table) -> dict:
    """Returns both tables; GGUF files hold their norms with the one already added."""
    return {"hf": {**hf, **prepared(hf, plus_one, ".scale", "_norm")}, "gguf": gguf}


_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_TANH = {"hidden_activation": "gelu_pytorch_tanh"}
GEMMA = Family(
    name="gemma",
    architectures=("gemma", "GemmaForCausalLM"),
    gguf_architectures=("gemma",),
    parse_hf=_parse_hf1,
    parse_gguf=_parse_gguf1,
    tables=_tables(HF_LLAMA, GGUF_LLAMA),
    defaults={**_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
)
GEMMA2 = Family(
    name="gemma2",
    architectures=("gemma2", "Gemma2ForCausalLM"),
    gguf_architectures=("gemma2",),
    parse_hf=_parse_hf2,
    parse_gguf=_parse_gguf2,
    tables=_tables(_HF2, _GGUF2),
    defaults={**_DEFAULTS, **_TANH, "query_pre_attn_scalar": 256},
)
GEMMA3 = Family(
    name="gemma3",
    architectures=("gemma3_text", "gemma3", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_architectures=("gemma3",),
    parse_hf=_parse_hf3,
    parse_gguf=_parse_gguf3,
    tables=_tables(_HF2, _GGUF2),
    prefixes=("model.", "model.language_model.", "language_model.model."),
    # The multimodal configurations write only what differs from these.
    defaults={
        **_DEFAULTS,
        **_TANH,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
    },
    text_section="text_config",
)
