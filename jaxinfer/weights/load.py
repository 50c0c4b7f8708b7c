"""Checkpoint tensors to parameters on devices: everything is checked first, then leaves are read one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import Quantized, abstract
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.sharding import put_shards
from jaxinfer.arrays.specs import ParamSpec, flatten_specs, is_spec
from jaxinfer.model.layout import Layout
from jaxinfer.weights.buffers import all_finite, pack
from jaxinfer.weights.errors import (
    ExtraTensorsError,
    MisshapenTensorsError,
    MissingTensorsError,
    NonFiniteTensorsError,
)
from jaxinfer.weights.place import Recipe, find_fault, hold, place
from jaxinfer.weights.tensors import TensorSource

Finish = Callable[[str, np.ndarray | Quantized], Any]
Progress = Callable[[int, int], None]
Fault = tuple[str, str]  # a tensor's name, and what is wrong with it

NUM_THREADS = 2  # leaves in the making, and so the host memory beyond the result


def load_params(
    source: TensorSource,
    specs: Any,
    recipes: Mapping[str, Recipe],
    *,
    policy: Policy,
    ignorable: Iterable[str] = (),
    shardings: Any = None,
    layout: Layout | None = None,
    finish: Finish | None = None,
    progress: Progress | None = None,
) -> Any:
    """Reads a checkpoint into a tree of parameters on devices.

    Over a mesh, plain leaves are read share by share, this process's only; codes, and what is rounded here, whole; a
    layer of other processes' stage not at all.

    Args:
      source: the opened checkpoint. specs: the wanted tree of `ParamSpec`. recipes: for every leaf, by its dotted path.
      policy: names each leaf's format (a settled one, see `settle`); what the checkpoint has in it is taken as it is.
      ignorable: patterns (`re.fullmatch`) of tensor names that the model does without.
      shardings: one sharding for all leaves or a tree of them like ``specs``; None is the default device.
      layout: over a mesh: makes leaves the sizes that divide, before they go where their shardings say.
      finish: makes the leaf of ``(path, array)`` in place of the cast and the transfer; the array may be a strided
        view, and blocks come expanded to float32. It may raise OverflowError, which is reported as not finite.
      progress: called with bytes read and bytes to read, from the calling thread.

    Returns:
      The tree of ``specs`` with an array (or what ``finish`` returned) for each leaf, or what `describe_leaf` does.

    Raises:
      MissingTensorsError, ExtraTensorsError, MisshapenTensorsError, NonFiniteTensorsError: each lists every name.
    """
    leaves = dict(flatten_specs(specs))
    if leaves.keys() != recipes.keys():
        raise ValueError(f"recipes and specs differ in {sorted(leaves.keys() ^ recipes.keys())}")
    check_names(source, recipes, ignorable)
    check_shapes(source, leaves, recipes)
    where = leaf_shardings(specs, shardings)
    make_leaf = finish or _to_device(leaves, policy, where, layout)

    def make(path: str) -> tuple[Any, list[Fault]]:
        spec, over, fmt = leaves[path], where[path], None if finish else policy.format_of(path, leaves[path])
        if fmt is not None and not over.addressable_devices:
            return describe_leaf(spec, fmt, over, layout), []
        if fmt is not None and fmt.is_plain and isinstance(over, NamedSharding):
            return _read_shares(source, recipes[path], spec, fmt.dtype, over, layout)
        array, bad = _read_leaf(source, recipes[path], spec, fmt)
        if array is None:
            return None, bad
        try:
            return make_leaf(path, array), []
        except OverflowError as error:
            return None, [(name, str(error)) for name in recipes[path].names]

    sizes = {path: sum(source.tensors[name].num_bytes for name in recipes[path].names) for path in leaves}
    made = _make_all(make, sizes, progress)
    if bad := [fault for _, faults in made.values() for fault in faults]:
        raise NonFiniteTensorsError(source.path, bad)
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), [made[path][0] for path in leaves])


def _read_leaf(
    source: TensorSource, recipe: Recipe, spec: ParamSpec, fmt: Format | None
) -> tuple[np.ndarray | Quantized | None, list[Fault]]:
    """Returns a leaf as its recipe makes it, in codes where they are of ``fmt``; or None, and what is not finite."""
    if fmt is not None and not fmt.is_plain:
        held = hold(source, recipe, spec)
        if held is not None and held.format == fmt:
            coded = [source.read_coded(name) for name in recipe.names]
            faults = [
                (n, fault) for n, w in zip(recipe.names, coded, strict=True) if (fault := find_fault(w))
            ]
            return None if faults else place(coded, recipe, spec), faults
    dtype = fmt.dtype if fmt is not None and fmt.is_plain else np.float32
    arrays = [source.read(name, dtype) for name in recipe.names]
    faults = _find_infinite(recipe.names, arrays)
    return None if faults else recipe.transform(*arrays), faults


def _find_infinite(names: Sequence[str], arrays: Sequence[np.ndarray]) -> list[Fault]:
    return [(n, "NaN or infinity") for n, a in zip(names, arrays, strict=True) if not all_finite(a)]


def _read_shares(
    source: TensorSource,
    recipe: Recipe,
    spec: ParamSpec,
    dtype: np.dtype,
    sharding: NamedSharding,
    layout: Layout | None,
) -> tuple[jax.Array | None, list[Fault]]:
    """Returns a plain leaf over a mesh, of which this process reads what its devices have; or None, and the faults."""
    whole = jax.ShapeDtypeStruct(spec.shape, dtype)
    shape = whole.shape if layout is None else layout.fill(spec, whole).shape
    open_tensor = cache(lambda name: source.read(name, dtype))  # blocks are expanded once, not once a share
    made: dict[str, np.ndarray] = {}  # devices may have the same share

    def read(index: Any) -> np.ndarray:
        if (key := str(index)) not in made:
            made[key] = pack(read_share(open_tensor, recipe, spec, index, layout), dtype)
            if not all_finite(made[key]):
                raise OverflowError("NaN or infinity")
        return made[key]

    try:
        return jax.make_array_from_callback(shape, sharding, read), []
    except OverflowError as error:
        arrays = [open_tensor(name) for name in recipe.names]
        return None, _find_infinite(recipe.names, arrays) or [(name, str(error)) for name in recipe.names]


def read_share(
    open_tensor: Callable[[str], np.ndarray],
    recipe: Recipe,
    spec: ParamSpec,
    index: tuple[slice, ...],
    layout: Layout | None,
) -> np.ndarray:
    """Returns a part of a plain leaf; of a mapped file no more is touched than that.

    Args:
      open_tensor: gives a tensor of the checkpoint by its name. recipe, spec: of the leaf.
      index: a slice a dimension, of the leaf as ``layout`` fills it up.
    """

    def cut(name: str, index: tuple[slice, ...]) -> np.ndarray:
        array = recipe.transform(open_tensor(name))
        return array[index] if layout is None else layout.part(spec, array, index)

    if len(recipe.names) == 1:
        return cut(recipe.names[0], index)
    inner = (slice(None), *index[1:])  # of experts, a tensor each
    return np.concatenate([cut(name, inner) for name in recipe.names[index[0]]])


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


def _to_device(
    leaves: Mapping[str, ParamSpec],
    policy: Policy,
    where: Mapping[str, jax.sharding.Sharding],
    layout: Layout | None,
) -> Finish:
    """Returns the usual ``finish``: the policy's format, filled up, row-major, put where the sharding says."""

    def finish(path: str, array: np.ndarray | Quantized) -> Any:
        spec = leaves[path]
        fmt = policy.format_of(path, spec)
        if not isinstance(array, Quantized):
            array = pack(array, fmt.dtype) if fmt.is_plain else quantize(array, spec, fmt)
        return put_leaf(array, spec, where[path], layout)

    return finish


