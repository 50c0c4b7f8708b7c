"""GGUF metadata, and what families supply that the files do not hold."""

from typing import Any

import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.weights.families import ConfigValueError, UnknownConfigKeyError, read_config
from tests.families.sources import DictSource

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
    "tokenizer.ggml.bos_token_id": 1,
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "llama.vocab_size": 100,
}


def read_gguf(
    arrays: dict[str, np.ndarray] | None = None, architecture: str = "llama", **more: Any
) -> ModelConfig:
    config = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF.items()}
    more = {f"{architecture}.{key.replace('__', '.')}": value for key, value in more.items()}
    config |= {"general.architecture": architecture, **more}
    return read_config(DictSource("gguf", config, arrays or {}))[0]


def test_gguf_metadata_and_end_tokens():
    cfg, defaults = read_config(
        DictSource("gguf", GGUF, {"token_embd.weight": np.zeros((128, 64), np.float32)})
    )
    assert (cfg.vocab_size, cfg.d_model, cfg.num_layers, cfg.tied) == (128, 64, 2, True)
    assert cfg.ropes == (RopeConfig(5e5, 16),)
    assert defaults.eos_ids == (2, 5)
    assert not read_gguf({"output.weight": np.zeros((128, 64), np.float32)}).tied
    assert read_gguf({"blk.0.attn_q.bias": np.zeros(64, np.float32)}).attention.qkv_bias


def test_trap_22_gguf_head_dim_is_key_length():
    cfg = read_gguf(attention__key_length=32, attention__value_length=32, rope__dimension_count=32)
    assert (cfg.attention.head_dim, cfg.ropes[0].rotary_dim) == (32, 32)
    assert read_gguf().attention.head_dim == 16
    with pytest.raises(ConfigValueError, match=r"llama\.attention\.value_length is 16; supported: 32"):
        read_gguf(attention__key_length=32, attention__value_length=16)


def test_gguf_unknown_keys_are_named_and_other_namespaces_are_not_ours():
    with pytest.raises(UnknownConfigKeyError, match=r"llama\.expert_shared_count, llama\.logit_scale"):
        read_gguf(logit_scale=0.5, expert_shared_count=1)
    others = {**GGUF, "quantize.imatrix.file": "x", "somebody.tool": 1}
    assert read_config(DictSource("gguf", others)) == read_config(DictSource("gguf", GGUF))


def test_gguf_rope_scaling():
    assert read_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).ropes[0] == RopeConfig(
        5e5, 16, "linear", 4.0
    )
    yarn = read_gguf(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=16
    ).ropes[0]
    assert (yarn.kind, yarn.factor, yarn.original_max_len) == ("yarn", 4.0, 16)
    more = read_gguf(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__attn_factor=0.5
    ).ropes[0]
    assert more.attention_factor == pytest.approx(0.5 * 1.1386, abs=1e-4)
    with pytest.raises(ConfigValueError, match="supported: linear, none, yarn"):
        read_gguf(rope__scaling__type="longrope")  # without its factors
    factors = {
        f"rope_factors_{size}.weight": np.full(8, n, np.float32)
        for size, n in (("long", 4.0), ("short", 1.0))
    }
    rope = read_gguf(
        factors, "phi3", rope__scaling__original_context_length=16, rope__scaling__attn_factor=1.25
    ).ropes[0]
    assert (rope.kind, rope.original_max_len, rope.attention_factor) == ("longrope", 16, 1.25)
    assert rope.get("long_factor") == (4.0,) * 8


def test_trap_24_rope_freqs_become_factors():
    rope = read_gguf({"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}).ropes[0]
    assert rope.get("freq_factors") == tuple(float(n) for n in range(1, 9))


def test_gguf_gemma_3_gets_what_its_files_lack():
    cfg = read_gguf(architecture="gemma3", block_count=7, attention__sliding_window=8)
    assert [kind.window for kind in cfg.layers] == [8, 8, 8, 8, 8, None, 8]
    assert [rope.theta for rope in cfg.ropes] == [5e5, 1e4]
    assert (cfg.tied, cfg.embed_scale, cfg.attention.qk_norm) == (True, 8.0, "head")
    short = read_gguf(architecture="gemma3", attention__sliding_window=8, attention__sliding_window_pattern=2)
    assert [kind.window for kind in short.layers] == [8, None]


def test_gguf_gemma_2_and_the_scale_of_27b():
    cfg = read_gguf(architecture="gemma2", attention__key_length=32)
    assert (cfg.attention.softcap, cfg.final_softcap, cfg.attention.scale) == (50.0, 30.0, 32**-0.5)
    assert [kind.window for kind in cfg.layers] == [4096, None]
    assert (
        read_gguf(architecture="gemma2", block_count=46, attention__key_length=32).attention.scale == 16**-0.5
    )


def test_gguf_mixtures():
    mixtral = read_gguf(expert_count=4, expert_used_count=2)
    assert (mixtral.family, mixtral.mlp.num_experts, mixtral.mlp.expert_dim) == ("mixtral", 4, 96)
    qwen = read_gguf(
        architecture="qwen3moe", expert_count=4, expert_used_count=2, expert_feed_forward_length=32
    )
    assert (qwen.family, qwen.mlp.expert_dim, qwen.mlp.normalize_router) == ("qwen3_moe", 32, True)


def test_gguf_lists_of_equal_numbers_and_of_others():
    assert read_gguf(feed_forward_length=[96, 96]) == read_gguf()
    with pytest.raises(ConfigValueError, match="the same number in every layer"):
        read_gguf(attention__head_count_kv=[2, 4])
