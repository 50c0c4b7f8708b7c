"""A model laid over a mesh: sizes that divide, what fills them up, and where every parameter and page lies.

Heads, ffn and vocabulary rarely divide by the devices. They are filled up with zeros, which change nothing: a head of
zeros meets columns of zeros in ``o``, an id beyond the vocabulary is never drawn. Where there are more devices than kv
heads, each kv head is there several times and its query heads are dealt out. Two kv heads of three queries on four
devices, ``.`` for a head of zeros::

    kv  0 | 0 | 1 | 1        q  0 1 | 2 . | 3 4 | 5 .

Layers lie on the devices of their stage alone. Where they do not divide by the stages, a layer of zeros, which adds
nothing to the stream, stands in for what others have more (`model.stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import fit_format, is_quantized
from jaxinfer.arrays.sharding import AXES, describe_mesh, num_shards, partition, shardings
from jaxinfer.arrays.specs import ParamSpec, flatten_specs, path_name
from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.model.cache import KVCache, cache_shapes
from jaxinfer.model.decoder import (
    layer_specs,
    layer_structures,
    param_specs,
    stack_by_part,
    stack_group,
    stacked_shapes,
    take_apart,
)
from jaxinfer.model.stages import Deal, deal_layers, stand_ins

VOCAB_UNIT = 32  # ids of a share: whole words of the bits that say which ids a request allows

Places = Mapping[tuple[str, int], np.ndarray]


@dataclass(frozen=True)
class Layout:
    """A model over a mesh.

    Attributes:
      mesh: the devices.
      whole: the model, filled up to what divides; its layers are those of all stages, one stage after the other.
      local: one device's share of it, which steps are traced for, with the layers of all stages.
      places: for a logical axis of a size, where each entry of the filled-up axis comes from, -1 for zeros; axes that
        stay as they are have none.
      deal: the layers of each stage.
    """

    mesh: Mesh
    whole: ModelConfig
    local: ModelConfig
    places: Places = field(default_factory=dict)
    deal: Deal = ()

    @property
    def share(self) -> ModelConfig:
        """One device's share, with the layers of one stage: what memory is counted by."""
        return replace(self.local, layers=self.local.layers[: len(self.deal[0])])

    @property
    def own_stages(self) -> list[int]:
        """The stages that have devices of this process."""
        here = jax.process_index()
        devices = [self.stage(number).devices.flat for number in range(len(self.deal))]
        return [n for n, each in enumerate(devices) if any(d.process_index == here for d in each)]

    def stage(self, number: int) -> Mesh:
        """Returns the devices of one stage as a mesh of the same axes."""
        return Mesh(np.take(self.mesh.devices, [number], AXES.index("stage")), AXES)

    def shardings(self, specs: dict[str, Any]) -> dict[str, Any]:
        """Returns where every parameter of `param_specs` goes: a layer to the devices of its stage."""
        stages = {layer: number for number, own in enumerate(self.deal) for layer in own}
        layers = tuple(shardings(s, self.stage(stages[layer])) for layer, s in enumerate(specs["layers"]))
        return {**shardings({**specs, "layers": ()}, self.mesh), "layers": layers}

    def fill(self, spec: ParamSpec, leaf: Any) -> Any:
        """Returns a parameter filled up.

        Args:
          spec: as the checkpoint has it. leaf: of numpy, or `Quantized`, or descriptions of these.
        """
        return jax.tree.map(lambda part: self._fill(spec, part), leaf)

    def _fill(self, spec: ParamSpec, part: Any) -> Any:
        for dim, (axis, size) in enumerate(zip(spec.axes, spec.shape, strict=True)):
            places = self.places.get((axis or "", size))
            if places is None or (part.shape[dim] == 1 and size > 1):  # a scale of all inputs
                continue
            if isinstance(part, jax.ShapeDtypeStruct):
                shape = list(part.shape)
                shape[dim] = len(places) * shape[dim] // size
                part = jax.ShapeDtypeStruct(tuple(shape), part.dtype)
            else:
                part = _take(part, places, dim, size)
        return part

    def part(self, spec: ParamSpec, array: np.ndarray, index: Sequence[slice]) -> np.ndarray:
        """Returns what a device has of a plain parameter, looking at no more of it than that.

        Args:
          spec: as the checkpoint has it. array: as the checkpoint has it. index: of the filled-up parameter.
        """
        for dim, (axis, size, cut) in enumerate(zip(spec.axes, spec.shape, index, strict=True)):
            places = self.places.get((axis or "", size))
            if places is None:
                array = array[(slice(None),) * dim + (cut,)]
        for dim, (axis, size, cut) in enumerate(zip(spec.axes, spec.shape, index, strict=True)):
            places = self.places.get((axis or "", size))
            if places is not None:
                array = _take(array, places[cut], dim, size)
        return array

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Returns how an array of these logical axes lies."""
        return NamedSharding(self.mesh, partition(axes))


def lay_out(cfg: ModelConfig, policy: Policy, mesh: Mesh) -> Layout:
    """Returns a model laid over a mesh.

    Args:
      cfg: the model. policy: settled, for groups of numbers that share a scale stay on one device.
      mesh: of `parse_mesh`.

    Raises:
      ValueError: a mesh that this model cannot lie over, and why.
    """
    a, m = cfg.attention, cfg.mlp
    name = describe_mesh(mesh)
    ways, vocab_ways, num_expert, num_stages = (
        num_shards(axis, mesh=mesh) for axis in ("heads", "vocab", "experts", "layers")
    )
    if num_expert > 1 and (not m.num_experts or m.num_experts % num_expert):
        got = f"{m.num_experts} experts, which {num_expert} do not divide" if m.num_experts else "no experts"
        raise ValueError(f"mesh {name}: the model has {got}; take expert=1, or as many as divide its experts")
    if num_stages > cfg.num_layers:
        raise ValueError(
            f"mesh {name}: {num_stages} stages, and the model has {cfg.num_layers} layers; take at most as many stages"
        )
    places: dict[tuple[str, int], np.ndarray] = {}
    q, kv = place_heads(a.num_heads, a.num_kv_heads, ways)
    if a.qk_norm == "full" and len(q) + len(kv) > a.num_heads + a.num_kv_heads:
        raise ValueError(
            f"mesh {name}: the model norms all heads together, and its {a.num_heads} query and {a.num_kv_heads} kv "
            f"heads do not divide by {ways}; take a tensor axis that divides both"
        )
    places |= {("heads", a.num_heads): q, ("kv_heads", a.num_kv_heads): kv}
    unit = ways * _ffn_unit(cfg, policy)
    sizes = {("ffn", size): unit for size in (m.ffn_dim, m.expert_dim)}
    sizes["vocab", cfg.vocab_size] = vocab_ways * VOCAB_UNIT if vocab_ways > 1 else 1
    for key, unit in sizes.items():
        places[key] = np.pad(np.arange(key[1]), (0, -key[1] % unit), constant_values=-1)
    num = {key: len(index) for key, index in places.items()}
    vocab_size = num["vocab", cfg.vocab_size]
    deal = deal_layers(layer_structures(cfg, policy), num_stages)
    both = [zip(own, stand_ins(deal), strict=True) for own in deal]
    layers = tuple(cfg.layers[there if layer < 0 else layer] for pairs in both for layer, there in pairs)

    def share(ways: int, vocab_ways: int) -> ModelConfig:
        heads = num["heads", a.num_heads] // ways, num["kv_heads", a.num_kv_heads] // ways
        attention = replace(a, num_heads=heads[0], num_kv_heads=heads[1])
        ffn_dim, expert_dim = num["ffn", m.ffn_dim] // ways, num["ffn", m.expert_dim] // ways
        mlp = replace(m, ffn_dim=ffn_dim, expert_dim=expert_dim)
        size = vocab_size // vocab_ways
        return replace(cfg, vocab_size=size, layers=layers, attention=attention, mlp=mlp)

    changed = {key: index for key, index in places.items() if not np.array_equal(index, np.arange(key[1]))}
    return Layout(mesh, share(1, 1), share(ways, vocab_ways), changed, deal)


def place_heads(num_heads: int, num_kv_heads: int, ways: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which query and kv heads lie in which places over ``ways`` devices, -1 for a head of zeros.

    Args:
      num_heads: N. num_kv_heads: K.

    Returns:
      Two lists of int; their lengths divide by ``ways``, and query heads follow the order of their kv heads.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= ways:
        copies, num_kv = 1, num_kv_heads + -num_kv_heads % ways
    else:
        num_kv = next(n for n in range(num_kv_heads, ways + 1) if ways % n == 0)
        copies = ways // num_kv
    each = -(-group // copies)  # query heads of a copy
    kv = np.pad(np.arange(num_kv_heads), (0, num_kv - num_kv_heads), constant_values=-1)
    q = np.pad(np.arange(group), (0, each * copies - group), constant_values=-1)
    heads = np.where((kv[:, None] >= 0) & (q >= 0), kv[:, None] * group + q, -1)
    return heads.reshape(-1), np.repeat(kv, copies)


def partition_params(params: Any, cfg: ModelConfig) -> Any:
    """Returns the tree of parameters with the `PartitionSpec` of every array.

    Args:
      params: of `stack_layers`, or `param_specs`'s tree with arrays or descriptions for leaves. cfg: the model.
    """
    axes = {path: spec.axes for path, spec in flatten_specs(param_specs(cfg))}
    for number in {kind.moe: number for number, kind in enumerate(cfg.layers)}.values():
        for path, spec in flatten_specs(layer_specs(cfg, cfg.layers[number])):
            axes[f"stacks.{path}"] = ("layers", *spec.axes)
    axes["stacks.attn.qkv"] = axes["stacks.attn.q"]
    axes["stacks.attn.o"] = axes["stacks.attn.o"][:-1]  # its inputs lie joined

    def lie(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if name.startswith("stacks."):
            name = "stacks." + name.split(".", 2)[2]
        return jax.tree.map(lambda part: partition(axes[name], part.shape), leaf)

    return jax.tree_util.tree_map_with_path(lie, params, is_leaf=is_quantized)


def partition_cache(cache: Any) -> Any:
    """Returns a cache's tree with the `PartitionSpec` of every array ``[l, P, Z, K*H]``."""
    return jax.tree.map(lambda pool: partition(("layers", "pages", None, "kv_heads")), cache)


