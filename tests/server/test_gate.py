"""Keys, sizes, request ids, errors of HTTP itself, and clients that go away."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import EOS
from tests.server.conftest import Serve, Served, bad, good

PATH = "/v1/completions"
# Far more steps than a test takes to go away.
LONG = {"max_len": 400_000, "num_pages": 25_000}


def test_keys_open_the_api(serve: Serve):
    served = serve(config={"api_keys": ("first", "second")})
    for headers in (
        {},
        {"Authorization": "Bearer third"},
        {"Authorization": "first"},
        {"Authorization": "Bearer"},
    ):
        error = bad(served.http.post(PATH, json={"prompt": "p"}, headers=headers), 401, None, "API key")
        assert error["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/debug/prefix?request=x"):
            assert served.http.get(path, headers=headers).status_code == 401
    for key in ("first", "second"):
        good(served.http.post(PATH, json={"prompt": "p"}, headers={"Authorization": f"Bearer {key}"}))
    for path in ("/health", "/ready", "/docs", "/openapi.json"):
        assert served.http.get(path).status_code == 200
    # Bytes beyond ASCII are no key, and no failure.
    assert served.http.get("/v1/models", headers=[(b"authorization", b"Bearer \xff\xfe")]).status_code == 401


def test_a_body_that_is_too_long_is_refused(serve: Serve):
    served = serve(config={"max_body_bytes": 1000})
    bad(served.post(PATH, prompt="p" * 2000), 413, None, "1000 bytes")

    def chunks():
        for _ in range(4):
            yield b" " * 500

    kind = {"content-type": "application/json"}
    bad(served.http.post(PATH, content=chunks(), headers=kind), 413, None, "1000 bytes")
    good(served.post(PATH, prompt="p" * 500))


def test_errors_of_http_have_the_same_shape(hello: Served):
    bad(hello.http.get("/nope"), 404, None, "/nope")
    bad(hello.http.get(PATH), 405, None, "GET")
    kind = {"content-type": "application/json"}
    bad(hello.http.post(PATH, content=b"{nope", headers=kind), 400, None, "not valid JSON")
    bad(hello.http.post(PATH, content=b"", headers=kind), 400, None)
    bad(hello.http.post(PATH, content=b"[1]", headers=kind), 400, None)
    bad(hello.http.post(PATH, content=b"\xff\xfe\xfd", headers=kind), 400, None)
    bad(hello.http.post(PATH, content=b"[" * 100_000, headers=kind), 400, None)
    bad(
        hello.http.post(PATH, content=b'{"prompt": "p", "seed": ' + b"9" * 5000 + b"}", headers=kind),
        400,
        None,
    )
    bad(hello.http.post(PATH, data={"prompt": "p"}), 415, None, "application/json")
    bad(hello.http.post(PATH, content=b'{"prompt": "p"}'), 415, None, "application/json")


def test_an_error_does_not_repeat_all_it_was_given(hello: Served):
    error = bad(hello.post(PATH, prompt="p", stop=["x" * 100_000, ""]), 400, "stop")
    assert len(error["message"]) <= 1000


def test_a_model_that_is_not_there(hello: Served):
    error = bad(hello.post(PATH, prompt="p", model="other"), 404, "model", "other", "fake")
    assert error["code"] == "model_not_found"
    bad(hello.http.get("/v1/models/a/b"), 404, "model")


def test_request_ids_come_back(hello: Served):
    reply = hello.http.post(PATH, json={"prompt": "p"}, headers={"X-Request-Id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.json()["id"] == "cmpl-mine-1"
    made = hello.http.post(PATH, json={"prompt": "p"}, headers={"X-Request-Id": "not one"})
    assert len(made.headers["x-request-id"]) == 32
    assert hello.http.get("/nope").headers["x-request-id"]
    assert hello.complete(request_id="named")["id"] == "cmpl-named"


def test_pages_of_other_places_may_call_where_they_are_listed(serve: Serve, hello: Served):
    served = serve(config={"cors_origins": ("https://a.example",), "api_keys": ("key",)})
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    reply = served.http.options(PATH, headers=asks)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    # A refusal can be read by the page too.
    refused = served.http.post(PATH, json={"prompt": "p"}, headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    shown = refused.headers["access-control-expose-headers"]
    assert {name.strip() for name in shown.split(",")} == {"X-Request-Id", "Retry-After"}
    other = served.http.post(PATH, json={}, headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in hello.http.get("/health", headers=asks).headers


def test_the_log_has_a_line_a_request_and_no_prompt(serve: Serve, caplog: pytest.LogCaptureFixture):
    served = serve(config={"access_log": True})
    with caplog.at_level(logging.INFO, "jaxinfer.access"):
        for stream in (False, True):
            headers = {"X-Request-Id": f"id-{stream}"}
            served.http.post(PATH, json={"prompt": "secret", "stream": stream}, headers=headers)
        for path in ("/live", "/health", "/ready", "/metrics"):  # asked all day long: no line
            assert served.http.get(path).status_code == 200
        served.http.get("/a%0Ab")
        until(lambda: len(caplog.records) == 3)
    # A line comes after its answer, so one may overtake another.
    lines = sorted((record.getMessage() for record in caplog.records), key=lambda line: line.split()[5])
    lines.sort(key=lambda line: "id-" not in line)
    for line, stream in zip(lines, (False, True), strict=False):
        assert line.startswith(f"POST {PATH} 200 ")
        assert line.endswith(f" ms id-{stream} tokens 6+6")
    assert lines[2].startswith("GET /a?b 404 ")
    assert "secret" not in "".join(lines)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "p", "stream": True},
        {"prompt": "p"},
        {"prompt": "p", "n": 3},
        {"prompt": ["a", "b"]},
        {"prompt": ["a", "b"], "n": 2, "stream": True},
        {"prompt": "p", "best_of": 2, "n": 1},
    ],
    ids=lambda body: "-".join(map(str, body)) + f"-{len(body['prompt'])}",
)
def test_trap_17_a_client_that_goes_away_frees_its_rows(serve: Serve, body):
    served = serve(b"a", **LONG)
    body = {**body, "max_tokens": 300_000, "ignore_eos": True}
    for _ in range(3):
        leave(served, body, wait_for=b"data: " if body.get("stream") else None)
        until(lambda: is_idle(served))
    assert served.complete(max_tokens=3)["choices"][0]["text"] == "aaa"
    assert served.engine.metrics.finished["abort"] >= 3


def test_trap_17_fifty_streams_that_end_early(serve: Serve):
    served = serve(b"a", **LONG)
    body = {"prompt": "p", "max_tokens": 300_000, "ignore_eos": True, "stream": True}
    for _ in range(50):
        leave(served, body, wait_for=b"data: ")
    until(lambda: is_idle(served))
    assert served.complete(max_tokens=3)["choices"][0]["text"] == "aaa"


def test_a_stream_that_waits_for_a_row_notices_too(serve: Serve):
    served = serve(b"a", max_num_seqs=1, **LONG)
    body = {"prompt": "p", "max_tokens": 300_000, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", PATH, json=body) as first:
        lines = first.iter_lines()  # closes the connection when it is let go of
        next(lines)
        leave(served, body, wait_for=None)
        until(lambda: served.engine.metrics.finished["abort"] == 1)
    until(lambda: is_idle(served))


def test_a_name_that_is_live_is_refused(serve: Serve):
    served = serve(b"a", **LONG)
    body = {"prompt": "p", "max_tokens": 300_000, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", PATH, json=body | {"request_id": "mine"}) as first:
        lines = first.iter_lines()  # closes the connection when it is let go of
        next(lines)
        bad(served.post(PATH, prompt="p", request_id="mine"), 400, "request_id", "mine")
        header = {"X-Request-Id": "mine"}
        reply = served.http.post(PATH, json={"prompt": "p", "max_tokens": 1}, headers=header)
        assert good(reply)["id"].startswith("cmpl-mine-")


def test_a_header_that_names_a_live_request_is_no_fault(serve: Serve):
    """Neither a part of a request of several prompts, nor one that the engine has a step longer than its client."""
    served = serve(b"a", **LONG)
    body = {"prompt": ["p", "q"], "max_tokens": 300_000, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", PATH, json=body, headers={"X-Request-Id": "mine"}) as first:
        lines = first.iter_lines()  # closes the connection when it is let go of
        next(lines)
        for name in ("mine-0", "mine-1"):
            reply = served.http.post(
                PATH, json={"prompt": "p", "max_tokens": 1}, headers={"X-Request-Id": name}
            )
            assert good(reply)["id"].startswith(f"cmpl-{name}-")
    until(lambda: is_idle(served))
    params = SamplingParams(max_tokens=300_000, ignore_eos=True)
    served.engine.enqueue(served.engine.prepare("p", params, request_id="cmpl-late"))
    reply = served.http.post(PATH, json={"prompt": "p", "max_tokens": 1}, headers={"X-Request-Id": "late"})
    assert good(reply)["id"].startswith("cmpl-late-")
    served.engine.abort("cmpl-late")


def test_too_many_choices_are_refused(serve: Serve):
    served = serve(config={"max_choices": 4})
    bad(served.post(PATH, prompt=["a"] * 5), 400, "prompt", "at most 4")
    bad(served.post(PATH, prompt=["a", "b"], n=3), 400, "prompt", "6 choices")


def test_an_engine_that_fails_is_told_of(serve: Serve):
    served = serve((*b"hello", EOS))
    served.engine.runner.fails = lambda plan: True  # pyright: ignore[reportAttributeAccessIssue]
    bad(served.post(PATH, prompt="p"), 500, None, "device is gone")
    bad(served.post(PATH, prompt="p"), 503, None)
    bad(served.http.get("/health"), 503, None)
    bad(served.http.get("/ready"), 503, None)


def leave(served: Served, body: dict, wait_for: bytes | None) -> None:
    """Sends a request and closes the connection, once it runs or once some bytes are there."""
    where = urlsplit(served.url)
    content = json.dumps(body).encode()
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    head = f"POST {PATH} HTTP/1.1\r\n{fields}\r\n\r\n"
    accepted = served.engine.metrics.prompt_tokens
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        seen = b""
        while wait_for is not None and wait_for not in seen:
            seen += connection.recv(1000)
        until(lambda: served.engine.metrics.prompt_tokens > accepted)


def is_idle(served: Served) -> bool:
    return not served.engine.has_work and served.engine.scheduler.pool.num_used == 0


def until(holds: Callable[[], bool]) -> None:
    """Waits for what another thread brings about; fails after a minute."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)


