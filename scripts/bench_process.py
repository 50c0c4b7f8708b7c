"""The processes of a benchmark: engines that answer requests, and starts from nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORKER = Path(__file__).with_name("bench_peers.py")


@dataclass(frozen=True)
class EngineSpec:
    """What to measure: a name whose first word is its kind, the interpreter, and what `load` takes."""

    name: str
    python: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """A key of `bench_peers.PEERS`."""
        return self.name.split()[0]


class BenchError(RuntimeError):
    """An engine did not do what it was asked for."""


class Worker:
    """An engine in a process of its own.

    Args:
      spec: which. script: speaks the protocol of `bench_peers`. log: gets what the process says.
    """

    def __init__(self, spec: EngineSpec, log: Path, script: Path = WORKER):
        self.spec, self.log, self.peak_bytes = spec, log, 0
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [spec.python, str(script), spec.kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Returns the answer to one request.

        Raises:
          BenchError: the engine failed, or died.
        """
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(json.dumps({"op": op, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise BenchError(f"{self.spec.name}: {op}: {answer['error']}; its messages are in {self.log}")
        self.peak_bytes = answer["peak_bytes"]
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def start_ours(spec: EngineSpec, model: Path, cache: Path, log: Path) -> tuple[float, float]:
    """Runs `jaxinfer generate` and returns the seconds to its first character, and its processor seconds."""
    words = ["generate", "--model", str(model), "--policy", spec.options["policy"], "--max_tokens", "8"]
    command = [spec.python, "-m", "jaxinfer", *words, "--prompt", "The capital of France is"]
    environment = os.environ | {"JAXINFER_CACHE": str(cache), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    before, start = os.times(), time.perf_counter()
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, bufsize=0
        ) as process,
    ):
        assert process.stdout
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first:
        raise BenchError(f"{shlex.join(command)} returned {process.returncode}; its messages are in {log}")
    after = os.times()
    own = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, own


def can_import(python: str, modules: Sequence[str]) -> bool:
    """Tells whether an interpreter has modules, without importing them."""
    code = f"import importlib.util as u; raise SystemExit(not all(map(u.find_spec, {list(modules)!r})))"
    try:
        return subprocess.run([python, "-c", code], check=False).returncode == 0
    except OSError:
        return False
