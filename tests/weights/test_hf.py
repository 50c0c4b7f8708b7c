import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.weights.errors import (
    CheckpointError,
    CorruptFileError,
    DoubledTensorsError,
    ExtraTensorsError,
    MissingFilesError,
    MissingTensorsError,
    UnsupportedFormatError,
    UnsupportedTensorsError,
)
from jaxinfer.weights.hf import HFSource
from jaxinfer.weights.source import TensorInfo, find_kind, open_source
from tests.weights.files import write_hf, write_shards

RNG = np.random.default_rng(0)
A, B, C = (RNG.standard_normal((3, n), dtype=np.float32) for n in (4, 5, 6))


def header_file(folder: Path, header: object, data: bytes = b"") -> Path:
    """Writes a folder whose safetensors file has this very header."""
    write_hf(folder, {"a": A})
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.bool_],
    ids=str,
)
def test_tensors_come_as_they_are_stored(tmp_path: Path, dtype: type) -> None:
    wanted = {"a": A.astype(dtype), "empty": np.zeros((0, 7), dtype), "scalar": np.ones((), dtype)}
    source = open_source(write_hf(tmp_path / "m", wanted, {"model_type": "toy", "n": 3}))
    assert source.kind == "hf"
    assert source.config == {"model_type": "toy", "n": 3}
    assert source.generation == {}
    assert source.tensors.keys() == wanted.keys()
    for name, array in wanted.items():
        got = source.read(name)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, array)
    assert source.tensors["a"].shape == (3, 4)


