"""An OpenAI-compatible server that follows a script on a clock of its own: no waiting, and every time is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


class Clock:
    """Stands still until it is set; a reading is noted, so that whoever set it knows that it was seen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._seen = asyncio.Event()

    def __call__(self) -> float:
        self._seen.set()
        return self.now

    async def set_and_show(self, now: float, show: Callable[[], None]) -> None:
        """Sets the time, does something that the reader sees, and waits until it has read the clock."""
        self.now = now
        self._seen.clear()
        show()
        await self._seen.wait()


@dataclass
class Script:
    """One answer.

    Attributes:
      events: what to send, each at a time of the clock; a dict as JSON, a text as it stands.
      status: with any other than 200 the first event is the body. cuts: ends the connection instead of the stream.
    """

    events: Sequence[tuple[float, Any]]
    status: int = 200
    cuts: bool = False


def tokens(
    *times: float, usage: dict[str, Any] | None = None, reason: str | None = "length"
) -> list[tuple[float, Any]]:
    """Returns the events of a completion: a token at each time, then its end, usage and ``[DONE]``."""
    events: list[tuple[float, Any]] = [(time, {"choices": [{"text": " a"}]}) for time in times]
    events.append((times[-1], {"choices": [{"text": "", "finish_reason": reason}]}))
    if usage is not None:
        events.append((times[-1], {"choices": [], "usage": usage}))
    return [*events, (times[-1], "[DONE]")]


@dataclass
class Server:
    """Answers requests one after another by a function of the path and the body.

    Attributes:
      answer: chooses the script. clock: moved by it. requests: paths and bodies that came.
      num_connections: accepted. headers: lines of the last request.
    """

    answer: Callable[[str, dict[str, Any]], Script]
    clock: Clock = field(default_factory=Clock)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_connections: int = 0
    headers: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *self.headers = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        path = first.split()[1]
        length = next(int(line.split()[1]) for line in self.headers if line.startswith("Content-Length"))
        body = json.loads(await reader.readexactly(length) or b"{}")
        self.requests.append((path, body))
        script = self.answer(path, body)
        if script.status != 200 or path.endswith("/models"):
            data = json.dumps(script.events[0][1]).encode()
            writer.write(f"HTTP/1.1 {script.status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for time, event in script.events:
            words = event if isinstance(event, str) else json.dumps(event)
            data = f"data: {words}\n\n".encode()
            chunk = b"%x\r\n%s\r\n" % (len(data), data)
            await self.clock.set_and_show(time, lambda chunk=chunk: writer.write(chunk))
        if script.cuts:
            return False
        writer.write(b"0\r\n\r\n")
        return True


@asynccontextmanager
async def serving(answer: Callable[[str, dict[str, Any]], Script]) -> AsyncIterator[Server]:
    """Runs a server in this event loop, on a free port."""
    server = Server(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
