"""One decoder for every family: which parameters it has, and the pass of a stream of tokens through its layers.

A forward runs several row blocks together (law 6): dense layers see all tokens as one stream ``[M, D]``, attention
runs a block ``[B, T]`` at a time. Layers are a tuple of stacks, each scanned over its leading axis (law 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import turn
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import linear, take_rows
from jaxinfer.arrays.quantized import abstract
from jaxinfer.arrays.sharding import num_shards, shard_index, sum_shards
from jaxinfer.arrays.specs import ParamSpec, flatten_specs, is_spec, path_name
from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.kernels.attention.api import paged_attention
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.model.cache import KVCache, Pages, token_slots, write_pages
from jaxinfer.model.layers import mlp, norm, project_out, project_qkv, softcap
from jaxinfer.model.moe import moe
from jaxinfer.model.rope import apply_rope, inv_freq, rotary


@struct.dataclass
class Block:
    """Rows of tokens that attend together: ``T = 1`` decodes, more is a prefill chunk.

    Attributes:
      tokens: ``[B, T]`` int32 ids.
      start: ``[B]`` position of each row's first token; earlier positions are in the cache.
      length: ``[B]`` tokens that count, 0 for a padding row.
      pages: ``[B, W]`` page ids of each row, enough for ``start + length`` tokens; the rest may hold anything
        outside ``[0, P)``.
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    pages: jax.Array


@dataclass(frozen=True)
class Static:
    """What a step is compiled for: everything that is not an array.

    Attributes:
      cfg: the model. policy: number formats. attention: a name from `kernels.attention`.
      context: longest sequence in tokens that the run serves; rope kinds that stretch by length read it.
    """

    cfg: ModelConfig
    policy: Policy
    attention: str = "blocked"
    context: int | None = None


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


def stack_sizes(cfg: ModelConfig, size: int, policy: Policy | None = None) -> tuple[int, ...]:
    """Returns how many layers each stack holds: at most ``size``, and only layers of one structure together.

    Args:
      cfg: the model.
      size: 1 unrolls, L makes one scan.
      policy: whose exceptions may give layers formats of their own, which part them too.
    """

    def are_alike(first: int, count: int) -> bool:
        kinds = cfg.layers[first : first + count]
        rotary_dims = {cfg.ropes[kind.rope].rotary_dim for kind in kinds if kind.rope is not None}
        formats = {_layer_formats(cfg, policy, i) for i in range(first, first + count)} if policy else ()
        return len({kind.moe for kind in kinds}) == 1 and len(rotary_dims) <= 1 and len(formats) <= 1

    stacks: list[int] = []
    for done in range(cfg.num_layers):
        if stacks and stacks[-1] < size and are_alike(done - stacks[-1], stacks[-1] + 1):
            stacks[-1] += 1
        else:
            stacks.append(1)
    return tuple(stacks)


def _layer_formats(cfg: ModelConfig, policy: Policy, layer: int) -> tuple[Format, ...]:
    """Returns the format of each parameter of a layer, in the order of its tree."""
    specs = layer_specs(cfg, cfg.layers[layer])
    return tuple(policy.format_of(f"layers.{layer}.{path}", spec) for path, spec in flatten_specs(specs))


