"""One engine with its server's application, in a process of its own: what Ray Serve makes several of.

Answers say in the header X-Replica who gave them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ray import serve

from jaxinfer.server.app import make_app
from jaxinfer.server.service import Service


class Replica:
    """Answers requests that the front read.

    Args:
      make_service: loads the model and returns its service.
    """

    def __init__(self, make_service: Callable[[], Service]):
        self._service = make_service()
        self._app = make_app(self._service)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def answer(self, wire: dict[str, Any], key: str) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yields the ASGI messages of an answer, those that wait together; leaving early tells the endpoint.

        Args:
          wire: method, path, query_string, headers and body. key: for the router alone.
        """
        del key
        body, gone = [wire["body"]], asyncio.Event()
        ready: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-replica", self._name.encode())]
            ready.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(scope_of(wire), receive, send)
            finally:
                ready.put_nowait(None)

        task = asyncio.ensure_future(run())
        try:
            while True:
                waiting = [await ready.get(), *(ready.get_nowait() for _ in range(ready.qsize()))]
                if messages := [message for message in waiting if message is not None]:
                    yield messages
                if waiting[-1] is None:
                    break
            await task
        finally:
            gone.set()
            await asyncio.gather(task, return_exceptions=True)

    async def check_health(self) -> None:
        """Has Ray Serve start another in the place of one whose engine failed."""
        if (failure := self._service.engine.failure) is not None:
            raise RuntimeError("the engine failed") from failure


def scope_of(wire: dict[str, Any]) -> dict[str, Any]:
    """Returns the ASGI scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "raw_path": wire["path"].encode(),
        "root_path": "",
        "client": None,
        "server": None,
        **{name: wire[name] for name in ("method", "path", "query_string")},
        "headers": [(bytes(name), bytes(value)) for name, value in wire["headers"]],
    }
