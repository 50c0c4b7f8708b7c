"""KV pages of every format: what they take, what a write leaves in them, and copies of them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.arrays.pages import decode, from_slab, scale_slab, token_widths, value_slab
from jaxinfer.arrays.precision import Policy
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, RopeConfig
from jaxinfer.model.cache import (
    Pages,
    cache_shapes,
    copy_widths,
    init_cache,
    page_bytes,
    read_pages,
    replace_pages,
    write_pages,
)

PLAIN = ["float32", "bfloat16", "float16"]
CODED = ["int8", "fp8_e4m3", "fp8_e5m2", "int4", "mxfp4", "nvfp4"]
WRITE = jax.jit(write_pages)
DECODE = jax.jit(decode, static_argnums=(2, 3, 4))


def config(K: int, H: int, num_layers: int = 2) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=97,
        d_model=32,
        max_len=128,
        layers=(LayerKind(),) * num_layers,
        attention=AttentionConfig(2 * K, K, H, H**-0.5),
        mlp=MlpConfig(48),
        ropes=(RopeConfig(1e4, H),),
    )


def policy_of(kv: str) -> Policy:
    return Policy.parse(f"kv={kv},compute=float32")


def numbers_of(pages: Pages, K: int, H: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and values of all pages, ``[l, P, Z, K, H]`` float64."""
    both = ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
    k, v = (np.asarray(DECODE(*pool, pages.format, K, H), np.float64) for pool in both)
    return k, v


