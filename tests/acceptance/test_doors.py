"""Odd requests at the Python door: refused by name before anything runs, or served; the engine always goes on."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.engine import Handle
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.engines import renew

SEEDED = SamplingParams(seed=1, ignore_eos=True)


@pytest.fixture
def llm(toy: LLM) -> LLM:
    return renew(toy)


def assert_serves(llm: LLM) -> None:
    """The engine holds nothing once the step in flight is in, and answers."""
    llm.engine.run_until_done()
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pool.num_used == 0
    (output,) = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ([[5, 128]], {}, r"token ids \[128\], allowed are 0 to 127"),
        ([[5, -1]], {}, r"token ids \[-1\]"),
        ([[5, 2**70]], {}, "token ids"),
        (["\ud83d"], {}, "lone surrogate at character 0"),
        ([[5] * 128], {}, "prompt tokens: got 128, allowed: 1 to 127"),
        (["w5 " * 1000], {}, "prompt tokens: got 1000"),
        ([[5], [6] * 200], {}, "prompt tokens: got 200"),
        ([[5] * 120], {"min_tokens": 10}, "min_tokens: got 10, allowed: at most 8"),
        ([[5]], {"stop_token_ids": list(range(40))}, "stop_token_ids: got 40, allowed: at most 32"),
        ([[5]], {"bad_words": [f"w{i}" for i in range(40)]}, "bad_words: got 40, allowed: at most 32"),
        ([[5]], {"bad_words": ["w1 w2 w3 w4 w5 w6 w7 w8 w9"]}, "bad_words: got 9, allowed: at most 8"),
        ([[5]], {"allowed_token_ids": [7], "bad_words_ids": [[7]]}, "allowed_token_ids"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, params: dict[str, Any], says: str
):
    with pytest.raises(ValueError, match=says):
        llm.generate(prompts, SamplingParams.from_dict(params))
    assert llm.engine.metrics.num_steps == 0
    assert_serves(llm)


def test_a_built_engine_has_its_slots_checked_at_the_door(toy: LLM):
    """Not one that `renew` wired."""
    with pytest.raises(ValueError, match="at most 32"):
        toy.engine.submit([5], SamplingParams(stop_token_ids=list(range(40))))
    assert toy.engine.failure is None


@pytest.mark.parametrize(
    ("params", "length"),
    [
        ({"max_tokens": 10**9}, 126),
        ({"max_tokens": None}, 126),
        ({"stop": ["x" * 10**5], "max_tokens": 3}, 3),
        ({"stop": [f"x{i}" for i in range(1000)], "max_tokens": 3}, 3),
        ({"stop": ["w"], "min_tokens": 5, "max_tokens": 9}, 6),
        ({"seed": -(2**63), "max_tokens": 3}, 3),
        ({"temperature": 1e6, "max_tokens": 3}, 3),
        ({"temperature": 1.1e-5, "max_tokens": 3}, 3),
        ({"repetition_penalty": 1e3, "frequency_penalty": -2, "max_tokens": 9}, 9),
        ({"repetition_penalty": 1e-3, "max_tokens": 9}, 9),
        ({"logit_bias": dict.fromkeys(range(128), 100), "max_tokens": 3}, 3),
        ({"bad_words": ["no such word"], "max_tokens": 3}, 3),
        ({"min_p": 1.0, "top_p": 1e-9, "top_k": 2**31 - 1, "max_tokens": 3}, 3),
    ],
)
def test_extremes_are_served(llm: LLM, params: dict[str, Any], length: int):
    given = SamplingParams.from_dict({"seed": 1, "ignore_eos": True} | params)
    (output,) = llm.generate([[5, 6]], given)
    (choice,) = output.outputs
    assert choice.error is None
    assert len(choice.token_ids) == length
    assert_serves(llm)


def test_many_choices_with_logprobs_have_each_their_own(llm: LLM):
    params = SEEDED.replace(n=5, logprobs=20, prompt_logprobs=3, max_tokens=7)
    (output,) = llm.generate([[5] * 40], params)
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 5
    for choice in output.outputs:
        entries = choice.logprobs or []
        assert [len(entry) >= 20 for entry in entries] == [True] * 7
        chosen = [entry[token].logprob for entry, token in zip(entries, choice.token_ids, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs is not None
    assert [entry is None for entry in output.prompt_logprobs] == [True] + [False] * 39


def test_more_choices_than_rows_are_served(llm: LLM):
    (output,) = llm.generate([[5]], SEEDED.replace(n=100, max_tokens=2))
    assert [choice.index for choice in output.outputs] == list(range(100))
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 50
    assert_serves(llm)


def test_prompts_may_be_arrays(llm: LLM):
    lists = llm.generate([[5, 6], [7, 8]], SEEDED)
    for prompts in (np.array([[5, 6], [7, 8]]), [np.array([5, 6]), [np.int64(7), np.int32(8)]]):
        outputs = llm.generate(prompts, SEEDED)
        assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in lists]
        assert all(type(token) is int for token in outputs[0].prompt_token_ids)


def test_threads_may_submit_and_abort_while_another_steps(llm: LLM):
    handles: list[Handle] = []

    def submit(thread: int) -> None:
        rng = random.Random(thread)
        for _ in range(40):
            params = SEEDED.replace(seed=thread, max_tokens=rng.randint(1, 40))
            handles.append(llm.engine.submit([5 + thread], params))
            if rng.random() < 0.3:
                llm.engine.abort(handles[-1].request_id)

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while llm.engine.has_work or any(thread.is_alive() for thread in threads):
        llm.engine.step()
    assert len(handles) == 160
    assert all(handle.finished for handle in handles)
    seen: dict[tuple[int, int], set[int]] = defaultdict(set)
    for output in (handle.output() for handle in handles):
        for i, token in enumerate(output.outputs[0].token_ids):
            seen[output.prompt_token_ids[0], i].add(token)
    assert all(len(tokens) == 1 for tokens in seen.values())  # a seed's tokens, however far it came
    assert_serves(llm)
