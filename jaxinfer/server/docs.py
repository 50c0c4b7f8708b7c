"""The page at ``/docs``: the API's description as plain HTML, which needs nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = (
    ":root{color-scheme:light dark}body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem}"
    "section{overflow-x:auto}table{border-collapse:collapse}"
    "th,td{text-align:left;vertical-align:top;padding:.2rem 1rem .2rem 0;border-bottom:1px solid #8886}"
)
_REF = "#/components/schemas/"


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Lists what there is."""
    return HTMLResponse(render(request.app.openapi()), headers=HEADERS)


def render(schema: Mapping[str, Any]) -> str:
    """Returns an OpenAPI description as a page."""
    title = f"{schema['info']['title']} {schema['info']['version']}"
    return "".join(
        (
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main>',
            f"<h1>{escape(title)}</h1><p>{escape(schema['info'].get('description', ''))}</p>",
            '<p>For programs: <a href="/openapi.json">openapi.json</a></p>',
            *(
                "".join(_operation(method.upper(), path, operation))
                for path, methods in schema["paths"].items()
                for method, operation in methods.items()
            ),
            *("".join(_model(name, model)) for name, model in schema["components"]["schemas"].items()),
            "</main></body></html>",
        )
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<section><h2><code>{method} {escape(path)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
    for one in operation.get("parameters", ()):
        about = f"{_type_of(one['schema'])} {escape(one.get('description', ''))}"
        yield f"<p><code>{escape(one['name'])}</code> ({one['in']}): {about}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        yield f"<p>Body: {_type_of(body['schema'])}</p>"
    yield "<table><tr><th>Status</th><th>Meaning</th></tr>"
    for status, answer in operation["responses"].items():
        yield f"<tr><td>{escape(status)}</td><td>{escape(answer['description'])}</td></tr>"
    yield "</table></section>"


def _model(name: str, model: Mapping[str, Any]) -> Iterator[str]:
    if "properties" not in model:
        return
    yield f'<section id="{escape(name)}"><h2>{escape(name)}</h2><p>{escape(model.get("description", ""))}</p><table>'
    yield "<tr><th>Field</th><th>Holds</th><th>Meaning</th></tr>"
    for key, field in model["properties"].items():
        needed = "needed. " if key in model.get("required", ()) else ""
        limits = [f"{word} {field[name]}" for name, word in _LIMITS if name in field]
        about = needed + "; ".join(filter(None, (*limits, field.get("description", ""))))
        yield f"<tr><td><code>{escape(key)}</code></td><td>{_type_of(field)}</td><td>{escape(about)}</td></tr>"
    yield "</table></section>"


_LIMITS = (("minimum", "at least"), ("maximum", "at most"))


def _type_of(field: Mapping[str, Any]) -> str:
    """Returns what a field holds, as HTML."""
    if "$ref" in field:
        name = escape(field["$ref"].removeprefix(_REF))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in field:
        return " or ".join(map(_type_of, field["anyOf"]))
    if "const" in field or "enum" in field:
        return " or ".join(escape(json.dumps(one)) for one in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"array of {_type_of(field.get('items', {}))}"
    return escape(str(field.get("type", "anything")))
