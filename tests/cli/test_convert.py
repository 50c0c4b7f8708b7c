"""`jaxinfer convert`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.cli.main import main


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
