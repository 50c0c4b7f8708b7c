"""What every endpoint leans on: the engine, names of requests, prompts as ids, sampling settings with defaults."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.engine import Engine
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.config import ServerConfig
from jaxinfer.server.errors import ApiError, to_api_error
from jaxinfer.server.protocol import (
    ChatFields,
    EmbeddingRequest,
    Prompts,
    RequestFields,
    SamplingFields,
    Tool,
)
from jaxinfer.text import Tokenizer, encode_chat
from jaxinfer.text.chat import find_template
from jaxinfer.text.tools import ToolFormat, tool_format_of

T = TypeVar("T")
# Characters that are encoded on the event loop: a millisecond. Longer texts go to a thread.
LONG_TEXT = 4096
ENCODE_THREADS = 2


class Service:
    """An engine as the endpoints see it.

    Args:
      engine: runs the requests. config: of the server.
      defaults: sampling fields where a request gives none, as `GenerationDefaults.sampling` has them.
      family: the model's, for its form of tool calls.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        defaults: tuple[tuple[str, Any], ...] = (),
        family: str = "",
    ):
        self.async_engine = engine
        self.config = config
        self.defaults = defaults
        self.family = family
        self.draining = self._hurried = False
        self.started = int(time.time())
        self._threads = ThreadPoolExecutor(ENCODE_THREADS, "jaxinfer-encode")
        self._live: set[str] = set()

    @property
    def engine(self) -> Engine:
        """What runs the requests."""
        return self.async_engine.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.scheduler.config.max_len

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls, None where its template defines no known way."""
        try:
            template = find_template(self.tokenizer, with_tools=True)
        except ValueError:
            return None
        return tool_format_of(template, self.family)

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now would run."""
        return not self.draining and self.engine.failure is None

    async def drain(self, seconds: float) -> None:
        """Takes no more requests, and returns once none runs or, after ``seconds`` or `hurry`, all were ended."""
        self.draining = True
        await self.async_engine.drain(seconds, lambda: self._hurried)

    def hurry(self) -> None:
        """Makes a drain end what runs now."""
        self._hurried = True

    def check_model(self, name: str | None) -> str:
        """Returns what answers call the model.

        Raises:
          ApiError: 404, a name that no model has.
        """
        names = self.config.model_names
        if name is not None and name not in names:
            message = f"model: got {name!r}, there is {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return names[0] if name is None else name

    @contextmanager
    def named(self, kind: str, request: Request, given: str | None = None, count: int = 1) -> Iterator[str]:
        """Yields the name of a request, which holds as long as the context does.

        Args:
          kind: ``cmpl`` or the like, its beginning. request: its X-Request-Id is taken where it is free.
          given: the name that the body gives. count: of prompts, which have names of their own by `names_of`.
        """
        name = f"{kind}-{given or request.state.request_id}"
        if self._is_live(name, count):
            if given is not None:
                raise ApiError(400, f"request_id: {given!r} is that of a live request", param="request_id")
            name = f"{name}-{secrets.token_hex(4)}"
        taken = {name, *names_of(name, count)}
        self._live |= taken
        try:
            yield name
        finally:
            self._live -= taken

    def _is_live(self, name: str, count: int) -> bool:
        """Tells whether a name or its prompts' are in use; the engine may have one a step longer than its client."""
        names = {name, *names_of(name, count)}
        return not names.isdisjoint(self._live) or any(map(self.engine.is_live, names))

    def timeout_of(self, body: RequestFields | EmbeddingRequest) -> float | None:
        """Returns the seconds that a request may take."""
        return self.config.timeout if body.timeout is None else body.timeout

    async def work(self, size: int, function: Callable[[], T]) -> T:
        """Runs what takes as long as a text of ``size`` characters is long, off the event loop when it is."""
        with refusals():
            if size <= LONG_TEXT:
                return function()
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def encode_prompts(self, given: Prompts, name: str, special: bool = True) -> list[list[int]]:
        """Returns the ids of each prompt of a body.

        Args:
          given: see `Prompts`. name: of the field. special: whether texts get the BOS the model wants.

        Raises:
          ApiError: no prompt, too many, or one that has no token.
        """
        if isinstance(given, list) and not given:
            raise ApiError(400, f"{name}: got an empty list, must be at least one prompt", param=name)
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        self.check_choices(len(prompts), name)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        # All of them at once: many short texts are as long as a long one.
        encoded = await self.work(
            sum(map(len, texts)),
            lambda: [self.tokenizer.encode(text, add_special_tokens=special) for text in texts],
        )
        ids: list[Any] = encoded or [prompt for prompt in prompts if not isinstance(prompt, str)]
        if empty := [i for i, one in enumerate(ids) if not one]:
            where = name if len(ids) == 1 else f"{name}[{empty[0]}]"
            message = f"{where}: got no tokens (this tokenizer adds none of its own), give at least one"
            raise ApiError(400, message, param=name, code="empty_prompt")
        return ids

    async def encode_chat(self, body: ChatFields, given_tools: Sequence[Tool] | None) -> list[int]:
        """Returns the ids of a conversation.

        Args:
          body: the messages, and how the template is to be used. given_tools: what the model is shown of tools.

        Raises:
          ApiError: the model has no template, or the template refuses the messages.
        """
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        if "developer" not in (self.tokenizer.chat_template or ""):
            # OpenAI's later name of it; templates that do not know it would drop the message or fail.
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        tools = [tool.model_dump(exclude_none=True) for tool in given_tools or ()]
        size = len(repr((messages, tools, body.chat_template_kwargs)))  # a template may write out all of it

        def run() -> list[int]:
            return encode_chat(
                self.tokenizer,
                messages,
                tools=tools or None,
                add_generation_prompt=body.add_generation_prompt is not False,
                chat_template_kwargs=body.chat_template_kwargs,
            )

        try:
            return await self.work(size, run)
        except ApiError as error:
            if error.param not in ("chat_template_kwargs", "tools"):
                error.param = "messages"
            raise

    def sampling_params(self, body: SamplingFields, **changes: Any) -> SamplingParams:
        """Returns what a body asks of sampling, with the model's defaults in what it leaves open.

        Args:
          body: of the request. changes: fields over the body's, by `SamplingParams`' names; None leaves one open,
            but for max_tokens, whose None asks for as many as the context holds.

        Raises:
          ApiError: a value that cannot be served, named.
        """
        given = {name: getattr(body, name) for name in SamplingFields.model_fields}
        given = {name: value for name, value in given.items() if value is not None} | changes
        with refusals():
            return SamplingParams.from_dict(given).with_defaults(self.defaults)

    def check_choices(self, count: int, name: str) -> None:
        """Refuses a request of too many choices."""
        if count > self.config.max_choices:
            message = f"{name}: asks for {count} choices in all, at most {self.config.max_choices} a request"
            raise ApiError(400, message, param=name)


def names_of(name: str, count: int) -> list[str]:
    """Returns the engine's names for the prompts of a request."""
    return [name] if count == 1 else [f"{name}-{i}" for i in range(count)]


@contextmanager
def refusals() -> Iterator[None]:
    """Turns what the engine's doors raise into answers."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise to_api_error(error) from error


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Returns the counts of a request as OpenAI's clients read them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chosen_first(rows: Sequence[T], score: Callable[[T], float], count: int) -> list[T]:
    """Returns the ``count`` rows of the highest score, the earlier first on ties."""
    return sorted(rows, key=score, reverse=True)[:count]


def of_state(request: Request) -> Service:
    """Returns the service of a request's application."""
    return request.app.state.service
