"""Known traps of sampling, penalties, seeds and logprobs: BIGRAM through the public loader and the whole engine."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest

from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.bigram import NEVER, Table, Words
from tests.acceptance.conftest import BIGRAM_VOCAB, OpenBigram

P, Q, X = 40, 41, 42
LOOP = (50, 51, 52, 53)


def draws(llm: LLM, count: int, params: SamplingParams) -> dict[int, float]:
    """Returns the shares of the tokens that a loop draws, in requests of 200 tokens."""
    each = [params.replace(max_tokens=200, seed=seed) for seed in range(count // 200)]
    outputs = llm.generate([[LOOP[0]]] * len(each), each)
    counts = Counter(token for output in outputs for token in output.outputs[0].token_ids)
    return {token: number / counts.total() for token, number in sorted(counts.items())}


@pytest.mark.parametrize(
    ("probabilities", "params", "wanted"),
    [
        # Temperature first: the shares are the roots of these, and the likeliest two hold .607 of them.
        ((0.4, 0.3, 0.2, 0.1), {"temperature": 2, "top_p": 0.65}, (0.388, 0.336, 0.275)),
        ((0.5, 0.3, 0.15, 0.05), {"temperature": 1, "min_p": 0.4}, (0.625, 0.375)),
        ((0.4, 0.3, 0.2, 0.1), {"temperature": 1, "top_k": 2}, (0.571, 0.429)),
        ((0.4, 0.3, 0.2, 0.1), {"temperature": 1}, (0.4, 0.3, 0.2, 0.1)),
        # top_p is measured on what top_k keeps: .571 of it is the likeliest's.
        ((0.4, 0.3, 0.2, 0.1), {"temperature": 1, "top_k": 2, "top_p": 0.5}, (1.0,)),
    ],
)
def test_trap_07_filters_apply_in_order(
    open_bigram: OpenBigram,
    probabilities: tuple[float, ...],
    params: dict[str, Any],
    wanted: tuple[float, ...],
):
    table = Table(BIGRAM_VOCAB)
    table.loop(dict(zip(LOOP, probabilities, strict=True)))
    shares = draws(open_bigram(table, Words()), 4000, SamplingParams(**params))
    assert shares == pytest.approx(dict(zip(LOOP, wanted, strict=False)), abs=0.035)


@pytest.mark.parametrize(
    ("logits", "params", "ids"),
    [
        ((5.0, 4.8), {}, [P, P, P]),
        ((5.0, 4.8), {"repetition_penalty": 1.2}, [Q]),  # the prompt's P counts, and not only after a step
        ((-1.0, -1.1), {"repetition_penalty": 1.2}, [Q]),  # a negative logit is multiplied
        ((5.0, 4.8), {"presence_penalty": 2}, [P, Q]),  # the prompt's P does not count, the output's does
        ((5.0, 4.8), {"frequency_penalty": 2}, [P, Q]),
        ((5.0, 4.8), {"presence_penalty": 0.15}, [P, P, P]),  # once for all its occurrences
        ((5.0, 4.8), {"frequency_penalty": 0.15}, [P, P, Q]),  # once for each
    ],
)
def test_trap_08_penalties_know_prompt_from_output(
    open_bigram: OpenBigram, logits: tuple[float, float], params: dict[str, float], ids: list[int]
):
    table = Table(BIGRAM_VOCAB)
    table.row([P, Q, X], dict(zip((P, Q), logits, strict=True)))
    given = SamplingParams.from_dict({"temperature": 0, "max_tokens": len(ids)} | params)
    (output,) = open_bigram(table, Words()).generate([P, X], given)
    assert output.outputs[0].token_ids == ids


def test_trap_09_a_seed_is_its_own_whoever_is_beside_it(open_bigram: OpenBigram):
    table = Table(BIGRAM_VOCAB)
    table.loop(dict.fromkeys(range(30, 90), 1 / 60))
    llm = open_bigram(table, Words())
    params = SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True)
    (alone,) = llm.generate([[33]], params.replace(seed=1234))
    neighbours = [params] * 5 + [params.replace(seed=5)]
    seen = set()
    for neighbour in neighbours:
        first, second = llm.generate([[33], [34]], [params.replace(seed=1234), neighbour])
        assert first.outputs[0].token_ids == alone.outputs[0].token_ids
        seen.add(tuple(second.outputs[0].token_ids))
    assert len(seen) == len(neighbours)  # who gives no seed gets another one each time


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1, "top_k": 1, "seed": 1},
        {"temperature": 1, "logit_bias": {50: -100}, "seed": 1},
        {"temperature": 0},
        {"temperature": 1, "allowed_token_ids": [60], "seed": 1},
        {"temperature": 1e-3, "min_p": 1, "top_p": 1e-9, "seed": 1},
    ],
)
@pytest.mark.parametrize("never", [NEVER, -3e38])
def test_trap_10_logprobs_are_finite_and_valid_json(
    open_bigram: OpenBigram, params: dict[str, Any], never: float
):
    table = Table(BIGRAM_VOCAB)
    table.loop(dict(zip(LOOP, (0.4, 0.3, 0.2, 0.1), strict=True)))
    table.logits[table.logits == NEVER] = never
    given = SamplingParams(max_tokens=2, logprobs=5, prompt_logprobs=5, **params)
    (output,) = open_bigram(table, Words()).generate([[50, 7, 51]], given)
    parsed = json.loads(json.dumps(asdict(output), allow_nan=False))
    entries = [*parsed["prompt_logprobs"][1:], *parsed["outputs"][0]["logprobs"]]
    values = [one["logprob"] for entry in entries for one in entry.values()]
    assert len(entries) == 4
    assert all(math.isfinite(value) and value <= 0 for value in values)


def test_trap_29_ids_that_have_no_text_do_not_break_decoding(open_bigram: OpenBigram):
    """The head has more rows than the tokenizer: they are the model's to draw, and stand for nothing."""
    words = Words()
    table = Table(BIGRAM_VOCAB)
    table.chain(*words(b">", b"a"), BIGRAM_VOCAB - 1, *words(b"b"))
    llm = open_bigram(table, words)
    (output,) = llm.generate(">", SamplingParams(temperature=0, max_tokens=3, logprobs=3))
    assert output.outputs[0].text == "ab"
    assert output.outputs[0].token_ids[1] == BIGRAM_VOCAB - 1


