"""The short way gives what FastAPI gives, and hands on what is not plainly right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.server.app import make_app
from jaxinfer.server.config import ServerConfig
from jaxinfer.server.direct import Direct
from jaxinfer.server.gate import Gate
from jaxinfer.server.service import Service
from tests.engine.fakes import EOS, make_engine
from tests.server.conftest import ChatTokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "request_id": "a"}
JSON = [(b"content-type", b"application/json; charset=utf-8")]


async def ask(app: Any, path: str, parts: list[bytes], headers: Any = JSON) -> list[dict[str, Any]]:
    """Sends a body in parts and returns the messages of the answer."""
    left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    left[-1]["more_body"] = False
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()  # the client stays

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    async with asyncio.timeout(30):
        await app(scope, receive, send)
    return sent


@pytest.fixture
def service() -> Iterator[Service]:
    engine, _ = make_engine((*b"hello", EOS), ChatTokenizer())
    with AsyncEngine(engine) as door:
        yield Service(door, ServerConfig(model_names=("fake",), access_log=False, max_body_bytes=1000))


def fastapi_alone(service: Service) -> Any:
    app = make_app(service)
    app.user_middleware = [one for one in app.user_middleware if one.cls is not Direct]
    return app


def told(messages: list[dict[str, Any]]) -> tuple[int, list[Any]]:
    """Returns status and body, as events where it has some, without the time and where a text was cut."""
    text = b"".join(message.get("body", b"") for message in messages[1:]).decode()
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    values: list[Any] = [part if part == "[DONE]" else json.loads(part) for part in parts]
    values = [{**value, "created": 0} if isinstance(value, dict) else value for value in values]
    if len(values) < 2:
        return messages[0]["status"], values
    choices = [value["choices"][0] for value in values[:-1]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    if "text" in choices[-1]:  # how much of it came last is the reader's luck
        choices[-1]["text"] = ""
    return messages[0]["status"], ["".join(texts), *values[-2:]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "p", "request_id": "a"}), ("/v1/chat/completions", CHAT)],
)
def test_what_is_plainly_right_never_reaches_fastapi(
    service: Service, path: str, body: dict[str, Any], stream: bool
):
    async def nobody(*_: Any) -> None:
        raise AssertionError("handed on")

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await Gate(Direct(nobody), service)({**scope, "app": make_app(service)}, receive, send)

    data = json.dumps(body | {"stream": stream}).encode()
    parts = [data[:20], data[20:]]
    got = told(asyncio.run(ask(with_state, path, parts)))
    assert got[0] == 200
    assert got == told(asyncio.run(ask(fastapi_alone(service), path, parts)))


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{nope", JSON, 400),
        (b"\xff\xfe", JSON, 400),
        (b"[" * 900, JSON, 400),
        (b'{"prompt": "p", "max_tokens": "many"}', JSON, 400),
        (b'{"prompt": "p", "model": "other"}', JSON, 404),
        (b'{"prompt": "p", "temperature": -1}', JSON, 400),
        (b'{"prompt": "p", "stream": true, "temperature": -1}', JSON, 400),
        (b'{"prompt": "p", "stream": true, "max_tokens": 3, "min_tokens": 9}', JSON, 400),
        (b'{"prompt": "' + b"p" * 2000 + b'"}', JSON, 413),
        (b'{"prompt": "p"}', [(b"content-type", b"text/plain")], 415),
        (b'{"prompt": "p"}', [], 415),
    ],
)
def test_what_is_wrong_is_said_as_fastapi_says_it(service: Service, body: bytes, headers: Any, status: int):
    for parts in ([body], [body[:7], body[7:]]):
        got = told(asyncio.run(ask(make_app(service), "/v1/completions", parts, headers)))
        assert got[0] == status
        assert got == told(asyncio.run(ask(fastapi_alone(service), "/v1/completions", parts, headers)))


def test_the_end_of_a_stream_is_one_write(service: Service):
    body = {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}
    start, *writes = asyncio.run(ask(make_app(service), "/v1/completions", [json.dumps(body).encode()]))
    assert start["status"] == 200
    *events, done, rest = writes[-1]["body"].split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert b'"finish_reason":"stop"' in events[-2]
    assert b'"usage":{' in events[-1]
    assert [write["more_body"] for write in writes] == [True] * (len(writes) - 1) + [False]
