"""Whole models of codes: every parameter is what its checkpoint says, in as few bits, and is multiplied as such."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize
from jaxinfer.arrays.quantized import Quantized, is_quantized
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec, path_name
from jaxinfer.model.decoder import Static, param_specs, stack_layers, stack_sizes, stacked_shapes
from jaxinfer.steps.steps import full_logits
from jaxinfer.weights.errors import NonFiniteTensorsError
from jaxinfer.weights.families import find_family, read_config
from jaxinfer.weights.families.base import Recipe
from jaxinfer.weights.load import fit_sharding, load_params
from jaxinfer.weights.place import find_fault, hold, place
from jaxinfer.weights.settle import settle
from jaxinfer.weights.source import TensorSource, open_source
from tests.families.cases import load_case, write_checkpoint
from tests.weights import packers
from tests.weights.files import write_gguf

Arrays = dict[str, np.ndarray]
KEEP = "weights=checkpoint"
GROUP = 16  # divides every family's weights
LINEAR = re.compile(
    r"(.*)\.(.*_proj|w[123])\.weight"
)  # what other programs quantise: neither tables nor routers


def load(source: TensorSource, policy: str) -> tuple[Any, Policy, tuple[str, ...]]:
    """Returns a model's parameters, the policy that was settled for it and what was said."""
    cfg, _ = read_config(source)
    family = find_family(source)
    specs, recipes = param_specs(cfg), family.mapping(cfg, source.kind, source.tensors)
    settled, notes = settle(Policy.parse(policy), source, specs, recipes)
    ignorable = family.ignorable(source.kind)
    return load_params(source, specs, recipes, policy=settled, ignorable=ignorable), settled, notes


def leaves_of(params: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    return {path_name(path): leaf for path, leaf in found}


def in_full(leaf: Any) -> np.ndarray:
    return np.asarray(dequantize(leaf, jnp.dtype(jnp.float32)) if is_quantized(leaf) else leaf)


def logits_of(source: TensorSource, params: Any, policy: Policy, size: int = 1) -> np.ndarray:
    cfg, _ = read_config(source)
    sizes = stack_sizes(cfg, size, policy)
    stacks = stack_layers(dict(params), sizes)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), stacks)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), stacked_shapes(cfg, policy, sizes))
    tokens = np.arange(1, 25, dtype=np.int32).reshape(2, 12) % cfg.vocab_size
    return np.asarray(
        jax.jit(full_logits, static_argnums=1)(
            stacks, Static(cfg, policy), tokens, np.array([12, 9], np.int32)
        )
    )[:, :9]


