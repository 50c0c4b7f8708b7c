"""The arithmetic of a run: latencies, rates, goodput and errors; and of two runs beside each other."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxinfer.bench.results import Result

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Stats:
    """Mean and percentiles of seconds; a percentile between two values is on the line between them."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float], mean: float | None = None) -> Stats | None:
        """Returns those of some values (of none, None); ``mean`` stands for theirs where it is given."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            statistics.fmean(ordered) if mean is None else mean,
            *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the value that a share of sorted values does not exceed, interpolated (numpy's default)."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Slo:
    """What a request must keep to be good: seconds each, None is not asked. ``itl`` is the request's mean."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads ``ttft=500ms,itl=60ms,e2e=10s``."""
        values: dict[str, float] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*(ttft|itl|e2e)\s*=\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*", part)
            if not found or found.group(1) in values:
                raise ValueError(
                    f"slo: got {part!r}, must be some of ttft, itl and e2e, once each, such as ttft=500ms,itl=60ms"
                )
            values[found.group(1)] = float(found.group(2)) * _UNITS[found.group(3)]
        return cls(**values)

    def meets(self, result: Result) -> bool:
        """Tells whether a request that succeeded was good; one token has no ITL to miss."""
        pairs = ((self.ttft, result.ttft), (self.itl, result.itl), (self.e2e, result.e2e))
        return all(most is None or got is None or got <= most for most, got in pairs)


@dataclass(frozen=True)
class Report:
    """One run in numbers.

    Attributes:
      seconds: from the first request sent to the last answer's end.
      num_requests: sent. errors: how many failed, by kind; tokens and times are those of the others.
      prompt_tokens, output_tokens, cached_tokens: counts; the cached are part of the prompts'.
      ttft, e2e: a value a request. itl: a value for each piece after a request's first, and the mean a token.
      num_good: requests within the SLO, None where none was stated.
      late: seconds that requests left after they were due, at the 99th percentile.
      client_cores: processor time of the load generator by seconds, None where the engine is in its process.
    """

    seconds: float
    num_requests: int
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft: Stats | None
    itl: Stats | None
    e2e: Stats | None
    num_good: int | None
    late: float = 0.0
    client_cores: float | None = None

    @property
    def num_ok(self) -> int:
        """Requests that did not fail."""
        return self.num_requests - sum(self.errors.values())

    def rates(self) -> dict[str, float | None]:
        """Returns what is a second: requests, tokens of the system and of one user, and good requests."""
        per = 1 / self.seconds if self.seconds else 0.0
        return {
            "system_tps": self.output_tokens * per,
            "total_tps": (self.prompt_tokens + self.output_tokens) * per,
            "user_tps": 1 / self.itl.mean if self.itl and self.itl.mean else None,
            "request_rate": self.num_ok * per,
            "goodput": None if self.num_good is None else self.num_good * per,
            "hit_rate": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns all of it for JSON; seconds."""
        return asdict(self) | {"num_ok": self.num_ok} | self.rates()

    def numbers(self) -> dict[str, float]:
        """Returns what there is by dotted names, such as ``system_tps`` and ``ttft.p99``."""
        values = {name: value for name, value in self.rates().items() if value is not None}
        for name in ("ttft", "itl", "e2e"):
            stats = getattr(self, name)
            values |= {f"{name}.{key}": value for key, value in asdict(stats).items()} if stats else {}
        return values


def report_run(results: Sequence[Result], slo: Slo | None, client_cores: float | None = None) -> Report:
    """Sums up one run.

    Args:
      results: all requests'. slo: None states none. client_cores: see `Report`.
    """
    good = [result for result in results if result.error is None]
    start = min((result.sent for result in results), default=0.0)
    end = max((result.end for result in results), default=0.0)
    streams = [result for result in good if result.itl is not None]
    num_gaps = sum(result.output_tokens - 1 for result in streams)
    mean_itl = sum(result.times[-1] - result.times[0] for result in streams) / num_gaps if num_gaps else None
    late = sorted(result.late for result in results)
    return Report(
        seconds=end - start,
        num_requests=len(results),
        errors=dict(Counter(result.error for result in results if result.error is not None)),
        prompt_tokens=sum(result.prompt_tokens for result in good),
        output_tokens=sum(result.output_tokens for result in good),
        cached_tokens=sum(result.cached_tokens for result in good),
        ttft=Stats.of([result.ttft for result in good]),
        itl=Stats.of([gap for result in streams for gap in result.gaps], mean_itl),
        e2e=Stats.of([result.e2e for result in good]),
        num_good=None if slo is None else sum(slo.meets(result) for result in good),
        late=percentile(late, 0.99) if late else 0.0,
        client_cores=client_cores,
    )


def median_numbers(reports: Sequence[Report]) -> dict[str, float]:
    """Returns the median over repetitions of every number that all of them have."""
    each = [report.numbers() for report in reports]
    names = [name for name in each[0] if all(name in numbers for numbers in each)] if each else []
    return {name: statistics.median(numbers[name] for numbers in each) for name in names}


def compare_reports(
    ours: Sequence[Report], theirs: Sequence[Report]
) -> dict[str, tuple[float, float, float]]:
    """Returns ours / theirs by number: the median over pairs of repetitions, the least and the most."""
    pairs = [(a.numbers(), b.numbers()) for a, b in zip(ours, theirs, strict=True)]
    ratios: dict[str, tuple[float, float, float]] = {}
    for name in pairs[0][0] if pairs else ():
        if all(a.get(name) is not None and b.get(name) for a, b in pairs):
            values = [a[name] / b[name] for a, b in pairs]
            ratios[name] = statistics.median(values), min(values), max(values)
    return ratios


def notes_on(results: Sequence[Result], asked: Mapping[int, int], shares_prefixes: bool) -> list[str]:
    """Returns what a reader of a run should know, a line each.

    Args:
      results: its requests'. asked: ``max_tokens`` by index. shares_prefixes: whether prompts were made to.
    """
    good = [result for result in results if result.error is None]
    notes = []
    if short := sum(result.output_tokens < asked[result.index] for result in good):
        notes.append(f"{short} of {len(good)} answers ended before their length")
    if chunked := sum(result.counted == "chunks" for result in good):
        notes.append(f"{chunked} of {len(good)} answers came without usage: a chunk is counted as a token")
    if merged := sum(len(result.times) < result.output_tokens for result in good):
        notes.append(
            f"{merged} of {len(good)} answers had fewer pieces than tokens: percentiles of ITL are of pieces"
        )
    cached, prompt = (sum(getattr(r, f"{kind}_tokens") for r in good) for kind in ("cached", "prompt"))
    if cached and not shares_prefixes and cached > 0.01 * prompt:
        notes.append(
            f"{cached / prompt:.0%} of prompt tokens were cached though nothing was made to be shared: the server "
            "may know these prompts from an earlier run; bench.seed draws others"
        )
    late = sorted(result.late for result in results)
    if late and percentile(late, 0.99) > 0.02:
        notes.append(
            f"1 % of requests left {1e3 * percentile(late, 0.99):.0f} ms or more after they were due: "
            "this machine is too busy for the load"
        )
    for kind, count in Counter(result.error for result in results if result.error).items():
        detail = next((result.detail for result in results if result.error == kind and result.detail), None)
        notes.append(f"{count} failed by {kind}" + (f", such as: {detail}" if detail else ""))
    return notes
