"""Checkpoints of object stores, by fsspec's memory: copied once, copied again where they changed, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from jaxinfer.weights.fetch import resolve_model
from jaxinfer.weights.hub import FetchError
from jaxinfer.weights.model import open_model
from jaxinfer.weights.remote import fetch_remote
from tests.acceptance.engines import write_toy


@pytest.fixture
def store() -> Iterator[Any]:
    """An empty store, whose files are named memory://..."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def upload(fs: Any, folder: Path, to: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{to}/{path.relative_to(folder)}", path.read_bytes())


def test_a_model_opens_by_its_address(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    toy = write_toy(tmp_path / "toy")
    upload(store, toy, "/bucket/toy")
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    model = open_model("memory://bucket/toy")
    assert model.cfg == open_model(str(toy)).cfg
    assert model.path.is_relative_to(tmp_path / "cache")


def test_only_what_changed_is_copied_again(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {"config.json": b"{}", "params/d/0": b"numbers", "old.json": b"1", "pytorch_model.bin": b"pickle"}
    for name, content in files.items():
        store.pipe_file(f"/bucket/m/{name}", content)
    read: list[str] = []
    opened = store.open
    monkeypatch.setattr(
        type(store), "open", lambda self, path, *a, **k: read.append(path) or opened(path, *a, **k)
    )
    folder = fetch_remote("memory://bucket/m/", tmp_path)
    assert (folder / "params/d/0").read_bytes() == b"numbers"
    assert not (folder / "pytorch_model.bin").exists()
    assert len(read) == 3
    assert fetch_remote("memory://bucket/m", tmp_path / "elsewhere") != folder
    read.clear()
    assert fetch_remote("memory://bucket/m/", tmp_path) == folder
    assert read == []
    store.pipe_file("/bucket/m/params/d/0", b"others!")
    store.rm("/bucket/m/old.json")
    read.clear()
    fetch_remote("memory://bucket/m/", tmp_path)
    assert read == ["/bucket/m/params/d/0"]
    assert (folder / "params/d/0").read_bytes() == b"others!"
    assert not (folder / "old.json").exists()
    assert not list(folder.rglob("*.part"))


def test_a_single_file_comes_as_a_file(store: Any, tmp_path: Path):
    store.pipe_file("/bucket/m.gguf", b"GGUF")
    assert fetch_remote("memory://bucket/m.gguf", tmp_path).read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("memory://bucket/none", "nothing is there"),
        ("nosuch://bucket/m", "cannot be listed"),
    ],
)
def test_what_cannot_be_read_is_told(store: Any, tmp_path: Path, name: str, says: str):
    with pytest.raises(FetchError, match=says):
        resolve_model(name, cache_dir=tmp_path)


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(FetchError, match=r"pip install 'jaxinfer\[gs\]'"):
        fetch_remote("gs://bucket/m", tmp_path)


def test_a_name_that_points_elsewhere_is_refused(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = {"/bucket/m/../../evil": {"type": "file", "size": 1}}
    monkeypatch.setattr(type(store), "find", lambda *_, **__: found)
    with pytest.raises(FetchError, match="points out of its folder"):
        fetch_remote("memory://bucket/m", tmp_path)
