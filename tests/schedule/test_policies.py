from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from jaxinfer.schedule.policies import POLICIES, Moment, by_priority, ferry, longest_prefix_first
from jaxinfer.schedule.request import Request, RequestRefused
from tests.schedule.house import House, expected, make, spec


def moment(now: float = 0.0, num_running: int = 0, cached: dict[str, int] | None = None) -> Moment:
    held = cached or {}
    return Moment(now, num_running, 4, 60.0, 5.0, lambda request: held.get(request.spec.request_id, 0))


def waiting(*arrivals: float) -> list[Request]:
    return [Request(spec(f"r{i}", arrival=arrival), rank=(0.0, i)) for i, arrival in enumerate(arrivals)]


def names(requests: Sequence[Request]) -> list[str]:
    return [request.spec.request_id for request in requests]


def test_waiting_weighs_as_much_as_priority():
    old, new = spec("old", priority=3, arrival=0.0), spec("new", priority=0, arrival=200.0)
    assert by_priority(old, 60.0) < by_priority(new, 60.0)  # 200 s are worth more than 3 levels
    assert by_priority(old, 100.0) > by_priority(new, 100.0)


def test_under_a_stream_of_important_requests_an_unimportant_one_is_served():
    house = House(make(max_num_seqs=1, ageing=10.0))
    poor = house.scheduler.add(spec("poor", priority=2, arrival=0.0, num_new=1))
    while not poor.finish_reason and house.now < 100:
        house.scheduler.add(spec(f"rich{house.now}", priority=0, arrival=house.now, num_new=3))
        house.step()
        house.step()
        house.now += 1.0
    assert 18 <= house.now <= 50, "after two levels of ten seconds, and what was ahead of it then"


def test_the_longest_cached_prefix_goes_first_until_others_lose_patience():
    requests = waiting(0.0, 30.0, 30.0, 30.0)
    held = {"r2": 16, "r3": 32}
    assert names(longest_prefix_first(requests, moment(40.0, cached=held))) == ["r3", "r2", "r0", "r1"]
    assert names(longest_prefix_first(requests, moment(60.0, cached=held))) == ["r0", "r3", "r2", "r1"]
    assert names(longest_prefix_first(requests, moment(99.0, cached=held))) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize(
    ("count", "num_running", "now", "leaves"),
    [
        (1, 0, 4.9, False),
        (1, 0, 5.0, True),
        (4, 0, 0.0, True),
        (4, 1, 9.0, False),
        (0, 0, 9.0, False),
    ],
)
def test_a_ferry_leaves_in_time_or_full_and_only_when_it_is_back(
    count: int, num_running: int, now: float, leaves: bool
):
    requests = waiting(*[0.0] * count)
    assert names(ferry(requests, moment(now, num_running))) == (names(requests) if leaves else [])


def test_those_aboard_a_ferry_run_to_their_end_together():
    house = House(make(scheduling_policy="ferry", window=5.0, max_num_seqs=3))
    requests = [house.scheduler.add(spec(f"r{i}", num_new=2 + 3 * i)) for i in range(5)]
    house.run()
    assert [request.output for request in requests] == [expected(request) for request in requests]
    aboard = [[admission.request_id for admission in plan.admitted] for plan in house.plans if plan.admitted]
    assert aboard == [["r0", "r1", "r2"], ["r3", "r4"]]
    assert house.now == 5.0, "the second was not full, and waited for its time"


def test_a_long_prompt_boards_with_the_others_though_its_turn_comes_later():
    house = House(make(scheduling_policy="ferry", window=0.0, max_num_seqs=3, max_num_batched_tokens=8))
    requests = [house.scheduler.add(spec(f"r{i}", num_prompt=20)) for i in range(3)]
    house.run()
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert [len(plan.admitted) for plan in house.plans if plan.admitted] == [3]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "priority"])
def test_a_priority_is_refused_where_it_would_be_ignored(policy: str):
    scheduler = make(scheduling_policy=policy)
    with pytest.raises(RequestRefused, match=f"priority: got 2.*scheduling_policy is {policy}"):
        scheduler.add(spec("a", priority=2))


def test_prompts_do_not_stall_streams():
    house = House(make(max_num_batched_tokens=40, mixed_prefill_tokens=12))
    house.scheduler.add(spec("stream", num_new=30))
    house.step()
    house.scheduler.add(spec("long", num_prompt=40))
    house.run()
    cuts = [(len(plan.decode), [len(piece.tokens) for piece in plan.prefill]) for plan in house.plans]
    assert cuts[:9] == [(0, [3]), *[(1, [6])] * 6, (1, [4]), (2, [])]
    steps = [i for i, plan in enumerate(house.plans) for row in plan.decode if row.request_id == "stream"]
    assert all(late - soon == 1 for soon, late in pairwise(steps)), "the stream decodes in every step"


def test_a_prompt_takes_more_of_a_step_where_others_wait():
    house = House(make(max_num_seqs=2, max_num_batched_tokens=40, mixed_prefill_tokens=12))
    house.scheduler.add(spec("stream", num_new=60))
    house.step()
    for name in ("long", "next", "last"):
        house.scheduler.add(spec(name, num_prompt=36, num_new=1))
    house.run()
    taken: dict[str, list[int]] = {}
    for plan in house.plans:
        for piece in plan.prefill:
            taken.setdefault(piece.request_id, []).append(len(piece.tokens))
    assert taken["long"] == [12] * 3
    assert taken["last"] == [6] * 6
