"""The GPU's kernel, interpreted, equals the oracle; no GPU takes part."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import scale_slab, to_slab
from jaxinfer.arrays.precision import Policy
from jaxinfer.config import AttentionConfig
from jaxinfer.kernels.attention import gpu
from jaxinfer.kernels.attention.api import choose_attention
from jaxinfer.kernels.attention.cases import CASES, Case, make_inputs
from jaxinfer.kernels.attention.gpu import check_size, make_plan, paged_attention_gpu
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.reference import paged_attention_reference
from jaxinfer.kernels.triton import why_no_gpu
from tests.kernels.test_attention import CODED, FEW_PASSES, attend_all, hold_to_oracle, operands

NAMED = {case.name: case for case in CASES}
# Compiling a case takes a second: these few go through everything, the others when there is time.
FEW = [
    NAMED[name]
    for name in ("decode", "decode one kv head", "decode window", "prefill long context", "small pages")
]
EVERYTHING = Case("everything", 3, (6, 2, 32), (70, 0, 3, 33), (3, 2, 0, 1), window=50, softcap=20.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """So that every case goes over several blocks, some of them by several programs."""
    monkeypatch.setattr(gpu, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(gpu, "PROGRAMS", 32)


interpreted = partial(paged_attention_gpu, interpret=True)
check = partial(hold_to_oracle, interpreted)


def test_kernel_equals_oracle():
    check(FEW, "float32")


@pytest.mark.parametrize("text", ["bfloat16", "float16", *CODED, "int8:g8"])
def test_kernel_equals_oracle_over_every_format(text: str):
    check([EVERYTHING], text)


@pytest.mark.parametrize("text", ["float32", "int4:g16"])
def test_kernel_equals_oracle_over_every_case(text: str):
    check([case for case in CASES if text != "float32" or case not in FEW], text)


def test_products_in_16_bits_stay_near_float32():
    check([EVERYTHING], "int4:g16", "bfloat16", 0.03)


def test_heads_of_every_size_are_cut_into_powers_of_2():
    heads = Case("heads", 3, (4, 1, 96), (70, 0, 3), (3, 2, 0), softcap=20.0, window=50)
    check([heads], "int4:g32")
    check([replace(heads, heads=(10, 5, 256))], "nvfp4")


def test_a_chunk_goes_tile_by_tile_and_a_context_undivided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "TILE_ROWS", 32)
    monkeypatch.setattr(gpu, "PROGRAMS", 1)
    long = replace(NAMED["prefill long context"], T=70, length=(70, 9))
    check([long, NAMED["prefill padding row"], NAMED["decode window"]], "float32")


def test_what_no_query_sees_is_not_read():
    """Neither ids beside the pool nor NaN after a row's end reach another number (trap 15)."""
    case = NAMED["decode with padding rows"]
    plain, strange = make_inputs(case), make_inputs(case)
    strange["pages"][strange["pages"] == len(strange["k"])] = -(10**6)
    for name in "kv":
        strange[name][strange[name] == 1e4] = np.nan
    assert np.isnan(strange["k"]).any()

    def given(arrays: dict[str, Any]) -> tuple:
        # As they are: pages that the house writes hold no NaN.
        k, v = (jnp.asarray(np.stack([np.zeros_like(arrays[x]), arrays[x]])) for x in "kv")
        rows = (jnp.asarray(arrays[x]) for x in ("pages", "start", "length"))
        return jnp.asarray(arrays["q"]), PagedKV(k, v, None, None, 1, Format("float32")), *rows

    want, got = attend_all(interpreted, [case, case], [given(plain), given(strange)])
    np.testing.assert_array_equal(got, want)


def test_ids_beside_the_pool_are_hidden_where_queries_see():
    case = NAMED["prefill window"]
    arrays = make_inputs(case)
    arrays["pages"][0, 1] = len(arrays["k"]) + 5
    given = [operands(case, arrays, Format("int8"))]
    (want,), (got,) = (attend_all(each, [case], given) for each in (paged_attention_reference, interpreted))
    np.testing.assert_allclose(got[0, :17], want[0, :17], atol=2e-5)


def test_a_window_may_be_known_to_the_run_only():
    case = NAMED["prefill window"]
    args = operands(case, make_inputs(case), Format("float32"))
    scale = case.heads[2] ** -0.5
    kernel = jax.jit(partial(interpreted, scale=scale), compiler_options=FEW_PASSES)
    for window in (0, 1, 8, 30):
        want = paged_attention_reference(*args, scale=scale, window=window)
        got = kernel(*args, window=jnp.int32(window))
        for row, length in enumerate(case.length):
            np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-5)


