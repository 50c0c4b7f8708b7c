"""What the endpoint does when replicas die, over stand-ins for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from jaxinfer.replicas.front import ATTEMPTS, Front

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
EVENTS = {"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"text/event-stream")]}
PART = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"end"}


class Replicas:
    """Stands for Serve's handle: each call plays the next script, of messages and what is raised."""

    def __init__(self, *scripts: Sequence[dict[str, Any] | Exception]):
        self.scripts = list(scripts)
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.answer = self

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    async def remote(self, wire: dict[str, Any], key: str) -> AsyncIterator[list[dict[str, Any]]]:
        self.asked.append((wire, key))
        for step in self.scripts.pop(0):
            if isinstance(step, Exception):
                raise step
            yield [step]


def ask(replicas: Replicas, *parts: bytes, leaves: bool = False) -> list[dict[str, Any]]:
    """Sends a body in parts and returns the messages of the answer."""
    left: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    left[-1]["more_body"] = leaves
    left.append({"type": "http.disconnect"})
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    asyncio.run(Front(replicas, 100)(scope, receive, send))  # pyright: ignore[reportArgumentType]
    return sent


def code_of(body: bytes) -> str:
    return json.loads(body)["error"]["code"]


BODY = b'{"prompt": "hello"}'


def test_an_answer_is_handed_on_with_its_key():
    replicas = Replicas([START, END])
    assert ask(replicas, BODY[:7], BODY[7:]) == [START, END]
    ((wire, key),) = replicas.asked
    assert (wire["body"], key) == (BODY, "hello")


def test_a_replica_that_dies_before_it_answers_is_replaced():
    replicas = Replicas([RayActorError()], [RayActorError()], [START, END])
    assert ask(replicas, BODY) == [START, END]
    assert len(replicas.asked) == 3


def test_replicas_that_all_die_are_an_error():
    replicas = Replicas(*[[RayActorError()]] * ATTEMPTS)
    start, end = ask(replicas, BODY)
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert code_of(end["body"]) == "replica_lost"


def test_a_stream_that_has_begun_ends_with_an_event():
    replicas = Replicas([EVENTS, PART, RayActorError()])
    *said, end = ask(replicas, BODY)
    assert said == [EVENTS, PART]
    event, done, rest = end["body"].split(b"\n\n")
    assert code_of(event.removeprefix(b"data: ")) == "replica_lost"
    assert (done, rest) == (b"data: [DONE]", b"")


def test_half_a_document_breaks_off():
    with pytest.raises(Exception, match="after its answer had begun"):
        ask(Replicas([START, RayActorError()]), BODY)


def test_no_replica_at_all_is_said():
    start, end = ask(Replicas([DeploymentUnavailableError(None)]), BODY)  # pyright: ignore[reportArgumentType]
    assert start["status"] == 503
    assert code_of(end["body"]) == "no_replica"


def test_a_long_body_is_refused_before_a_replica_sees_it():
    replicas = Replicas()
    start, end = ask(replicas, b"x" * 60, b"x" * 60)
    assert start["status"] == 413
    assert code_of(end["body"]) == "content_too_large"
    assert replicas.asked == []


def test_a_client_that_leaves_early_is_asked_nothing():
    replicas = Replicas()
    assert ask(replicas, b"x", leaves=True) == []
    assert replicas.asked == []
