"""Who is admitted next: a rank that a request keeps for life, and the order in which the queue is offered a row.

Ranks also say who gives way when pages run out: the highest is preempted first. That a rank never changes is what
makes every request end: the lowest rank of all is never preempted, so it ends, and then another one is the lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from jaxinfer.schedule.request import Request, RequestSpec

LPM_WINDOW = 64  # requests, oldest first, among which `lpm` looks for the longest cached prefix


class Moment(NamedTuple):
    """What an order may look at.

    Attributes:
      now: seconds on the engine's clock. num_running: rows. num_rows: most rows at once.
      ageing: seconds, see `Policy`. window: seconds between ferries.
      cached: tokens of a request that the prefix cache holds.
    """

    now: float
    num_running: int
    num_rows: int
    ageing: float
    window: float
    cached: Callable[[Request], int]


class Policy(NamedTuple):
    """An admission policy.

    Attributes:
      rank: of a request and the ageing (seconds of waiting that weigh as much as a level of priority); ties are
        broken by arrival. order: who is offered a row now, of the waiting in order of rank.
      whole: whether those admitted together enter at once, whatever a step can compute.
    """

    rank: Callable[[RequestSpec, float], float]
    order: Callable[[Sequence[Request], Moment], Sequence[Request]]
    whole: bool = False


def by_arrival(spec: RequestSpec, ageing: float) -> float:
    """The same for all: first come, first served."""
    return 0.0


def by_priority(spec: RequestSpec, ageing: float) -> float:
    """Priority, lower first, and a level less for every ``ageing`` seconds of waiting.

    Of two requests that both wait, the difference of ``priority - waited / ageing`` does not change with time, so
    the moment of arrival may stand for the time waited, and the rank is fixed.
    """
    return spec.priority + spec.arrival / ageing


def in_rank(waiting: Sequence[Request], moment: Moment) -> Sequence[Request]:
    """The queue as it stands."""
    return waiting


def longest_prefix_first(waiting: Sequence[Request], moment: Moment) -> Sequence[Request]:
    """The longest cached prefix first, among the oldest; whoever has waited for ``ageing`` goes before them."""
    head = list(islice(waiting, LPM_WINDOW))

    def key(request: Request) -> tuple[bool, int]:
        patient = moment.now - request.spec.arrival < moment.ageing
        return patient, -moment.cached(request) if patient else 0

    return sorted(head, key=key)  # stable: equals stay in order


def ferry(waiting: Sequence[Request], moment: Moment) -> Sequence[Request]:
    """A full batch or all that wait, once nobody is aboard and the oldest has waited for the window."""
    if moment.num_running or not waiting:
        return ()
    full = len(waiting) >= moment.num_rows
    # `>=` on the very sum that `Scheduler.next_time` announces, so that the announced moment is late enough.
    return waiting if full or moment.now >= waiting[0].spec.arrival + moment.window else ()


POLICIES: dict[str, Policy] = {
    "priority": Policy(by_priority, in_rank),
    "fcfs": Policy(by_arrival, in_rank),
    "lpm": Policy(by_arrival, longest_prefix_first),
    "ferry": Policy(by_arrival, ferry, whole=True),
}
