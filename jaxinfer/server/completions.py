"""/v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.engine.outputs import CompletionOutput, Delta, RequestOutput
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.answer import Answer
from jaxinfer.server.errors import ApiError, renamed
from jaxinfer.server.logprobs import TextOffsets, completion_logprobs, join_logprobs, prompt_logprobs
from jaxinfer.server.protocol import CompletionRequest
from jaxinfer.server.service import Service, chosen_first, of_state

router = APIRouter()


@router.post("/v1/completions", summary="Complete prompts")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Completes one or several prompts, whole or as a stream."""
    service = of_state(request)
    service.check_model(body.model)
    params = _params_of(service, body)
    ids = await service.encode_prompts(body.prompt, "prompt", body.add_special_tokens is not False)
    service.check_choices(len(ids) * params.n, "prompt")
    return await Completion(service, body, request, ids, params).respond()


def _params_of(service: Service, body: CompletionRequest) -> SamplingParams:
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise ApiError(400, f"best_of: got {best_of}, must be at least n = {n}", param="best_of")
    if best_of > n and body.stream:
        raise ApiError(
            400, "best_of: the best are known at the end only, so not with stream", param="best_of"
        )
    changes: dict[str, Any] = {"n": best_of, "logprobs": body.logprobs}
    if best_of > n and body.logprobs is None:
        changes["logprobs"] = 0
    if body.max_tokens == 0:
        if not body.echo:
            raise ApiError(400, "max_tokens: got 0, must be at least 1 without echo", param="max_tokens")
        if body.min_tokens or best_of > n:
            name = "min_tokens" if body.min_tokens else "best_of"
            raise ApiError(400, f"{name}: asks for tokens, and max_tokens is 0", param=name)
        changes |= {"max_tokens": 1, "n": 1}  # the engine always makes one; it is not shown
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    with renamed(n=None if body.best_of is None else "best_of"):  # which is the engine's n
        return service.sampling_params(body, **changes)


class Completion(Answer):
    """An answer of /v1/completions."""

    kind = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        request: Request,
        ids: list[list[int]],
        params: SamplingParams,
    ):
        super().__init__(service, body, request, ids, params)
        self.body = body
        self._is_silent = body.max_tokens == 0
        self._offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()

    @property
    def is_whole(self) -> bool:
        """Prompt logprobs are there at the end only."""
        return self._is_silent or self.params.prompt_logprobs is not None

    def choices(self, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the choices of all prompts, those of a prompt together."""
        choices = []
        for job, output in enumerate(outputs):
            best = output.outputs
            if self._is_silent:
                best = best * self.n
            elif len(best) > self.n:
                best = chosen_first(best, lambda one: one.cumulative_logprob or 0.0, self.n)
            choices += [self._choice(job, i, output, one) for i, one in enumerate(best)]
        return choices

    def pieces(self, job: int, delta: Delta) -> list[dict[str, Any]]:
        """Returns the new text; the first piece of a choice begins with the prompt where it is echoed."""
        index = job * self.n + delta.index
        text, logprobs = delta.text, None
        if self.body.echo and index not in self._begun:
            text = self._prompt_text(job) + text
        self._begun.add(index)
        if self.body.logprobs is not None and delta.logprobs is not None:
            offsets = self._offsets_of(job, index).take(delta.token_ids)
            logprobs = completion_logprobs(delta.token_ids, delta.logprobs, offsets, self.body.logprobs)
        if not text and logprobs is None and delta.finish_reason is None:
            return []  # bytes, or what may become a stop string, are held back
        return [_shape(index, text, logprobs, delta)]

    def _choice(self, job: int, i: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        index = job * self.n + i
        text = "" if self._is_silent else one.text
        if self.body.echo:
            text = self._prompt_text(job) + text
        logprobs = self._logprobs(job, index, output, one) if self.body.logprobs is not None else None
        choice = _shape(index, text, logprobs, one)
        if self._is_silent:
            choice |= {"finish_reason": "length", "stop_reason": None}
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _logprobs(self, job: int, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        num_top = self.body.logprobs or 0
        ids, entries = ([], []) if self._is_silent else (one.token_ids, one.logprobs or [])
        offsets = self._offsets_of(job, index).take(ids)
        lists = completion_logprobs(ids, entries, offsets, num_top)
        if not self.body.echo or output.prompt_logprobs is None:
            return lists
        prompt = self.ids[job]
        skip = self.params.skip_special_tokens
        before = TextOffsets(self.service.tokenizer, (), 0, skip_special_tokens=skip).take(prompt)
        echoed = completion_logprobs(prompt, output.prompt_logprobs, before, num_top)
        echoed["tokens"][0] = self.service.tokenizer.decode(prompt[:1], skip_special_tokens=False)
        return join_logprobs(echoed, lists)

    def _offsets_of(self, job: int, index: int) -> TextOffsets:
        if index not in self._offsets:
            start = len(self._prompt_text(job)) if self.body.echo else 0
            self._offsets[index] = TextOffsets(
                self.service.tokenizer,
                self.ids[job],
                start,
                skip_special_tokens=self.params.skip_special_tokens,
            )
        return self._offsets[index]

    def _prompt_text(self, job: int) -> str:
        """The prompt as it was given, or what its ids say."""
        given = self.body.prompt
        if isinstance(given, str):
            return given
        one = given[job]
        if isinstance(one, str):
            return one
        return self.service.tokenizer.decode(
            self.ids[job], skip_special_tokens=self.params.skip_special_tokens
        )

    def _count(self, outputs: list[RequestOutput]) -> None:
        super()._count(outputs)
        if self._is_silent:
            self.completion_tokens = 0


def _shape(
    index: int, text: str, logprobs: dict[str, Any] | None, end: Delta | CompletionOutput
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
    }
