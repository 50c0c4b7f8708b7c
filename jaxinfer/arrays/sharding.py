"""Meshes: devices in rows of named axes, the one table of which logical axis lies over which, and sums across them.

A step under a mesh is one program that every device runs on its own share (`jax.shard_map`, all axes by hand): arrays
have the sizes of a share, and what has to cross devices says so by `sum_shards` and its kin. They name logical axes,
and do nothing where no mesh lies under these, so that model code is the same with a mesh and without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.arrays.specs import map_specs

# Outermost first: neighbours along the last are closest, and they talk most.
AXES = ("data", "stage", "expert", "tensor")
# The experts' devices have rows of their own: a mixture brings tokens to their experts, and back.
# Stages share the vocabulary too: embedding and head would lie idle, and in memory, on all but one of them.
RULES: dict[str, tuple[str, ...]] = {
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
    "vocab": ("stage", "tensor"),
    "experts": ("expert",),
    "layers": ("stage",),
    "rows": ("data", "expert"),
    "pages": ("data", "expert"),
    "page_content": ("stage", "tensor"),
    "embed": (),
}


def parse_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Returns the mesh that a string names, over the first devices.

    Args:
      text: ``tensor=4,data=2``: ways along each of `AXES`, 1 where left out; "" for one device and no mesh.
      devices: to take; None for all of this process's platform.

    Raises:
      ValueError: an unknown axis, a count that is none, or more devices than there are.
    """
    ways: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = (piece.strip() for piece in part.partition("="))
        if name not in AXES or name in ways:
            fault = "is named twice" if name in ways else "is unknown"
            raise ValueError(
                f"mesh: axis {name!r} of {text!r} {fault}; axes: {', '.join(AXES)}, as tensor=4,data=2"
            )
        if not (count.isascii() and count.isdigit() and int(count)):
            raise ValueError(f"mesh: got {part!r}, must be a whole number of devices, as {name}=2")
        ways[name] = int(count)
    if not ways:
        return None
    devices = jax.devices() if devices is None else devices
    needed = math.prod(ways.values())
    if needed > len(devices):
        raise ValueError(
            f"mesh: {text!r} takes {needed} devices, there are {len(devices)} ({devices[0].device_kind}); name at most "
            "these (virtual ones on a CPU: jax_num_cpu_devices)"
        )
    shape = tuple(ways.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, devices=devices[:needed], axis_types=(AxisType.Auto,) * len(AXES))


