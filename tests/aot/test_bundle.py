"""Bundles: a run's executables made ahead, loaded whole by another process or refused with what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import jax
import pytest

from jaxinfer.cli.main import main
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.steps.bundle import MANIFEST, BundleError, BundleWriter
from jaxinfer.steps.keep import surroundings
from tests.acceptance.engines import write_toy
from tests.aot.test_compile import open_mesh

PROMPT = "w9 w4 w17 w33 w21"
RUN: dict[str, Any] = {
    "policy": "float32",
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "prefill_buckets": [[1, 16]],
    "enable_prefix_caching": False,
    "draws": ["greedy"],
}
NAMES = ["prefill 1x16 over 16 pages", "decode 2 over 16 pages", "greedy 2", "install"]
FRESH = """
import sys
from jaxinfer.steps.compiled import count_compilations
from jaxinfer.cli.main import main
with count_compilations() as seen:
    code = main(["generate", "--bundle", sys.argv[1], "--prompt", sys.argv[2], "--max_tokens", "12"])
print(code, len(seen), seen)
"""


def compile_for(target: str, toy: Path, folder: Path) -> list[str]:
    """Returns the command that compiles the run into a bundle."""
    sets = [
        f"schedule.max_num_seqs={RUN['max_num_seqs']}",
        f"schedule.max_num_batched_tokens={RUN['max_num_batched_tokens']}",
        f"run.prefill_buckets={RUN['prefill_buckets']}",
        "cache.enable_prefix_caching=false",
        'run.draws=["greedy"]',
    ]
    words = ["compile", "--target", target, "--model", str(toy), "--policy", RUN["policy"]]
    return [*words, "--bundle", str(folder), *(f"--set={one}" for one in sets)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("bundled") / "toy")


@pytest.fixture(scope="module")
def bundle(toy: Path) -> Path:
    folder = toy.with_name("bundle")
    assert main(compile_for("cpu", toy, folder)) == 0
    return folder


def change(bundle: Path, folder: Path, **parts: str) -> Path:
    """Returns a copy of a bundle that says that it was made for something else."""
    copytree(bundle, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["made_for"] |= parts
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_another_process_generates_the_same_from_it_and_compiles_nothing(
    toy: Path, bundle: Path, tmp_path: Path
):
    env = os.environ | {
        "JAXINFER_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", FRESH, str(bundle), PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    text, counts = done.stdout.rstrip().rsplit("\n", 1)
    assert counts == "0 0 []"
    assert done.stderr.count(": loaded in ") == len(NAMES)
    assert not (tmp_path / "cache").exists()
    llm = LLM(str(toy), compile_cache=False, **RUN)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12))
    assert text.strip() == output.outputs[0].text.strip() != ""


def test_the_manifest_says_what_is_in_it_and_for_what(toy: Path, bundle: Path):
    manifest = json.loads((bundle / MANIFEST).read_text())
    assert list(manifest["executables"]) == NAMES
    made_for = manifest["made_for"]
    assert made_for == surroundings(jax.devices()[0]) | made_for
    assert (made_for["platform"], made_for["jax"]) == ("cpu", jax.__version__)
    assert made_for["mesh"] == "one device"
    assert {"jaxlib", "source", "model.layers", "policy.kv", "weights", "cache", "slots"} <= made_for.keys()
    run = manifest["run"]
    assert (run["model"], run["max_model_len"], run["kv_memory"]) == (str(toy), 256, "16 pages")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_num_seqs": 2}, r"slots: got .*2, 256.*, expected .*1, 256"),
        ({"policy": "bfloat16"}, r"policy\.weights: got .*bfloat16.*, expected .*float32"),
        ({"kv_memory": "20 pages"}, r"cache: got .*20, 16, .*, expected .*16, 16, "),
        (
            {"draws": ["greedy", "score"]},
            r"has no 'score 1x16 over 16 pages' \(1 of 5 executables are missing",
        ),
        ({"mesh": "tensor=1"}, r"mesh: got tensor=1, expected one device"),
    ],
)
def test_another_run_is_refused_with_what_differs(bundle: Path, settings: dict[str, Any], says: str):
    with pytest.raises(BundleError, match=says):
        LLM(bundle=str(bundle), **settings)


def test_another_version_source_or_model_is_refused_with_what_differs(bundle: Path, tmp_path: Path):
    other = change(bundle, tmp_path / "other", jaxlib="0.1.2", source="1234", **{"model.vocab_size": "7"})
    with pytest.raises(
        BundleError, match=r"jaxlib: got .*, expected 0\.1\.2; .*vocab_size: got 128, expected 7"
    ) as got:
        LLM(bundle=str(other))
    assert "source: got" in str(got.value)
    assert "make it anew" in str(got.value)


def test_what_is_damaged_or_no_bundle_is_refused(bundle: Path, tmp_path: Path):
    damaged = change(bundle, tmp_path / "damaged")
    for file in damaged.glob("*.executable"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BundleError, match="cannot be loaded: it is damaged; make it anew"):
        LLM(bundle=str(damaged))
    with pytest.raises(FileExistsError, match="exists; name a new folder"):
        BundleWriter(bundle)
    with pytest.raises(BundleError, match=r"has no bundle\.json that can be read"):
        LLM(bundle=str(tmp_path / "nowhere"))
    damaged.chmod(0o777)
    with pytest.raises(BundleError, match="others may write to it"):
        LLM(bundle=str(damaged))
    (damaged / MANIFEST).write_text('{"format": 2}')
    with pytest.raises(BundleError, match="format: got 2, expected 1"):
        LLM(bundle=str(damaged))


@pytest.mark.parametrize(("target", "platform"), [("tpu:v6e:1", "tpu"), ("gpu:h100", "gpu")])
def test_one_for_devices_that_are_not_here_is_written_whole_and_refused_here(
    toy: Path, tmp_path: Path, target: str, platform: str
):
    open_mesh(target)  # or skip
    folder = tmp_path / "bundle"
    assert main(compile_for(target, toy, folder)) == 0
    manifest = json.loads((folder / MANIFEST).read_text())
    assert list(manifest["executables"]) == NAMES
    keys = {one["key"] for one in manifest["executables"].values()}
    assert {file.stem for file in folder.glob("*.executable")} == keys
    assert manifest["made_for"]["platform"] == platform
    assert manifest["made_for"]["compiler"].startswith(("libtpu ", "jax-cuda13-pjrt "))
    with pytest.raises(
        BundleError, match=f"was made for another run: platform: got cpu, expected {platform}; device"
    ):
        LLM(bundle=str(folder))


def test_several_hosts_devices_are_refused(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    open_mesh("tpu:v5p:2x2x2")  # or skip
    assert main([*compile_for("tpu:v5p:2x2x2", toy, tmp_path / "bundle"), "--mesh", "tensor=8"]) == 1
    assert "whose devices are 2 hosts'; a bundle is of one process" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()
