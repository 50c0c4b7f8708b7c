from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.schedule.request import Request, RequestRefused, RequestSpec
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.schedule.fake_device import EOS, VOCAB, solo
from tests.schedule.house import PAGE, House, expected, make, spec


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_request_alone_gets_its_tokens_and_ends_by_length(lag: int, num_steps: int):
    house = House(make(num_decode_steps=num_steps), lag=lag)
    request = house.scheduler.add(spec("a", num_new=9))
    assert house.run() == [request]
    assert request.output == expected(request)
    assert (request.finish_reason, request.stop_reason) == ("length", None)
    # 3 prompt tokens and 8 of the 9 outputs are computed: max_tokens is known ahead, nothing runs beyond it.
    assert house.device.num_tokens == 11


def test_rows_join_and_leave_at_any_step():
    house = House(make())
    first = house.scheduler.add(spec("a", num_new=12))
    for _ in range(4):
        house.step()
    second = house.scheduler.add(spec("b", num_new=2))
    assert house.run() == [second, first]
    assert [request.output for request in (first, second)] == [expected(first), expected(second)]
    assert any(plan.decode and plan.prefill for plan in house.plans), "no mixed step"


def test_decode_rows_come_first_and_prefill_fills_the_budget():
    house = House(make(max_num_batched_tokens=10, max_num_seqs=3))
    house.scheduler.add(spec("a", num_prompt=3, num_new=20))
    house.step()
    house.scheduler.add(spec("b", num_prompt=25))
    house.scheduler.add(spec("c", num_prompt=4))
    house.run()
    cuts = [[(p.request_id, len(p.tokens)) for p in plan.prefill] for plan in house.plans[:5]]
    assert cuts == [[("a", 3)], [("b", 9)], [("b", 9)], [("b", 7), ("c", 2)], [("c", 2)]]
    assert all([row.request_id for row in plan.decode][:1] == ["a"] for plan in house.plans[1:5])


@pytest.mark.parametrize(("limits", "cuts"), [({"prefill_chunk": 4}, [4, 4, 1]), ({}, [9])])
def test_prefill_chunks(limits: dict[str, Any], cuts: list[int]):
    house = House(make(**limits))
    request = house.scheduler.add(spec("a", num_prompt=9))
    house.run()
    pieces = [piece for plan in house.plans for piece in plan.prefill]
    assert [len(piece.tokens) for piece in pieces] == cuts
    assert [piece.is_last for piece in pieces] == [False] * (len(cuts) - 1) + [True]
    assert [piece.next_token for piece in pieces] == [*(p.tokens[0] for p in pieces[1:]), -1]
    assert request.output == expected(request)


def test_max_prefill_pieces_limits_a_step():
    house = House(make(max_prefill_pieces=1))
    for name in "abc":
        house.scheduler.add(spec(name))
    house.run()
    assert [len(plan.prefill) for plan in house.plans[:4]] == [1, 1, 1, 0]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_stop_token_ends_the_row_and_later_tokens_are_dropped(lag: int, num_steps: int):
    whole = solo((5, 6), 1, 12, frozenset())
    stop = next(token for i, token in enumerate(whole) if i >= 3 and token not in whole[:i])
    house = House(make(num_decode_steps=num_steps), lag=lag)
    params = SamplingParams(max_tokens=12, stop_token_ids=[stop])
    asked = spec("a", params=params, prompt=(5, 6), seed=1, num_new=12, stop_ids=frozenset({stop}))
    request = house.scheduler.add(replace(asked, max_new_tokens=12))
    house.run()
    assert request.output == whole[: whole.index(stop) + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)


def test_an_end_token_of_the_model_has_no_stop_reason_and_min_tokens_keeps_it_from_ending():
    whole = solo((4,), 0, 5, frozenset())
    for min_tokens, count in [(0, 1), (2, 5)]:
        params = SamplingParams(max_tokens=5, min_tokens=min_tokens)
        house = House(make())
        stop_ids = frozenset({whole[0]})
        assert whole[0] not in whole[1:]
        request = house.scheduler.add(
            spec("a", params=params, prompt=(4,), max_new_tokens=5, stop_ids=stop_ids)
        )
        house.run()
        assert request.output == whole[:count]
        assert request.stop_reason is None


