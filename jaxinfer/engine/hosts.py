"""Many hosts as one engine: who they are, how they find each other, and how the loss of one ends all.

Every process holds a share of the weights and of the cache (`jax.distributed`). Process 0 schedules; before it starts
the executables of a step it tells the others which and with what numbers, over a connection to each of its own. A
process that is lost would leave the others in a collective that never ends: its closed connection, or its silence, ends
them too, with the reason, for their supervisor to start all anew.
"""

from __future__ import annotations

import hmac
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import distributed  # the one way to what the coordination service knows

from jaxinfer.engine.cluster import START_SECONDS, Place
from jaxinfer.engine.wire import Frame, Link, LinkClosed, pack_frame

MEET_SECONDS = 20  # to connect to each other once all have come
BEAT_SECONDS, SILENCE_SECONDS = 3.0, 24.0  # a lost host ends all within 30 s
LOST = 1  # exit code
_KEY = "jaxinfer/hosts"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_GRACE_SECONDS = 2.0
# A supervisor that ends a job tells all processes, and process 0 must not hear of it twice.
_FORWARD_SECONDS = 2.0


@dataclass
class Hosts:
    """The processes of a run, as one of them sees them; made by `join`.

    Attributes:
      index: of this process. count: of all.
      on_stop: what process 0 does when another was told to end (SIGTERM): as if it had been told itself.
    """

    index: int
    count: int
    on_stop: Callable[[], None] = field(default=lambda: os.kill(os.getpid(), signal.SIGTERM))
    _links: dict[int, Link] = field(default_factory=dict)
    _inboxes: dict[int, queue.SimpleQueue[Frame]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)  # those that said goodbye
    _ending: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def send(self, kind: str, content: Any = None, arrays: tuple[np.ndarray, ...] = ()) -> None:
        """Sends a frame: process 0 to all others, they to process 0; a link that is gone ends the process."""
        frame = pack_frame(kind, content, arrays)
        for index, link in self._links.items():
            try:
                link.send_packed(frame)
            except LinkClosed as error:
                self.fail(f"process {index} is lost: {error}")

    def receive(self, index: int = 0) -> Frame:
        """Waits for a frame of another process; what is lost meanwhile ends this process too."""
        return self._inboxes[index].get()

    def gather(self, name: str, value: Any) -> list[Any]:
        """Returns every process's value, by index; all call it, with the same name, in the same order.

        Args:
          name: what is gathered. value: of this process; what JSON knows.
        """
        if not self.leads:
            self.send("gather", [name, value])
            frame = self.receive()
        else:
            frames = [self.receive(index) for index in self._links]
            if odd := [frame for frame in frames if frame.kind != "gather" or frame.content[0] != name]:
                self.fail(
                    f"another process sent {odd[0].kind} {odd[0].content!r} when {name} was asked of all"
                )
            frame = Frame("gathered", [name, [value, *(frame.content[1] for frame in frames)]], ())
            self.send(*frame[:2])
        if frame.kind != "gathered" or frame.content[0] != name:
            self.fail(f"process 0 sent {frame.kind} when {name} was asked of all; run one version everywhere")
        return frame.content[1]

    def require_same(self, **values: str) -> None:
        """Holds what this process chose against what process 0 chose.

        Raises:
          ValueError: they differ, with the names and both values; on every process.
        """
        mine = self.gather("same", values)
        for index, one in enumerate(mine):
            for name, wanted in mine[0].items():
                if one.get(name) != wanted:
                    raise ValueError(
                        f"{name}: process {index} has {one.get(name)}, process 0 has {wanted}; all hosts need the same "
                        "devices, versions and files, or the choice made by a setting"
                    )

    def fail(self, reason: str) -> NoReturn:
        """Ends this process at once with the reason, whatever its threads do, and tells the others; from any thread."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process already, for the reason that came first
        links = [link for index, link in self._links.items() if index not in self._ended]
        telling = [threading.Thread(target=_try_send, args=(link, reason), daemon=True) for link in links]
        give_up = time.monotonic() + 1.0  # one that is lost may be stuck in a send
        for thread in telling:
            thread.start()
        for thread in telling:
            thread.join(max(0.0, give_up - time.monotonic()))
        line = f"jaxinfer: process {self.index} of {self.count} ends: {reason}; start all processes anew\n"
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(Exception):
            os.write(2, line.encode())
        os._exit(LOST)

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """Ends all processes when the block, a step of this one, fails: the others are in the same step for good.

        A collective fails where a host is lost; a moment later that is known, and told instead.
        """
        try:
            yield
        except Exception as error:
            threading.Event().wait(_GRACE_SECONDS)
            self.fail(f"a step failed: {type(error).__name__}: {error}")

    def close(self, error: BaseException | None = None) -> None:
        """Says goodbye and waits for the others to do so; with an error, tells of it and does not wait."""
        if self._closed.is_set():
            return
        self._closed.set()
        if error is not None:
            for link in self._links.values():
                _try_send(link, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            return
        self.send("bye")
        give_up = time.monotonic() + SILENCE_SECONDS
        for index, link in self._links.items():
            while index not in self._ended and time.monotonic() < give_up:
                with suppress(queue.Empty):
                    self._inboxes[index].get(timeout=0.1)
            link.close()
        jax.distributed.shutdown()

    def _add(self, index: int, link: Link) -> None:
        self._links[index] = link
        self._inboxes[index] = queue.SimpleQueue()

    def _watch(self) -> None:
        for index in self._links:
            threading.Thread(target=self._listen, args=(index,), name=f"host-{index}", daemon=True).start()
        threading.Thread(target=self._beat, name="hosts-beat", daemon=True).start()

    def _listen(self, index: int) -> None:
        """Takes in what one process sends, until it says goodbye or is lost."""
        while True:
            try:
                frame = self._links[index].receive()
            except (LinkClosed, ValueError) as error:
                if self._closed.is_set():
                    self._ended.add(index)
                    return
                self.fail(f"process {index} is lost: {error}")
            if frame.kind == "failed":
                self.fail(
                    frame.content
                    if frame.content.startswith("process ")
                    else f"process {index} failed: {frame.content}"
                )
            elif frame.kind == "stop":
                self.on_stop()
            elif frame.kind != "beat":
                if frame.kind == "bye":
                    self._ended.add(index)
                self._inboxes[index].put(frame)
                if frame.kind == "bye":
                    return

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            for link in self._links.values():
                with suppress(LinkClosed):  # who listens hears of it
                    link.send("beat")

    def _forward_stop(self, number: int, frame: FrameType | None) -> None:
        """Answers SIGTERM to a process that only follows: process 0 is to end all in order."""
        telling = threading.Timer(_FORWARD_SECONDS, _try_send, (self._links[0], None, "stop"))
        telling.daemon = True
        telling.start()


def _try_send(link: Link, content: Any, kind: str = "failed") -> None:
    with suppress(LinkClosed):
        link.send(kind, content)


_CURRENT: list[Hosts] = []


def current_hosts() -> Hosts | None:
    """Returns the processes that this one has joined, None where it is alone."""
    return _CURRENT[0] if _CURRENT else None


@contextmanager
def join(place: Place, start_seconds: float = START_SECONDS) -> Iterator[Hosts]:
    """Joins the processes of a run, before anything asks jax for its devices; they part when the block ends.

    After a block that ended by an error `current_hosts` still names them, and the process must end by `os._exit`: an
    ordinary end would have jax wait for the others.

    Args:
      place: of this process. start_seconds: for all processes to come.
    """
    hosts = Hosts(place.index, place.count)
    late = threading.Timer(
        start_seconds,
        hosts.fail,
        (f"not all {place.count} came to {place.coordinator} within {start_seconds:g} s",),
    )
    late.daemon = True
    late.start()
    if jax.__version_info__ < (0, 11):
        # On a CPU of few cores collectives would wait for a free thread for ever.
        os.environ.setdefault("PJRT_NPROC", "16")
    # It would catch SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            place.local_devices,
            "deactivate",
            initialization_timeout=int(start_seconds) + 60,  # its own end is an abort
            shutdown_timeout_seconds=int(SILENCE_SECONDS),
        )
    except RuntimeError as error:
        hosts.fail(f"jax.distributed could not start at {place.coordinator}: {error}")
    late.cancel()
    _meet(hosts, place)
    hosts._watch()
    _CURRENT.append(hosts)
    try:
        yield hosts
    except BaseException as error:
        hosts.close(error)
        raise
    hosts.close()
    _CURRENT.clear()


def _meet(hosts: Hosts, place: Place) -> None:
    """Connects process 0 with all others: its port and a secret go by jax's coordination service."""
    client: Any = distributed.global_state.client
    host = place.coordinator.rpartition(":")[0].strip("[]")
    try:
        if hosts.leads:
            _accept(hosts, client, host)
        else:
            port, secret = client.blocking_key_value_get(_KEY, MEET_SECONDS * 1000).split()
            link = Link(socket.create_connection((host, int(port)), MEET_SECONDS), SILENCE_SECONDS)
            link.send("hello", [secret, hosts.index, jax.__version__])
            hosts._add(0, link)
            _forward_signals(hosts)
    except (OSError, ValueError, RuntimeError) as error:
        hosts.fail(f"the processes could not connect to each other at {host}: {error}")


