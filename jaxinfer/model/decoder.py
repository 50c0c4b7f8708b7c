"""One decoder for every family: which parameters it has, and the pass of a stream of tokens through its layers.

A forward runs several row blocks together (law 6): dense layers see all tokens as one stream ``[M, D]``, attention
runs a block ``[B, T]`` at a time. Layers are a tuple of stacks, each scanned over its leading axis (law 7).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import linear, take_rows
from jaxinfer.arrays.quantized import abstract
from jaxinfer.arrays.sharding import from_last, num_shards, shard_index, sum_shards
from jaxinfer.arrays.specs import ParamSpec, flatten_specs, is_spec, path_name
from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.model.cache import KVCache
from jaxinfer.model.layers import norm, softcap
from jaxinfer.model.pipeline import run_stages
from jaxinfer.model.stacks import Block, Static, run_layers
from jaxinfer.model.stages import Deal, stand_ins


def layer_specs(cfg: ModelConfig, kind: LayerKind) -> dict[str, Any]:
    """Returns the parameter descriptions of one layer, by room: attn, mlp or moe, norms.

    Matrices are ``[*out, *in]``, as checkpoints have them, experts ``[E, out, in]``.
    """
    D, a = cfg.d_model, cfg.attention
    N, K, H = a.num_heads, a.num_kv_heads, a.head_dim
    heads = {"q": (N, "heads"), "k": (K, "kv_heads"), "v": (K, "kv_heads")}
    attn = {name: ParamSpec((n, H, D), (axis, None, "embed")) for name, (n, axis) in heads.items()}
    attn["o"] = ParamSpec((D, N, H), ("embed", "heads", None), num_in=2)
    if a.qkv_bias:
        attn |= {f"{name}_bias": ParamSpec((n, H), (axis, None), "bias") for name, (n, axis) in heads.items()}
    if a.out_bias:
        attn["o_bias"] = ParamSpec((D,), ("embed",), "bias")
    for name in ("q", "k") if a.qk_norm != "none" else ():
        n, axis = heads[name]
        full = a.qk_norm == "full"
        attn[f"{name}_norm"] = ParamSpec((n, H) if full else (H,), (axis, None) if full else (None,), "norm")
    scale = {"scale": ParamSpec((D,), ("embed",), "norm")}
    one_norm = scale | ({"bias": ParamSpec((D,), ("embed",), "bias")} if cfg.norm.kind == "layer" else {})
    places = [p for p, there in (("pre", cfg.norm.pre), ("post", cfg.norm.post)) if there]
    norms = {f"{place}_{part}": dict(one_norm) for place in places for part in ("attn", "mlp")}
    return {
        "attn": attn,
        **({"moe": _moe_specs(cfg)} if kind.moe else {"mlp": _mlp_specs(cfg)}),
        "norms": norms,
    }


def _mlp_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    D, F, m = cfg.d_model, cfg.mlp.ffn_dim, cfg.mlp
    specs = {"up": ParamSpec((F, D), ("ffn", "embed")), "down": ParamSpec((D, F), ("embed", "ffn"))}
    if m.gated:
        specs["gate"] = specs["up"]
    if m.bias:
        specs |= {f"{n}_bias": ParamSpec(s.shape[:1], s.axes[:1], "bias") for n, s in list(specs.items())}
    return specs


def _moe_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    D, E, F = cfg.d_model, cfg.mlp.num_experts, cfg.mlp.expert_dim
    up = ParamSpec((E, F, D), ("experts", "ffn", "embed"))
    down = ParamSpec((E, D, F), ("experts", "embed", "ffn"))
    return {"router": ParamSpec((E, D), (None, "embed"), "router"), "gate": up, "up": up, "down": down}


def param_specs(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the description of every parameter, layer by layer: the tree that all else is mapped from."""
    D, V = cfg.d_model, cfg.vocab_size
    embed = {"tokens": ParamSpec((V, D), ("vocab", "embed"), "embedding")}
    if cfg.learned_positions:
        embed["positions"] = ParamSpec((cfg.max_len, D), (None, "embed"), "embedding")
    final = {"scale": ParamSpec((D,), ("embed",), "norm")}
    if cfg.norm.kind == "layer":
        final["bias"] = ParamSpec((D,), ("embed",), "bias")
    specs: dict[str, Any] = {
        "embed": embed,
        "layers": tuple(layer_specs(cfg, kind) for kind in cfg.layers),
        "final_norm": final,
    }
    if not cfg.tied:
        specs["head"] = {"w": ParamSpec((V, D), ("vocab", "embed"), "head")}
    return specs


