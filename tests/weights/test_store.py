import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec, random_params
from jaxinfer.config import AttentionConfig, GenerationDefaults, LayerKind, MlpConfig, ModelConfig, RopeConfig
from jaxinfer.weights import store
from jaxinfer.weights.errors import (
    CheckpointError,
    CorruptFileError,
    ExtraTensorsError,
    MisshapenTensorsError,
    MissingFilesError,
    MissingTensorsError,
    NonFiniteTensorsError,
    UnsupportedFormatError,
)
from jaxinfer.weights.settle import settle_formats
from jaxinfer.weights.source import find_kind, open_source
from tests.conftest import QUICK
from tests.families.sources import DictSource
from tests.weights.files import write_gguf, write_hf

CONFIG = ModelConfig(
    family="toy",
    vocab_size=16,
    d_model=8,
    max_len=32,
    layers=(LayerKind(), LayerKind(window=4, rope=None)),
    attention=AttentionConfig(2, 1, 4, 0.5),
    mlp=MlpConfig(16),
    ropes=(RopeConfig(1e4, 4, "llama3", 8.0, 64, extra=(("low_freq_factor", 1.0), ("list", (1.0, 2.5)))),),
)
GENERATION = GenerationDefaults(
    (3, 7), bos_id=1, sampling=(("temperature", 0.6), ("top_k", 20), ("do_sample", True))
)


def spec(*shape: int, role: Any = "matrix") -> ParamSpec:
    return ParamSpec(shape, (None,) * len(shape), role)


SPECS = {
    "embed": {"tokens": spec(16, 8, role="embedding")},
    "layers": tuple(
        {"attn": {"q": spec(8, 2, 4)}, "norm": {"scale": spec(8, role="norm")}} for _ in range(2)
    ),
}


def saved(path: Path, dtype: str = "bfloat16", specs: Any = SPECS) -> Any:
    params = random_params(specs, 0, Policy.parse(dtype).dtype_of("matrix"))
    store.save(
        path, params, CONFIG, GENERATION, DictSource("gguf", {"tokenizer.ggml.model": "gpt2", "toy.x": 1})
    )
    return params


def assert_same(got: Any, wanted: Any) -> None:
    def check(a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)

    jax.tree.map(check, got, wanted)


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    params = saved(tmp_path / "new" / "m")
    folder = tmp_path / "new" / "m"
    assert find_kind(folder) == "store"
    assert [p.name for p in folder.parent.iterdir()] == ["m"]
    meta = store.read_meta(folder)
    assert meta.config == CONFIG
    assert meta.generation == GENERATION
    assert meta.leaves["layers.1.attn.q"] == ((8, 2, 4), Format("bfloat16"))
    assert store.read_tokenizer_metadata(folder) == {"tokenizer.ggml.model": "gpt2"}
    restored = store.restore(folder, SPECS, policy=Policy.parse("bfloat16"))
    assert_same(restored, params)
    with pytest.raises(CheckpointError, match="is restored"):
        open_source(folder)


def test_restore_casts_to_the_policy(tmp_path: Path) -> None:
    params = saved(tmp_path / "m", "bfloat16")
    restored = store.restore(tmp_path / "m", SPECS, policy=Policy.parse("float32"))
    assert_same(restored, jax.tree.map(lambda leaf: leaf.astype(np.float32), params))


CODED = ("int8", "int8:g16:f16", "int4:g16", "int4:g16:zero:f32", "int4:channel")
CODED += ("fp8_e4m3:g8", "fp8_e5m2", "mxfp4", "nvfp4")
WIDE = {
    "embed": {"tokens": spec(16, 64, role="embedding")},
    "layers": (
        {
            "attn": {"o": ParamSpec((8, 2, 32), (None,) * 3, num_in=2)},
            "norm": {"scale": spec(8, role="norm")},
        },
    ),
}


def saved_coded(folder: Path, fmt: str) -> Any:
    plain = random_params(WIDE, 0, np.dtype(np.float32))
    o = WIDE["layers"][0]["attn"]["o"]
    coded = quantize(np.asarray(plain["layers"][0]["attn"]["o"]), o, Format.parse(fmt))
    plain["layers"][0]["attn"]["o"] = jax.tree.map(jax.numpy.asarray, coded)
    store.save(folder, plain, CONFIG, GENERATION, DictSource("gguf", {}), f"weights={fmt},embedding=f32")
    return plain


