"""Times and counts of requests, and their summary in words."""

from __future__ import annotations

from bisect import bisect_left
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


class Histogram:
    """Counts of values by size, and their sum; one thread writes, any may read.

    Args:
      bounds: ascending upper bounds, each included; what is above the last is counted too.

    Attributes:
      counts: one more than bounds. total: sum of the values.
    """

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


# vLLM's, with finer steps where a fast model is.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(slots=True)
class Distributions:
    """How long things took, in seconds, over the life of an engine.

    Attributes:
      ttft: arrival to first token, of a choice. itl: between tokens of a choice, 0 for those that came together.
      e2e: arrival to the end. queue_time: arrival to the first plan. prefill_time: from there to the first token.
      decode_time: first token to last. iteration_tokens: tokens that a step computed.
    """

    ttft: Histogram = field(default_factory=lambda: Histogram(_TTFT))
    itl: Histogram = field(default_factory=lambda: Histogram(_ITL))
    e2e: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    decode_time: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))

    def add_tokens(self, times: Sequence[float], count: int, arrival: float) -> None:
        """Counts the last ``count`` of a choice's tokens, which reached the host at ``times``."""
        if count == 1 and len(times) > 1:  # most often, and fast
            self.itl.add(times[-1] - times[-2])
            return
        for index in range(len(times) - count, len(times)):
            if index:
                self.itl.add(times[index] - times[index - 1])
            else:
                self.ttft.add(times[0] - arrival)

    def add_end(self, times: Sequence[float], arrival: float, began: float | None, ended: float) -> None:
        """Counts a choice that ended: its tokens' times, and when it came, first ran, and ended."""
        self.e2e.add(ended - arrival)
        if began is not None:
            self.queue_time.add(began - arrival)
            if times:
                self.prefill_time.add(times[0] - began)
                self.decode_time.add(times[-1] - times[0])


@dataclass(slots=True)
class EngineMetrics(Distributions):
    """Running totals of an engine, beside its distributions.

    Attributes:
      num_steps: plans committed. prompt_tokens: of the requests that were accepted, each prompt once.
      output_tokens: generated and kept. finished: choices that ended, by finish reason.
      prefix_queries, prefix_hits: tokens of prompts looked up in the prefix cache, and found.
      preemptions: rows that gave way, by ``recompute`` or ``swap``.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment.

    Attributes:
      num_running, num_waiting: sequences. max_num_seqs, max_num_waiting: most of them (None: any number).
      num_pages, page_size: of the KV cache. pages_used: that rows hold. pages_shared: of these, by more than one row.
      pages_cached: that nobody holds and that are remembered. host_pages, host_pages_used: in the host's memory.
      compilations: after warm-up; there should be none.
    """

    num_running: int
    num_waiting: int
    max_num_seqs: int
    max_num_waiting: int | None
    num_pages: int
    page_size: int
    pages_used: int
    pages_shared: int
    pages_cached: int
    host_pages: int
    host_pages_used: int
    compilations: int

    @property
    def pages_free(self) -> int:
        """Pages that hold nothing."""
        return self.num_pages - self.pages_used - self.pages_cached


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
