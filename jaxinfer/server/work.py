"""Requests at work: several as one, until they are done or the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
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

    Raises:
      ApiError: one of them was refused.
    """
    if len(jobs) == 1:  # what nearly all are, and it costs neither tasks nor a queue
        job = jobs[0]
        try:
            async with aclosing(engine.stream(job.ids, job.params, **job.options)) as deltas:
                async for delta in deltas:
                    yield 0, delta
        except (ValueError, RuntimeError) as error:
            raise to_api_error(error) from error
        return
    news: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, job: Job) -> None:
        try:
            async with aclosing(engine.stream(job.ids, job.params, **job.options)) as deltas:
                async for delta in deltas:
                    news.put_nowait((index, delta))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(to_api_error(error))

    tasks = [asyncio.ensure_future(pump(index, job)) for index, job in enumerate(jobs)]
    try:
        left = len(jobs)
        while left:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        await cancel(*tasks)


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
      events: the bytes of each; closed at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]):
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await or_leave(receive, self._send(send))
        except ApiError as error:
            if error.status != CLIENT_GONE:
                raise
        finally:
            await self._events.aclose()

    async def _send(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
