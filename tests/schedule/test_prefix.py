from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from jaxinfer.schedule.plan import Plan
from jaxinfer.schedule.policies import POLICIES
from jaxinfer.schedule.request import Request, RequestSpec
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.schedule.shares import SharedScheduler
from tests.schedule.fake_device import EOS, VOCAB
from tests.schedule.house import PAGE, House, expected, make, spec


def prompt(length: int, start: int = 1) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def run_one(house: House, name: str, tokens: Sequence[int], **fields) -> Request:
    request = house.scheduler.add(spec(name, prompt=tuple(tokens), **fields))
    house.run()
    assert request.output == expected(request)
    return request


def cached(request: Request) -> int:
    assert request.prefix.report is not None
    return request.prefix.report.num_cached


def reason(request: Request) -> str:
    assert request.prefix.report is not None
    return request.prefix.report.reason


def shared(num_pages: int = 64, **settings) -> House:
    return House(make(num_pages, prefix_caching=True, **settings))


def test_the_second_of_two_questions_computes_its_tail_only():
    house = shared()
    assert cached(run_one(house, "today", [*prompt(10), 7])) == 0
    before = house.device.num_tokens
    second = run_one(house, "tomorrow", [*prompt(10), 8])
    assert cached(second) == 8
    assert house.device.num_tokens - before == 3 + 3  # the tail of the prompt, and all but the last output
    assert house.plans[-1].saves == house.plans[-1].loads == ()


@pytest.mark.parametrize(("length", "hits"), [(7, 4), (8, 4), (9, 8), (4, 0), (3, 0)])
def test_trap_14_a_whole_hit_leaves_a_token_to_compute(length: int, hits: int):
    house = shared()
    for name, want in [("first", 0), ("second", hits), ("third", hits)]:
        assert cached(run_one(house, name, prompt(length), num_new=1)) == want
    longer = run_one(house, "longer", [*prompt(length), 50], num_new=1)
    assert cached(longer) == length // PAGE * PAGE


def test_the_next_turn_of_a_conversation_finds_the_answer_too():
    house = shared()
    first = run_one(house, "first", prompt(6), num_new=8)
    turn = [*prompt(6), *first.output, 9, 9]
    assert cached(run_one(house, "second", turn)) == 12  # of 14; the last output's own KV was never computed


def test_who_comes_while_a_prefix_is_computed_waits_for_it():
    house = shared(max_num_batched_tokens=8)
    requests = [house.scheduler.add(spec(str(i), prompt=(*prompt(20), 30 + i))) for i in range(4)]
    other = house.scheduler.add(spec("other", prompt=(5, 5, 5)))
    house.run()
    assert [request.output for request in requests] == [expected(request) for request in requests]
    assert [cached(request) for request in requests] == [0, 20, 20, 20]
    assert house.device.num_tokens == 21 + 3 * 1 + 3 + 5 * 3
    admitted = [admission.request_id for plan in house.plans for admission in plan.admitted]
    assert admitted.index("other") < admitted.index("1"), "who waits for nothing goes first"
    assert other.output == expected(other)


def test_salts_keep_tenants_apart():
    house = shared()
    for name, salt, want in [("a", None, 0), ("b", "x", 0), ("c", "x", 8), ("d", "y", 0), ("e", None, 8)]:
        request = run_one(house, name, prompt(9), cache_salt=salt)
        assert cached(request) == want, name
        if name in "bd":
            assert reason(request).startswith("cache_salt")


def test_prompt_logprobs_compute_every_position():
    house = shared()
    run_one(house, "a", prompt(9))
    request = run_one(house, "b", prompt(9), params=SamplingParams(max_tokens=4, prompt_logprobs=1))
    assert cached(request) == 0
    assert reason(request).startswith("every position")
    assert cached(run_one(house, "c", prompt(9))) == 8


def test_why_a_request_missed_is_told():
    house = shared(num_pages=8, max_len=32)
    assert reason(run_one(house, "a", prompt(9))).startswith(
        "new: nothing seen before has the same tokens up to position 4"
    )
    assert reason(run_one(house, "b", prompt(9))).startswith("hit")
    different = run_one(house, "c", [*prompt(4), 60, 61, 62, 63, 64])
    assert reason(different).endswith("up to position 8")
    assert different.prefix.report is not None
    assert different.prefix.report.first_missing == 1
    run_one(house, "d", prompt(28, 100), num_new=4)  # needs the whole pool
    assert reason(run_one(house, "e", prompt(9))).startswith("evicted")
    assert reason(run_one(house, "f", prompt(3))).startswith("no full page")
    off = House(make())
    assert reason(run_one(off, "g", prompt(9))).startswith("the prefix cache is off")


