"""Serving steps compiled for TPUs and GPUs that are not here; needs the extra ``aot``."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxinfer.aot.models import PRESETS
from jaxinfer.aot.report import Workload, compile_step, compile_table
from jaxinfer.aot.table import COLUMNS, describe_executables, describe_step, row_of, tell, tell_table
from jaxinfer.aot.targets import Target, make_mesh, open_target
from jaxinfer.arrays.precision import Policy
from jaxinfer.cli.main import main
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, RopeConfig

NEEDS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
TARGETS = ("tpu:v5e", "tpu:v5p", "tpu:v6e:2x4", "gpu:a100", "gpu:h100", "gpu:h200")
MATRICES = 3 * 1024 * (48 * 128 + 3 * 3584)
TABLES = 2 * 4096 * 1024
NORMS = 4 * 7 * 1024
PAGES = 2 * 3 * 32 * 1024 * 8 * 128  # numbers of keys and values
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
SHORT = Workload(
    rows=32, context=1024, prefill=128
)  # fewer tokens than ids of a share: rows of a table are no copy

IN_CI = (("tpu:v6e:2x4", DECODE), ("gpu:h100", DECODE))  # of whole steps, which take long


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def open_mesh(text: str, mesh: str = ""):
    target = Target.parse(text)
    if not is_installed(NEEDS[target.platform]):
        pytest.skip(f"{NEEDS[target.platform]} is not installed")
    return target, make_mesh(open_target(target), mesh)


def compile_for(text: str, policy: str, workload: Workload, mesh: str = ""):
    return compile_step(CFG, Policy.parse(policy, base="bfloat16"), *open_mesh(text, mesh), workload)


@pytest.mark.parametrize(
    ("target", "workload"),
    [
        pytest.param(target, workload, marks=() if (target, workload) in IN_CI else pytest.mark.ahead)
        for target in TARGETS
        for workload in (DECODE, PREFILL)
    ],
    ids=str,
)
def test_a_step_takes_its_arguments_and_copies_none_of_them(target: str, workload: Workload):
    report = compile_for(target, "bfloat16", workload)
    assert report.fits
    assert report.weights == 2 * (TABLES + MATRICES) + NORMS
    assert report.cache == 2 * PAGES
    assert report.rest < 0.01 * (report.weights + report.cache)
    assert [str(copy) for copy in report.copies] == []
    assert report.cost.flops == pytest.approx(report.model_flops, rel=0.1)
    assert not report.cost.host_calls
    assert not report.cost.collectives
    if workload is DECODE:
        assert report.temporary < 0.2 * report.weights
        assert report.cost.num_bytes < 1.15 * (report.weights + report.cache)


@pytest.mark.ahead
@pytest.mark.parametrize("target", ["tpu:v5e", "tpu:v6e:2x4", "gpu:h100"])
@pytest.mark.parametrize("policy", ["w8a16", "w8a8", "weights=fp8"])
def test_codes_of_8_bits_meet_rows_as_they_lie(target, policy):
    """They are widened inside of the product's fusion, if at all: none is written to memory."""
    report = compile_for(target, policy, DECODE)
    scales = 4 * (TABLES // 1024 + 3 * (48 * 128 + 1024 * 4 + 2 * 3584))
    assert TABLES + MATRICES <= report.weights <= TABLES + MATRICES + NORMS + scales
    assert [str(copy) for copy in report.copies] == []
    assert report.temporary < 0.3 * report.weights


@pytest.mark.ahead
@pytest.mark.parametrize("policy", ["w8a16,kv8", "w8a8,kv=fp8", "w4a16,kv4"])
def test_few_bits_are_few_bytes_of_arguments(policy):
    report = compile_for("gpu:h100", policy, DECODE)
    plain = 2 * (TABLES + MATRICES + PAGES) + NORMS
    # Pages are read where they lie, and no weight is written out; sums of parts of the products are written between.
    if "a16" in policy:
        assert report.cost.num_bytes < 1.5 * (report.weights + report.cache)
    # The tables keep 8 bits, and this model's are a larger share than in Llama 3.
    assert (report.weights + report.cache + report.rest) / plain < (0.54 if "8" in policy else 0.32)


@pytest.mark.ahead
def test_a_model_that_does_not_fit_is_reported():
    report = compile_for("tpu:v5e", "bfloat16", Workload(rows=2048, context=1024))
    assert not report.fits
    assert "of 15.75GiB" in report.why
    assert row_of(report)[0].startswith("no")
    assert "does not fit" in tell("decode", report, Target.parse("tpu:v5e"))


@pytest.mark.ahead
def test_a_report_is_told_in_words_rows_and_json():
    report = compile_for("gpu:h100", "bfloat16", DECODE)
    assert "temporary" in tell(str(DECODE), report, Target.parse("gpu:h100"))
    assert len(row_of(report)) == len(COLUMNS)
    assert json.loads(json.dumps(describe_step(report)))["argument_bytes"]["cache"] == report.cache


@pytest.mark.ahead
@pytest.mark.parametrize(
    ("target", "mesh"),
    [
        ("tpu:v6e:2x4", "tensor=8"),
        ("tpu:v5p:2x2x2", "tensor=4,data=2"),
        ("tpu:v5e:4x4", "tensor=16"),
        ("gpu:h100:8", "tensor=8"),
    ],
)
@pytest.mark.parametrize("workload", [DECODE, SHORT], ids=["decode", "prefill"])
def test_a_meshs_devices_hold_their_shares_and_only_sums_cross(target: str, mesh: str, workload: Workload):
    report = compile_for(target, "bfloat16", workload, mesh)
    ways = 16 if "16" in mesh else 4 if "4" in mesh else 8
    copies = 2 if ways == 16 else 1  # of each kv head
    attention = 3 * 1024 * 128 * (16 + 16 + copies * 16)
    mlp = 3 * 1024 * 3 * 3584
    assert report.weights == 2 * (TABLES + attention + mlp) // ways + NORMS
    assert report.roles["matrices"] == 2 * (attention + mlp) // ways
    assert sum(report.roles.values()) == report.weights
    assert report.cache == copies * 2 * PAGES // (8 if "data" in mesh else ways)
    assert [str(copy) for copy in report.copies] == []
    # Attention is a fifth of this model's products, and how often its loop runs is an estimate. Of a short prompt the
    # TPU's kernel multiplies the masked half too.
    masked = 0.05 if workload is SHORT and target.startswith("tpu") else 0
    assert report.cost.flops == pytest.approx(report.model_flops, rel=0.35 if copies > 1 else 0.2 + masked)
    assert not report.cost.host_calls
    # Two sums a layer, and one of embeddings.
    assert report.cost.collectives.keys() == {"all-reduce"}
    assert report.cost.collectives["all-reduce"] == 2 * 3 + 1


@pytest.mark.ahead
def test_the_command_line_compiles_over_a_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    open_mesh("gpu:h100:2")  # or skip
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS["llama-3-8b"] | small | {"vocab_size": 1024}))
    words = ["compile", "--target", "gpu:h100:2", "--model", str(path), "--rows", "8", "--context", "64"]
    assert main([*words, "--mesh", "tensor=2", "--policy", "w8a16,kv8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["mesh"], told["target"]) == ("tensor=2", "gpu:h100:1x1x2")
    decode, prefill = told["steps"].values()
    assert decode["collectives"] == prefill["collectives"] == {"all-reduce": 2 * 2 + 1}
    assert sum(decode["weight_bytes"].values()) == decode["argument_bytes"]["weights"]
    assert decode["collective_bytes"]["all-reduce"] >= 5 * 8 * 256 * 2
    assert main([*words, "--mesh", "tensor=4"]) == 1
    assert "takes 4 devices, there are 2" in capsys.readouterr().err


@pytest.mark.ahead
def test_a_bucket_tables_executables_are_counted_with_their_seconds():
    _, mesh = open_mesh("gpu:h100:2", "tensor=2")
    said: list[str] = []
    made = compile_table(CFG, Policy.parse("bfloat16"), mesh, PREFILL, said.append)
    # Two prefill shapes, two of decode, one with each prefill; draws of 2, 8 and 32 rows; install and recall.
    assert len(made) == len(said) == 14
    assert all(one.seconds > 0 for one in made.values())
    assert "decode 32 over 64 pages" in made
    told = describe_executables(made, 3.0)
    assert (told["count"], told["seconds"], len(told["each"])) == (14, 3.0, 14)
    assert "14 executables" in tell_table(made, 3.0)
