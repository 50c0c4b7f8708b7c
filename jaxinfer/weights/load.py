"""Checkpoint tensors to parameters on devices: everything is checked first, then leaves are read one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Protocol

import jax
import numpy as np

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.specs import ParamSpec, flatten_specs, is_spec
from jaxinfer.weights.buffers import all_finite, pack
from jaxinfer.weights.errors import (
    ExtraTensorsError,
    MisshapenTensorsError,
    MissingTensorsError,
    NonFiniteTensorsError,
)
from jaxinfer.weights.tensors import TensorSource

Finish = Callable[[str, np.ndarray], Any]
Progress = Callable[[int, int], None]
Fault = tuple[str, str]  # a tensor's name, and what is wrong with it

NUM_THREADS = 2  # leaves in the making, and so the host memory beyond the result


class Recipe(Protocol):
    """How a leaf comes out of a checkpoint: ``transform`` of the arrays of ``names``, in that order."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def transform(self) -> Callable[..., np.ndarray]: ...


def load_params(
    source: TensorSource,
    specs: Any,
    recipes: Mapping[str, Recipe],
    *,
    policy: Policy,
    ignorable: Iterable[str] = (),
    shardings: Any = None,
    finish: Finish | None = None,
    progress: Progress | None = None,
) -> Any:
    """Reads a checkpoint into a tree of parameters on devices.

    Args:
      source: the opened checkpoint.
      specs: the wanted tree of `ParamSpec`.
      recipes: for every leaf, by its dotted path.
      policy: names the number format of each role; norms, biases and routers are float32.
      ignorable: patterns (`re.fullmatch`) of tensor names that the model does without.
      shardings: one sharding for all leaves or a tree of them like ``specs``; None is the default device.
      finish: makes the leaf of ``(path, array)`` in place of the cast and the transfer; the array may be a strided
        view, and blocks come expanded to float32. It may raise OverflowError, which is reported as not finite.
      progress: called with bytes read and bytes to read, from the calling thread.

    Returns:
      The tree of ``specs`` with an array (or what ``finish`` returned) for each leaf.

    Raises:
      MissingTensorsError, ExtraTensorsError, MisshapenTensorsError, NonFiniteTensorsError: each lists every name.
    """
    leaves = dict(flatten_specs(specs))
    if leaves.keys() != recipes.keys():
        raise ValueError(f"recipes and specs differ in {sorted(leaves.keys() ^ recipes.keys())}")
    check_names(source, recipes, ignorable)
    check_shapes(source, leaves, recipes)
    make_leaf = finish or _to_device(specs, policy, shardings)

    def make(path: str) -> tuple[Any, list[Fault]]:
        names = recipes[path].names
        dtype = np.float32 if finish else policy.dtype_of(leaves[path].role)
        arrays = [source.read(name, dtype) for name in names]
        bad = [(name, "NaN or infinity") for name, a in zip(names, arrays, strict=True) if not all_finite(a)]
        if bad:
            return None, bad
        try:
            return make_leaf(path, recipes[path].transform(*arrays)), []
        except OverflowError as error:
            return None, [(name, str(error)) for name in names]

    sizes = {path: sum(source.tensors[name].num_bytes for name in recipes[path].names) for path in leaves}
    made = _make_all(make, sizes, progress)
    bad = [fault for _, faults in made.values() for fault in faults]
    if bad:
        raise NonFiniteTensorsError(source.path, bad)
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), [made[path][0] for path in leaves])


def check_names(source: TensorSource, recipes: Mapping[str, Recipe], ignorable: Iterable[str] = ()) -> None:
    """Holds the checkpoint's names against the recipes'.

    Raises:
      MissingTensorsError: a recipe reads what is not there.
      ExtraTensorsError: no recipe reads what is there, and no pattern of ``ignorable`` matches it.
    """
    missing = [
        (name, f"for {path}") for path, r in recipes.items() for name in r.names if name not in source.tensors
    ]
    if missing:
        raise MissingTensorsError(source.path, missing)
    used = {name for recipe in recipes.values() for name in recipe.names}
    harmless = re.compile("|".join(f"(?:{pattern})" for pattern in ignorable) or r"(?!)")
    extra = [name for name in source.tensors if name not in used and not harmless.fullmatch(name)]
    if extra:
        raise ExtraTensorsError(
            source.path, [(name, str(list(source.tensors[name].shape))) for name in extra]
        )


def check_shapes(
    source: TensorSource, leaves: Mapping[str, ParamSpec], recipes: Mapping[str, Recipe]
) -> None:
    """Holds the shape that every recipe gives against its leaf's, without reading a tensor.

    Raises:
      MisshapenTensorsError: they differ, or the recipe cannot be done with tensors of these shapes.
    """
    seen: dict[Any, tuple[int, ...] | str] = {}  # layers are alike: a transform is tried once a set of shapes
    bad = []
    for path, recipe in recipes.items():
        shapes = tuple(source.tensors[name].shape for name in recipe.names)
        key = (recipe.transform, shapes)
        if key not in seen:
            seen[key] = _shape_made(recipe.transform, shapes)
        if seen[key] != leaves[path].shape:
            made = seen[key] if isinstance(seen[key], str) else f"gives {seen[key]}"
            bad += [
                (name, f"got {shape}, which {made} for {path}, expected {leaves[path].shape}")
                for name, shape in zip(recipe.names, shapes, strict=True)
            ]
    if bad:
        raise MisshapenTensorsError(source.path, bad)


def _shape_made(
    transform: Callable[..., np.ndarray], shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, ...] | str:
    try:
        # One byte seen through strides of zero: views stay free, and a copy costs a byte a number.
        return transform(*(np.broadcast_to(np.int8(0), shape) for shape in shapes)).shape
    except (ValueError, IndexError) as error:
        return f"cannot be arranged ({error})"


def leaf_shardings(specs: Any, shardings: Any) -> dict[str, jax.sharding.Sharding]:
    """Returns where every leaf goes, by its dotted path.

    Args:
      specs: tree of `ParamSpec`.
      shardings: one sharding for all leaves, a tree of them like ``specs``, or None for the default device.
    """
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(shardings, jax.sharding.Sharding):
        return {path: shardings for path, _ in flatten_specs(specs)}
    given = jax.tree.leaves(shardings)
    return {path: sharding for (path, _), sharding in zip(flatten_specs(specs), given, strict=True)}


def _to_device(specs: Any, policy: Policy, shardings: Any) -> Finish:
    """Returns the usual ``finish``: the policy's format, row-major, put where the sharding says."""
    dtypes = {path: policy.dtype_of(spec.role) for path, spec in flatten_specs(specs)}
    where = leaf_shardings(specs, shardings)

    def finish(path: str, array: np.ndarray) -> jax.Array:
        return jax.device_put(pack(array, dtypes[path]), where[path])

    return finish


def _make_all(
    make: Callable[[str], tuple[Any, list[Fault]]], sizes: Mapping[str, int], progress: Progress | None
) -> dict[str, tuple[Any, list[Fault]]]:
    """Makes every leaf, the largest first so that the threads end together, and tells the progress."""
    pool = ThreadPoolExecutor(NUM_THREADS)
    made, done, total = {}, 0, sum(sizes.values())
    try:
        paths = {pool.submit(make, path): path for path in sorted(sizes, key=lambda path: -sizes[path])}
        for future in as_completed(paths):
            made[paths[future]] = future.result()
            done += sizes[paths[future]]
            if progress:
                progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return made
