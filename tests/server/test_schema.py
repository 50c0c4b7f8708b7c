"""schemathesis against the served description: whatever it sends, nothing of the server's breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from tests.engine.fakes import EOS, make_engine
from tests.engine.test_embed import PoolingRunner
from tests.server.conftest import ChatTokenizer, Served, running
from tests.server.test_gate import is_idle, until

POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{model}", "/health", "/ready", "/debug/prefix", "/metrics")


# Of a body's fields by number: with all of them at once some value is always refused, with a few many are served.
FEW = st.none() | st.sets(st.integers(0, 50), max_size=3)
NEEDED = ("prompt", "messages", "input", "tokens")


def thin(body: dict[str, Any], kept: set[int]) -> dict[str, Any]:
    """Returns a body with what it needs and a few of its other fields."""
    return {k: v for i, (k, v) in enumerate(sorted(body.items())) if k in NEEDED or i in kept}


class AnyText(ChatTokenizer):
    """Has a token for every byte."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())


@pytest.fixture
def served() -> Iterator[Served]:
    engine, _ = make_engine([65], AnyText(), max_num_seqs=4)
    engine.runner = PoolingRunner(lambda *_: [*b"hello", EOS])
    with running(engine) as one:
        yield one


def attack(served: Served, examples: int) -> Counter[int]:
    """Sends cases to every operation, and returns the statuses of the answers.

    Args:
      served: the server. examples: cases for each of the bodies' two modes, valid and not.
    """
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    statuses: Counter[int] = Counter()
    few = max(1, examples // 10)
    plan = [(path, "POST", examples) for path in POSTS] + [(path, "GET", few) for path in GETS]
    for path, method, count in plan:
        for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
            if method == "GET" and mode is GenerationMode.NEGATIVE:
                continue  # nothing of a GET could be wrong but what names the model

            @settings(
                max_examples=count,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=[
                    HealthCheck.too_slow,
                    HealthCheck.filter_too_much,
                    HealthCheck.data_too_large,
                ],
            )
            @given(case=schema[path][method].as_strategy(mode), kept=FEW)
            def send(case: Case, kept: set[int] | None) -> None:
                if kept is not None and isinstance(case.body, dict):
                    case.body = thin(case.body, kept)
                status = case.call(timeout=60).status_code
                statuses[status] += 1
                assert status < 500, case.as_curl_command()

            send()
    return statuses


def check_after(served: Served) -> None:
    until(lambda: is_idle(served))
    assert served.engine.failure is None
    assert served.complete()["choices"][0]["text"] == "hello"


def test_a_hundred_cases_break_nothing(served: Served):
    statuses = attack(served, 10)
    assert statuses.total() >= 100
    assert statuses[200] > 0
    check_after(served)


@pytest.mark.slow
def test_two_thousand_cases_break_nothing(served: Served):
    statuses = attack(served, 200)
    assert statuses.total() >= 2000
    print(dict(statuses))
    check_after(served)
