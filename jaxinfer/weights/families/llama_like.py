"""Configurations that say what Llama's say: what all families but GPT-2 read the same way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxinfer.config import (
    Activation,
    AttentionConfig,
    LayerKind,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    RopeKind,
)
from jaxinfer.weights.families.reader import ConfigReader
from jaxinfer.weights.families.ropes import read_gguf_rope, read_hf_rope
from jaxinfer.weights.source import TensorSource

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_hf(
    keys: ConfigReader,
    family: str,
    *,
    theta: float = 10_000.0,
    ropes: Sequence[RopeConfig] | None = None,
    old_rope_kinds: Mapping[str, RopeKind] | None = None,
    activation_key: str = "hidden_act",
) -> ModelConfig:
    """Returns the model of a Hugging Face configuration with Llama's keys: every layer sees everything.

    Args:
      keys: the configuration; the caller may read on before it finishes the reader.
      family: its name.
      theta: rotary base where the configuration has none.
      ropes: rotary embeddings, where the family reads them itself.
      old_rope_kinds: names that the family once used for a kind of stretching.
      activation_key: where the activation stands.

    Raises:
      ConfigError: a needed key is absent, or a value cannot be served.
    """
    heads, D = keys.need("num_attention_heads"), keys.need("hidden_size")
    H = read_head_dim(keys)
    kv_heads = keys.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    if ropes is None:
        ropes = (read_hf_rope(keys, H, theta, old_kinds=old_rope_kinds),)
    bias = bool(keys.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=keys.need("vocab_size"),
        d_model=D,
        max_len=_stretched(keys.need("max_position_embeddings"), ropes[0]),
        layers=(LayerKind(),) * keys.need("num_hidden_layers"),
        attention=AttentionConfig(heads, kv_heads, H, scale=H**-0.5, qkv_bias=bias, out_bias=bias),
        mlp=MlpConfig(
            keys.need("intermediate_size"),
            activation=keys.choose(activation_key, ACTIVATIONS),
            bias=bool(keys.get("mlp_bias", False)),
        ),
        norm=NormConfig(eps=keys.need("rms_norm_eps")),
        ropes=tuple(ropes),
        tied=bool(keys.get("tie_word_embeddings", False)),
    )


def read_head_dim(keys: ConfigReader) -> int:
    """Returns H as the configuration has it; only where it has none (or null) is it the width over the heads."""
    heads, D = keys.need("num_attention_heads"), keys.need("hidden_size")
    H = keys.get("head_dim")
    if H is None and D % heads:
        raise keys.refuse(
            "hidden_size", D, f"a multiple of num_attention_heads {heads}, or a head_dim beside it"
        )
    return D // heads if H is None else H


def _stretched(max_len: int, rope: RopeConfig) -> int:
    """Returns the served length; YaRN configurations often keep the trained one as max_position_embeddings."""
    stretched = (
        int(rope.factor * rope.original_max_len) if rope.kind == "yarn" and rope.original_max_len else 0
    )
    return max(max_len, stretched)


def with_windows(cfg: ModelConfig, windows: Sequence[int | None]) -> ModelConfig:
    """Returns the model with each layer's window set."""
    layers = tuple(replace(kind, window=w) for kind, w in zip(cfg.layers, windows, strict=True))
    return replace(cfg, layers=layers)


def read_windows(keys: ConfigReader, window: int | None, sliding: Sequence[bool]) -> list[int | None]:
    """Returns each layer's window from ``layer_types``, or from the family's own rule where that is absent.

    Args:
      keys: the configuration.
      window: of the layers that slide; None where the model has none.
      sliding: the family's rule, a bool a layer.

    Raises:
      ConfigError: the list is of another length, has an unknown type, or slides without a window.
    """
    types = keys.get("layer_types")
    if types is not None:
        kinds = {"full_attention": False, "sliding_attention": True}
        unknown = sorted(set(types) - set(kinds))
        if unknown or len(types) != len(sliding):
            got = ", ".join(unknown) or f"{len(types)} entries"
            raise keys.refuse(
                "layer_types", got, f"{' or '.join(kinds)}, one for each of {len(sliding)} layers"
            )
        sliding = [kinds[t] for t in types]
    if any(sliding) and window is None:
        raise keys.refuse("layer_types", "sliding_attention", "full_attention where sliding_window is off")
    return [window if slides else None for slides in sliding]


def read_gguf(
    keys: ConfigReader, source: TensorSource, family: str, activation: Activation = "silu"
) -> ModelConfig:
    """Returns the model of a GGUF file with Llama's keys: every layer sees everything.

    Args:
      keys: metadata below the architecture's prefix; the caller may read on before it finishes the reader.
      source: the file; its tensors say which biases there are and whether the head is tied.
      family: its name.
      activation: the metadata does not name it.

    Raises:
      ConfigError: a needed key is absent, or a value cannot be served.
    """
    heads, D = _same(keys, "attention.head_count"), keys.need("embedding_length")
    kv_heads = _same(keys, "attention.head_count_kv", heads)
    H = keys.get("attention.key_length", D // heads)
    keys.require("attention.value_length", H)
    keys.require("attention.causal", True)
    max_len = keys.need("context_length")
    rope = read_gguf_rope(keys, source, H, max_len)
    V = source.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in source.tensors else None
    return ModelConfig(
        family=family,
        vocab_size=V or keys.need("vocab_size"),
        d_model=D,
        max_len=max_len,
        layers=(LayerKind(),) * keys.need("block_count"),
        attention=AttentionConfig(
            heads,
            kv_heads,
            H,
            scale=keys.get("attention.scale", 1 / math.sqrt(H)),
            qkv_bias="blk.0.attn_q.bias" in source.tensors,
            out_bias="blk.0.attn_output.bias" in source.tensors,
        ),
        mlp=MlpConfig(
            _same(keys, "feed_forward_length"),
            activation=activation,
            bias="blk.0.ffn_up.bias" in source.tensors,
        ),
        norm=NormConfig(eps=keys.need("attention.layer_norm_rms_epsilon")),
        ropes=(rope,),
        tied="output.weight" not in source.tensors,
    )


def _same(keys: ConfigReader, key: str, default: int | None = None) -> int:
    """Returns a number that may also stand as a list with one entry a layer, all equal."""
    value = keys.need(key) if default is None else keys.get(key, default)
    if not isinstance(value, list | tuple):
        return value
    if len(set(value)) != 1:
        raise keys.refuse(key, value, "the same number in every layer")
    return value[0]