def stack_sizes(
    cfg: ModelConfig, size: int, policy: Policy | None = None, deal: Deal = ()
) -> tuple[int, ...]:
    """Returns how many layers each stack holds: at most ``size``, and only layers of one structure together.

    Args:
      cfg: the model.
      size: 1 unrolls, L makes one scan.
      policy: whose exceptions may give layers formats of their own, which part them too.
      deal: layers of each stage (`Layout.deal`), whose places are what is stacked then; () for one stage.
    """
    deal = deal or (tuple(range(cfg.num_layers)),)

    def are_alike(first: int, count: int) -> bool:
        layers = [layer for own in deal for layer in own[first : first + count] if layer >= 0]
        kinds = [cfg.layers[layer] for layer in layers]
        rotary_dims = {cfg.ropes[kind.rope].rotary_dim for kind in kinds if kind.rope is not None}
        formats = {_layer_formats(cfg, policy, layer) for layer in layers} if policy else ()
        return len({kind.moe for kind in kinds}) == 1 and len(rotary_dims) <= 1 and len(formats) <= 1

    stacks: list[int] = []
    for done in range(len(deal[0])):
        if stacks and stacks[-1] < size and are_alike(done - stacks[-1], stacks[-1] + 1):
            stacks[-1] += 1
        else:
            stacks.append(1)
    return tuple(stacks)


def layer_structures(cfg: ModelConfig, policy: Policy) -> list[Hashable]:
    """Returns for each layer what must be equal for two of them to be one on other stages; see `stack_sizes`."""
    dims = [None if kind.rope is None else cfg.ropes[kind.rope].rotary_dim for kind in cfg.layers]
    several = len(set(dims) - {None}) > 1  # a layer that rotates nothing goes with any, but not with all
    return [
        (kind.moe, dim if several else None, _layer_formats(cfg, policy, layer))
        for layer, (kind, dim) in enumerate(zip(cfg.layers, dims, strict=True))
    ]


def _layer_formats(cfg: ModelConfig, policy: Policy, layer: int) -> tuple[Format, ...]:
    """Returns the format of each parameter of a layer, in the order of its tree."""
    specs = layer_specs(cfg, cfg.layers[layer])
    return tuple(policy.format_of(f"layers.{layer}.{path}", spec) for path, spec in flatten_specs(specs))


