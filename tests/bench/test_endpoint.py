"""Requests over HTTP: times to the tick, counts by usage, and everything that can go wrong by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jaxinfer.bench.drive import Drive
from jaxinfer.bench.endpoint import Abilities, Endpoint, EndpointOptions, StreamReader
from jaxinfer.bench.http import Connection, HttpClient, OnData
from jaxinfer.bench.load import Shot
from jaxinfer.bench.results import RequestFailed, Result
from tests.bench.server import Clock, Script, Server, serving, tokens

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
MODELS = Script([(0.0, {"data": [{"id": "m"}]})])
REFUSED = Script([(0.0, {"error": {"message": "no such field: ignore_eos"}})], status=400)


def run(answer: Callable[[str, dict[str, Any]], Script], use: Callable[[Server], Any]) -> Any:
    """Returns what ``use`` does with a server."""

    async def main() -> Any:
        async with serving(answer) as server:
            return await use(server)

    return asyncio.run(asyncio.wait_for(main(), 60))


def send(script: Script, shot: Shot | None = None, **options: Any) -> tuple[Result, Server]:
    """Sends one request to a server that answers by a script."""
    shot = shot or Shot(0, None, [5, 6], 3, 2)

    async def use(server: Server) -> tuple[Result, Server]:
        endpoint = Endpoint(server.url, EndpointOptions(model="m", **options), server.clock)
        (result,) = await Drive(endpoint, server.clock).run([shot], 1)
        endpoint.close()
        return result, server

    return run(lambda *_: script, use)


def test_times_are_those_of_the_tokens():
    result, server = send(Script(tokens(1.0, 1.5, 4.0, usage=USAGE)))
    assert (result.sent, result.times, result.end) == (0.0, [1.0, 1.5, 4.0], 4.0)
    assert (result.ttft, result.gaps, result.itl) == (1.0, [0.5, 2.5], 1.5)
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (7, 3, 4)
    assert (result.counted, result.finish_reason, result.error) == ("usage", "length", None)
    ((path, body),) = server.requests
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 3,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


def test_usage_counts_and_not_the_chunks():
    """Four tokens of which two showed no text."""
    result, _ = send(Script(tokens(1.0, 2.0, usage=USAGE | {"completion_tokens": 4})))
    assert (result.output_tokens, len(result.times), result.counted) == (4, 2, "usage")
    result, _ = send(Script(tokens(1.0, 2.0)))
    assert (result.prompt_tokens, result.output_tokens, result.counted) == (2, 2, "chunks")


def test_chat_asks_with_messages_and_reads_deltas():
    events = [
        (1.0, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}),  # no token yet
        (2.0, {"choices": [{"delta": {"content": "Hi"}}]}),
        (3.0, {"choices": [{"delta": {"reasoning_content": "hm"}}]}),
        (4.0, {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE}),
        (5.0, "[DONE]"),
    ]
    result, server = send(Script(events), Shot(0, None, "hello", 3), api="chat")
    assert (result.times, result.finish_reason) == ([2.0, 3.0], "stop")
    ((path, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hello"}]


def test_messages_of_a_trace_go_to_chat_whatever_the_api():
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    _, server = send(Script(tokens(1.0, usage=USAGE)), Shot(0, None, messages, 3))
    assert server.requests[0][0] == "/v1/chat/completions"
    assert server.requests[0][1]["messages"] == messages


def test_fields_and_headers_are_sent():
    result, server = send(
        Script(tokens(1.0)), headers={"Authorization": "Bearer k"}, fields={"top_p": 0.5, "ignore_eos": False}
    )
    assert result.error is None
    assert server.requests[0][1]["top_p"] == 0.5
    assert server.requests[0][1]["ignore_eos"] is False
    assert "Authorization: Bearer k" in server.headers


@pytest.mark.parametrize(
    ("script", "error", "detail"),
    [
        (Script([(0.0, {"error": {"message": "full"}})], status=503), "HTTP 503", "full"),
        (Script([(0.0, {"detail": "no field"})], status=422), "HTTP 422", "no field"),
        (Script([(0.0, {"error": "plain"})], status=500), "HTTP 500", "plain"),
        (Script([(1.0, {"error": {"message": "broke"}})]), "error event", "broke"),
        (Script([(1.0, "{nonsense")]), "not an event", "{nonsense"),
        (Script([(1.0, {"choices": [7]})]), "not an event", '{"choices": [7]}'),
        (Script([(1.0, {"choices": [{"text": "a"}]})]), "cut stream", "after 1 chunks, without an end"),
        (Script(tokens(1.0)[:1], cuts=True), "connection", "closed before the end of the answer"),
        (Script(tokens(1.0, reason="abort")), "finish_reason abort", ""),
        (
            Script([(1.0, {"choices": [{"text": "", "finish_reason": "stop"}]})]),
            "empty answer",
            "no token came",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_goes_wrong_has_a_name(script: Script, error: str, detail: str):
    result, _ = send(script)
    assert (result.error, result.detail) == (error, detail)


def test_nobody_listening_is_a_connection_error():
    async def use(server: Server) -> Result:
        endpoint = Endpoint("http://127.0.0.1:1", EndpointOptions(model="m"), server.clock)
        (result,) = await Drive(endpoint, server.clock).run([Shot(0, None, "a", 1)], 1)
        return result

    assert run(lambda *_: MODELS, use).error == "connection"


def test_connections_are_kept_and_renewed():
    async def use(server: Server) -> list[int]:
        endpoint = Endpoint(server.url + "/v1/", EndpointOptions(model="m"), server.clock)
        counts = []
        for cuts in (False, False, True, False):
            scripts["cuts"] = cuts
            await Drive(endpoint, server.clock).run([Shot(0, None, "a", 1)], 1)
            counts.append(server.num_connections)
        endpoint.close()
        return counts

    scripts: dict[str, bool] = {}
    assert run(lambda *_: Script(tokens(1.0), cuts=scripts["cuts"]), use) == [1, 1, 1, 2]


def test_connection_that_was_closed_meanwhile_is_opened_anew():
    class Closed(Connection):
        has_begun = False

        async def exchange(self, data: bytes, on_data: OnData) -> int:
            raise ConnectionError("closed")

    async def use(server: Server) -> int:
        client = HttpClient(server.url, {}, server.clock)
        client._idle.append(Closed(server.clock))
        return await client.request("GET", "/v1/models", b"", lambda *_: None)

    assert run(lambda *_: MODELS, use) == 200


@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        (lambda body: True, Abilities()),
        (lambda body: "ignore_eos" not in body, Abilities(ignore_eos=False)),
        (lambda body: "stream_options" not in body, Abilities(usage=False)),
        (lambda body: isinstance(body["prompt"], str), Abilities(ids=False)),
        (
            lambda body: not {"ignore_eos", "stream_options"} & set(body),
            Abilities(ignore_eos=False, usage=False),
        ),
        (
            lambda body: isinstance(body["prompt"], str) and "ignore_eos" not in body,
            Abilities(ids=False, ignore_eos=False),
        ),
        (
            lambda body: isinstance(body["prompt"], str) and not {"ignore_eos", "stream_options"} & set(body),
            Abilities(ids=False, ignore_eos=False, usage=False),
        ),
    ],
)
def test_endpoint_is_asked_what_it_takes(takes: Callable[[dict[str, Any]], bool], expected: Abilities):
    def answer(path: str, body: dict[str, Any]) -> Script:
        if path == "/v1/models":
            return MODELS
        return Script(tokens(1.0)) if takes(body) else REFUSED

    async def use(server: Server) -> Endpoint:
        endpoint = Endpoint(server.url, EndpointOptions(), server.clock)
        await endpoint.prepare()
        return endpoint

    endpoint = run(answer, use)
    assert (endpoint.model, endpoint.abilities) == ("m", expected)
    assert len(expected.lacks()) == [expected.ids, expected.ignore_eos, expected.usage].count(False)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda path, body: MODELS if "models" in path else REFUSED, "HTTP 400: no such field"),
        (lambda path, body: Script([(0.0, {})], status=404), "HTTP 404: .*names no model; give --model"),
        (lambda path, body: Script([(0.0, {"data": []})]), "names no model"),
        (
            lambda path, body: MODELS if "models" in path else Script([(0.0, {"error": "key"})], status=401),
            "HTTP 401: key",
        ),
    ],
)
def test_endpoint_that_answers_nothing_is_refused(answer: Callable[[str, dict[str, Any]], Script], says: str):
    async def use(server: Server) -> None:
        await Endpoint(server.url, EndpointOptions(), server.clock).prepare()

    with pytest.raises(RequestFailed, match=says):
        run(answer, use)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999"])
def test_wrong_urls_are_refused(url: str):
    with pytest.raises(ValueError, match="url: got"):
        Endpoint(url, EndpointOptions(), Clock())


def test_events_may_be_cut_anywhere():
    data = b'data: {"choices":[{"text":"a"}]}\r\n\r\n: a comment\n\ndata: [DONE]\n\n'
    for size in (1, 3, 7, len(data)):
        result = Result(0)
        reader = StreamReader(result)
        for start in range(0, len(data), size):
            reader.feed(200, data[start : start + size], float(start))
        reader.finish(200, Shot(0, None, "a", 1))
        assert len(result.times) == 1


class Pipe(asyncio.Transport):
    """A transport to nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


