"""Compiled programs read from text: trips, bytes, products, and copies of what must not be copied."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.aot.copies import Stored, clean_name, find_copies
from jaxinfer.aot.cost import measure
from jaxinfer.aot.hlo import Array, Module, parse

L, M, D, F = 5, 8, 96, 160


def compile_text(fn, *shapes, donate=()) -> Module:
    described = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return parse(jax.jit(fn, donate_argnums=donate).lower(*described).compile().as_text() or "")


def test_a_loops_products_count_as_often_as_it_runs():
    def step(x, params):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]

    module = compile_text(step, ((M, D), jnp.float32), ((L, D, D), jnp.float32))
    cost = measure(module)
    assert cost.flops == L * 2 * M * D * D
    assert cost.num_bytes >= 4 * L * D * D
    assert not cost.collectives


def test_a_loop_without_a_known_end_runs_as_often_as_is_said():
    def step(n, x, w):
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)

    module = compile_text(step, ((), jnp.int32), ((M, D), jnp.float32), ((D, D), jnp.float32))
    assert measure(module, 7).flops == 7 * measure(module, 1).flops == 7 * 2 * M * D * D


TPU = """HloModule jit_f, is_scheduled=true

%inner (p0: bf16[4,64,32], p1: s32[], p2: bf16[8,32]) -> bf16[8,64] {
  %p0 = bf16[4,64,32]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)S(6)} parameter(1)
  %c = s32[]{:T(128)} constant(0)
  %slice = bf16[1,64,32]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p0, %p1, %c, %c), dynamic_slice_sizes={1,64,32}
  %flat = bf16[64,32]{1,0:T(8,128)(2,1)} bitcast(%slice)
  %p2 = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(2)
  ROOT %conv = bf16[8,64]{1,0:T(8,128)(2,1)} convolution(%p2, %flat), dim_labels=bf_oi->bf
}

