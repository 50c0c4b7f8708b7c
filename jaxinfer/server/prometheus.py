"""The engine's numbers for Prometheus, under vLLM's names with ``jaxinfer:`` in front."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.metrics import Histogram

PREFIX = "jaxinfer:"
# Written from the start, so that a rate sees the first one too.
FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
PREEMPTION_MODES = ("recompute", "swap")


def render(engine: Engine, *, model_name: str = "") -> tuple[bytes, str]:
    """Returns the text of a scrape and its content type.

    Args:
      engine: read from this thread while its own goes on. model_name: the label of every sample.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    """Reads an engine at each scrape: nothing is counted twice, and nothing while nobody scrapes.

    Args:
      engine: what is read. model_name: the label of every sample.
    """

    def __init__(self, engine: Engine, model_name: str):
        self._engine = engine
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """Yields every metric as it stands."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield self._gauge("num_requests_running", "Rows (choices of requests) that run", stats.num_running)
        yield self._gauge(
            "num_requests_waiting", "Rows that wait for a place or for pages", stats.num_waiting
        )
        usage = stats.pages_used / stats.num_pages if stats.num_pages else 0.0
        yield self._gauge("kv_cache_usage_perc", "Pages in use, 1 is all of them", usage)
        # Not a gauge, though it is read with them: compilations only ever become more.
        text = "Executables compiled after warm-up, each a stall that should not be"
        yield self._counter("compilations_after_warmup", text, stats.compilations)

    def _counters(self) -> Iterator[Metric]:
        metrics = self._engine.metrics
        # Hits before queries: a scrape in between two counts must not show more hits than queries.
        hits, queries = metrics.prefix_hits, metrics.prefix_queries
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", hits)
        yield self._counter("prompt_tokens", "Prompt tokens of accepted requests", metrics.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated and kept", metrics.output_tokens)
        text = "Rows that lost their pages for a while, by how they come back"
        yield self._counted("num_preemptions", text, "mode", PREEMPTION_MODES, metrics.preemptions)
        text = "Choices of requests that ended, by why"
        yield self._counted("request_success", text, "finished_reason", FINISH_REASONS, metrics.finished)

    def _histograms(self) -> Iterator[Metric]:
        m = self._engine.metrics
        yield self._histogram("time_to_first_token_seconds", "From arrival to the first token", m.ttft)
        yield self._histogram("inter_token_latency_seconds", "Between neighbouring tokens of a row", m.itl)
        yield self._histogram("e2e_request_latency_seconds", "From arrival to the end", m.e2e)
        yield self._histogram("request_queue_time_seconds", "From arrival to the first step", m.queue_time)
        text = "From the first step to the first token"
        yield self._histogram("request_prefill_time_seconds", text, m.prefill_time)
        text = "From the first token to the last"
        yield self._histogram("request_decode_time_seconds", text, m.decode_time)
        yield self._histogram("iteration_tokens_total", "Tokens that a step computed", m.iteration_tokens)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counted(
        self, name: str, text: str, label: str, known: Iterable[str], counts: dict[str, int]
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        now = dict(counts)  # the engine's thread may add a reason meanwhile
        for value in sorted({*known, *now}):
            family.add_metric([self._model, value], now.get(value, 0))
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        counts, below = list(histogram.counts), 0  # copied at once: buckets and count agree
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(float, histogram.bounds), "+Inf"), counts, strict=True):
            below += count
            buckets.append((str(bound), below))
        family.add_metric([self._model], buckets, histogram.total)
        return family
