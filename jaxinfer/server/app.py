"""The application: endpoints, gate, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from jaxinfer.server import chat, completions, docs, others
from jaxinfer.server.direct import Direct
from jaxinfer.server.errors import install
from jaxinfer.server.gate import Gate
from jaxinfer.server.live import make_live_router
from jaxinfer.server.service import Service

ABOUT = (
    "OpenAI's API over a JAX engine, with vLLM's further fields of sampling. What is not supported is refused "
    "with its name; nothing is silently ignored."
)
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS = {
    400: "a field or the body is wrong, named in `param`",
    401: "no API key, or a wrong one",
    404: "no such model",
    408: "the request's time was up before its first token",
    413: "the body is too long",
    415: "the body is not application/json",
    503: "too many wait, or the server is shutting down; see Retry-After",
}


def make_app(service: Service) -> FastAPI:
    """Returns the application over a service."""
    described: dict[int | str, dict[str, Any]] = {
        status: {"description": says, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
        for status, says in ERRORS.items()
    }
    app = FastAPI(
        title="jaxinfer",
        version=version("jaxinfer"),
        description=ABOUT,
        docs_url=None,  # FastAPI's would come from elsewhere, and needs the network
        redoc_url=None,
        responses=described,
    )
    app.state.service = service
    app.openapi = partial(_describe, app.openapi, service.config.model_names)
    for room in (completions, chat, others, docs):
        app.include_router(room.router)
    app.include_router(make_live_router(service.engine))
    install(app)
    app.add_middleware(Direct)
    app.add_middleware(Gate, service=service)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _describe(describe: Callable[[], dict[str, Any]], model_names: Sequence[str]) -> dict[str, Any]:
    """Returns the API's description, with the model's names and without FastAPI's answer to a bad body: ours is 400."""
    schema = describe()
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for body in schema["components"]["schemas"].values():
        if "model" in body.get("properties", ()):
            named = {"type": "string", "enum": list(model_names)}
            body["properties"]["model"] = {"anyOf": [named, {"type": "null"}], "title": "Model"}
    return schema
