"""A reader that is slower than the engine gets all of an answer, in fewer events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.outputs import Delta
from jaxinfer.server.app import make_app
from jaxinfer.server.config import ServerConfig
from jaxinfer.server.service import Service
from jaxinfer.server.work import EventStream, join
from tests.engine.fakes import EOS, make_engine
from tests.server.conftest import ChatTokenizer

TEXT = "0123456789" * 20


async def read_late(path: str, body: dict[str, Any]) -> list[Any]:
    """Takes the first event, then nothing until the engine is through, then the rest; returns the chunks."""
    engine, _ = make_engine((*TEXT.encode(), EOS), ChatTokenizer())
    came: list[bytes] = []
    asked = [{"type": "http.request", "body": json.dumps(body | {"stream": True}).encode()}]

    async def receive() -> dict[str, Any]:
        if not asked:
            await asyncio.Event().wait()  # the client stays
        return asked.pop()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
        elif message["body"]:
            came.append(message["body"])
        while came and engine.has_work:
            await asyncio.sleep(0.001)

    with AsyncEngine(engine) as door:
        app = make_app(Service(door, ServerConfig(model_names=("fake",), access_log=False)))
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await app(scope, receive, send)
    *events, done, rest = b"".join(came).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("prompt", ["p", ["p", "q"]], ids=repr)
def test_completions_lose_nothing(prompt):
    body = {
        "prompt": prompt,
        "n": 2,
        "logprobs": 0,
        "max_tokens": 500,
        "stream_options": {"include_usage": True},
    }
    *chunks, usage = asyncio.run(read_late("/v1/completions", body))
    num_choices = 2 * len(prompt)
    assert len(chunks) < 6 * num_choices  # of 201 tokens each
    choices: dict[int, list[Any]] = {}
    for chunk in chunks:
        choices.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    assert choices.keys() == set(range(num_choices))
    for pieces in choices.values():
        assert "".join(piece["text"] for piece in pieces) == TEXT
        offsets = [at for piece in pieces for at in (piece["logprobs"] or {"text_offset": []})["text_offset"]]
        assert offsets == list(range(len(TEXT) + 1))
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert usage["usage"]["completion_tokens"] == num_choices * (len(TEXT) + 1)


def test_chat_loses_nothing():
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    chunks = [chunk["choices"][0] for chunk in asyncio.run(read_late("/v1/chat/completions", body))]
    assert len(chunks) < 8
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["delta"].get("content", "") for one in chunks) == TEXT
    assert sum(len((one["logprobs"] or {"content": []})["content"]) for one in chunks) == len(TEXT) + 1
    assert chunks[-1]["finish_reason"] == "stop"


def test_a_failure_stays_behind_the_text_before_it():
    first, more = Delta("r", 0, "a", [97], num_cached_tokens=3), Delta("r", 0, "b", [98])
    other = Delta("r", 1, "c", [99], finish_reason="length")
    failure = Delta("r", 0, "", [], finish_reason="error", error="device is gone")
    joined = Delta("r", 0, "ab", [97, 98], num_cached_tokens=3)
    assert join([first, failure, more, other]) == [joined, other, failure]
    assert join([failure]) == [failure]


def test_a_stream_that_never_begins_to_be_sent_is_closed_at_once():
    ended: list[str] = []

    async def events():
        try:
            yield b"first"
            yield b"second"
        finally:
            ended.append("yes")

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        await asyncio.Event().wait()  # a full socket

    async def main() -> None:
        stream = events()
        response = EventStream(stream)
        await response({"type": "http"}, gone, send)
        assert ended == ["yes"]

    asyncio.run(main())
