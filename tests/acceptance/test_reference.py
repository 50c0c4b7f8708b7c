"""The two real models through the whole engine: the tokens, log-probabilities and perplexity of transformers.

The tokens must be equal, all of them: nowhere in the reference are the two likeliest logits closer than 0.0037, and
float32 differs by less than 1e-4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.engines import renew

DATA = Path(__file__).parent.parent / "data"
TOLERANCE = 1e-3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> tuple[LLM, dict[str, Any]]:
    """An engine, and what transformers computed."""
    reference = json.loads((DATA / f"{request.param}.json").read_text(encoding="utf-8"))
    return renew(request.getfixturevalue(request.param)), reference


def test_prompts_become_the_same_ids(case: tuple[LLM, dict[str, Any]]):
    llm, reference = case
    for prompt in reference["prompts"]:
        assert llm.encode(prompt["prompt"]) == prompt["prompt_ids"]


def test_greedy_tokens_and_logprobs_are_those_of_transformers(case: tuple[LLM, dict[str, Any]]):
    """All prompts at once over four rows: prefilled together, mixed with decode rows, in each other's places."""
    llm, reference = case
    prompts = reference["prompts"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=20)
    for prompt, output in zip(prompts, llm.generate([p["prompt"] for p in prompts], params), strict=True):
        (choice,) = output.outputs
        assert choice.token_ids == prompt["ids"], prompt["prompt"]
        entries = choice.logprobs
        assert entries is not None
        chosen = [entry[token].logprob for entry, token in zip(entries, choice.token_ids, strict=True)]
        assert chosen == pytest.approx(prompt["logprobs"], abs=TOLERANCE), prompt["prompt"]
        last = min(one.logprob for one in entries[0].values())
        for token, logprob in prompt["top20"]:  # one that ties with the last may be left out for it
            found = entries[0][token].logprob if token in entries[0] else last
            assert found == pytest.approx(logprob, abs=TOLERANCE), (prompt["prompt"], token)


def test_perplexity_is_that_of_transformers(case: tuple[LLM, dict[str, Any]]):
    llm, reference = case
    score = llm.score(reference["score"]["ids"])
    assert score.num_scored == len(reference["score"]["ids"]) - 1
    assert score.perplexity == pytest.approx(reference["score"]["perplexity"], rel=1e-3)
