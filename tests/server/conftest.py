"""Servers over engines that follow a script, on real sockets of this machine."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.engine import Engine
from jaxinfer.server.config import ServerConfig
from jaxinfer.server.run import Server, bind, url_of
from jaxinfer.server.service import Service
from tests.engine.fakes import EOS, TableTokenizer, make_engine

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{{ mood }}a:"


class ChatTokenizer(TableTokenizer):
    """Has a chat template that shows what it was given."""

    template = TEMPLATE

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return {}

    @property
    def chat_templates(self) -> Mapping[str, str]:
        return {"default": self.template}

    @property
    def vocab_size(self) -> int:
        return 1000

    def token_string(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("utf-8", "replace")


@dataclass
class Served:
    """A server that runs. Attributes: url: of its root. engine, service: behind it. http: a client."""

    url: str
    service: Service
    http: httpx.Client

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "p", **body: Any) -> Any:
        return good(self.post("/v1/completions", prompt=prompt, **body))

    def chat(self, content: Any = "hi", **body: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return good(self.post("/v1/chat/completions", **{"messages": messages, **body}))

    def events(self, path: str, **body: Any) -> list[Any]:
        """Streams, and returns the chunks; the last event must be [DONE]."""
        reply = self.post(path, stream=True, **body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [strict_json(line.removeprefix("data: ")) for line in lines[:-1]]


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def good(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return strict_json(reply.text)


def bad(reply: httpx.Response, status: int, param: str | None, *words: str) -> dict[str, Any]:
    """Checks an error's shape and returns it."""
    assert reply.status_code == status, reply.text
    error = strict_json(reply.text)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"], error
    return error


@contextlib.contextmanager
def running(engine: Engine, defaults: tuple[tuple[str, Any], ...] = (), **config: Any) -> Iterator[Served]:
    """Serves an engine from a thread."""
    settings = {"model_names": ("fake",), "access_log": False} | config
    with AsyncEngine(engine) as async_engine:
        service = Service(async_engine, ServerConfig(**settings), defaults)
        taken = bind("127.0.0.1", 0)
        started = threading.Event()
        server = Server(service, started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        assert started.wait(timeout=60)
        try:
            with httpx.Client(base_url=url_of(taken), timeout=60) as client:
                yield Served(url_of(taken), service, client)
        finally:
            server.should_exit = True
            thread.join(timeout=60)
            assert not thread.is_alive()


Script = Any
Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a script: ``serve(script, tokenizer=..., config={...}, num_pages=...)``."""
    with contextlib.ExitStack() as stack:

        def start(
            script: Script = (*b"hello", EOS),
            tokenizer: TableTokenizer | None = None,
            config: dict[str, Any] | None = None,
            defaults: tuple[tuple[str, Any], ...] = (),
            **limits: Any,
        ) -> Served:
            engine, _ = make_engine(script, tokenizer or ChatTokenizer(), **limits)
            return stack.enter_context(running(engine, defaults, **(config or {})))

        yield start


@pytest.fixture(scope="module")
def hello() -> Iterator[Served]:
    """A server that says hello, shared by tests that leave it as it was."""
    engine, _ = make_engine((*b"hello", EOS), ChatTokenizer(), prefix_caching=True)
    with running(engine) as served:
        yield served
