"""What lies on the devices of a run, with a mesh and without: descriptions of the weights, the cache and the slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.sharding import num_shards
from jaxinfer.config import ModelConfig
from jaxinfer.model.cache import KVCache, cache_shapes, init_cache
from jaxinfer.model.decoder import stack_layers, stacked_shapes
from jaxinfer.model.layout import Layout, describe_cache, describe_params, make_cache, stack_over_mesh
from jaxinfer.steps.slots import SlotCaps, Slots, init_slots


class State(NamedTuple):
    """The state of a run before its weights are there.

    Attributes:
      shapes: of the weights, as `stacked_shapes` gives them. cache: empty pages. slots: that ask for nothing.
    """

    shapes: dict[str, Any]
    cache: KVCache
    slots: Slots


def make_state(
    cfg: ModelConfig,
    policy: Policy,
    sizes: Sequence[int],
    pages: tuple[int, int],
    slots: tuple[int, int],
    layout: Layout | None = None,
) -> State:
    """Returns the state of a run.

    Args:
      cfg: the model. policy: number formats. sizes: layers in each stack.
      pages: P and Z, of each share of the rows. slots: R and S, of all together.
      layout: over the mesh, None for the default device.
    """
    num_pages, page_size = pages
    if layout is None:
        cache = _make_cache(cfg, policy, sizes, num_pages, page_size)
        return State(
            stacked_shapes(cfg, policy, sizes), cache, init_slots(*slots, cfg.vocab_size, SlotCaps())
        )
    num = num_shards("rows", mesh=layout.mesh)
    cache = make_cache(layout, policy, sizes, num * num_pages, page_size)
    empty = init_slots(*slots, cfg.vocab_size, SlotCaps(), num, layout.sharding("rows"))
    return State(describe_params(layout, cfg, policy, sizes), cache, empty)


def _make_cache(*args: Any) -> KVCache:
    """Returns `init_cache`; a CPU's is made by numpy, for XLA would compile each shape."""
    if jax.default_backend() != "cpu":
        return init_cache(*args)
    shapes = cache_shapes(*args)
    return jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), may_alias=False), shapes)


def describe_state(
    cfg: ModelConfig,
    policy: Policy,
    sizes: Sequence[int],
    pages: tuple[int, int],
    slots: tuple[int, int],
    over: Layout | NamedSharding,
) -> State:
    """Returns the state of a run as abstract arrays, on devices that need not be here.

    Args:
      cfg, policy, sizes, pages, slots: as for `make_state`.
      over: the layout over a mesh, or where everything lies whole.
    """
    num_pages, page_size = pages
    num = num_shards("rows", mesh=over.mesh) if isinstance(over, Layout) else 1
    empty = jax.eval_shape(lambda: init_slots(*slots, cfg.vocab_size, SlotCaps(), num))
    if isinstance(over, Layout):
        params = describe_params(over, cfg, policy, sizes)
        cache = describe_cache(over, policy, sizes, num * num_pages, page_size)
        return State(params, cache, _place(empty, over.sharding("rows")))
    params, cache = stacked_shapes(cfg, policy, sizes), cache_shapes(cfg, policy, sizes, num_pages, page_size)
    return State(*(_place(tree, over) for tree in (params, cache, empty)))


def _place(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def stack_params(
    params: dict[str, Any], sizes: Sequence[int], layout: Layout | None = None
) -> dict[str, Any]:
    """Returns parameters in stacks, each device stacking its own shares; see `stack_layers`."""
    return stack_layers(params, sizes) if layout is None else stack_over_mesh(params, sizes, layout)
