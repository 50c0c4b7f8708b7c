"""An engine in this process under load, and what its failures are called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from jaxinfer.bench.drive import Drive
from jaxinfer.bench.inprocess import InProcess
from jaxinfer.bench.load import Arrivals, Lengths, Load, Shot
from jaxinfer.bench.results import Result
from jaxinfer.llm import AsyncLLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.engine.fakes import EOS, VOCAB, make_engine

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def run(
    shots: Sequence[Shot], num_clients: int | None = None, fails: bool = False, **limits: int
) -> list[Result]:
    async def main() -> list[Result]:
        engine, runner = make_engine((*b"hello", EOS))
        if fails:
            runner.fails = lambda plan: True
        async with AsyncLLM.from_engine(engine) as llm:
            client = InProcess(llm, GREEDY, time.monotonic)
            return await Drive(client, time.monotonic).run(shots, num_clients)

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_load_runs_to_its_lengths():
    engine, _ = make_engine((*b"hello", EOS))
    with_tokenizer: Any = AsyncLLM.from_engine(engine)
    make_tokens = InProcess(with_tokenizer, GREEDY, time.monotonic).make_tokens
    with_tokenizer.close()
    load = Load(9, Arrivals("closed", 3), Lengths("uniform", (2, 30)), Lengths("uniform", (2, 20)))
    shots = load.draw(make_tokens)
    assert all(EOS not in shot.prompt and max(shot.prompt) < VOCAB for shot in shots)  # pyright: ignore
    results = run(shots, 3)
    assert [result.error for result in results] == [None] * 9
    assert [result.output_tokens for result in results] == [shot.max_tokens for shot in shots]
    assert [result.prompt_tokens for result in results] == [shot.num_prompt for shot in shots]
    for result in results:
        assert result.counted == "ids"
        assert 0 <= result.sent <= result.times[0] <= result.times[-1] <= result.end
        assert len(result.times) == result.output_tokens


def test_texts_are_encoded():
    (result,) = run([Shot(0, 0.0, "abcd", 2)])
    assert (result.prompt_tokens, result.output_tokens) == (4, 2)


@pytest.mark.parametrize(
    ("shot", "fails", "error"),
    [
        (Shot(0, 0.0, [5] * 2000, 3), False, "refused: "),
        (Shot(0, 0.0, [5], 3), True, "finish_reason error"),
    ],
)
def test_failures_have_names(shot: Shot, fails: bool, error: str):
    (result,) = run([shot], fails=fails)
    assert result.error is not None
    assert result.error.startswith(error)
    assert result.detail