%body (t: (s32[], bf16[4,64,32], bf16[8,32])) -> (s32[], bf16[4,64,32], bf16[8,32]) {
  %t = (s32[]{:T(128)}, bf16[4,64,32]{2,1,0:T(8,128)(2,1)}, /*index=2*/bf16[8,32]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %w = bf16[4,64,32]{2,1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %x = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%t), index=2
  %y = bf16[8,64]{1,0:T(8,128)(2,1)} fusion(%w, %i, %x), kind=kOutput, calls=%inner, metadata={op_name="a (b" id=1}
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %out = (s32[]{:T(128)}, bf16[4,64,32]{2,1,0}, bf16[8,32]{1,0:S(1)}) tuple(%next, %w, %x)
}

%condition (t: (s32[], bf16[4,64,32], bf16[8,32])) -> pred[] {
  %bound = s32[]{:T(128)} constant(4)
  %t = (s32[]{:T(128)}, bf16[4,64,32]{2,1,0}, bf16[8,32]{1,0:S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}, execution_thread="other"

ENTRY %main (w: bf16[4,64,32], x: bf16[8,32]) -> bf16[8,32] {
  %w = bf16[4,64,32]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="params[\\'w\\']"}
  %x = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %t = (s32[]{:T(128)}, bf16[4,64,32]{2,1,0}, bf16[8,32]{1,0:S(1)}) tuple(%zero, %w, %x)
  %loop = (s32[]{:T(128)}, bf16[4,64,32]{2,1,0}, bf16[8,32]{1,0:S(1)}) while(%t), condition=%condition, body=%body
  %sum = bf16[8,32]{1,0} all-reduce-start(%x), to_apply=%add
  ROOT %result = bf16[8,32]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%loop), index=2
}
"""


def test_a_tpus_text_is_read():
    """A convolution is a product, a slice inside of a fusion moves its part, what lies on the chip moves nothing."""
    module = parse(TPU)
    loop = module.entry.instructions["loop"]
    assert module.trips(loop) == 4
    assert module.entry.instructions["x"].arrays == [Array("bf16", (8, 32), 1)]
    cost = measure(module)
    assert cost.flops == 4 * 2 * 8 * 64 * 32
    moved = 4 * (
        2 * 64 * 32 + 2 * 8 * 64
    )  # a layer's matrix and the result; beside them counters, and what all-reduce makes
    assert moved + 512 <= cost.num_bytes <= moved + 512 + 4 * 32
    assert cost.collectives == {"all-reduce": 1}
    assert find_copies(module, {"params__w__": Stored(16, 64 * 32)}) == []


def test_a_batch_of_products_counts_as_its_products():
    """A TPU writes it as a convolution whose window meets one number of the batch."""
    text = """ENTRY %main (x: f32[8,4,16], y: f32[8,6,16]) -> f32[8,4,6] {
  %x = f32[8,4,16]{2,1,0} parameter(0)
  %y = f32[8,6,16]{2,1,0} parameter(1)
  ROOT %conv = f32[8,4,6]{2,1,0} convolution(%x, %y), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf
}
"""
    assert measure(parse(text)).flops == 8 * 2 * 4 * 6 * 16


@pytest.mark.parametrize(
    ("rest", "moved"),
    [
        (
            "ROOT %out = f32[1,64]{1,0} dynamic-slice(%wide, %i, %i), dynamic_slice_sizes={1,64}",
            64 + 4 + 4 * 64,
        ),
        ("ROOT %out = f32[32,64]{1,0} bitcast(%wide)", 32 * 64 + 4 + 4 * 32 * 64),
    ],
    ids=["sliced", "whole"],
)
def test_a_fusion_reads_what_it_slices_also_behind_a_conversion(rest, moved):
    result = rest.split(" = ")[1].split("{")[0]
    text = f"""%inner (p: s8[32,64], i: s32[]) -> {result} {{
  %p = s8[32,64]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %wide = f32[32,64]{{1,0}} convert(%p)
  {rest}
}}

ENTRY %main (p: s8[32,64], i: s32[]) -> {result} {{
  %p = s8[32,64]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %out = {result}{{1,0}} fusion(%p, %i), kind=kLoop, calls=%inner
}}
"""
    cost = measure(parse(text))
    assert moved - 4 <= cost.num_bytes <= moved  # the index may go unread
    found = find_copies(parse(text), {"p": Stored(8, 32 * 64)})
    assert len(found) == ("32,64" in result)


@pytest.mark.parametrize(("space", "moved"), [("", 0), (":S(1)", 32 * 64)], ids=["far", "near"])
def test_a_kernel_moves_what_it_says_but_for_what_lies_on_the_chip(space: str, moved: int):
    said = 'backend_config={"cost_estimate":{"flops":"7","bytes_accessed":"4096"}}'
    text = f"""ENTRY %main (w: s8[32,64], x: bf16[8,64]) -> f32[8,32] {{
  %w = s8[32,64]{{1,0{space}}} parameter(0)
  %x = bf16[8,64]{{1,0}} parameter(1)
  ROOT %y = f32[8,32]{{1,0}} custom-call(%x, %w), {said}
}}
"""
    cost = measure(parse(text))
    assert (cost.flops, cost.num_bytes) == (7, 4096 - moved)


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule nothing\n")


def planted(x, params):
    w = params["w"]
    full = jax.lax.optimization_barrier(w["values"].astype(jnp.float32) * w["scale"][:, None])
    return jnp.einsum("md,fd->mf", x, full)


def in_a_loop(x, params):
    """The copy is made in the body of a scan, from a slice of a stack."""

    def body(x, w):
        full = jax.lax.optimization_barrier(w["values"].astype(jnp.float32) * w["scale"][:, None])
        return x + jnp.einsum("md,fd->mf", x, full) @ full, None

    return jax.lax.scan(body, x, params["w"])[0]


def named(fn, num_layers=()):
    """Returns the compiled step, its weight named as one of codes is."""
    shapes = {"values": ((*num_layers, F, D), jnp.int8), "scale": ((*num_layers, F), jnp.float32)}
    w = {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}
    x = jax.ShapeDtypeStruct((M, D), jnp.float32)
    text = jax.jit(fn).lower(x, {"w": w}).compile().as_text() or ""
    return parse(text)


@pytest.mark.parametrize(("fn", "layers"), [(planted, ()), (in_a_loop, (L,))], ids=["planted", "in a loop"])
def test_a_wide_copy_of_a_weight_is_found(fn, layers):
    stored = {clean_name("params['w']['values']"): Stored(8, F * D)}
    found = find_copies(named(fn, layers), stored)
    assert any(copy.is_wider and copy.array.size == F * D and copy.array.dtype == "f32" for copy in found)
    assert "params" in str(found[0])


def test_activations_as_large_as_a_weight_are_no_copies():
    """They come out of products; so does a weight's sum."""

    def step(x, params):
        y = jnp.tanh(jnp.einsum("md,fd->mf", x, params["w"]))
        return y @ params["w"] + params["w"].sum(0)

    module = compile_text(lambda x, w: step(x, {"w": w}), ((4 * F, D), jnp.float32), ((F, D), jnp.float32))
    stored = {name: Stored(32, F * D) for name in ("w", "params__w__")}
    assert find_copies(module, stored) == []


@pytest.mark.parametrize("donate", [True, False])
def test_a_cache_updated_in_place_is_no_copy(donate):
    def step(cache, rows, new):
        return cache.at[rows].set(new, mode="drop")

    shapes = ((640, D), jnp.float32), ((M,), jnp.int32), ((M, D), jnp.float32)
    module = compile_text(step, *shapes, donate=(0,) if donate else ())
    found = find_copies(module, {"cache": Stored(32, 640 * D)})
    assert [copy.array.dims for copy in found] == ([] if donate else [(640, D)])


MESH = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: bf16[8,32]) -> bf16[8,256] {
  %p = bf16[8,32]{1,0} parameter(0)
  ROOT %gathered = bf16[8,256]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={1}
}

