"""Small models of random weights, of the forms that differ most: what `jaxinfer selfcheck` runs where none is named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.rounding import quantize
from jaxinfer.arrays.sharding import partition
from jaxinfer.arrays.specs import ParamSpec, is_spec, path_name
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, NormConfig, RopeConfig
from jaxinfer.model.decoder import param_specs
from jaxinfer.model.layout import Layout

_LLAMA = ModelConfig(
    family="llama",
    vocab_size=157,
    d_model=64,
    max_len=256,
    layers=(LayerKind(),) * 2,
    attention=AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=16, scale=0.25),
    mlp=MlpConfig(ffn_dim=128),
    ropes=(RopeConfig(theta=1e4, rotary_dim=16),),
)
TOYS = {
    "llama": _LLAMA,
    "gemma3": replace(
        _LLAMA,
        family="gemma3",
        layers=(LayerKind(window=5), LayerKind(rope=1), LayerKind(window=5)),
        attention=AttentionConfig(num_heads=4, num_kv_heads=1, head_dim=32, scale=32**-0.5, qk_norm="head"),
        mlp=MlpConfig(ffn_dim=128, activation="gelu_tanh"),
        norm=NormConfig(eps=1e-6, post=True),
        ropes=(RopeConfig(theta=1e4, rotary_dim=32), RopeConfig(theta=1e6, rotary_dim=32)),
        tied=True,
        embed_scale=8.0,
        final_softcap=30.0,
    ),
    "qwen3_moe": replace(
        _LLAMA,
        family="qwen3_moe",
        layers=(LayerKind(moe=True),) * 2,
        attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=16, scale=0.25, qk_norm="head"),
        mlp=MlpConfig(ffn_dim=128, num_experts=8, experts_per_token=2, expert_dim=64),
    ),
}


@dataclass(frozen=True)
class Toy:
    """A model of random weights, as far as `weights.model.Model` is one: ``name``, ``cfg``, ``settle``, ``load``."""

    name: str
    cfg: ModelConfig
    seed: int = 0

    def settle(self, policy: Policy) -> tuple[Policy, tuple[str, ...]]:
        """Returns the policy as it is: there is no checkpoint whose formats it could keep."""
        return policy, ()

    def load(self, policy: Policy, layout: Layout | None, progress: Any = None) -> Any:
        """Returns the tree of `param_specs`, drawn anew: the same numbers for every policy and layout."""
        rng = np.random.default_rng(self.seed)

        def leaf(path: Any, spec: ParamSpec) -> Any:
            x = _draw(rng, spec)
            fmt = policy.format_of(path_name(path), spec)
            w = x.astype(fmt.dtype) if fmt.is_plain else quantize(x, spec, fmt)
            if layout is None:
                return jax.tree.map(jnp.asarray, w)
            mesh = layout.mesh

            def put(part: np.ndarray) -> jax.Array:
                return jax.device_put(part, NamedSharding(mesh, partition(spec.axes, part.shape)))

            return jax.tree.map(put, layout.fill(spec, w))

        return jax.tree_util.tree_map_with_path(leaf, param_specs(self.cfg), is_leaf=is_spec)


def _draw(rng: np.random.Generator, spec: ParamSpec) -> np.ndarray:
    """Returns a parameter of the size that keeps a stream's: matrices by their inputs, norms near 1."""
    x = rng.standard_normal(spec.shape).astype(np.float32)
    if spec.role in ("norm", "bias"):
        return (spec.role == "norm") + np.float32(0.1) * x
    if spec.role == "embedding":
        return np.float32(0.5) * x
    return x / np.float32(np.sqrt(np.prod(spec.shape[-spec.num_in :])))