def test_several_tokens_a_step_only_when_nothing_else_is_to_be_done():
    house = House(make(num_decode_steps=4, max_num_seqs=2))
    house.scheduler.add(spec("a", num_new=30))
    house.step()
    house.scheduler.add(spec("b", num_prompt=40, num_new=9))  # two pieces: 31 beside a's row, then 9
    waiting = house.scheduler.add(spec("c", num_new=4))  # no slot: must not keep the others from going fast
    house.run()
    shapes = [(len(plan.decode), len(plan.prefill), plan.num_decode_steps) for plan in house.plans]
    assert shapes[:5] == [(0, 1, 1), (1, 1, 1), (1, 1, 1), (2, 0, 4), (2, 0, 4)]
    assert waiting.output == expected(waiting)
    for plan in house.plans:
        assert plan.num_decode_steps == 1 or not plan.prefill


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_trap_16_preempted_rows_compute_prompt_and_output_anew(lag: int):
    house = House(make(num_pages=54, page_size=PAGE, max_len=256, max_num_batched_tokens=64), lag=lag)
    requests = [
        house.scheduler.add(spec(name, num_prompt=16, num_new=200, seed=i)) for i, name in enumerate("abcd")
    ]
    house.run()
    assert house.scheduler.num_preemptions > 0
    for request in requests:
        assert request.output == expected(request)
        assert len(request.output) == 200
    admissions = [admission for plan in house.plans for admission in plan.admitted]
    assert len(admissions) == 4 + house.scheduler.num_preemptions
    assert {admission.prompt_len for admission in admissions} == {16}
    again = [piece for plan in house.plans for piece in plan.prefill if piece.total > 16]
    assert again, "no prefill of prompt and output"


def test_the_youngest_goes_first_and_comes_back_first():
    house = House(make(num_pages=12, max_num_seqs=3))
    for name in "abcd":
        house.scheduler.add(spec(name, num_prompt=8, num_new=17))
    while not house.scheduler.num_preemptions:
        house.step()
    assert [request.spec.request_id for request in house.scheduler.waiting] == ["c", "d"]
    assert [request.spec.request_id for request in house.run()][:2] == ["a", "b"]


def test_a_newcomer_does_not_take_the_page_that_an_elder_needs_next():
    house = House(make(num_pages=4))
    house.scheduler.add(spec("elder", num_prompt=8, num_new=9))
    newcomer = house.scheduler.add(
        spec("newcomer", num_prompt=6)
    )  # the two pages that are free, one of them not for long
    assert house.run()[-1] is newcomer
    assert house.scheduler.num_preemptions == 0


def test_priority_chooses_who_waits():
    house = House(make(max_num_seqs=1))
    requests = [
        house.scheduler.add(spec(name, num_new=3, priority=priority))
        for name, priority in [("a", 1), ("b", 1), ("c", 0), ("d", 1)]
    ]
    assert [request.spec.request_id for request in house.scheduler.waiting] == ["c", "a", "b", "d"]
    house.run()
    assert all(request.output == expected(request) for request in requests)


def test_priority_chooses_who_is_preempted():
    house = House(make(num_pages=12, max_num_seqs=3))
    for name, priority in [("a", 2), ("b", 0), ("c", 1)]:
        house.scheduler.add(spec(name, num_prompt=8, num_new=17, priority=priority))
    while not house.scheduler.num_preemptions:
        house.step()
    assert [request.spec.request_id for request in house.scheduler.waiting] == ["a"]
    assert all(request.output == expected(request) for request in house.run())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_prompt": 0}, "no tokens"),
        ({"num_prompt": 64}, "64 tokens and 4 more"),
        ({"num_prompt": 60, "num_new": 5}, "at most 64 together"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"num_prompt": 20, "num_new": 14}, "need 9 pages, the pool has 8"),
    ],
)
def test_what_can_never_fit_is_refused_with_both_numbers(fields: dict[str, int], words: str):
    scheduler = make(num_pages=8)
    with pytest.raises(RequestRefused, match=words):
        scheduler.add(spec("a", **fields))
    assert not scheduler.has_work


def test_the_largest_request_that_fits_runs():
    house = House(make(num_pages=8))
    request = house.scheduler.add(
        spec("a", num_prompt=20, num_new=13)
    )  # 32 cached tokens: 8 pages to the last cell
    house.run()
    assert request.output == expected(request)


def test_trap_15_a_pool_that_just_fits_eight_requests():
    house = House(make(num_pages=40, max_num_seqs=8, max_num_batched_tokens=64))
    requests = [
        house.scheduler.add(spec(str(i), num_prompt=4 + i, num_new=21 - 4 - i, seed=i)) for i in range(8)
    ]
    house.run()
    assert house.scheduler.num_preemptions == 0
    assert [request.output for request in requests] == [expected(request) for request in requests]


