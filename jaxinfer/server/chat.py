"""/v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.engine.outputs import CompletionOutput, Delta, RequestOutput
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.answer import Answer
from jaxinfer.server.errors import ApiError, renamed
from jaxinfer.server.logprobs import chat_logprobs, prompt_logprobs
from jaxinfer.server.protocol import ChatRequest
from jaxinfer.server.service import Service, of_state
from jaxinfer.text.tools import CallBegun, Event, TextAdded, ToolFormat, ToolParser, gather

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation by the model's chat template, whole or as a stream."""
    service = of_state(request)
    service.check_model(body.model)
    params = _params_of(service, body)
    tools = _tools_of(service, body)
    if tools is not None and tools.format.needs_special_tokens:
        if body.skip_special_tokens:
            message = (
                "skip_special_tokens: must not be true with tools, for special tokens mark this model's calls"
            )
            raise ApiError(400, message, param="skip_special_tokens")
        params = params.replace(skip_special_tokens=False)
    ids = await service.encode_chat(body, body.tools if tools else None)
    service.check_choices(params.n, "n")
    return await Chat(service, body, request, ids, params, tools).respond()


@dataclass(frozen=True)
class Tools:
    """What the model may call, and how it says so. Attributes: format, names: of the functions."""

    format: ToolFormat
    names: frozenset[str]

    def parser(self) -> ToolParser:
        """Returns a parser for one answer."""
        return self.format.parser(names=self.names)


def _tools_of(service: Service, body: ChatRequest) -> Tools | None:
    if not body.tools or body.tool_choice == "none":
        return None
    form = service.tool_format
    if form is None:
        message = "tools: this model's chat template defines no form of tool calls that is known"
        raise ApiError(400, message, param="tools")
    return Tools(form, frozenset(tool.function.name for tool in body.tools))


def _params_of(service: Service, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
    changes: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    limits = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(limits) > 1:
        message = (
            f"max_completion_tokens: got {body.max_completion_tokens} beside max_tokens = {body.max_tokens}, "
            "which means the same; give one"
        )
        raise ApiError(400, message, param="max_completion_tokens")
    if limits:
        changes["max_tokens"] = limits.pop()
    elif "max_tokens" not in dict(service.defaults):
        changes["max_tokens"] = None  # as many as the context holds
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs: the API has no place for them in a stream"
        raise ApiError(400, message, param="prompt_logprobs")
    limit = None if body.max_completion_tokens is None else "max_completion_tokens"
    with renamed(logprobs="top_logprobs", max_tokens=limit):
        return service.sampling_params(body, **changes)


class Chat(Answer):
    """An answer of /v1/chat/completions."""

    kind = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")
    renames: ClassVar = {"prompt": "messages"}

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        request: Request,
        ids: list[int],
        params: SamplingParams,
        tools: Tools | None = None,
    ):
        super().__init__(service, body, request, [ids], params)
        self.body = body
        self._tools = tools
        self._begun: dict[int, ToolParser | None] = {}
        self._callers: set[int] = set()  # choices that called

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        """Returns a message for each choice."""
        return [self._choice(output, one) for output in outputs for one in output.outputs]

    def pieces(self, job: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the role where a choice begins, its new text, and its end."""
        index, end = delta.index, delta.finish_reason
        listed: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun[index] = self._tools.parser() if self._tools else None
            listed.append(_shape(index, {"role": "assistant", "content": ""}))
        parser = self._begun[index]
        if parser is None:
            news = [{"content": delta.text}] if delta.text else []
        else:
            events = parser.push(delta.text) + (parser.flush() if end is not None else [])
            news = [_news(event) for event in events]
        if any("tool_calls" in one for one in news):
            self._callers.add(index)
        logprobs = self._logprobs(delta)
        if logprobs is not None and not news:
            news = [{"content": ""}]
        for one in news:
            listed.append(_shape(index, one, logprobs))
            logprobs = None  # once, though the tokens' text became several pieces
        if end is not None:
            reason = "tool_calls" if end == "stop" and index in self._callers else end
            listed.append(_shape(index, {}) | {"finish_reason": reason, "stop_reason": delta.stop_reason})
        return listed

    def _choice(self, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
        reason = one.finish_reason
        if self._tools is not None:
            parser = self._tools.parser()
            text, calls = gather(parser.push(one.text) + parser.flush())
            message["content"] = text
            if calls:
                message |= {"content": text or None, "tool_calls": [_call(*call) for call in calls]}
                reason = "tool_calls" if reason == "stop" else reason
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": self._logprobs(one),
            "finish_reason": reason,
            "stop_reason": one.stop_reason,
        }
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _logprobs(self, new: Delta | CompletionOutput) -> dict[str, Any] | None:
        if not self.body.logprobs or not new.token_ids or new.logprobs is None:
            return None
        tokenizer, num_top = self.service.tokenizer, self.body.top_logprobs or 0
        return {
            "content": chat_logprobs(tokenizer, new.token_ids, new.logprobs, num_top),
            "refusal": None,
        }


def _shape(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _news(event: Event) -> dict[str, Any]:
    """Returns what a chunk says of a tool parser's event."""
    if isinstance(event, TextAdded):
        return {"content": event.text}
    if isinstance(event, CallBegun):
        return {"tool_calls": [{"index": event.index, **_call(event.id, event.name, "")}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _call(ident: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
