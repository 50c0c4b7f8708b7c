"""Bundles: the executables of one run in a folder of their own, made ahead, for processes that must not compile.

A bundle is an `ExecutableStore` with a manifest of what its executables depend on, part by part. A run that asks for it
loads every executable or is refused with the parts that differ: it never compiles in silence.

Written for CPUs, TPUs and GPUs; loaded, so far, on CPUs alone.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.experimental.serialize_executable import serialize

from jaxinfer.steps.keep import ExecutableStore, unpack

MANIFEST = "bundle.json"
FORMAT = 1
_MAX_SHOWN = 160  # characters of a value in an error
_MAX_PARTS = 6


class BundleError(ValueError):
    """A bundle that cannot serve the run that asks for it; the message says what differs."""


class Cost(Protocol):
    """What an executable took."""

    @property
    def seconds(self) -> float: ...
    @property
    def temp_bytes(self) -> int: ...


class Bundle(ExecutableStore):
    """A bundle that was written, to load from.

    Args:
      folder: of it.

    Raises:
      BundleError: no bundle is there, or one of another format, or that others may write to; or several processes ask
        for it.
    """

    def __init__(self, folder: Path) -> None:
        if (num := jax.process_count()) > 1:
            raise BundleError(
                f"bundle {folder}: is of one process, there are {num}; leave it out, and each keeps what it compiles "
                "(compile_cache)"
            )
        self.manifest = read_manifest(folder)
        self._names: dict[str, str] = {}
        said: list[str] = []
        super().__init__(folder, said.append)
        if not self._is_usable:
            raise BundleError(f"bundle {folder}: is not read: {'; '.join(said)}")

    def expect(self, parts: Mapping[str, str], keys: Mapping[str, str]) -> None:
        """Holds the run against the bundle.

        Raises:
          BundleError: it was made for another run, with each part that differs; or lacks executables.
        """
        if differing := compare_parts(parts, self.manifest["made_for"]):
            raise BundleError(
                f"bundle {self._folder}: was made for another run: {'; '.join(differing)}; make it anew (jaxinfer "
                "compile --bundle), or run what it was made for"
            )
        if missing := [name for name in keys if name not in self.manifest["executables"]]:
            raise BundleError(
                f"bundle {self._folder}: has no {', '.join(map(repr, missing[:_MAX_PARTS]))} ({len(missing)} of "
                f"{len(keys)} executables are missing); make it with the shapes and run.draws of this run"
            )
        self._names = {key: name for name, key in keys.items()}

    def load(self, key: str, devices: Sequence[Any]) -> jax.stages.Compiled:
        """Returns an executable; see `ExecutableStore.load`.

        Raises:
          BundleError: its file is missing or damaged, or this jaxlib does not take it.
        """
        try:
            return self._get(key, lambda body: unpack(body, devices))
        except Exception as error:  # of many kinds, by backend
            name = self._names.get(key, key)
            raise BundleError(
                f"bundle {self._folder}: {name!r} cannot be loaded: {error or type(error).__name__}; make it anew"
            ) from error

    def write_code(self, name: str, code: bytes) -> None:
        """Keeps nothing: a bundle is read."""

    def trim(self) -> None:
        """Removes nothing: a bundle is whole."""


class BundleWriter(ExecutableStore):
    """A bundle in the making.

    Args:
      folder: to make, or an empty one.

    Raises:
      FileExistsError: something is there. BundleError: it cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder}: exists; name a new folder, or remove this one first")
        said: list[str] = []
        super().__init__(folder, said.append)
        if not self._is_usable:
            raise BundleError(f"bundle {folder}: cannot be written: {'; '.join(said)}")
        self._parts: Mapping[str, str] = {}
        self._keys: Mapping[str, str] = {}

    def expect(self, parts: Mapping[str, str], keys: Mapping[str, str]) -> None:
        """Notes what the executables depend on, and their names."""
        self._parts, self._keys = parts, keys

    def load(self, key: str, devices: Sequence[Any]) -> None:
        """Returns None: everything is compiled."""

    def save(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Writes an executable; errors, by backend, where it cannot be serialised."""
        self._put(key, pickle.dumps(serialize(compiled)))

    def trim(self) -> None:
        """Removes nothing."""

    def finish(self, costs: Mapping[str, Cost], run: Mapping[str, Any]) -> None:
        """Writes the manifest, without which a folder is no bundle.

        Args:
          costs: of each executable, by name. run: the settings of the run, as JSON knows them.
        """
        executables = {
            name: {
                "key": self._keys[name],
                "seconds": round(cost.seconds, 2),
                "temporary_bytes": cost.temp_bytes,
            }
            for name, cost in costs.items()
        }
        manifest = {
            "format": FORMAT,
            "run": dict(run),
            "made_for": dict(self._parts),
            "executables": executables,
        }
        unfinished = self._folder / f".{MANIFEST}"
        unfinished.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        os.replace(unfinished, self._folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns what a bundle says of itself.

    Raises:
      BundleError: no bundle is there, or one of another format.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(
            f"bundle {folder}: has no {MANIFEST} that can be read ({error.strerror}); `jaxinfer compile --bundle` "
            "writes one"
        ) from None
    except ValueError as error:
        raise BundleError(f"bundle {folder}: {MANIFEST} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise BundleError(f"bundle {folder}: format: got {got!r}, expected {FORMAT}; make it anew")
    return manifest


def compare_parts(got: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Returns what differs between a run and what a bundle was made for, the most telling first, a few in full.

    Args:
      got: of the run. expected: of the bundle.
    """
    names = [*expected, *(name for name in got if name not in expected)]
    differing = [name for name in names if got.get(name) != expected.get(name)]
    told = [
        f"{name}: got {_show(got.get(name))}, expected {_show(expected.get(name))}"
        for name in differing[:_MAX_PARTS]
    ]
    rest = differing[_MAX_PARTS:]
    return told + ([f"and {len(rest)} more: {', '.join(rest[:_MAX_PARTS])}"] if rest else [])


def _show(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "..."
