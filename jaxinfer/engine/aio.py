"""The engine for asyncio: the loop steps in a thread of its own, streams are async iterators."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Self, Unpack

from jaxinfer.engine.engine import Engine, EngineError
from jaxinfer.engine.handle import Handle
from jaxinfer.engine.intake import Prompt
from jaxinfer.engine.options import RequestOptions
from jaxinfer.engine.outputs import Delta, RequestOutput
from jaxinfer.schedule.request import Pooling
from jaxinfer.schedule.sampling_params import SamplingParams

_DRAIN_POLL = 0.02  # seconds between looks at whether everything has ended


class AsyncEngine:
    """Runs an engine in a background thread; a context manager, so that the thread ends with it.

    Args:
      engine: from now on stepped by this object only.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._wake = threading.Event()
        self._stopping = False
        self._waiters: dict[Handle, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def drain(self, seconds: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """Takes nothing new, waits until what runs and waits has ended, and aborts what has not after ``seconds``.

        The engine's own thread goes on until `close`.

        Args:
          seconds: to wait. hurried: asked meanwhile whether to wait no longer.
        """
        self.engine.draining = True
        give_up = time.monotonic() + seconds
        while self.engine.has_work and time.monotonic() < give_up and not hurried():
            await asyncio.sleep(_DRAIN_POLL)
        for handle in list(self._waiters):
            self.engine.abort(handle.request_id)
        self._wake.set()
        while self.engine.has_work:
            await asyncio.sleep(_DRAIN_POLL)

    def close(self) -> None:
        """Ends the thread after the step it is in; requests that still run are aborted."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Delta, None]:
        """Yields what steps add to one request; leaving early, or being cancelled, aborts it.

        Args:
          prompt, params, options: see `Engine.submit`.

        Raises:
          ValueError: a request that could never run.
          EngineError: the engine failed earlier. When it fails later, the last delta says ``error``.
        """
        async with contextlib.aclosing(self.batches(prompt, params, **options)) as batches:
            async for batch in batches:
                for delta in batch:
                    yield delta

    async def batches(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[list[Delta], None]:
        """Yields as `stream` does, but all deltas that wait at once: one, or as many as came while nobody read."""
        handle = self.engine.prepare(prompt, params, stream=True, **options)
        async with contextlib.aclosing(self._follow(handle)) as batches:
            async for batch in batches:
                yield batch

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Runs one request to its end; being cancelled aborts it. See `stream`."""
        handle = self.engine.prepare(prompt, params, **options)
        async with contextlib.aclosing(self._follow(handle)) as batches:
            async for _ in batches:
                pass
        return handle.output()

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling = "last",
        *,
        normalize: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> tuple[list[float], int]:
        """Returns a hidden state of one prompt and the prompt's tokens; being cancelled aborts it.

        Args:
          prompt, request_id, priority, cache_salt, timeout: see `Engine.submit`.
          pooling: of the final normed stream, that at the ``last`` token or the ``mean``.
          normalize: scale it to length 1.

        Raises:
          ValueError, EngineError: see `stream`. TimeoutError, RuntimeError: see `Handle.embedding`.
        """
        handle = self.engine.prepare(
            prompt,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            timeout=timeout,
            pooling=pooling,
        )
        async with contextlib.aclosing(self._follow(handle)) as batches:
            async for _ in batches:
                pass
        return handle.embedding(normalize=normalize), len(handle.prompt_token_ids)

    async def _follow(self, handle: Handle) -> AsyncGenerator[list[Delta], None]:
        """Queues a handle and yields the deltas that wait, all at once, until it has finished."""
        news = asyncio.Event()
        self._waiters[handle] = (asyncio.get_running_loop(), news)
        try:
            self.engine.enqueue(handle)
        except BaseException:  # a refused name is another request's, which an abort by name would end
            del self._waiters[handle]
            raise
        try:
            if self._stopping:  # looked at last: what `close` does not see among the waiters sees it here
                raise EngineError("the engine is closed")
            self._wake.set()
            while True:
                finished = handle.finished
                if waiting := [handle.deltas.popleft() for _ in range(len(handle.deltas))]:
                    yield waiting
                if finished:
                    return
                await news.wait()
                news.clear()
        finally:
            del self._waiters[handle]
            if not handle.finished:
                self.engine.abort(handle.request_id)
                self._wake.set()

    def _run(self) -> None:
        """The thread: steps while there is work, sleeps while there is none."""
        while True:
            self._wake.clear()  # before looking, so that what comes after the look wakes it
            if self._stopping:
                break
            if self.engine.has_work:
                self._step()
                if self.engine.wake_at is not None:  # a ferry that has not left yet
                    self._wake.wait(max(0.0, self.engine.wake_at - self.engine.clock()))
            else:
                self._wake.wait()
        for handle in list(self._waiters):
            self.engine.abort(handle.request_id)
        while self.engine.has_work:
            self._step()

    def _step(self) -> None:
        with contextlib.suppress(EngineError):  # every stream hears of it by its last delta
            self._tell(self.engine.step())
            return
        self._tell(list(self._waiters))

    def _tell(self, handles: Iterable[Handle]) -> None:
        """Wakes the streams of some handles, with one call for each event loop.

        First tokens go first: what is sent for 15 others takes a millisecond, which nobody notices between tokens.
        """
        news: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for handle in sorted(handles, key=lambda one: len(one.choices[0].times) > 1):
            loop, event = self._waiters.get(handle, (None, None))
            if loop is not None and event is not None:
                news.setdefault(loop, []).append(event)
        for loop, events in news.items():
            with contextlib.suppress(RuntimeError):  # a loop that was closed has nobody left to tell
                loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
