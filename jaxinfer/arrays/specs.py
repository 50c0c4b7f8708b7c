"""Trees of leaf descriptions: one tree says shape, logical axes and role; everything else is a tree-map over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

Role = Literal["matrix", "embedding", "head", "router", "norm", "bias"]
FLOAT32_ROLES: tuple[Role, ...] = ("router", "norm", "bias")


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, described.

    Attributes:
      shape: its dimensions.
      axes: a logical axis name for each dimension (None is never sharded); sharding.py maps them to mesh axes.
      role: what the precision policy asks by.
      num_in: how many trailing dimensions a product sums over.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: Role = "matrix"
    num_in: int = 1

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"ParamSpec: {len(self.shape)} dimensions {self.shape} but axes {self.axes}")


def is_spec(node: Any) -> bool:
    """Returns whether a tree node is a leaf description."""
    return isinstance(node, ParamSpec)


def map_specs(fn: Callable[[ParamSpec], Any], specs: Any) -> Any:
    """Returns the tree with every `ParamSpec` replaced by ``fn(spec)``."""
    return jax.tree.map(fn, specs, is_leaf=is_spec)


def flatten_specs(specs: Any) -> Iterator[tuple[str, ParamSpec]]:
    """Yields ``("layers.3.attn.q", spec)`` for every leaf, in tree order."""
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        yield path_name(path), spec


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a key path as dotted text, e.g. ``layers.3.attn.q``."""
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def random_params(specs: Any, seed: int, dtype: jnp.dtype, std: float = 0.02) -> Any:
    """Returns parameters drawn at random, as a spec tree wants them: matrices normal, norms one, biases zero.

    Args:
      specs: tree of `ParamSpec`.
      seed: of the draw.
      dtype: of the matrices; norms, biases and routers are float32.
      std: standard deviation of the matrices.
    """
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        if spec.role == "norm":
            return jnp.ones(spec.shape, jnp.float32)
        if spec.role == "bias":
            return jnp.zeros(spec.shape, jnp.float32)
        wanted = jnp.float32 if spec.role in FLOAT32_ROLES else dtype
        return (std * jax.random.normal(key, spec.shape, jnp.float32)).astype(wanted)

    return jax.tree.unflatten(tree, [draw(s, k) for s, k in zip(leaves, keys, strict=True)])
