"""The GPU's kernel for weights of 4 bits, interpreted, equals the product with the numbers that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quant import dequantize
from jaxinfer.kernels.matmul import gpu
from jaxinfer.kernels.matmul.api import choose_matmul
from jaxinfer.kernels.matmul.cases import Case, make_inputs
from jaxinfer.kernels.matmul.gpu import multiply_gpu
from tests.kernels.test_attention_gpu import gpu_mesh

CASES = [
    Case("int4:g32", 2, 1024, 513),  # split along inputs, odd outputs
    Case("int4:g64:zero", 3, 384, 32),
    Case("int4:g256:f16", 2, 768, 40),  # a group is several tiles
    Case("mxfp4", 5, 288, 70),  # inputs of less than whole tiles
    Case("nvfp4", 64, 512, 48),
    Case("int4:g8", 130, 64, 80),  # two tiles of rows
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_the_product_with_dequantised_weights(case: Case):
    x, w = make_inputs(case)
    got = np.asarray(multiply_gpu(jnp.asarray(x), w, jnp.dtype("float32"), interpret=True))
    want = x.astype(np.float64) @ np.asarray(dequantize(w, jnp.dtype("float32")), np.float64).T
    size = np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(got / size, want / size, atol=2e-5)


def test_16_bit_rows_round_weights_as_xla_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "PROGRAMS", 1)  # the result is written as it is, without sums to join
    x, w = make_inputs(Case("int4:g32", 16, 512, 128))
    rows = jnp.asarray(x / np.abs(x).max(1, keepdims=True), jnp.bfloat16)
    got = np.asarray(multiply_gpu(rows, w, jnp.dtype("float32"), interpret=True))
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
    assert multiply_gpu(jnp.asarray(x), w, jnp.dtype("float32"), interpret=True) is None


def test_the_kernel_is_chosen_on_a_gpu_for_4_bits_and_refused_elsewhere(monkeypatch: pytest.MonkeyPatch):
    few, more = Policy.parse("w4a16", base="bfloat16"), Policy.parse("w8a16", base="bfloat16")
    with gpu_mesh():
        assert choose_matmul("auto", few)[0] == choose_matmul("gpu", few)[0] == "gpu"
        name, why = choose_matmul("auto", more)
        assert name == "xla"
        assert "weights of int8" in why
        for asked in ("tpu", "gpu", "native"):
            with pytest.raises(ValueError, match=f"matmul={asked} cannot run"):
                choose_matmul(asked, more)
        monkeypatch.setattr("jaxinfer.kernels.matmul.api.gpu_capability", lambda: "7.5")
        assert choose_matmul("auto", few) == (
            "xla",
            "the GPU's kernels need compute capability 8.0, this one has 7.5",
        )
    with pytest.raises(ValueError, match=r"matmul=gpu cannot run.*this is a cpu"):
        choose_matmul("gpu", few)


def test_the_policy_has_the_kernel_multiply(monkeypatch: pytest.MonkeyPatch):
    """`linear` calls what the policy names, also with rows of 16 bits."""
    from jaxinfer.arrays import quant

    called = []
    monkeypatch.setitem(quant.MULTIPLIERS, "gpu", lambda x, w, out: called.append(x.dtype))
    x, w = make_inputs(Case("int4:g32", 2, 64, 32))
    policy = Policy(weights=w.format, compute="bfloat16", matmul="gpu")
    assert jax.eval_shape(lambda x: quant.linear(x, w, policy), x.astype(jnp.bfloat16)).shape == (2, 32)
    assert called == [jnp.bfloat16]
