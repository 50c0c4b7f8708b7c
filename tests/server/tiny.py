"""`jaxinfer serve` as a process of its own, on a checkpoint that starts in a few seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

from tests.acceptance.bigram import Table, Words, write_bigram
from tests.text.vocabularies import CHATML

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CYCLE = "abcdefgh"


def write_model(folder: Path) -> Path:
    """Writes BIGRAM: the letters of `CYCLE` for ever, most likely one after another."""
    words = Words(special=SPECIAL)
    words.write(folder, bos_token="<s>", eos_token="</s>", chat_template=CHATML)
    table = Table(len(words))
    letters = words(*(letter.encode() for letter in CYCLE))
    table.row(range(len(words)), {letters[0]: 0.0, letters[1]: -0.5})
    for last, following in pairwise([*letters, letters[0]]):
        table.row(last, dict.fromkeys(letters, -0.5) | {following: 0.0})
    return write_bigram(folder, table, max_position_embeddings=100_000)


class Process:
    """A server process. Attributes: url: of its root. child: the process. log: its stderr, in a file."""

    def __init__(self, model: Path, log: Path, *flags: str):
        settings = (
            "cache.kv_memory=5000 pages",
            "model.max_model_len=4096",
            "run.prefill_buckets=[[1,64]]",
            "schedule.max_num_batched_tokens=128",
        )
        sets = [f"--set={setting}" for setting in settings]
        command = [sys.executable, "-m", "jaxinfer", "serve", "--model", str(model), "--policy", "float32"]
        command += ["--port", "0", "--max_num_seqs", "4", *sets, *flags]
        self.log = log
        with log.open("w") as errors:
            self.child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line.startswith(f"serving {model} at http://"), log.read_text()
        self.url = line.split()[-1]

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[tuple[Process, httpx.Client]]:
    """Runs a server process and yields it with a client."""
    process = Process(model, log, *flags)
    try:
        with httpx.Client(base_url=process.url, timeout=120) as client:
            yield process, client
    finally:
        process.close()