def test_the_page_used_longest_ago_makes_room_first_and_the_end_of_a_prompt_before_its_beginning():
    house = shared(num_pages=8, max_len=32)
    run_one(house, "old", prompt(12), num_new=1)  # 3 full pages
    run_one(house, "new", prompt(12, 40), num_new=1)  # 3 more
    assert house.scheduler.pool.num_cached == 6
    run_one(house, "third", prompt(9, 70), num_new=4)  # 3 pages, of which 2 were free
    assert (
        cached(run_one(house, "new again", [*prompt(12, 40), 99], num_new=1)) == 12
    )  # takes another of the old
    assert cached(run_one(house, "old again", [*prompt(12), 99], num_new=1)) == 4


def test_a_request_whose_numbers_went_wrong_leaves_nothing_to_find():
    house = shared()
    scheduler = house.scheduler
    request = scheduler.add(spec("a", prompt=prompt(9)))
    plan = scheduler.schedule()
    assert plan is not None
    house.device.run(plan)
    (update,) = scheduler.commit(plan, [[-1]])
    assert (update.request, update.num_tokens, request.output) == (request, 0, [])
    assert request.finish_reason == "error"
    scheduler.check_invariants()
    assert cached(run_one(house, "b", prompt(9))) == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_numbers_that_go_wrong_after_a_preemption_leave_nothing_to_find_either(mode: str):
    house = shared(8, max_len=32, host_pages=8, preemption_mode=mode)
    scheduler, house.lag = house.scheduler, 2
    scheduler.add(spec("elder", num_new=24))
    request = scheduler.add(spec("a", num_new=20, prompt=prompt(9, 40)))
    while scheduler.num_preemptions == 0:
        house.step()
    assert request.num_inflight == 1, "it gave way before its last token came"
    plan, tokens = house.flight.popleft()
    tokens[[row.request_id for row in plan.decode].index("a")] = [-1]
    scheduler.commit(plan, tokens)
    assert request.finish_reason == "error"
    house.run()
    assert cached(run_one(house, "b", prompt(9, 40))) == 0


def test_what_must_be_computed_anew_is_not_swapped():
    house = swapping("swap", prefix_caching=True)
    params = SamplingParams(max_tokens=200, prompt_logprobs=1)
    requests = [
        house.scheduler.add(spec(name, 16, 200, seed=i, params=params)) for i, name in enumerate("abcd")
    ]
    house.run()
    assert house.scheduler.preemptions.keys() == {"recompute"}
    assert not any(plan.loads for plan in house.plans)
    assert [request.output for request in requests] == [expected(request) for request in requests]


def test_nothing_is_shared_or_remembered_when_it_is_off():
    house = House(make())
    run_one(house, "a", prompt(9))
    assert house.scheduler.pool.num_cached == 0
    assert cached(run_one(house, "b", prompt(9))) == 0
    assert house.scheduler.prefix.counts.queries == 0


def test_pages_come_back_from_the_host():
    house = shared(num_pages=8, max_len=32, host_pages=8)
    run_one(house, "a", prompt(12), num_new=1)
    run_one(house, "big", prompt(28, 100), num_new=4)
    assert any(plan.saves for plan in house.plans)
    again = run_one(house, "again", [*prompt(12), 99], num_new=1)
    assert cached(again) == 12
    assert sum(len(plan.loads) for plan in house.plans) == 3


def test_the_hosts_own_room_is_bounded_and_gives_way_in_order():
    house = shared(num_pages=8, max_len=32, host_pages=2)
    for i in range(4):
        run_one(house, f"p{i}", prompt(28, 100 * i), num_new=4)
    assert len(house.scheduler.prefix.host) == 2
    house.scheduler.prefix.clear()
    assert len(house.scheduler.prefix.host) == 0
    assert house.scheduler.pool.num_cached == 0


def swapping(mode: str, *, prefix_caching: bool, host_pages: int = 200) -> House:
    return House(
        make(
            54,
            max_len=256,
            max_num_batched_tokens=64,
            prefix_caching=prefix_caching,
            host_pages=host_pages,
            preemption_mode=mode,
        )
    )


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_swapped_rows_go_on_where_they_were(prefix_caching: bool):
    counts = {}
    for mode in ("recompute", "swap"):
        house = swapping(mode, prefix_caching=prefix_caching, host_pages=200 if mode == "swap" else 0)
        requests = [house.scheduler.add(spec(name, 16, 200, seed=i)) for i, name in enumerate("abcd")]
        house.run()
        assert house.scheduler.preemptions[mode] > 0
        assert house.scheduler.preemptions.total() == house.scheduler.preemptions[mode]
        assert [request.output for request in requests] == [expected(request) for request in requests]
        counts[mode] = house.device.num_tokens
        if mode == "swap":
            assert len(house.scheduler.prefix.host) == 0 or prefix_caching
    useful = 4 * (16 + 199)
    assert counts["swap"] < counts["recompute"]
    assert counts["swap"] - useful <= house.scheduler.num_preemptions * (2 * PAGE), (
        "a page, and what was in flight"
    )


