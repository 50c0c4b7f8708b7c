from __future__ import annotations

import pytest

from jaxinfer.engine.metrics import Histogram, RequestMetrics, summarize
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import make_engine


def test_times_of_a_request_are_those_of_the_clock():
    engine, _ = make_engine([97, 98, 99])
    (output,) = engine.generate(["p"], SamplingParams(max_tokens=3))
    # The clock is read at submission (1), at each plan (2, 3, 5, 7) and commit (4, 6, 8), and at the end (9).
    metrics = output.metrics
    assert (metrics.arrival, metrics.first_scheduled, metrics.finished) == (1.0, 2.0, 9.0)
    assert (metrics.first_token, metrics.last_token) == (4.0, 8.0)
    assert (metrics.ttft, metrics.itl) == (3.0, [2.0, 2.0])
    totals = engine.metrics
    found = (totals.ttft, totals.itl, totals.e2e, totals.queue_time, totals.prefill_time, totals.decode_time)
    assert [(one.count, one.total) for one in found] == [(1, 3), (2, 4), (1, 8), (1, 1), (1, 2), (1, 4)]
    assert (totals.iteration_tokens.count, totals.iteration_tokens.total) == (3, 3)


def test_a_histogram_counts_up_to_and_with_its_bounds():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 99.0):
        histogram.add(value)
    assert (histogram.counts, histogram.count, histogram.total) == ([2, 2, 2], 6, 106.5)


def test_nothing_is_known_of_what_has_not_begun():
    metrics = RequestMetrics(arrival=1.0)
    assert (metrics.ttft, metrics.itl) == (None, [])


def test_a_summary_counts_requests_tokens_and_rates():
    listed = [
        RequestMetrics(0.0, first_token=1.0, token_times=((1.0, 1.5, 2.0),)),
        RequestMetrics(0.0, first_token=3.0, token_times=((3.0, 4.0), (3.0,))),
        RequestMetrics(0.0),
    ]
    summary = summarize(listed, prompt_tokens=30, seconds=4.0)
    assert (summary.num_requests, summary.prompt_tokens, summary.output_tokens) == (3, 30, 6)
    assert summary.ttft == (2.0, 3.0, 3.0)
    assert summary.itl == pytest.approx((2 / 3, 0.5, 1.0))
    assert (summary.user_tps, summary.system_tps) == (1.5, 1.5)
    assert "TTFT mean 2000.0 ms" in str(summary)
    assert "1.5 in all, 1.5 a stream" in str(summary)


def test_a_summary_of_nothing_says_so():
    summary = summarize([], prompt_tokens=0, seconds=0.0)
    assert (summary.ttft, summary.itl, summary.system_tps) == ((), (), 0.0)
    assert str(summary).startswith("0 requests")
