import struct
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.arrays.formats import Format as NumberFormat
from jaxinfer.weights.errors import (
    CheckpointError,
    CorruptFileError,
    DoubledTensorsError,
    MissingFilesError,
    UnsupportedFormatError,
    UnsupportedTensorsError,
)
from jaxinfer.weights.gguf import BLOCK_FORMATS, CHUNK_NUMBERS, GGUFSource, read_metadata
from jaxinfer.weights.packed.expand import expand
from jaxinfer.weights.source import TensorInfo, find_kind, open_source
from tests.weights.files import write_gguf

RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal((3, n), dtype=np.float32) for n in (32, 64))
METADATA: dict[str, Any] = {
    "toy.block_count": 2,
    "toy.rope.freq_base": 10000.0,
    "toy.flag": True,
    "toy.name": "naïve 漢字",
    "toy.tokens": ["a", "é", "", "▁x", "<0x0A>"],
    "toy.scores": [0.5, -1.0],
    "toy.types": [1, 2, -3],
}


def build(*parts: tuple[str, Any]) -> bytes:
    """Packs little-endian values; ``s`` is a string of the format."""
    out = b""
    for kind, value in parts:
        out += struct.pack("<Q", len(value)) + value if kind == "s" else struct.pack(f"<{kind}", value)
    return out


def head(version: int = 3, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + build(("I", version), ("Q", tensors), ("Q", values))


def tensor_entry(name: bytes, shape: tuple[int, ...], number: int, offset: int = 0) -> bytes:
    dims: list[tuple[str, Any]] = [("Q", n) for n in reversed(shape)]
    return build(("s", name), ("I", len(shape)), *dims, ("I", number), ("Q", offset))


def opened(tmp_path: Path, content: bytes) -> GGUFSource:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return GGUFSource.open(path)


def test_metadata_are_python_values(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"a": A}, METADATA)
    wanted = {"general.architecture": "toy", **METADATA}
    assert read_metadata(path) == wanted
    source = open_source(path)
    assert source.config == wanted
    assert source.generation == {}
    assert [type(source.config[key]) for key in ("toy.block_count", "toy.flag")] == [int, bool]


def test_every_scalar_type_and_nested_arrays(tmp_path: Path) -> None:
    scalars = zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?QqdQ", strict=False)
    values = {f"k{number}": (number, letter) for number, letter in scalars}
    content = head(values=len(values) + 1)
    for key, (number, letter) in values.items():
        content += build(("s", key.encode()), ("I", number), (letter, 1))
    # An array of two arrays: of the strings x and y, and of the bytes 1 and 2.
    inner = build(("I", 8), ("Q", 2), ("s", b"x"), ("s", b"y")), build(("I", 0), ("Q", 2), ("B", 1), ("B", 2))
    content += build(("s", b"nested"), ("I", 9), ("I", 9), ("Q", 2)) + b"".join(inner)
    got = opened(tmp_path, content).config
    assert got.pop("nested") == [["x", "y"], [1, 2]]
    assert got == dict.fromkeys(values, 1)


