"""Sampling fields: what is accepted, what is refused by name, and how a model's defaults come in."""

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest

from jaxinfer.schedule.sampling_params import SamplingParams, SamplingParamsError, draw_seed

NAN, INF = float("nan"), float("inf")
FLOAT_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)


def refused(field: str, **given: Any) -> SamplingParamsError:
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**given)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    return caught.value


def test_defaults_are_those_that_vllm_users_know():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert params.detokenize
    assert params.skip_special_tokens
    assert not params.is_greedy


@pytest.mark.parametrize("field", FLOAT_FIELDS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, -2.5, 1e400, True, "1", None, np.float32("nan")])
def test_trap_30_floats_out_of_range_name_the_field(field: str, value: object):
    refused(field, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", -0.1),
        ("top_p", 1.0001),
        ("min_p", -0.1),
        ("min_p", 1.0001),
        ("top_k", 0.5),
        ("top_k", -2),
        ("top_k", True),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("n", 0),
        ("n", 10**9),
        ("n", 1.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [5]),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("do_sample", "yes"),
        ("spaces_between_special_tokens", False),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_trap_30_values_out_of_range_name_the_field(field: str, value: object):
    refused(field, **{field: value})


@pytest.mark.parametrize("stop", ["", [""], ["", "zzz"]])
def test_trap_04_empty_stop_strings_are_refused(stop: object):
    refused("stop", stop=stop)


@pytest.mark.parametrize(
    "bias",
    [
        {"-1": 1},
        {"x": 1},
        {"1.5": 1},
        {1.5: 1},
        {"9" * 5000: 1},
        {5: 1e9},
        {5: NAN},
        {True: 1},
        {5: 1, "5": 2},
        [],
    ],
)
def test_trap_31_bad_logit_bias_is_refused(bias: object):
    refused("logit_bias", logit_bias=bias)


def test_trap_31_ids_outside_the_vocabulary_are_refused_at_the_door():
    for field, value in (
        ("logit_bias", {"999999": 5}),
        ("stop_token_ids", [256]),
        ("allowed_token_ids", [3, 256]),
        ("bad_words_ids", [[1, 256]]),
    ):
        fields: dict[str, Any] = {field: value}
        params = SamplingParams(**fields)
        params.validate_for(vocab_size=1_000_000, max_len=64, prompt_len=4)
        with pytest.raises(SamplingParamsError, match="below 256") as caught:
            params.validate_for(vocab_size=256, max_len=64, prompt_len=4)
        assert caught.value.field == field


def test_values_take_one_normal_form():
    fields: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3), "stop": "x"}
    fields |= {"stop_token_ids": [5, 5], "logit_bias": {"7": 1, 8: -100}}
    params = SamplingParams(**fields)
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.5, 3, ("x",), (5,))
    assert params.logit_bias == {7: 1.0, 8: -100.0}
    assert type(params.top_k) is int


def test_fields_that_contradict_each_other_are_refused():
    refused("n", n=2, temperature=0)
    refused("n", n=2, do_sample=False)
    refused("min_tokens", min_tokens=5, max_tokens=4)
    refused("stop", stop="x", detokenize=False)


def test_unknown_names_meet_the_closest_known_ones():
    assert "temperature" in str(refused("temprature", temprature=1))
    assert "max_tokens" in str(refused("max_new_tokens", max_new_tokens=4))
    with pytest.raises(SamplingParamsError, match="top_k"):
        SamplingParams.from_dict({"topk": 4})


def test_generation_config_names_are_read():
    given = json.loads(
        '{"max_new_tokens": 5, "num_return_sequences": 2, "min_new_tokens": 1, "do_sample": true, "top_k": null,'
        ' "stop_strings": ["a"], "eos_token_id": [2, 7], "num_beams": 1, "length_penalty": 1.0, "pad_token_id": 0}'
    )
    params = SamplingParams.from_dict(given)
    assert (params.max_tokens, params.n, params.min_tokens, params.stop) == (5, 2, 1, ("a",))
    assert params.top_k == 0
    assert params.end_ids([3]) == {2, 7}  # in place of the model's own
    assert SamplingParams.from_dict({"eos_token_id": 4}).stop_token_ids == (4,)
    assert SamplingParams.from_dict({"max_tokens": None}).max_tokens is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("length_penalty", 0.5),
        ("typical_p", 0.9),
        ("best_of", 3),
        ("structured_outputs", {}),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, value: object):
    with pytest.raises(SamplingParamsError, match="not supported") as caught:
        SamplingParams.from_dict({name: value})
    assert caught.value.field == name