def assert_near(got: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    assert np.abs(wanted).max() > 0.1
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()


# Takes a weight [out, in] and gives the tensors of its module, and the weight that another reader finds there.
Writer = Callable[[np.random.Generator, np.ndarray], tuple[Arrays, np.ndarray]]


def rounded(
    w: np.ndarray, bits: int, group: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns unsigned ``q [out, in]``, ``zeros`` and float16 ``scales [out, G]`` near a weight."""
    grouped = w.reshape(len(w), -1, group)
    most, levels = np.abs(grouped).max(-1), 2**bits - 1
    scales = (2 * most / levels).astype(np.float16)
    zeros = (
        np.full(scales.shape, 2 ** (bits - 1))
        if symmetric
        else np.rint(-grouped.min(-1) / scales).astype(int)
    )
    zeros = zeros.clip(0, levels)
    q = np.rint(grouped / scales[..., None]) + zeros[..., None]
    return q.clip(0, levels).astype(int).reshape(w.shape), zeros, scales


def as_gptq(rng: np.random.Generator, w: np.ndarray, ordered: bool = True) -> tuple[Arrays, np.ndarray]:
    g_idx = np.arange(w.shape[1]) // GROUP
    tensors = packers.write_gptq(
        *rounded(w, 4, GROUP, False), g_idx if ordered else rng.permutation(g_idx), 4
    )
    return tensors, packers.read_gptq(tensors, 4)


def as_awq(rng: np.random.Generator, w: np.ndarray) -> tuple[Arrays, np.ndarray]:
    tensors = packers.write_awq(*rounded(w, 4, GROUP, False))
    return tensors, packers.read_awq(tensors)


def as_int4(rng: np.random.Generator, w: np.ndarray) -> tuple[Arrays, np.ndarray]:
    q, _, scales = rounded(w, 4, GROUP, True)
    tensors = packers.write_compressed(q - 8, scales.astype(ml_dtypes.bfloat16), 4)
    return tensors, packers.read_compressed(tensors, 4)


def as_int8(rng: np.random.Generator, w: np.ndarray) -> tuple[Arrays, np.ndarray]:
    q, _, scales = rounded(w, 8, w.shape[1], True)
    tensors = {"weight": (q - 128).astype(np.int8), "weight_scale": scales.astype(np.float32)}
    return tensors, tensors["weight"].astype(np.float32) * tensors["weight_scale"]


def as_fp8(rng: np.random.Generator, w: np.ndarray) -> tuple[Arrays, np.ndarray]:
    block = 48  # does not divide the weights, and is no power of two
    shape = [-(-n // block) for n in w.shape]
    scale = rng.uniform(1e-3, 1.5e-3, shape).astype(np.float32)
    wide = scale.repeat(block, 0)[: w.shape[0]].repeat(block, 1)[:, : w.shape[1]]
    weight = (w / wide).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": scale}, packers.read_fp8_blocks(
        weight, scale, (block, block)
    )


def as_mxfp4(rng: np.random.Generator, w: np.ndarray) -> tuple[Arrays, np.ndarray]:
    scales = rng.integers(121, 124, (w.shape[0], w.shape[1] // 32)).astype(np.uint8)
    blocks = rng.integers(0, 256, (*scales.shape, 16)).astype(np.uint8)
    return {"weight_blocks": blocks, "weight_scales": scales}, packers.read_mxfp4(blocks, scales)


def compressed(form: str, bits: int) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


METHODS: Mapping[str, tuple[Writer, dict[str, Any], str]] = {
    "gptq": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}, "int4:g16:zero:f32"),
    "awq": (
        as_awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        "int4:g16:zero:f32",
    ),
    "int4": (as_int4, compressed("pack-quantized", 4), "int4:g16"),
    "int8": (as_int8, compressed("int-quantized", 8), "int8"),
    "fp8": (as_fp8, {"quant_method": "fp8", "weight_block_size": [48, 48]}, "fp8_e4m3:g16:f32"),
    "mxfp4": (as_mxfp4, {"quant_method": "mxfp4"}, "mxfp4"),
}


def write_both(
    folder: Path, family: str, writer: Writer, quantization: dict[str, Any]
) -> tuple[TensorSource, TensorSource]:
    """Writes a family's checkpoint quantised, and in full with the weights that another reader finds in it."""
    case, rng = load_case(family), np.random.default_rng(0)
    coded, full = {}, {}
    for name, array in case.make_arrays().items():
        if LINEAR.fullmatch(name):
            tensors, read = writer(rng, array)
            full[name] = np.ascontiguousarray(read)
            module = name.removesuffix(".weight")
            coded |= {f"{module}.{leaf}": np.ascontiguousarray(part) for leaf, part in tensors.items()}
        else:
            coded[name] = full[name] = array
    config = case.config | {"quantization_config": quantization}
    sources = (
        write_checkpoint(folder / "coded", coded, config),
        write_checkpoint(folder / "full", full, case.config),
    )
    return open_source(sources[0]), open_source(sources[1])


FAMILIES = ("llama", "llama_head_dim", "phi3", "mixtral", "qwen3_moe", "gemma3")
# Groups of 32 reach across heads of 16, and do not divide experts of 48.
CASES = [(f, m) for f in FAMILIES for m in METHODS if m != "mxfp4" or f in ("llama_head_dim", "gemma3")]


@pytest.mark.parametrize(("family", "method"), CASES)
def test_every_parameter_is_what_the_checkpoint_says(tmp_path: Path, family: str, method: str) -> None:
    """Number by number, through heads, cuts of joined matrices and experts; in the checkpoint's own format."""
    writer, quantization, named = METHODS[method]
    source, full = write_both(tmp_path, family, writer, quantization)
    got, settled, notes = load(source, KEEP)
    wanted, _, silence = load(full, "float32")
    coded = 0
    for path, leaf in leaves_of(wanted).items():
        mine = leaves_of(got)[path]
        np.testing.assert_array_equal(in_full(mine), leaf, err_msg=path)
        if is_quantized(mine):
            coded += 1
            assert mine.format.kind == Format.parse(named).kind
            assert mine.shape == leaf.shape
            assert mine.values.nbytes == leaf.size * mine.format.bits // 8
            assert all(part.ndim == leaf.ndim for part in jax.tree.leaves(mine))
    assert coded >= 7 * 2
    assert notes[-1].startswith("weights kept as the checkpoint has them: ")
    assert named in notes[-1]
    assert not silence
    assert not settled.keep
    assert Policy.parse(str(settled)) == settled


def test_kept_codes_give_the_logits_of_the_expanded_weights(tmp_path: Path) -> None:
    writer, quantization, _ = METHODS["gptq"]
    source, full = write_both(tmp_path, "llama", writer, quantization)
    wanted = logits_of(full, *load(full, "float32")[:2])
    assert_near(logits_of(source, *load(source, KEEP)[:2]), wanted, 1e-5)
    # Through a scan too, and with weights rounded to 8 bits anew.
    assert_near(logits_of(source, *load(source, KEEP)[:2], size=2), wanted, 1e-5)
    params, settled, notes = load(source, "weights=int8:g32,compute=float32")
    assert notes == ("weights expanded and made anew: 12 GPTQ as int8:g32, 2 GPTQ as int8:g16",)
    assert_near(logits_of(source, params, settled), wanted, 0.1)


def test_a_weight_that_no_format_holds_is_made_anew_and_said(tmp_path: Path) -> None:
    quantization = METHODS["gptq"][1] | {"desc_act": True}
    source, full = write_both(tmp_path, "llama", lambda rng, w: as_gptq(rng, w, ordered=False), quantization)
    got, _, notes = load(source, KEEP)
    assert notes == ("weights expanded and made anew: 12 GPTQ as int8:g32, 2 GPTQ as int8:g16",)
    wanted, _, _ = load(full, "float32")
    for path, leaf in leaves_of(wanted).items():
        mine = leaves_of(got)[path]
        most = np.abs(leaf).max()
        np.testing.assert_allclose(
            in_full(mine), leaf, atol=most / 200 if is_quantized(mine) else 0, err_msg=path
        )


GGUF_NAMES = {name: f"attn_{name}" for name in "qkv"} | {"o": "attn_output"}
GGUF_NAMES |= {name: f"ffn_{name}" for name in ("gate", "up", "down")}


def permute(w: np.ndarray, num_heads: int) -> np.ndarray:
    """Source: llama.cpp, convert_hf_to_gguf.py, ``LlamaModel.permute``."""
    return w.reshape(num_heads, 2, w.shape[0] // num_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def draw_q6_k(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns blocks of a format that the package reads and does not write: any numbers under one small ``d``."""
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 210)).astype(np.uint8)
    blocks[..., 208:] = np.array([2e-5], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_llama_gguf(
    path: Path, name_of: Callable[[str], str], hidden: int = 64, experts: int = 0
) -> TensorSource:
    """Writes a Llama of 2 layers as llama.cpp does; ``name_of`` says the block format of a tensor."""
    rng = np.random.default_rng(3)
    heads, kv_heads, ffn, vocab = 4, 2, 2 * hidden, 96
    kv = hidden * kv_heads // heads
    shapes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    shapes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    tensors: dict[str, Any] = {"token_embd.weight": rng.standard_normal((vocab, hidden), np.float32)}
    for i in range(2):
        for name, shape in shapes.items():
            mixed = experts and name in ("gate", "up", "down")
            w = rng.standard_normal((experts, *shape) if mixed else shape, np.float32) / np.sqrt(
                np.float32(shape[1])
            )
            w = permute(w, heads if name == "q" else kv_heads) if name in "qk" else w
            tensors[f"blk.{i}.{GGUF_NAMES[name]}{'_exps' if mixed else ''}.weight"] = w
    for name, array in tensors.items():
        block_format = gguf.GGMLQuantizationType[name_of(name)]
        draw = (
            draw_q6_k(rng, array.shape) if block_format.name == "Q6_K" else gguf.quantize(array, block_format)
        )
        tensors[name] = (draw, block_format)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm", "blk.1.attn_norm", "blk.1.ffn_norm"):
        tensors[f"{name}.weight"] = 1 + rng.standard_normal(hidden, np.float32) / 10
    if experts:
        tensors |= {
            f"blk.{i}.ffn_gate_inp.weight": np.eye(experts, hidden, dtype=np.float32) for i in range(2)
        }
    metadata = {
        "llama.block_count": 2, "llama.context_length": 64,
        "llama.embedding_length": hidden, "llama.feed_forward_length": ffn, "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": vocab,
    }  # fmt: skip
    if experts:
        metadata |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
    return open_source(write_gguf(path, tensors, metadata, architecture="llama"))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_kept_give_the_logits_of_the_expanded_ones(tmp_path: Path, name: str) -> None:
    source = write_llama_gguf(tmp_path / "m.gguf", lambda tensor: name)
    kept, settled, notes = load(source, f"{KEEP},compute=float32")
    full, plain, _ = load(source, "float32")
    for path, leaf in leaves_of(full).items():
        mine = leaves_of(kept)[path]
        np.testing.assert_array_equal(in_full(mine), leaf, err_msg=path)
        assert is_quantized(mine) == (leaf.ndim > 1)
    # Heads of 16 lie under half a block of 32 each: their scales stand twice.
    fmt = {"Q8_0": "int8:g{}:f16", "Q4_0": "int4:g{}:f16", "Q4_1": "int4:g{}:zero:f16"}[name]
    assert notes == (f"weights kept as the checkpoint has them: 13 {fmt.format(32)}, 2 {fmt.format(16)}",)
    assert settled.weights == Format.parse(fmt.format(32))
    bytes_of = {path: leaf.nbytes for path, leaf in leaves_of(kept).items()}
    assert bytes_of["layers.0.mlp.up"] == source.tensors["blk.0.ffn_up.weight"].num_bytes
    wanted = logits_of(source, full, plain)
    assert_near(logits_of(source, kept, settled), wanted, 1e-5)
    again, same, _ = load(source, f"weights={settled.weights},embedding={settled.weights},compute=float32")
    assert same == settled
    jax.tree.map(np.testing.assert_array_equal, again, kept)


def test_experts_that_lie_in_one_tensor_are_kept(tmp_path: Path) -> None:
    source = write_llama_gguf(tmp_path / "m.gguf", lambda tensor: "Q4_1", experts=4)
    kept, settled, _ = load(source, f"{KEEP},compute=float32")
    full, plain, _ = load(source, "float32")
    for path, leaf in leaves_of(full).items():
        np.testing.assert_array_equal(in_full(leaves_of(kept)[path]), leaf, err_msg=path)
    assert kept["layers"][1]["moe"]["down"].values.shape == (4, 64, 64)
    assert_near(logits_of(source, kept, settled), logits_of(source, full, plain), 1e-5)


def test_a_policy_of_another_format_rounds_the_expanded_weight(tmp_path: Path) -> None:
    source = write_llama_gguf(tmp_path / "m.gguf", lambda tensor: "Q4_1")
    got, settled, notes = load(source, "weights=int4:g32,compute=bfloat16")
    assert notes == (
        "weights expanded and made anew: 12 Q4_1 as int4:g32, 2 Q4_1 as int4:g16, 1 Q4_1 as int8",
    )
    full, _, _ = load(source, "float32")
    spec = param_specs(read_config(source)[0])["layers"][1]["attn"]["k"]
    wanted = quantize(np.asarray(full["layers"][1]["attn"]["k"]), spec, Format("int4", 32))
    jax.tree.map(np.testing.assert_array_equal, got["layers"][1]["attn"]["k"], wanted)
    assert settled.format_of("layers.0.attn.o", ParamSpec((64, 4, 16), (None,) * 3, num_in=2)) == Format(
        "int4", 16
    )


def test_blocks_of_many_kinds_each_become_what_holds_them(tmp_path: Path) -> None:
    """As in files called Q4_K_M: what no format holds has 8 bits, and every layer its own mixture."""
    kinds = {"blk.1.attn_v": "Q8_0", "blk.0.attn_v": "F32", "blk.0.ffn_down": "Q6_K"}
    source = write_llama_gguf(
        tmp_path / "m.gguf", lambda name: kinds.get(name.removesuffix(".weight"), "Q4_1"), 256
    )
    kept, settled, notes = load(source, f"{KEEP},compute=bf16")
    assert notes == (
        "weights kept as the checkpoint has them: 12 int4:g32:zero:f16, 1 int8:g32:f16",
        "weights expanded and made anew: 1 Q6_K as int8:g32",
    )
    formats = {path: str(leaf.format) for path, leaf in leaves_of(kept).items() if is_quantized(leaf)}
    assert formats["layers.1.attn.v"] == "int8:g32:f16"
    assert formats["layers.0.mlp.down"] == "int8:g32"
    assert kept["layers"][0]["attn"]["v"].dtype == ml_dtypes.bfloat16
    exceptions = {
        "layers.0.attn.v": "bfloat16",
        "layers.0.mlp.down": "int8:g32",
        "layers.1.attn.v": "int8:g32:f16",
    }
    assert {path: str(fmt) for path, fmt in settled.exceptions} == exceptions
    full, plain, _ = load(source, "float32")
    params, settled, _ = load(source, f"{KEEP},compute=float32")
    assert_near(logits_of(source, params, settled), logits_of(source, full, plain), 5e-3)


def test_exceptions_of_the_user_come_before_what_the_checkpoint_has(tmp_path: Path) -> None:
    source = write_llama_gguf(tmp_path / "m.gguf", lambda tensor: "Q8_0")
    kept, settled, _ = load(source, f"{KEEP},compute=bf16,layers.0.mlp=f32,embedding=int4:g32")
    assert kept["layers"][0]["mlp"]["up"].dtype == np.float32
    assert kept["layers"][1]["mlp"]["up"].format == Format.parse("int8:g32:f16")
    assert kept["embed"]["tokens"].format == settled.embedding == Format("int4", 32)


def one(source: TensorSource, recipe: Recipe, spec: ParamSpec, policy: str = KEEP) -> Any:
    settled, _ = settle(Policy.parse(policy), source, {"w": spec}, {"w": recipe})
    return load_params(source, {"w": spec}, {"w": recipe}, policy=settled)["w"]


def blocks(path: Path, shape: tuple[int, int] = (64, 64), **changed: float) -> TensorSource:
    w = np.random.default_rng(0).standard_normal(shape, np.float32)
    data = gguf.quantize(w, gguf.GGMLQuantizationType.Q8_0)
    for at, value in changed.items():
        data[int(at[1:]), :2] = np.array([value], np.float16).view(np.uint8)
    return open_source(write_gguf(path, {"w": (data, gguf.GGMLQuantizationType.Q8_0)}))


def test_what_does_not_leave_rows_whole_is_expanded_and_made_anew(tmp_path: Path) -> None:
    source, spec = blocks(tmp_path / "m.gguf"), ParamSpec((64, 64), (None, None))
    turned = Recipe(("w",), np.transpose, np.transpose)
    halved = Recipe(("w",), lambda w: w / 2, lambda w: w / 2)
    for recipe in (turned, halved, Recipe(("w",), lambda w: w)):
        assert hold(source, recipe, spec) is None
        wanted = recipe.transform(source.read("w"))
        leaf = one(source, recipe, spec)
        assert leaf.format == Format("int8", 32)
        np.testing.assert_allclose(in_full(leaf), wanted, atol=np.abs(wanted).max() / 100)
    whole = Recipe(("w",), lambda w: w, lambda w: w)
    assert one(source, whole, spec).format == Format.parse("int8:g32:f16")


def test_parts_of_several_formats_make_no_weight_of_codes() -> None:
    parts = [
        Quantized(np.zeros((4, 32), np.int8), np.ones((4, 1), dtype), format=Format("int8", 32, scale=name))
        for name, dtype in (("float16", np.float16), ("float32", np.float32))
    ]
    recipe = Recipe(("a", "b"), np.stack, lambda *rows: np.stack(rows))
    assert place(parts, recipe, ParamSpec((2, 4, 32), (None,) * 3)) is None
    assert place(parts[:1] * 2, recipe, ParamSpec((2, 4, 32), (None,) * 3)) is not None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    source, whole = blocks(tmp_path / "m.gguf", r5=value), Recipe(("w",), lambda w: w, lambda w: w)
    with pytest.raises(NonFiniteTensorsError, match="w: its scales hold NaN or infinity"):
        one(source, whole, ParamSpec((64, 64), (None, None)))


@pytest.mark.parametrize(
    ("fmt", "part", "value", "says"),
    [
        ("fp8_e4m3", "values", np.nan, "NaN or infinity"),
        ("fp8_e5m2", "values", np.inf, "NaN or infinity"),
        ("fp8_e4m3", "scale", np.inf, "its scales hold"),
        ("int4:g32:zero", "offset", np.nan, "its offsets hold"),
        ("nvfp4", "outer", np.nan, "its outers hold"),
        ("mxfp4", "scale", 255, "its scales hold"),
    ],
)
def test_what_is_not_finite_is_found_in_every_component(fmt: str, part: str, value: float, says: str) -> None:
    w = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    coded = quantize(w, ParamSpec((4, 64), (None, None)), Format.parse(fmt))
    assert find_fault(coded) == ""
    getattr(coded, part)[1, 0] = value
    assert says in find_fault(coded)


def test_components_take_the_sharding_of_their_weight_where_it_divides_them() -> None:
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("data", "expert", "tensor"))
    spec = jax.sharding.PartitionSpec("data", None, ("expert", "tensor"))
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def spec_for(*shape: int) -> Any:
        fitted = fit_sharding(sharding, shape)
        assert isinstance(fitted, jax.sharding.NamedSharding)
        return fitted.spec

    assert spec_for(4, 3, 16) == spec
    assert spec_for(4, 3, 1) == jax.sharding.PartitionSpec("data", None, None)
    assert spec_for(1, 3, 4) == jax.sharding.PartitionSpec(None, None, ("expert", "tensor"))


@pytest.mark.slow
def test_smollm2_kept_in_4_bits_gives_the_logits_of_its_expanded_weights(smollm2_gguf: Path) -> None:
    source = open_source(smollm2_gguf)
    kept, settled, _ = load(source, f"{KEEP},compute=float32")
    full, plain, _ = load(source, "float32")
    up = kept["layers"][0]["mlp"]["up"]
    assert settled.weights == up.format == Format.parse("int4:g32:zero:f16")
    assert up.nbytes == source.tensors["blk.0.ffn_up.weight"].num_bytes == up.size * 20 // 32
    assert_near(logits_of(source, kept, settled), logits_of(source, full, plain), 1e-3)
