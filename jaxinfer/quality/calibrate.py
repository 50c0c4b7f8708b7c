"""A model's weights rounded one layer after the other, each for the inputs that the layers before it give it.

The inputs are those of the model as it is rounded so far, so that a layer makes good what the ones before it lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize, linear
from jaxinfer.arrays.quantized import Quantized, abstract, fit_format, is_quantized
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.specs import ParamSpec, is_spec, path_name
from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.kernels.attention.api import choose_attention, paged_attention
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.model.cache import init_cache, write_pages
from jaxinfer.model.decoder import Static, embed, param_specs
from jaxinfer.model.layers import mlp_hidden, norm, project_out, project_qkv
from jaxinfer.model.moe import moe
from jaxinfer.model.rope import apply_rope, inv_freq, rotary
from jaxinfer.quality.gptq import round_weight

_PAGE = 16
_BATCH = 2048  # tokens that run together
_FLOAT32 = Policy.parse("float32")
# Which input a weight of a layer multiplies; experts, of which each sees tokens of its own, are not listed.
_INPUTS = {
    "attn.q": "attn", "attn.k": "attn", "attn.v": "attn", "attn.o": "heads",
    "mlp.up": "mlp", "mlp.gate": "mlp", "mlp.down": "hidden",
}  # fmt: skip

Moments = dict[str, np.ndarray]


def calibrate(
    cfg: ModelConfig,
    params: dict[str, Any],
    policy: Policy,
    windows: np.ndarray,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Rounds a model's weights to the formats of a policy.

    Args:
      cfg: the model.
      params: its tree in float32, on the device; a layer's old weights are let go of as it is rounded.
      policy: names the formats; plain ones are cast.
      windows: ``[n, T]`` token ids that the model reads meanwhile.
      tick: called after each layer.

    Returns:
      The tree of `param_specs` with a `Quantized` of numpy arrays for each weight of codes.
    """
    attention, _ = choose_attention("auto", cfg.attention, _FLOAT32)
    specs, static = param_specs(cfg), Static(cfg, _FLOAT32, attention, windows.shape[1])
    rows = max(1, _BATCH // windows.shape[1])
    batches = [windows[at : at + rows] for at in range(0, len(windows), rows)]
    streams = [embed_windows(params, static, batch) for batch in batches]
    layers = list(params["layers"])
    made: list[Any] = []
    for i, kind in enumerate(cfg.layers):
        layer, layers[i] = layers[i], None
        moments = _sum(run_layer(x, layer, kind, static)[1] for x in streams)
        rounded = _round_all(layer, specs["layers"][i], policy, f"layers.{i}", moments)
        read = jax.tree.map(_read, rounded, is_leaf=is_quantized)
        streams = [run_layer(x, read, kind, static, watch=False)[0] for x in streams]
        made.append(rounded)
        tick()
    rest = {name: part for name, part in params.items() if name != "layers"}
    final = _sum(
        {"final": _moment(norm(x.reshape(-1, cfg.d_model), rest["final_norm"], cfg.norm))} for x in streams
    )
    rest_specs = {name: part for name, part in specs.items() if name != "layers"}
    return {**_round_all(rest, rest_specs, policy, "", final), "layers": tuple(made)}


@partial(jax.jit, static_argnames=("kind", "static", "watch"))
def run_layer(
    x: jax.Array, p: dict[str, Any], kind: LayerKind, static: Static, watch: bool = True
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs one layer over whole windows, as `model.decoder` does, and sums up what its weights multiply.

    Args:
      x: ``[B, T, D]`` stream. p: the layer's parameters. kind: of the layer. static: what is compiled for.
      watch: whether to sum up, which costs as much as the layer.

    Returns:
      The stream after the layer, and ``sum(x x^T)`` of each of its inputs, ``[in, in]`` float32.
    """
    cfg, policy = static.cfg, static.policy
    B, T, D = x.shape
    x, seen, norms = x.reshape(B * T, D), {}, p["norms"]

    def before(part: str) -> jax.Array:
        seen[part] = norm(x, norms[f"pre_{part}"], cfg.norm) if cfg.norm.pre else x
        return seen[part]

    def after(part: str, y: jax.Array) -> jax.Array:
        return norm(y, norms[f"post_{part}"], cfg.norm) if cfg.norm.post else y

    q, k, v = project_qkv(before("attn"), p["attn"], cfg.attention, cfg.norm.eps, policy)
    if kind.rope is not None:
        angles = rotary(jnp.tile(jnp.arange(T), B), *inv_freq(cfg.ropes[kind.rope], static.context))
        q, k = apply_rope(q, *angles), apply_rope(k, *angles)
    seen["heads"] = _attend(q.reshape(B, T, *q.shape[1:]), k, v, kind, static)
    attn = {**p["attn"], "o": p["attn"]["o"].reshape(D, -1)}
    x = x + after("attn", project_out(seen["heads"], attn, policy))
    y = before("mlp")
    if kind.moe:
        y = moe(y, p["moe"], cfg.mlp, policy)
    else:
        seen["hidden"] = mlp_hidden(y, p["mlp"], cfg.mlp, policy)
        y = linear(seen["hidden"], p["mlp"]["down"], policy)
        y = y + p["mlp"]["down_bias"] if cfg.mlp.bias else y
    x = x + after("mlp", y)
    return x.reshape(B, T, D), {name: _moment(part) for name, part in seen.items() if watch}


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, kind: LayerKind, static: Static) -> jax.Array:
    """Returns the heads' outputs ``[M, N*H]`` of queries ``[B, T, N, H]`` and their keys and values ``[M, K, H]``."""
    cfg, (B, T, *_) = static.cfg, q.shape
    width = -(-T // _PAGE)
    (pages,) = init_cache(cfg, static.policy, (1,), B * width, _PAGE)
    table = jnp.arange(B * width, dtype=jnp.int32).reshape(B, width)
    slots = jnp.arange(B * width * _PAGE, dtype=jnp.int32).reshape(B, -1)[:, :T].reshape(-1)
    pages = write_pages(pages, 0, slots, k, v)
    kv = PagedKV(pages.k, pages.v, pages.k_scale, pages.v_scale, 0, pages.format, pages.slab)
    out = paged_attention(
        static.attention, q, kv, table, jnp.zeros(B, jnp.int32), jnp.full(B, T, jnp.int32),
        scale=cfg.attention.scale, window=kind.window, softcap=cfg.attention.softcap,
    )  # fmt: skip
    return out.reshape(B * T, -1)


def _moment(x: jax.Array) -> jax.Array:
    return jnp.einsum("mi,mj->ij", x, x, precision="highest")


def _sum(parts: Any) -> Moments:
    """Returns moments of batches added up, float64."""
    total: Moments = {}
    for part in parts:
        for name, moment in part.items():
            total[name] = total.get(name, 0) + np.asarray(moment, np.float64)
    return total


def embed_windows(params: dict[str, Any], static: Static, batch: np.ndarray) -> jax.Array:
    """Returns the stream ``[B, T, D]`` of token ids ``[B, T]``."""
    B, T = batch.shape
    positions = jnp.tile(jnp.arange(T, dtype=jnp.int32), B)
    return embed(params, static, jnp.asarray(batch.reshape(-1), jnp.int32), positions).reshape(B, T, -1)


def _round_all(
    params: Any, specs: Any, policy: Policy, prefix: str, moments: Mapping[str, np.ndarray]
) -> Any:
    """Returns a subtree of parameters in a policy's formats."""

    def make(key: tuple[Any, ...], spec: ParamSpec, leaf: jax.Array) -> Any:
        path = path_name(key)
        fmt = fit_format(spec, policy.format_of(f"{prefix}.{path}" if prefix else path, spec))
        if fmt.is_plain:
            return np.asarray(leaf).astype(fmt.dtype)
        # The head multiplies the final stream, and so does an embedding that is one.
        seen = _INPUTS.get(path) if prefix else "final" if _is_head(path, specs) else None
        return round_leaf(np.asarray(leaf), spec, fmt, moments.get(seen or ""))

    return jax.tree_util.tree_map_with_path(make, specs, params, is_leaf=is_spec)


def _is_head(path: str, specs: Mapping[str, Any]) -> bool:
    return path == ("head.w" if "head" in specs else "embed.tokens")


def round_leaf(w: np.ndarray, spec: ParamSpec, fmt: Format, moment: np.ndarray | None) -> Quantized:
    """Returns `round_weight` of a parameter of any rank: ``[*out, *in]`` with ``moment`` over its flat inputs.

    8 bits are rounded to nearest: there is little to gain, and tables of them are long.
    """
    if fmt.bits == 8:
        return quantize(w, spec, fmt)
    num_out = int(np.prod(spec.shape[: len(spec.shape) - spec.num_in]))
    made = round_weight(np.asarray(w, np.float32).reshape(num_out, -1), moment, fmt)
    return jax.tree.map(lambda part, like: part.reshape(like.shape), made, abstract(spec, fmt))


def _read(leaf: Any) -> jax.Array:
    """Returns what a rounded parameter stands for, float32 on the device."""
    return dequantize(leaf, jnp.dtype(jnp.float32)) if is_quantized(leaf) else jnp.asarray(leaf, jnp.float32)


def pick_windows(ids: Sequence[int], length: int, count: int, bos_id: int | None) -> np.ndarray:
    """Returns windows spread evenly over a text, ``[n, T]``; where it begins with BOS, each does.

    Args:
      ids: of the text. length: T of a window at most, count: n at most; a short text gives shorter and fewer ones.
      bos_id: the tokenizer's, None for one without.
    """
    bos = list(ids[:1]) if ids and ids[0] == bos_id else []
    body = ids[len(bos) :]
    inner = min(length - len(bos), len(body))
    count = max(1, min(count, len(body) // max(inner, 1)))
    starts = np.linspace(0, len(body) - inner, count).astype(int)
    return np.array([[*bos, *body[start : start + inner]] for start in starts], np.int32)
