"""Sends a load as it is due, or as clients become free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from jaxinfer.bench.load import Shot
from jaxinfer.bench.results import Client, Clock, RequestFailed, Result

Sleep = Callable[[float], Awaitable[None]]


class Drive:
    """One run of a load.

    Args:
      client: where to. clock: seconds. timeout: most seconds a request may take.
      on_done: told of each result as it comes. sleep: waits for seconds of that clock.
    """

    def __init__(
        self,
        client: Client,
        clock: Clock,
        *,
        timeout: float | None = None,
        on_done: Callable[[Result], None] = lambda _: None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._client, self._clock, self._timeout = client, clock, timeout
        self._on_done, self._sleep = on_done, sleep
        self._results: list[Result] = []

    async def run(self, shots: Sequence[Shot], num_clients: int | None) -> list[Result]:
        """Sends all requests and waits for their answers.

        Args:
          shots: in the order of their arrival.
          num_clients: that each wait for an answer before they send again; None sends each when it is due.

        Returns:
          A result each, by index; their times count from the start.
        """
        start = self._clock()
        if num_clients is not None:
            queue = iter(shots)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(num_clients, len(shots))):
                    group.create_task(self._serve(queue))
        else:
            await self._send_when_due(shots, start)
        for result in self._results:
            result.shift(start)
        return sorted(self._results, key=lambda result: result.index)

    async def _serve(self, queue: Iterator[Shot]) -> None:
        """One client: takes what is next until nothing is left."""
        for shot in queue:
            await self._send(shot, self._clock())

    async def _send_when_due(self, shots: Sequence[Shot], start: float) -> None:
        async with asyncio.TaskGroup() as group:
            for shot in shots:
                due = start + (shot.at or 0.0)
                if (wait := due - self._clock()) > 0:
                    await self._sleep(wait)
                group.create_task(self._send(shot, due))

    async def _send(self, shot: Shot, due: float) -> None:
        result = Result(shot.index, sent=self._clock())
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.send(shot, result)
        except RequestFailed as error:
            result.error, result.detail = error.kind, error.detail
        except TimeoutError:
            result.error, result.detail = "timeout", f"no whole answer after {self._timeout} s"
        except OSError as error:
            result.error, result.detail = "connection", str(error)
        result.late = max(result.sent - due, 0.0)
        result.end = result.end or self._clock()
        self._results.append(result)
        self._on_done(result)
