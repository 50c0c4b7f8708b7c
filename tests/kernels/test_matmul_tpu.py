"""The TPU's kernel for weights of 4 bits, interpreted, equals the product with the numbers that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize
from jaxinfer.kernels.matmul import tpu
from jaxinfer.kernels.matmul.api import choose_matmul
from jaxinfer.kernels.matmul.cases import CASES, Case, make_inputs
from jaxinfer.kernels.matmul.tpu import multiply_tpu
from tests.kernels.test_attention_tpu import tpu_mesh

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
