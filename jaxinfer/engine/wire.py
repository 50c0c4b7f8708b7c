"""Frames between the hosts of a run: a kind, some JSON and arrays of numbers, over a TCP connection; never pickle.

A frame is two little-endian uint32 (bytes of the head, bytes of the arrays), the head, and the arrays one by one,
row-major. The head is JSON: ``[kind, content, [[dtype, shape], ...]]``.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 (numpy knows bfloat16 and its kin by name once it is imported)
import numpy as np

_LENGTHS = struct.Struct("<II")
MAX_BYTES = 2**30  # of a frame: a step's rows are kilobytes, and what claims more is none of ours


class LinkClosed(ConnectionError):
    """The other end has closed the connection, or has been silent for too long."""


class Frame(NamedTuple):
    """What came over a link. Attributes: kind: what it is. content: of JSON. arrays: numbers beside it."""

    kind: str
    content: Any
    arrays: tuple[np.ndarray, ...]


class Link:
    """One end of a connection to another host; any thread may send, one thread receives.

    Args:
      connection: open. silence: seconds after which another host that sends nothing, or takes nothing, counts as lost.
    """

    def __init__(self, connection: socket.socket, silence: float) -> None:
        connection.settimeout(silence)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._silence = connection, silence
        self._sending = threading.Lock()

    def send(self, kind: str, content: Any = None, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a frame.

        Raises:
          LinkClosed: see there.
        """
        self.send_packed(pack_frame(kind, content, arrays))

    def send_packed(self, frame: bytes) -> None:
        """Sends what `pack_frame` made, to the same errors as `send`."""
        try:
            with self._sending:
                self._connection.sendall(frame)
        except OSError as error:
            raise LinkClosed(self._describe(error)) from error

    def receive(self) -> Frame:
        """Waits for a frame.

        Raises:
          LinkClosed: see there. ValueError: what came is no frame.
        """
        try:
            head_bytes, array_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size))
            if head_bytes + array_bytes > MAX_BYTES:
                raise ValueError(
                    f"a frame of {head_bytes + array_bytes} bytes, at most {MAX_BYTES} are taken"
                )
            return unpack_frame(self._read(head_bytes), self._read(array_bytes))
        except OSError as error:
            raise LinkClosed(self._describe(error)) from error

    def close(self) -> None:
        """Closes the connection, also for who waits to receive."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            got = self._connection.recv_into(view)
            if not got:
                raise ConnectionResetError("its connection closed: it has ended, or was killed")
            view = view[got:]
        return buffer

    def _describe(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"nothing came from it for {self._silence:g} s: it hangs, or its network is gone"
        return str(error)


def pack_frame(kind: str, content: Any = None, arrays: Sequence[np.ndarray] = ()) -> bytes:
    """Returns a frame's bytes; ``content`` is what JSON knows, see `Frame`."""
    shapes = [[array.dtype.name, array.shape] for array in arrays]
    head = json.dumps([kind, content, shapes]).encode()
    body = b"".join(array.tobytes() for array in arrays)
    return _LENGTHS.pack(len(head), len(body)) + head + body


def unpack_frame(head: bytes | bytearray, body: bytes | bytearray) -> Frame:
    """Returns the frame of a head and of its arrays' bytes.

    Raises:
      ValueError: they are none.
    """
    kind, content, shapes = json.loads(head)
    arrays, at = [], 0
    for name, shape in shapes:
        dtype, count = np.dtype(name), math.prod(shape)
        arrays.append(np.frombuffer(body, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    if at != len(body):
        raise ValueError(f"a frame of {len(body)} bytes of arrays, {at} of which its head tells of")
    return Frame(kind, content, tuple(arrays))