def describe_params(layout: Layout, cfg: ModelConfig, policy: Policy, sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters over a mesh as abstract arrays with their shardings; arguments as for `stacked_shapes`."""
    shapes = stacked_shapes(cfg, policy, sizes, layout.fill, layout.deal)
    return _describe(layout.mesh, shapes, lambda tree: partition_params(tree, cfg))


def describe_cache(
    layout: Layout, policy: Policy, sizes: Sequence[int], num_pages: int, page_size: int
) -> KVCache:
    """Returns the cache over a mesh as abstract arrays with their shardings; arguments as for `cache_shapes`."""
    ways, every = num_shards("kv_heads", mesh=layout.mesh), [len(layout.deal) * size for size in sizes]
    # A device's own pages side by side: slabs of scales are padded on each.
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct((*s.shape[:-1], s.shape[-1] * ways), s.dtype),
        cache_shapes(layout.local, policy, every, num_pages, page_size),
    )
    return _describe(layout.mesh, shapes, partition_cache)


def make_cache(layout: Layout, *args: Any) -> KVCache:
    """Returns a cache of zeros over a mesh; arguments as for `describe_cache`."""
    shapes = describe_cache(layout, *args)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)


def _describe(mesh: Mesh, shapes: Any, cut: Callable[[Any], Any]) -> Any:
    return jax.tree.map(
        lambda s, cuts: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, cuts)),
        shapes,
        cut(shapes),
    )


def stack_over_mesh(params: dict[str, Any], sizes: Sequence[int], layout: Layout) -> dict[str, Any]:
    """Returns parameters in stacks, as `stack_layers` does, each device stacking its own shares of its own layers.

    Args:
      params: of `param_specs`, filled up, where `Layout.shardings` says; consumed. sizes: layers in each stack.
    """
    layers = dict(enumerate(params.pop("layers")))
    stacks, done = [], 0
    for size in sizes:
        columns = list(zip(*layout.deal, strict=True))[done : done + size]
        like = [layers[next(layer for layer in column if layer >= 0)] for column in columns]
        groups = [
            take_apart(
                [
                    layers[column[number]] if column[number] >= 0 else _nothing_like(other, layout, number)
                    for column, other in zip(columns, like, strict=True)
                ]
            )
            for number in layout.own_stages
        ]
        del like
        for layer in (layer for column in columns for layer in column if layer >= 0):
            del layers[layer]
        parts = []
        for number, group in zip(layout.own_stages, groups, strict=True):
            stack = partial(_stack_shares, layout, number)
            # A layer alone is soon made, by one program instead of several.
            parts.append(stack_by_part(group, stack) if size > 1 else stack(group))
        stacks.append(_join_stages(layout, parts))
        done += size
    return {**params, "stacks": tuple(stacks)}


def _nothing_like(layer: dict[str, Any], layout: Layout, stage: int) -> dict[str, Any]:
    """Returns a layer of zeros on the devices of a stage, arranged as another layer; norms of ones divide nothing."""
    mesh = layout.stage(stage)
    roles = {
        path: spec.role
        for path, spec in flatten_specs(layer_specs(layout.whole, LayerKind(moe="moe" in layer)))
    }

    def make(path: Any, leaf: Any) -> Any:
        fill = jnp.ones if roles[path_name(path)] == "norm" else jnp.zeros

        def like(part: jax.Array) -> jax.Array:
            assert isinstance(part.sharding, NamedSharding)
            return fill(part.shape, part.dtype, device=NamedSharding(mesh, part.sharding.spec))

        return jax.tree.map(like, leaf)

    return jax.tree_util.tree_map_with_path(make, layer, is_leaf=is_quantized)


def _stack_shares(layout: Layout, stage: int, group: Sequence[Any]) -> Any:
    """Returns layers of one structure as one stack on their stage: what is joined there is joined share by share."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), list(group))
    inner = {"layers": tuple(shapes)}
    outer = {"stacks": (jax.eval_shape(stack_group, shapes),)}
    cfg = replace(layout.whole, layers=(LayerKind(moe="moe" in group[0]),) * len(group))
    ins, outs = (partition_params(tree, cfg) for tree in (inner, outer))
    return _stack_over(layout.stage(stage), _frozen(list(ins["layers"])), _frozen(outs["stacks"][0]))(
        list(group)
    )


def _join_stages(layout: Layout, parts: Sequence[Any]) -> Any:
    """Returns the stages' stacks as one over the whole mesh; nothing is copied."""

    def join(*arrays: jax.Array) -> jax.Array:
        assert isinstance(arrays[0].sharding, NamedSharding)
        shape = (len(layout.deal) * arrays[0].shape[0], *arrays[0].shape[1:])
        spec = PartitionSpec("stage", *arrays[0].sharding.spec[1:])
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(layout.mesh, spec), shards)

    return parts[0] if len(layout.deal) == 1 else jax.tree.map(join, *parts)