def test_trap_29_no_id_beyond_the_vocabulary_when_all_logits_are_negative(open_bigram: OpenBigram):
    """320 is no multiple of what kernels pad to: whatever is added must lose, and may not count in logprobs."""
    table = Table(BIGRAM_VOCAB)
    table.logits[:] = -9.0
    table.row(list(range(BIGRAM_VOCAB)), {7: -1.0})
    llm = open_bigram(table, Words())
    greedy, drawn = llm.generate(
        [[5], [5]],
        [SamplingParams(temperature=0, logprobs=5), SamplingParams(seed=1, max_tokens=200, logprobs=0)],
    )
    assert greedy.outputs[0].token_ids == [7] * 16
    logprob = -math.log1p((BIGRAM_VOCAB - 1) * math.exp(-8))
    assert (greedy.outputs[0].logprobs or [])[0][7].logprob == pytest.approx(logprob, abs=1e-4)
    assert max(drawn.outputs[0].token_ids) < BIGRAM_VOCAB
    assert len(set(drawn.outputs[0].token_ids)) > 5


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_trap_30_floats_that_are_not_finite_name_their_field(field: str, value: float):
    with pytest.raises(ValueError, match=field):
        SamplingParams.from_dict({field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_p", 1.0001), ("top_k", 0.5), ("top_k", -2), ("repetition_penalty", 0)],
)
def test_trap_30_values_out_of_range_name_their_field(field: str, value: float):
    with pytest.raises(ValueError, match=field):
        SamplingParams.from_dict({field: value})


@pytest.mark.parametrize(
    "bias", [{"999999": 5}, {"-1": 1}, {"x": 1}, {"1.5": 1}, {5: 1e9}, {BIGRAM_VOCAB: 1}, {5: math.nan}]
)
def test_trap_31_a_bad_bias_is_refused_and_the_engine_goes_on(
    open_bigram: OpenBigram, bias: dict[Any, float]
):
    llm = open_bigram(Table(BIGRAM_VOCAB), Words())
    with pytest.raises(ValueError, match="logit_bias"):
        llm.generate([[5]], SamplingParams(logit_bias=bias))
    assert len(llm.generate([[5]], SamplingParams(seed=1))[0].outputs[0].token_ids) == 16


def test_trap_31_a_bias_forces_and_bans_under_greedy(open_bigram: OpenBigram):
    table = Table(BIGRAM_VOCAB)
    table.row(list(range(BIGRAM_VOCAB)), {5: 3.0, 6: 2.0})
    params = [
        SamplingParams(temperature=0, max_tokens=3, logit_bias=bias) for bias in ({"9": 100}, {5: -100})
    ]
    forced, banned = open_bigram(table, Words()).generate([[5], [5]], params)
    assert forced.outputs[0].token_ids == [9] * 3
    assert banned.outputs[0].token_ids == [6] * 3
