"""Trees of leaf descriptions and what is made of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.specs import ParamSpec, flatten_specs, is_spec, map_specs, random_params

SPECS = {
    "embed": ParamSpec((8, 4), ("vocab", "model"), "embedding"),
    "layers": (
        {"q": ParamSpec((4, 4), ("heads", "model")), "norm": ParamSpec((4,), (None,), "norm")},
        {
            "bias": ParamSpec((4,), (None,), "bias"),
            "router": ParamSpec((2, 4), ("expert", "model"), "router"),
        },
    ),
}


def test_every_dimension_has_an_axis():
    with pytest.raises(ValueError, match=r"2 dimensions \(4, 4\) but axes \('model',\)"):
        ParamSpec((4, 4), ("model",))


def test_leaves_have_dotted_names_in_tree_order():
    names = [name for name, _ in flatten_specs(SPECS)]
    assert names == ["embed", "layers.0.norm", "layers.0.q", "layers.1.bias", "layers.1.router"]


def test_a_map_keeps_the_tree():
    shapes = map_specs(lambda spec: spec.shape, SPECS)
    assert shapes["layers"][0]["q"] == (4, 4)
    assert not any(is_spec(leaf) for leaf in jax.tree.leaves(shapes))


def test_random_parameters_are_what_the_descriptions_say():
    params = random_params(SPECS, seed=1, dtype=jnp.dtype(jnp.bfloat16), std=0.5)
    for (name, spec), leaf in zip(flatten_specs(SPECS), jax.tree.leaves(params), strict=True):
        assert leaf.shape == spec.shape, name
        assert leaf.dtype == (jnp.float32 if spec.role in ("norm", "bias", "router") else jnp.bfloat16), name
    np.testing.assert_array_equal(params["layers"][0]["norm"], np.ones(4))
    np.testing.assert_array_equal(params["layers"][1]["bias"], np.zeros(4))
    again = random_params(SPECS, seed=1, dtype=jnp.dtype(jnp.bfloat16), std=0.5)
    other = random_params(SPECS, seed=2, dtype=jnp.dtype(jnp.bfloat16), std=0.5)
    np.testing.assert_array_equal(params["embed"], again["embed"])
    assert not np.array_equal(params["embed"], other["embed"])
    assert not np.array_equal(params["embed"].reshape(-1)[:16], params["layers"][0]["q"].reshape(-1))


def test_random_matrices_have_the_wanted_spread():
    spec = {"w": ParamSpec((100, 100), (None, None))}
    (leaf,) = jax.tree.leaves(random_params(spec, seed=0, dtype=jnp.dtype(jnp.float32), std=0.02))
    assert float(leaf.std()) == pytest.approx(0.02, rel=0.05)
    assert float(leaf.mean()) == pytest.approx(0, abs=0.001)