def test_more_than_may_wait_are_sent_away_for_a_while(serve: Serve):
    served = serve(b"a", max_num_seqs=1, max_num_waiting=1, **LONG)
    body = {"prompt": "p", "max_tokens": 300_000, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", PATH, json=body) as first:
        lines = first.iter_lines()
        next(lines)
        for stream in (False, True):
            reply = served.post(PATH, prompt=["p", "q"], stream=stream)  # one more than may wait
            assert bad(reply, 503, None)["code"] == "queue_full"
            assert int(reply.headers["retry-after"]) >= 1
    until(lambda: is_idle(served))
    assert served.complete(max_tokens=1)["choices"][0]["text"] == "a"


def test_time_that_is_up_before_the_first_token(serve: Serve):
    served = serve(b"a", max_num_seqs=1, **LONG)
    served.engine.clock = time.monotonic
    body = {"prompt": "p", "max_tokens": 300_000, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", PATH, json=body) as first:
        lines = first.iter_lines()
        next(lines)  # from here on the only row is taken
        for stream in (False, True):
            error = bad(served.post(PATH, prompt="p", stream=stream, timeout=0.05), 408, None)
            assert error["code"] == "timeout"
    for value in (0, -1, "5"):
        bad(served.post(PATH, prompt="p", timeout=value), 400, "timeout")


@pytest.mark.parametrize("stream", [False, True])
def test_time_that_is_up_later_ends_an_answer(serve: Serve, stream: bool):
    served = serve(b"a", config={"timeout": 100}, **LONG)
    now = [0.0]
    served.engine.clock = lambda: now[0]
    body = {"prompt": "p", "max_tokens": 300_000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        if stream:
            answer = pool.submit(served.events, PATH, **body)
        else:
            answer = pool.submit(lambda: [good(served.post(PATH, **body))])
        until(lambda: served.engine.metrics.output_tokens > 5)
        now[0] = 101.0
        assert answer.result()[-1]["choices"][0]["finish_reason"] == "timeout"
