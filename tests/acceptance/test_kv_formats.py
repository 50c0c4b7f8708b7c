"""KV pages of few bits through whole engines: the same tokens however they travel, more rows, and what they cost."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.conftest import open_toy
from tests.acceptance.engines import TOY_VOCAB, renew
from tests.acceptance.mixed import logprobs_of, tokens_of

DATA = Path(__file__).parent.parent / "data"
FORMATS = ["int8", "fp8_e4m3", "int4", "nvfp4"]  # of each size and kind of scales
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24, logprobs=2)
# A number that lies on the edge of two codes may take either, a step of its scale apart: far below a logit of TOY's.
BOUND = 0.02


@pytest.fixture(scope="module", params=FORMATS)
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """TOY in float32 over coded pages."""
    return open_toy(
        tmp_path_factory.mktemp("toy"), policy=f"kv={request.param},compute=float32", draws=["sample"]
    )


def make_prompts() -> list[list[int]]:
    """Sixteen prompts, four of each stem."""
    rng = np.random.default_rng(4)
    stems = rng.integers(3, TOY_VOCAB, (4, 40))
    return [
        [*map(int, stems[i % 4][: 20 + i]), *map(int, rng.integers(3, TOY_VOCAB, 1 + i))] for i in range(16)
    ]


def assert_near(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """Tokens are equal in all requests but one, and log-probabilities within `BOUND` where they are."""
    unlike = 0
    for one, two in zip(ours, theirs, strict=True):
        if tokens_of(one) != tokens_of(two):
            unlike += 1
            continue
        for mine, other in zip(logprobs_of(one), logprobs_of(two), strict=True):
            np.testing.assert_allclose(mine, other, atol=BOUND)
    assert unlike <= 1


def test_coded_pages_may_be_shared_swapped_and_cut(coded: LLM):
    """Batch = solo, chunked = whole, prefix hit = cold, swap = recompute = the host's tier."""
    prompts = make_prompts()
    alone = [renew(coded, prefix_caching=False).generate([prompt], PARAMS)[0] for prompt in prompts]
    variants: list[dict[str, Any]] = [
        {"prefix_caching": False},
        {},
        {"max_num_batched_tokens": 16},
        {"num_pages": 12, "preemption_mode": "recompute"},
        {"num_pages": 12, "preemption_mode": "swap", "host_pages": 30, "prefix_caching": False},
        {"num_pages": 12, "host_pages": 30},
    ]
    for limits in variants:
        llm = renew(coded, **limits)
        assert_near(llm.generate(prompts, PARAMS), alone)
        assert llm.engine.scheduler.pool.num_used == 0
        if limits.get("preemption_mode") == "swap":
            assert llm.engine.metrics.preemptions["swap"] > 0


def test_the_same_bytes_run_twice_the_rows(tmp_path_factory: pytest.TempPathFactory):
    """Nine pages of bfloat16 hold two rows of four pages; as int8, with its scales, they hold four."""
    most = {}
    for kv in ("bfloat16", "int8"):
        said: list[str] = []
        llm = open_toy(
            tmp_path_factory.mktemp("toy"),
            policy=f"kv={kv},compute=float32",
            kv_memory=f"{9 * 2 * 2 * 16 * 2 * 16 * 2} B",  # pages, K and V, layers, tokens, kv heads, numbers, bytes
            max_num_seqs=4,
            max_model_len=64,
            host_cache_bytes=0,
            draws=["greedy"],
            say=said.append,
        )
        assert any(line.startswith(f"KV cache {kv}") for line in said)
        engine = llm.engine
        for i in range(4):
            engine.submit([3 + i] * 50, SamplingParams(temperature=0, ignore_eos=True, max_tokens=14))
        running = []
        while engine.has_work:
            engine.step()
            running.append(len(engine.scheduler.running))
        most[kv] = max(running), engine.scheduler.pool.num_pages
    assert most["bfloat16"] == (2, 9)
    assert most["int8"][0] == 4


# Percent of perplexity that a format may cost. SmolLM2's keys, 64 numbers a head without a norm, are rounded badly in 4
# bits: the scales of int4 are fitted to their queries, those of fp4 are not.
COSTS = {
    "smollm2": {"int8": 0.5, "fp8_e4m3": 0.5, "int4": 6.5, "nvfp4": 15},
    "gemma3": {"int8": 0.5, "fp8_e4m3": 0.5, "int4": 6},
}
# int4 costs 3.7 and 4.6 % of SmolLM2's, 4.0 and 4.4 of Gemma 3's, by the order of sums of jax 0.12 and 0.10: on another
# processor it may miss its aim, which is marked then.
AIMS = {"int4": 5}


@cache
def perplexity(name: str, path: Path, kv: str) -> float:
    """Of 2,000 tokens of text, in float32: in bfloat16 the order of sums alone moves it by 0.4 %."""
    ids = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))["score"]["ids"]
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 2048, "kv_memory": "130 pages"}
    settings |= {"max_num_batched_tokens": 512, "prefill_buckets": [[1, 512]], "stack_size": 99}
    llm = LLM(str(path), policy=f"float32,kv={kv}", draws=["greedy", "score"], **settings)
    return llm.score(ids).perplexity


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv"), [(name, kv) for name, costs in COSTS.items() for kv in costs])
def test_perplexity_stays_near_that_of_bfloat16(name: str, kv: str, request: pytest.FixtureRequest):
    path = request.getfixturevalue(f"{name}_gguf")
    plain, coded = perplexity(name, path, "bfloat16"), perplexity(name, path, kv)
    cost = 100 * (coded / plain - 1)
    print(f"{name} kv={kv}: perplexity {coded:.4f}, {cost:+.2f} % of bfloat16's {plain:.4f}")
    assert cost <= COSTS[name][kv]
    if cost > AIMS.get(kv, cost):
        pytest.xfail(f"{name} kv={kv}: costs {cost:.1f} % of perplexity, the aim is {AIMS[kv]}")
