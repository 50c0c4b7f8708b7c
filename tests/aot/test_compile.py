"""Serving steps compiled for TPUs and GPUs that are not here; needs the extra ``aot``."""

import json
from importlib.util import find_spec

import pytest

from jaxinfer.aot.report import Workload, compile_step
from jaxinfer.aot.table import COLUMNS, describe_step, row_of, tell
from jaxinfer.aot.targets import Target, open_target, single_mesh
from jaxinfer.arrays.precision import Policy
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, RopeConfig

NEEDS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
TARGETS = ("tpu:v5e", "tpu:v5p", "tpu:v6e:2x4", "gpu:a100", "gpu:h100", "gpu:h200")
# Llama 3's proportions, and sizes at which a copied matrix is more than what a step needs anyway.
CFG = ModelConfig(
    family="llama",
    vocab_size=4096,
    d_model=1024,
    max_len=1024,
    layers=(LayerKind(),) * 3,
    attention=AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5),
    mlp=MlpConfig(ffn_dim=3584),
    ropes=(RopeConfig(theta=5e5, rotary_dim=128),),
)
DECODE = Workload(rows=32, context=1024)
PREFILL = Workload(rows=32, context=1024, prefill=512)


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def compile_for(text: str, policy: str, workload: Workload):
    target = Target.parse(text)
    if not is_installed(NEEDS[target.platform]):
        pytest.skip(f"{NEEDS[target.platform]} is not installed")
    mesh = single_mesh(open_target(target))
    return compile_step(CFG, Policy.parse(policy, base="bfloat16"), target, mesh, workload)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_step_takes_its_arguments_and_copies_none_of_them(target, workload):
    report = compile_for(target, "bfloat16", workload)
    assert report.fits
    assert report.weights == 2 * (2 * 4096 * 1024 + 3 * 1024 * (48 * 128 + 3 * 3584)) + 4 * 7 * 1024
    assert report.cache == 2 * 2 * 3 * 32 * 1024 * 8 * 128
    assert report.rest < 0.01 * (report.weights + report.cache)
    assert [str(copy) for copy in report.copies] == []
    assert report.cost.flops == pytest.approx(report.model_flops, rel=0.1)
    assert not report.cost.host_calls
    assert not report.cost.collectives
    if workload is DECODE:
        assert report.temporary < 0.2 * report.weights


def test_a_model_that_does_not_fit_is_reported():
    report = compile_for("tpu:v5e", "bfloat16", Workload(rows=8192, context=1024))
    assert not report.fits
    assert "of 15.75GiB" in report.why
    assert row_of(report)[0].startswith("no")
    assert "does not fit" in tell("decode", report, Target.parse("tpu:v5e"))


def test_a_report_is_told_in_words_rows_and_json():
    report = compile_for("gpu:h100", "bfloat16", DECODE)
    assert "temporary" in tell(str(DECODE), report, Target.parse("gpu:h100"))
    assert len(row_of(report)) == len(COLUMNS)
    assert json.loads(json.dumps(describe_step(report)))["argument_bytes"]["cache"] == report.cache
