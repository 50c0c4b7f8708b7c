"""The short way to the endpoints that make text: FastAPI's own costs a request's first token 0.3 ms."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.chat import create_chat_completion
from jaxinfer.server.completions import create_completion
from jaxinfer.server.protocol import Body, ChatRequest, CompletionRequest

Endpoint = Callable[[Any, Request], Awaitable[Response]]
ROUTES: dict[str, tuple[type[Body], Endpoint]] = {
    "/v1/completions": (CompletionRequest, create_completion),
    "/v1/chat/completions": (ChatRequest, create_chat_completion),
}
_JSON = re.compile(rb"application/json\s*(;|$)", re.IGNORECASE)


class Direct:
    """ASGI middleware that answers what is plainly right; FastAPI, which describes the endpoints, has the rest.

    Args:
      app: gets every other request, and each whose body is not valid, for it says what is wrong.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or hands it on with the body that was read."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            await self._app(scope, receive, send)
            return
        model, endpoint = ROUTES[scope["path"]]
        read: list[Message] = []
        body = await _read(model, scope, receive, read)
        if body is None:
            await self._app(scope, _replay(read, receive), send)
            return
        response = await endpoint(body, Request(scope, receive, send))
        await response(scope, receive, send)


async def _read(model: type[Body], scope: Scope, receive: Receive, read: list[Message]) -> Body | None:
    """Returns a request's body, None where it is none of the model's; ``read`` gets what was received of it."""
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if not _JSON.match(kind):
        return None
    try:
        while True:
            read.append(message := await receive())
            if message["type"] != "http.request":
                return None
            if not message.get("more_body", False):
                break
    except HTTPException:  # too long: said again when FastAPI reads on
        return None
    try:
        return model.model_validate(json.loads(b"".join(message.get("body", b"") for message in read)))
    except (ValueError, RecursionError):
        return None


def _replay(read: list[Message], receive: Receive) -> Receive:
    """Returns a way to receive what was read, then what comes."""
    left = iter(read)

    async def again() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return again