def write(kv: str, x: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Returns what is left of ``x [M, K, H]`` that is written as keys and values of a page of its own."""
    M, K, H = x.shape
    pages = init_cache(config(K, H), policy_of(kv), (1,), 1, M)[0]
    new = jnp.asarray(x).astype(dtype)
    k, v = numbers_of(WRITE(pages, 0, jnp.arange(M), new, new), K, H)
    np.testing.assert_array_equal(k, v)
    return k[0, 0]


@pytest.mark.parametrize("kv", PLAIN + CODED)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_page_bytes_are_those_of_the_arrays(kv: str, head_dim: int):
    cfg, policy = config(3, head_dim), policy_of(kv)
    cache = cache_shapes(cfg, policy, (1, 1), 7, 16)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert page_bytes(cfg, policy, 16) * 7 == total
    assert sum(width * dtype.itemsize for width, dtype in copy_widths(cache)) * 7 == total


@pytest.mark.parametrize(("kv", "least"), [(kv, 1.9 if "8" in kv else 3.5) for kv in CODED])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_budget_holds_more_tokens(kv: str, least: float, head_dim: int):
    cfg = config(2, head_dim)
    assert page_bytes(cfg, policy_of("bfloat16"), 16) >= least * page_bytes(cfg, policy_of(kv), 16)


@pytest.mark.parametrize("kv", PLAIN + CODED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_broken_request_does_not_reach_the_next_through_its_pages(kv: str, dtype: str):
    """NaN and overflow saturate on the way into a page, so lanes that are masked cannot spread them."""
    bad = np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)[:, None, None] * np.ones(
        (4, 2, 32), np.float32
    )
    bad[0, :, 16:] = np.inf
    got = write(kv, bad, dtype)
    assert np.isfinite(got).all()
    assert np.isfinite(got.astype(jnp.bfloat16 if dtype == "bfloat16" else dtype)).all()
    assert (got[0, :, :16] == 0).all()
    assert (got[1] > 1e3).all()
    assert (got[2] < -1e3).all()
    assert (got[3] > 1e3).all()


@pytest.mark.parametrize("kv", CODED)
def test_trap_26_an_outlier_spoils_no_other_token(kv: str):
    x = np.random.default_rng(0).standard_normal((7, 2, 64)).astype(np.float32)
    want = write(kv, x)
    spoilt = x.copy()
    spoilt[[0, 2, 4], 1, [5, 0, 63]] = [np.inf, np.nan, -1e30]
    got = write(kv, spoilt)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[[1, 3, 5, 6]], want[[1, 3, 5, 6]])
    np.testing.assert_array_equal(got[:, 0], want[:, 0])


@pytest.mark.parametrize("kv", CODED)
@pytest.mark.parametrize("largest", [447.0, 448.0, 464.0, 465.0, 1000.0, 1e-3, 1e20])
def test_trap_26_the_largest_number_of_a_head_survives(kv: str, largest: float):
    """Its scale is of its own size, so nothing overflows: 465 cast to e4m3 as it is would be NaN."""
    x = np.linspace(-largest, largest, 64, dtype=np.float32).reshape(1, 1, 64)
    got = write(kv, x)
    # e4m3 scales under no tensor's scale end at 448 * 6 and begin at 2**-9.
    if kv == "nvfp4" and not 1e-2 < largest < 2000:
        assert np.isfinite(got).all()
        return
    assert np.abs(got[0, 0, [0, -1]] - x[0, 0, [0, -1]]).max() <= largest * (1 / 3 if kv == "mxfp4" else 0.17)
    assert np.abs(got - x).max() <= largest * (1 / 3 if kv == "mxfp4" else 0.17)


@pytest.mark.parametrize("kv", ["bfloat16", *CODED])
def test_pages_read_and_put_elsewhere_are_the_same(kv: str):
    K, H, Z, P = 2, 32, 4, 5
    cache = init_cache(config(K, H, 3), policy_of(kv), (1, 2), P, Z)
    rng = np.random.default_rng(1)
    for layer in (0, 1):
        new = rng.standard_normal((2, P * Z, K, H)).astype(np.float32)
        cache = tuple(
            WRITE(stack, min(layer, stack.k.shape[0] - 1), jnp.arange(P * Z), *new) for stack in cache
        )
    content = jax.jit(read_pages)(cache, jnp.array([3, 1]))
    assert [(part.shape[1], part.dtype) for part in content] == list(copy_widths(cache))
    empty = init_cache(config(K, H, 3), policy_of(kv), (1, 2), P, Z)
    moved = jax.jit(replace_pages)(empty, jnp.array([0, P]), content)  # the second goes nowhere
    for old, new in zip(cache, moved, strict=True):
        for was, now in zip(numbers_of(old, K, H), numbers_of(new, K, H), strict=True):
            np.testing.assert_array_equal(now[:, 0], was[:, 3])
            assert (now[:, 1:] == 0).all()
            assert was[:, 3].any()


@pytest.mark.parametrize(
    ("kv", "heads", "page_size", "values"),
    [
        ("int8", (3, 32), 4, (4, 128)),
        ("int8", (4, 32), 40, (40, 128)),
        ("int4:g16", (3, 32), 16, (8, 128)),  # 48 bytes a token, two tokens a row
        ("mxfp4", (1, 64), 4, (4, 128)),  # a row holds four, and a page as many rows as lie in one of 32 bits
        ("mxfp4", (1, 64), 40, (12, 128)),
        ("bfloat16", (3, 64), 16, (16, 256)),
        ("bfloat16", (1, 64), 4, (2, 128)),
        ("float32", (1, 64), 40, (20, 128)),
    ],
    ids=str,
)
def test_a_tpus_slabs_hold_the_same_pages(
    kv: str, heads: tuple[int, int], values: tuple[int, int], page_size: int
):
    """A chunk that begins and ends within pages, tokens of other rows, one that goes nowhere; then one more."""
    (K, H), P, policy = heads, 5, policy_of(kv)
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    plain = init_cache(config(K, H), policy, (2,), P, page_size)[0]
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("one",), abstract_device=device)):
        shapes = cache_shapes(config(K, H), policy, (2,), P, page_size)[0]
        assert page_bytes(config(K, H), policy, page_size) * P == sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)
        )
    slabs = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    assert slabs.k.shape == (2, P, *values) == (2, P, *value_slab(plain.format, K, H, page_size))
    assert slabs.page_size == page_size
    if not plain.format.is_plain:
        assert slabs.k_scale.shape == (2, P, *scale_slab(plain.format, K, H, page_size))
    chunk = np.arange(3, 3 + 2 * page_size)
    for slots in ([*chunk, 4 * page_size, P * page_size, 3 * page_size + 1], [chunk[-1] + 1]):
        new = np.random.default_rng(len(slots)).standard_normal((2, len(slots), K, H)).astype(np.float32)
        plain, slabs = (WRITE(pages, 1, jnp.array(slots), *new) for pages in (plain, slabs))
    widths = token_widths(plain.format, K, H)
    for part, width in zip(("k", "v", "k_scale", "v_scale"), (*widths[:1] * 2, *widths[1:] * 2), strict=True):
        if width:
            got = from_slab(getattr(slabs, part), page_size, width)
            np.testing.assert_array_equal(got, getattr(plain, part))
            assert np.asarray(got[1]).any()


def test_groups_are_cut_to_what_divides_a_head():
    cfg = replace(config(2, 48), attention=AttentionConfig(4, 2, 48, 1.0))
    shapes = cache_shapes(cfg, policy_of("int8:g32"), (1,), 3, 8)[0]
    assert shapes.k.shape == (1, 3, 8, 96)
    assert shapes.k_scale.shape == (1, 3, 8, 6)  # groups of 16
