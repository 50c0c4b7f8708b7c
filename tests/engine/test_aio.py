from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.engine import EngineError, Handle
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import make_engine

PARAMS = SamplingParams(max_tokens=6)
# More steps than a reader could ever sleep through.
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
MAX_LEN, NUM_PAGES = 400_000, 25_000


def ids(text: str) -> list[int]:
    return list(text.encode("ascii"))


def test_streams_run_side_by_side():
    engine, _ = make_engine(lambda name, _: ids(name * 6))

    async def collect(door: AsyncEngine, name: str) -> str:
        return "".join([delta.text async for delta in door.stream("p", PARAMS, request_id=name)])

    async def main() -> list[str]:
        with AsyncEngine(engine) as door:
            return await asyncio.gather(*(collect(door, name) for name in "abcdefghijkl"))

    assert asyncio.run(main()) == [name * 6 for name in "abcdefghijkl"]
    assert engine.scheduler.pool.num_used == 0


def test_generate_returns_the_whole():
    engine, _ = make_engine(ids("abcdef"))

    async def main():
        with AsyncEngine(engine) as door:
            return await door.generate("p", PARAMS)

    output = asyncio.run(main())
    assert output.finished
    assert output.outputs[0].text == "abcdef"


def test_trap_17_a_reader_that_leaves_frees_its_row_and_its_pages():
    engine, _ = make_engine(ids("a"), num_pages=NUM_PAGES, max_len=MAX_LEN)

    async def main() -> None:
        with AsyncEngine(engine) as door:
            for _ in range(10):
                async with aclosing(door.stream("p", ENDLESS)) as deltas:
                    async for _ in deltas:
                        break
            reader = asyncio.create_task(door.generate("p", ENDLESS))
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert (await door.generate("p", PARAMS)).outputs[0].text == "aaaaaa"

    asyncio.run(main())
    assert not engine.has_work
    assert engine.scheduler.pool.num_used == 0
    assert engine.metrics.finished["length"] == 1


def test_a_bad_request_is_refused_to_the_one_who_asks():
    engine, _ = make_engine(ids("a"))

    async def main() -> str:
        with AsyncEngine(engine) as door:
            with pytest.raises(ValueError, match="no tokens"):
                await door.generate("", PARAMS)
            return (await door.generate("p", PARAMS)).outputs[0].text

    assert asyncio.run(main()) == "aaaaaa"


def test_a_runner_that_fails_is_heard_of_by_every_stream():
    engine, runner = make_engine(ids("abcdef"), num_pages=NUM_PAGES, max_len=MAX_LEN)
    runner.fails = lambda plan: len(runner.admitted) == 3

    async def main() -> None:
        with AsyncEngine(engine) as door:
            outputs = await asyncio.gather(*(door.generate("p", ENDLESS) for _ in range(3)))
            assert {one.outputs[0].finish_reason for one in outputs} == {"error"}
            with pytest.raises(EngineError, match="takes no requests"):
                await door.generate("p", PARAMS)

    asyncio.run(main())


def test_closing_aborts_what_runs_and_ends_the_thread():
    engine, _ = make_engine(ids("a"), num_pages=NUM_PAGES, max_len=MAX_LEN)

    async def main() -> str | None:
        door = AsyncEngine(engine)
        deltas = door.stream("p", ENDLESS)
        await anext(deltas)
        door.close()
        last = [delta async for delta in deltas][-1]
        with pytest.raises(EngineError, match="closed"):
            await door.generate("p", PARAMS)
        return last.finish_reason

    assert asyncio.run(main()) == "abort"
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxinfer-engine"]


def test_a_name_that_is_taken_is_refused_and_its_owner_runs_on():
    engine, _ = make_engine(ids("a"), num_pages=NUM_PAGES, max_len=MAX_LEN)

    async def main() -> None:
        with AsyncEngine(engine) as door:
            async with aclosing(door.stream("p", ENDLESS, request_id="mine")) as deltas:
                await anext(deltas)
                with pytest.raises(ValueError, match="live request"):
                    await door.generate("q", PARAMS, request_id="mine")
                await door.generate("q", PARAMS)  # an abort would have been done by now
                assert engine.metrics.finished == {"length": 1}

    asyncio.run(main())


def test_closing_just_as_the_thread_looks_for_work_ends_it():
    class ClosedMeanwhile(threading.Event):
        """Clears what `close` set between the thread's last look and now."""

        def clear(self) -> None:
            door._stopping = True
            self.set()
            super().clear()

    door = AsyncEngine(make_engine(ids("a"))[0])
    first, door._wake = door._wake, ClosedMeanwhile()
    first.set()
    door._thread.join(timeout=30)
    assert not door._thread.is_alive()


def test_a_request_that_is_queued_as_the_door_closes_is_refused():
    engine, _ = make_engine(ids("a"))
    enqueue = engine.enqueue

    async def main() -> None:
        door = AsyncEngine(engine)

        def enqueue_late(handle: Handle) -> None:
            door.close()  # as another thread may
            enqueue(handle)

        engine.enqueue = enqueue_late
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(door.generate("p", PARAMS), timeout=30)

    asyncio.run(main())
    engine.run_until_done()
    assert engine.metrics.finished == {"abort": 1}


def test_who_waits_for_a_first_token_is_woken_first():
    engine, _ = make_engine(b"a")
    woken: list[str] = []

    class Loop:
        def call_soon_threadsafe(self, call, events):
            call(events)

    class Event:
        def __init__(self, name: str):
            self.set = lambda: woken.append(name)

    with AsyncEngine(engine) as door:
        handles = [engine.prepare("p", PARAMS, request_id=name) for name in "abcd"]
        for handle, times in zip(handles, ([1.0, 2.0], [2.0], [0.0, 1.0, 2.0], [2.0]), strict=True):
            handle.choices[0].times = times
            door._waiters[handle] = Loop(), Event(handle.request_id)  # pyright: ignore
        door._tell(handles)
        door._waiters.clear()
    assert woken == ["b", "d", "a", "c"]