def test_a_swap_without_room_is_a_recomputation():
    house = swapping("swap", prefix_caching=False, host_pages=1)
    requests = [house.scheduler.add(spec(name, 16, 200, seed=i)) for i, name in enumerate("abcd")]
    house.run()
    assert house.scheduler.preemptions["recompute"] > 0
    assert [request.output for request in requests] == [expected(request) for request in requests]


def draw_prompt(rng: random.Random, stems: Sequence[Sequence[int]], max_len: int) -> tuple[int, ...]:
    stem = rng.choice(stems)
    head = stem[: rng.randint(0, min(len(stem), max_len - 2))]
    tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, max(1, max_len - 1 - len(head))))]
    return (*head, *tail)[: max_len - 1]


def random_house(rng: random.Random) -> House:
    page_size = rng.choice([1, 2, 4, 16])
    max_len = rng.choice([24, 60])
    seqs = rng.choice([1, 2, 5, 9])
    return House(
        make(
            -(-max_len // page_size) * rng.choice([1, 2, 3]),
            page_size,
            prefix_caching=rng.random() < 0.8,
            host_pages=(host := rng.choice([0, 1, 7, 60])),
            preemption_mode=rng.choice(["swap", "recompute"]) if host else "recompute",
            scheduling_policy=rng.choice(list(POLICIES)),
            window=rng.choice([0.0, 3.0]),
            ageing=rng.choice([1.0, 50.0]),
            max_len=max_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + rng.choice([1, 7, 40]),
            mixed_prefill_tokens=rng.choice([None, 1, 6]),
            prefill_chunk=rng.choice([1, 5, 16, 64]),
            num_decode_steps=rng.choice([1, 1, 3, 8]),
        ),
        lag=rng.choice([0, 1, 1, 2]),
    )


def random_spec(rng: random.Random, index: int, house: House, stems: Sequence[Sequence[int]]) -> RequestSpec:
    max_len = house.scheduler.config.max_len
    tokens = draw_prompt(rng, stems, max_len)
    num_new = rng.randint(1, max_len - len(tokens))
    by_priority = house.scheduler.config.scheduling_policy == "priority"
    return RequestSpec(
        f"r{index}",
        tokens,
        SamplingParams(max_tokens=num_new, prompt_logprobs=rng.choice([None, None, None, 1])),
        frozenset({EOS}) if rng.random() < 0.5 else frozenset(),
        num_new,
        seed=rng.randrange(3),
        priority=rng.choice([0, 0, 1]) if by_priority else 0,
        arrival=house.now,
        cache_salt=rng.choice([None, None, None, "tenant"]),
    )


def check_budget(scheduler: Scheduler | SharedScheduler, plan: Plan) -> None:
    prefill = sum(len(piece.tokens) for piece in plan.prefill)
    assert 0 < len(plan.decode) + prefill <= scheduler.config.max_num_batched_tokens
    if plan.decode and scheduler.config.mixed_prefill_tokens:
        assert prefill <= scheduler.config.mixed_prefill_tokens


def simulate(seed: int, num_requests: int = 25) -> tuple[int, int, int]:
    """Random traffic that shares beginnings; returns tokens found, copies to the host, and preemptions."""
    rng = random.Random(seed)
    house = random_house(rng)
    scheduler = house.scheduler
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    requests: list[Request] = []
    aborted: list[Request] = []
    busy = True
    for _ in range(400 * num_requests):
        house.now += rng.random()
        while len(requests) < num_requests and rng.random() < 0.3:
            requests.append(scheduler.add(random_spec(rng, len(requests), house, stems)))
        live = [request for request in requests if request.finish_reason is None]
        if live and rng.random() < 0.03:
            aborted.append(rng.choice(live))
            scheduler.finish(aborted[-1], "abort")
        busy = house.step()
        if not busy and len(requests) == num_requests:
            break
    assert not busy, "livelock: the traffic does not end"
    assert scheduler.pool.num_used == 0
    assert sorted(map(id, house.ended + aborted)) == sorted(map(id, requests)), "each ends exactly once"
    for request in requests:
        want = expected(request)
        assert request.output == (want[: len(request.output)] if request in aborted else want)
    for plan in house.plans:
        check_budget(scheduler, plan)
    copies = sum(len(plan.saves) for plan in house.plans)
    return scheduler.prefix.counts.hits, copies, scheduler.num_preemptions


@pytest.mark.parametrize("block", range(8))
def test_random_traffic_that_shares_beginnings_ends_with_the_right_tokens(block: int):
    found, copies, preemptions = (
        sum(each)
        for each in zip(*(simulate(seed) for seed in range(block * 20, block * 20 + 20)), strict=True)
    )
    assert found > 0
    assert copies > 0
    assert preemptions > 0
