"""Known traps of pages, preemption, abort and chunks: TOY through the whole engine."""

from __future__ import annotations

import pytest

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.engines import renew
from tests.acceptance.mixed import logprobs_of, tokens_of

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def alone(toy: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    (output,) = renew(toy).generate([prompt], params)
    return output


def test_trap_15_requests_that_just_fill_the_pool_equal_themselves_alone(toy: LLM):
    llm = renew(toy)
    prompts = [[3 + i, *range(20, 35)] for i in range(8)]
    params = GREEDY.replace(max_tokens=33)  # 48 positions are three pages, eight times three is the pool
    together = llm.generate(prompts, params)
    assert llm.engine.scheduler.num_preemptions == 0
    assert llm.engine.scheduler.pool.num_pages == 24
    for prompt, output in zip(prompts, together, strict=True):
        assert tokens_of(output) == tokens_of(alone(toy, prompt, params))


def test_trap_16_preempted_requests_equal_themselves_alone(toy: LLM):
    """Each wants seven of 24 pages: three fit to the end, and eight start."""
    llm = renew(toy)
    prompts = [[3 + i, *range(20, 35)] for i in range(8)]
    params = [GREEDY.replace(max_tokens=90, logprobs=1, prompt_logprobs=1) for _ in prompts]
    params[1] = params[1].replace(frequency_penalty=0.5)
    params[6] = SamplingParams(ignore_eos=True, max_tokens=90, seed=11, logprobs=1)
    params[7] = params[6].replace(repetition_penalty=1.2, min_tokens=80, ignore_eos=False, top_k=5)
    handles = [llm.engine.submit(*pair, stream=True) for pair in zip(prompts, params, strict=True)]
    llm.engine.run_until_done()
    assert llm.engine.scheduler.num_preemptions > 3
    for handle, prompt, given in zip(handles, prompts, params, strict=True):
        output, solo = handle.output(), alone(toy, prompt, given)
        assert tokens_of(output) == tokens_of(solo)
        for ours, theirs in zip(logprobs_of(output), logprobs_of(solo), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        assert output.prompt_token_ids == prompt
        assert len(output.outputs[0].logprobs or []) == len(output.outputs[0].token_ids)
        assert "".join(delta.text for delta in handle.deltas) == output.outputs[0].text


def test_trap_17_readers_that_leave_free_rows_and_pages(toy: LLM):
    llm = renew(toy)
    for _ in range(50):
        stream = llm.stream([5, 6, 7], GREEDY.replace(max_tokens=None))
        for _ in range(3):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    (output,) = llm.generate([[5, 6, 7]], GREEDY.replace(max_tokens=4))
    assert tokens_of(output) == tokens_of(alone(toy, [5, 6, 7], GREEDY.replace(max_tokens=4)))
    assert llm.engine.metrics.finished["abort"] == 50
    assert llm.engine.scheduler.pool.num_used == 0
    assert not llm.engine.has_work


LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47)


def test_trap_18_chunked_prompts_beside_neighbours_equal_whole_ones(toy: LLM, toy_whole: LLM):
    prompts = [[3 + (7 * i + j) % 100 for j in range(length)] for i, length in enumerate(LENGTHS)]
    params = GREEDY.replace(max_tokens=12, logprobs=20, prompt_logprobs=20)
    chunked = renew(toy).generate(prompts, params)
    for prompt, output in zip(prompts, chunked, strict=True):
        whole = alone(toy_whole, prompt, params)
        assert tokens_of(output) == tokens_of(whole)
        for ours, theirs in zip(logprobs_of(output), logprobs_of(whole), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        assert tokens_of(alone(toy, prompt, params)) == tokens_of(whole)
