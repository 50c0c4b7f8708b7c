"""A server as a process: signals, restarts, and a real model behind it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from jaxinfer.server.run import bind, url_of
from tests.server.conftest import strict_json
from tests.server.test_gate import until

ROOT = Path(__file__).parents[2]
PATH = "/v1/completions"
ENDLESS = {"prompt": "p", "max_tokens": 300_000, "ignore_eos": True}


@contextmanager
def paced(drain_seconds: float, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Runs `paced_process`, and yields it with a client."""
    command = [sys.executable, "-m", "tests.server.paced_process", str(port), str(drain_seconds)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        line = child.stdout.readline()
        assert line.startswith("serving fake at http://127.0.0.1:"), child.stderr.read()
        with httpx.Client(base_url=line.split()[-1], timeout=60) as client:
            yield child, client
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()


def test_sigterm_lets_what_runs_end_and_refuses_what_comes():
    with paced(drain_seconds=3) as (child, client), ThreadPoolExecutor(8) as pool:
        seen: list[str] = []

        def stream(body: dict) -> list:
            events = []
            with client.stream("POST", PATH, json=body | {"stream": True}) as reply:
                for line in reply.iter_lines():
                    if line:
                        events.append(line.removeprefix("data: "))
                        seen.extend(events if len(events) == 1 else ())
            assert events.pop() == "[DONE]"
            return [strict_json(event) for event in events]

        endless = [pool.submit(stream, ENDLESS) for _ in range(3)]
        whole = pool.submit(client.post, PATH, json=ENDLESS)
        short = pool.submit(stream, ENDLESS | {"max_tokens": 100})
        until(lambda: len(seen) == 4)
        child.send_signal(signal.SIGTERM)
        until(lambda: client.get("/ready").status_code == 503)
        refused = client.post(PATH, json={"prompt": "p"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "shutting_down"
        assert client.get("/health").status_code == 200
        # Within the drain time the short one ends as it would; the others are told.
        assert short.result()[-1]["choices"][0]["finish_reason"] == "length"
        for one in endless:
            *chunks, last = one.result()
            assert all("choices" in chunk for chunk in chunks)
            assert last["error"]["code"] == "aborted"
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "aborted"
        assert child.wait(timeout=60) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""


def test_a_second_signal_does_not_wait():
    body = ENDLESS | {"stream": True}
    with paced(drain_seconds=1000) as (child, client), client.stream("POST", PATH, json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        child.send_signal(signal.SIGINT)
        until(lambda: client.get("/ready").status_code == 503)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 0


def test_after_kill_it_serves_again_at_the_same_port_and_ends_at_once_at_rest():
    with paced(drain_seconds=1) as (child, client):
        port = urlsplit(str(client.base_url)).port
        with client.stream("POST", PATH, json=ENDLESS | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            child.kill()
            child.wait()
    assert port is not None
    with paced(drain_seconds=1000, port=port) as (child, client):
        assert client.post(PATH, json={"prompt": "p", "max_tokens": 3}).json()["choices"][0]["text"] == "aaa"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 0


def test_a_port_that_is_taken_is_told_of_before_anything_is_loaded():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=f"cannot serve at 127.0.0.1 port {port}: "):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match=r"cannot serve at no-such-host\.invalid"):
        bind("no-such-host.invalid", 0)