@pytest.mark.parametrize("fmt", CODED)
def test_weights_of_codes_come_back_bit_by_bit(tmp_path: Path, fmt: str) -> None:
    params = saved_coded(tmp_path / "m", fmt)
    meta = store.read_meta(tmp_path / "m")
    assert meta.leaves["layers.0.attn.o"] == ((8, 2, 32), Format.parse(fmt))
    assert meta.leaves["embed.tokens"] == ((16, 64), Format("float32"))
    for text in (str(meta.policy), "weights=checkpoint"):
        policy, notes = settle_formats(Policy.parse(text), WIDE, meta.look)
        assert notes == (f"weights kept as the checkpoint has them: 1 {fmt}",)
        restored = store.restore(tmp_path / "m", WIDE, policy=policy)
        assert jax.tree.structure(restored) == jax.tree.structure(params)
        assert_same(restored, params)


@pytest.mark.parametrize("fmt", ["int8", "int4:g16:zero:f16", "mxfp4"])
def test_another_policy_rounds_a_weight_of_codes_anew(tmp_path: Path, fmt: str) -> None:
    params = saved_coded(tmp_path / "m", fmt)
    meta, spec = store.read_meta(tmp_path / "m"), WIDE["layers"][0]["attn"]["o"]
    wide = np.asarray(dequantize(params["layers"][0]["attn"]["o"], np.dtype(np.float32)))
    for other in ("bfloat16", "int4:g32"):
        policy, notes = settle_formats(Policy.parse(f"weights={other},embedding=int8"), WIDE, meta.look)
        assert notes == (f"weights expanded and made anew: 1 {fmt} as {other}",)
        restored = store.restore(tmp_path / "m", WIDE, policy=policy)
        wanted = wide.astype(other) if other == "bfloat16" else quantize(wide, spec, Format.parse(other))
        assert_same(restored["layers"][0]["attn"]["o"], wanted)
        tokens = np.asarray(params["embed"]["tokens"])
        assert_same(restored["embed"]["tokens"], quantize(tokens, WIDE["embed"]["tokens"], Format("int8")))


def test_a_folder_of_an_older_version_is_to_be_converted_again(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    marker = tmp_path / "m" / "jaxinfer.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format_version": 1}))
    with pytest.raises(
        UnsupportedFormatError, match="version 1 is not 2, which this jaxinfer writes; convert its"
    ):
        store.restore(tmp_path / "m", SPECS, policy=Policy())


def test_numbers_too_large_for_the_policy_are_named(tmp_path: Path) -> None:
    params = random_params(SPECS, 0, Policy.parse("bfloat16").dtype_of("matrix"))
    params["layers"][1]["attn"]["q"] *= 1e9
    store.save(tmp_path / "m", params, CONFIG, GENERATION, DictSource("gguf", {}))
    store.restore(tmp_path / "m", SPECS, policy=Policy.parse("float32"))
    with pytest.raises(NonFiniteTensorsError, match=r"layers.1.attn.q: overflows float16") as error:
        store.restore(tmp_path / "m", SPECS, policy=Policy.parse("float16"))
    assert error.value.names == ("layers.1.attn.q",)


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    source_folder = write_hf(tmp_path / "hf", {"a": np.zeros(2, np.float32)})
    (source_folder / "tokenizer.json").write_text('{"v": 1}')
    (source_folder / "tokenizing.py").write_text("code")
    store.save(tmp_path / "m", {"a": np.zeros(2)}, CONFIG, GENERATION, open_source(source_folder))
    tokenizer = tmp_path / "m" / "tokenizer"
    assert {p.name: p.read_text() for p in tokenizer.iterdir()} == {"tokenizer.json": '{"v": 1}'}
    assert store.read_tokenizer_metadata(tmp_path / "m") is None


def test_gguf_tokenizer_metadata_are_kept_as_they_are(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["é", "▁x", "\u2028"],
        "tokenizer.ggml.scores": [-0.1, 2.5],
        "toy.y": 3,
    }
    source = open_source(write_gguf(tmp_path / "m.gguf", {"a": np.zeros(2, np.float32)}, metadata))
    store.save(tmp_path / "m", {"a": np.zeros(2)}, CONFIG, GENERATION, source)
    wanted = {key: source.config[key] for key in list(metadata)[:2]}
    assert store.read_tokenizer_metadata(tmp_path / "m") == wanted


