from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.engine.engine import Engine
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.prometheus import render
from tests.engine.fakes import EOS, make_engine
from tests.server.test_live import caching

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana.json"
HELLO = (*b"hello", EOS)
PROMPT = list(b"a prompt of more than two pages of sixteen tokens, so that some are found")
COUNTERS = {
    "compilations_after_warmup",
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens",
    "request_success",
}
GAUGES = {"kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"}
HISTOGRAMS = {
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_prefill_time_seconds",
    "request_queue_time_seconds",
    "time_to_first_token_seconds",
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(engine: Engine) -> tuple[dict[str, str], Samples]:
    """Returns the types of the metrics and the samples, as Prometheus' own parser reads them."""
    text, kind = render(engine, model_name="fake")
    assert kind.startswith("text/plain")
    families = list(text_string_to_metric_families(text.decode()))
    samples: Samples = {}
    for family in families:
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake"
            key = sample.name.removeprefix("jaxinfer:"), tuple(sorted(labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return {family.name.removeprefix("jaxinfer:"): family.type for family in families}, samples


def plain(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(labels.items())]


def serve_some(engine: Engine, count: int = 2) -> None:
    for _ in range(count):  # one after another: the second finds what the first left
        engine.generate([PROMPT], SamplingParams(max_tokens=9))


def test_names_are_vllms_and_types_are_right():
    kinds, _ = scrape(make_engine(HELLO)[0])
    assert {name for name, kind in kinds.items() if kind == "counter"} == COUNTERS
    assert {name for name, kind in kinds.items() if kind == "gauge"} == GAUGES
    assert {name for name, kind in kinds.items() if kind == "histogram"} == HISTOGRAMS


def test_an_engine_that_did_nothing_counts_zero():
    _, samples = scrape(make_engine(HELLO)[0])
    assert set(samples.values()) == {0.0}
    assert {
        dict(labels)["finished_reason"] for name, labels in samples if name == "request_success_total"
    } == {
        "abort",
        "error",
        "length",
        "stop",
        "timeout",
    }


def test_numbers_are_the_engines():
    engine = caching(HELLO)
    serve_some(engine)
    _, samples = scrape(engine)
    assert plain(samples, "prompt_tokens_total") == 2 * len(PROMPT)
    assert plain(samples, "generation_tokens_total") == engine.metrics.output_tokens > 0
    assert plain(samples, "request_success_total", finished_reason="stop") == 2
    assert plain(samples, "request_success_total", finished_reason="length") == 0
    assert plain(samples, "prefix_cache_queries_total") == engine.metrics.prefix_queries > 0
    assert plain(samples, "prefix_cache_hits_total") == engine.metrics.prefix_hits == len(PROMPT) // 16 * 16
    times = engine.metrics
    assert plain(samples, "time_to_first_token_seconds_count") == 2
    assert plain(samples, "time_to_first_token_seconds_sum") == times.ttft.total > 0
    assert plain(samples, "inter_token_latency_seconds_count") == times.itl.count > 0
    assert plain(samples, "iteration_tokens_total_count") == engine.metrics.num_steps


def test_buckets_are_cumulative_and_end_in_the_count():
    engine, _ = make_engine(HELLO)
    serve_some(engine)
    _, samples = scrape(engine)
    for name in HISTOGRAMS:
        found = [
            (dict(labels)["le"], value) for (n, labels), value in samples.items() if n == f"{name}_bucket"
        ]
        buckets = sorted((float(le), value) for le, value in found)
        values = [value for _, value in buckets]
        assert buckets[-1][0] == math.inf
        assert values == sorted(values)
        assert values[-1] == plain(samples, f"{name}_count") > 0


def test_a_value_on_a_bound_counts_below_it():
    engine, _ = make_engine(HELLO)
    histogram = engine.metrics.ttft
    histogram.add(histogram.bounds[3])
    histogram.add(2 * histogram.bounds[-1])
    _, samples = scrape(engine)
    at = [plain(samples, "time_to_first_token_seconds_bucket", le=str(float(b))) for b in histogram.bounds]
    assert at == [0.0] * 3 + [1.0] * (len(at) - 3)
    assert plain(samples, "time_to_first_token_seconds_bucket", le="+Inf") == 2


def test_gauges_follow_what_runs():
    engine, _ = make_engine(b"a", num_pages=64, max_num_seqs=2)
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    handles = [engine.submit(PROMPT, endless) for _ in range(3)]
    engine.step()
    engine.step()
    _, samples = scrape(engine)
    assert plain(samples, "num_requests_running") == 2
    assert plain(samples, "num_requests_waiting") == 1
    assert plain(samples, "kv_cache_usage_perc") == engine.stats().pages_used / 64 > 0
    for handle in handles:
        engine.abort(handle.request_id)
    engine.run_until_done()
    _, samples = scrape(engine)
    assert plain(samples, "num_requests_running") == plain(samples, "kv_cache_usage_perc") == 0
    assert plain(samples, "request_success_total", finished_reason="abort") == 3


def test_counters_never_fall():
    engine, _ = make_engine(b"ab", num_pages=12, max_num_seqs=4)  # few pages: rows are preempted
    for _ in range(4):
        engine.submit(PROMPT[:40], SamplingParams(max_tokens=30, ignore_eos=True))
    _, before = scrape(engine)
    while engine.has_work:
        engine.step()
        _, after = scrape(engine)
        assert before.keys() <= after.keys()
        for key, value in before.items():
            if not any(key[0] == name for name in GAUGES):
                assert after[key] >= value, key
        before = after
    assert sum(value for (name, _), value in before.items() if name == "num_preemptions_total") > 0


def test_a_model_name_is_escaped():
    text, _ = render(make_engine(HELLO)[0], model_name='a"b\\c\nd')
    family = next(iter(text_string_to_metric_families(text.decode())))
    assert family.samples[0].labels["model_name"] == 'a"b\\c\nd'


def board() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions() -> list[str]:
    found = [target["expr"] for panel in board()["panels"] for target in panel["targets"]]
    return found + [
        variable["definition"] for variable in board()["templating"]["list"] if "definition" in variable
    ]


def test_dashboard_asks_only_for_what_is_exported_and_for_all_of_it():
    _, samples = scrape(make_engine(HELLO)[0])
    exported = {name for name, _ in samples}
    asked = {name for text in expressions() for name in re.findall(r"jaxinfer:(\w+)", text)}
    assert asked <= exported
    parts = "_bucket", "_count", "_sum"
    histograms = {f"{name}{part}" for name in HISTOGRAMS for part in parts}
    assert exported - asked <= histograms
    assert {f"{name}_bucket" for name in HISTOGRAMS} <= asked


def test_dashboard_asks_by_labels_that_are_there():
    _, samples = scrape(make_engine(HELLO)[0])
    known = {label for _, labels in samples for label, _ in labels} | {"model_name"}
    for text in expressions():
        grouped = [
            label for group in re.findall(r"by \(([^)]*)\)", text) for label in re.split(r",\s*", group)
        ]
        assert set(grouped) | set(re.findall(r"[{,]\s*(\w+)\s*=~?", text)) <= known


def test_dashboard_is_one_that_grafana_takes():
    dashboard = board()
    assert dashboard["title"]
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 39
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries", "heatmap")
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        at = panel["gridPos"]
        assert 0 <= at["x"] <= 24 - at["w"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {name for text in expressions() for name in re.findall(r"\$(\w+)", text)}
    assert used - names == {"__rate_interval"}


@pytest.mark.parametrize("text", expressions(), ids=range(len(expressions())))
def test_dashboard_expressions_are_balanced(text: str):
    for left, right in ("()", "{}", "[]"):
        assert text.count(left) == text.count(right)
