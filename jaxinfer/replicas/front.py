"""The one endpoint: hands each request to a replica, and to another when that one dies before it said anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from jaxinfer.replicas.prefixes import text_of
from jaxinfer.server.errors import ApiError, dumps, unavailable
from jaxinfer.server.gate import too_large

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ATTEMPTS = 3  # replicas that may die of, or under, one request
_LOST = (RayActorError, ReplicaUnavailableError)
_log = logging.getLogger("jaxinfer.replicas")


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


class Front:
    """An ASGI application over the replicas.

    Args:
      replicas: of `Replica`. max_body_bytes: longest body, 413 beyond it.
    """

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int):
        self._replicas: Any = replicas.options(stream=True)  # Ray types calls as if none streamed
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        answer = _Answer(send)
        try:
            body = await self._read(receive)
            wire = {name: scope[name] for name in ("method", "path", "query_string", "headers")}
            await self._ask({**wire, "body": body}, text_of(body), answer)
        except ClientGone:
            return
        except ApiError as error:
            await answer.fail(error)

    async def _read(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise too_large(self._max_body_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _ask(self, wire: dict[str, Any], key: str, answer: _Answer) -> None:
        """Has a replica answer, or the next.

        Raises:
          ApiError: 503, the replicas that had it died.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                stream = self._replicas.answer.remote(wire, key=key)
                async for messages in stream:
                    for message in messages:
                        await answer.send(message)
                return
            except DeploymentUnavailableError as error:
                raise unavailable("no replica can start; see the controller's log", "no_replica") from error
            except _LOST as error:
                _log.warning("a replica was lost under a request (attempt %d): %s", attempt, error)
                if answer.has_begun:
                    break
        said = "after its answer had begun" if answer.has_begun else f"as did {ATTEMPTS - 1} others"
        raise unavailable(f"the replica that ran this request was lost {said}; send it again", "replica_lost")


class _Answer:
    """What a client was sent so far."""

    def __init__(self, send: Send):
        self._send = send
        self._is_events = False
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {bytes(name).lower(): bytes(value) for name, value in message["headers"]}
            self._is_events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self.has_begun = True
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Ends with an error: an answer of its own, or the last event of one that has begun."""
        if not self.has_begun:
            headers = {"Content-Type": "application/json", **error.headers}
            raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": error.status, "headers": raw})
            await self._send({"type": "http.response.body", "body": dumps(error.body)})
            return
        if not self._is_events:  # half of a document: that the connection breaks off is all that says so
            raise error
        end = b"data: " + dumps(error.body) + b"\n\ndata: [DONE]\n\n"
        with suppress(OSError, asyncio.CancelledError):
            await self._send({"type": "http.response.body", "body": end})
