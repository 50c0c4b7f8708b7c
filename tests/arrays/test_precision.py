"""Policies: what strings name them, what each parameter lies in, and what cannot be."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.arrays.formats import CODED, FLOAT32, PLAIN, Format
from jaxinfer.arrays.precision import ACTS, ALIASES, Policy
from jaxinfer.arrays.specs import ParamSpec

BF16, F16, INT8, INT4, ROTATED = (Format.parse(text) for text in ("bf16", "f16", "int8", "int4", "int8:rot"))
INT8_R64 = Format("int8", rotation=64)
plain = st.sampled_from([Format(kind) for kind in PLAIN])
coded = st.sampled_from([Format(k, g) for k in CODED for g in (None, 32) if (k, g) != ("nvfp4", 32)])
rotated = st.sampled_from([Format("int8", g, rotation=r) for g in (None, 32) for r in (0, 64, 576)])
pages = plain | coded
formats = pages | rotated
patterns = st.sampled_from(["layers.0", "layers.1.attn", "*.down", "layers.*.attn.?", "*.gate"])


def same(fmt: Format) -> Policy:
    return Policy(fmt, fmt, fmt, fmt, compute=str(fmt))


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("float32", Policy()),
        ("bf16", same(BF16)),
        (" Half ", same(F16)),
        ("weights=bf16", same(BF16)),
        ("compute=bfloat16,kv=float16", Policy(BF16, BF16, BF16, F16, compute="bfloat16")),
        ("weights = bfloat16 , compute=f32", Policy(BF16, BF16, BF16)),
        ("kv=float16", Policy(kv=F16)),
        ("bf16,kv=f16", Policy(BF16, BF16, BF16, F16, compute="bfloat16")),
        ("w8a8", Policy(ROTATED, ROTATED, ROTATED, act="int8")),
        ("weights=int8,act=int8", Policy(INT8, INT8, INT8, act="int8")),
        ("w8a8,*.down=int8:r64", Policy(*[ROTATED] * 3, act="int8", exceptions=(("*.down", INT8_R64),))),
        ("w8a8,kv8,compute=bf16", Policy(ROTATED, ROTATED, ROTATED, INT8, "int8", "bfloat16")),
        ("bf16,weights=int8", Policy(INT8, INT8, INT8, BF16, compute="bfloat16")),
        ("w4a16", Policy(INT4, INT8, INT8)),
        ("w4a16,lm_head=bf16", Policy(INT4, BF16, BF16)),
        ("w4a16,head=int4:g32,embed=bf16", Policy(INT4, BF16, Format("int4", 32))),
        ("w4a8,layers.0=bf16", Policy(INT4, INT8, INT8, act="int8", exceptions=(("layers.0", BF16),))),
        ("weights=checkpoint", Policy(keep=True)),
        (
            "bf16,weights=Checkpoint,act=int8,layers.0=f16",
            Policy(*[BF16] * 4, act="int8", compute="bfloat16", exceptions=(("layers.0", F16),), keep=True),
        ),
        ("weights=checkpoint,lm_head=int8", Policy(embedding=INT8, head=INT8, keep=True)),
        ("weights=fp8,act=fp8", Policy(*[Format("fp8_e4m3")] * 3, act="fp8_e4m3")),
    ],
)
def test_a_role_left_out_takes_the_format_of_another(text: str, policy: Policy):
    assert Policy.parse(text) == policy
    assert Policy.parse(str(policy)) == policy


def test_what_a_string_leaves_open_is_the_callers():
    assert Policy.parse("kv8", "bfloat16") == Policy(BF16, BF16, BF16, INT8, compute="bfloat16")
    assert Policy.parse("w8a8", "bfloat16").compute == "bfloat16"
    assert Policy.parse("float32", "bfloat16") == Policy()


@given(
    st.tuples(formats, formats, formats, pages),
    st.sampled_from(list(ACTS)),
    st.sampled_from(list(PLAIN)),
    st.lists(st.tuples(patterns, formats), max_size=3, unique_by=lambda e: e[0]),
)
def test_a_policy_is_named_by_its_string_or_cannot_be(roles, act, compute, exceptions):
    """And what is refused is exactly what a format of activations does not multiply."""
    weights, embedding, head, kv = roles
    kinds = {f.kind for f in (weights, embedding, head, *(f for _, f in exceptions)) if not f.is_plain}
    possible = not ACTS[act] or (kinds and kinds <= set(ACTS[act]))
    if not possible:
        with pytest.raises(ValueError, match=f"act={act} multiplies weights of .* take such weights"):
            Policy(weights, embedding, head, kv, act, compute, tuple(exceptions))
        return
    policy = Policy(weights, embedding, head, kv, act, compute, tuple(exceptions))
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)


@pytest.mark.parametrize("alias", ALIASES)
def test_every_word_is_a_policy(alias: str):
    assert Policy.parse(alias) == Policy.parse(ALIASES[alias])
    assert Policy.parse(str(Policy.parse(alias))) == Policy.parse(alias)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown format ''"),
        ("int9", "formats: float32, bfloat16"),
        ("int8", "no format for all roles; say weights=int8, or a word: w8a16"),
        ("weights=bf16,weights=f32", "named twice"),
        ("w8a8,weights=int4", "named twice"),
        ("bf16,f16", "named twice"),
        ("biases=bf16", "roles: weights, embedding, head, kv, act, compute"),
        ("weights=", "weights: unknown format"),
        ("weights=bf16,", "unknown"),
        ("compute=int8", "compute: got int8; must be one of float32"),
        ("act=int4", "act: got 'int4'; must be one of compute, int8, fp8_e4m3"),
        ("act=int8", "act=int8 multiplies weights of int8 or int4, got float32"),
        ("weights=fp8,act=int8", "int8 or int4, got fp8_e4m3"),
        ("w8a8,layers.0=mxfp4", "int8 or int4, got int8:rot, mxfp4"),
        ("weights=int8,act=fp8", "fp8_e4m3 or fp8_e5m2, got int8"),
        ("kv=int4:g32:zero", "pages have no offsets"),
        ("kv=int8:rot", "keys of codes are always rotated"),
        ("weights=int4:zero:g7", "power of two"),
    ],
)
def test_other_strings_are_refused_with_what_there_is(text: str, says: str):
    with pytest.raises(ValueError, match=says):
        Policy.parse(text)


def test_norms_biases_and_routers_stay_float32():
    policy = Policy.parse("w8a8,*=int8")
    for role in ("norm", "bias", "router"):
        assert policy.format_of("layers.0.norms.pre_attn.scale", ParamSpec((4,), (None,), role)) == FLOAT32
        assert policy.dtype_of(role) == jnp.float32
    policy = Policy.parse("bfloat16")
    assert {policy.dtype_of(role) for role in ("matrix", "embedding", "head")} == {jnp.dtype(jnp.bfloat16)}
    assert (policy.compute_dtype, policy.kv_dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_the_last_exception_that_matches_holds():
    policy = Policy.parse("w4a16,layers.1=int8,*.down=bf16,layers.1.mlp.down=f16")
    matrix = ParamSpec((8, 8), (None, None))
    paths = {
        "layers.0.mlp.up": INT4,
        "layers.0.mlp.down": BF16,
        "layers.1.mlp.up": INT8,
        "layers.1.mlp.down": F16,
        "layers.11.mlp.up": INT4,
    }
    assert {path: policy.format_of(path, matrix) for path in paths} == paths
    assert policy.format_of("embed.tokens", ParamSpec((8, 8), (None, None), "embedding")) == INT8


def test_a_model_is_held_against_the_policy():
    paths = ("embed.tokens", "layers.0.mlp.up")
    Policy.parse("w4a16,layers.0=int8").check_model(paths, tied=True)
    with pytest.raises(ValueError, match=r"'layers.7' matches no parameter; paths are such as embed.tokens"):
        Policy.parse("w4a16,layers.7=int8").check_model(paths, tied=False)
    untied = Policy.parse("w4a16,head=int8,embedding=bf16")
    untied.check_model(paths, tied=False)
    with pytest.raises(ValueError, match="got embedding=bfloat16 and head=int8; name one of them"):
        untied.check_model(paths, tied=True)
