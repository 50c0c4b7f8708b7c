"""A submitted request as its reader sees it."""

from __future__ import annotations

from collections import deque

from jaxinfer.engine.choice import Choice
from jaxinfer.engine.metrics import RequestMetrics
from jaxinfer.engine.outputs import Delta, RequestOutput
from jaxinfer.schedule.request import RequestSpec
from jaxinfer.text import Tokenizer


class Handle:
    """A submitted request: what came of it so far.

    Attributes:
      request_id: its name. prompt: text, None when ids were given. prompt_token_ids: ids that run.
      choices: one for each of ``n``. stream: whether deltas are kept.
      deltas: what steps added, oldest first; the reader takes them out (from any thread).
      deadline: when it ends whatever it is doing, on the engine's clock; None never.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        specs: list[RequestSpec],
        tokenizer: Tokenizer,
        *,
        stream: bool,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = specs[0].prompt
        self.choices = [Choice(spec, tokenizer, eager=stream) for spec in specs]
        self.stream = stream
        self.deltas: deque[Delta] = deque()
        self.arrival = specs[0].arrival
        self.deadline: float | None = None
        self.first_scheduled: float | None = None
        self.finished_at: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache had when its first choice first ran."""
        report = self.choices[0].request.prefix.report
        return 0 if report is None else report.num_cached

    @property
    def finished(self) -> bool:
        """Whether every choice ended, and every delta is there."""
        return self.finished_at is not None

    def metrics(self) -> RequestMetrics:
        """Returns the times so far."""
        times = tuple(tuple(choice.times) for choice in self.choices)
        ends = [(one[0], one[-1]) for one in times if one]
        first, last = (min(e[0] for e in ends), max(e[1] for e in ends)) if ends else (None, None)
        return RequestMetrics(self.arrival, self.first_scheduled, first, last, self.finished_at, times)

    def output(self) -> RequestOutput:
        """Returns the request as it stands."""
        prompt_logprobs = self.choices[0].prompt_logprobs
        return RequestOutput(
            self.request_id,
            self.prompt,
            list(self.prompt_token_ids),
            None if prompt_logprobs is None else list(prompt_logprobs),
            [choice.output() for choice in self.choices],
            self.finished,
            self.metrics(),
            self.num_cached_tokens,
        )

    def embedding(self, *, normalize: bool = True) -> list[float]:
        """Returns what a request with pooling asked for, of length 1 unless ``normalize`` is False.

        Raises:
          TimeoutError: its time was over. RuntimeError: it ended without one, or asked for none.
        """
        (choice,) = self.choices
        reason = choice.request.finish_reason
        if choice.pooled is None or reason not in ("stop", "length"):
            words = f"request {self.request_id} has no embedding: {choice.error or reason or 'it still runs'}"
            raise (TimeoutError if reason == "timeout" else RuntimeError)(words)
        return choice.pooled.vector(normalize=normalize)
