"""The TPU's kernel for weights of 4 bits, interpreted, equals the product with the numbers that they stand for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import MULTIPLIERS, dequantize, linear
from jaxinfer.arrays.quantized import InStack, Quantized
from jaxinfer.config import LayerKind
from jaxinfer.kernels.matmul import tpu
from jaxinfer.kernels.matmul.api import choose_matmul
from jaxinfer.kernels.matmul.cases import CASES, Case, make_inputs
from jaxinfer.kernels.matmul.tpu import multiply_tpu
from jaxinfer.model.decoder import Static, stacked_shapes
from jaxinfer.model.stacks import _give_codes, _leave_codes
from jaxinfer.steps.steps import full_logits
from tests.kernels.test_attention_tpu import tpu_mesh
from tests.model.test_decoder_precision import EXPERTS

OURS = [case for case in CASES if case.format.startswith("int4") and "channel" not in case.format]
MORE = [
    Case("mxfp4", 5, 256, 300),
    Case("nvfp4", 64, 512, 48),
    Case("int4:g32", 17, 1024, 513),
    Case("int4:g64:f16", 2, 384, 32),
]


@pytest.mark.parametrize("case", [*OURS, *MORE], ids=str)
def test_kernel_equals_the_product_with_dequantised_weights(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tpu, "BYTES_TILE", 256)  # so that inputs are summed over several tiles
    x, w = make_inputs(case)
    got = np.asarray(multiply_tpu(jnp.asarray(x), w, jnp.dtype("float32"), interpret=True))
    want = x.astype(np.float64) @ np.asarray(dequantize(w, jnp.dtype("float32")), np.float64).T
    size = np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(got / size, want / size, atol=2e-5)


def test_16_bit_rows_round_weights_as_xla_does():
    x, w = make_inputs(Case("int4:g32", 16, 512, 128))
    rows = jnp.asarray(x / np.abs(x).max(1, keepdims=True), jnp.bfloat16)
    got = np.asarray(multiply_tpu(rows, w, jnp.dtype("float32"), interpret=True))
    want = jnp.dot(
        rows.astype(jnp.float32),
        dequantize(w, jnp.dtype("bfloat16")).astype(jnp.float32).T,
        precision="highest",
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", [Case("int8", 4, 64, 32), Case("int4:channel", 4, 64, 32), Case("int4:g32", 513, 64, 32)], ids=str
)
def test_what_xla_multiplies_as_well_is_left_to_it(case: Case):
    x, w = make_inputs(case)
    assert multiply_tpu(jnp.asarray(x), w, jnp.dtype("float32"), interpret=True) is None


def test_the_kernel_is_chosen_on_a_tpu_for_4_bits_and_refused_elsewhere():
    few, more = Policy.parse("w4a16", base="bfloat16"), Policy.parse("w8a16", base="bfloat16")
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        assert choose_matmul("auto", few)[0] == choose_matmul("tpu", few)[0] == "tpu"
        name, why = choose_matmul("auto", more)
        assert name == "xla"
        assert "weights of int8" in why
        for asked in ("tpu", "native"):
            with pytest.raises(ValueError, match=f"matmul={asked} cannot run"):
                choose_matmul(asked, more)
    with pytest.raises(ValueError, match=r"matmul=tpu cannot run.*this is a cpu"):
        choose_matmul("tpu", few)


def test_tiles_hold_whole_groups_and_vectors():
    assert tpu._tile(7168, 224) == 1792
    assert tpu._tile(2048, 64) == 2048
    assert tpu._tile(288, 9) == 288


def test_a_layer_in_its_stack_equals_the_layer_alone():
    case = Case("int4:g64:zero", 5, 256, 40)
    (x, first), (_, second) = make_inputs(case), make_inputs(case, seed=1)
    stack = jnp.stack([first.values, second.values])
    for index, w in enumerate((first, second)):
        own = replace(w, values=InStack(stack, jnp.int32(index)))
        got, want = (
            multiply_tpu(jnp.asarray(x), each, jnp.dtype("float32"), interpret=True) for each in (own, w)
        )
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_scanned_layers_multiply_by_codes_in_their_stack(monkeypatch: pytest.MonkeyPatch):
    """All matrices of a dense layer (qkv, o, gate, up, down) reach the kernel so, the head as it is, experts sliced."""
    seen = []

    def multiply(x, w, out):
        if isinstance(w, Quantized):
            seen.append(w.values.index if isinstance(w.values, InStack) else None)

    monkeypatch.setitem(MULTIPLIERS, "tpu", multiply)
    policy = replace(Policy.parse("weights=int4:g16,compute=float32"), matmul="tpu")
    tokens, lengths = jax.ShapeDtypeStruct((1, 4), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    for kind, matrices in ((LayerKind(), 5), (LayerKind(moe=True), 2)):
        cfg = replace(EXPERTS, tied=False, layers=(kind, kind))
        jax.eval_shape(lambda *args, cfg=cfg: full_logits(args[0], Static(cfg, policy), *args[1:]),
                       stacked_shapes(cfg, policy, [2]), tokens, lengths)  # fmt: skip
        assert len([index for index in seen if index is not None]) == matrices
        seen.clear()


def test_a_scan_gives_each_layer_its_own_codes():
    w = make_inputs(Case("int4:g32", 4, 64, 32))[1]
    both = jax.tree.map(lambda part: jnp.stack([part, part * 0]), w)
    stack = {"mlp": {"up": both, "up_bias": jnp.zeros((2, 32))}, "moe": {"up": both}}
    left = _leave_codes(stack, replace(Policy.parse("w4a16"), matmul="tpu"))
    assert left["mlp"]["up"].values is None
    assert left["moe"]["up"] is both
    for index, want in enumerate((w.values, w.values * 0)):
        layer = jax.tree.map(lambda part, index=index: part[index], left)
        given = _give_codes(layer, stack, jnp.int32(index))["mlp"]["up"]
        np.testing.assert_array_equal(given.values.take(), want)
        np.testing.assert_array_equal(given.scale, both.scale[index])
    assert _leave_codes(stack, Policy.parse("w4a16")) is stack


def test_what_the_kernel_leaves_is_sliced_for_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MULTIPLIERS, "tpu", lambda x, w, out: None)
    policy = Policy.parse("weights=int4:g32,compute=float32")
    x, w = make_inputs(Case("int4:g32", 4, 64, 32))
    own = replace(w, values=InStack(jnp.stack([w.values * 0, w.values]), jnp.int32(1)))
    got, want = (
        np.asarray(linear(jnp.asarray(x), each, replace(policy, matmul=name)))
        for name, each in (("tpu", own), ("xla", w))
    )
    np.testing.assert_array_equal(got, want)
