"""Kernels of our own compiled for TPUs that are not here; needs the extra ``aot``."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.aot.targets import Target, open_target, single_mesh
from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import Slab, scale_dtype, scale_slab, stored_dtype, value_slab
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import MULTIPLIERS, linear
from jaxinfer.arrays.quantized import abstract
from jaxinfer.arrays.specs import ParamSpec
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.tpu import paged_attention_tpu
from jaxinfer.kernels.matmul.tpu import multiply_tpu
from jaxinfer.model.stacks import _give_codes, _leave_codes
from tests.aot.test_compile import is_installed

TPUS = ("tpu:v5e", "tpu:v5p", "tpu:v6e")
LLAMA_8B = (32, 8, 128)


def compile_attention(
    target: str,
    text: str,
    rows: tuple[int, int],
    heads: tuple[int, int, int],
    context: int,
    page_size: int = 16,
) -> tuple[int, int]:
    """Returns the bytes of pages and of temporary memory of a kernel for ``rows`` ``(B, T)`` over 2 layers' pages."""
    if not is_installed("libtpu"):
        pytest.skip("libtpu is not installed")
    mesh = single_mesh(open_target(Target.parse(target)))
    sharding = NamedSharding(mesh, PartitionSpec())
    fmt, (N, K, H), (B, T), width = Format.parse(text), heads, rows, context // page_size

    def array(dtype: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pool = array(stored_dtype(fmt.dtype), 2, B * width, *value_slab(fmt, K, H, page_size))
    slab = (
        None
        if fmt.is_plain
        else array(stored_dtype(scale_dtype(fmt)), 2, B * width, *scale_slab(fmt, K, H, page_size))
    )
    integer = jnp.dtype(jnp.int32)
    kv = PagedKV(pool, pool, slab, slab, array(integer), fmt, Slab(page_size, K))
    kernel = partial(paged_attention_tpu, scale=H**-0.5, softcap=50.0)
    rows_of = array(integer, B, width), array(integer, B), array(integer, B)
    lowered = jax.jit(lambda *args: kernel(*args[:-1], window=args[-1])).lower(
        array(jnp.dtype(jnp.bfloat16), B, T, N, H), kv, *rows_of, array(integer)
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv)), int(
        memory.temp_size_in_bytes
    )


@pytest.mark.parametrize("target", TPUS)
@pytest.mark.parametrize("text", ["bfloat16", "int8", "fp8_e4m3", "int4:g64", "mxfp4"])
def test_decode_reads_pages_where_they_lie(target: str, text: str):
    pages, temporary = compile_attention(target, text, (64, 1), LLAMA_8B, 2048)
    assert temporary < 0.02 * pages  # queries in lanes of their own


@pytest.mark.parametrize("target", TPUS)
@pytest.mark.parametrize("text", [pytest.param("bfloat16", marks=pytest.mark.ahead), "int8"])
def test_prefill_reads_pages_where_they_lie(target: str, text: str):
    _, temporary = compile_attention(target, text, (1, 2048), LLAMA_8B, 2048)
    # Of queries, not of pages; a v5p has them twice.
    assert temporary <= (2.01 if "v5p" in target else 1) * 2048 * 32 * 128 * 2


@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 32, 96), (4, 1, 256), (4, 1, 128)], ids=str)
@pytest.mark.parametrize("text", ["bfloat16", "int8", "int4:g64"])
def test_heads_of_every_size_compile(heads: tuple[int, int, int], text: str):
    compile_attention("tpu:v5e", text, (8, 1), heads, 512)
    compile_attention("tpu:v5e", text, (8, 5), heads, 512, page_size=128)


@pytest.mark.parametrize("target", TPUS)
@pytest.mark.parametrize("text", ["int4:g64", "int4:g128:zero", "int4:g32:f16", "mxfp4", "nvfp4"])
def test_weights_of_4_bits_are_not_written_out(target: str, text: str):
    if not is_installed("libtpu"):
        pytest.skip("libtpu is not installed")
    mesh = single_mesh(open_target(Target.parse(target)))
    sharding = NamedSharding(mesh, PartitionSpec())
    w = abstract(ParamSpec((4096, 14336), (None, None)), Format.parse(text))
    x = jax.ShapeDtypeStruct((64, 14336), jnp.bfloat16)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), (x, w))
    memory = (
        jax.jit(lambda x, w: multiply_tpu(x, w, jnp.dtype("bfloat16")))
        .lower(*args)
        .compile()
        .memory_analysis()
    )
    assert memory is not None
    # Rows and results, and scales in another layout: not the 28 MiB of codes, nor 112 MiB in 16 bits.
    assert memory.temp_size_in_bytes < 12 * 2**20


def test_a_scan_over_weights_of_4_bits_copies_none_of_them(monkeypatch: pytest.MonkeyPatch):
    """A v5p has no room on the chip for a matrix of this size: it wrote each layer's out before the kernel read it."""
    if not is_installed("libtpu"):
        pytest.skip("libtpu is not installed")
    mesh = single_mesh(open_target(Target.parse("tpu:v5p")))
    sharding = NamedSharding(mesh, PartitionSpec())
    policy = replace(Policy.parse("w4a16", base="bfloat16"), matmul="tpu")
    monkeypatch.setitem(MULTIPLIERS, "tpu", multiply_tpu)

    def step(x, stack):
        def body(x, layer_in):
            layer = _give_codes(layer_in[0], stack, layer_in[1])["mlp"]
            return linear(linear(x, layer["up"], policy), layer["down"], policy), None

        return jax.lax.scan(body, x, (_leave_codes(stack, policy), jnp.arange(2)))[0]

    up, down = (
        abstract(ParamSpec((2, *s), (None,) * 3), policy.weights) for s in ((14336, 4096), (4096, 14336))
    )
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    args = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (x, {"mlp": {"up": up, "down": down}}),
    )
    memory = jax.jit(step).lower(*args).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 12 * 2**20  # a matrix of codes has 28 MiB
