"""One sequence to generate: what was asked, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxinfer.schedule.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]

Pooling = Literal["last", "mean"]


class RequestRefused(ValueError):
    """A request that is refused at the door, with the reason in words."""


class QueueFull(RequestRefused):
    """A request that comes while as many wait as may.

    Attributes:
      retry_after: seconds after which a place is likely.
    """

    def __init__(self, words: str, retry_after: float):
        super().__init__(words)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """What the prefix cache did for a request when it first ran.

    Attributes:
      num_prompt: tokens of its prompt. num_cached: of these, found.
      first_missing: index of the first full page that was looked for and not found, None when all were.
      reason: why not more, in words.
    """

    num_prompt: int
    num_cached: int
    first_missing: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What is asked of the scheduler; ``n`` choices of one prompt are ``n`` of these.

    Attributes:
      request_id: unique among the live. prompt: token ids, at least one.
      params: sampling settings. stop_ids: end ids and ``params.stop_token_ids``, less what is ignored.
      max_new_tokens: most tokens to generate, at least 1, context length considered.
      choice: index among the ``n``. seed: never None here. priority: lower is more important.
      arrival: seconds on the engine's clock.
      cache_salt: its prefix is shared only with requests of the same salt.
      pooling: which hidden state of the prompt is wanted, the last or the mean; None wants tokens.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    max_new_tokens: int = 16
    choice: int = 0
    seed: int = 0
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None
    pooling: Pooling | None = None

    @property
    def num_positions(self) -> int:
        """Most tokens whose KV is ever written: the last token generated is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass(slots=True)
class PrefixState:
    """How a request stands with the prefix cache.

    Attributes:
      keys: of its full pages, as far as they were needed (`prefix.page_key`).
      num_registered: full pages that are entered, or need not be.
      report: what was found when it first ran, None before.
    """

    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    report: PrefixReport | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A spec and its progress; the scheduler writes here, and the engine where it cuts ``output`` at a stop string.

    Waiting: ``slot`` is -1. Running: ``slot`` is its row of device state. Ended: ``finish_reason`` is set.

    Attributes:
      output: ids committed so far. pages: ids of its pages, in order of position.
      num_written: tokens whose KV is written by the plans made so far, run or not.
      num_inflight: tokens that those plans sample and that are not committed yet.
      num_prefill: known tokens to write before decoding: prompt, and output so far after a preemption.
      stop_reason: the stop string or stop token id that ended it, None for an end token of the model.
      rank: sort key of importance, for life, the number of its arrival last; the highest is preempted first.
    """

    spec: RequestSpec
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    num_written: int = 0
    num_inflight: int = 0
    num_prefill: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    rank: tuple[float, int] = (0.0, -1)
    prefix: PrefixState = field(default_factory=PrefixState)

    @property
    def needs_every_position(self) -> bool:
        """Whether every position must be computed, so that nothing may come from the prefix cache."""
        return self.spec.params.prompt_logprobs is not None or self.spec.pooling == "mean"

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows: prompt and output."""
        return len(self.spec.prompt) + len(self.output)

    @property
    def num_left(self) -> int:
        """Tokens that may still be planned."""
        return self.spec.max_new_tokens - len(self.output) - self.num_inflight

    def known_tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Returns the ids at positions ``start .. stop - 1`` of prompt plus output."""
        prompt = self.spec.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        shift = len(prompt)
        return prompt[start:] + tuple(self.output[max(start - shift, 0) : stop - shift])

    def append(self, tokens: list[int]) -> int:
        """Commits sampled ids up to the one that ends the request, and returns how many were kept.

        An id below 0 says that the model's numbers were not finite; the request ends with ``error``.
        """
        spec = self.spec
        self.num_inflight -= len(tokens)
        for count, token in enumerate(tokens, 1):
            if token < 0:
                self.finish_reason = "error"
                return count - 1
            self.output.append(token)
            if token in spec.stop_ids and len(self.output) >= spec.params.min_tokens:
                self.finish_reason = "stop"
                self.stop_reason = token if token in (spec.params.stop_token_ids or ()) else None
                return count
            if len(self.output) == spec.max_new_tokens:
                self.finish_reason = "length"
                return count
        return len(tokens)


class Update(NamedTuple):
    """What a commit brought a request: ``num_tokens`` new ids at the end of its output, from result row ``row``."""

    request: Request
    row: int
    num_tokens: int
