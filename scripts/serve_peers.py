"""Servers that `bench_serve.py` measures, each in a process of its own: ours, llama.cpp's, and ours without a model.

python scripts/serve_peers.py          # the last: answers in 20 ms a step, to measure HTTP alone
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from jaxinfer.bench.load import MakeTokens, Shot
from jaxinfer.bench.results import Client, Result
from jaxinfer.cli.settings import RUN_SECTIONS
from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.protocol import StepResult
from jaxinfer.llm import AsyncLLM
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.scheduler import Scheduler, SchedulerConfig
from jaxinfer.weights.fetch import resolve_model
from scripts.bench_host import InstantRunner, Letters

ROOT = Path(__file__).resolve().parent.parent
STEP_SECONDS = 0.02
VOCAB = 32_000  # of the paced engine: what the load generator's ids stay below
START_SECONDS = 600.0  # for a server to load and compile


class Pages(Letters):
    """Letters, for any id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The letter that an id would be if there were only 128."""
        return super().token_bytes(token_id % 128)


class PacedRunner(InstantRunner):
    """Takes as long for a step as a small model does, and no processor."""

    def collect(self, pending: StepResult) -> StepResult:
        """Returns what `dispatch` made, a step later."""
        time.sleep(STEP_SECONDS)
        return super().collect(pending)

    @staticmethod
    def make_engine() -> Engine:
        """Returns an engine of 16 rows over such a device."""
        config = SchedulerConfig(max_num_seqs=16, max_len=2048, max_num_batched_tokens=2048)
        scheduler = Scheduler(config, PagePool(16 * 128, 16))
        return Engine(scheduler, PacedRunner(), Pages(), vocab_size=VOCAB, eos_ids=())

    @staticmethod
    def open() -> AsyncLLM:
        """Returns a door to such an engine."""
        return AsyncLLM.from_engine(PacedRunner.make_engine())


class Pausing:
    """Clients that think between two requests, so that these come at any moment of a step.

    Without it a closed loop is locked to the engine's steps: every request leaves when a step has ended, within a
    millisecond of the moment at which the next is planned, and who just misses that waits for a whole step. The mean
    then tells how many won the race, not what is added to each.

    Args:
      client: sends. steps: the most seconds to think, in steps. seed: of the pauses.
    """

    def __init__(self, client: Client, steps: float, seed: int):
        self._client, self._most, self._random = client, steps * STEP_SECONDS, random.Random(seed)

    @property
    def make_tokens(self) -> MakeTokens:
        """The client's."""
        return self._client.make_tokens

    async def send(self, shot: Shot, result: Result) -> None:
        """Sends one request after a pause, which does not count."""
        await asyncio.sleep(self._random.uniform(0, self._most))
        await self._client.send(shot, result)


@contextmanager
def serve_paced() -> Generator[str, None, None]:
    """Runs this file as a process and yields its URL."""
    with _process([sys.executable, __file__], subprocess.PIPE) as process:
        yield _read_url(process)


@contextmanager
def serve_ours(args: argparse.Namespace, shapes: dict[str, Any]) -> Generator[str, None, None]:
    """Runs `jaxinfer serve` and yields its URL.

    Args:
      args: ``model``, and ``set``, which goes over the shapes.
      shapes: settings of the run that `bench_serve.py` takes for every case.

    Raises:
      KeyError: a setting that `jaxinfer serve` has not.
    """
    paths = {name: f"{section}.{key}" for section, keys in RUN_SECTIONS.items() for key, name in keys.items()}
    settings = [f"{paths[name]}={_toml(value)}" for name, value in {**shapes, **dict(args.set)}.items()]
    command = [sys.executable, "-m", "jaxinfer", "serve", "--model", args.model, "--port", "0"]
    command += [word for setting in settings for word in ("--set", setting)]
    command += ["--set", "server.access_log=false"]
    args.say(f"starting {' '.join(command[1:])}")
    with _process(command, subprocess.PIPE) as process:
        yield _read_url(process)


@contextmanager
def serve_llama_cpp(args: argparse.Namespace) -> Generator[tuple[str, str], None, None]:
    """Runs llama.cpp's own server where ``--llama_server`` names it, else llama-cpp-python's.

    Yields:
      Its URL, and what to know of it.
    """
    model, port = str(resolve_model(args.model)), _free_port()
    if args.llama_server:
        flags = f"-c {16 * 512} -np 16 -t {os.cpu_count()} --host 127.0.0.1 --port {port}"
        command = [args.llama_server, "-m", model, *flags.split()]
        note = "the peer is llama-server: 16 slots, continuous batching"
    else:
        flags = f"--n_ctx 2048 --n_threads {os.cpu_count()} --interrupt_requests false --port {port} --host 127.0.0.1"
        command = [args.llama_cpp_python, "-m", "llama_cpp.server", "--model", model, *flags.split()]
        note = (
            "the peer is llama-cpp-python's server: it has no batching and answers one request after another; "
            "--llama_server or --peer_url names one that has"
        )
    args.say(f"starting {' '.join(command)}")
    with _process(command, subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process)
        yield url, note


@contextmanager
def _process(command: Sequence[str], stdout: int) -> Generator[subprocess.Popen[str], None, None]:
    """Runs a command until the block ends."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _read_url(process: subprocess.Popen[str]) -> str:
    """Returns the URL that the server prints when it is ready."""
    assert process.stdout
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        raise RuntimeError(f"a server ended before it was ready, after {line!r}")
    return found.group()


def _wait_for(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server at {url} ended, or was not ready after {START_SECONDS:g} s")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _toml(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def main() -> None:
    """Serves the paced engine on a free port until a signal ends it."""
    from jaxinfer.server.config import ServerConfig
    from jaxinfer.server.run import bind, serve, url_of
    from jaxinfer.server.service import Service

    config = ServerConfig(("paced",), drain_seconds=0.0, access_log=False)
    with bind("127.0.0.1", 0) as taken:
        service = Service(AsyncEngine(PacedRunner.make_engine()), config)
        serve(service, taken, lambda: print(f"serving at {url_of(taken)}", flush=True))


if __name__ == "__main__":
    main()
