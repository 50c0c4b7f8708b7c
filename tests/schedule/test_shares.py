"""Schedulers of shares behind one door: every request gets its own tokens, whatever share it runs in."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer.schedule.limits import SchedulerConfig
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.plan import Plan
from jaxinfer.schedule.shares import SharedScheduler
from tests.schedule.fake_device import FakeDevice
from tests.schedule.house import House, expected, spec

PAGE = 4


class SharedDevice(FakeDevice):
    """A device that counts the pages of all shares in a row."""

    shares: SharedScheduler

    def run(self, plan: Plan) -> list[list[int]]:
        pools = [share.pool for share in self.shares.shares]
        size, table = len(plan.page_table) // len(pools), plan.page_table.copy()
        for number, pool in enumerate(pools):
            rows = table[number * size : (number + 1) * size]
            rows[:] = np.where(
                rows < pool.num_pages, rows + number * pool.num_pages, self.shares.pool.num_pages
            )
        return super().run(replace(plan, page_table=table))


def make(
    num_shares: int, num_pages: int = 32, prefix_caching: bool = False, **limits: Any
) -> SharedScheduler:
    config: dict[str, Any] = {"max_num_seqs": 4, "max_len": 64, "max_num_batched_tokens": 32} | limits
    pools = [PagePool(num_pages, PAGE) for _ in range(num_shares)]
    return SharedScheduler(SchedulerConfig(**config), pools, prefix_caching)


def open_house(scheduler: SharedScheduler, lag: int = 1) -> House:
    house = House(scheduler, lag=lag)
    device = SharedDevice(scheduler.config.max_num_seqs, scheduler.pool.num_pages, PAGE, 0)
    device.shares = scheduler
    house.device = device
    return house


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_shares", [1, 2, 4])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_random_traffic_ends_with_the_right_tokens(
    num_shares: int, lag: int, prefix_caching: bool, num_steps: int
):
    rng = random.Random(num_shares + 10 * lag)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_decode_steps": num_steps}
    scheduler = make(num_shares, 12, prefix_caching, **limits)
    house = open_house(scheduler, lag)
    stem = tuple(rng.randrange(1, 9) for _ in range(9))
    for number in range(40):
        tail = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 12)))
        scheduler.add(spec(f"r{number}", prompt=stem + tail, num_new=rng.randrange(1, 16), seed=number))
        for _ in range(rng.randrange(3)):
            house.step()
            scheduler.check_invariants()
    while scheduler.has_work:
        house.step()
        scheduler.check_invariants()
    assert len(house.ended) == 40
    for request in house.ended:
        assert list(request.output) == expected(request)
    assert scheduler.pool.num_used == 0
    if num_shares == 2:
        assert scheduler.num_preemptions
    if prefix_caching:
        assert scheduler.prefix.counts.hits


def test_a_newcomer_goes_where_its_prefix_is_and_else_where_it_is_quiet():
    scheduler = make(2, prefix_caching=True, max_num_seqs=8)
    house = open_house(scheduler)
    prompt = tuple(range(1, 14))
    first = scheduler.add(spec("first", prompt=prompt))
    where = [share.waiting for share in scheduler.shares].index(
        next(s.waiting for s in scheduler.shares if s.waiting)
    )
    house.step()
    again = scheduler.add(spec("again", prompt=(*prompt, 5)))
    other = scheduler.add(spec("other", prompt=(9, 9, 9)))
    assert again in scheduler.shares[where].waiting
    assert other in scheduler.shares[1 - where].waiting
    while scheduler.has_work:
        house.step()
    assert first.output
    assert again.prefix.report is not None
    assert again.prefix.report.num_cached == 12


def test_who_waits_moves_to_a_share_with_a_free_slot():
    scheduler = make(2, max_num_seqs=2)
    house = open_house(scheduler)
    for number in range(2):
        scheduler.add(spec(f"long{number}", num_new=30))
    waiting = [scheduler.add(spec(f"next{number}", num_new=2)) for number in range(2)]
    house.step()
    scheduler.finish(scheduler.shares[0].running[0], "abort")
    while waiting[0].finish_reason is None or waiting[1].finish_reason is None:
        house.step()
        scheduler.check_invariants()
    assert scheduler.shares[1].running  # both went past the long one
    assert [list(r.output) for r in waiting] == [expected(r) for r in waiting]


def test_shares_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 shares: got max_num_seqs 4"):
        make(3)


def test_shares_decode_several_tokens_together_when_all_of_them_can():
    scheduler = make(2, num_decode_steps=4)
    house = open_house(scheduler)
    requests = [scheduler.add(spec(f"r{number}", num_new=9)) for number in range(2)]
    while scheduler.has_work:
        house.step()
    steps = [plan.num_decode_steps for plan in house.plans]
    assert steps[:3] == [1, 4, 4]  # the prompts, then eight tokens of both
    assert {len(plan.decode) for plan in house.plans[1:3]} == {2}
    assert [list(r.output) for r in requests] == [expected(r) for r in requests]
