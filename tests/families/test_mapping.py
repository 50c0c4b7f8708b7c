"""Tensor maps: complete for every family, and equal from Hugging Face and GGUF names."""

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxinfer.arrays.specs import flatten_specs
from jaxinfer.config import ModelConfig
from jaxinfer.model.decoder import param_specs
from jaxinfer.weights.families import find_family, read_config
from jaxinfer.weights.families.tables import unpermute
from jaxinfer.weights.source import TensorSource, open_source
from tests.families.cases import NAMES, load_case, make_checkpoint
from tests.families.sources import DictSource

Arrays = dict[str, np.ndarray]


def read_leaves(source: TensorSource) -> Arrays:
    """Every parameter of a checkpoint by its path, read by its recipe; every tensor must have a use."""
    cfg, _ = read_config(source)
    family = find_family(source)
    recipes = family.mapping(cfg, source.kind, source.tensors)
    specs = dict(flatten_specs(param_specs(cfg)))
    assert recipes.keys() == specs.keys()
    used = {name for recipe in recipes.values() for name in recipe.names}
    extra = [
        n
        for n in source.tensors
        if n not in used and not any(re.fullmatch(p, n) for p in family.ignorable(source.kind))
    ]
    assert not extra
    leaves = {
        path: np.asarray(recipe.transform(*map(source.read, recipe.names)))
        for path, recipe in recipes.items()
    }
    assert {path: leaf.shape for path, leaf in leaves.items()} == {
        path: spec.shape for path, spec in specs.items()
    }
    return leaves


def hf_source(name: str, arrays: Arrays | None = None) -> DictSource:
    case = load_case(name)
    return DictSource("hf", case.config, case.make_arrays() if arrays is None else arrays)


def assert_equal(got: Arrays, wanted: Arrays) -> None:
    assert got.keys() == wanted.keys()
    for path in got:
        np.testing.assert_array_equal(got[path], wanted[path], err_msg=path)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_every_family_finds_its_place(name):
    read_leaves(hf_source(name))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_a_folder_reads_as_the_arrays_do(name, tmp_path):
    assert_equal(read_leaves(open_source(make_checkpoint(name, tmp_path))), read_leaves(hf_source(name)))


def test_heads_are_rows_of_the_projection():
    arrays = load_case("llama_head_dim").make_arrays()
    leaves = read_leaves(hf_source("llama_head_dim"))
    attn = "model.layers.1.self_attn."
    np.testing.assert_array_equal(leaves["layers.1.attn.q"][3], arrays[f"{attn}q_proj.weight"][96:])
    np.testing.assert_array_equal(leaves["layers.1.attn.o"][:, 3], arrays[f"{attn}o_proj.weight"][:, 96:])
    np.testing.assert_array_equal(leaves["layers.1.attn.k_bias"][1], arrays[f"{attn}k_proj.bias"][32:])


def test_fused_tensors_are_cut_in_order():
    arrays = load_case("phi3").make_arrays()
    leaves = read_leaves(hf_source("phi3"))
    qkv, gate_up = (
        arrays["model.layers.0.self_attn.qkv_proj.weight"],
        arrays["model.layers.0.mlp.gate_up_proj.weight"],
    )
    np.testing.assert_array_equal(leaves["layers.0.attn.k"][0], qkv[64:80])
    np.testing.assert_array_equal(leaves["layers.0.attn.v"][1], qkv[112:128])
    np.testing.assert_array_equal(leaves["layers.0.mlp.gate"], gate_up[:96])
    np.testing.assert_array_equal(leaves["layers.0.mlp.up"], gate_up[96:])


def test_gemma_s_norms_have_the_one_added():
    arrays = load_case("gemma3").make_arrays()
    leaves = read_leaves(hf_source("gemma3"))
    for path, name in (
        ("layers.2.norms.post_attn.scale", "model.layers.2.post_attention_layernorm.weight"),
        ("layers.2.attn.q_norm", "model.layers.2.self_attn.q_norm.weight"),
        ("final_norm.scale", "model.norm.weight"),
    ):
        np.testing.assert_array_equal(leaves[path], arrays[name] + 1)


def test_experts_are_stacked():
    arrays = load_case("mixtral").make_arrays()
    leaves = read_leaves(hf_source("mixtral"))
    for leaf, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        wanted = arrays[f"model.layers.1.block_sparse_moe.experts.3.{name}.weight"]
        np.testing.assert_array_equal(leaves[f"layers.1.moe.{leaf}"][3], wanted)


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("gpt2", lambda n: n.removeprefix("transformer.")),
        ("gemma3", lambda n: n.replace("model.", "model.language_model.")),
        ("gemma3", lambda n: f"language_model.{n}"),
    ],
)
def test_other_prefixes_are_found(name, rename):
    arrays = load_case(name).make_arrays()
    assert_equal(
        read_leaves(hf_source(name, {rename(n): a for n, a in arrays.items()})), read_leaves(hf_source(name))
    )


def test_trap_23_harmless_extras_have_no_place_and_need_none():
    arrays = load_case("llama_tied").make_arrays()
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": arrays["model.embed_tokens.weight"].copy(),
    }
    assert_equal(read_leaves(hf_source("llama_tied", arrays | extras)), read_leaves(hf_source("llama_tied")))
    other = read_leaves(
        hf_source("llama_tied", arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"] + 1})
    )
    np.testing.assert_array_equal(other["head.w"], arrays["model.embed_tokens.weight"] + 1)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight", (16, 256)),  # the right number of numbers
        ("llama", "model.norm.weight", (8, 8)),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", (64, 128)),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", (256, 64)),
    ],
)
def test_a_tensor_of_another_shape_is_refused(name, tensor, shape):
    source = hf_source(name)
    cfg, _ = read_config(source)
    recipes = find_family(source).mapping(cfg, "hf", source.tensors)
    recipe = next(recipe for recipe in recipes.values() if recipe.names == (tensor,))
    with pytest.raises(ValueError, match=r"shape .* wanted"):
        recipe.transform(np.zeros(shape, np.float32))


