"""Experts over a mesh: tokens come to them and back in every way, and none is dropped."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.sharding import parse_mesh, partition
from jaxinfer.config import MlpConfig
from jaxinfer.model.moe import choose_bucket, moe

D, F, E = 16, 8, 8
FLOAT32 = Policy.parse("float32")
AXES = {
    "router": (None, "embed"),
    "gate": ("experts", "ffn", "embed"),
    "up": ("experts", "ffn", "embed"),
    "down": ("experts", "embed", "ffn"),
}


def make(num_tokens: int, bias: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Tokens, and experts of which the last is wanted the more, the larger ``bias`` is."""
    rng = np.random.default_rng(0)
    shapes = {"router": (E, D), "gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    p = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.standard_normal((num_tokens, D)).astype(np.float32)
    x[:, 0] = 1.0
    p["router"][:, 0] = 0.0
    p["router"][-1, 0] = bias
    return jnp.asarray(x), jax.tree.map(jnp.asarray, p)


def over(mesh_text: str, cfg: MlpConfig) -> Any:
    mesh = parse_mesh(mesh_text)
    assert mesh is not None
    rows = partition(("rows",))
    specs = (rows, {name: partition(axes) for name, axes in AXES.items()}, rows)

    def run(x: jax.Array, p: Any, live: jax.Array) -> jax.Array:
        return moe(x, p, cfg, FLOAT32, live)

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False))


@pytest.mark.parametrize("bias", [0.0, 100.0], ids=["spread", "all want one"])
@pytest.mark.parametrize(
    ("mesh", "num_tokens", "k", "exchanged"),
    [
        ("expert=4", 16, 2, False),
        ("expert=8", 320, 2, True),
        ("expert=4,tensor=2", 160, 1, True),
        ("data=2,expert=4", 320, 1, True),
    ],
)
def test_the_mixture_is_that_of_one_device(mesh: str, num_tokens: int, k: int, exchanged: bool, bias: float):
    cfg = MlpConfig(16, num_experts=E, experts_per_token=k, expert_dim=F)
    x, p = make(num_tokens, bias)
    live = jnp.arange(num_tokens) % 5 > 0
    call = over(mesh, cfg)
    wanted = np.where(live[:, None], moe(x, p, cfg, FLOAT32), 0)
    np.testing.assert_allclose(call(x, p, live), wanted, atol=1e-4)
    text = call.lower(x, p, live).compile().as_text()
    assert bool(re.search(r" all-to-all(-start)?\(", text)) == exchanged
    assert bool(re.search(r" all-gather(-start)?\(", text)) != exchanged


def test_tokens_are_sent_where_two_rounds_move_no_more_than_bringing_all_everywhere():
    assert choose_bucket(1024, 2, 8) == 384
    assert choose_bucket(1024, 8, 8) == 0
    assert choose_bucket(1024, 8, 64) == 192
    assert choose_bucket(16, 1, 8) == 0
