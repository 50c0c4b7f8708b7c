"""Requests at work: several as one, until they are done or the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.outputs import Delta, RequestOutput
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError, to_api_error, unavailable

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # nobody reads it; logs do


@dataclass(frozen=True)
class Job:
    """One prompt to run.

    Attributes:
      request_id: its name. ids: of the prompt. params: with every default filled in.
      priority, cache_salt, timeout: see `AsyncEngine.stream`.
    """

    request_id: str
    ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the engine beside prompt and settings."""
        given = {"cache_salt": self.cache_salt, "timeout": self.timeout}
        named = {name: value for name, value in given.items() if value is not None}
        return {"request_id": self.request_id, "priority": self.priority, **named}


async def generate_all(engine: AsyncEngine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Runs jobs side by side to their ends; one that fails, or being cancelled, ends them all.

    Raises:
      ApiError: one was refused, failed, or ran out of time before it made a token.
    """
    outputs = await all_or_none([engine.generate(job.ids, job.params, **job.options) for job in jobs])
    choices = [choice for output in outputs for choice in output.outputs]
    check_ends([(c.finish_reason, c.error) for c in choices], any(c.token_ids for c in choices))
    return outputs


async def all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all side by side and returns their results in order; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [error for task in tasks if task in done and (error := task.exception()) is not None]
        if failed:
            raise to_api_error(failed[0]) if isinstance(failed[0], Exception) else failed[0]
        return [task.result() for task in tasks]
    finally:
        await cancel(*tasks)


async def merge(engine: AsyncEngine, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yields what comes for any of several jobs, with the job's index; leaving early ends them all.

    What waits for a reader that is slower than the engine is joined, one delta a choice.

    Raises:
      ApiError: one of them was refused.
    """
    if len(jobs) == 1:  # what nearly all are, and it costs neither tasks nor a queue
        job = jobs[0]
        try:
            async with aclosing(engine.batches(job.ids, job.params, **job.options)) as batches:
                async for batch in batches:
                    for delta in join(batch):
                        yield 0, delta
        except (ValueError, RuntimeError) as error:
            raise to_api_error(error) from error
        return
    news: asyncio.Queue[tuple[int, list[Delta]] | Exception | None] = asyncio.Queue()

    async def pump(index: int, job: Job) -> None:
        try:
            async with aclosing(engine.batches(job.ids, job.params, **job.options)) as batches:
                async for batch in batches:
                    news.put_nowait((index, batch))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(to_api_error(error))

    tasks = [asyncio.ensure_future(pump(index, job)) for index, job in enumerate(jobs)]
    try:
        left = len(jobs)
        while left:
            waiting = [await news.get()]
            waiting += [news.get_nowait() for _ in range(news.qsize())]
            came: dict[int, list[Delta]] = {}
            for item in waiting:
                if isinstance(item, tuple):
                    came.setdefault(item[0], []).extend(item[1])
            for index, batch in came.items():
                for delta in join(batch):
                    yield index, delta
            for item in waiting:
                if isinstance(item, Exception):
                    raise item
            left -= waiting.count(None)
    finally:
        await cancel(*tasks)


def join(batch: Sequence[Delta]) -> list[Delta]:
    """Returns a delta a choice that says what several say; ends that are failures stay behind the text before."""
    if len(batch) == 1:
        return list(batch)
    failed: list[Delta] = []
    by_choice: dict[int, list[Delta]] = {}
    for delta in batch:
        is_failure = delta.finish_reason in ("error", "abort")
        (failed if is_failure else by_choice.setdefault(delta.index, [])).append(delta)
    return [_join(deltas) for deltas in by_choice.values()] + failed


def _join(deltas: Sequence[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs or ()] if has_logprobs else None,
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
    )


def check_ends(ends: Sequence[tuple[str | None, str | None]], has_tokens: bool) -> None:
    """Refuses to call an answer what is none.

    Args:
      ends: finish reason and error of each choice. has_tokens: whether any choice has a token.

    Raises:
      ApiError: 500 where the engine failed, 503 where the server ended it, 408 where time ran out before a token.
    """
    for reason, error in ends:
        if reason == "error":
            raise ApiError(500, f"the engine failed on this request: {error}", code="engine_error")
        if reason == "abort":
            raise unavailable("the server ended this request before it was done", "aborted")
    if not has_tokens and any(reason == "timeout" for reason, _ in ends):
        raise ApiError(408, "timeout: the request's time was up before its first token", code="timeout")


async def or_leave(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits work, and cancels it when the client goes away.

    Args:
      receive: of the request, whose body was read. work: what it waits for.

    Raises:
      ApiError: the client has gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_GONE, "the client has gone")
        return task.result()
    finally:
        await cancel(task, gone)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits for them to be over, whatever they come to."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, which end when the client goes away, even while it is sent nothing.

    Args:
      events: bytes of events, as many together as go out together, `DONE` at the very end; closed however it ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]):
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events.

        Raises:
          ApiError: what went wrong before the first, of which nothing was sent.
        """
        try:
            await or_leave(receive, self._send(send))
        except ApiError as error:
            if error.status != CLIENT_GONE or not self._has_begun:
                raise
        finally:
            await self._events.aclose()

    async def _send(self, send: Callable[[Message], Awaitable[None]]) -> None:
        async for events in self._events:
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # The end goes out with the last event: each send is a call of the system, 30 microseconds.
            await send({"type": "http.response.body", "body": events, "more_body": not events.endswith(DONE)})