# --- GGUF, written as llama.cpp's converter does -------------------------------------------------------------------


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's own reordering of q and k rows."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def for_llama(name: str, array: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        return permute(array, cfg.attention.num_heads)
    if name.endswith(("k_proj.weight", "k_proj.bias")):
        return permute(array, cfg.attention.num_kv_heads)
    return array


def as_it_is(name: str, array: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    return array


def for_gemma(name: str, array: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    return array + np.float32(1) if name.endswith("norm.weight") else array


def for_gpt2(name: str, array: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    return array.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else array


def merge_experts(arrays: Arrays) -> Arrays:
    """Experts of a layer as one tensor, under the name that `gguf` knows."""
    merged: dict[str, list[np.ndarray]] = {}
    for name in sorted(arrays, key=lambda n: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", n)]):
        merged.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(arrays[name])
    return {name: np.stack(parts) if len(parts) > 1 else parts[0] for name, parts in merged.items()}


def write_gguf(
    path: Path, name: str, architecture: str, change: Callable[..., np.ndarray], **extra: np.ndarray
) -> Path:
    """Writes a case's weights under GGUF's names with the metadata that the converter writes."""
    case = load_case(name)
    cfg, _ = read_config(hf_source(name))
    writer = gguf.GGUFWriter(path, architecture)
    a, m = cfg.attention, cfg.mlp
    writer.add_block_count(cfg.num_layers)
    writer.add_context_length(cfg.max_len)
    writer.add_embedding_length(cfg.d_model)
    writer.add_feed_forward_length(m.ffn_dim)
    writer.add_head_count(a.num_heads)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(cfg.norm.eps)
    else:
        writer.add_head_count_kv(a.num_kv_heads)
        writer.add_key_length(a.head_dim)
        writer.add_value_length(a.head_dim)
        writer.add_layer_norm_rms_eps(cfg.norm.eps)
        writer.add_rope_freq_base(cfg.ropes[0].theta)
        writer.add_rope_dimension_count(cfg.ropes[0].rotary_dim)
    if m.num_experts:
        writer.add_expert_count(m.num_experts)
        writer.add_expert_used_count(m.experts_per_token)
        writer.add_expert_feed_forward_length(m.expert_dim)
    if architecture != "llama" and (window := cfg.layers[0].window):
        writer.add_sliding_window(window)
    if a.softcap and cfg.final_softcap:
        writer.add_attn_logit_softcapping(a.softcap)
        writer.add_final_logit_softcapping(cfg.final_softcap)
    names = gguf.get_tensor_name_map(
        {gguf_name: key for key, gguf_name in gguf.MODEL_ARCH_NAMES.items()}[architecture], cfg.num_layers
    )
    for hf_name, array in merge_experts(case.make_arrays()).items():
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name, hf_name
        writer.add_tensor(gguf_name, np.ascontiguousarray(change(hf_name, array, cfg)))
    for extra_name, array in extra.items():
        writer.add_tensor(extra_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CONVERTED = [
    ("llama", "llama", for_llama),
    ("llama_head_dim", "llama", for_llama),
    ("smollm3", "smollm3", for_llama),
    ("mixtral", "llama", for_llama),
    ("qwen2", "qwen2", as_it_is),
    ("qwen3", "qwen3", as_it_is),
    ("qwen3_moe_raw", "qwen3moe", as_it_is),
    ("gemma", "gemma", for_gemma),
    ("gemma2", "gemma2", for_gemma),
    ("gemma3", "gemma3", for_gemma),
    ("phi3", "phi3", as_it_is),
    ("olmo2", "olmo2", as_it_is),
    ("gpt2", "gpt2", for_gpt2),
]


@pytest.mark.parametrize(
    ("name", "architecture", "change"), CONVERTED, ids=[name for name, _, _ in CONVERTED]
)
def test_trap_24_gguf_gives_the_same_tensors(name, architecture, change, tmp_path):
    source = open_source(write_gguf(tmp_path / "model.gguf", name, architecture, change))
    assert_equal(read_leaves(source), read_leaves(hf_source(name)))
    got, _ = read_config(source)
    wanted, _ = read_config(hf_source(name))
    assert got.attention.num_kv_heads == wanted.attention.num_kv_heads
    if name not in ("llama_head_dim", "smollm3", "qwen3_moe_raw", "gemma3"):  # differ in what GGUF cannot say
        assert got.layers == wanted.layers
        assert got.mlp == wanted.mlp


def test_trap_24_q_and_k_are_unpermuted_by_their_own_head_counts():
    rows = np.arange(32, dtype=np.float32)
    for heads in (2, 4):
        np.testing.assert_array_equal(unpermute(permute(rows, heads), heads), rows)
    assert unpermute(permute(rows, 4), 2).tolist() != rows.tolist()


def test_trap_24_rope_freqs_in_a_llama_file_are_applied(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "model.gguf", "llama", "llama", for_llama, **{"rope_freqs.weight": factors})
    source = open_source(path)
    assert_equal(read_leaves(source), read_leaves(hf_source("llama")))
    np.testing.assert_array_equal(read_config(source)[0].ropes[0].get("freq_factors"), factors)
