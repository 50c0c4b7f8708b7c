"""An OpenAI-compatible endpoint as a client of the load generator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinfer.bench.http import HttpClient
from jaxinfer.bench.load import MakeTokens, Shot, make_ids, make_words
from jaxinfer.bench.results import Clock, RequestFailed, Result

# Ids that the vocabularies of all common models have, past their special tokens.
COMMON_IDS = range(1000, 32_000)
_REFUSALS = (400, 404, 415, 422, 501)  # what a server says to a field that it does not take


@dataclass(frozen=True)
class EndpointOptions:
    """What is sent with every request.

    Attributes:
      api: ``completions`` or ``chat``. model: None takes the first that the server names.
      prompts: ``ids``, ``words``, or ``auto``: ids where the server takes them.
      fields: further fields of the body, such as ``temperature``. headers: further headers.
      ignore_eos: ask that answers are as long as ``max_tokens``.
    """

    api: str = "completions"
    model: str | None = None
    prompts: str = "auto"
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    ignore_eos: bool = True


@dataclass(frozen=True)
class Abilities:
    """What an endpoint takes: token ids for a prompt, ``ignore_eos``, and ``stream_options.include_usage``."""

    ids: bool = True
    ignore_eos: bool = True
    usage: bool = True

    def lacks(self) -> list[str]:
        """Returns what the lack of each means, a line each."""
        words = {
            "ids": "it takes no token ids: prompts are words, about a token each",
            "ignore_eos": "it takes no ignore_eos: answers may be shorter than asked for",
            "usage": "it takes no stream_options.include_usage: a chunk is counted as a token",
        }
        return [says for name, says in words.items() if not getattr(self, name)]


class Endpoint:
    """Sends streaming requests to one server.

    Args:
      url: with or without ``/v1``. options: see there. clock: seconds.

    Attributes:
      model: the name that is sent. abilities: what `prepare` found.
    """

    def __init__(self, url: str, options: EndpointOptions, clock: Clock) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._options, self._clock = options, clock
        self._http = HttpClient(self.url, options.headers, clock)
        self.model = options.model
        takes_ids = options.api == "completions" and options.prompts != "words"
        self.abilities = Abilities(ids=takes_ids, ignore_eos=options.ignore_eos)

    @property
    def make_tokens(self) -> MakeTokens:
        """Ids where the endpoint takes them, else words."""
        return make_ids(COMMON_IDS) if self.abilities.ids else make_words

    async def prepare(self) -> None:
        """Asks for the model's name and finds out, by requests of two tokens, what the endpoint takes.

        Raises:
          RequestFailed: it answers none of them. OSError: nobody listens.
        """
        if self.model is None:
            self.model = await self._first_model()
        wanted = self.abilities
        tries = [wanted, *(replace(wanted, **{name: False}) for name in ("ignore_eos", "usage", "ids"))]
        tries.append(replace(wanted, ignore_eos=False, usage=False))
        last = replace(wanted, ids=False, ignore_eos=False, usage=False)
        tries.append(replace(last, usage=wanted.usage))
        for abilities in dict.fromkeys([*tries, last]):
            self.abilities = abilities
            prompt = [2000, 3000] if abilities.ids else "of the"
            try:
                await self.send(Shot(0, None, prompt, 2), Result(0))
            except RequestFailed as error:
                status = error.kind.removeprefix("HTTP ")
                if abilities == last or not (status.isdigit() and int(status) in _REFUSALS):
                    raise
            else:
                return

    async def _first_model(self) -> str:
        parts: list[bytes] = []
        status = await self._http.request("GET", "/v1/models", b"", lambda _, data, __: parts.append(data))
        body = b"".join(parts)
        try:
            if status == 200:
                return json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            pass
        raise RequestFailed(f"HTTP {status}", f"{self.url}/v1/models names no model; give --model")

    async def send(self, shot: Shot, result: Result) -> None:
        """Sends one request and reads its stream; see `Client`."""
        path, body = self._encode(shot)
        reader = StreamReader(result)

        def mark() -> None:
            result.sent = self._clock()

        status = await self._http.request("POST", path, body, reader.feed, mark)
        result.end = self._clock()
        reader.finish(status, shot)

    def _encode(self, shot: Shot) -> tuple[str, bytes]:
        prompt = shot.prompt
        fields: dict[str, Any] = {"model": self.model, "max_tokens": shot.max_tokens, "stream": True}
        is_ids = isinstance(prompt, list) and isinstance(prompt[0], int)
        if isinstance(prompt, str) and self._options.api == "chat":
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str) or is_ids:
            path, fields["prompt"] = "/v1/completions", prompt
        else:
            path, fields["messages"] = "/v1/chat/completions", prompt
        if self.abilities.ignore_eos:
            fields["ignore_eos"] = True
        if self.abilities.usage:
            fields["stream_options"] = {"include_usage": True}
        return path, json.dumps(fields | dict(self._options.fields)).encode()

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()


class StreamReader:
    """Reads server-sent events into a result.

    Args:
      result: gets times, counts and the finish reason.
    """

    def __init__(self, result: Result) -> None:
        self._result = result
        self._rest = b""
        self._body = b""  # of an answer that is no stream
        self._has_usage = False
        self._is_whole = False

    def feed(self, status: int, data: bytes, now: float) -> None:
        """Takes in what came of the body at ``now``.

        Raises:
          RequestFailed: an event that is none, or that reports an error.
        """
        if status != 200:
            self._body += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_whole = True
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed("error event", _message(event))
            self._take_usage(event.get("usage"))
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or choice
                if any(delta.get(key) for key in ("text", "content", "reasoning_content", "tool_calls")):
                    self._result.times.append(now)
                self._result.finish_reason = choice.get("finish_reason") or self._result.finish_reason
        except (ValueError, AttributeError, TypeError):
            raise RequestFailed("not an event", data[:80].decode(errors="replace")) from None

    def _take_usage(self, usage: Mapping[str, Any] | None) -> None:
        if usage:
            self._has_usage = True
            self._result.prompt_tokens = usage.get("prompt_tokens") or 0
            self._result.output_tokens = usage.get("completion_tokens") or 0
            self._result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def finish(self, status: int, shot: Shot) -> None:
        """Checks that the answer is whole, and counts what the server did not.

        Raises:
          RequestFailed: it is not.
        """
        result = self._result
        if status != 200:
            raise RequestFailed(f"HTTP {status}", _message(self._body))
        if not self._is_whole and result.finish_reason is None:
            raise RequestFailed("cut stream", f"after {len(result.times)} chunks, without an end")
        if result.finish_reason in ("error", "abort", "timeout"):
            raise RequestFailed(f"finish_reason {result.finish_reason}", "")
        if not self._has_usage:
            result.counted, result.output_tokens = "chunks", len(result.times)
            result.prompt_tokens = shot.num_prompt or 0
        if not result.times:
            # Tokens that show no text (all special, say) were made all the same; their time is the answer's.
            if not result.output_tokens:
                raise RequestFailed("empty answer", "no token came")
            result.times.append(result.end)


def _message(answer: bytes | Mapping[str, Any]) -> str:
    """Returns the words of an error in OpenAI's shape or FastAPI's, else the body's beginning."""
    try:
        body = json.loads(answer) if isinstance(answer, bytes) else answer
        error = body.get("error", body)
        words = error if isinstance(error, str) else error.get("message") or error.get("detail") or error
        return str(words)[:200]
    except (ValueError, AttributeError):
        return repr(answer)[:200]
