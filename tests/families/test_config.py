"""Configurations in every spelling, and the refusal of what is not understood."""

import json
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.weights.families import (
    FAMILIES,
    ConfigError,
    ConfigValueError,
    MissingConfigKeyError,
    UnknownConfigKeyError,
    find_family,
    read_config,
)
from tests.families.cases import NAMES, load_case
from tests.families.sources import DictSource


def read(config: dict[str, Any], **more: Any) -> ModelConfig:
    return read_config(DictSource("hf", config | more))[0]


def config_of(case: str, *without: str) -> dict[str, Any]:
    """A copy of a case's configuration, without some keys."""
    config = json.loads(json.dumps(load_case(case).config))
    return {key: value for key, value in config.items() if key not in without}


def rope_of(config: dict[str, Any], **more: Any) -> RopeConfig:
    return read(config, **more).ropes[0]


@pytest.mark.parametrize("name", [n for n in NAMES if load_case(n).old_config])
def test_trap_19_old_and_new_spelling_are_one_model(name):
    case = load_case(name)
    assert case.old_config
    assert "rope_parameters" in case.config
    assert "rope_parameters" not in case.old_config
    assert read(case.old_config) == read(case.config)


def test_trap_19_llama3_under_every_name():
    block = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    plain = config_of("llama", "rope_parameters")
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **block}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **block}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **block}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **block}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **block}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **block}},
    ]
    wanted = RopeConfig(
        5e5, 16, "llama3", 8.0, 32, extra=(("high_freq_factor", 4.0), ("low_freq_factor", 1.0))
    )
    assert [rope_of(plain, **spelling) for spelling in spellings] == [wanted] * len(spellings)


@pytest.mark.parametrize(
    ("case", "theta"), [("llama", 1e4), ("smollm3", 2e6), ("mixtral", 1e6), ("qwen3", 1e4), ("phi3", 1e4)]
)
def test_trap_19_absent_theta_is_the_family_s(case, theta):
    plain = config_of(case, "rope_parameters")
    assert rope_of(plain).theta == theta
    assert rope_of(plain, rope_theta=None, rope_scaling=None).theta == theta


def test_trap_19_unknown_rope_type_is_refused():
    plain = config_of("llama", "rope_parameters")
    with pytest.raises(
        ConfigValueError, match=r"rope_scaling: rope_type is 'mrope'; supported: default, dynamic"
    ):
        read(plain, rope_scaling={"rope_type": "mrope", "factor": 2.0})
    with pytest.raises(ConfigValueError, match="type is 'yarn'; supported: absent or the same as rope_type"):
        read(plain, rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2.0})


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"type": "linear"}, "factor is None"),
        ({"type": "linear", "factor": 0.5}, "factor is 0.5"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 32}, "unknown key.* beta_fast"),
        ({"type": "llama3", "factor": 2.0}, "low_freq_factor is absent"),
        ({"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}, "1 numbers"),
        ({"rope_theta": 1e4, "sections": [1, 2]}, "unknown key.* sections"),
        ("linear", "supported: a mapping or null"),
    ],
)
def test_broken_rope_blocks_are_refused_by_name(block, problem):
    with pytest.raises(ConfigError, match=problem):
        read(config_of("llama", "rope_parameters"), rope_scaling=block)


def test_two_rope_blocks_that_both_speak_are_refused():
    with pytest.raises(ConfigValueError, match="absent where rope_parameters is given"):
        read(config_of("llama"), rope_scaling={"type": "linear", "factor": 2.0})


def test_yarn_serves_the_stretched_length():
    cfg = read(config_of("qwen2_yarn"), max_position_embeddings=32)
    assert cfg.max_len == 128
    assert cfg.ropes[0].original_max_len == 32


def test_phi_s_old_names_of_longrope():
    old = load_case("phi3_longrope").old_config
    assert old
    for name in ("su", "yarn"):
        block = {**old["rope_scaling"], "type": name}
        assert rope_of(old, rope_scaling=block) == rope_of(old)
    assert rope_of(old).factor == 4.0
    assert rope_of(old).rotary_dim == 12


@pytest.mark.parametrize(("head_dim", "wanted"), [(32, 32), (None, 16), ("absent", 16)])
def test_trap_22_head_dim_is_read_and_only_then_derived(head_dim, wanted):
    config = config_of("llama", "head_dim")
    cfg = read(config, **({} if head_dim == "absent" else {"head_dim": head_dim}))
    assert cfg.attention.head_dim == wanted
    assert cfg.attention.scale == wanted**-0.5
    assert cfg.ropes[0].rotary_dim == wanted


def test_unknown_keys_are_all_named():
    with pytest.raises(UnknownConfigKeyError, match="aardvark, zebra") as caught:
        read(config_of("llama"), zebra=1, aardvark=None)
    assert caught.value.keys == ("aardvark", "zebra")


