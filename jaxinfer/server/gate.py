"""What every request passes before it reaches an endpoint: its id, its key, its size, and a line in the log."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.errors import ApiError, unavailable
from jaxinfer.server.service import Service

access_log = logging.getLogger("jaxinfer.access")
_log = logging.getLogger("jaxinfer.server")
# What is guarded by the keys; the page, its description and the health checks hold nothing of anybody's.
GUARDED = ("/v1/", "/tokenize", "/detokenize", "/debug/", "/metrics", "/live")
# What a server that is shutting down does not begin any more.
WORK = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
# What machines, and an open page twice a second, ask of a server; lines of these would bury the others.
UNLOGGED = ("/live", "/health", "/ready", "/metrics")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """ASGI middleware around the endpoints.

    Args:
      app: the endpoints. service: tells the keys and limits.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service
        self._keys = [key.encode() for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        # One that a log or a name cannot hold is replaced: it is the client's to see in the answer.
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._admit(scope["path"], headers)
            await self._app(scope, _Limited(receive, self._service.config.max_body_bytes), send_named)
        except ApiError as error:
            await error.response()(scope, receive, send_named)
        except Exception:
            _log.exception("request %s failed", request_id)
            if not status:
                error = ApiError(500, "the server failed on this request", code="internal_error")
                await error.response()(scope, receive, send_named)
        finally:
            if self._service.config.access_log and scope["path"] not in UNLOGGED:
                self._note(scope, status, 1e3 * (time.perf_counter() - began))

    def _admit(self, path: str, headers: Headers) -> None:
        config = self._service.config
        if self._keys and path.startswith(GUARDED):
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
            # Every key is compared, each in constant time, so that time tells nothing.
            if sum([hmac.compare_digest(given, one) for one in self._keys]) == 0:
                message = "no API key, or a wrong one: send the header Authorization: Bearer KEY"
                headers_out = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, message, code="invalid_api_key", headers=headers_out)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > config.max_body_bytes:
            raise too_large(config.max_body_bytes)
        if self._service.draining and path in WORK:
            raise unavailable("the server is shutting down", "shutting_down")

    def _note(self, scope: Scope, status: int, milliseconds: float) -> None:
        state = scope["state"]
        prompt, completion = state.get("tokens", (0, 0))
        access_log.info(
            "%s %s %d %.1f ms %s tokens %d+%d",
            scope["method"],
            # What a path holds is the client's; nothing in it may look like another line.
            scope["path"].encode("ascii", "backslashreplace").decode().translate(_PRINTABLE),
            status,
            milliseconds,
            state["request_id"],
            prompt,
            completion,
        )


_PRINTABLE = dict.fromkeys((*range(32), 127), "?")


def too_large(limit: int) -> ApiError:
    """Returns the answer to a body that is too long."""
    return ApiError(413, f"the body is longer than {limit} bytes", code="content_too_large")


class _Limited:
    """Receives a body as long as it stays within a limit: chunked bodies do not say their length before."""

    def __init__(self, receive: Receive, limit: int):
        self._receive, self._limit, self._left = receive, limit, limit

    async def __call__(self) -> Message:
        if self._left >= 0:
            message = await self._receive()
            self._left -= len(message.get("body", b""))
            if self._left >= 0:
                return message
        # FastAPI's own kind, which alone passes through its reading of the body; said to whoever asks again, too.
        raise HTTPException(413, f"the body is longer than {self._limit} bytes")
