"""Results as users of vLLM know them: `RequestOutput`, `CompletionOutput`, `Logprob`; and `Delta` for streams."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.engine.metrics import RequestMetrics
from jaxinfer.schedule.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
      logprob: natural logarithm, finite (impossible tokens have `LOGPROB_FLOOR`).
      rank: 1 for the likeliest token of the vocabulary.
      decoded_token: text of the token alone.
    """

    logprob: float
    rank: int
    decoded_token: str


# What stands for minus infinity, so that a result is valid JSON; vLLM's servers say the same.
LOGPROB_FLOOR = -9999.0

# Of one position: the token itself first, then the likeliest, by token id.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice.

    Attributes:
      index: which of the ``n``. text: generated text, cut at a stop string.
      token_ids: generated ids, the one that ended it included.
      cumulative_logprob: sum over ``token_ids``, None unless logprobs were asked for.
      logprobs: one entry a token, None unless asked for.
      finish_reason: ``stop``, ``length``, ``abort``, ``timeout`` or ``error``; None while it runs.
      stop_reason: the stop string or stop token id that ended it; None for an end token of the model.
      error: what went wrong when ``finish_reason`` is ``error``.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its choices.

    Attributes:
      request_id: given or made at submission. prompt: text, None when ids were given.
      prompt_token_ids: ids that ran. prompt_logprobs: one entry a prompt token, None for the first, which has
      nothing before it; None when not asked for.
      outputs: one a choice, in order. finished: whether all of them ended. metrics: times.
      num_cached_tokens: of the prompt, that the prefix cache had.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice of a stream; the last of a choice has its ``finish_reason``.

    Attributes:
      request_id, index: whose it is. text: new text, empty while bytes or a possible stop string are held back.
      token_ids, logprobs: of the new tokens. finish_reason, stop_reason, error: see `CompletionOutput`.
      num_cached_tokens: see `RequestOutput`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
