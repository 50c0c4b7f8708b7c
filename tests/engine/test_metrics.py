from __future__ import annotations

import pytest

from jaxinfer.engine.metrics import RequestMetrics, summarize
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import make_engine


def test_times_of_a_request_are_those_of_the_clock():
    engine, _ = make_engine([97, 98, 99])
    (output,) = engine.generate(["p"], SamplingParams(max_tokens=3))
    # The clock is read at submission, admission, each commit, and the end.
    metrics = output.metrics
    assert (metrics.arrival, metrics.first_scheduled, metrics.finished) == (1.0, 2.0, 6.0)
    assert (metrics.first_token, metrics.last_token) == (3.0, 5.0)
    assert (metrics.ttft, metrics.itl) == (2.0, [1.0, 1.0])


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