def test_one_field_under_two_spellings_is_refused():
    with pytest.raises(SamplingParamsError, match="one spelling of max_tokens"):
        SamplingParams.from_dict({"max_tokens": 5, "max_new_tokens": 5})


def test_defaults_fill_only_what_the_caller_left_alone():
    defaults = (("temperature", 0.6), ("top_k", 50), ("max_new_tokens", 99), ("do_sample", False))
    params = SamplingParams(top_k=0, max_tokens=4).with_defaults(defaults)
    assert (params.temperature, params.top_k, params.max_tokens, params.is_greedy) == (0.6, 0, 4, True)
    assert params.explicit == {"top_k", "max_tokens"}
    warm = SamplingParams(temperature=0.9).with_defaults(defaults)
    assert not warm.is_greedy
    assert (warm.top_k, warm.max_tokens) == (50, 99)
    assert params.replace(seed=5).explicit == {"top_k", "max_tokens", "seed"}
    with pytest.raises(SamplingParamsError, match="temperature"):
        SamplingParams().with_defaults((("temperature", -1),))


def test_copies_keep_what_was_given():
    params = SamplingParams(top_k=3, logit_bias={5: 1})
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):  # noqa: S301
        assert twin == params
        assert twin.explicit == params.explicit
    error = refused("top_k", top_k=-2)
    assert pickle.loads(pickle.dumps(error)).field == "top_k"  # noqa: S301


def test_greedy_is_known_to_the_host():
    assert SamplingParams(temperature=0).is_plain_greedy
    assert SamplingParams(temperature=1e-6, top_k=5, seed=3).is_plain_greedy
    assert SamplingParams(do_sample=False).is_plain_greedy
    edits: tuple[dict[str, Any], ...] = (
        {"logprobs": 0},
        {"logit_bias": {5: 1}},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"allowed_token_ids": [5]},
        {"bad_words": ["x"]},
    )
    for edit in edits:
        assert not SamplingParams(temperature=0, **edit).is_plain_greedy


def test_end_ids_heed_ignore_eos():
    assert SamplingParams(stop_token_ids=[5]).end_ids([2]) == {2, 5}
    assert SamplingParams(stop_token_ids=[5], ignore_eos=True).end_ids([2]) == {5}


def test_lengths_are_checked_against_the_context():
    params = SamplingParams(max_tokens=None, min_tokens=8)
    params.validate_for(vocab_size=10, max_len=16, prompt_len=8)
    assert params.limit_tokens(max_len=16, prompt_len=8) == 8
    assert SamplingParams(max_tokens=3).limit_tokens(max_len=16, prompt_len=8) == 3
    assert SamplingParams(max_tokens=30).limit_tokens(max_len=16, prompt_len=8) == 8
    with pytest.raises(SamplingParamsError, match="min_tokens"):
        params.validate_for(vocab_size=10, max_len=16, prompt_len=9)
    for prompt_len in (0, 16, 17):
        with pytest.raises(SamplingParamsError, match="prompt tokens"):
            SamplingParams().validate_for(vocab_size=10, max_len=16, prompt_len=prompt_len)


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": [2], "min_tokens": 1},
        {"allowed_token_ids": [4, 5], "bad_words_ids": [[4], [1, 5]]},
        {"bad_words_ids": [[token] for token in range(10)]},
    ],
)
def test_bans_must_leave_a_token(given: dict[str, Any]):
    with pytest.raises(SamplingParamsError, match="leave a token"):
        SamplingParams(**given).validate_for(vocab_size=10, max_len=16, prompt_len=4, eos_ids=[2])


def test_drawn_seeds_are_valid_and_differ():
    seeds = {draw_seed() for _ in range(8)}
    assert len(seeds) == 8
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
