"""Embeddings over a scripted device: pieces, preemption, refusals, failures and the async doors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.pooled import Pooled
from jaxinfer.engine.protocol import StepResult
from jaxinfer.llm import AsyncLLM
from jaxinfer.schedule.plan import Plan, PrefillPiece
from jaxinfer.schedule.request import Pooling
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import ScriptRunner, make_engine

POOLINGS: tuple[Pooling, ...] = ("last", "mean")


class PoolingRunner(ScriptRunner):
    """Hidden states are ``(token, 1)``: the sum of a prompt is its tokens' sum and its length."""

    def __init__(self, script: Callable[[str, int], list[int]]):
        super().__init__(script)
        self.spoils: Callable[[PrefillPiece], bool] = lambda piece: False
        self.starts: list[tuple[str, int]] = []

    def dispatch(self, plan: Plan) -> tuple[Plan, StepResult]:
        plan, result = super().dispatch(plan)
        self.starts += [(piece.request_id, piece.start) for piece in plan.prefill]
        return plan, replace(result, pooled=tuple(map(self._pool, plan.prefill)))

    def _pool(self, piece: PrefillPiece) -> np.ndarray | None:
        if self.slots[piece.slot].pooling is None:
            return None
        if self.spoils(piece):
            return np.full((2, 2), np.nan, np.float32)
        return np.array([[piece.tokens[-1], 1], [sum(piece.tokens), len(piece.tokens)]], np.float32)


def make_pooling_engine(**limits: Any) -> tuple[Engine, PoolingRunner]:
    engine, _ = make_engine([65], **limits)
    runner = PoolingRunner(lambda *_: [65])
    engine.runner = runner
    return engine, runner


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_preempted_in_its_middle_starts_its_sum_anew(pooling: Pooling):
    """A prompt of 10 pages, written 2 tokens a step, while 7 elders grow to 4 pages each in a pool of 28."""
    engine, runner = make_pooling_engine(num_pages=28, max_num_batched_tokens=9)
    elders = [engine.submit("e", SamplingParams(temperature=0, max_tokens=50)) for _ in range(7)]
    engine.step()
    prompt = np.random.default_rng(0).integers(32, 127, 160).tolist()
    handle = engine.submit(prompt, pooling=pooling, request_id="mine")
    engine.run_until_done()
    starts = [start for request_id, start in runner.starts if request_id.startswith("mine/")]
    assert starts.count(0) == 2
    assert starts[starts.index(0, 1) - 1] > 32, "it was to be preempted in its middle"
    assert handle.embedding(normalize=False) == pytest.approx(
        [prompt[-1] if pooling == "last" else np.mean(prompt), 1]
    )
    assert [len(one.output().outputs[0].token_ids) for one in elders] == [50] * 7


def test_the_token_that_an_embedding_makes_is_not_counted():
    engine, _ = make_pooling_engine()
    handle = engine.submit("abc", pooling="last")
    engine.run_until_done()
    assert handle.embedding(normalize=False) == [ord("c"), 1]
    assert (engine.metrics.prompt_tokens, engine.metrics.output_tokens) == (3, 0)
    assert (engine.metrics.ttft.count, engine.metrics.e2e.count) == (0, 1)
    assert engine.metrics.finished == {"length": 1}


def test_hidden_states_that_are_not_finite_end_their_request_only():
    engine, runner = make_pooling_engine()
    runner.spoils = lambda piece: piece.request_id.startswith("bad")
    bad, good = (engine.submit("abc", request_id=name, pooling="mean") for name in ("bad", "good"))
    with pytest.raises(RuntimeError, match="still runs"):
        good.embedding()
    engine.run_until_done()
    assert good.embedding(normalize=False) == [98, 1]
    with pytest.raises(RuntimeError, match="not finite"):
        bad.embedding()
    assert engine.metrics.finished["error"] == 1


def test_what_cannot_be_embedded_is_refused():
    engine, _ = make_pooling_engine()
    with pytest.raises(ValueError, match=r"pooling: got 'max'.*'last' or 'mean'"):
        engine.submit("a", pooling="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="params: got some with pooling"):
        engine.submit("a", SamplingParams(), pooling="last")
    with pytest.raises(ValueError, match="no tokens"):
        engine.submit("", pooling="last")
    handle = engine.submit("a", SamplingParams(max_tokens=1))
    engine.run_until_done()
    with pytest.raises(RuntimeError, match="no embedding"):
        handle.embedding()
    engine, _ = make_pooling_engine(draws=("sample", "score"))
    with pytest.raises(ValueError, match="asks for embed"):
        engine.submit("a", pooling="last")


def test_a_mean_misses_no_piece():
    pooled = Pooled("mean", 6)
    pooled.add(np.ones((2, 3), np.float32), 0, 2)
    with pytest.raises(RuntimeError, match="2 to 3 of the prompt are missing"):
        pooled.add(np.ones((2, 3), np.float32), 4, 2)
    with pytest.raises(RuntimeError, match="2 of 6 tokens"):
        pooled.vector(normalize=True)


def test_a_zero_vector_stays_zero():
    pooled = Pooled("last", 1)
    pooled.add(np.zeros((2, 3), np.float32), 0, 1)
    assert pooled.vector(normalize=True) == [0, 0, 0]


def test_the_async_doors_embed_many_at_once():
    engine, _ = make_pooling_engine()

    async def run() -> list[tuple[list[float], int]]:
        with AsyncEngine(engine) as door:
            prompts = ("a", "abc", "zzzz")
            return await asyncio.gather(
                *(door.embed(prompt, "mean", normalize=False, request_id=prompt) for prompt in prompts)
            )

    assert asyncio.run(run()) == [([97, 1], 1), ([98, 1], 3), ([122, 1], 4)]
    other, _ = make_pooling_engine()

    async def one() -> list[float]:
        async with AsyncLLM.from_engine(other) as llm:
            return await llm.embed("ab", normalize=False)

    assert asyncio.run(one()) == [98, 1]


def test_an_embedding_that_is_cancelled_frees_its_pages():
    engine, runner = make_pooling_engine(num_pages=4096, max_len=65536, max_num_batched_tokens=16)

    async def run() -> None:
        with AsyncEngine(engine) as door:
            reader = asyncio.create_task(door.embed([65] * 60_000, "mean"))
            while not runner.starts:  # until it runs: thousands of steps are before it then
                await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert (await door.embed("b", normalize=False))[0] == [98, 1]

    asyncio.run(run())
    assert engine.metrics.finished == {"abort": 1, "length": 1}
    assert engine.scheduler.pool.num_used == 0


def test_an_embedding_whose_time_is_over_says_so():
    engine, runner = make_pooling_engine(num_pages=4096, max_len=65536, max_num_batched_tokens=16)

    async def run() -> None:
        with AsyncEngine(engine) as door, pytest.raises(TimeoutError, match="timeout"):
            await door.embed([65] * 60_000, timeout=500, cache_salt="mine")

    asyncio.run(run())
    assert engine.metrics.finished == {"timeout": 1}
    assert runner.starts  # it ran, and not to its end