def stack_layers(params: dict[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters with ``layers`` gathered into ``stacks``, each leaf with a leading layer axis.

    A layer's q, k and v are joined into one matrix: on a CPU three small products take a third longer than one (30
    layers of SmolLM2, 2 rows: 6.7 against 5.1 ms), and a TPU v5p reads the stream for each.

    Args:
      params: tree of `param_specs`; consumed (its layers are released as they are stacked).
      sizes: layers in each stack, from `stack_sizes`.
    """
    layers = list(params.pop("layers"))
    stacks = []
    for size in sizes:
        group, layers = layers[:size], layers[size:]
        if all(map(_is_on_host, jax.tree.leaves(group))):  # by numpy, for XLA would compile each shape
            stack = stack_group(jax.tree.map(np.asarray, group), np)
            stacks.append(jax.device_put(stack, jax.tree.leaves(group)[0].sharding))
        else:
            group = take_apart(group)
            stacks.append(stack_by_part(group, stack_group))
    return {**params, "stacks": tuple(stacks)}


def take_apart(layers: Sequence[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Returns layers for `stack_by_part` to consume, in dicts of their own."""
    return [{section: dict(parts) for section, parts in layer.items()} for layer in layers]


def stack_by_part(
    layers: list[dict[str, dict[str, Any]]], stack: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Returns layers as one stack, made part by part: as each is released, memory never holds all weights twice.

    Args:
      layers: of one structure; their parts are taken out. stack: what makes a stack of layers with some parts only.
    """
    stacked: dict[str, Any] = {}
    for section in list(layers[0]):
        names = list(layers[0][section])
        stacked[section] = {}
        # Matrices of feed-forward blocks are most of a model; attention's are joined, and norms are small.
        for some in [[name] for name in names] if section in ("mlp", "moe") else [names]:
            group = [{section: {name: layer[section].pop(name) for name in some}} for layer in layers]
            stacked[section] |= stack(group)[section] if some else {}
    return stacked


def _is_on_host(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    return isinstance(leaf.sharding, SingleDeviceSharding) and leaf.devices().pop().platform == "cpu"


def stacked_shapes(
    cfg: ModelConfig,
    policy: Policy,
    sizes: Sequence[int],
    fill: Callable[[ParamSpec, Any], Any] = lambda spec, leaf: leaf,
    deal: Deal = (),
) -> dict[str, Any]:
    """Returns what `stack_layers` makes of a model's parameters, as abstract arrays.

    Args:
      cfg: the model. policy: names the format of each role. sizes: layers in each stack, from `stack_sizes`.
      fill: makes leaves the sizes that they have over a mesh (`Layout.fill`). deal: layers of each stage, as for
        `stack_sizes`; a stack holds those of all stages, one stage after the other.
    """
    deal = deal or (tuple(range(cfg.num_layers)),)
    places = stand_ins(deal)

    def describe(spec: ParamSpec, fmt: Format) -> Any:
        return fill(spec, abstract(spec, fmt))

    def shapes(specs: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, spec: describe(spec, policy.format_of(path_name(path), spec)), specs, is_leaf=is_spec
        )

    @cache
    def stack(moe: bool, size: int, formats: tuple[Format, ...]) -> Any:
        leaves, tree = jax.tree.flatten(layer_specs(cfg, LayerKind(moe=moe)), is_leaf=is_spec)
        layer = tree.unflatten(map(describe, leaves, formats))
        own = jax.eval_shape(stack_group, [layer] * size)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((len(deal) * size, *leaf.shape[1:]), leaf.dtype), own
        )

    specs = param_specs(cfg)
    del specs["layers"]
    firsts = accumulate(sizes[:-1], initial=0)
    stacks = tuple(
        stack(cfg.layers[places[first]].moe, size, _layer_formats(cfg, policy, places[first]))
        for first, size in zip(firsts, sizes, strict=True)
    )
    return {**shapes(specs), "stacks": stacks}


def stack_group(group: Sequence[dict[str, Any]], xp: Any = jnp) -> dict[str, Any]:
    """Returns layers as one stack; ``xp`` is jax's numpy or, for layers of numpy arrays, numpy itself."""
    return jax.tree.map(lambda *leaves: xp.stack(leaves), *[_arrange(layer, xp) for layer in group])


def _arrange(layer: dict[str, Any], xp: Any) -> dict[str, Any]:
    """Returns a layer, or parts of one, with q, k and v as ``qkv [N+2K, H, D]`` where they have one format.

    Its o is ``[D, N*H]``: heads apart are other tiles, and a TPU v5p copied it at every layer to multiply it.
    """
    if "attn" not in layer:
        return layer
    attn = {name: leaf for name, leaf in layer["attn"].items() if name not in ("q", "k", "v")}
    parts = [layer["attn"][name] for name in ("q", "k", "v")]
    if len({jax.tree.structure(part) for part in parts}) == 1:
        attn["qkv"] = jax.tree.map(lambda *leaves: xp.concatenate(leaves), *parts)
    else:
        attn |= zip("qkv", parts, strict=True)
    return layer | {"attn": attn | {"o": _join_inputs(attn["o"])}}


def _join_inputs(w: Any) -> Any:
    """Returns a weight ``[out, *in]``, plain or of codes, with one axis of inputs."""
    return jax.tree.map(lambda part: part.reshape(len(part), -1), w)


def embed(params: dict[str, Any], static: Static, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the stream ``[M, D]`` of token ids ``[M]`` at ``positions [M]``, in the compute format."""
    cfg, dtype = static.cfg, static.policy.compute_dtype
    x = _look_up(params["embed"]["tokens"], tokens, dtype)
    if cfg.embed_scale != 1.0:
        x = x * jnp.asarray(cfg.embed_scale, dtype)
    if cfg.learned_positions:
        x = x + take_rows(params["embed"]["positions"], positions, dtype)
    return x


def _look_up(table: Any, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the rows of tokens; each is on the device that has its share of the vocabulary."""
    if num_shards("vocab") == 1:
        return take_rows(table, tokens, dtype)
    tokens = tokens - shard_index("vocab") * table.shape[0]
    mine = (tokens >= 0) & (tokens < table.shape[0])
    return sum_shards(jnp.where(mine[:, None], take_rows(table, tokens, dtype), 0), "vocab")


def unembed(params: dict[str, Any], static: Static, x: jax.Array) -> jax.Array:
    """Returns float32 logits ``[M, V]`` of the normed stream ``x [M, D]``, which the last stage has."""
    x = from_last(x, "layers")
    w = params["embed"]["tokens"] if static.cfg.tied else params["head"]["w"]
    return softcap(linear(x, w, static.policy, jnp.dtype(jnp.float32)), static.cfg.final_softcap)


def forward(
    params: dict[str, Any],
    cache: KVCache,
    blocks: Sequence[Block],
    static: Static,
    keep: list[jax.Array] | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs row blocks through the decoder, writing their keys and values into the cache.

    Args:
      params: tree with ``stacks`` (`stack_layers`). cache: pages; consumed.
      blocks: rows to run; their tokens form one stream of ``M = sum(B * T)`` rows.
      static: what the step is compiled for.
      keep: is given the stream ``[M, D]`` as it is embedded and as each stack leaves it; None for nothing.

    Returns:
      The normed stream ``[M, D]``, block after block, rows of a block in order, and the cache. Where a mesh has
      stages, the last one has the stream, and `unembed` takes it from there.
    """
    spans = [b.start[:, None] + jnp.arange(b.tokens.shape[1], dtype=jnp.int32) for b in blocks]
    positions = jnp.concatenate([s.reshape(-1) for s in spans])
    x = embed(params, static, jnp.concatenate([b.tokens.reshape(-1) for b in blocks]), positions)
    if keep is not None:
        keep.append(x)

    def run(x: jax.Array, cache: KVCache, blocks: Sequence[Block]) -> tuple[jax.Array, KVCache]:
        return run_layers(x, params["stacks"], cache, blocks, static, keep)

    x, cache = run(x, cache, blocks) if num_shards("layers") == 1 else run_stages(x, cache, blocks, run)
    return norm(x, params["final_norm"], static.cfg.norm), cache