def describe_mesh(mesh: Mesh) -> str:
    """Returns a mesh as `parse_mesh` reads it, axes of 1 left out."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "tensor=1"


def partition(axes: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
    """Returns how an array lies over a mesh.

    Args:
      axes: the logical axis of each dimension, None for one that every device has whole.
      shape: of the array; a dimension of 1 (the scales of a weight's inputs) is whole. None for none of these.

    Raises:
      ValueError: an axis that no rule knows, or two that claim one mesh axis.
    """
    claimed: dict[str, str] = {}
    names: list[tuple[str, ...] | None] = []
    for number, axis in enumerate(axes):
        if axis is not None and axis not in RULES:
            raise ValueError(
                f"no rule for the logical axis {axis!r} of {tuple(axes)}; rules: {', '.join(RULES)}"
            )
        rule = () if axis is None else RULES[axis]
        for name in rule:
            if name in claimed:
                raise ValueError(
                    f"{claimed[name]!r} and {axis!r} of {tuple(axes)} both claim the mesh axis {name!r}"
                )
            claimed[name] = str(axis)
        names.append(None if not rule or (shape is not None and shape[number] == 1) else rule)
    return PartitionSpec(*names)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """Returns the tree with every `ParamSpec` replaced by its sharding; errors as of `partition`."""
    return map_specs(lambda spec: NamedSharding(mesh, partition(spec.axes)), specs)


def spans_hosts(mesh: Mesh | None) -> bool:
    """Returns whether devices of a mesh are another process's."""
    return mesh is not None and any(one.process_index != jax.process_index() for one in mesh.devices.flat)


def check_processes(mesh: Mesh | None, text: str) -> None:
    """Refuses a mesh, named by ``text``, that leaves a process of this run without a device.

    Raises:
      ValueError: it does.
    """
    num = jax.process_count()
    if num > 1 and (mesh is None or len({one.process_index for one in mesh.devices.flat}) < num):
        count = jax.device_count()
        raise ValueError(
            f"mesh: got {text!r}, which leaves some of {num} processes without a device; name a mesh over all {count} "
            f"devices, as tensor={count}"
        )


def put_shards(array: Any, sharding: NamedSharding) -> jax.Array:
    """Returns a host array on devices, of which other processes have theirs from the same array of their own.

    `jax.device_put` would first have all processes compare it: a collective, and 2 ms on CPU.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    with jax.transfer_guard("allow"):  # as explicit as `device_put`, but not so called
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def num_shards(*axes: str, mesh: Any = None) -> int:
    """Returns into how many shares logical axes are cut.

    Args:
      axes: names of `RULES`. mesh: None for the one that is traced for, which is 1 share where there is none.
    """
    sizes = _sizes() if mesh is None else mesh.shape
    return math.prod(sizes.get(name, 1) for name in {name for axis in axes for name in RULES[axis]})


def shard_index(axis: str) -> jax.Array | int:
    """Returns which share of a logical axis this device has, counted from 0."""
    names = _names(axis)
    return jax.lax.axis_index(names) if names else 0


def sum_shards(x: jax.Array, *axes: str) -> jax.Array:
    """Returns the sum of all shares' ``x``, on every device."""
    names = _names(*axes)
    return jax.lax.psum(x, names) if names else x


def max_shards(x: jax.Array, *axes: str) -> jax.Array:
    """Returns the largest of all shares' ``x``, on every device; of NaN nothing is promised."""
    names = _names(*axes)
    return jax.lax.pmax(x, names) if names else x


def min_shards(x: jax.Array, *axes: str) -> jax.Array:
    """Returns the smallest of all shares' ``x``, on every device; of NaN nothing is promised."""
    names = _names(*axes)
    return jax.lax.pmin(x, names) if names else x


def gather_shards(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Returns all shares' ``x`` side by side along a dimension, on every device."""
    names = _names(axis)
    return jax.lax.all_gather(x, names, axis=dim, tiled=True) if names else x


def scatter_sum(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Returns this device's part, along a dimension, of the sum of all shares' ``x``: what `gather_shards` undoes."""
    names = _names(axis)
    return jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if names else x


def swap_shards(x: jax.Array, axis: str) -> jax.Array:
    """Returns, share after share, what each one's ``x`` has for this one: equal parts of the first dimension."""
    names = _names(axis)
    return jax.lax.all_to_all(x, names, 0, 0, tiled=True) if names else x


def pass_on(x: jax.Array, axis: str) -> jax.Array:
    """Returns the ``x`` of the share before this one, zeros on the first."""
    (name,) = _names(axis)
    size = _sizes()[name]
    return jax.lax.ppermute(x, name, [(i, i + 1) for i in range(size - 1)])


def from_last(x: jax.Array, axis: str) -> jax.Array:
    """Returns the last share's ``x``, on every device."""
    size = num_shards(axis)
    return x if size == 1 else sum_shards(jnp.where(shard_index(axis) == size - 1, x, 0), axis)


def _sizes() -> dict[str, int]:
    """Returns the sizes of the mesh axes that the code being traced runs a share of."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.manual_axes if name in AXES}


def _names(*axes: str) -> tuple[str, ...]:
    sizes, wanted = _sizes(), {name for axis in axes for name in RULES[axis]}
    return tuple(name for name in AXES if name in wanted and sizes.get(name, 1) > 1)