def test_a_key_of_another_family_is_unknown():
    with pytest.raises(UnknownConfigKeyError, match="attn_logit_softcapping"):
        read(config_of("llama"), attn_logit_softcapping=50.0)
    with pytest.raises(UnknownConfigKeyError, match="quantization_config"):
        read(config_of("llama"), quantization_config={"quant_method": "gptq"})


@pytest.mark.parametrize(
    ("case", "key", "value", "allowed"),
    [
        ("llama", "hidden_act", "quick_gelu", "gelu, gelu_fast"),
        ("llama", "rope_interleaved", True, "False"),
        ("llama", "num_key_value_heads", 3, "a divisor of num_attention_heads 4"),
        ("llama", "hidden_size", 66, "a multiple of num_attention_heads"),
        ("llama", "is_encoder_decoder", True, "False"),
        ("mistral", "attention_bias", True, "False"),
        ("mistral", "layer_types", ["full_attention"] * 2, "sliding_attention"),
        ("qwen2", "layer_types", ["sliding_attention"] * 2, "full_attention where sliding_window is off"),
        ("qwen2", "layer_types", ["chunked_attention"] * 2, "full_attention or sliding_attention"),
        ("qwen2", "layer_types", ["full_attention"], "one for each of 2 layers"),
        ("qwen3_moe", "use_sliding_window", True, "False"),
        ("gemma3", "use_bidirectional_attention", True, "False"),
        ("gemma3", "attn_logit_softcapping", 50.0, "null"),
        ("phi3", "mlp_bias", True, "False"),
        ("phi3", "partial_rotary_factor", 0.2, "an even part of head_dim 16"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, "False"),
        ("gpt2", "n_head", 5, "a multiple of n_head"),
        ("gpt2", "add_cross_attention", True, "False"),
    ],
)
def test_values_that_cannot_be_served_say_what_can(case, key, value, allowed):
    config = config_of(case, *(["head_dim"] if key == "hidden_size" else []))
    if key == "partial_rotary_factor":
        del config["rope_parameters"]
    with pytest.raises(ConfigValueError) as caught:
        read(config, **{key: value})
    assert allowed in str(caught.value)


def test_a_needed_key_has_no_default():
    with pytest.raises(MissingConfigKeyError, match="num_hidden_layers is absent"):
        read(config_of("llama", "num_hidden_layers"))


def test_families_are_found_by_type_or_class():
    assert find_family(DictSource("hf", {"architectures": ["Qwen2ForCausalLM"]})).name == "qwen2"
    assert find_family(DictSource("hf", {"model_type": "gemma3_text"})).name == "gemma3"
    assert find_family(DictSource("gguf", {"general.architecture": "qwen3moe"})).name == "qwen3_moe"
    assert find_family(DictSource("gguf", {"general.architecture": "llama"})).name == "llama"
    mixed = {"general.architecture": "llama", "llama.expert_count": 8}
    assert find_family(DictSource("gguf", mixed)).name == "mixtral"
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("kind", "config", "problem"),
    [
        ("hf", {"model_type": "bert"}, "model_type 'bert' is of no known family; known: llama, smollm3"),
        (
            "hf",
            {"model_type": "llama", "architectures": ["LlamaForTokenClassification"]},
            "LlamaForTokenClass",
        ),
        ("gguf", {"general.architecture": "bert"}, "'bert' is of no known family; known: gemma"),
    ],
)
def test_other_models_are_refused(kind, config, problem):
    with pytest.raises(ConfigError, match=problem):
        find_family(DictSource(kind, config))


def test_windows_and_positions_by_layer():
    def windows(name: str, **more: Any) -> list[int | None]:
        return [kind.window for kind in read(config_of(name), **more).layers]

    assert windows("llama") == [None, None]
    assert windows("mistral") == [8, 8]
    assert windows("mistral", sliding_window=None) == [None, None]
    assert windows("qwen2_window") == [None, 8, 8]
    assert windows("gemma2") == [8, None, 8, None]
    assert windows("gemma3") == [8, 8, 8, 8, 8, None, 8]
    assert [kind.rope for kind in read(config_of("gemma3")).layers] == [1, 1, 1, 1, 1, 0, 1]
    assert [kind.rope for kind in read(config_of("smollm3")).layers] == [0, None, 0, None]
    assert [kind.moe for kind in read(config_of("qwen3_moe")).layers] == [True, False, True]
    without = config_of("gemma3", "layer_types", "_sliding_window_pattern")
    assert [k.window for k in read(without, sliding_window_pattern=3).layers] == [8, 8, None, 8, 8, None, 8]
    upper = config_of("qwen2_window", "layer_types")
    assert [kind.window for kind in read(upper, max_window_layers=2).layers] == [None, None, 8]


