"""The page at ``/`` with its files, and the snapshots that its live view asks for."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.metrics import Histogram

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Nothing but what this server sends, no script in the markup, and no markup made of text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for each time, sent when its ETag is another
}
FRESH_SECONDS = (
    0.25  # half the page's period: however many look, the pool is read four times a second at most
)
MAX_CELLS = 4096  # of the picture of the pool; more pages share a cell
STATES = 4  # of a page: free, in use, shared, cached


def make_live_router(engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> APIRouter:
    """Returns the routes of the page.

    ``/`` is the page, ``/page/{name}`` its files, ``/live`` one snapshot as JSON. The page asks for ``/live`` twice a
    second while it can be seen: nothing runs here while nobody looks, and no connection outlives a drain.

    Args:
      engine: what the live view shows. clock: seconds of the snapshots, monotonic.
    """
    router = APIRouter(include_in_schema=False)
    pages = {path.name: path.read_bytes() for path in files("jaxinfer.server").joinpath("page").iterdir()}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, content in pages.items()}
    snapshots = Snapshots(engine, clock)

    def send(request: Request, name: str) -> Response:
        headers = HEADERS | {"ETag": tags[name]}
        if tags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(pages[name], headers=headers, media_type=MEDIA_TYPES[name.rpartition(".")[2]])

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return send(request, "index.html")

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def page_file(request: Request, name: str) -> Response:
        if name not in pages:
            return Response(f"no file {name!r} belongs to the page\n", 404, media_type="text/plain")
        return send(request, name)

    @router.get("/live")
    async def live() -> Response:
        return JSONResponse(snapshots.latest(), headers={"Cache-Control": "no-store"})

    return router


class Snapshots:
    """The newest snapshot of an engine, taken when somebody asks and the last one is old.

    Args:
      engine: what is looked at. clock: seconds, monotonic.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic):
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, Any] | None = None

    def latest(self) -> dict[str, Any]:
        """Returns a snapshot that is at most `FRESH_SECONDS` old; not to be changed."""
        with self._lock:
            now = self._clock()
            if self._last is None or now - self._last["time"] >= FRESH_SECONDS:
                self._last = snapshot(self._engine, now)
            return self._last


def snapshot(engine: Engine, now: float) -> dict[str, Any]:
    """Returns what the live view shows, as JSON takes it.

    Counts are totals since the engine's start; who wants a rate takes the difference of two snapshots.

    Args:
      engine: read from this thread while its own goes on. now: seconds that the snapshot is of.
    """
    stats, metrics, states = engine.stats(), engine.metrics, engine.page_states()
    cells, per_cell = shrink(states, MAX_CELLS)
    return {
        "time": now,
        "running": stats.num_running,
        "max_running": stats.max_num_seqs,
        "waiting": stats.num_waiting,
        "max_waiting": stats.max_num_waiting,
        "pages": {
            "total": len(states),
            "size": stats.page_size,
            "counts": [states.count(state) for state in range(STATES)],
            "cells": cells.translate(_DIGITS).decode("ascii"),
            "per_cell": per_cell,
        },
        "host_pages": {"total": stats.host_pages, "used": stats.host_pages_used},
        "steps": metrics.num_steps,
        "prompt_tokens": metrics.prompt_tokens,
        "output_tokens": metrics.output_tokens,
        "finished": dict(metrics.finished),
        "prefix_queries": metrics.prefix_queries,
        "prefix_hits": metrics.prefix_hits,
        "preemptions": dict(metrics.preemptions),
        "compilations": stats.compilations,
        "ttft": _histogram(metrics.ttft),
        "itl": _histogram(metrics.itl),
    }


def shrink(states: bytes, most: int) -> tuple[bytes, int]:
    """Merges neighbouring pages until they fit a picture; a cell takes its pages' commonest state.

    Args:
      states: one a page. most: cells of the picture.

    Returns:
      The cells, and how many pages each stands for.
    """
    per_cell = max(1, -(-len(states) // most))
    if per_cell == 1:
        return states, 1
    parts = (states[start : start + per_cell] for start in range(0, len(states), per_cell))
    return bytes(max(range(STATES), key=part.count) for part in parts), per_cell


_DIGITS = bytes(48 + state if state < STATES else 48 for state in range(256))  # b"\x02" -> b"2"


def _histogram(histogram: Histogram) -> dict[str, list[float] | list[int]]:
    return {"bounds": list(histogram.bounds), "counts": list(histogram.counts)}
