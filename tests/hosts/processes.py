"""Several processes of `jaxinfer serve` on this machine as one run, with what they say in files."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
START, END = 240, 30  # seconds: to start on a busy machine, and in which the loss of one must end all
SETTINGS = (
    "schedule.max_num_seqs=4",
    "schedule.max_num_batched_tokens=32",
    "run.prefill_buckets=[[2,16]]",
    "cache.kv_memory=40 pages",
)


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Run:
    """The processes of a run.

    Args:
      model: a checkpoint, or its name in each of ``folders``. folder: for what they say. count: of processes.
      devices: virtual ones of each. mesh: over all of them. flags: more of them.
      folders: that they run in, one each; None runs all in the repository.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        count: int,
        devices: int,
        mesh: str,
        flags: Sequence[str] = (),
        folders: Sequence[Path] | None = None,
    ) -> None:
        # Runs of one shape load what the first of them compiled.
        kept = (model if folders is None else folder) / "executables"
        sets = [f"--set={setting}" for setting in (*SETTINGS, f"run.compile_cache={kept}")]
        command = [sys.executable, "-m", "jaxinfer", "serve", "--model", str(model), "--policy", "float32"]
        command += ["--mesh", mesh, "--port", "0", "--num_processes", str(count), *sets, *flags]
        command += ["--coordinator", f"localhost:{free_port()}"]
        self.url = ""
        self._logs = [folder / f"process{index}.log" for index in range(count)]
        self.children: list[subprocess.Popen[bytes]] = []
        for index, log in enumerate(self._logs):
            with log.open("wb") as out:
                child = subprocess.Popen(
                    [*command, "--process_id", str(index)],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT if folders is None else folders[index],
                    env=os.environ
                    | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)},
                )
            self.children.append(child)

    def log(self, index: int) -> str:
        """Returns what a process has said so far."""
        return self._logs[index].read_text(errors="replace")

    def wait_for(self, index: int, pattern: str) -> str:
        """Waits until a process has said something, and returns the first group of the pattern."""
        for _ in range(START * 20):
            if found := re.search(pattern, self.log(index)):
                return found[1]
            assert self.children[index].poll() is None, self.logs()
            threading.Event().wait(0.05)
        raise AssertionError(f"{pattern} did not come\n{self.logs()}")

    def wait_until_served(self) -> str:
        """Returns the address once requests are taken."""
        self.url = self.wait_for(0, r"serving \S+ at (http://\S+)")
        return self.url

    def send(self, index: int, number: signal.Signals) -> None:
        """Sends a process a signal."""
        self.children[index].send_signal(number)

    def codes(self) -> list[int]:
        """Waits until all have ended, for as long as the loss of one may take, and returns their exit codes."""
        give_up = time.monotonic() + END
        try:
            return [child.wait(timeout=max(0.1, give_up - time.monotonic())) for child in self.children]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not all have ended\n{self.logs()}") from None

    def logs(self) -> str:
        """Returns what all have said, for a failing test."""
        return "\n".join(f"--- {index}\n{self.log(index)[-3000:]}" for index in range(len(self._logs)))


@contextmanager
def running(
    model: Path,
    folder: Path,
    count: int,
    devices: int,
    mesh: str,
    *flags: str,
    folders: Sequence[Path] | None = None,
) -> Iterator[Run]:
    """Starts the processes of a run, and ends those that are left."""
    run = Run(model, folder, count, devices, mesh, flags, folders)
    try:
        yield run
    finally:
        for child in run.children:
            child.kill()
            child.wait()