def test_an_id_in_use_is_refused_and_may_be_used_again_later():
    house = House(make())
    first = house.scheduler.add(spec("a"))
    with pytest.raises(RequestRefused, match="'a' is in use"):
        house.scheduler.add(spec("a"))
    house.step()
    house.scheduler.finish(first, "abort")
    second = house.scheduler.add(spec("a", num_prompt=5, seed=3))  # the first one's plan is still in flight
    house.run()
    assert first.output == []
    assert second.output == expected(second)


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_moment(steps: int):
    house = House(make(num_pages=9, prefill_chunk=4, max_num_batched_tokens=8))
    victim = house.scheduler.add(spec("v", num_prompt=9, num_new=8))
    other = house.scheduler.add(spec("o", num_prompt=9, num_new=8))
    for _ in range(steps):
        house.step()
    house.scheduler.finish(victim, "abort")
    house.scheduler.check_invariants()
    assert house.run() == [other]
    assert victim.finish_reason == "abort"
    assert victim.output == expected(victim)[: len(victim.output)]
    assert other.output == expected(other)


def test_commits_out_of_order_are_refused():
    scheduler = make()
    scheduler.add(spec("a"))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(ValueError, match="plan 1 with 1 rows is not the oldest"):
        scheduler.commit(second, [[1]])
    with pytest.raises(ValueError, match="plan 0 with 2 rows"):
        scheduler.commit(first, [[1], [1]])


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 32}, "must exceed max_num_seqs"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"num_decode_steps": 0}, "num_decode_steps"),
        ({"max_num_waiting": -1}, "max_num_waiting must be at least 0"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        make(**limits)


def simulate(seed: int, num_requests: int) -> int:
    """Random traffic on a random house: every request ends once, with its own tokens; returns preemptions."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    max_len = rng.choice([24, 60])
    num_pages = -(-max_len // page_size) * rng.choice([1, 2, 3])
    seqs = rng.choice([1, 2, 5, 9])
    house = House(
        make(
            num_pages,
            page_size,
            max_len=max_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + rng.choice([1, 7, 40]),
            prefill_chunk=rng.choice([1, 5, 16, 64]),
            max_prefill_pieces=rng.choice([1, 2, 9]),
            num_decode_steps=rng.choice([1, 1, 3, 8]),
        ),
        lag=rng.choice([0, 1, 1, 2]),
    )
    scheduler = house.scheduler
    requests: list[Request] = []
    aborted: list[Request] = []
    busy = True
    for _ in range(200 * num_requests):
        while len(requests) < num_requests and rng.random() < 0.3:
            num_prompt = rng.randint(1, max_len - 1)
            num_new = rng.randint(1, max_len - num_prompt)
            asked = RequestSpec(
                f"r{len(requests)}",
                tuple(rng.randrange(VOCAB) for _ in range(num_prompt)),
                SamplingParams(max_tokens=num_new),
                frozenset({EOS}) if rng.random() < 0.5 else frozenset(),
                num_new,
                seed=rng.randrange(99),
                priority=rng.choice([0, 0, 1]) if seed % 2 else 0,
            )
            requests.append(scheduler.add(asked))
        live = [request for request in requests if request.finish_reason is None]
        if live and rng.random() < 0.02:
            aborted.append(rng.choice(live))
            scheduler.finish(aborted[-1], "abort")
        busy = house.step()
        if not busy and len(requests) == num_requests:
            break
    assert not busy, "livelock: the traffic does not end"
    assert not scheduler.has_work
    assert sorted(map(id, house.ended + aborted)) == sorted(map(id, requests)), "each ends exactly once"
    for request in requests:
        assert request.num_inflight == 0 or request.finish_reason != "length"
        want = expected(request)
        assert request.output == (want[: len(request.output)] if request in aborted else want)
        if request not in aborted:
            by_stop = bool(request.spec.stop_ids) and want[-1] == EOS
            assert request.finish_reason == ("stop" if by_stop else "length")
    first_admitted = dict.fromkeys(int(a.request_id[1:]) for plan in house.plans for a in plan.admitted)
    for priority in (0, 1):
        alike = [i for i in first_admitted if requests[i].spec.priority == priority]
        assert alike == sorted(alike), "of the same priority, first come, first served"
    for plan in house.plans:
        num_tokens = len(plan.decode) + sum(len(piece.tokens) for piece in plan.prefill)
        assert 0 < num_tokens <= scheduler.config.max_num_batched_tokens
    return scheduler.num_preemptions


@pytest.mark.parametrize("block", range(8))
def test_random_traffic_always_ends_with_the_right_tokens(block: int):
    preemptions = sum(simulate(seed, num_requests=25) for seed in range(block * 15, block * 15 + 15))
    assert preemptions > 0, "the pools of this block are too roomy to test preemption"
