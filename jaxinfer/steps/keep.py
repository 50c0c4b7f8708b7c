"""Executables kept between runs, so that a second start loads what the first one compiled.

jax serialises an executable by pickle, and reading one runs what is in it: the folder is made for its user alone, and
one that others own or may write to is not read. Nothing that comes with a checkpoint is ever read here.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from jaxinfer.arrays.sharding import describe_mesh
from jaxinfer.hardware import cpu_features
from jaxinfer.model.stacks import Static

Say = Callable[[str], None]
T = TypeVar("T")

MAX_BYTES = 2 * 2**30  # of the folder; a 30-layer step takes 2 MB on CPU
_DIGEST_BYTES = hashlib.sha256().digest_size
_SUFFIX = ".executable"
# What a step is traced from. A change elsewhere leaves its executable as it was.
_SOURCES = ("config.py", "hardware.py", "schedule/sampling_params.py", "arrays", "kernels", "model", "steps")
# Environment that changes what is compiled.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# jax's settings that change nothing of it, by how their names begin: where to run, what to log, where to keep files.
_HARMLESS = (
    *("jax_platforms", "jax_num_cpu_devices", "jax_enable_preemption_service", "jax_compilation_cache_"),
    *(
        "jax_enable_compilation_cache",
        "jax_persistent_cache_",
        "jax_log",
        "jax_debug_log",
        "jax_transfer_guard",
    ),
)
# What compiles, where jaxlib does not: the packages whose version tells it.
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}


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

    def expect(self, parts: Mapping[str, str], keys: Mapping[str, str]) -> None:
        """Is told of a run before it loads: what its executables depend on, and their keys by name."""

    def load(self, key: str, devices: Sequence[Any]) -> jax.stages.Compiled | None:
        """Returns the executable that was saved under a key, or None.

        Args:
          key: from `key_of`. devices: that it runs on, in the order of their mesh.
        """
        return self._read(key, lambda body: unpack(body, devices))

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
            return self._get(key, open_body)
        except Exception as error:
            self._say(f"kept executable {path} is compiled anew: {error or type(error).__name__}")
            return None

    def _get(self, key: str, open_body: Callable[[bytes], T]) -> T:
        """Returns what a file holds; errors of many kinds where it is missing, damaged or of another version."""
        path = self._path(key)
        content = path.read_bytes()
        with suppress(OSError):  # a folder that may be read alone
            os.utime(path)
        body = content[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
            raise ValueError("it is damaged")
        return open_body(body)

    def _write(self, key: str, make_body: Callable[[], bytes]) -> None:
        if not self._is_usable:
            return
        try:
            self._put(key, make_body())
        except Exception as error:  # of many kinds, by backend; the run has its executable and goes on
            self._say(f"an executable is not kept in {self._folder}: {error or type(error).__name__}")

    def _put(self, key: str, body: bytes) -> None:
        handle, unfinished = tempfile.mkstemp(_SUFFIX, dir=self._folder)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(unfinished, self._path(key))

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


def unpack(body: bytes, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Returns the executable that `ExecutableStore.save` packed, on some devices."""
    return deserialize_and_load(*pickle.loads(body), execution_devices=devices)  # noqa: S301 (see above)


def key_of(*parts: Any, device: Any = None) -> str:
    """Returns the key of an executable.

    Args:
      parts: what tells it from the other executables of this device, version and source, each by its ``repr``.
      device: that it runs on, which need not be here; None for the default one.
    """
    around = json.dumps(surroundings(jax.devices()[0] if device is None else device))
    return hashlib.sha256("\n".join([around, *map(repr, parts)]).encode()).hexdigest()


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


def announce(
    store: ExecutableStore,
    names: Iterable[str],
    static: Static,
    state: tuple[Any, Any, Any],
    mesh: Mesh | None,
    devices: Sequence[Any],
) -> dict[str, str]:
    """Tells a store what a run's executables depend on, and returns their keys by name.

    Args:
      store: that they are to be in. names: of the executables. static: what they are compiled for.
      state: weights, cache and slots, abstract. mesh: None for one device. devices: in the order of the mesh.

    Raises:
      BundleError: the store is a bundle for another run.
    """
    own = {
        "mesh": "one device" if mesh is None else describe_mesh(mesh),
        "places": describe_places(devices),
        "attention": static.attention,
        "context": repr(static.context),
    }
    for name, record in (("model", static.cfg), ("policy", static.policy)):
        own |= {f"{name}.{part.name}": repr(getattr(record, part.name)) for part in fields(record)}
    own |= dict(zip(("weights", "cache", "slots"), map(describe_arrays, state), strict=True))
    keys = {name: key_of(name, own, device=devices[0]) for name in names}
    store.expect(surroundings(devices[0]) | own, keys)
    return keys


def describe_arrays(tree: Any) -> str:
    """Returns a tree of arrays, or of their descriptions, in words: how many of each kind, and a digest of it whole."""
    leaves = [
        f"{leaf.dtype}{list(leaf.shape)}"
        + (f" over {spec}" if any(spec := getattr(leaf.sharding, "spec", ())) else "")
        for leaf in jax.tree.leaves(tree)
    ]
    digest = hashlib.sha256(repr((jax.tree.structure(tree), leaves)).encode()).hexdigest()[:16]
    return ", ".join(f"{count} x {leaf}" for leaf, count in Counter(leaves).items()) + f"; digest {digest}"


def describe_places(devices: Sequence[Any]) -> str:
    """Returns where devices are, in their order: chips of a TPU by their places in the grid."""
    if devices[0].platform == "tpu":
        return repr([(*device.coords, device.core_on_chip) for device in devices])
    return repr([device.id for device in devices])


@cache
def surroundings(device: Any) -> dict[str, str]:
    """Returns what every executable for a device depends on, by name: versions, devices, settings, the steps' source.

    Args:
      device: of this process, or of a topology that is compiled for.
    """
    is_cpu = device.platform == "cpu"
    packages = _COMPILERS.get(device.platform, ())
    compilers = [f"{name} {found}" for name in packages if (found := _version_of(name))]
    settings = {name: repr(value) for name, value in sorted(jax.config.values.items())}
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": str(device.client.device_count()),
        "processes": f"{jax.process_index()} of {jax.process_count()}",
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "compiler": ", ".join(compilers) or device.client.platform_version,
        # Of the host it matters only where the host computes.
        "machine": f"{platform.system()} {platform.machine()} {sorted(cpu_features())}" if is_cpu else "",
        **{name: os.environ.get(name, "") for name in _FLAGS},
        **{name: value for name, value in settings.items() if not name.startswith(_HARMLESS)},
        "source": _source_digest(Path(__file__).parent.parent),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _source_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = package / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
