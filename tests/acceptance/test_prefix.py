"""Prefixes found again and pages that travel: whatever is shared, saved, evicted or cut, the tokens are the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.steps.compiled import count_compilations
from tests.acceptance.conftest import open_toy
from tests.acceptance.engines import TOY_EOS, TOY_VOCAB, renew, write_toy
from tests.acceptance.mixed import MixedRequest, logprobs_of, make_requests, serve, tokens_of

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
BELLA = [5, 9, 31, 77, 12, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52]  # "What is Bella doing ..."


def sharing_requests(count: int) -> list[MixedRequest]:
    """Requests of every kind whose prompts begin with one of three stems."""
    vocab = [i for i in range(TOY_VOCAB) if i != TOY_EOS]
    rng = random.Random(5)
    stems = [rng.choices(vocab, k=40) for _ in range(3)]
    requests = []
    for request in make_requests(count, vocab, lambda i: f"w{i}", longest=100, eos=TOY_EOS, seed=8):
        stem = rng.choice(stems)[: rng.randint(10, 40)]
        prompt = [*stem, *request.prompt[: rng.randint(1, 30)]]
        params = request.params.replace(max_tokens=min(request.params.max_tokens or 24, 50))
        if params.min_tokens <= (params.max_tokens or 0):
            requests.append(MixedRequest(prompt, params))
    return [one for one in requests if one.params.seed is not None or one.params.is_greedy]


def outputs_of(llm: LLM, requests: Sequence[MixedRequest]) -> list[RequestOutput]:
    with count_compilations() as compiled:
        handles = serve(llm.engine, requests, random.Random(3))
    assert compiled == []
    assert llm.engine.scheduler.pool.num_used == 0
    return [handle.output() for handle in handles]


@pytest.fixture(scope="module")
def plain(toy: LLM) -> list[RequestOutput]:
    """What the requests give where nothing is shared."""
    llm = renew(toy, prefix_caching=False)
    found = outputs_of(llm, sharing_requests(60))
    assert llm.engine.metrics.prefix_hits == 0
    return found


def assert_same(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> None:
    for i, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        assert tokens_of(one) == tokens_of(two), i
        for mine, other in zip(logprobs_of(one), logprobs_of(two), strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-3, err_msg=str(i))


@pytest.mark.parametrize(
    ("variant", "limits"),
    [
        ("toy", {}),
        ("toy", {"host_pages": 30}),
        ("toy", {"host_pages": 30, "num_pages": 12, "preemption_mode": "swap"}),
        ("toy", {"host_pages": 30, "num_pages": 12, "preemption_mode": "swap", "prefix_caching": False}),
        ("toy", {"scheduling_policy": "lpm", "mixed_prefill_tokens": 16}),
        ("toy", {"scheduling_policy": "ferry", "window": 0.0}),
        ("toy_whole", {}),
    ],
)
def test_tokens_do_not_depend_on_what_is_shared_saved_or_cut(
    plain: list[RequestOutput], variant: str, limits: dict, request: pytest.FixtureRequest
):
    llm = renew(request.getfixturevalue(variant), **limits)
    found = outputs_of(llm, sharing_requests(60))
    assert_same(found, plain)
    metrics = llm.engine.metrics
    if limits.get("prefix_caching", True):
        assert metrics.prefix_hits > 0.2 * metrics.prefix_queries
        assert sum(one.num_cached_tokens for one in found) > 0
    if limits.get("preemption_mode") == "swap":
        assert metrics.preemptions["swap"] > 0


def test_today_and_tomorrow_share_their_question(toy: LLM):
    llm = renew(toy)
    today, tomorrow = [*BELLA, 60], [*BELLA, 61]
    first, second = llm.generate([today], GREEDY)[0], llm.generate([tomorrow], GREEDY)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    (alone,) = renew(toy).generate([tomorrow], GREEDY)
    assert tokens_of(second) == tokens_of(alone)


@pytest.mark.parametrize(("length", "hits"), [(31, 16), (32, 16), (33, 32)])
@pytest.mark.parametrize("scored", [False, True])
def test_trap_14_prompts_that_are_whole_pages(toy: LLM, length: int, hits: int, scored: bool):
    llm = renew(toy)
    prompt = [7 + i % 90 for i in range(length)]
    params = GREEDY.replace(max_tokens=8, logprobs=2, prompt_logprobs=2 if scored else None)
    first, second, third = (llm.generate([prompt], params)[0] for _ in range(3))
    assert_same([second, third], [first, first])
    assert first.num_cached_tokens == 0
    # Log-probabilities of a prompt need every position computed.
    assert second.num_cached_tokens == third.num_cached_tokens == (0 if scored else hits)
    (longer,) = llm.generate([[*prompt, 99]], params.replace(prompt_logprobs=None))
    assert longer.num_cached_tokens == length // 16 * 16


def test_penalties_and_bad_words_see_the_tokens_that_were_found(toy: LLM):
    prompt = [*BELLA, *BELLA, 60]
    for params in (
        GREEDY.replace(repetition_penalty=1.9),
        GREEDY.replace(bad_words_ids=[[50, 51, 52, 60, i] for i in range(32)]),
        GREEDY.replace(presence_penalty=1.5, frequency_penalty=0.5),
    ):
        params = params.replace(max_tokens=20)
        (cold,) = renew(toy, prefix_caching=False).generate([prompt], params)
        llm = renew(toy)
        llm.generate([prompt], GREEDY)
        (warm,) = llm.generate([prompt], params)
        assert warm.num_cached_tokens == 32
        assert tokens_of(warm) == tokens_of(cold)


def test_choices_of_one_prompt_compute_it_once(toy: LLM):
    llm = renew(toy)
    prompt = [*BELLA, *BELLA]
    (output,) = llm.generate([prompt], SamplingParams(n=4, seed=3, max_tokens=5, ignore_eos=True))
    assert llm.engine.metrics.prefix_hits == 3 * 32
    (cold,) = renew(toy, prefix_caching=False).generate(
        [prompt], SamplingParams(n=4, seed=3, max_tokens=5, ignore_eos=True)
    )
    assert tokens_of(output) == tokens_of(cold)


def test_windows_find_their_prefixes_too(tmp_path_factory: pytest.TempPathFactory):
    folder = write_toy(tmp_path_factory.mktemp("gemma"), "gemma3")
    settings = {"max_num_seqs": 2, "max_model_len": 128, "kv_memory": "20 pages", "policy": "float32"}
    llm = LLM(str(folder), **settings, prefill_buckets=[[1, 32]], max_num_batched_tokens=64)
    prompts = [[*(3 + i % 60 for i in range(50)), 70 + j] for j in range(4)]
    params = GREEDY.replace(max_tokens=20)
    cold = [renew(llm, prefix_caching=False).generate([prompt], params)[0] for prompt in prompts]
    warm = renew(llm).generate(prompts, params)
    assert_same(warm, cold)
    assert [one.num_cached_tokens for one in warm] == [0, 48, 48, 48]


def test_a_request_runs_out_of_time_and_others_do_not(toy: LLM):
    engine = renew(toy).engine
    now = [0.0]
    engine.clock = lambda: now[0]
    engine._intake._clock = engine.clock
    late = engine.submit(BELLA, GREEDY.replace(max_tokens=40), timeout=5.0)
    other = engine.submit(BELLA, GREEDY.replace(max_tokens=40))
    for _ in range(8):
        engine.step()
    now[0] = 5.0
    engine.run_until_done()
    assert late.output().outputs[0].finish_reason == "timeout"
    assert 0 < len(late.output().outputs[0].token_ids) < 40
    assert len(other.output().outputs[0].token_ids) == 40


def test_swapping_needs_room(tmp_path_factory: pytest.TempPathFactory):
    with pytest.raises(ValueError, match=r"preemption_mode: swap needs memory.*host_cache_bytes"):
        open_toy(tmp_path_factory.mktemp("toy"), preemption_mode="swap", host_cache_bytes=0)


@pytest.fixture(scope="module")
def toy_crowd(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """TOY with 128 rows."""
    changed = {"max_num_seqs": 128, "max_num_batched_tokens": 256, "kv_memory": "700 pages"}
    return open_toy(tmp_path_factory.mktemp("toy"), draws=["sample"], host_cache_bytes=0, **changed)


def test_127_neighbours_change_nothing(toy_crowd: LLM):
    rng = random.Random(2)
    prompts = [[*BELLA, *rng.choices(range(3, TOY_VOCAB), k=rng.randint(1, 40))] for _ in range(128)]
    params = [
        SamplingParams(seed=i, temperature=0 if i % 2 else 0.9, max_tokens=12, logprobs=1) for i in range(128)
    ]
    together = renew(toy_crowd).generate(prompts, params)
    for i in range(0, 128, 9):
        (alone,) = renew(toy_crowd, prefix_caching=False).generate([prompts[i]], params[i])
        assert_same([together[i]], [alone])