def test_save_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(FileExistsError, match="remove this one first"):
        saved(tmp_path / "m")


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(store, "_write_tokenizer", full)
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_folder_is_said_to_be_so(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    half = tmp_path / "m.half-written-abc"
    (tmp_path / "m").rename(half)
    assert find_kind(half) == "store"
    with pytest.raises(CheckpointError, match="half written"):
        store.restore(half, SPECS, policy=Policy())
    half.rename(tmp_path / "m")
    (tmp_path / "m" / "jaxinfer.json").unlink()
    with pytest.raises(CheckpointError, match="half written"):
        store.read_meta(tmp_path / "m")


def test_damaged_folders_are_clear_errors(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    saved(folder)
    marker = folder / "jaxinfer.json"
    whole = marker.read_text()
    marker.write_text(whole[:-20])
    with pytest.raises(CorruptFileError, match="not JSON"):
        store.read_meta(folder)
    marker.write_text(json.dumps({**json.loads(whole), "format_version": 99}))
    with pytest.raises(UnsupportedFormatError, match="version 99"):
        store.read_meta(folder)
    marker.write_text(json.dumps({**json.loads(whole), "config": {"family": 3}}))
    with pytest.raises(CorruptFileError, match=r"ModelConfig\.family"):
        store.read_meta(folder)
    marker.write_text(whole)
    files = [file for file in (folder / "params").rglob("*") if file.parent.name == "d"]  # the numbers
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="bytes of") as cut:
        store.restore(folder, SPECS, policy=Policy())
    assert all(file.name in str(cut.value) for file in files)
    files[0].unlink()
    with pytest.raises(MissingFilesError, match=files[0].name):
        store.read_meta(folder)
    (folder / "params").rename(folder / "elsewhere")
    with pytest.raises(MissingFilesError, match="params"):
        store.read_meta(folder)


# After an error orbax leaves coroutines unawaited, which Python tells when it collects them.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_changed_bytes_that_orbax_refuses_are_our_error(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    for name in ("manifest.ocdbt", "_METADATA"):
        file = tmp_path / "m" / "params" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + b"x" * 9)
        with pytest.raises(CorruptFileError, match="params"):
            store.restore(tmp_path / "m", SPECS, policy=Policy())
        file.write_bytes(whole)
    gc.collect()


def test_leaves_that_differ_from_the_model_are_all_named(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    layer = SPECS["layers"][0]
    for specs, error, names in (
        (SPECS | {"layers": (layer,) * 3}, MissingTensorsError, ("layers.2.attn.q", "layers.2.norm.scale")),
        (SPECS | {"layers": (layer,)}, ExtraTensorsError, ("layers.1.attn.q", "layers.1.norm.scale")),
        (
            SPECS
            | {"embed": {"tokens": spec(17, 8)}, "layers": (layer, layer | {"attn": {"q": spec(8, 4, 2)}})},
            MisshapenTensorsError,
            ("embed.tokens", "layers.1.attn.q"),
        ),
    ):
        with pytest.raises(error) as fault:
            store.restore(tmp_path / "m", specs, policy=Policy())
        assert fault.value.names == names


SHARDED = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from pathlib import Path
from tests.weights.test_store import SPECS, WIDE, saved, saved_coded
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.specs import is_spec
from jaxinfer.weights import store
import sys

folder = Path(sys.argv[1])
params = saved(folder)
assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ("data", "tensor"))
shardings = {
    "embed": {"tokens": NamedSharding(mesh, P("tensor", None))},
    "layers": tuple(
        {"attn": {"q": NamedSharding(mesh, P("tensor", "data"))}, "norm": {"scale": NamedSharding(mesh, P())}}
        for _ in range(2)
    ),
}
restored = store.restore(folder, SPECS, policy=Policy.parse("bfloat16"), shardings=shardings)
for leaf, wanted, sharding in zip(*map(jax.tree.leaves, (restored, params, shardings)), strict=True):
    assert leaf.sharding == sharding, (leaf.sharding, sharding)
    np.testing.assert_array_equal(leaf, wanted)
assert restored["embed"]["tokens"].addressable_shards[0].data.shape == (4, 8)

coded = saved_coded(folder.with_name("coded"), "int4:g16")
across = NamedSharding(mesh, P("data", None, "tensor"))
shardings = jax.tree.map(lambda s: NamedSharding(mesh, P()) if len(s.shape) < 3 else across, WIDE, is_leaf=is_spec)
policy = Policy.parse("weights=int4:g16,embedding=f32")
o = store.restore(folder.with_name("coded"), WIDE, policy=policy, shardings=shardings)["layers"][0]["attn"]["o"]
jax.tree.map(np.testing.assert_array_equal, o, coded["layers"][0]["attn"]["o"])
assert o.values.addressable_shards[0].data.shape == (4, 2, 4)
assert o.scale.addressable_shards[0].data.shape == (4, 2, 2)  # 2 scales do not divide among 4
print("restored on 8 devices")
"""


def test_restore_goes_straight_into_shardings(tmp_path: Path) -> None:
    flags = f"{QUICK} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "m")],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "restored on 8 devices\n", done.stderr


def test_orbax_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, jaxinfer.weights.store, jaxinfer.weights.load; print('orbax' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