@cache
def _stack_over(mesh: Mesh, ins: Any, outs: Any) -> Callable[[Any], Any]:
    ins, outs = (jax.tree.unflatten(tree, leaves) for leaves, tree in (ins, outs))
    return jax.jit(jax.shard_map(stack_group, mesh=mesh, in_specs=(ins,), out_specs=outs, check_vma=False))


def _frozen(tree: Any) -> tuple[tuple[PartitionSpec, ...], Any]:
    leaves, structure = jax.tree.flatten(tree)
    return tuple(leaves), structure


def describe_layout(layout: Layout, cfg: ModelConfig) -> str:
    """Returns in words what a model became to lie over its mesh."""
    whole = layout.whole
    pairs = (
        ("query heads", cfg.attention.num_heads, whole.attention.num_heads),
        ("kv heads", cfg.attention.num_kv_heads, whole.attention.num_kv_heads),
        ("ffn", cfg.mlp.ffn_dim, whole.mlp.ffn_dim),
        ("expert ffn", cfg.mlp.expert_dim, whole.mlp.expert_dim),
        ("vocabulary", cfg.vocab_size, whole.vocab_size),
        ("layers", cfg.num_layers, whole.num_layers),
    )
    runs = ", ".join(str(sum(layer >= 0 for layer in own)) for own in layout.deal)
    filled = ", ".join(f"{name} {had} -> {has}" for name, had, has in pairs if had != has)
    devices = layout.mesh.devices.flat
    return f"mesh {describe_mesh(layout.mesh)}: {layout.mesh.size} x {devices[0].device_kind}" + (
        f"; layers by stage: {runs}" * (len(layout.deal) > 1) + f"; filled up: {filled}" * bool(filled)
    )


def _ffn_unit(cfg: ModelConfig, policy: Policy) -> int:
    """Returns how many ffn numbers must stay together: those that share a scale, a byte, or a rotation."""
    unit = 1
    for path, spec in flatten_specs(param_specs(cfg)):
        if spec.axes[-1] == "ffn" and spec.role == "matrix":
            fmt = fit_format(spec, policy.format_of(path, spec))
            unit = max(unit, fmt.group or (2 if fmt.bits == 4 else 1), fmt.rotation or 1)
    return unit


def _take(part: np.ndarray, places: np.ndarray, dim: int, size: int) -> np.ndarray:
    """Returns an array with a dimension of ``size`` (or a whole fraction, of codes and scales) taken by places."""
    have = part.shape[dim]
    if have != size:  # filled up at the end only, by whole groups
        spare = len(places) * have // size - have
        return np.pad(part, [(0, spare if d == dim else 0) for d in range(part.ndim)])
    taken = np.take(part, np.maximum(places, 0), axis=dim)
    taken[(slice(None),) * dim + (places < 0,)] = 0
    return taken
