"""Ctrl-C while the engine steps: it waits for the end of the step, and the engine serves on."""

from __future__ import annotations

import signal
import threading

import pytest

from jaxinfer.engine.interrupts import hold_interrupts
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import make_engine


def test_an_interrupt_comes_when_the_block_is_done():
    done: list[bool] = []

    def work() -> None:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_that_was_there_is_the_one_that_is_called():
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_nothing_to_delay():
    ran: list[bool] = []

    def work() -> None:
        with hold_interrupts():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]


def test_an_interrupted_call_leaves_an_engine_that_serves_on():
    engine, runner = make_engine(b"abcdef")
    collect, calls = runner.collect, []

    def interrupted(pending):
        calls.append(pending)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return collect(pending)

    runner.collect = interrupted
    params = SamplingParams(max_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["x"] * 3, params)
    assert len(calls) == 3

    def text(output: RequestOutput) -> str:
        return output.outputs[0].text

    assert [text(output) for output in engine.generate(["y", "z"], params)] == ["abcdef"] * 2
    assert engine.metrics.finished["abort"] == 3
    assert engine.scheduler.pool.num_used == 0
    assert not engine.has_work
