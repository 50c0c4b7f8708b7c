"""Two replicas on Ray Serve, in a process of their own: one endpoint, prefixes that stay together, a death."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.tiny import CYCLE, write_model

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SETTINGS = (
    "model.policy=float32",
    "model.max_model_len=16384",
    "cache.kv_memory=5000 pages",
    "run.prefill_buckets=[[1,64]]",
    'run.draws=["greedy"]',
    "schedule.max_num_batched_tokens=128",
    "schedule.max_num_seqs=4",
    "sampling.temperature=0",
)


class Cluster:
    """The process. Attributes: client: of its endpoint."""

    def __init__(self, folder: Path):
        model = write_model(folder / "model")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        args = {"set": [f"model.name={model}", *SETTINGS], "min_replicas": 2, "max_replicas": 2}
        self._log = (folder / "log").open("w")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.replicas.ray_process", str(port), json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,  # Ray has children of its own; all end together
        )
        assert self._read() == "serving", (folder / "log").read_text()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)

    def _read(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()

    def kill(self, name: str) -> None:
        """Ends a replica's process."""
        assert self._child.stdin is not None
        print(name, file=self._child.stdin, flush=True)
        assert self._read() == f"killed {name}"

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        """Returns the answer to a prompt."""
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    @contextmanager
    def stream(self, prompt: str, **fields: Any) -> Iterator[httpx.Response]:
        """Yields an answer that comes in events."""
        body = {"prompt": prompt, "stream": True, **fields}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            yield answer

    def close(self) -> None:
        """Ends Ray, in order if it will."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(60)
        finally:
            if self._child.poll() is None:
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait()
            self._child.stdout.close()
            self._log.close()
            self.client.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    one = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        yield one
    finally:
        one.close()


def letters(first: str, count: int) -> str:
    """Returns what the model says after a letter."""
    start = CYCLE.index(first)
    return "".join(CYCLE[(start + 1 + i) % len(CYCLE)] for i in range(count))


def read_events(answer: httpx.Response) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_one_endpoint_answers_as_a_server_does(cluster: Cluster):
    answer = cluster.complete("abc", max_tokens=9)
    assert answer.json()["choices"][0]["text"] == letters("c", 9)
    with cluster.stream("abc", max_tokens=9) as streamed:
        *events, end = read_events(streamed)
    assert "".join(event["choices"][0]["text"] for event in events) == letters("c", 9)
    assert end == "[DONE]"
    wrong = cluster.complete("abc", max_tokens="many")
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "max_tokens"
    assert cluster.client.get("/v1/models").json()["object"] == "list"


def test_prompts_that_begin_alike_meet_at_one_replica(cluster: Cluster):
    families = ["abcdefgh" * 40, "hgfedcba" * 40]
    seen: dict[str, list[tuple[str, int]]] = {family: [] for family in families}
    for tail in ("a", "b", "c", "d", "e", "f"):
        for family in families:
            answer = cluster.complete(family + tail, max_tokens=2)
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            seen[family].append((answer.headers["x-replica"], cached))
    homes = [{home for home, _ in answers} for answers in seen.values()]
    assert len(homes[0]) == len(homes[1]) == 1
    assert homes[0] != homes[1]
    for answers in seen.values():
        assert [cached for _, cached in answers] == [0] + [320] * 5  # 5 of 6 hit, all 20 pages of it


def test_a_client_that_leaves_frees_its_row(cluster: Cluster):
    with cluster.stream("cdefghab" * 30, max_tokens=16_000) as streamed:
        home = streamed.headers["x-replica"]
        next(streamed.iter_lines())
    for _ in range(1000):  # each asks over HTTP and waits for an answer: seconds in all
        metrics = cluster.client.get("/metrics")
        if metrics.headers["x-replica"] == home and "num_requests_running 0.0" in clean(metrics.text):
            return
    raise AssertionError("the request still runs")


def clean(metrics: str) -> str:
    """Returns metrics without their labels."""
    return re.sub(r"\{[^}]*\}", "", metrics)


def test_a_killed_replica_costs_only_what_was_streamed(cluster: Cluster):
    prompt = "bcdefgha" * 30
    home = cluster.complete(prompt, max_tokens=1).headers["x-replica"]
    whole: list[httpx.Response] = []
    asked = threading.Thread(target=lambda: whole.append(cluster.complete(prompt, max_tokens=6000)))
    with cluster.stream(prompt, max_tokens=12_000) as streamed:
        assert streamed.headers["x-replica"] == home
        lines = streamed.iter_lines()
        next(lines)
        asked.start()
        for _ in range(600):  # of two lines an event: by then the other request is there as well
            next(lines)
        cluster.kill(home)
        *_, error, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    asked.join()
    assert whole[0].status_code == 200
    assert whole[0].json()["choices"][0]["text"] == letters("a", 6000)
    assert whole[0].headers["x-replica"] != home
    assert cluster.complete(prompt, max_tokens=3).json()["choices"][0]["text"] == letters("a", 3)