def test_tensors_are_mapped_not_copied(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", {"a": A})
    source = open_source(folder)
    first = source.read("a")
    assert not first.flags.owndata
    assert not first.flags.writeable
    assert np.shares_memory(first, source.read("a"))
    file = folder / "model.safetensors"
    changed = file.read_bytes()[:-4] + np.float32(42).tobytes()
    with file.open("r+b") as handle:
        handle.write(changed)
    assert first[-1, -1] == 42  # seen through the mapping


def test_generation_config_is_read(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", {"a": A})
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert open_source(folder).generation == {"eos_token_id": [3, 7]}


def test_index_joins_files(tmp_path: Path) -> None:
    shards = {"x.safetensors": {"a": A}, "y.safetensors": {"b": B, "c": C}}
    folder = write_shards(
        tmp_path / "m", shards, {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"}
    )
    (folder / "consolidated.safetensors").write_bytes(b"not opened: the index does not name it")
    for path in (folder, folder / "model.safetensors.index.json"):
        source = open_source(path)
        np.testing.assert_array_equal(source.read("b"), B)
        assert source.tensors == {
            "a": TensorInfo((3, 4), "F32", 48),
            "b": TensorInfo((3, 5), "F32", 60),
            "c": TensorInfo((3, 6), "F32", 72),
        }


def test_shards_without_an_index_are_joined(tmp_path: Path) -> None:
    folder = write_shards(
        tmp_path / "m", {"x.safetensors": {"a": A}, "y.safetensors": {"b": B}}, {"a": "x.safetensors"}
    )
    (folder / "model.safetensors.index.json").unlink()
    assert open_source(folder).tensors.keys() == {"a", "b"}


def test_index_faults_name_every_file_and_tensor(tmp_path: Path) -> None:
    x, y, z = "x.safetensors", "y.safetensors", "z.safetensors"
    shards = {x: {"a": A}, y: {"b": B, "c": C}}

    with pytest.raises(MissingFilesError) as absent:
        open_source(write_shards(tmp_path / "1", shards, {"a": x, "b": z, "c": "w.safetensors"}))
    assert absent.value.names == ("w.safetensors", z)

    with pytest.raises(MissingTensorsError) as missing:
        open_source(write_shards(tmp_path / "2", shards, {"a": y, "b": y, "c": y, "d": x}))
    assert missing.value.names == ("a", "d")
    assert "the index says in x.safetensors" in str(missing.value)

    with pytest.raises(ExtraTensorsError) as extra:
        open_source(write_shards(tmp_path / "3", shards, {"a": x, "b": y}))
    assert extra.value.names == ("c",)

    doubled_shards = {x: {"a": A, "b": B, "c": C}, y: {"b": B, "c": C}}
    with pytest.raises(DoubledTensorsError, match=r"in x.safetensors, y.safetensors") as doubled:
        open_source(write_shards(tmp_path / "4", doubled_shards, {"a": x, "b": y, "c": y}))
    assert doubled.value.names == ("b", "c")


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 7, None]
)
def test_index_may_only_name_files_beside_it(tmp_path: Path, file: object) -> None:
    folder = write_shards(tmp_path / "m", {"x.safetensors": {"a": A}}, {"a": "x.safetensors"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CorruptFileError, match="weight_map"):
        open_source(folder)


def test_a_name_twice_in_one_header(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    header = f'{{"a":{entry % (0, 4)},"b":{entry % (4, 8)},"a":{entry % (8, 12)}}}'.encode()
    with pytest.raises(DoubledTensorsError) as doubled:
        open_source(header_file(tmp_path / "m", header, bytes(12)))
    assert doubled.value.names == ("a",)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an object"),
        ({"a": 3}, "'a' lacks"),
        ({"a": entry(dtype=5)}, "'a' lacks"),
        ({"a": entry(shape=[-2])}, "'a' lacks"),
        ({"a": entry(shape=[True, 2])}, "'a' lacks"),
        ({"a": entry(offsets=[0])}, "'a' lacks"),
        ({"a": entry(offsets=[0, 1e9])}, "'a' lacks"),
        ({"a": entry(shape=[1] * 70)}, "'a' lacks"),
        ({"a": entry(shape=[0, 2**62, 2**62], offsets=[0, 0]), "b": entry()}, "a shape cannot be"),
        ({"a": entry(offsets=[0, 16]), "b": entry(offsets=[0, 99])}, "2 tensor.s. end beyond .* a, b"),
        ({"a": entry(shape=[3])}, "needs 12"),
        ({"a": entry(offsets=[8, 0])}, "needs 8"),
        ({"a": entry("U8", [4], [4, 8])}, "begins at byte 4"),
        ({"a": entry("U8", [8], [0, 8]), "b": entry("U8", [4], [4, 8])}, "begins at byte 4"),
        ({"a": entry("U8", [4], [0, 4])}, "4 bytes lie after"),
    ],
)
def test_unsound_headers_say_what_is_wrong(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        open_source(header_file(tmp_path / "m", header, bytes(8)))


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", {"a": A})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CorruptFileError, match="header claims"):
        open_source(folder)


def test_unknown_number_format_is_refused_by_name(tmp_path: Path) -> None:
    header = {"a": entry("F4", [16]), "b": entry("F32", [2], [8, 16]), "c": entry("F6_E2M3", [1], [16, 17])}
    with pytest.raises(UnsupportedTensorsError, match="F4") as error:
        open_source(header_file(tmp_path / "m", header, bytes(17)))
    assert error.value.names == ("a", "c")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_or_changed_file_is_our_error(tmp_path: Path, data: st.DataObject) -> None:
    folder = write_hf(tmp_path / "m", {"a": A, "b": B.astype(np.float16)})
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CorruptFileError):
        open_source(folder)
    at = data.draw(st.integers(0, len(whole) - A.nbytes - B.nbytes // 2 - 1))  # in the header
    changed = bytearray(whole)
    changed[at] = data.draw(st.integers(0, 255))
    file.write_bytes(changed)
    try:
        source = open_source(folder)
    except CheckpointError:
        return
    for name in source.tensors:
        source.read(name)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
def test_config_that_is_not_an_object(tmp_path: Path, text: str) -> None:
    folder = write_hf(tmp_path / "m", {"a": A})
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptFileError, match=r"config\.json"):
        open_source(folder)


def test_absent_config_is_named(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", {"a": A})
    (folder / "config.json").unlink()
    with pytest.raises(MissingFilesError, match=r"config\.json"):
        open_source(folder)


def test_pickle_is_never_read(tmp_path: Path) -> None:
    bomb = b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "ran").encode()
    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / name).write_bytes(bomb)
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "model.pt"):
        with pytest.raises(UnsupportedFormatError, match=r"model.pt.*convert it to safetensors"):
            open_source(path)
    assert not (tmp_path / "ran").exists()


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "modeling_toy.ToyConfig", "AutoModelForCausalLM": "modeling_toy.Toy"}
    folder = write_hf(tmp_path / "m", {"a": A}, {"model_type": "toy", "auto_map": auto_map})
    for name in ("modeling_toy.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    np.testing.assert_array_equal(open_source(folder).read("a"), A)
    assert not (tmp_path / "ran").exists()


def test_safetensors_win_over_pickle_beside_them(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", {"a": A})
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert find_kind(folder) == "hf"


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_source(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_source(tmp_path)


def test_a_single_file_is_opened_with_the_config_beside_it(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m", {"a": A})
    safetensors.numpy.save_file({"b": B}, folder / "other.safetensors")
    assert HFSource.open(folder / "other.safetensors").tensors.keys() == {"b"}
    assert open_source(folder).tensors.keys() == {"a"}  # model.safetensors comes first
