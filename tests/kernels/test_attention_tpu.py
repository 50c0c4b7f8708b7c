"""The TPU's kernel, interpreted, equals the oracle: numbers, order of copies and waits; no TPU takes part."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import Slab, from_slab, scale_slab, to_slab, token_widths, value_slab
from jaxinfer.arrays.precision import Policy
from jaxinfer.config import AttentionConfig
from jaxinfer.kernels.attention import tpu
from jaxinfer.kernels.attention.api import choose_attention
from jaxinfer.kernels.attention.blocked import paged_attention_blocked
from jaxinfer.kernels.attention.cases import CASES, Case, make_inputs
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.reference import paged_attention_reference
from jaxinfer.kernels.attention.tpu import interpret_attention_tpu, paged_attention_tpu
from tests.kernels.test_attention import CODED, hold_to_oracle, operands, options_of

NAMED = {case.name: case for case in CASES}
SHORT = ["decode", "verify rows", "prefill window"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """So that every case goes over several blocks and from row to row."""
    monkeypatch.setattr(tpu, "BLOCK", 64)


def attend(
    implementation: Callable[..., Any], case: Case, arrays: dict[str, Any], fmt: Format, **options: Any
) -> np.ndarray:
    """Runs an implementation over layer 1 of 2, in pages of ``fmt``; those of the kernel lie as on a TPU."""
    q, kv, *rows = operands(case, arrays, fmt)
    if implementation is not paged_attention_reference:
        kv = lay_down(kv, case)
    return np.asarray(jitted(implementation, case, **options)(q, kv, *rows), np.float32)


def lay_down(kv: PagedKV, case: Case) -> PagedKV:
    """Returns pages as they lie on a TPU."""
    heads, Z = case.heads[1:], case.page_size
    slab = value_slab(kv.format, *heads, Z)
    kv = replace(kv, k=to_slab(kv.k, slab), v=to_slab(kv.v, slab), slab=Slab(Z, heads[0]))
    if kv.format.is_plain:
        return kv
    slab = scale_slab(kv.format, *heads, Z)
    return replace(kv, k_scale=to_slab(kv.k_scale, slab), v_scale=to_slab(kv.v_scale, slab))


def jitted(implementation: Callable[..., Any], case: Case, **options: Any) -> Any:
    return jax.jit(partial(implementation, **options_of(case), **options))


check = partial(hold_to_oracle, interpret_attention_tpu, lay_down=lay_down)


def test_kernel_equals_oracle():
    check(CASES, "float32")


@pytest.mark.parametrize("text", ["bfloat16", "float16", *CODED])
def test_kernel_equals_oracle_over_every_format(text: str):
    check([NAMED[name] for name in SHORT], text)


@pytest.mark.parametrize("text", ["bfloat16", "int8", "int4:g16", "nvfp4"])
def test_kernel_equals_oracle_over_every_case(text: str):
    """In a format of each way that pages are opened."""
    check([case for case in CASES if case.name not in SHORT], text)


@pytest.mark.parametrize("text", ["bfloat16", "int8", "int4:g64"])
def test_products_in_16_bits_stay_near_float32(text: str):
    check([NAMED["prefill chunk"]], text, "bfloat16", 0.03)


@pytest.mark.parametrize(
    ("head_dim", "text"),
    [(64, "float32"), (64, "mxfp4"), (96, "int8"), (96, "mxfp4"), (128, "mxfp4"), (256, "int8")],
)
def test_heads_of_every_size_share_or_fill_vectors_of_lanes(head_dim: int, text: str):
    rows = Case("heads", 3, (4, 1, head_dim), (70, 0, 3), (3, 2, 0), softcap=20.0, window=50)
    check([rows, replace(rows, heads=(10, 5, head_dim))], text)


def test_tiles_of_a_chunk_read_only_what_they_see(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tpu, "TILE_ROWS", 32)
    check([replace(NAMED["prefill long context"], T=70, length=(70, 9))], "float32")
    check([NAMED["prefill padding row"]], "int8")


@pytest.mark.parametrize(
    ("text", "heads"), [("float32", (4, 2, 128)), ("int8", (4, 2, 128)), ("int4:g64", (4, 1, 128))], ids=str
)
def test_copies_are_awaited_and_buffers_not_overwritten(
    text: str, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
):
    """Memory that nothing was copied to is NaN here, and a copy into what is being read is an error (in jax 0.12)."""
    monkeypatch.setattr(tpu, "BLOCK", 16)
    case = Case("races", 1, heads, (40, 0, 3, 20), (1, 0, 1, 1), page_size=8)
    arrays = make_inputs(case, seed=2)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    got = attend(paged_attention_tpu, case, arrays, Format.parse(text), interpret=params)
    want = attend(paged_attention_reference, case, arrays, Format.parse(text))
    np.testing.assert_allclose(got[[0, 2, 3]], want[[0, 2, 3]], atol=2e-5)


@pytest.mark.parametrize("nowhere", [-1, 10**6])
def test_trap_15_pages_that_no_query_sees_may_have_any_id(nowhere: int):
    case = NAMED["decode window"]
    arrays = make_inputs(case)
    want = attend(interpret_attention_tpu, case, arrays, Format("float32"))
    arrays["pages"][arrays["pages"] == len(arrays["k"])] = nowhere
    for row, context in enumerate(case.context):
        arrays["pages"][row, : max(0, context - (case.window or 0) + 1) // case.page_size] = nowhere
    np.testing.assert_array_equal(attend(interpret_attention_tpu, case, arrays, Format("float32")), want)


def test_a_window_may_be_known_to_the_run_only():
    case = NAMED["prefill window"]
    args = operands(case, make_inputs(case), Format("float32"))
    scale = case.heads[2] ** -0.5
    kernel = jax.jit(partial(interpret_attention_tpu, scale=scale))
    for window in (0, 1, 8, 30):
        want = paged_attention_reference(*args, scale=scale, window=window)
        got = kernel(*args, window=jnp.int32(window))
        for row, length in enumerate(case.length):
            np.testing.assert_allclose(got[row, :length], want[row, :length], atol=2e-5)


@pytest.mark.parametrize(
    "implementation", [paged_attention_reference, paged_attention_blocked, interpret_attention_tpu]
)
@pytest.mark.parametrize("text", ["float32", "int8", "int4:g16", "mxfp4"])
def test_pages_in_slabs_are_the_same_pages(implementation: Callable[..., jax.Array], text: str):
    case, fmt = NAMED["decode"], Format.parse(text)
    q, kv, *rows = operands(case, make_inputs(case), fmt)
    lain = lay_down(kv, case)
    width, num_scales = token_widths(fmt, *case.heads[1:])
    for part, numbers in {"k": width, "v": width, "k_scale": num_scales, "v_scale": num_scales}.items():
        if numbers:
            slab, plain = getattr(lain, part), getattr(kv, part)
            assert slab.shape != plain.shape
            np.testing.assert_array_equal(from_slab(slab, case.page_size, numbers), plain)
    run = jitted(implementation, case)
    # The kernel meets tokens that share a row in another order.
    atol = 1e-6 if implementation is interpret_attention_tpu else 0
    np.testing.assert_allclose(run(q, lain, *rows), run(q, kv, *rows), rtol=0, atol=atol)


def test_the_kernel_is_chosen_on_a_tpu_and_refused_elsewhere():
    heads, policy = AttentionConfig(9, 3, 64, 1.0), Policy.parse("bfloat16")
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        assert choose_attention("auto", heads, policy, 8) == (
            "tpu",
            "it reads pages where they lie, in every format",
        )
        assert choose_attention("blocked", heads, policy) == ("blocked", "asked for")
    with pytest.raises(ValueError, match=r"attention=tpu cannot run.*this is a cpu.*tpu-interpret"):
        choose_attention("tpu", heads, policy)
    assert choose_attention("tpu-interpret", heads, policy) == ("tpu-interpret", "asked for")


def tpu_mesh() -> AbstractMesh:
    """Returns a mesh of one TPU that is not here."""
    device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    return AbstractMesh((1,), ("one",), abstract_device=device)


def test_a_table_larger_than_scalar_memory_is_refused():
    case = NAMED["decode"]
    q, kv, pages, *rows = operands(case, make_inputs(case), Format("float32"))
    with pytest.raises(ValueError, match=r"scalar memory.*page_size 16 now"):
        paged_attention_tpu(q, kv, jnp.tile(pages, (1, 10_000)), *rows, scale=1.0)