%body (t: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %t = (s32[], bf16[8,32]{1,0:S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[8,32]{1,0:S(1)} get-tuple-element(%t), index=1
  %start = bf16[8,32]{1,0:S(1)} all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add
  %y = bf16[8,32]{1,0:S(1)} all-reduce-done(%start)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], bf16[8,32]{1,0:S(1)}) tuple(%next, %y)
}

%condition (t: (s32[], bf16[8,32])) -> pred[] {
  %t = (s32[], bf16[8,32]{1,0:S(1)}) parameter(0)
  %bound = s32[] constant(5)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: bf16[8,32]) -> bf16[8,256] {
  %x = bf16[8,32]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], bf16[8,32]{1,0:S(1)}) tuple(%zero, %x)
  %loop = (s32[], bf16[8,32]{1,0:S(1)}) while(%t), condition=%condition, body=%body
  %y = bf16[8,32]{1,0:S(1)} get-tuple-element(%loop), index=1
  %begun = (bf16[8,32]{1,0}, bf16[8,256]{1,0}) all-gather-start(%y), replica_groups=[1,8]<=[8], dimensions={1}
  %all = bf16[8,256]{1,0} all-gather-done(%begun)
  %part = bf16[1,32]{1,0} reduce-scatter(%y), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  ROOT %fusion = bf16[8,256]{1,0} fusion(%y), kind=kCustom, calls=%fused
}
"""


def test_collectives_count_as_often_as_they_run_with_what_crosses():
    """In a loop, in two halves and in a fusion; of the larger side, though it lies on the chip."""
    cost = measure(parse(MESH))
    assert cost.collectives == {"all-reduce": 5, "all-gather": 2, "reduce-scatter": 1}
    one = 8 * 32 * 2
    assert cost.collective_bytes == {"all-reduce": 5 * one, "all-gather": 2 * 8 * one, "reduce-scatter": one}


def test_a_gpus_kernel_says_in_its_metadata_what_it_moves():
    """It is given whole pools and reads some of their pages; its code, a string beside, is not looked at."""
    code = r'ir = "ML\EFR (\22bytes_accessed\22: \221\22", name = "paged_attention"'
    said = r'serialized_metadata = "{\22flops\22: \22400\22, \22bytes_accessed\22: \225000\22}"'
    call = f'custom_call_target="__gpu$xla.gpu.triton", backend_config={{debug = false, {code}, {said}}}'
    text = f"""ENTRY %main (q: bf16[8,32], pool: u16[640,32]) -> bf16[8,32] {{
  %q = bf16[8,32]{{1,0}} parameter(0)
  %pool = u16[640,32]{{1,0}} parameter(1)
  ROOT %out = bf16[8,32]{{1,0}} custom-call(%q, %pool), {call}
}}
"""
    cost = measure(parse(text))
    assert (cost.num_bytes, cost.flops) == (5000, 400)
