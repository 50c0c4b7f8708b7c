"""The arithmetic, by values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.bench.report import Slo, Stats, compare_reports, notes_on, percentile, report_run
from jaxinfer.bench.results import Result
from jaxinfer.bench.table import format_reports

# Three answers and a failure. TTFTs 1, 3 and 2 s; gaps 1, 1 and 2 s; the third has one token.
RESULTS = [
    Result(0, sent=0.0, end=3.0, times=[1.0, 2.0, 3.0], prompt_tokens=10, output_tokens=3, cached_tokens=4),
    Result(1, sent=1.0, end=6.0, times=[4.0, 6.0], prompt_tokens=20, output_tokens=2),
    Result(2, sent=5.0, end=8.0, times=[7.0], prompt_tokens=10, output_tokens=1, late=0.1),
    Result(3, sent=6.0, end=6.5, error="HTTP 503", detail="full"),
]


def numbers_of(stats: Stats | None) -> list[float]:
    assert stats is not None
    return [stats.mean, stats.p50, stats.p90, stats.p99]


def test_report_is_what_the_times_say():
    report = report_run(RESULTS, Slo(ttft=2.0, itl=1.5))
    assert (report.num_requests, report.num_ok, report.errors) == (4, 3, {"HTTP 503": 1})
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (40, 6, 4)
    assert report.seconds == 8.0
    assert numbers_of(report.ttft) == pytest.approx([2.0, 2.0, 2.8, 2.98])
    assert numbers_of(report.itl) == pytest.approx([4 / 3, 1.0, 1.8, 1.98])
    assert numbers_of(report.e2e) == pytest.approx([11 / 3, 3.0, 4.6, 4.96])
    assert report.rates() == {
        "system_tps": 6 / 8,
        "total_tps": 46 / 8,
        "user_tps": pytest.approx(3 / 4),
        "request_rate": 3 / 8,
        "goodput": 2 / 8,  # the second waits 3 s; the third has no ITL to miss
        "hit_rate": 4 / 40,
    }
    assert report.late == pytest.approx(0.097)


def test_mean_itl_is_a_token_even_where_tokens_come_together():
    """Five tokens in three pieces: four gaps of a token each in 2 s, though pieces are 1 s apart."""
    report = report_run([Result(0, end=3.0, times=[1.0, 2.0, 3.0], output_tokens=5)], None)
    assert report.itl is not None
    assert (report.itl.mean, report.itl.p50) == (0.5, 1.0)
    assert report.rates()["user_tps"] == 2.0
    assert report.num_good is None


def test_run_without_answers_has_no_latencies():
    report = report_run(RESULTS[3:], Slo(ttft=1.0))
    assert (report.ttft, report.itl, report.e2e, report.num_good, report.num_ok) == (None, None, None, 0, 0)
    assert "ttft.p50" not in report.numbers()
    assert "0 of 1" in format_reports({"a": [report]})


def test_percentile_is_numpys():
    values = sorted(np.random.default_rng(0).random(37).tolist())
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_slo_is_read_by_unit():
    assert Slo.parse("ttft=500ms,itl=60ms, e2e=1.5s") == Slo(0.5, 0.06, 1.5)
    assert Slo.parse("itl=100us").itl == pytest.approx(1e-4)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=500", "tpot=5ms", "ttft=5ms,ttft=6ms", "ttft=-1ms", "ttft=1m"]
)
def test_wrong_slo_says_what_works(text: str):
    with pytest.raises(ValueError, match=r"slo: got .*ttft=500ms,itl=60ms"):
        Slo.parse(text)


def scaled(factor: float) -> list[Result]:
    return [
        Result(
            r.index, factor * r.sent, 0.0, factor * r.end, [factor * t for t in r.times], 10, r.output_tokens
        )
        for r in RESULTS[:3]
    ]


def test_ratios_are_of_pairs_of_repetitions():
    slow = [report_run(scaled(factor), None) for factor in (2.0, 4.0, 3.0)]
    fast = [report_run(scaled(factor), None) for factor in (1.0, 1.0, 1.0)]
    ratios = compare_reports(slow, fast)
    assert ratios["ttft.p50"] == pytest.approx((3.0, 2.0, 4.0))
    assert ratios["system_tps"] == pytest.approx((1 / 3, 1 / 4, 1 / 2))
    assert "hit_rate" not in ratios  # 0 / 0
    table = format_reports({"slow": slow, "fast": fast})
    line = next(line for line in table.splitlines() if line.startswith("TTFT p50"))
    assert line.split()[-4:] == ["6,000", "2,000", "3.00", "(2.00-4.00)"]


def test_notes_tell_what_the_numbers_hide():
    results = [
        Result(0, end=1.0, times=[0.5, 1.0], prompt_tokens=100, output_tokens=2, cached_tokens=50),
        Result(1, end=1.0, times=[0.5], prompt_tokens=100, output_tokens=3, counted="chunks", late=1.0),
        Result(2, error="timeout", detail="no whole answer"),
    ]
    notes = "\n".join(notes_on(results, {0: 2, 1: 5, 2: 5}, shares_prefixes=False))
    assert "1 of 2 answers ended before their length" in notes
    assert "1 of 2 answers came without usage" in notes
    assert "1 of 2 answers had fewer pieces than tokens" in notes
    assert "25% of prompt tokens were cached" in notes
    assert "too busy for the load" in notes
    assert "1 failed by timeout, such as: no whole answer" in notes
    assert notes_on(results[:1], {0: 2}, shares_prefixes=True) == []
