from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.sharding import parse_mesh, partition
from jaxinfer.arrays.specs import ParamSpec
from jaxinfer.model.layout import Layout
from jaxinfer.weights.buffers import all_finite, empty, pack
from jaxinfer.weights.errors import (
    ExtraTensorsError,
    MisshapenTensorsError,
    MissingTensorsError,
    NonFiniteTensorsError,
)
from jaxinfer.weights.families import find_family, read_config
from jaxinfer.weights.families.base import Recipe
from jaxinfer.weights.load import describe_leaf, load_params, put_leaf, read_share
from jaxinfer.weights.source import TensorSource, open_source
from tests.families.sources import DictSource
from tests.weights.files import write_gguf, write_hf

V, D, N, H = 12, 8, 3, 4
RNG = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)


def spec(*shape: int, role: Any = "matrix") -> ParamSpec:
    return ParamSpec(shape, (None,) * len(shape), role)


SPECS = {
    "embed": {"tokens": spec(V, D, role="embedding")},
    "layers": tuple(
        {"attn": {"q": spec(D, N, H)}, "norm": {"scale": spec(D, role="norm")}} for _ in range(2)
    ),
}


def split_heads(w: np.ndarray) -> np.ndarray:
    return w.T.reshape(w.shape[1], N, H)


def same(w: np.ndarray) -> np.ndarray:
    return w


RECIPES = {
    "embed.tokens": Recipe(("embed.weight",), same),
    **{f"layers.{i}.attn.q": Recipe((f"l{i}.q.weight",), split_heads) for i in range(2)},
    **{f"layers.{i}.norm.scale": Recipe((f"l{i}.norm.weight",), lambda w: w + 1) for i in range(2)},
}


