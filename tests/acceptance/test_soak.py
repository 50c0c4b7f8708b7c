"""Thousands of requests of random shapes, many of them left or aborted, over too small a pool."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from pathlib import Path

import pytest

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.steps.compiled import count_compilations
from tests.acceptance.engines import TOY_VOCAB, renew

NUM_SHAPES, NUM_CLIENTS = 150, 32
# Eight rows of 128 positions want 64 pages at their peak; a quarter is there, and two requests of full length fit.
NUM_PAGES, HOST_PAGES = 16, 24


def draw_shapes(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    stems = [rng.choices(range(3, TOY_VOCAB), k=48) for _ in range(3)]
    shapes = []
    for _ in range(NUM_SHAPES):
        prompt = [
            *rng.choice(stems)[: rng.choice([0, 16, 40, 48])],
            *rng.choices(range(3, TOY_VOCAB), k=rng.randint(1, 30)),
        ]
        given = {
            "seed": rng.getrandbits(40),
            "temperature": rng.choice([0.0, 0.8, 1.0]),
            "top_p": rng.choice([1.0, 0.9]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
            "max_tokens": rng.choice([1, 4, 12, 40]),
            "logprobs": rng.choice([None, None, 2]),
        }
        shapes.append((prompt, SamplingParams(**given)))
    return shapes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if sys.platform == "linux" else 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "count"), [("recompute", 5000), ("swap", 2000)])
def test_every_output_equals_solo_and_nothing_leaks(toy: LLM, mode: str, count: int):
    rng = random.Random(42)
    shapes = draw_shapes(rng)
    solo = [renew(toy, prefix_caching=False).generate([p], s)[0].outputs[0].token_ids for p, s in shapes]
    host_pages = HOST_PAGES if mode == "swap" else 0
    llm = renew(toy, num_pages=NUM_PAGES, host_pages=host_pages, preemption_mode=mode)
    engine = llm.engine
    order = iter([(i, rng.randrange(NUM_SHAPES), rng.random(), rng.randint(0, 8)) for i in range(count)])
    memory: list[int] = []
    counts = {"whole": 0, "left": 0, "aborted": 0}

    async def client(asynchronous: AsyncEngine) -> None:
        for index, shape, fate, patience in order:
            prompt, params = shapes[shape]
            tokens: list[int] = []
            reason = None
            stream = asynchronous.stream(prompt, params, request_id=f"r{index}")
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    tokens += delta.token_ids
                    reason = delta.finish_reason
                    if fate < 0.1 and len(tokens) >= patience:
                        break  # the reader goes away
                    if 0.1 <= fate < 0.2 and len(tokens) >= patience:
                        engine.abort(f"r{index}")
            kind = "whole" if reason in ("stop", "length") else "aborted" if reason else "left"
            counts[kind] += 1
            assert tokens == (solo[shape] if kind == "whole" else solo[shape][: len(tokens)]), (index, kind)
            if index % 500 == 499:
                memory.append(resident_bytes())

    async def run() -> None:
        with AsyncEngine(engine) as asynchronous:
            await asyncio.gather(*(client(asynchronous) for _ in range(NUM_CLIENTS)))

    with count_compilations() as compiled:
        asyncio.run(run())
    assert compiled == []
    assert sum(counts.values()) == count
    assert min(counts["left"], counts["aborted"]) > count / 40
    assert engine.metrics.preemptions[mode] > 10
    assert engine.metrics.prefix_hits > 0.2 * engine.metrics.prefix_queries
    engine.scheduler.check_invariants()
    assert engine.scheduler.pool.num_used == 0
    assert not engine._handles
    assert not engine._rows
    assert memory[-1] - memory[1] < 32 * 2**20, f"memory grew: {memory}"