def test_gemma_3_has_two_bases():
    plain = config_of("gemma3", "rope_parameters")
    assert [rope.theta for rope in read(plain).ropes] == [1e6, 1e4]
    ropes = read(
        plain, rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ).ropes
    assert [(rope.theta, rope.kind, rope.factor) for rope in ropes] == [
        (5e5, "linear", 8.0),
        (2e4, "default", 1.0),
    ]
    with pytest.raises(UnknownConfigKeyError, match="rope_theta"):
        read(plain, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def test_gemma_s_activation_and_caps():
    assert read(config_of("gemma"), hidden_act="gelu").mlp.activation == "gelu_tanh"
    assert read(config_of("gemma"), hidden_act="gelu", hidden_activation="silu").mlp.activation == "silu"
    assert read(config_of("gemma2")).attention.softcap == 5.0
    assert read(config_of("gemma2"), attn_logit_softcapping=None).attention.softcap is None
    assert read(config_of("gemma2", "final_logit_softcapping")).final_softcap == 30.0
    assert read(config_of("gemma2")).attention.scale == 24**-0.5
    assert read(config_of("gemma2")).embed_scale == 8.0


def test_tied_heads_have_the_family_s_default():
    assert not read(config_of("llama", "tie_word_embeddings")).tied
    assert read(config_of("llama"), tie_word_embeddings=True).tied
    for name in ("gemma", "gemma2", "gemma3", "gpt2", "smollm3"):
        assert read(config_of(name, "tie_word_embeddings")).tied


def test_multimodal_gemma_3_writes_only_what_differs():
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
        "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
    }
    cfg, defaults = read_config(DictSource("hf", whole))
    assert (cfg.vocab_size, cfg.attention.num_heads, cfg.attention.head_dim, cfg.max_len) == (
        262_208,
        8,
        256,
        131_072,
    )
    assert cfg.layers[0].window == 1024
    assert defaults.eos_ids == (1, 106)
    with pytest.raises(UnknownConfigKeyError, match="surprise"):
        read_config(DictSource("hf", {**whole, "surprise": 1}))
    with pytest.raises(UnknownConfigKeyError, match="surprise"):
        read_config(DictSource("hf", {**whole, "text_config": {**text, "surprise": 1}}))


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({"eos_token_id": [3, 7]}, (3, 7)),
        ({"eos_token_id": 7}, (7,)),
        ({}, (3,)),
        ({"eos_token_id": None}, (3,)),
    ],
)
def test_trap_05_end_tokens_come_from_generation_config_first(generation, wanted):
    config = {**config_of("llama"), "eos_token_id": 3}
    assert read_config(DictSource("hf", config, generation=generation))[1].eos_ids == wanted


def test_trap_05_config_may_hold_a_list_too():
    config = {**config_of("llama"), "eos_token_id": [3, 7, 3]}
    assert read_config(DictSource("hf", config))[1].eos_ids == (3, 7)


def test_sampling_defaults_are_vllm_s(caplog):
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "max_new_tokens": 64,
        "typical_p": 0.9,
        "no_repeat_ngram_size": 0,
    }
    with caplog.at_level(logging.WARNING):
        defaults = read_config(DictSource("hf", config_of("llama"), generation=generation))[1]
    assert dict(defaults.sampling) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "max_tokens": 64,
    }
    assert "typical_p not applied" in caplog.text
    assert "no_repeat_ngram_size" not in caplog.text


def test_trap_23_a_head_beside_a_tied_embedding():
    config = config_of("llama_tied")
    embedding = np.random.RandomState(0).standard_normal((128, 64)).astype(np.float32)
    alone = {"model.embed_tokens.weight": embedding}
    equal, other = alone | {"lm_head.weight": embedding.copy()}, alone | {"lm_head.weight": embedding + 1}
    tied = [read_config(DictSource("hf", config, arrays))[0].tied for arrays in (alone, equal, other)]
    assert tied == [True, True, False]


def test_every_known_real_configuration_key_is_understood():
    """Keys that published configurations of the families hold beside the reference's own."""
    llama = read(config_of("llama"))
    smollm2 = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {},
        "pretraining_tp": 1,
    }
    assert read(config_of("llama"), **smollm2, torch_dtype="bfloat16", _name_or_path="x") == llama
    phi4_mini = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
    phi = config_of("phi3")
    assert read(phi, **phi4_mini, attention_bias=False, auto_map={}, embd_pdrop=0.0) == read(phi)
    gemma2 = config_of("gemma2")
    assert read(gemma2, sliding_window_size=8, cache_implementation="hybrid") == read(gemma2)
    gpt2 = config_of("gpt2")
    assert read(gpt2, n_ctx=64, task_specific_params={}) == read(gpt2)
    assert replace(read(config_of("qwen3_moe"), max_window_layers=48)) == read(config_of("qwen3_moe"))
