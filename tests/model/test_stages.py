"""Who has which layer, and who works on what at which tick."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.model.pipeline import _cut, _join, cut_rows, join_rows
from jaxinfer.model.stages import Flow, cut_shape, deal_layers, describe_idleness, plan_flow, stand_ins


@pytest.mark.parametrize(
    ("num_layers", "num_stages"),
    [(layers, stages) for layers in range(1, 14) for stages in range(1, min(layers, 8) + 1)],
)
def test_layers_are_dealt_in_order_and_evenly(num_layers: int, num_stages: int):
    deal = deal_layers(["alike"] * num_layers, num_stages)
    assert [layer for own in deal for layer in own if layer >= 0] == list(range(num_layers))
    assert {len(own) for own in deal} == {-(-num_layers // num_stages)}
    counts = [sum(layer >= 0 for layer in own) for own in deal]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize(
    ("structures", "num_stages", "num_places"),
    [("dmmmmmmm", 2, 5), ("dmdmdm", 2, 4), ("dmdmdmdm", 2, 4), ("ddmm", 2, 4), ("dm", 2, 2)],
)
def test_a_place_has_one_structure_on_all_stages(structures: str, num_stages: int, num_places: int):
    deal = deal_layers(structures, num_stages)
    assert {len(own) for own in deal} == {num_places}
    for column in zip(*deal, strict=True):
        assert len({structures[layer] for layer in column if layer >= 0}) == 1
    assert [structures[layer] for layer in stand_ins(deal)] == [
        next(structures[layer] for layer in column if layer >= 0) for column in zip(*deal, strict=True)
    ]
    assert [layer for own in deal for layer in own if layer >= 0] == list(range(len(structures)))


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 9, 16])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_every_group_meets_every_stage_in_order_and_its_token_before_the_next_step(
    num_stages: int, num_groups: int, num_steps: int
):
    flow = Flow(num_stages, num_groups, num_steps)
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for tick in range(flow.num_ticks):
        for stage in range(num_stages):
            step, group, is_busy = flow.work(tick, stage)
            if is_busy:
                seen.setdefault((step, group), []).append((tick, stage))
    assert sorted(seen) == [(step, group) for step in range(num_steps) for group in range(num_groups)]
    for (step, group), visits in seen.items():
        first = visits[0][0]
        assert visits == [(first + stage, stage) for stage in range(num_stages)]
        assert step == 0 or first > seen[step - 1, group][-1][0]
    assert max(tick for visits in seen.values() for tick, _ in visits) == flow.num_ticks - 1


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_stages_idle_for_the_share_that_a_pipeline_must(num_stages: int):
    """(S-1)/(G+S-1) in a pass, and next to nothing in many decode steps on end once there are rows for all stages."""
    for shape in ((1, 512), (4, 64), (1, 2048), (3, 7)):
        flow = plan_flow(num_stages, [shape])
        assert flow.num_groups >= num_stages
        assert flow.idle_share == pytest.approx((num_stages - 1) / (flow.num_groups + num_stages - 1))
    for rows in (num_stages, 2 * num_stages, 64):
        flow = plan_flow(num_stages, [(rows, 1)], 32)
        assert flow.idle_share == pytest.approx((num_stages - 1) / (32 * num_stages + num_stages - 1))
        assert flow.idle_share < 0.031
    one = plan_flow(num_stages, [(1, 1)], 32)
    assert one.idle_share == pytest.approx(1 - 1 / num_stages)


def test_a_long_prompt_is_cut_into_more_groups_than_a_short_one():
    assert plan_flow(4, [(1, 256)]).num_groups == 4
    assert plan_flow(4, [(1, 2048)]).num_groups == 16
    assert plan_flow(4, [(1, 8192)]).num_groups == 32  # eight for each stage
    assert plan_flow(4, [(8, 1), (1, 512)]).num_groups == 4
    assert str(plan_flow(2, [(8, 1)], 8)) == "2 groups x 8 steps through 2 stages in 17 ticks, 6 % idle"


@pytest.mark.parametrize(
    ("shape", "num_groups"), [((5, 1), 4), ((2, 1), 4), ((3, 7), 6), ((1, 5), 4), ((8, 4), 4)]
)
def test_rows_come_out_as_they_went_in_and_a_row_in_the_order_of_its_tokens(
    shape: tuple[int, int], num_groups: int
):
    B, T = shape
    cut = cut_shape(shape, num_groups)
    assert cut[0] * cut[1] == num_groups
    x = jnp.arange(1.0, B * T + 1).reshape(B, T, 1)
    groups = _cut(x, cut)
    np.testing.assert_array_equal(_join(groups.reshape(num_groups, -1, 1), shape, cut), x.reshape(-1, 1))
    when = {int(value): group for group in range(num_groups) for value in np.asarray(groups[group]).ravel()}
    for row in np.asarray(x[..., 0]):
        assert [when[int(value)] for value in row] == sorted(when[int(value)] for value in row)


def test_live_rows_come_to_all_groups_alike():
    rows = jnp.arange(1, 8)  # as many as there are first
    groups = np.asarray(cut_rows(rows, 3))
    np.testing.assert_array_equal(groups, [[1, 4, 7], [2, 5, 0], [3, 6, 0]])
    np.testing.assert_array_equal(join_rows(jnp.asarray(groups), 7), rows)


def test_a_run_is_told_how_long_its_stages_idle_and_what_helps():
    told = describe_idleness(4, 8, 1)
    assert told == "decode: 4 groups through 4 stages in 7 ticks, 43 % idle; num_decode_steps=8 makes it 9 %"
    assert describe_idleness(4, 8, 8).endswith("9 % idle")
    assert describe_idleness(4, 2, 8).endswith("max_num_seqs of at least 4 rows would give all stages work")
