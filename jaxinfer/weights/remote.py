"""Models in object stores (gs://, s3:// and what else fsspec knows), copied to this machine file by file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from jaxinfer.weights.hub import PICKLE_SUFFIXES, FetchError

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://[^/].*")
_EXTRAS = {"gs": "gs", "gcs": "gs", "s3": "s3"}
_MANIFEST = ".copied.json"
_CHUNK_BYTES = 8 << 20
# What stores call the version of a file's content.
_VERSIONS = ("etag", "ETag", "md5Hash", "generation", "mtime", "created", "LastModified")


def is_remote(name: str) -> bool:
    """Returns whether a model's name is an address, such as gs://bucket/folder."""
    return _URL.fullmatch(name) is not None


def fetch_remote(name: str, folder: Path) -> Path:
    """Returns a copy of a remote checkpoint; files that are here already, and unchanged there, are not read again.

    Args:
      name: address of a folder, or of one ``.gguf`` file. folder: where copies are kept, one a name.

    Raises:
      FetchError: nothing is there, it cannot be read, or fsspec or the store's own package is missing.
    """
    scheme = name.partition("://")[0]
    try:
        import fsspec

        fs, root = fsspec.core.url_to_fs(name.rstrip("/"))
        found = {path: info for path, info in fs.find(root, detail=True).items() if info["type"] == "file"}
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        hint = f"pip install 'jaxinfer[{extra}]'" if extra else "install what fsspec needs for it"
        raise FetchError(f"{name} needs a package that is not here ({error}): {hint}") from error
    except Exception as error:  # each store has errors of its own
        raise FetchError(f"{name} cannot be listed ({type(error).__name__}: {error})") from error
    if not found:
        raise FetchError(
            f"{name}: nothing is there, or it may not be read: check the name and this machine's rights"
        )
    target = folder / hashlib.sha256(name.encode()).hexdigest()[:16] / PurePosixPath(root).name
    try:
        _copy_all(fs, root, found, target)
    except Exception as error:
        raise FetchError(
            f"{name} could not be copied to {target} ({type(error).__name__}: {error})"
        ) from error
    return target / PurePosixPath(root).name if root in found else target


def _copy_all(fs: Any, root: str, found: dict[str, Any], target: Path) -> None:
    """Copies what is new or has changed; pickles are left where they are, for they are never read."""
    target.mkdir(parents=True, exist_ok=True)
    manifest = target / _MANIFEST
    had = json.loads(manifest.read_text()) if manifest.exists() else {}
    has: dict[str, list[Any]] = {}
    wanted = []
    for path, info in sorted(found.items()):
        inner = (
            PurePosixPath(path).relative_to(root) if path != root else PurePosixPath(PurePosixPath(path).name)
        )
        if inner.suffix.lower() in PICKLE_SUFFIXES:
            continue
        if ".." in inner.parts:  # an object's name may say anything
            raise ValueError(f"the name {path!r} points out of its folder")
        version = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
        has[str(inner)] = [info["size"], version]
        local = target / inner
        if (
            had.get(str(inner)) != has[str(inner)]
            or not local.exists()
            or local.stat().st_size != info["size"]
        ):
            wanted.append((path, local, info["size"]))
    for gone in had.keys() - has.keys():
        (target / gone).unlink(missing_ok=True)
    total = sum(size for *_, size in wanted)
    hidden = not sys.stderr.isatty()
    with tqdm(desc=f"copying {target.name}", total=total, unit="B", unit_scale=True, disable=hidden) as bar:
        for path, local, _ in wanted:
            _copy(fs, path, local, bar)
    _replace(manifest, json.dumps(has).encode())


def _copy(fs: Any, path: str, local: Path, bar: tqdm) -> None:
    """Copies one file, which appears whole or not at all: several processes may copy at once."""
    local.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(".part", dir=local.parent)
    try:
        with os.fdopen(handle, "wb") as out, fs.open(path, "rb") as remote:
            while chunk := remote.read(_CHUNK_BYTES):
                out.write(chunk)
                bar.update(len(chunk))
        os.replace(unfinished, local)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def _replace(path: Path, content: bytes) -> None:
    handle, unfinished = tempfile.mkstemp(".part", dir=path.parent)
    with os.fdopen(handle, "wb") as out:
        out.write(content)
    os.replace(unfinished, path)
