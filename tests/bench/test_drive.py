"""When requests leave, how many at once, and what becomes of those that never end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from jaxinfer.bench.config import BenchConfig
from jaxinfer.bench.drive import Drive
from jaxinfer.bench.load import MakeTokens, Shot, make_words
from jaxinfer.bench.results import RequestFailed, Result
from jaxinfer.bench.run import SCHEMA, Target, make_record, run_bench


class FakeClient:
    """Answers after some turns of the event loop, a turn a token; fails for some indices."""

    def __init__(self, now: list[float], fails: Sequence[int] = (), hangs: Sequence[int] = ()) -> None:
        self.now, self.fails, self.hangs = now, fails, hangs
        self.running = self.most = 0
        self.sent: list[tuple[int, float]] = []

    @property
    def make_tokens(self) -> MakeTokens:
        return make_words

    async def send(self, shot: Shot, result: Result) -> None:
        self.sent.append((shot.index, self.now[0]))
        result.sent = self.now[0]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if shot.index in self.hangs:
                await asyncio.Event().wait()
            for _ in range(shot.max_tokens):
                await asyncio.sleep(0)
                result.times.append(self.now[0])
            if shot.index in self.fails:
                raise RequestFailed("HTTP 503", "full")
            result.output_tokens, result.end = shot.max_tokens, self.now[0]
        finally:
            self.running -= 1


def shots_of(count: int, at: Sequence[float] | None = None, max_tokens: int = 3) -> list[Shot]:
    return [Shot(i, None if at is None else at[i], "a", max_tokens, 1) for i in range(count)]


def drive(
    client: FakeClient, shots: Sequence[Shot], num_clients: int | None, **options: object
) -> list[Result]:
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)  # what was sent before is sent before the clock moves
        client.now[0] += seconds

    return asyncio.run(
        Drive(client, lambda: client.now[0], sleep=sleep, **options).run(shots, num_clients)  # pyright: ignore
    )


@pytest.mark.parametrize(("num_clients", "most"), [(1, 1), (4, 4), (50, 10)])
def test_closed_loop_keeps_its_clients_busy_and_no_more(num_clients: int, most: int):
    client = FakeClient([100.0])
    results = drive(client, shots_of(10), num_clients)
    assert client.most == most
    assert [result.index for result in results] == list(range(10))
    assert all(result.output_tokens == 3 and result.late == 0 for result in results)


def test_requests_leave_when_they_are_due():
    client = FakeClient([100.0])
    results = drive(client, shots_of(4, [0.0, 0.5, 0.5, 3.0]), None)
    assert client.sent == [(0, 100.0), (1, 100.5), (2, 100.5), (3, 103.0)]
    assert [(result.sent, result.late) for result in results] == [
        (0.0, 0.0),
        (0.5, 0.0),
        (0.5, 0.0),
        (3.0, 0.0),
    ]


def test_what_leaves_late_says_so():
    """A clock that a busy machine has moved on by two seconds when the first was due after one."""
    now = [0.0]
    client = FakeClient(now)

    async def sleep(seconds: float) -> None:
        now[0] += seconds + 2.0

    async def main() -> list[Result]:
        return await Drive(client, lambda: now[0], sleep=sleep).run(shots_of(2, [1.0, 2.5]), None)

    first, second = asyncio.run(main())
    assert (first.sent, first.late) == (3.0, 2.0)
    assert (second.sent, second.late) == (3.0, 0.5)


def test_failures_are_counted_and_the_rest_goes_on():
    told: list[int] = []
    client = FakeClient([0.0], fails=[1])
    results = drive(client, shots_of(4), 2, on_done=lambda result: told.append(result.index))
    assert [result.error for result in results] == [None, "HTTP 503", None, None]
    assert results[1].detail == "full"
    assert sorted(told) == [0, 1, 2, 3]


def test_request_without_an_end_is_given_up():
    client = FakeClient([0.0], hangs=[0])
    (result,) = drive(client, shots_of(1), None, timeout=0.001)
    assert (result.error, result.detail) == ("timeout", "no whole answer after 0.001 s")
    assert client.running == 0


def test_targets_take_turns_and_get_the_same_load():
    order: list[str] = []
    now = [0.0]
    targets = [Target(name, FakeClient(now), {"url": name}) for name in ("a", "b")]
    config = BenchConfig.read(
        {"requests": 3, "arrivals": "closed:2", "repeat": 3, "warmup": 1, "output_len": "1:4"}
    )

    def note(target: Target, _: Result) -> None:
        if order[-1:] != [target.name]:
            order.append(target.name)

    asyncio.run(run_bench(targets, config, note, clock=lambda: now[0]))
    assert order == ["a", "b", "a", "b"]  # a b, b a, a b
    assert [len(target.runs) for target in targets] == [3, 3]
    counts = [[result.output_tokens for run in target.runs for result in run] for target in targets]
    assert counts[0] == counts[1]
    record = make_record(targets, config, "jaxinfer bench")
    assert record["schema"] == SCHEMA
    assert [target["url"] for target in record["targets"]] == ["a", "b"]
    assert len(record["targets"][0]["runs"][2]["requests"]) == 3
    assert record["load"]["seed"] == 0
    assert {"hardware", "versions", "ratios"} <= record.keys()


def test_target_that_answers_no_warm_up_is_refused():
    target = Target("a", FakeClient([0.0], fails=[0, 1]))
    config = BenchConfig.read({"requests": 3, "warmup": 2})
    with pytest.raises(RequestFailed, match=r"a: HTTP 503: full \(in the warm-up\)"):
        asyncio.run(run_bench([target], config))
