"""A scheduler with a device that remembers, and what its requests should come to."""

from __future__ import annotations

from collections import deque
from typing import Any

from jaxinfer.schedule.limits import SchedulerConfig
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.plan import Plan
from jaxinfer.schedule.prefix import PrefixCache
from jaxinfer.schedule.request import Request, RequestSpec
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.schedule.shares import SharedScheduler
from tests.schedule.fake_device import FakeDevice, solo

PAGE = 4


def make(
    num_pages: int = 64,
    page_size: int = PAGE,
    *,
    prefix_caching: bool = False,
    host_pages: int = 0,
    **limits: Any,
) -> Scheduler:
    config: dict[str, Any] = {"max_num_seqs": 4, "max_len": 64, "max_num_batched_tokens": 32} | limits
    pool = PagePool(num_pages, page_size)
    return Scheduler(SchedulerConfig(**config), pool, PrefixCache(pool, host_pages, prefix_caching))


def spec(request_id: str, num_prompt: int = 3, num_new: int = 4, **fields) -> RequestSpec:
    prompt = tuple(range(1, num_prompt + 1))
    fields = {"params": SamplingParams(max_tokens=num_new), "max_new_tokens": num_new} | fields
    return RequestSpec(request_id, fields.pop("prompt", prompt), **fields)


class House:
    """A scheduler and a fake device, with commits ``lag`` plans late."""

    def __init__(self, scheduler: Scheduler | SharedScheduler, *, lag: int = 1):
        self.scheduler = scheduler
        self.device = FakeDevice(
            scheduler.config.max_num_seqs,
            scheduler.pool.num_pages,
            scheduler.pool.page_size,
            scheduler.prefix.host.num_slots,
        )
        self.lag = lag
        self.now = 0.0
        self.flight: deque[tuple[Plan, list[list[int]]]] = deque()
        self.ended: list[Request] = []
        self.plans: list[Plan] = []

    def step(self) -> bool:
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.flight.append((plan, self.device.run(plan)))
        if plan is None and not self.flight and self.scheduler.has_work:
            next_time = self.scheduler.next_time()
            assert next_time is not None, "stuck: work, and nothing runs"
            assert next_time > self.now, "stuck: the moment has come, and nothing runs"
            self.now = next_time
        if self.flight and (len(self.flight) > self.lag or plan is None):
            updates = self.scheduler.commit(*self.flight.popleft())
            assert all(update.num_tokens > 0 for update in updates)
            self.ended += [update.request for update in updates if update.request.finish_reason]
        self.scheduler.check_invariants()
        return self.scheduler.has_work

    def run(self) -> list[Request]:
        while self.step():
            pass
        assert not self.scheduler.has_work
        assert self.scheduler.pool.num_used == 0
        return self.ended


def expected(request: Request) -> list[int]:
    spec = request.spec
    return solo(spec.prompt, spec.seed, spec.max_new_tokens, spec.stop_ids)
