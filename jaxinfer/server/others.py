"""The short endpoints: models, embeddings, tokens, health, metrics, and why a prompt missed the prefix cache."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from jaxinfer.server.errors import ApiError, json_response, renamed, unavailable
from jaxinfer.server.prometheus import render
from jaxinfer.server.protocol import ChatFields, DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from jaxinfer.server.service import Service, names_of, of_state
from jaxinfer.server.work import all_or_none, or_leave

router = APIRouter()


@router.get("/v1/models", summary="List the model's names")
async def list_models(request: Request) -> Response:
    """Lists what requests may call the model."""
    service = of_state(request)
    models = [_model_card(service, name) for name in service.config.model_names]
    return json_response({"object": "list", "data": models})


@router.get("/v1/models/{model:path}", summary="Show one model")
async def retrieve_model(model: str, request: Request) -> Response:
    """Shows what the list says of one name."""
    service = of_state(request)
    return json_response(_model_card(service, service.check_model(model)))


@router.post("/v1/embeddings", summary="Embed texts")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Returns a vector for each input: the last token's hidden state or the mean of all."""
    service = of_state(request)
    model = service.check_model(body.model)
    prompts = await service.encode_prompts(body.input, "input")
    with service.named("embd", request, count=len(prompts)) as name, renamed(prompt="input"):
        work = [
            service.async_engine.embed(
                ids,
                pooling=body.pooling or "last",
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                timeout=service.timeout_of(body),
                request_id=one,
            )
            for one, ids in zip(names_of(name, len(prompts)), prompts, strict=True)
        ]
        try:
            results = await or_leave(request.receive, all_or_none(work))
        except ApiError as error:
            if error.status == 500 and service.draining:  # what ends without an answer then was ended
                raise unavailable("the server ended this request before it was done", "aborted") from error
            raise
    count = sum(num_prompt_tokens for _, num_prompt_tokens in results)
    request.state.tokens = count, 0
    data = [
        {"object": "embedding", "index": i, "embedding": _vector(vector, body.encoding_format)}
        for i, (vector, _) in enumerate(results)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": model, "usage": usage})


@router.post("/tokenize", summary="Turn a text or a conversation into token ids")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Returns the ids that a prompt, or messages by the chat template, would run as."""
    service = of_state(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
        for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name}: belongs to messages, not to prompt", param=name)
        tokens = await service.work(
            len(text), lambda: service.tokenizer.encode(text, add_special_tokens=special)
        )
    else:
        if body.add_special_tokens is not None:
            message = "add_special_tokens: a chat template writes its own, so not with messages"
            raise ApiError(400, message, param="add_special_tokens")
        names = ("tools", "add_generation_prompt", "chat_template_kwargs")
        fields = {name: getattr(body, name) for name in names}
        chat = ChatFields.model_construct(messages=body.messages, **fields)
        tokens = await service.encode_chat(chat, body.tools)
    strings = [service.tokenizer.token_string(token) for token in tokens] if body.return_token_strs else None
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": service.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


@router.post("/detokenize", summary="Turn token ids into text")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Returns the text of ids, special tokens written out."""
    service = of_state(request)
    service.check_model(body.model)
    size = service.engine.vocab_size
    if outside := [token for token in body.tokens if not 0 <= token < size]:
        raise ApiError(400, f"tokens: got {outside[:8]}, allowed are 0 to {size - 1}", param="tokens")
    text = await service.work(
        len(body.tokens), lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return json_response({"prompt": text})


@router.get("/health", summary="Tell whether the engine lives")
async def health(request: Request) -> Response:
    """Answers 200 as long as the engine has not failed, also while it drains."""
    if of_state(request).engine.failure is not None:
        raise unavailable("the engine failed; start the server anew", "engine_failed")
    return json_response({"status": "ok"})


@router.get("/ready", summary="Tell whether requests are taken")
async def ready(request: Request) -> Response:
    """Answers 200 where a request that comes now would run."""
    service = of_state(request)
    if not service.is_ready:
        code = "shutting_down" if service.draining else "engine_failed"
        raise unavailable("the server takes no requests", code)
    return json_response({"status": "ready"})


@router.get("/metrics", summary="Tell the engine's numbers to Prometheus")
async def metrics(request: Request) -> Response:
    """Answers in Prometheus' text format."""
    service = of_state(request)
    text, kind = render(service.engine, model_name=service.config.model_names[0])
    return Response(text, headers={"Content-Type": kind})


@router.get("/debug/prefix", summary="Tell why a prompt was, or was not, in the prefix cache")
async def explain_prefix(
    request: Request, name: Annotated[str, Query(alias="request", description="id of a recent answer")]
) -> Response:
    """Tells of one of the latest requests how much of its prompt was cached, and where it first was not."""
    told = of_state(request).engine.explain_prefix(name)
    if told is None:
        raise ApiError(404, f"request: {name!r} is none of the latest requests", param="request")
    return json_response({"request": name, **told})


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "jaxinfer",
        "max_model_len": service.max_model_len,
    }


def _vector(vector: list[float], form: str | None) -> list[float] | str:
    if form != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
