"""What became of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from jaxinfer.bench.load import MakeTokens, Shot

Clock = Callable[[], float]


class RequestFailed(Exception):
    """A request that got no answer: ``kind`` is what it is counted under."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail


@dataclass(slots=True)
class Result:
    """A request's times, in seconds on the client's clock (after the start, once its run has ended), and counts.

    Attributes:
      index: of its `Shot`. sent: it left. late: seconds that it left after it was due.
      end: the answer was whole, or failed. times: when each piece of the answer came.
      prompt_tokens, output_tokens, cached_tokens: the cached are those of the prompt that were not computed.
      counted: what the counts are from: ``usage`` (the server's), ``ids``, or ``chunks`` (each taken for a token).
      finish_reason: the server's. error: the kind of what went wrong, None when nothing did. detail: its words.
    """

    index: int
    sent: float = 0.0
    late: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    counted: str = "usage"
    finish_reason: str | None = None
    error: str | None = None
    detail: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first piece; only where one came."""
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from sending to the end."""
        return self.end - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [late - soon for soon, late in pairwise(self.times)]

    @property
    def itl(self) -> float | None:
        """Mean seconds a token after the first; None where there is none."""
        if self.output_tokens < 2 or len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    def shift(self, start: float) -> None:
        """Counts all times from ``start``."""
        self.sent, self.end = self.sent - start, self.end - start
        self.times = [time - start for time in self.times]


class Client(Protocol):
    """Sends requests somewhere.

    `send` runs one to its end, fills the result in, and raises RequestFailed or OSError when it cannot.
    """

    async def send(self, shot: Shot, result: Result) -> None:
        """Sends one request and waits for its answer."""
        ...

    @property
    def make_tokens(self) -> MakeTokens:
        """What prompts are made of."""
        ...
