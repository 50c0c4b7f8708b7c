"""What completions and chat share: an answer whole or as events, its usage, its end when something goes wrong."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, aclosing
from typing import Any, ClassVar

from fastapi import Request
from starlette.responses import Response

from jaxinfer.engine.outputs import Delta, RequestOutput
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.errors import ApiError, dumps, json_response, renamed
from jaxinfer.server.protocol import ChatRequest, CompletionRequest
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
    renames: ClassVar[Mapping[str, str]] = {}  # see `renamed`

    def __init__(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest,
        request: Request,
        ids: list[list[int]],
        params: SamplingParams,
    ):
        self.service, self.request, self.fields = service, request, body
        self.ids, self.params = ids, params
        self.model = service.check_model(body.model)
        self.n = 1 if body.n is None else body.n
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
        """Runs the request and returns the answer, or the stream that runs it.

        Raises:
          ApiError: what was refused, or went wrong; a stream raises it before it sends anything.
        """
        if not self.fields.stream:
            if self.fields.stream_options is not None:
                raise ApiError(400, "stream_options: needs stream to be true", param="stream_options")
            return json_response(await or_leave(self.request.receive, self._whole()))
        return EventStream(self._events())

    async def _whole(self) -> dict[str, Any]:
        with renamed(**self.renames), self._named() as name:
            outputs = await generate_all(self.service.async_engine, self._jobs(name))
            choices = self.choices(outputs)
        self._count(outputs)
        return self._head(name, self.objects[0]) | {"choices": choices, "usage": self._usage()}

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream, those that are there at once together; an error after the first is one too."""
        options = self.fields.stream_options
        running = bool(options and options.continuous_usage_stats)
        usage = bool(options and options.include_usage)
        with renamed(**self.renames), self._named() as name:
            head = self._head(name, self.objects[1])
            started, ready, left = False, b"", len(self.ids) * self.n
            try:
                async with aclosing(self._pieces(name)) as batches:
                    async for pieces in batches:
                        for piece in pieces:
                            chunk = head | {"choices": [piece]}
                            if running or usage:
                                chunk["usage"] = self._usage() if running else None
                            ready += _event(chunk)
                            left -= piece["finish_reason"] is not None
                        if ready and left:  # the last choice's end goes with the stream's
                            yield ready
                            started, ready = True, b""
            except ApiError as error:
                if not started:
                    raise
                yield ready + _event(error.body) + DONE
                return
            finally:
                self._usage()  # for the log, also of a stream whose reader left
            if usage:
                ready += _event(head | {"choices": [], "usage": self._usage()})
            yield ready + DONE

    async def _pieces(self, name: str) -> AsyncGenerator[list[dict[str, Any]], None]:
        engine, jobs = self.service.async_engine, self._jobs(name)
        if self.is_whole:
            outputs = await generate_all(engine, jobs)
            self._count(outputs)
            yield self.choices(outputs)
            return
        async with aclosing(merge(engine, jobs)) as deltas:
            async for job, delta in deltas:
                self.completion_tokens += len(delta.token_ids)
                self._cached[job] = max(self._cached.get(job, 0), delta.num_cached_tokens)
                check_ends([(delta.finish_reason, delta.error)], self.completion_tokens > 0)
                yield self.pieces(job, delta)

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
