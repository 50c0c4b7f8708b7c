"""What goes wrong, in the shape in which OpenAI's clients read it."""

from __future__ import annotations

import http
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jaxinfer.engine.engine import EngineDraining, EngineError
from jaxinfer.schedule.param_checks import SamplingParamsError
from jaxinfer.schedule.request import QueueFull

MAX_MESSAGE = 1000  # characters: an error repeats what was got, which may be a whole prompt
DEFAULT_RETRY_SECONDS = 1.0
# What the union of a field's forms is called, where pydantic would name each of them.
FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of these lists",
    "input": "a text, a list of texts, a list of token ids, or a list of these lists",
    "stop": "a text or a list of texts",
    "content": "a text or a list of text parts; other parts are not supported",
    "tool_choice": "none or auto; required and named functions are not supported",
}
_FIELD = re.compile(r"([A-Za-z_][\w .]*)(?:\[[^\]]*\])*:")


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
      status: of HTTP. message: for people. param: the field at fault. code: for programs.
      headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = "invalid_value" if code is None and status == 400 else code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        message = (
            self.message if len(self.message) <= MAX_MESSAGE else self.message[: MAX_MESSAGE - 3] + "..."
        )
        error = {"message": message, "type": _type_of(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """Returns the answer."""
        return json_response(self.body, self.status, self.headers)


@contextmanager
def renamed(**names: str | None) -> Iterator[None]:
    """Tells of fields by the names that a body has for them: ``renamed(prompt="messages")``; None changes nothing."""
    try:
        yield
    except ApiError as error:
        if error.param is not None and (name := names.get(error.param)) is not None:
            error.message = name + error.message.removeprefix(error.param)
            error.param = name
        raise


def to_api_error(error: Exception) -> ApiError:
    """Returns what the engine refused, or could not do, as an answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return unavailable(str(error), "queue_full", error.retry_after)
    if isinstance(error, SamplingParamsError):
        code = (
            "context_length_exceeded" if error.field == "prompt tokens" else None
        )  # clients look for OpenAI's
        return ApiError(400, str(error), param=error.field.split(" ")[0], code=code)
    if isinstance(error, ValueError):
        found = _FIELD.match(str(error))
        return ApiError(400, str(error), param=found[1] if found else None)
    if isinstance(error, EngineError):
        code = "shutting_down" if isinstance(error, EngineDraining) else "engine_failed"
        return unavailable(str(error), code)
    if isinstance(error, TimeoutError):
        return ApiError(408, "timeout: the request's time was up before its answer was there", code="timeout")
    return ApiError(500, f"the engine failed on this request: {error}", code="engine_error")


def unavailable(message: str, code: str, retry_after: float = DEFAULT_RETRY_SECONDS) -> ApiError:
    """Returns a 503 that says when to come again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(max(1, math.ceil(retry_after)))})


def dumps(value: Any) -> bytes:
    """Returns strict JSON: no NaN, and characters that UTF-8 cannot hold (lone surrogates) escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")  # of a surrogate that is JSON's own escape


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an answer with a JSON body."""
    return Response(dumps(value), status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Makes an application answer every error in one shape."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}; GET /docs lists what there is"
        code = http.HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    @app.exception_handler(RequestValidationError)
    async def on_bad_body(request: Request, error: RequestValidationError) -> Response:
        kind = request.headers.get("content-type", "")
        if request.method == "POST" and not re.match(
            r"application/([\w.+-]+\+)?json\b", kind.strip().lower()
        ):
            message = f"content-type: got {kind!r}, must be application/json"
            return ApiError(415, message, code="unsupported_media_type").response()
        return validation_error(error.errors()).response()


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Returns what a request model found wrong, told of one field."""
    # Of a union's members the one that got furthest is what was meant.
    error = max(errors, key=lambda e: len(e["loc"]))
    path = [part for part in error["loc"][1:] if not _is_tag(part)]
    if error["type"] == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return ApiError(
            400, f"body: not valid JSON: {reason} at character {error['loc'][-1]}", code="invalid_json"
        )
    if not path:
        return ApiError(400, f"body: {error['msg']}", code="invalid_body")
    first = str(path[0])
    where = first + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    in_union = len({e["loc"][:2] for e in errors}) < len(errors) or len(error["loc"]) - 1 > len(path)
    form = FORMS.get(str(path[-1] if isinstance(path[-1], str) else first)) or FORMS.get(first)
    if error["type"] == "extra_forbidden":
        says = "no field of this name is supported"
    elif error["type"] == "none_required":
        says = "not supported; leave it out"
    elif in_union and form and len(path) <= 3:
        says = f"must be {form}"
    else:
        says = str(error["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{where}: {says}", param=first)


def _is_tag(part: str | int) -> bool:
    """Tells pydantic's names of a union's members from names of fields."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool", "none", "dict")
        or re.match(r"(list|dict)\[|[A-Z]|literal\[|function-", part) is not None
    )


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