def test_scales_in_slabs_are_the_same_scales():
    case, fmt = NAMED["decode"], Format("int8")
    q, kv, *rows = operands(case, make_inputs(case), fmt)
    slab = scale_slab(fmt, *case.heads[1:], case.page_size)
    k, v = (to_slab(each, slab) for each in (kv.k_scale, kv.v_scale))
    lain = PagedKV(kv.k, kv.v, k, v, kv.layer, fmt)
    want, got = attend_all(interpreted, [case, case], [(q, kv, *rows), (q, lain, *rows)])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("text", "head_dim", "widths"),
    [
        ("bfloat16", 128, [128]),
        ("int8", 96, [64, 32]),
        ("int8:g32", 128, [32] * 4),
        ("int8:g16", 128, [128]),  # eight scales: multiplied out
        ("int4:g32", 128, [32] * 4),
        ("int4:g32", 96, [32, 16, 16, 32]),  # the second scale's numbers lie in both halves
        ("mxfp4", 256, [128, 128]),
        ("nvfp4", 96, [32, 16, 32, 16]),
    ],
)
def test_a_heads_parts_are_all_its_numbers_once(text: str, head_dim: int, widths: list[int]):
    plan = plan_of(text, (64, 1), (32, 8, head_dim), 2048)
    assert [part.width for part in plan.parts] == widths
    numbers = [part.number + i for part in plan.parts for i in range(part.width)]
    assert sorted(numbers) == list(range(head_dim))
    for part in plan.parts:
        assert part.plane * plan.width + part.lane == part.number
        assert part.lane + part.width <= plan.width
        if part.num_scales:
            assert part.scale * head_dim // plan.num_scales <= part.number
            last = part.number + part.width - 1
            assert last * plan.num_scales // head_dim == part.scale + part.num_scales - 1


def plan_of(text: str, rows: tuple[int, int], heads: tuple[int, int, int], context: int) -> gpu.Plan:
    fmt, (N, K, H), page_size = Format.parse(text), heads, 16
    pool = jax.ShapeDtypeStruct((1, 9, page_size, K * H * fmt.bits // (8 * fmt.dtype.itemsize)), fmt.dtype)
    q: Any = jax.ShapeDtypeStruct((*rows, N, H), jnp.bfloat16)
    kv = PagedKV(pool, pool, None, None, 0, fmt)
    return make_plan(q, kv, context // page_size, scale=1.0, softcap=None, is_windowed=False)


@pytest.mark.parametrize(
    ("rows", "heads", "context", "splits", "tile"),
    [
        ((64, 1), (32, 8, 128), 2048, 1, 1),  # 512 programs
        ((64, 1), (8, 1, 128), 2048, 5, 1),  # of eight GPUs each
        ((1, 1), (32, 8, 128), 2048, 16, 1),  # two blocks each, no less
        ((1, 1), (32, 8, 128), 131072, 33, 1),
        ((8, 5), (32, 8, 128), 2048, 5, 5),
        ((1, 2048), (32, 8, 128), 2048, 1, 32),
    ],
)
def test_few_rows_are_split_to_fill_a_gpu(
    rows, heads, context, splits, tile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    plan = plan_of("bfloat16", rows, heads, context)
    assert (plan.splits, plan.tile) == (splits, tile)


def test_pages_that_32_bits_cannot_count_are_refused():
    check_size(2**31, jnp.dtype("int8"))
    check_size(2**31, jnp.dtype("uint16"))
    check_size(2**32 + 1, jnp.dtype("uint8"))
    with pytest.raises(ValueError, match=r"attention=gpu: .* take 3221225472 bytes.*attention=blocked"):
        check_size(3 * 2**30, jnp.dtype("uint8"))


def gpu_mesh() -> Any:
    """Returns a context of one GPU that is not here."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("one",), abstract_device=device))


def test_the_kernel_is_chosen_on_a_gpu_and_refused_elsewhere():
    heads, policy = AttentionConfig(9, 3, 64, 1.0), Policy.parse("bfloat16")
    with gpu_mesh():
        assert choose_attention("auto", heads, policy, 8)[0] == "gpu"
        assert "where they lie" in choose_attention("auto", heads, policy, 8)[1]
        assert choose_attention("gpu", heads, policy) == ("gpu", "asked for")
        assert choose_attention("blocked", heads, policy) == ("blocked", "asked for")
        with pytest.raises(ValueError, match=r"attention=tpu cannot run.*this is a gpu"):
            choose_attention("tpu", heads, policy)
    with pytest.raises(ValueError, match=r"attention=gpu cannot run.*this is a cpu.*gpu-interpret"):
        choose_attention("gpu", heads, policy)
    assert choose_attention("gpu-interpret", heads, policy) == ("gpu-interpret", "asked for")


@pytest.mark.parametrize(
    ("capability", "why"),
    [("7.5", "need compute capability 8.0"), ("gfx942", "are for NVIDIA's, this is a gfx942")],
)
def test_an_older_or_another_gpu_attends_in_blocks_and_says_so(
    capability: str, why: str, monkeypatch: pytest.MonkeyPatch
):
    heads, policy = AttentionConfig(9, 3, 64, 1.0), Policy.parse("bfloat16")
    monkeypatch.setattr("jaxinfer.kernels.attention.api.gpu_capability", lambda: capability)
    with gpu_mesh():
        name, reason = choose_attention("auto", heads, policy)
        assert (name, why in reason) == ("blocked", True)
        with pytest.raises(ValueError, match=rf"attention=gpu cannot run: .*{why}.*; take attention=auto"):
            choose_attention("gpu", heads, policy)


def test_a_jax_without_triton_is_told(monkeypatch: pytest.MonkeyPatch):
    assert why_no_gpu("0.12.0", "9.0") is None
    monkeypatch.setattr("jaxinfer.kernels.triton.find_spec", lambda name: None)
    assert "jax 0.13.0 has no Pallas by way of Triton" in (why_no_gpu("0.13.0", "9.0") or "")
