"""What completions and chat share: an answer whole or as events, its usage, its end when something goes wrong."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from jaxinfer.engine.outputs import Delta, RequestOutput
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError, dumps, json_response
from jaxinfer.server.protocol import RequestFields
from jaxinfer.server.service import Service, names_of, usage_of
from jaxinfer.server.work import DONE, EventStream, Job, check_ends, generate_all, merge, or_leave


class Answer(ABC):
    """One request on its way: its prompts as ids, its settings, what came so far.

    Args:
      service: runs it. body: what was asked. request: of HTTP.
      ids: of each prompt. params: with every default filled in.
    """

    kind: str
    objects: tuple[str, str]  # of a whole answer, and of a piece of a stream

    def __init__(
        self,
        service: Service,
        body: RequestFields,
        request: Request,
        ids: list[list[int]],
        params: SamplingParams,
    ):
        self.service, self.request, self.fields = service, request, body
        self.ids, self.params = ids, params
        self.model = service.check_model(body.model)
        self.created = int(time.time())
        self.prompt_tokens = sum(map(len, ids))
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}

    @abstractmethod
    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the choices of a whole answer."""

    @abstractmethod
    def pieces(self, job: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns what a delta adds, as choices of chunks, one a chunk."""

    @property
    def is_whole(self) -> bool:
        """Whether a stream holds what only the end knows, so that each choice comes in one chunk."""
        return False

    async def respond(self) -> Response:
        """Runs the request and returns the answer, or the stream once its first event is there.

        Raises:
          ApiError: what was refused, or went wrong before anything was sent.
        """
        if not self.fields.stream:
            if self.fields.stream_options is not None:
                raise ApiError(400, "stream_options: needs stream to be true", param="stream_options")
            return json_response(await or_leave(self.request.receive, self._whole()))
        events = self._events()
        first = await or_leave(self.request.receive, anext(events))
        return EventStream(first, events)

    async def _whole(self) -> dict[str, Any]:
        with self._named() as name:
            outputs = await generate_all(self.service.async_engine, self._jobs(name))
            choices = self.choices(outputs)
        self._count(outputs)
        return self._head(name, self.objects[0]) | {"choices": choices, "usage": self._usage()}

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream; an error after the first is an event too."""
        options = self.fields.stream_options
        running = bool(options and options.continuous_usage_stats)
        usage = bool(options and options.include_usage)
        with self._named() as name:
            head = self._head(name, self.objects[1])
            started = False
            try:
                async with aclosing(self._pieces(name)) as pieces:
                    async for piece in pieces:
                        chunk = head | {"choices": [piece]}
                        if running or usage:
                            chunk["usage"] = self._usage() if running else None
                        yield _event(chunk)
                        started = True
            except ApiError as error:
                if not started:
                    raise
                yield _event(error.body)
                yield DONE
                return
            finally:
                self._usage()  # for the log, also of a stream whose reader left
            if usage:
                yield _event(head | {"choices": [], "usage": self._usage()})
            yield DONE

    async def _pieces(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        engine, jobs = self.service.async_engine, self._jobs(name)
        if self.is_whole:
            outputs = await generate_all(engine, jobs)
            self._count(outputs)
            for piece in self.choices(outputs):
                yield piece
            return
        async with aclosing(merge(engine, jobs)) as deltas:
            async for job, delta in deltas:
                self.completion_tokens += len(delta.token_ids)
                self._cached[job] = max(self._cached.get(job, 0), delta.num_cached_tokens)
                check_ends([(delta.finish_reason, delta.error)], self.completion_tokens > 0)
                for piece in self.pieces(job, delta):
                    yield piece

    def _named(self) -> AbstractContextManager[str]:
        return self.service.named(self.kind, self.request, self.fields.request_id, len(self.ids))

    def _jobs(self, name: str) -> list[Job]:
        body = self.fields
        names = names_of(name, len(self.ids))
        timeout = self.service.timeout_of(body)
        return [
            Job(one, ids, self.params, body.priority or 0, body.cache_salt, timeout)
            for one, ids in zip(names, self.ids, strict=True)
        ]

    def _head(self, name: str, kind: str) -> dict[str, Any]:
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def _count(self, outputs: list[RequestOutput]) -> None:
        self.completion_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        self._cached = {i: output.num_cached_tokens for i, output in enumerate(outputs)}

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self.prompt_tokens, self.completion_tokens, sum(self._cached.values()))
        self.request.state.tokens = self.prompt_tokens, self.completion_tokens  # for the log
        return usage


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"