def put_leaf(
    leaf: np.ndarray | Quantized, spec: ParamSpec, sharding: jax.sharding.Sharding, layout: Layout | None
) -> Any:
    """Returns a whole leaf on devices, filled up; a process puts its own devices' shares only.

    Args:
      leaf: on the host. spec, sharding: of the leaf. layout: that fills it up, None for none.
    """

    def put(part: np.ndarray) -> jax.Array:
        over = fit_sharding(sharding, part.shape)
        packed = pack(part, part.dtype)
        return put_shards(packed, over) if isinstance(over, NamedSharding) else jax.device_put(packed, over)

    return jax.tree.map(put, leaf if layout is None else layout.fill(spec, leaf))


def describe_leaf(
    spec: ParamSpec, fmt: Format, sharding: jax.sharding.Sharding, layout: Layout | None
) -> Any:
    """Returns a leaf that other processes have, abstract and with its shardings; arguments as for `put_leaf`."""
    whole = abstract(spec, fmt)

    def describe(part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=fit_sharding(sharding, part.shape))

    return jax.tree.map(describe, whole if layout is None else layout.fill(spec, whole))


def fit_sharding(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """Returns a weight's sharding for one of its components: dimensions that do not divide stay whole.

    Scales have fewer entries than numbers along what is summed over, one per channel.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    sizes = sharding.mesh.shape

    def ways(axis: str | tuple[str, ...] | None) -> int:
        names = (axis,) if isinstance(axis, str) else axis or ()
        return math.prod(sizes[name] for name in names)

    axes = [axis if dim % ways(axis) == 0 else None for dim, axis in zip(shape, sharding.spec, strict=False)]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


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
