"""What requests may hold: OpenAI's fields and vLLM's, each applied, or refused by its name.

A field of type null is known and not served: leaving it out, or null, is the only value. Fields that say nothing
about the answer (`user`, `metadata` and the like) are taken and have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxinfer.schedule.sampling_params import MAX_LOGPROBS

TokenIds = list[int]
Prompts = str | list[str] | TokenIds | list[TokenIds]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)] | None
Salt = Annotated[str, Field(min_length=1)] | None
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)] | None


def refused(what: str) -> Any:
    """Returns the field of a name that is known and not served."""
    return Field(default=None, description=f"{what}: not supported, must be left out or null")


def no_effect(what: str) -> Any:
    """Returns the field of a name that says nothing about the answer."""
    return Field(default=None, description=f"{what}; accepted, without effect on the answer")


def within(low: float | None = None, high: float | None = None) -> Any:
    """Returns a field that is described with its limits; `SamplingParams` holds them."""
    limits = {"minimum": low, "maximum": high}
    return Field(default=None, json_schema_extra={k: v for k, v in limits.items() if v is not None})


class Body(BaseModel):
    """What every request shares: no unknown names, no value that is nearly of the right type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(Body):
    """Fields that `SamplingParams` reads under the same names; their limits are checked there."""

    n: int | None = within(1, 1024)
    temperature: float | None = within(0)
    top_p: float | None = within(0, 1)
    top_k: int | None = within(-1)
    min_p: float | None = within(0, 1)
    presence_penalty: float | None = within(-2, 2)
    frequency_penalty: float | None = within(-2, 2)
    repetition_penalty: float | None = within(1e-3, 1e3)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = within(0)
    min_tokens: int | None = within(0)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = within(0, MAX_LOGPROBS)
    do_sample: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    truncate_prompt_tokens: None = refused("cutting prompts")
    use_beam_search: Literal[False] | None = None
    length_penalty: None = refused("beam search")
    structured_outputs: None = refused("structured outputs")
    guided_json: None = refused("structured outputs")
    guided_regex: None = refused("structured outputs")
    guided_choice: None = refused("structured outputs")
    guided_grammar: None = refused("structured outputs")


class RequestFields(Body):
    """Fields about a request as a whole."""

    model: str | None = Field(default=None, description="a name of /v1/models; the one model when left out")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = Field(default=None, description="lower is more important")
    cache_salt: Salt = Field(
        default=None, description="prompts share cached beginnings only under the same salt"
    )
    request_id: Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")] | None = Field(
        default=None, description="name of the request, that no live request has"
    )
    timeout: Seconds = Field(default=None, description="seconds from arrival after which the request ends")
    user: str | None = no_effect("who asks")


class ResponseFormat(Body):
    """Only plain text is served."""

    type: Literal["text"]


class CompletionRequest(RequestFields, SamplingFields):
    """Body of /v1/completions."""

    prompt: Prompts
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: int | None = within(0, MAX_LOGPROBS)
    suffix: None = refused("insertion")
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="whether texts get the BOS the model wants"
    )


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """What a call calls."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = refused("refusals")
    function_call: None = refused("functions of old; give tool_calls")
    audio: None = refused("audio")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionSpec(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[\w.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class ChatFields(Body):
    """What makes a prompt of a conversation."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = refused("templates of a request")


class ChatRequest(ChatFields, RequestFields, SamplingFields):
    """Body of /v1/chat/completions."""

    max_completion_tokens: int | None = within(1)
    logprobs: bool | None = None
    top_logprobs: int | None = within(0, MAX_LOGPROBS)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = no_effect("labels of stored answers")
    prompt_cache_key: str | None = no_effect("a hint for routing")
    safety_identifier: str | None = no_effect("who asks")
    audio: None = refused("audio")
    functions: None = refused("functions of old; give tools")
    function_call: None = refused("functions of old; give tool_choice")
    moderation: None = refused("moderation")
    prediction: None = refused("predicted outputs")
    prompt_cache_options: None = refused("cache options")
    prompt_cache_retention: None = refused("cache retention")
    reasoning_effort: None = refused("reasoning effort; give what the template knows in chat_template_kwargs")
    verbosity: None = refused("verbosity")
    web_search_options: None = refused("web search")


class EmbeddingRequest(Body):
    """Body of /v1/embeddings."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last", "mean"] | None = Field(
        default=None, description="of hidden states; last when left out"
    )
    dimensions: None = refused("shorter embeddings")
    priority: Priority = None
    cache_salt: Salt = None
    timeout: Seconds = None
    user: str | None = no_effect("who asks")


class TokenizeRequest(Body):
    """Body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = refused("templates of a request")
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: TokenIds
