"""The bridge: plans become calls of the shapes that were compiled, and rows become packed buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.calls import Buckets, pack_decode, pack_prefill, place_rows, split_plan
from jaxinfer.schedule.plan import DecodeRow, Plan, PrefillPiece

BUCKETS = Buckets(decode=(2, 4, 8), prefill=((1, 16), (4, 16), (1, 64)), width=6, mixed=(8,), num_steps=4)
TABLE = np.arange(48, dtype=np.int32).reshape(8, 6)


def make_plan(num_decode: int, lengths: list[int], num_steps: int = 1) -> Plan:
    """A plan of decode rows in the first slots and prefill pieces in those after."""
    decode = tuple(DecodeRow(slot, f"d{slot}", 5 + slot) for slot in range(num_decode))
    pieces = tuple(
        PrefillPiece(num_decode + i, f"p{i}", 0, tuple(range(100, 100 + n)), n + i % 2, 7 if i % 2 else -1)
        for i, n in enumerate(lengths)
    )
    return Plan(0, (), decode, pieces, num_steps, TABLE)


@settings(derandomize=True, deadline=None)
@given(
    st.integers(0, 8),
    st.lists(st.integers(1, 64), max_size=8),
    st.sampled_from([BUCKETS, Buckets((8,), ((2, 64),), 6), Buckets((1, 8), ((1, 64), (3, 17)), 6, (2, 5))]),
)
def test_calls_hold_every_row_once_in_shapes_that_are_compiled(
    num_decode: int, lengths: list[int], buckets: Buckets
):
    plan = make_plan(num_decode, lengths)
    calls = split_plan(plan, buckets)
    assert {call.shape for call in calls} <= set(buckets.shapes())
    assert [row for call in calls for row in call.decode] == list(plan.decode)
    assert sorted(piece.slot for call in calls for piece in call.prefill) == [p.slot for p in plan.prefill]
    for call in calls:
        assert call.decode or call.prefill
        assert len(call.decode) <= call.shape.decode
        assert len(call.prefill) <= call.shape.prefill[0]
        assert all(len(piece.tokens) <= call.shape.prefill[1] for piece in call.prefill)
        assert call.blocks == [rows for rows in (call.decode, call.prefill) if rows]


@pytest.mark.parametrize(
    ("num_decode", "lengths", "shapes"),
    [
        (1, [], ["decode 2 over 6 pages"]),
        (5, [], ["decode 8 over 6 pages"]),
        (0, [9], ["prefill 1x16 over 6 pages"]),
        (0, [9, 3], ["prefill 1x16 over 6 pages"] * 2),
        (0, [9, 3, 16, 1], ["prefill 4x16 over 6 pages"]),  # as many tokens as four calls, and one call
        (0, [40, 3], ["prefill 1x64 over 6 pages", "prefill 1x16 over 6 pages"]),
        (3, [16, 16, 2, 2], ["decode 8 + prefill 4x16 over 6 pages"]),
        (3, [17, 1], ["decode 8 + prefill 1x64 over 6 pages", "prefill 1x16 over 6 pages"]),
    ],
)
def test_the_smallest_shapes_are_taken(num_decode: int, lengths: list[int], shapes: list[str]):
    assert [str(call.shape) for call in split_plan(make_plan(num_decode, lengths), BUCKETS)] == shapes


def test_several_decode_steps_are_one_call():
    (call,) = split_plan(make_plan(3, [], num_steps=4), BUCKETS)
    assert str(call.shape) == "decode 4 over 6 pages x4 steps"


def test_more_than_any_shape_holds_is_an_error():
    with pytest.raises(ValueError, match="9 decode rows"):
        split_plan(make_plan(9, []), BUCKETS)
    with pytest.raises(ValueError, match="65 tokens"):
        split_plan(make_plan(0, [65]), BUCKETS)


def test_decode_rows_are_packed_and_padding_asks_for_nothing():
    plan = make_plan(3, [])
    rows = (plan.decode[2], plan.decode[0])
    packed = pack_decode(rows, 4, TABLE).packed
    assert packed.dtype == np.int32
    np.testing.assert_array_equal(packed[0], [2, 7, 1, *TABLE[2]])
    np.testing.assert_array_equal(packed[1], [0, 5, 1, *TABLE[0]])
    np.testing.assert_array_equal(packed[2:, :3], [[len(TABLE), 0, 0]] * 2)
    np.testing.assert_array_equal(pack_decode((), 2, TABLE).packed[:, :3], [[len(TABLE), 0, 0]] * 2)


def test_prefill_pieces_are_packed_and_padding_has_no_length():
    piece = PrefillPiece(5, "p", 32, (40, 41, 42), 36, 43)
    packed = pack_prefill([piece], 2, 8, TABLE).packed
    assert packed.shape == (2, 4 + 8 + 6)
    np.testing.assert_array_equal(packed[0], [5, 32, 3, 43, 40, 41, 42, *[0] * 5, *TABLE[5]])
    np.testing.assert_array_equal(packed[1, :3], [len(TABLE), 0, 0])


def test_packing_copies_the_table_that_the_scheduler_goes_on_writing():
    table = TABLE.copy()
    decode = pack_decode(make_plan(1, []).decode, 2, table).packed
    prefill = pack_prefill(make_plan(0, [4]).prefill, 1, 4, table).packed
    table[:] = -1
    np.testing.assert_array_equal(decode[0, 3:], TABLE[0])
    np.testing.assert_array_equal(prefill[0, 8:], TABLE[0])


def test_rows_of_shares_lie_in_their_shares():
    """Two shares of two slots: a call's rows lie half and half, and each share fills its own half."""
    rows = [DecodeRow(slot, f"r{slot}", slot) for slot in (0, 2, 3)]
    assert place_rows(rows, 4, 4, 2) == (0, 2, 3)
    packed = pack_decode(rows, 4, TABLE[:4], 2).packed
    np.testing.assert_array_equal(packed[:, 0], [0, 4, 2, 3])
    np.testing.assert_array_equal(packed[:, 2], [1, 0, 1, 1])


def test_a_call_holds_as_many_rows_as_its_fullest_share():
    plan = make_plan(0, [4, 4, 4])
    plan = replace(
        plan, prefill=tuple(replace(p, slot=i) for i, p in enumerate(plan.prefill)), page_table=TABLE[:8]
    )
    buckets = Buckets((2, 4), ((2, 8),), 4)
    calls = split_plan(plan, buckets, 2)
    assert [[piece.slot for piece in call.prefill] for call in calls] == [[0], [1], [2]]
    decode = tuple(DecodeRow(slot, "r", 1) for slot in (0, 1, 4))
    (call,) = split_plan(replace(plan, prefill=(), decode=decode), buckets, 2)
    assert call.shape.decode == 4
