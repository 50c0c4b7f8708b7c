"""Per-slot state: what is packed comes back by name, and nothing out of range is ever written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.schedule.sampling_params import SamplingParams, SamplingParamsError
from jaxinfer.steps.noise import request_key
from jaxinfer.steps.slots import (
    SlotCaps,
    Slots,
    describe_row,
    gather_rows,
    init_slots,
    install_row,
    pack_row,
    write_tokens,
)

CAPS = SlotCaps(stop_ids=4, logit_bias=3, bad_words=2, bad_word_len=3)
V, R, S = 70, 3, 8
FULL: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.25,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "logprobs": 3,
    "prompt_logprobs": 0,
    "allowed_token_ids": [0, 31, 32, 69],
    "logit_bias": {5: 1.5, 69: -100},
    "bad_words_ids": [[7], [1, 2, 3]],
}


def make_slots(*given: dict[str, Any]) -> Slots:
    slots = init_slots(R, S, V, CAPS)
    install = jax.jit(install_row, donate_argnums=0)
    for slot, fields in enumerate(given):
        row = pack_row(
            SamplingParams(**fields), CAPS, vocab_size=V, prompt_len=5, stop_ids=[9, 2], seed=-77, choice=slot
        )
        slots = install(slots, jnp.int32(slot), row)
    return slots


def test_a_row_comes_back_as_it_was_described():
    rows = gather_rows(make_slots({}, FULL), jnp.array([1, 0]))
    told = describe_row(SamplingParams(**FULL), CAPS, prompt_len=5, stop_ids=[2, 9], seed=-77, choice=1)
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got[0], want), rows.settings, told)
    assert all(
        got.dtype == want.dtype
        for got, want in zip(*map(jax.tree.leaves, (rows.settings, told)), strict=True)
    )
    np.testing.assert_array_equal(rows.settings.key[0], request_key(-77, 1))
    np.testing.assert_array_equal(rows.settings.stop_ids[0], [2, 9, -1, -1])
    np.testing.assert_array_equal(rows.settings.bad_words[0], [[-1, -1, 7], [1, 2, 3]])
    assert rows.settings.min_len[0] == 7
    assert list(rows.settings.wants_logprobs) == [1, 0]
    bits = np.unpackbits(np.asarray(rows.mask[1]).view(np.uint8), bitorder="little")
    assert list(np.flatnonzero(bits)) == [0, 31, 32, 69]


def test_three_buffers_travel():
    row = pack_row(SamplingParams(), CAPS, vocab_size=V, prompt_len=5, seed=0)
    assert [leaf.dtype.name for leaf in jax.tree.leaves(row)] == ["int32", "float32", "uint32"]
    assert row.mask.shape == (3,)


@pytest.mark.parametrize(
    ("given", "p", "k"), [({"top_p": 0}, 1, 0), ({"top_p": 1}, 1, 0), ({"top_k": -1}, 1, 0)]
)
def test_filters_that_are_off_have_one_form(given: dict[str, Any], p: float, k: int):
    filters = describe_row(SamplingParams(**given), CAPS).filters
    assert (filters.top_p, filters.top_k) == (p, k)


def test_a_tiny_top_p_is_not_off():
    assert describe_row(SamplingParams(top_p=1e-60), CAPS).filters.top_p > 0


@pytest.mark.parametrize("given", [{"temperature": 0}, {"do_sample": False}, {"temperature": 1e-6}], ids=str)
def test_greedy_rows_need_no_filters(given: dict[str, Any]):
    filters = describe_row(SamplingParams(top_k=5, top_p=0.5, min_p=0.5, **given), CAPS).filters
    assert (filters.temperature, filters.top_k, filters.top_p, filters.min_p) == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("given", "field", "numbers"),
    [
        ({"logit_bias": dict.fromkeys(range(4), 1)}, "logit_bias", ("4", "3")),
        ({"bad_words_ids": [[1], [2], [3]]}, "bad_words", ("3", "2")),
        ({"bad_words_ids": [[1, 2, 3, 4]]}, "bad_words", ("4", "3")),
        ({"stop_token_ids": [1, 2, 3, 4, 5]}, "stop_token_ids", ("5", "4")),
        ({"bad_words": ["x"]}, "bad_words", ()),
    ],
)
def test_more_than_a_slot_holds_is_refused_with_both_numbers(
    given: dict[str, Any], field: str, numbers: tuple[str, ...]
):
    params = SamplingParams(**given)
    with pytest.raises(SamplingParamsError) as caught:
        pack_row(params, CAPS, vocab_size=V, prompt_len=5, stop_ids=params.end_ids([]), seed=0)
    assert caught.value.field == field
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize("slot", [-1, R, R + 5])
def test_rows_out_of_range_are_dropped(slot: int):
    slots = make_slots(FULL)
    row = pack_row(SamplingParams(**FULL), CAPS, vocab_size=V, prompt_len=5, seed=9)
    after = install_row(slots, jnp.int32(slot), row)
    jax.tree.map(np.testing.assert_array_equal, slots, after)


def test_padding_reads_a_row_that_asks_for_nothing():
    rows = gather_rows(make_slots(FULL, FULL, FULL), jnp.array([-1, R, 999]))
    nothing = describe_row(SamplingParams(temperature=0), CAPS)
    jax.tree.map(
        lambda got, want: np.testing.assert_array_equal(got, np.stack([want] * 3)), rows.settings, nothing
    )


def test_trap_15_writes_out_of_range_are_dropped_never_clamped():
    slots = init_slots(R, S, V, CAPS)
    slot = jnp.array([0, 1, 2, -1, R, 0, 0, 1])
    position = jnp.array([0, 7, 3, 2, 2, S, -1, 5])
    valid = jnp.array([True] * 7 + [False])
    history = jax.jit(write_tokens)(slots, slot, position, jnp.arange(1, 9), valid).history
    expected = np.zeros((R, S), np.int32)
    expected[0, 0], expected[1, 7], expected[2, 3] = 1, 2, 3
    np.testing.assert_array_equal(history, expected)