def test_plain_tensors_are_mapped_row_major(tmp_path: Path) -> None:
    bf16 = A.astype(ml_dtypes.bfloat16)
    tensors = {"a": A, "h": B.astype(np.float16), "b": (bf16.view(np.uint8), Format.BF16)}
    source = open_source(write_gguf(tmp_path / "m.gguf", tensors))
    assert source.kind == "gguf"
    assert source.tensors == {
        "a": TensorInfo((3, 32), "F32", 384),
        "h": TensorInfo((3, 64), "F16", 384),
        "b": TensorInfo((3, 32), "BF16", 192),
    }
    for name, wanted in {"a": A, "h": B.astype(np.float16), "b": bf16}.items():
        got = source.read(name, ml_dtypes.bfloat16)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
        assert not got.flags.writeable
        assert np.shares_memory(got, source.read(name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_are_expanded_as_the_package_does(tmp_path: Path, name: str) -> None:
    block_format = Format[name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[block_format]
    rows, columns = 5, 256
    # More than one chunk, and a last chunk that is not full; any bytes are blocks, some of them not finite.
    big_rows = 2 * CHUNK_NUMBERS // columns + 3
    blocks = {
        "small": RNG.integers(0, 256, (rows, columns // block_size * block_bytes), np.uint8),
        "big": RNG.integers(0, 256, (big_rows, columns // block_size * block_bytes), np.uint8),
    }
    source = GGUFSource.open(
        write_gguf(tmp_path / "m.gguf", {key: (data, block_format) for key, data in blocks.items()})
    )
    for key, data in blocks.items():
        with np.errstate(all="ignore"):
            wanted = gguf.dequantize(data, block_format)
            narrow = wanted.astype(ml_dtypes.bfloat16)
        for _ in range(2):  # the second read maps again what the first let go
            np.testing.assert_array_equal(source.read(key), wanted)
        assert source.read(key).dtype == np.float32
        got = source.read(key, ml_dtypes.bfloat16)
        assert got.dtype == narrow.dtype
        np.testing.assert_array_equal(got.astype(np.float32), narrow.astype(np.float32))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_was_quantised_comes_back_near(tmp_path: Path, name: str) -> None:
    data = gguf.quantize(B, Format[name])
    source = open_source(write_gguf(tmp_path / "m.gguf", {"b": (data, Format[name])}))
    assert source.tensors["b"].shape == B.shape
    np.testing.assert_allclose(
        source.read("b"), B, atol=0.3 if "4" in name else 0.16 if "5" in name else 0.02
    )


KEPT = {
    "Q8_0": "int8:g32:f16",
    "Q4_0": "int4:g32:f16",
    "Q4_1": "int4:g32:zero:f16",
    "Q5_0": "int8:g32:f16",
    "Q5_1": "int8:g32:zero:f16",
    "Q4_K": "int4:g32:zero:f32",
}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_are_kept_bit_by_bit_where_a_format_of_ours_holds_them(tmp_path: Path, name: str) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[Format[name]]
    rows, columns = (
        3,
        1024 * 160 // 3 * 3 // 256 * 256,
    )  # more than one chunk, and a last one that is not full
    data = RNG.integers(0, 256, (rows, columns // block_size * block_bytes), np.uint8)
    source = GGUFSource.open(write_gguf(tmp_path / "m.gguf", {"w": (data, Format[name])}))
    info = source.tensors["w"]
    assert info.is_coded
    if name not in KEPT:
        assert info.hollow is None
        return
    coded = source.read_coded("w")
    assert info.hollow is not None
    assert coded.format == info.hollow.format == NumberFormat.parse(KEPT[name])
    assert coded.values.nbytes == rows * columns * coded.format.bits // 8
    if name in ("Q8_0", "Q4_0", "Q4_1"):
        assert coded.nbytes == data.nbytes == info.num_bytes
    for part in ("values", "scale", "offset"):
        real, hollow = getattr(coded, part), getattr(info.hollow, part)
        assert (real is None) == (hollow is None)
        assert real is None or (real.shape, real.dtype) == (hollow.shape, hollow.dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(expand(coded, np.float32), gguf.dequantize(data, Format[name]))


def test_unsupported_formats_are_refused_by_name(tmp_path: Path) -> None:
    tensors = {
        "good": A,
        "odd": (np.zeros((1, 66), np.uint8), Format.IQ2_XXS),
        "odder": np.zeros((2, 2), np.float64),
    }
    with pytest.raises(UnsupportedTensorsError, match=r"odd: IQ2_XXS\n  odder: F64") as error:
        open_source(write_gguf(tmp_path / "m.gguf", tensors))
    assert error.value.names == ("odd", "odder")
    with pytest.raises(UnsupportedTensorsError, match="new: type 9999"):
        opened(tmp_path, head(tensors=1) + tensor_entry(b"new", (4,), 9999) + bytes(64))


def test_doubled_names(tmp_path: Path) -> None:
    entries = [(b"a", 0), (b"b", 32), (b"a", 64), (b"b", 96), (b"c", 128)]
    content = head(tensors=5) + b"".join(tensor_entry(n, (8,), 0, at) for n, at in entries)
    with pytest.raises(DoubledTensorsError) as error:
        opened(tmp_path, content + bytes(512))
    assert error.value.names == ("a", "b")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", CorruptFileError, "is empty"),
        (b"GG", CorruptFileError, "not b'GGUF'"),
        (b"PK\3\4" + bytes(60), CorruptFileError, "not b'GGUF'"),
        (b"GGUF\x03", CorruptFileError, "are left"),
        (head(1), UnsupportedFormatError, "version 1 is not read"),
        (head(4), UnsupportedFormatError, "version 4 is not read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedFormatError, "big-endian"),
        (head(values=2**60), CorruptFileError, "are left"),
        (head(tensors=2**60), CorruptFileError, "are left"),
        (head(values=1) + build(("Q", 2**63)), CorruptFileError, "ends beyond the file"),
        (head(values=1) + build(("s", b"k"), ("I", 13)), CorruptFileError, "value type 13"),
        (
            head(values=1) + build(("s", b"k"), ("I", 9), ("I", 8), ("Q", 2**61)),
            CorruptFileError,
            "string.s. needs",
        ),
        (head(values=1) + build(("s", b"k"), ("I", 9), ("I", 4), ("Q", 2**61)), CorruptFileError, "are left"),
        (
            head(values=1) + build(("s", b"k"), ("I", 9)) + build(("I", 9), ("Q", 1)) * 9,
            CorruptFileError,
            "depth",
        ),
        (head(values=1) + build(("s", b"k\xff"), ("I", 0), ("B", 1)), CorruptFileError, "cannot be read"),
        (head(values=2) + build(("s", b"k"), ("I", 0), ("B", 1)) * 2, CorruptFileError, "'k' stands twice"),
        (head(tensors=1) + tensor_entry(b"a", (1,) * 5, 0), CorruptFileError, "5 dimensions"),
        (
            head(tensors=1) + tensor_entry(b"a", (2, 33), 8),
            CorruptFileError,
            "rows of 33, Q8_0 needs a multiple of 32",
        ),
        (head(tensors=1) + tensor_entry(b"a", (2**62, 2**62), 0), CorruptFileError, "end beyond the file: a"),
        (head(tensors=1) + tensor_entry(b"a", (4,), 0, 2**63), CorruptFileError, "end beyond the file: a"),
        (
            head(values=1) + build(("s", b"general.alignment"), ("I", 4), ("I", 48)),
            CorruptFileError,
            "not a power of two",
        ),
    ],
)
def test_unsound_files_say_what_is_wrong(
    tmp_path: Path, content: bytes, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        opened(tmp_path, content)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_or_changed_file_is_our_error(tmp_path: Path, data: st.DataObject) -> None:
    whole_file = tmp_path / "whole.gguf"
    if not whole_file.exists():
        write_gguf(whole_file, {"a": A, "q": (gguf.quantize(B, Format.Q8_0), Format.Q8_0)}, METADATA)
    whole = whole_file.read_bytes()
    needed = len(whole) - 21  # the last tensor's 204 bytes are followed by 20 of padding, which may be absent
    with pytest.raises(CheckpointError):
        opened(tmp_path, whole[: data.draw(st.integers(0, needed))])
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 600))] = data.draw(st.integers(0, 255))
    try:
        source = opened(tmp_path, bytes(changed))
    except CheckpointError:
        return
    for name in source.tensors:
        source.read(name)


def split_file(path: Path, part: int, parts: int, tensors: dict[str, np.ndarray]) -> Path:
    name = path / f"m-{part:05}-of-{parts:05}.gguf"
    return write_gguf(name, tensors, {"split.no": part - 1, "split.count": parts})


def test_a_split_model_is_read_from_all_its_parts(tmp_path: Path) -> None:
    first = split_file(tmp_path, 1, 2, {"a": A})
    with pytest.raises(MissingFilesError) as absent:
        open_source(first)
    assert absent.value.names == ("m-00002-of-00002.gguf",)
    second = split_file(tmp_path, 2, 2, {"b": B})
    for path in (tmp_path, first, second):
        source = open_source(path)
        assert source.path == first
        assert source.config["split.no"] == 0
        np.testing.assert_array_equal(source.read("b"), B)
        np.testing.assert_array_equal(source.read("a"), A)
    split_file(tmp_path, 2, 2, {"a": A, "b": B})
    with pytest.raises(DoubledTensorsError) as doubled:
        open_source(first)
    assert doubled.value.names == ("a",)


def test_a_renamed_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    split_file(tmp_path, 1, 2, {"a": A}).rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="one part of 2"):
        open_source(tmp_path / "model.gguf")


def test_a_folder_must_hold_one_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", {"a": A})
    assert open_source(tmp_path).path == tmp_path / "x.gguf"
    assert find_kind(tmp_path) == "gguf"
    write_gguf(tmp_path / "y.gguf", {"a": A})
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(x.gguf, y.gguf\)"):
        open_source(tmp_path)


@pytest.mark.slow
def test_real_files_are_read_as_the_package_reads_them(smollm2_gguf: Path) -> None:
    source, reader = GGUFSource.open(smollm2_gguf), gguf.GGUFReader(smollm2_gguf)
    assert {t.name for t in reader.tensors} == source.tensors.keys()
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert source.config == fields
    for tensor in reader.tensors[:12]:
        wanted = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(
            source.read(tensor.name), wanted.reshape(source.tensors[tensor.name].shape)
        )
