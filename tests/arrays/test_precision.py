"""Policies: what strings name them, and what each role lies in."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxinfer.arrays.precision import Policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("float32", Policy()),
        ("bf16", Policy("bfloat16", "bfloat16", "bfloat16")),
        (" Half ", Policy("float16", "float16", "float16")),
        ("weights=bf16", Policy("bfloat16", "bfloat16", "bfloat16")),
        ("compute=bfloat16,kv=float16", Policy("bfloat16", "float16", "bfloat16")),
        ("weights = bfloat16 , compute=f32", Policy("bfloat16", "float32", "float32")),
        ("kv=float16", Policy("float32", "float16", "float32")),
    ],
)
def test_a_role_left_out_takes_the_format_of_compute(text: str, policy: Policy):
    assert Policy.parse(text) == policy
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown format ''"),
        ("int9", "formats: float32, bfloat16"),
        ("weights=bf16,weights=f32", "named twice"),
        ("activations=bf16", "roles: weights, kv, compute"),
        ("weights=", "weights: unknown format"),
        ("bf16,kv=f16", "unknown"),
        ("weights=bf16,", "unknown"),
    ],
)
def test_other_strings_are_refused_with_what_there_is(text: str, says: str):
    with pytest.raises(ValueError, match=says):
        Policy.parse(text)


def test_norms_biases_and_routers_stay_float32():
    policy = Policy.parse("bfloat16")
    assert {policy.dtype_of(role) for role in ("norm", "bias", "router")} == {jnp.dtype(jnp.float32)}
    assert {policy.dtype_of(role) for role in ("matrix", "embedding", "head")} == {jnp.dtype(jnp.bfloat16)}
    assert (policy.compute_dtype, policy.kv_dtype) == (jnp.bfloat16, jnp.bfloat16)
