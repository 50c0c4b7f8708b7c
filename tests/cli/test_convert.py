"""`jaxinfer convert`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.arrays.quantized import is_quantized
from jaxinfer.build import choose_policy
from jaxinfer.cli.main import main
from jaxinfer.weights.model import open_model


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "give --output"),
        (["--output", "."], 1, "exists already"),
        (["--output", "absent", "--model", "smollm"], 1, "smollm2-135m"),
        (["--output", "absent", "--policy", "float99"], 1, "float99"),
    ],
)
def test_wrong_wishes_make_no_folder(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, says: str
):
    assert main(["convert", *args]) == code
    assert says in capsys.readouterr().err
    assert not Path("absent").exists()


@pytest.mark.slow
def test_converted_model_says_the_same(smollm2_gguf: Path, tmp_path: Path):
    def run(*args: str) -> str:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "jaxinfer", *args, "--policy", "float32"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    folder = str(tmp_path / "converted")
    assert run("convert", "--model", str(smollm2_gguf), "--output", folder) == ""
    prompt = ["--prompt", "The capital of France is", "--temperature", "0", "--model", folder]
    assert run("generate", *prompt) == " Paris.\n\nThe answer is: 2018-01-22 12:12:53.\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "formats"),
    [
        ("w8a8", {"int8:r576", "int8:r64", "int8:r128"}),
        ("weights=checkpoint", {"int4:g32:zero:f16", "int8:g32:f16"}),
    ],
)
def test_a_model_converted_to_few_bits_loads_as_it_lies(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, formats: set[str]
):
    folder = tmp_path / "converted"
    assert main(["convert", "--model", str(smollm2_gguf), "--output", str(folder), "--policy", policy]) == 0
    assert "weights " in capsys.readouterr().err
    model, source = open_model(str(folder)), open_model(str(smollm2_gguf))
    asked, reason = choose_policy("auto", model.policy)
    assert reason == "auto: what the checkpoint was converted with"
    _, notes = model.settle(asked)
    assert len(notes) == 1
    assert notes[0].startswith("weights kept as the checkpoint has them: 21")
    params, wanted = (m.load(m.settle(asked)[0], None, None) for m in (model, source))
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    found = {str(w.format) for w in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(w)}
    assert found == formats
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if policy == "w8a8":
        assert num_bytes < 1.01 * model_size(params)
    else:  # to the byte: blocks taken apart are no larger
        assert source.source is not None
        assert num_bytes == sum(info.num_bytes for info in source.source.tensors.values())


def model_size(params: Any) -> int:
    """Returns how many numbers a model has."""
    return sum(w.size for w in jax.tree.leaves(params, is_leaf=is_quantized))
