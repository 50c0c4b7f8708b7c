"""`jaxinfer serve` as people start it, with a model behind it: one process for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import bad, good, strict_json
from tests.server.test_gate import until
from tests.server.tiny import CYCLE, Process, serving, write_model

pytestmark = pytest.mark.slow
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, httpx.Client]]:
    with serving(model, tmp_path_factory.mktemp("log") / "log") as both:
        yield both


@pytest.fixture
def http(served: tuple[Process, httpx.Client]) -> httpx.Client:
    return served[1]


def complete(http: httpx.Client, **body: Any) -> Any:
    return good(http.post(PATH, json={"prompt": "x", **body}))


def test_greedy_text_is_the_models(http: httpx.Client):
    body = complete(http, temperature=0, max_tokens=12)
    assert body["choices"][0]["text"] == (CYCLE * 2)[:12]


def test_a_seed_gives_the_same_beside_others(http: httpx.Client):
    def draw(seed: int | None) -> str:
        return complete(http, seed=seed, max_tokens=32)["choices"][0]["text"]

    alone = draw(7)
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(draw, (None, 7, None, 8)))
    assert beside[1] == alone
    assert len({alone, *beside}) == 4
    choices = complete(http, seed=7, max_tokens=32, n=3)["choices"]
    assert choices[0]["text"] == alone
    assert len({choice["text"] for choice in choices}) == 3


def test_trap_1_characters_of_several_tokens_stay_whole(http: httpx.Client):
    # Each byte is a token; a bias that leaves one token at a time cannot script them, but an echo shows them.
    text = "aé漢🙂🙂b"
    body = complete(http, prompt=text, echo=True, max_tokens=0, logprobs=0)
    assert body["choices"][0]["text"] == text
    with http.stream(
        "POST", PATH, json={"prompt": text, "echo": True, "stream": True, "max_tokens": 2}
    ) as reply:
        lines = [line for line in reply.iter_lines() if line]
    chunks = [strict_json(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(text)


def test_trap_10_numbers_are_finite(http: httpx.Client):
    common = {"prompt": "blue horse nine", "echo": True, "max_tokens": 2}
    for more in ({"logprobs": 1, "temperature": 1, "top_k": 1}, {"logprobs": 5, "temperature": 0}):
        complete(http, **common, **more)
    complete(http, **common, logprobs=1, logit_bias={"5": -100})


def test_trap_11_usage_of_a_prompt_in_chunks(http: httpx.Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "y" * 900, "max_tokens": 1, "stream": True, "stream_options": options}
    with http.stream("POST", PATH, json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    usages = [strict_json(line.removeprefix("data: "))["usage"] for line in lines[:-1]]
    assert {usage["prompt_tokens"] for usage in usages} == {900}
    assert max(usage["completion_tokens"] for usage in usages) == 1
    again = complete(http, prompt="y" * 900, max_tokens=1)["usage"]
    assert again["total_tokens"] == 901
    assert again["prompt_tokens_details"]["cached_tokens"] == 896


def test_traps_31_and_32_bad_requests_leave_the_engine_alive(http: httpx.Client):
    for bias in ({"999999": 5}, {"-1": 1}, {"x": 1}):
        bad(http.post(PATH, json={"prompt": "x", "logit_bias": bias}), 400, "logit_bias")
    for prompt in ("", [""], ["a", ""], []):
        bad(http.post(PATH, json={"prompt": prompt}), 400, "prompt")
    forced = complete(http, logit_bias={"5": 100}, temperature=0, max_tokens=1)
    assert forced["choices"][0]["text"] != CYCLE[0]


def test_trap_17_streams_that_end_early_free_their_rows(http: httpx.Client):
    for _ in range(8):
        with http.stream("POST", PATH, json={"prompt": "x", "max_tokens": 3000, "stream": True}) as reply:
            lines = reply.iter_lines()
            for _ in range(3):
                next(lines)
    until(lambda: good(http.get("/live"))["running"] == 0)
    assert good(http.get("/live"))["pages"]["counts"][1] == 0
    assert complete(http, temperature=0, max_tokens=3)["choices"][0]["text"] == CYCLE[:3]


def test_openais_client_chats_and_embeds(served: tuple[Process, httpx.Client], model: Path):
    with openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=str(model),
            messages=[{"role": "user", "content": "x"}],
            temperature=0,
            max_tokens=8,
            stream=True,
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == CYCLE
        answer = client.embeddings.create(model=str(model), input=["abc", "xyz"])
    assert len(answer.data) == 2
    assert sum(x * x for x in answer.data[0].embedding) == pytest.approx(1, abs=1e-3)


def test_metrics_count_what_ran_and_nothing_was_compiled_since(http: httpx.Client):
    complete(http, max_tokens=4)
    text = http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    compiled = [
        value for name, value in lines.items() if name.startswith("jaxinfer:compilations_after_warmup")
    ]
    assert float(compiled[0]) == 0


def test_kill_and_restart_and_sigterm_under_load(model: Path, tmp_path: Path):
    body = {"prompt": "x", "max_tokens": 3000, "stream": True}
    with serving(model, tmp_path / "first") as (first, http), http.stream("POST", PATH, json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        first.child.kill()
        first.child.wait()
    with serving(model, tmp_path / "second", "--drain", "1") as (second, http), ThreadPoolExecutor(2) as pool:
        began: list[str] = []

        def stream() -> list[str]:
            with http.stream("POST", PATH, json=body) as reply:
                return [line for line in reply.iter_lines() if line and not began.append(line)]

        running = [pool.submit(stream) for _ in range(2)]
        until(lambda: len(began) > 10)
        second.child.send_signal(signal.SIGTERM)
        for one in running:
            *_, last, done = one.result()
            assert done == "data: [DONE]"
            assert "error" in last or "finish_reason" in last
        assert second.child.wait(timeout=120) == 0
