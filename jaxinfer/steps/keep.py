"""Executables kept between runs, so that a second start loads what the first one compiled.

jax serialises an executable by pickle, and reading one runs what is in it: the folder is made for its user alone, and
one that others own or may write to is not read. Nothing that comes with a checkpoint is ever read here.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxinfer.hardware import cpu_features

Say = Callable[[str], None]
T = TypeVar("T")

MAX_BYTES = 2 * 2**30  # of the folder; a 30-layer step takes 2 MB on CPU
_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".executable"
# What a step is traced from. A change elsewhere leaves its executable as it was.
_SOURCES = ("config.py", "hardware.py", "schedule/sampling_params.py", "arrays", "kernels", "model", "steps")
# Environment that changes what is compiled.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")


class ExecutableStore:
    """A folder of executables, each under a key of all that it was compiled from.

    A file that cannot be read is compiled anew and replaced; what is used least goes when the folder is full. Several
    processes may share the folder.

    Args:
      folder: made where it is missing. say: is told of what could not be read or written. max_bytes: of all files.
    """

    def __init__(self, folder: Path, say: Say = lambda line: None, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._say, self._max_bytes = folder, say, max_bytes
        self._is_usable = self._open()

    def load(self, key: str, devices: Sequence[Any]) -> jax.stages.Compiled | None:
        """Returns the executable that was saved under a key, or None.

        Args:
          key: from `key_of`. devices: that it runs on, in the order of their mesh.
        """
        return self._read(
            key,
            lambda body: deserialize_and_load(*pickle.loads(body), execution_devices=devices),  # noqa: S301 (see above)
        )

    def save(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Keeps an executable, where its backend can serialise it."""
        self._write(key, lambda: pickle.dumps(serialize(compiled)))

    def read_code(self, name: str) -> bytes | None:
        """Returns a native kernel's machine code that was kept for this machine, version and source, or None."""
        return self._read(_key_of_code(name), bytes)

    def write_code(self, name: str, code: bytes) -> None:
        """Keeps a native kernel's machine code."""
        self._write(_key_of_code(name), lambda: code)

    def _read(self, key: str, open_body: Callable[[bytes], T]) -> T | None:
        path = self._path(key)
        if not self._is_usable or not path.exists():
            return None
        try:
            content = path.read_bytes()
            os.utime(path)
            body = content[_DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
                raise ValueError("it is damaged")
            return open_body(body)
        except Exception as error:
            self._say(f"kept executable {path} is compiled anew: {error or type(error).__name__}")
            return None

    def _write(self, key: str, make_body: Callable[[], bytes]) -> None:
        if not self._is_usable:
            return
        try:
            body = make_body()
            handle, unfinished = tempfile.mkstemp(_SUFFIX, dir=self._folder)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(unfinished, self._path(key))
        except Exception as error:  # of many kinds, by backend; the run has its executable and goes on
            self._say(f"an executable is not kept in {self._folder}: {error or type(error).__name__}")

    def trim(self) -> None:
        """Removes the executables that were not used for longest until the rest fits; other files are left alone."""
        if not self._is_usable:
            return
        files: list[tuple[float, int, Path]] = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another process trims too
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _path(self, key: str) -> Path:
        return self._folder / (key + _SUFFIX)

    def _open(self) -> bool:
        """Makes the folder and tells whether it is this user's alone."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stat = self._folder.stat()
        except OSError as error:
            self._say(f"executables are not kept: {error}")
            return False
        if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
            self._say(
                f"executables are not kept: {self._folder} is another user's, or others may write to it"
            )
            return False
        return True


def _key_of_code(name: str) -> str:
    return key_of("native code", name, version("llvmlite"))


def key_of(*parts: Any) -> str:
    """Returns the key of an executable.

    Args:
      parts: what tells it from the other executables of this machine, version and source, each by its ``repr``.
    """
    return hashlib.sha256("\n".join([_surroundings(), *map(repr, parts)]).encode()).hexdigest()


def devices_of(tree: Any) -> list[Any] | None:
    """Returns the devices that a tree of arrays, or of their descriptions, lies on, in the order of their mesh.

    Returns:
      The default device where none is named; None where the order is not known.
    """
    shardings = {
        leaf.sharding for leaf in jax.tree.leaves(tree) if getattr(leaf, "sharding", None) is not None
    }
    meshes = {sharding.mesh for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding)}
    if meshes:
        return list(np.asarray(meshes.pop().devices).flat) if len(meshes) == 1 else None
    devices = {device for sharding in shardings for device in sharding.device_set} or {jax.devices()[0]}
    return list(devices) if len(devices) == 1 else None


@cache
def _surroundings() -> str:
    """Returns what every executable depends on: versions, devices, settings and the source of the steps."""
    device = jax.devices()[0]
    lines = [
        f"{jax.__version__} {version('jaxlib')} {device.client.platform_version}",
        f"{device.platform} {device.device_kind} {jax.device_count()} {jax.process_index()} {jax.process_count()}",
        f"{platform.platform()} {platform.machine()} {sorted(cpu_features())}",
        *(f"{name}={os.environ.get(name)}" for name in _FLAGS),
        repr(sorted(jax.config.values.items())),
        _source_digest(Path(__file__).parent.parent),
    ]
    return "\n".join(lines)


def _source_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = package / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
