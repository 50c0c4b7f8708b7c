"""Frames between hosts: what is sent comes, and what is no frame, or no longer there, is told."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.engine.device import Operation
from jaxinfer.engine.leading import read_step
from jaxinfer.engine.wire import MAX_BYTES, Frame, Link, LinkClosed, pack_frame

ARRAYS = (
    np.arange(12, dtype=np.int32).reshape(3, 4),
    np.array(7, np.int32),
    np.arange(6, dtype=np.uint32).reshape(2, 3).T,
    np.array([1.5, -2.0], ml_dtypes.bfloat16),
    np.zeros((0, 5), np.float32),
)


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link, socket.socket]]:
    """Two ends of a link, and the socket under the first."""
    one, other = socket.socketpair(socket.AF_UNIX if hasattr(socket, "AF_UNIX") else socket.AF_INET)
    with one, other:
        links = [make_link(end) for end in (one, other)]
        yield links[0], links[1], one


def make_link(end: socket.socket, silence: float = 30.0) -> Link:
    with pytest.MonkeyPatch.context() as patch:  # a pair of sockets on one machine is no TCP
        patch.setattr(socket, "IPPROTO_TCP", socket.SOL_SOCKET)
        patch.setattr(socket, "TCP_NODELAY", socket.SO_REUSEADDR)
        return Link(end, silence)


def test_frames_come_as_they_were_sent(ends: tuple[Link, Link, socket.socket]):
    one, other, _ = ends
    one.send("step", [["draw", [0, 1], 0]], ARRAYS)
    one.send("bye")
    kind, content, arrays = other.receive()
    assert (kind, content) == ("step", [["draw", [0, 1], 0]])
    for got, sent in zip(arrays, ARRAYS, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(got, sent)
    assert other.receive() == Frame("bye", None, ())


def test_a_step_comes_as_its_operations():
    sent = [
        Operation("install", (), ARRAYS[:2]),
        Operation("draw", (0, 1)),
        Operation("forward", (4, 0), ARRAYS[2:]),
    ]
    heads = [[one.kind, list(one.sizes), len(one.arrays)] for one in sent]
    got = read_step(Frame("step", heads, ARRAYS))
    assert [(one.kind, one.sizes) for one in got] == [(one.kind, one.sizes) for one in sent]
    assert [len(one.arrays) for one in got] == [2, 0, 3]


def test_an_end_that_closes_or_is_silent_is_lost(ends: tuple[Link, Link, socket.socket]):
    one, other, under = ends
    under.settimeout(0.01)
    with pytest.raises(LinkClosed, match=r"nothing came from it for 30 s"):
        one.receive()
    one.close()
    with pytest.raises(LinkClosed, match="its connection closed"):
        other.receive()
    with pytest.raises(LinkClosed):
        one.send("beat")


BODY = pack_frame("step", None, (ARRAYS[0],))


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (struct.pack("<II", 5, MAX_BYTES), "at most"),
        (struct.pack("<II", 4, 0) + b"{{{{", "Expecting property name"),
        (struct.pack("<II", 2, 0) + b"[]", "not enough values"),
        (struct.pack("<II", 22, 4) + b'["a", 0, [["O", [1]]]]' + b"abcd", "OBJECT array"),
        (struct.pack("<II", 12, 4) + b'["a", 0, []]' + b"abcd", "of which its head tells"),
        (struct.pack("<II", 26, 4) + b'["a", 0, [["int32", [9]]]]' + b"abcd", "buffer is smaller"),
    ],
)
def test_what_is_no_frame_is_refused(ends: tuple[Link, Link, socket.socket], sent: bytes, says: str):
    _, other, under = ends
    under.sendall(sent)
    with pytest.raises(ValueError, match=says):
        other.receive()