ANSWERS = {
    "chunked": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
        b"3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n",
        (200, b"abc0123456789", True),
    ),
    "length": (b"HTTP/1.1 201 Made\r\nContent-Length: 4\r\n\r\nabcd", (201, b"abcd", True)),
    "nothing": (b"HTTP/1.1 204 None\r\n\r\n", (204, b"", True)),
    "closing": (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 1\r\n\r\na", (200, b"a", False)),
    "old": (b"HTTP/1.0 200 OK\r\n\r\nto the end", (200, b"to the end", False)),
}


@pytest.mark.parametrize(("data", "expected"), ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_answers_may_be_cut_anywhere(data: bytes, expected: tuple[int, bytes, bool], size: int):
    async def main() -> tuple[int, bytes, bool]:
        connection, pipe = Connection(lambda: 0.0), Pipe()
        connection.connection_made(pipe)
        parts: list[bytes] = []
        task = asyncio.create_task(connection.exchange(b"", lambda _, data, __: parts.append(data)))
        await asyncio.sleep(0)
        for start in range(0, len(data), size):
            connection.data_received(data[start : start + size])
        if expected[1] == b"to the end":
            connection.connection_lost(None)
        return await task, b"".join(parts), connection.is_open

    assert asyncio.run(main()) == expected


@pytest.mark.parametrize(
    "data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"]
)
def test_what_is_no_http_is_said(data: bytes):
    async def main() -> None:
        connection = Connection(lambda: 0.0)
        connection.connection_made(Pipe())
        task = asyncio.create_task(connection.exchange(b"", lambda *_: None))
        await asyncio.sleep(0)
        connection.data_received(data)
        await task

    with pytest.raises(ConnectionError, match="not HTTP"):
        asyncio.run(main())