def tensors() -> dict[str, np.ndarray]:
    shapes = {"embed.weight": (V, D)}
    for i in range(2):
        shapes |= {f"l{i}.q.weight": (N * H, D), f"l{i}.norm.weight": (D,)}
    return {name: RNG.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def load(arrays: dict[str, np.ndarray], policy: str = "float32", **options: Any) -> Any:
    return load_params(DictSource("hf", {}, arrays), SPECS, RECIPES, policy=Policy.parse(policy), **options)


@pytest.mark.parametrize("policy", ["float32", "bfloat16", "float16"])
def test_the_tree_has_the_specs_form_and_the_policys_formats(policy: str) -> None:
    arrays = tensors()
    params = load(arrays, policy)
    dtype = Policy.parse(policy).dtype_of("matrix")
    assert jax.tree.structure(params) == jax.tree.structure(SPECS, is_leaf=lambda s: isinstance(s, ParamSpec))
    np.testing.assert_array_equal(params["embed"]["tokens"], arrays["embed.weight"].astype(dtype))
    for i, layer in enumerate(params["layers"]):
        wanted = arrays[f"l{i}.q.weight"].astype(dtype).T.reshape(D, N, H)
        np.testing.assert_array_equal(layer["attn"]["q"], wanted)
        assert layer["attn"]["q"].dtype == dtype
        assert layer["norm"]["scale"].dtype == np.float32
        np.testing.assert_array_equal(layer["norm"]["scale"], arrays[f"l{i}.norm.weight"] + 1)


def test_missing_tensors_are_all_named() -> None:
    arrays = tensors()
    del arrays["l0.q.weight"], arrays["l1.norm.weight"]
    with pytest.raises(
        MissingTensorsError, match=r"l0.q.weight: for layers.0.attn.q\n  l1.norm.weight"
    ) as error:
        load(arrays)
    assert error.value.names == ("l0.q.weight", "l1.norm.weight")


def test_extra_tensors_are_all_named_but_for_the_ignorable() -> None:
    arrays = tensors() | {
        name: np.zeros(2, np.float32) for name in ("l0.adapter", "l2.q.weight", "l0.inv_freq")
    }
    with pytest.raises(ExtraTensorsError) as error:
        load(arrays, ignorable=(r"l\d\.inv_freq", "l0"))
    assert error.value.names == ("l0.adapter", "l2.q.weight")
    load(arrays, ignorable=(r"l\d\.inv_freq", r"l0\.adapter", r"l2\..*"))


def test_misshapen_tensors_are_all_named_before_any_is_read() -> None:
    arrays = tensors() | {
        "embed.weight": np.zeros((V + 1, D), np.float32),  # the wrong shape after the transform
        "l1.q.weight": np.zeros((N * H + 1, D), np.float32),  # a transform that cannot be done
    }

    class Unread(DictSource):
        def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
            raise AssertionError(f"{name} was read")

    with pytest.raises(MisshapenTensorsError) as error:
        load_params(Unread("hf", {}, arrays), SPECS, RECIPES, policy=Policy())
    assert error.value.names == ("embed.weight", "l1.q.weight")
    assert "got (13, 8), which gives (13, 8) for embed.tokens, expected (12, 8)" in str(error.value)
    assert "got (13, 8), which cannot be arranged" in str(error.value)


@pytest.mark.parametrize("policy", ["float32", "bfloat16", "float16"])
def test_non_finite_tensors_are_all_named(policy: str) -> None:
    arrays = tensors()
    arrays["embed.weight"][-1, -1] = np.nan
    arrays["l1.q.weight"][0, 0] = -np.inf
    arrays["l1.norm.weight"][3] = np.inf
    with pytest.raises(NonFiniteTensorsError, match="NaN or infinity") as error:
        load(arrays, policy)
    assert error.value.names == ("embed.weight", "l1.norm.weight", "l1.q.weight")


def test_numbers_too_large_for_the_format_are_named() -> None:
    arrays = tensors()
    arrays["l1.q.weight"][0, 0] = 1e5
    load(arrays, "bfloat16")
    with pytest.raises(NonFiniteTensorsError, match=r"l1.q.weight: overflows float16") as error:
        load(arrays, "float16")
    assert error.value.names == ("l1.q.weight",)


def test_bfloat16_that_float16_cannot_hold_is_named() -> None:
    arrays = {name: array.astype(BF16) for name, array in tensors().items()}
    arrays["l0.q.weight"][2, 1] = 7e4
    load(arrays, "bfloat16")
    with pytest.raises(NonFiniteTensorsError, match=r"l0.q.weight: overflows float16") as error:
        load(arrays, "float16")
    assert error.value.names == ("l0.q.weight",)


def test_recipes_must_cover_the_specs() -> None:
    some = {path: recipe for path, recipe in RECIPES.items() if path != "embed.tokens"}
    with pytest.raises(ValueError, match=r"embed\.tokens"):
        load_params(DictSource("hf", {}, tensors()), SPECS, some, policy=Policy())


def test_progress_counts_every_byte_once() -> None:
    arrays = tensors()
    seen: list[tuple[int, int]] = []
    load(arrays, progress=lambda done, total: seen.append((done, total)))
    total = sum(a.nbytes for a in arrays.values())
    assert len(seen) == len(RECIPES)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_finish_makes_the_leaf() -> None:
    arrays = tensors()
    params = load(arrays, "bfloat16", finish=lambda path, array: (path, array.dtype, array.shape))
    assert params["layers"][1]["attn"]["q"] == ("layers.1.attn.q", np.float32, (D, N, H))


def test_a_fault_of_a_recipe_is_not_hidden() -> None:
    def broken(w: np.ndarray) -> np.ndarray:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        load_params(
            DictSource("hf", {}, tensors()),
            SPECS,
            RECIPES | {"embed.tokens": Recipe(("embed.weight",), broken)},
            policy=Policy(),
        )


def test_shardings_one_for_all_or_a_tree() -> None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = jax.tree.map(lambda _: one, SPECS, is_leaf=lambda s: isinstance(s, ParamSpec))
    for shardings in (one, tree):
        params = load(tensors(), shardings=shardings)
        assert all(leaf.sharding == one for leaf in jax.tree.leaves(params))


def test_blocks_load_in_the_policys_format(tmp_path: Path) -> None:
    q8 = gguf.GGMLQuantizationType.Q8_0
    data = gguf.quantize(RNG.standard_normal((4, 64), dtype=np.float32), q8)
    source = open_source(write_gguf(tmp_path / "m.gguf", {"w": (data, q8)}))
    wanted = gguf.dequantize(data, q8)
    for transform, shape in ((same, (4, 64)), (np.transpose, (64, 4))):
        leaf = load_params(
            source, {"w": spec(*shape)}, {"w": Recipe(("w",), transform)}, policy=Policy.parse("bf16")
        )["w"]
        np.testing.assert_array_equal(leaf, transform(wanted).astype(BF16))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, ml_dtypes.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_all_finite_finds_one_bad_number(dtype: Any, value: float) -> None:
    array = np.full((700, 800), 240, dtype)
    assert all_finite(array)
    array[-1, -1] = value
    assert not all_finite(array)
    assert all_finite(array[:-1])


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda w: w,
    "transposed": lambda w: w.T,
    "transposed heads": lambda w: w.T.reshape(w.shape[1], 4, -1),
    "transposed back": lambda w: w.T.reshape(4, -1, w.shape[0]),
    "every other": lambda w: w[::2, ::-1],
    "swapped": lambda w: w.reshape(4, -1, 2, w.shape[1]).swapaxes(1, 2),
    "vector": lambda w: w[0],
    "scalar": lambda w: w[0, 0],
    "nothing": lambda w: w[:0].T,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
def test_pack_is_row_major_and_exact_for_any_strides(view: str, dtype: np.dtype) -> None:
    array = VIEWS[view](RNG.standard_normal((328, 300), dtype=np.float32))
    packed = pack(array, dtype)
    assert packed.flags.c_contiguous
    assert packed.dtype == dtype
    np.testing.assert_array_equal(packed, array.astype(dtype))


def test_pack_adopts_only_a_buffer_that_is_the_arrays_own() -> None:
    own = empty((64, 32), BF16)
    own[...] = 1
    assert np.shares_memory(pack(own.reshape(32, 64), BF16), own)
    assert not np.shares_memory(pack(own[:32], BF16), own)  # a slice would keep the rest alive
    mapped = np.frombuffer(bytes(4096), np.float32)
    assert not np.shares_memory(pack(mapped, mapped.dtype), mapped)  # the file may change or go


def toy_llama(folder: Path, **extra: np.ndarray) -> TensorSource:
    """Returns a tied Llama of 2 layers, 4 query and 2 kv heads, opened from a folder."""
    layers, hidden, ffn, vocab = 2, 64, 96, 40
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {p + f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        shapes |= {p + f"self_attn.{n}_proj.weight": (hidden // 2, hidden) for n in "kv"}
        shapes |= {p + f"mlp.{n}_proj.weight": (ffn, hidden) for n in ("gate", "up")}
        shapes |= {p + "mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {p + f"{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
    rng = np.random.default_rng(7)
    made = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    return open_source(write_hf(folder, made | extra, config))


def load_family(source: TensorSource, policy: str = "float32") -> Any:
    from jaxinfer.model.decoder import param_specs

    cfg, _ = read_config(source)
    family = find_family(source)
    return load_params(
        source,
        param_specs(cfg),
        family.mapping(cfg, source.kind, source.tensors),
        policy=Policy.parse(policy),
        ignorable=family.ignorable(source.kind),
    )


def test_trap_23_a_tied_model_may_hold_a_head(tmp_path: Path) -> None:
    plain = toy_llama(tmp_path / "a")
    wanted = load_family(plain)
    embed = plain.read("model.embed_tokens.weight")
    inv_freq = np.ones(8, np.float32)
    extras: dict[str, dict[str, np.ndarray]] = {
        "b": {"lm_head.weight": embed},
        "c": {"lm_head.weight": embed * 2},
        "d": {
            "model.layers.0.self_attn.rotary_emb.inv_freq": inv_freq,
            "model.rotary_emb.inv_freq": inv_freq,
        },
    }
    for name, extra in extras.items():
        got = load_family(toy_llama(tmp_path / name, **extra))
        if name == "c":  # a head of its own is the head, as transformers has it
            head, kept = got.pop("head")["w"], extra["lm_head.weight"]
            np.testing.assert_array_equal(head, kept if head.shape == kept.shape else kept.T)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.slow
def test_smollm2_loads_whole(smollm2_gguf: Path) -> None:
    source = open_source(smollm2_gguf)
    params = load_family(source, "bfloat16")
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    np.testing.assert_array_equal(params["embed"]["tokens"], source.read("token_embd.weight").astype(BF16))


# Heads dealt out over four devices, with one of zeros; ffn filled up to what divides.
PLACES = {("heads", 3): np.array([0, 1, 2, -1]), ("ffn", 6): np.array([0, 1, 2, 3, 4, 5, -1, -1])}
FILLED = Layout(None, None, None, PLACES)  # type: ignore[arg-type]
SHARED = {
    "heads": (ParamSpec((3, 4, 8), ("heads", None, "embed")), lambda w: w.reshape(3, 4, 8), (12, 8)),
    "inputs": (ParamSpec((8, 6), ("embed", "ffn")), same, (8, 6)),
    "both": (ParamSpec((3, 6), ("heads", "ffn")), same, (3, 6)),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_a_share_is_what_the_whole_has_there_and_needs_nothing_else(case: str, ways: int) -> None:
    leaf, transform, stored = SHARED[case]
    tensor = RNG.standard_normal(stored, dtype=np.float32)
    recipe = Recipe(("w",), transform)
    whole = FILLED.fill(leaf, transform(tensor))
    for share in range(ways):

        def cut(dim: int, name: str | None, share: int = share) -> slice:
            size = whole.shape[dim] // ways
            return slice(share * size, (share + 1) * size) if name in ("heads", "ffn") else slice(None)

        index = tuple(cut(dim, name) for dim, name in enumerate(leaf.axes))
        got = read_share(lambda name: tensor, recipe, leaf, index, FILLED)
        np.testing.assert_array_equal(got, whole[index])
        # What other shares have may be anything.
        others = np.isin(tensor, got, invert=True)
        spoiled = np.where(others, np.nan, tensor).astype(np.float32)
        np.testing.assert_array_equal(
            read_share(lambda name, spoiled=spoiled: spoiled, recipe, leaf, index, FILLED), got
        )


@pytest.mark.parametrize("text", ["bfloat16", "int8", "int4:g8"])
def test_a_leaf_of_other_processes_is_described_as_they_have_it(text: str) -> None:
    spec, fmt = ParamSpec((3, 16), ("heads", "embed")), Format.parse(text)
    mesh = parse_mesh("tensor=1", jax.devices())
    assert mesh is not None
    over = NamedSharding(mesh, partition(spec.axes))
    array = RNG.standard_normal(spec.shape, dtype=np.float32)
    leaf = array.astype(fmt.dtype) if fmt.is_plain else quantize(array, spec, fmt)
    here, elsewhere = put_leaf(leaf, spec, over, FILLED), describe_leaf(spec, fmt, over, FILLED)
    assert jax.tree.structure(here) == jax.tree.structure(elsewhere)
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(elsewhere), strict=True):
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)
    assert jax.tree.leaves(elsewhere)[0].shape[0] == FILLED.places["heads", 3].size


def test_a_share_of_experts_opens_their_tensors_only() -> None:
    names = tuple(f"e{i}" for i in range(4))
    tensors = {name: RNG.standard_normal((6, 8), dtype=np.float32) for name in names}
    leaf = ParamSpec((4, 6, 8), ("experts", "ffn", "embed"))
    recipe = Recipe(names, lambda *arrays: np.stack(arrays))
    opened: list[str] = []

    def open_tensor(name: str) -> np.ndarray:
        opened.append(name)
        return tensors[name]

    index = slice(2, 4), slice(4, 8), slice(None)
    got = read_share(open_tensor, recipe, leaf, index, FILLED)
    assert opened == ["e2", "e3"]
    np.testing.assert_array_equal(got, FILLED.fill(leaf, np.stack(list(tensors.values())))[index])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what of a file is mapped")
def test_the_rest_of_a_file_is_not_read(tmp_path: Path) -> None:
    tensor = RNG.standard_normal((1024, 4096), dtype=np.float32)
    write_hf(tmp_path, {"w": tensor}, {"model_type": "llama"})
    source = open_source(tmp_path)
    leaf, recipe = ParamSpec(tensor.shape, ("heads", "embed")), Recipe(("w",), same)
    index = slice(256, 512), slice(None)
    share = pack(read_share(source.read, recipe, leaf, index, None), np.dtype(np.float32))
    np.testing.assert_array_equal(share, tensor[index])
    # A kernel maps up to 2 MiB more at either end; the whole is 16 MiB, the share 4.
    assert mapped_kib(tmp_path) <= share.nbytes / 1024 + 2 * 2048


def mapped_kib(folder: Path) -> int:
    """Returns how much of the files of a folder lies in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if str(folder) in line]
    rss = [next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts]
    assert rss
    return sum(int(line.split()[1]) for line in rss)
