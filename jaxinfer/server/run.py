"""The process around the application: a socket, uvicorn on the main thread, and what signals mean."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator

import uvicorn

from jaxinfer.server.app import make_app
from jaxinfer.server.service import Service

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# After draining: for the last events to reach slow readers.
_FLUSH_SECONDS = 5
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Takes a port before the model is loaded, so that one that is taken is heard of at once.

    Args:
      host: a name or address. port: 0 takes a free one.

    Raises:
      OSError: the port is taken, or the address is not this machine's.
    """
    with contextlib.ExitStack() as cleanup:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, proto, _, address = found[0]
            taken = cleanup.enter_context(socket.socket(family, kind, proto))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
        except OSError as error:
            raise OSError(f"cannot serve at {host} port {port}: {error.strerror or error}") from error
        cleanup.pop_all()
    return taken


def url_of(taken: socket.socket) -> str:
    """Returns the address that a browser on this machine reaches a socket by."""
    host, port = taken.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, that answers SIGTERM and Ctrl-C by draining first; a second one ends what runs, a third the process.

    Args:
      service: what is served. on_ready: called once requests are taken.
    """

    def __init__(self, service: Service, on_ready: Callable[[], None] = lambda: None):
        config = uvicorn.Config(
            make_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._draining: asyncio.Task[None] | None = None
        self._stops = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the socket and says so."""
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Makes signals drain; uvicorn's own would close the socket first, and die of the signal afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Drains and ends; called again, ends what runs; once more, ends the process. For the event loop's thread."""
        self._stops += 1
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        elif self._stops == 2:
            self._service.hurry()
        else:  # something hangs, and whoever asks three times means it
            os._exit(1)

    async def _drain(self) -> None:
        try:
            await self._service.drain(self._service.config.drain_seconds)
        finally:
            self.should_exit = True


def serve(service: Service, taken: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serves until a signal ends it and what ran is over.

    Args:
      service: what is served; its engine is closed at the end. taken: from `bind`. on_ready: see `Server`.
    """
    try:
        server = Server(service, on_ready)
        gc.collect()
        gc.freeze()  # what start-up made stays: a full collection would walk all of it, and hold the streams for 0.1 s
        server.run(sockets=[taken])
    finally:
        service.async_engine.close()
