"""Starts the tests that need eight devices, a process for each file of ``eight/``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICK

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(path.name for path in (HERE / "eight").glob("test_*.py")))
def test_on_eight_devices(name: str):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:xdist",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    done = subprocess.run(
        [*command, str(HERE / "eight" / name)],
        check=False,
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK},
    )
    assert done.returncode == 0, done.stdout + done.stderr
