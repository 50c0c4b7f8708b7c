"""The GPU's kernels compiled to machine code for GPUs that are not here; needs the extra ``aot``."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.aot import hlo
from jaxinfer.aot.cost import measure
from jaxinfer.aot.targets import Target, open_target, single_mesh
from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import scale_dtype, stored_dtype, token_widths
from jaxinfer.arrays.quantized import abstract
from jaxinfer.arrays.specs import ParamSpec
from jaxinfer.kernels.attention.gpu import paged_attention_gpu
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.matmul.gpu import multiply_gpu
from tests.aot.test_compile import is_installed

LLAMA_8B = (32, 8, 128)


def compile_attention(
    target: str, text: str, rows: tuple[int, int], heads: tuple[int, int, int], context: int
) -> tuple[int, int, float]:
    """Returns the bytes of pages, of temporary memory and moved, of a kernel for ``rows`` ``(B, T)`` over 2 layers."""
    if not is_installed("jax_plugins.xla_cuda13"):
        pytest.skip("jax-cuda13-plugin is not installed")
    mesh = single_mesh(open_target(Target.parse(target)))
    sharding = NamedSharding(mesh, PartitionSpec())
    fmt, (N, K, H), (B, T), Z = Format.parse(text), heads, rows, 16

    def array(dtype: jnp.dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    values, scales = token_widths(fmt, K, H)
    page = 2, B * context // Z, Z
    pool = array(stored_dtype(fmt.dtype), *page, values)
    scale = array(stored_dtype(scale_dtype(fmt)), *page, scales) if scales else None
    integer = jnp.dtype(jnp.int32)
    kv = PagedKV(pool, pool, scale, scale, array(integer), fmt)
    kernel = partial(paged_attention_gpu, scale=H**-0.5, softcap=50.0)
    rows_of = array(integer, B, context // Z), array(integer, B), array(integer, B)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(lambda *args: kernel(*args[:-1], window=args[-1])).lower(
            array(jnp.dtype(jnp.bfloat16), B, T, N, H), kv, *rows_of, array(integer)
        )
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    pages = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    return pages, int(memory.temp_size_in_bytes), measure(hlo.parse(compiled.as_text() or "")).num_bytes


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("gpu:h200", "bfloat16"),
        ("gpu:h100", "int8"),
        ("gpu:h100", "mxfp4"),
        ("gpu:a100", "fp8_e4m3"),  # which it has no conversion for
        ("gpu:a100", "int4:g32"),
    ],
)
def test_decode_reads_pages_where_they_lie(target: str, text: str):
    pages, temporary, moved = compile_attention(target, text, (64, 1), LLAMA_8B, 2048)
    assert temporary < 1024
    # One layer of two, queries, results and ids.
    assert pages / 2 < moved < 1.02 * pages / 2


@pytest.mark.parametrize(("target", "text"), [("gpu:h100", "bfloat16"), ("gpu:a100", "int8")])
def test_prefill_reads_pages_where_they_lie(target: str, text: str):
    _, temporary, _ = compile_attention(target, text, (1, 2048), LLAMA_8B, 2048)
    assert temporary < 1024


@pytest.mark.parametrize(
    ("rows", "heads", "text"),
    [((8, 1), (9, 3, 64), "int8"), ((8, 5), (32, 32, 96), "nvfp4"), ((8, 5), (4, 1, 256), "bfloat16")],
    ids=str,
)
def test_few_rows_of_every_head_size_compile(rows: tuple[int, int], heads: tuple[int, int, int], text: str):
    """Their contexts are split; what is written between are sums in float32 of each program."""
    (B, T), (N, _, H) = rows, heads
    _, temporary, _ = compile_attention("gpu:h100", text, rows, heads, 512)
    assert 0 < temporary < 4 * 16 * B * T * N * (H + 1)


@pytest.mark.parametrize(
    ("target", "text"), [("gpu:h100", "int4:g64"), ("gpu:a100", "int4:g32:f16"), ("gpu:a100", "nvfp4")]
)
def test_weights_of_4_bits_are_not_written_out(target: str, text: str):
    if not is_installed("jax_plugins.xla_cuda13"):
        pytest.skip("jax-cuda13-plugin is not installed")
    mesh = single_mesh(open_target(Target.parse(target)))
    sharding = NamedSharding(mesh, PartitionSpec())
    w = abstract(ParamSpec((4096, 14336), (None, None)), Format.parse(text))
    x = jax.ShapeDtypeStruct((64, 14336), jnp.bfloat16)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), (x, w))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(lambda x, w: multiply_gpu(x, w, jnp.dtype("bfloat16"))).lower(*args)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    # Even and odd columns of the rows, and two halves' sums: not the 28 MiB of codes, nor 112 MiB in 16 bits.
    assert memory.temp_size_in_bytes < 8 * 2**20
