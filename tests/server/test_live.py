from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.schedule.prefix import PrefixCache
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.live import FRESH_SECONDS, MAX_CELLS, Snapshots, shrink, snapshot
from tests.engine.fakes import EOS, make_engine
from tests.server.conftest import ChatTokenizer, Serve, Served, good

HELLO = (*b"hello", EOS)
PROMPT = list(b"a prompt of more than two pages of sixteen tokens")


def caching(script: Sequence[int] = HELLO, **limits: Any) -> Engine:
    """An engine over a script, with a prefix cache."""
    engine, _ = make_engine(script, ChatTokenizer(), **limits)
    scheduler: Any = engine.scheduler
    scheduler.prefix = PrefixCache(scheduler.pool)
    return engine


class Counting:
    """An engine that counts how often it is looked at."""

    def __init__(self, engine: Engine):
        self.engine, self.looks = engine, 0

    def __getattr__(self, name: str):
        self.looks += name == "page_states"
        return getattr(self.engine, name)


def test_a_snapshot_tells_the_engines_numbers():
    engine = caching(num_pages=64)
    for _ in range(2):
        engine.generate([PROMPT])
    shown = snapshot(engine, 7.0)
    assert json.loads(json.dumps(shown)) == shown
    assert shown["time"] == 7.0
    assert (shown["running"], shown["max_running"]) == (0, 8)
    assert shown["waiting"] == 0
    assert shown["prompt_tokens"] == 2 * len(PROMPT)
    assert shown["output_tokens"] == engine.metrics.output_tokens
    assert shown["finished"] == {"stop": 2}
    assert shown["prefix_hits"] == len(PROMPT) // 16 * 16
    assert shown["prefix_queries"] == engine.metrics.prefix_queries
    assert sum(shown["ttft"]["counts"]) == 2
    assert len(shown["ttft"]["counts"]) == len(shown["ttft"]["bounds"]) + 1
    assert sum(shown["itl"]["counts"]) == engine.metrics.itl.count
    assert shown["compilations"] == 0


def test_pages_are_counted_as_they_are_drawn():
    engine = caching(b"a", num_pages=64, max_num_seqs=4)
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    engine.generate([PROMPT], SamplingParams(max_tokens=1))  # leaves pages that are remembered
    for _ in range(2):
        engine.submit(PROMPT, endless)
    for _ in range(4):
        engine.step()
    pages = snapshot(engine, 0.0)["pages"]
    assert pages["total"] == len(pages["cells"]) == sum(pages["counts"]) == 64
    assert [pages["cells"].count(str(state)) for state in range(4)] == pages["counts"]
    stats = engine.stats()
    free, used, shared, cached = pages["counts"]
    assert (free, used + shared, shared, cached) == (
        stats.pages_free,
        stats.pages_used,
        stats.pages_shared,
        stats.pages_cached,
    )
    assert used > 0
    assert shared == len(PROMPT) // 16


def test_many_pages_share_cells():
    assert shrink(b"\0\1\2\3", 4) == (b"\0\1\2\3", 1)
    assert shrink(b"", 4) == (b"", 1)
    assert shrink(b"\1\1\0" + b"\3\2\3" + b"\2", 3) == (b"\1\3\2", 3)
    cells, per_cell = shrink(bytes(10 * MAX_CELLS + 1), MAX_CELLS)
    assert (len(cells), per_cell) == ((10 * MAX_CELLS + 11) // 11, 11)


def test_however_many_look_the_engine_is_read_now_and_then():
    engine, _ = make_engine(HELLO)
    counting, now = Counting(engine), [0.0]
    snapshots = Snapshots(counting, lambda: now[0])  # pyright: ignore[reportArgumentType]
    first = snapshots.latest()
    now[0] = FRESH_SECONDS * 0.9
    assert snapshots.latest() is first
    assert counting.looks == 1
    now[0] = FRESH_SECONDS
    assert snapshots.latest()["time"] == FRESH_SECONDS
    assert counting.looks == 2


def test_live_is_json_that_is_not_kept(hello: Served):
    reply = hello.http.get("/live")
    assert good(reply)["max_running"] == 8
    assert reply.headers["cache-control"] == "no-store"


def test_the_page_says_what_it_may_do(hello: Served):
    reply = hello.http.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for source in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy[source] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("style.css", "text/css"), ("main.js", "text/javascript"), ("icon.svg", "image/svg+xml")],
)
def test_files_come_with_their_types(hello: Served, name: str, kind: str):
    reply = hello.http.get(f"/page/{name}")
    assert reply.status_code == 200
    assert reply.headers["content-type"].partition(";")[0] == kind
    assert reply.headers["x-content-type-options"] == "nosniff"
    again = hello.http.get(f"/page/{name}", headers={"If-None-Match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2flive.py", "%2e%2e/live.py", "", "..\\live.py"])
def test_only_files_of_the_page_are_sent(hello: Served, name: str):
    reply = hello.http.get(f"/page/{name}")
    assert reply.status_code == 404
    assert "APIRouter" not in reply.text


def test_the_page_is_open_and_the_numbers_are_behind_the_key(serve: Serve):
    served = serve(config={"api_keys": ("secret",)})
    assert served.http.get("/").status_code == 200
    assert served.http.get("/page/main.js").status_code == 200
    assert served.http.get("/live").status_code == 401
    assert served.http.get("/live", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_the_page_is_not_in_the_apis_description(hello: Served):
    paths = good(hello.http.get("/openapi.json"))["paths"]
    assert not {"/", "/live", "/page/{name}"} & paths.keys()
