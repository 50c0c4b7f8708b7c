"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.engine.outputs import CompletionOutput, Delta, RequestOutput
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.answer import Answer
from jaxinfer.server.errors import ApiError
from jaxinfer.server.logprobs import chat_logprobs, prompt_logprobs
from jaxinfer.server.protocol import ChatRequest
from jaxinfer.server.service import Service, of_state

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation by the model's chat template, whole or as a stream."""
    service = of_state(request)
    service.check_model(body.model)
    params = _params_of(service, body)
    ids = await service.encode_chat(body)
    service.check_choices(params.n, "n")
    return await Chat(service, body, request, [ids], params).respond()


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
    return service.sampling_params(body, **changes)


class Chat(Answer):
    """An answer of /v1/chat/completions."""

    kind = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        request: Request,
        ids: list[list[int]],
        params: SamplingParams,
    ):
        super().__init__(service, body, request, ids, params)
        self.body = body
        self._begun: set[int] = set()

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        """Returns a message for each choice."""
        return [self._choice(output, one) for output in outputs for one in output.outputs]

    def pieces(self, job: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the role where a choice begins, its new text, and its end."""
        listed: list[dict[str, Any]] = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            listed.append(_shape(delta.index, {"role": "assistant", "content": ""}))
        logprobs = self._logprobs(delta)
        if delta.text or logprobs is not None:
            listed.append(_shape(delta.index, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            listed.append(_shape(delta.index, {}, None, delta))
        return listed

    def _choice(self, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": one.text, "refusal": None}
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": self._logprobs(one),
            "finish_reason": one.finish_reason,
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


def _shape(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, end: Delta | None = None
) -> dict[str, Any]:
    shape = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
    if end is not None:
        shape |= {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
    return shape
