"""The door under load: places, names, times, and what is counted of those who came in."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from jaxinfer.engine.choice import Choice
from jaxinfer.schedule.request import QueueFull, RequestRefused
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import make_engine

ONE = SamplingParams(temperature=0, max_tokens=1)


class Counted(list[Choice]):
    """Choices that do something whenever they are counted, as another thread might just then."""

    meanwhile: Callable[[], Any]

    def __len__(self) -> int:
        self.meanwhile()
        return super().__len__()


def test_a_request_that_ends_while_another_comes_gives_its_place_back():
    engine, _ = make_engine([65], max_num_seqs=1, max_num_waiting=1)
    engine.submit("a", ONE)
    late = engine.prepare("b", ONE)
    late.choices = Counted(late.choices)
    nothing_yet = iter([True])  # the first count is to see whether there is a place
    late.choices.meanwhile = lambda: next(nothing_yet, False) or engine.run_until_done()
    engine.enqueue(late)
    late.choices.meanwhile = lambda: None
    engine.run_until_done()
    for _ in range(2):
        engine.submit("c", ONE)
    with pytest.raises(QueueFull):
        engine.submit("c", ONE)


def test_two_that_come_at_once_do_not_share_the_last_place():
    engine, _ = make_engine([65], max_num_seqs=1, max_num_waiting=0)
    both = threading.Barrier(2)
    refused: list[Exception] = []

    def meet() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # the other one waits at the door
            both.wait(0.2)

    def enqueue() -> None:
        handle = engine.prepare("a", ONE)
        handle.choices = Counted(handle.choices)
        handle.choices.meanwhile = meet
        try:
            engine.enqueue(handle)
        except QueueFull as error:
            refused.append(error)

    threads = [threading.Thread(target=enqueue) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1


def test_what_has_ended_is_not_kept_until_its_time_would_have_been_over():
    engine, _ = make_engine(lambda name, _: [65])
    engine.submit("a", SamplingParams(temperature=0, max_tokens=900), timeout=1e6)
    ended = []
    for _ in range(300):
        handle = engine.submit("b", ONE, timeout=2e6)
        while not handle.finished:
            engine.step()
        ended.append(weakref.ref(handle))
    gc.collect()
    assert sum(ref() is not None for ref in ended) < 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_id": ""}, "request_id: got ''"),
        ({"request_id": ["a"]}, r"request_id: got \['a'\], must be a text"),
        ({"timeout": True}, "timeout: got True"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str):
    engine, _ = make_engine([65])
    with pytest.raises(RequestRefused, match=words):
        engine.submit("a", ONE, **options)