def _accept(hosts: Hosts, client: Any, host: str) -> None:
    """Takes a connection of every other process; strangers, who have not the secret, are let go."""
    with _open_server(host, hosts.count) as server:
        secret = secrets.token_hex(16)
        client.key_value_set(_KEY, f"{server.getsockname()[1]} {secret}")
        give_up = time.monotonic() + MEET_SECONDS
        met: dict[int, Link] = {}
        while len(met) < hosts.count - 1:
            server.settimeout(max(0.01, give_up - time.monotonic()))
            try:
                link = Link(server.accept()[0], SILENCE_SECONDS)
            except TimeoutError:
                missing = sorted(set(range(1, hosts.count)) - met.keys())
                raise OSError(f"process(es) {missing} did not connect within {MEET_SECONDS} s") from None
            with suppress(LinkClosed, ValueError, TypeError):
                kind, (given, index, version), _ = link.receive()
                if kind == "hello" and hmac.compare_digest(str(given), secret) and 0 < index < hosts.count:
                    met[index] = link
                    if version != jax.__version__:
                        raise OSError(f"process {index} has jax {version}, process 0 has {jax.__version__}")
                    continue
            link.close()
    for index in sorted(met):
        hosts._add(index, met[index])


def _open_server(host: str, backlog: int) -> socket.socket:
    """Listens for the others: on this machine only where all are on it, else on all interfaces, as jax's service does.

    A host's name may stand for another address on the host itself.
    """
    if host == "localhost" or host.startswith("127."):
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _forward_signals(hosts: Hosts) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, hosts._forward_stop)
