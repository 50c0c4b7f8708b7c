"""Rows and pages in shares: a scheduler each, behind one door.

Where a mesh cuts rows, each share has slots and pages of its own, and a request stays with one while it runs: its pages
are nowhere else. A newcomer goes where most of its prefix lies, among those that are least busy; one that
still waits goes to a share that has a slot free and nobody to seat.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from jaxinfer.schedule.limits import SchedulerConfig
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.plan import Plan, Seats, make_seats
from jaxinfer.schedule.prefix import PrefixCache, PrefixCounts
from jaxinfer.schedule.request import FinishReason, Request, RequestRefused, RequestSpec, Update
from jaxinfer.schedule.scheduler import Scheduler


class SharedScheduler:
    """Schedulers of equal shares as one; see `Scheduler`, whose methods it has.

    Args:
      config: limits of all together; the shares divide ``max_num_seqs``.
      pools: the pages of each share, all free. enable_prefix_caching: see `PrefixCache`.
    """

    def __init__(
        self, config: SchedulerConfig, pools: Sequence[PagePool], enable_prefix_caching: bool = True
    ):
        num = len(pools)
        if config.max_num_seqs % num:
            raise ValueError(f"{num} shares: got max_num_seqs {config.max_num_seqs}, which they must divide")
        size = config.max_num_seqs // num
        budget = max(-(-config.max_num_batched_tokens // num), size + 1)
        own = replace(config, max_num_seqs=size, max_num_batched_tokens=budget)
        whole = make_seats(config, pools[0])
        self.config = config
        self.shares = [
            Scheduler(
                own,
                pool,
                PrefixCache(pool, enabled=enable_prefix_caching),
                Seats(range(i * size, (i + 1) * size), whole.page_table, whole.serial),
            )
            for i, pool in enumerate(pools)
        ]
        self.pool, self.prefix = SharedPool(pools), SharedPrefix([share.prefix for share in self.shares])
        self._page_table = whole.page_table
        self._owners: dict[str, Scheduler] = {}
        self._planned: deque[tuple[int, list[Plan | None]]] = deque()
        self._num_plans = 0

    @property
    def waiting(self) -> list[Request]:
        """Requests in the queues, share after share."""
        return [request for share in self.shares for request in share.waiting]

    @property
    def running(self) -> list[Request]:
        """Requests with a slot, share after share."""
        return [request for share in self.shares for request in share.running]

    @property
    def preemptions(self) -> Counter[str]:
        """Rows that gave way so far, by what became of their pages."""
        return sum((share.preemptions for share in self.shares), Counter())

    @property
    def num_preemptions(self) -> int:
        """Rows that gave way so far."""
        return self.preemptions.total()

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or a plan awaits its commit."""
        return any(share.has_work for share in self.shares)

    def check(self, spec: RequestSpec) -> None:
        """Refuses a request that could never run; see `Scheduler.check`."""
        self.shares[0].check(spec)

    def add(self, spec: RequestSpec) -> Request:
        """Puts a request in a queue; see `Scheduler.add`."""
        self.check(spec)
        if spec.request_id in self._owners:
            raise RequestRefused(f"request_id {spec.request_id!r} is in use")
        request = self.shares[0].make_request(spec)
        loads = [len(share.waiting) + len(share.running) for share in self.shares]
        slack = max(1, self.shares[0].config.max_num_seqs // 4)
        near = [i for i, load in enumerate(loads) if load <= min(loads) + slack]
        best = max(near, key=lambda i: (self.shares[i].prefix.cached_tokens(request), -loads[i]))
        self._owners[spec.request_id] = self.shares[best]
        return self.shares[best].enqueue(request)

    def schedule(self, now: float = 0.0) -> Plan | None:
        """Makes the next plan of all shares; see `Scheduler.schedule`."""
        self._balance()
        num_steps = min(share.choose_num_steps(now) for share in self.shares)  # they run in one call
        plans = [share.schedule(now, num_steps) for share in self.shares]
        made = [plan for plan in plans if plan is not None]
        if not made:
            return None
        self._planned.append((self._num_plans, plans))
        self._num_plans += 1
        return Plan(
            self._planned[-1][0],
            tuple(chain.from_iterable(plan.admitted for plan in made)),
            tuple(chain.from_iterable(plan.decode for plan in made)),
            tuple(chain.from_iterable(plan.prefill for plan in made)),
            num_steps,
            self._page_table,
        )

    def next_time(self) -> float | None:
        """Returns when to ask again; see `Scheduler.next_time`."""
        return min((t for share in self.shares if (t := share.next_time()) is not None), default=None)

    def commit(self, plan: Plan, tokens: Sequence[list[int]]) -> list[Update]:
        """Takes the sampled ids of the oldest plan that is not committed; see `Scheduler.commit`."""
        if not self._planned or self._planned[0][0] != plan.step or len(tokens) != plan.num_result_rows:
            raise ValueError(
                f"plan {plan.step} with {len(tokens)} rows is not the oldest that awaits its commit"
            )
        updates: list[Update] = []
        decoded, ended = 0, len(plan.decode)
        for share, own in zip(self.shares, self._planned.popleft()[1], strict=True):
            if own is None:
                continue
            num_last = own.num_result_rows - len(own.decode)
            rows = [*range(decoded, decoded + len(own.decode)), *range(ended, ended + num_last)]
            decoded, ended = decoded + len(own.decode), ended + num_last
            for update in share.commit(own, [tokens[row] for row in rows]):
                updates.append(update._replace(row=rows[update.row]))
                if update.request.finish_reason is not None:
                    del self._owners[update.request.spec.request_id]
        return updates

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request now, whatever it is doing, or corrects why it ended."""
        owner = self._owners.pop(request.spec.request_id, self.shares[0])
        owner.finish(request, reason, stop_reason)

    def check_invariants(self) -> None:
        """Checks every share, and that the live requests are theirs; raises RuntimeError with what disagrees."""
        for share in self.shares:
            share.check_invariants()
        live = {r.spec.request_id: share for share in self.shares for r in (*share.waiting, *share.running)}
        if live != self._owners:
            raise RuntimeError(f"owners {sorted(self._owners)} should be {sorted(live)}")

    def _balance(self) -> None:
        """Gives requests that wait for a slot to shares that have one and nobody to seat."""
        for idle in self.shares:
            if idle.waiting or not idle.num_free_slots:
                continue
            for crowded in sorted(self.shares, key=lambda share: -len(share.waiting)):
                moved = [request for request in crowded.waiting if not request.num_inflight]
                if crowded.num_free_slots or not moved:
                    continue
                for request in moved[: idle.num_free_slots - len(idle.waiting)]:
                    self._owners[request.spec.request_id] = idle
                    idle.enqueue(crowded.release(request))


def make_scheduler(
    config: SchedulerConfig, pools: Sequence[PagePool], enable_prefix_caching: bool, num_host_pages: int = 0
) -> Scheduler | SharedScheduler:
    """Returns the scheduler of one pool, with ``num_host_pages`` beside it, or of the pools of several shares."""
    if len(pools) > 1:
        return SharedScheduler(config, pools, enable_prefix_caching)
    return Scheduler(config, pools[0], PrefixCache(pools[0], num_host_pages, enable_prefix_caching))


class SharedPool:
    """What is told of several pools as of one."""

    def __init__(self, pools: Sequence[PagePool]):
        self._pools = pools
        self.page_size = pools[0].page_size
        self.num_pages = sum(pool.num_pages for pool in pools)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, cached ones included."""
        return sum(pool.num_free for pool in self._pools)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose content is remembered."""
        return sum(pool.num_cached for pool in self._pools)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return sum(pool.num_used for pool in self._pools)

    @property
    def num_shared(self) -> int:
        """Pages that more than one holds."""
        return sum(pool.num_shared for pool in self._pools)

    def states(self) -> bytes:
        """Returns a byte a page, share after share; see `PagePool.states`."""
        return b"".join(pool.states() for pool in self._pools)


class SharedPrefix:
    """What is told of several prefix caches as of one."""

    def __init__(self, parts: Sequence[PrefixCache]):
        self._parts = parts
        self.enabled, self.host = parts[0].enabled, parts[0].host

    @property
    def counts(self) -> PrefixCounts:
        """Running totals of all."""
        counts = [part.counts for part in self._parts]
        return PrefixCounts(sum(c.queries for c in counts), sum(c.hits for c in counts))

    def clear(self) -> None:
        """Forgets all that nobody holds."""
        for part in self._parts:
            part.clear()
