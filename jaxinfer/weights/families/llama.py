"""Llama 1 to 3, SmolLM2 and all that call themselves ``llama``; SmolLM3, whose every fourth layer has no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.weights.families.base import Family, Table
from jaxinfer.weights.families.llama_like import read_gguf, read_hf, read_windows, with_windows
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.tables import GGUF_PERMUTED, HF_LLAMA
from jaxinfer.weights.source import SourceKind, TensorSource


def _parse_hf(keys: ConfigReader) -> ModelConfig:
    keys.require("rope_interleaved", False)
    return read_hf(keys, "llama")


def _parse_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    keys.require("expert_count", 0)
    keys.require("expert_used_count", 0)
    return read_gguf(keys, source, "llama")


def _parse_smollm3(keys: ConfigReader) -> ModelConfig:
    cfg = read_hf(keys, "smollm3", theta=2_000_000.0)
    L, every = cfg.num_layers, keys.need("no_rope_layer_interval")
    turns = [bool(t) for t in keys.get("no_rope_layers", [(i + 1) % every for i in range(L)])]
    if len(turns) < L:
        raise keys.refuse("no_rope_layers", f"{len(turns)} entries", f"1 or 0 for each of {L} layers")
    on, window = keys.get("use_sliding_window", False), keys.get("sliding_window")
    window = window if on else None
    keys.get("max_window_layers")  # written by its makers, read by no implementation
    slides = [window is not None and not turn for turn in turns[:L]]
    cfg = with_windows(cfg, read_windows(keys, window, slides))
    return _without_positions(cfg, turns)


def _parse_smollm3_gguf(keys: ConfigReader, source: TensorSource) -> ModelConfig:
    cfg = read_gguf(keys, source, "smollm3")
    # The file does not say which layers; llama.cpp too takes every fourth.
    return _without_positions(cfg, [bool((i + 1) % 4) for i in range(cfg.num_layers)])


def _without_positions(cfg: ModelConfig, turns: list[bool]) -> ModelConfig:
    def choose(kind: LayerKind, turn: bool) -> LayerKind:
        return replace(kind, rope=0 if turn else None)

    return replace(cfg, layers=tuple(map(choose, cfg.layers, turns)))


_DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_TABLES: Mapping[SourceKind, Table] = {"hf": HF_LLAMA, "gguf": GGUF_PERMUTED}

LLAMA = Family(
    name="llama",
    architectures=("llama", "LlamaForCausalLM", "LLaMAForCausalLM"),
    gguf_architectures=("llama",),
    parse_hf=_parse_hf,
    parse_gguf=_parse_gguf,
    tables=_TABLES,
    defaults=_DEFAULTS,
)
SMOLLM3 = Family(
    name="smollm3",
    architectures=("smollm3", "SmolLM3ForCausalLM"),
    gguf_architectures=("smollm3",),
    parse_hf=_parse_smollm3,
    parse_gguf=_parse_smollm3_gguf,
    tables=_TABLES,
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 32_768,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
)
