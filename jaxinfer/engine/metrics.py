"""Times and counts of requests, and their summary in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to one request, in seconds on the engine's clock; None is not yet.

    Attributes:
      arrival: it was submitted. first_scheduled: its prompt began to run.
      first_token, last_token: the first and the latest token reached the host, of any choice.
      finished: its last choice ended.
      token_times: for each choice, when each token reached the host.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    token_times: tuple[tuple[float, ...], ...] = ()

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: seconds between neighbouring tokens, 0 for tokens that came together."""
        return [late - soon for times in self.token_times for soon, late in pairwise(times)]


@dataclass(slots=True)
class EngineMetrics:
    """Running totals of an engine.

    Attributes:
      num_steps: plans committed. prompt_tokens: of the requests that were accepted, each prompt once.
      output_tokens: generated and kept. finished: choices that ended, by finish reason.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Summary:
    """How a set of requests went.

    Attributes:
      num_requests, prompt_tokens, output_tokens: counts. seconds: wall time of the whole.
      ttft, itl: seconds at the mean, the median, and the 90th percentile; empty when nothing was measured.
      user_tps: tokens per second that one stream sees, the inverse of the mean ITL.
      system_tps: output tokens of all per second of wall time.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    user_tps: float
    system_tps: float

    def __str__(self) -> str:
        """Three lines for people."""
        lines = [
            f"{self.num_requests} requests, {self.prompt_tokens} prompt and {self.output_tokens} output tokens "
            f"in {self.seconds:.2f} s",
            f"tokens per second: {self.system_tps:.1f} in all, {self.user_tps:.1f} a stream",
        ]
        named = [
            f"{name} {_milliseconds(three)}"
            for name, three in (("TTFT", self.ttft), ("ITL", self.itl))
            if three
        ]
        return "\n".join([*lines, "; ".join(named)] if named else lines)


def summarize(metrics: Iterable[RequestMetrics], prompt_tokens: int, seconds: float) -> Summary:
    """Sums up requests.

    Args:
      metrics: one a request. prompt_tokens: of all of them. seconds: wall time that they took together.
    """
    listed = list(metrics)
    itl = sorted(gap for one in listed for gap in one.itl)
    ttft = sorted(one.ttft for one in listed if one.ttft is not None)
    output_tokens = sum(len(times) for one in listed for times in one.token_times)
    return Summary(
        num_requests=len(listed),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=seconds,
        ttft=_three(ttft),
        itl=_three(itl),
        user_tps=len(itl) / sum(itl) if sum(itl) else 0.0,
        system_tps=output_tokens / seconds if seconds else 0.0,
    )


def _three(ordered: Sequence[float]) -> tuple[float, ...]:
    """Mean, median and 90th percentile (nearest rank) of sorted numbers."""
    if not ordered:
        return ()
    median, p90 = (ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.9))
    return sum(ordered) / len(ordered), median, p90


def _milliseconds(three: Sequence[float]) -> str:
    mean, median, p90 = (1e3 * value for value in three)
    return f"mean {mean:.1f} ms, p50 {median:.1f}, p90 {p90:.1f}"