def stack_layers(
    params: dict[str, Any], sizes: Sequence[int], stack: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Returns the parameters with ``layers`` gathered into ``stacks``, each leaf with a leading layer axis.

    A layer that stands alone (unrolled, the CPU's form) has its q, k and v joined into one matrix: three small products
    take a third longer there than one (30 layers of SmolLM2, 2 rows: 6.7 against 5.1 ms).

    Args:
      params: tree of `param_specs`; consumed (its layers are released as they are stacked).
      sizes: layers in each stack, from `stack_sizes`.
      stack: makes a stack of layers, `stack_group` when None.
    """
    layers = list(params.pop("layers"))
    stacks = []
    for size in sizes:
        group, layers = layers[:size], layers[size:]
        stacks.append((stack or stack_group)(group))
    return {**params, "stacks": tuple(stacks)}


def stacked_shapes(
    cfg: ModelConfig,
    policy: Policy,
    sizes: Sequence[int],
    fill: Callable[[ParamSpec, Any], Any] = lambda spec, leaf: leaf,
) -> dict[str, Any]:
    """Returns what `stack_layers` makes of a model's parameters, as abstract arrays.

    Args:
      cfg: the model. policy: names the format of each role. sizes: layers in each stack, from `stack_sizes`.
      fill: makes leaves the sizes that they have over a mesh (`Layout.fill`).
    """

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
        return jax.eval_shape(stack_group, [layer] * size)

    specs = param_specs(cfg)
    del specs["layers"]
    firsts = accumulate(sizes[:-1], initial=0)
    stacks = tuple(
        stack(cfg.layers[first].moe, size, _layer_formats(cfg, policy, first))
        for first, size in zip(firsts, sizes, strict=True)
    )
    return {**shapes(specs), "stacks": stacks}


def stack_group(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns layers as one stack; a layer alone has q, k, v of one format as ``qkv [N+2K, H, D]``.

    ``o`` lies as ``[D, N*H]``: its heads apart are other tiles, and a TPU v5p copied it at every layer to multiply it.
    """
    group = [{**layer, "attn": {**layer["attn"], "o": _join_inputs(layer["attn"]["o"])}} for layer in group]
    if len(group) > 1:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *group)
    attn = dict(group[0]["attn"])
    parts = [attn[name] for name in ("q", "k", "v")]
    if len({jax.tree.structure(part) for part in parts}) == 1:
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        attn = {name: leaf for name, leaf in attn.items() if name not in ("q", "k", "v")} | {"qkv": joined}
    return jax.tree.map(lambda leaf: leaf[None], {**group[0], "attn": attn})


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
    """Returns float32 logits ``[M, V]`` of the normed stream ``x [M, D]``."""
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
      The normed stream ``[M, D]``, block after block, rows of a block in order, and the cache.
    """
    cfg = static.cfg
    spans = [b.start[:, None] + jnp.arange(b.tokens.shape[1], dtype=jnp.int32) for b in blocks]
    positions = jnp.concatenate([s.reshape(-1) for s in spans])
    x = embed(params, static, jnp.concatenate([b.tokens.reshape(-1) for b in blocks]), positions)
    # Behind a barrier, or XLA computes each cosine anew in every layer that reads it.
    tables = jax.lax.optimization_barrier(
        [rotary(positions, *inv_freq(rope, static.context)) for rope in cfg.ropes]
    )
    keep = [] if keep is None else keep
    keep.append(x)
    done = 0
    new_cache = []
    for stack, pages in zip(params["stacks"], cache, strict=True):
        size = pages.k.shape[0]
        kinds = cfg.layers[done : done + size]
        x, pages = _run_stack(x, stack, pages, kinds, blocks, tables, static)
        new_cache.append(pages)
        keep.append(x)
        done += size
    return norm(x, params["final_norm"], cfg.norm), tuple(new_cache)


def _run_stack(
    x: jax.Array,
    stack: dict[str, Any],
    pages: Pages,
    kinds: Sequence[LayerKind],
    blocks: Sequence[Block],
    tables: list[tuple[jax.Array, jax.Array]],
    static: Static,
) -> tuple[jax.Array, Pages]:
    """Runs the layers of one stack: a scan with the cache in its carry, or the layer itself when there is one."""
    slots = jnp.concatenate(
        [token_slots(b.pages, b.start, b.length, b.tokens.shape[1], pages).reshape(-1) for b in blocks]
    )

    if len(kinds) == 1:
        kind = kinds[0]
        angles = None if kind.rope is None else tables[kind.rope]
        layer = jax.tree.map(lambda leaf: leaf[0], stack)
        return _layer_once(x, pages, layer, 0, kind.window, angles, blocks, slots, static)
    windows = None
    if any(kind.window for kind in kinds):
        windows = jnp.array([kind.window or 0 for kind in kinds], jnp.int32)
    ropes = sorted({-1 if kind.rope is None else kind.rope for kind in kinds})
    choices = _rope_choices(tables, ropes)
    which = jnp.array([ropes.index(-1 if kind.rope is None else kind.rope) for kind in kinds], jnp.int32)

    def body(carry, layer_in):
        layer, index, window, rope = layer_in
        angles = None if choices is None else jax.tree.map(lambda t: t[rope], choices)
        x, pages = carry
        return _layer(x, pages, layer, index, window, angles, blocks, slots, static), None

    (x, pages), _ = jax.lax.scan(body, (x, pages), (stack, jnp.arange(len(kinds)), windows, which))
    return x, pages


def _rope_choices(tables: list[tuple[jax.Array, jax.Array]], ropes: Sequence[int]):
    """Returns the cos and sin tables that a stack's layers choose from, stacked; -1 rotates by nothing."""
    if ropes == [-1]:
        return None
    like = tables[max(ropes)]
    still = (jnp.ones_like(like[0]), jnp.zeros_like(like[1]))
    return jax.tree.map(lambda *t: jnp.stack(t), *[still if r < 0 else tables[r] for r in ropes])


def _layer(
    x: jax.Array,
    pages: Pages,
    p: dict[str, Any],
    index: jax.Array | int,
    window: jax.Array | int | None,
    angles: tuple[jax.Array, jax.Array] | None,
    blocks: Sequence[Block],
    slots: jax.Array,
    static: Static,
) -> tuple[jax.Array, Pages]:
    """Runs one layer over the stream ``x [M, D]``."""
    cfg, policy = static.cfg, static.policy
    norms = p["norms"]

    def before(part: str) -> jax.Array:
        return norm(x, norms[f"pre_{part}"], cfg.norm) if cfg.norm.pre else x

    def after(part: str, y: jax.Array) -> jax.Array:
        return norm(y, norms[f"post_{part}"], cfg.norm) if cfg.norm.post else y

    q, k, v = project_qkv(before("attn"), p["attn"], cfg.attention, cfg.norm.eps, policy)
    if angles is not None:
        q, k = apply_rope(q, *angles), apply_rope(k, *angles)
    if not policy.kv.is_plain:
        q, k = turn(q, k, p["attn"].get("q_norm"), p["attn"].get("k_norm"))
    pages = write_pages(pages, index, slots, k, v)
    kv = PagedKV(pages.k, pages.v, pages.k_scale, pages.v_scale, index, pages.format)
    heads = []
    done = 0
    for block in blocks:
        B, T = block.tokens.shape
        mine = q[done : done + B * T].reshape(B, T, *q.shape[1:])
        out = paged_attention(
            static.attention, mine, kv, block.pages, block.start, block.length,
            scale=cfg.attention.scale, window=window, softcap=cfg.attention.softcap,
        )  # fmt: skip
        heads.append(out.reshape(B * T, *q.shape[1:]))
        done += B * T
    x = x + after("attn", project_out(jnp.concatenate(heads), p["attn"], policy))
    y = before("mlp")
    y = moe(y, p["moe"], cfg.mlp, policy) if "moe" in p else mlp(y, p["mlp"], cfg.mlp, policy)
    return x + after("mlp", y), pages


# Unrolled layers of one kind are traced once and called (30 of them lower in 0.2 s instead of 1.1); XLA inlines the
# calls, and the step it makes is the same in time, memory and pages written in place.
_layer_once = jax.jit(_layer, static_argnames=("index", "window", "static"))
