"""Continuous batching: which rows run next, on which pages, and what their tokens mean.

Rows join and leave at any step. `Scheduler.schedule` makes plan k + 1 while plan k is still on the device, so it
counts on every row going on; `Scheduler.commit` brings plan k's tokens, and a row that turns out to have ended
has its token of plan k + 1 dropped. Device work runs in plan order, so pages and slots are free for the next
plan as soon as the host lets go of them.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from jaxinfer.schedule.limits import SchedulerConfig, check_spec
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.plan import Admission, DecodeRow, Plan, PrefillPiece, Seats, make_seats
from jaxinfer.schedule.policies import POLICIES, Moment
from jaxinfer.schedule.prefix import Match, PrefixCache
from jaxinfer.schedule.request import FinishReason, Request, RequestRefused, RequestSpec, Update

MOST_PASSED = 64  # requests that wait for a prefix on its way, beyond which a step looks no further


class Scheduler:
    """Rows over ``max_num_seqs`` slots and one page pool, admitted by a policy; not thread-safe.

    Args:
      config: limits of a step, and the policy.
      pool: the pages, all free.
      prefix: the prefix cache over that pool, None for none.
      seats: its part of what several schedulers share, None where there is one.

    Attributes:
      waiting, running: requests, the most important first (`Request.rank`).
      preemptions: rows that gave way, by what became of their pages: ``recompute`` or ``swap``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        prefix: PrefixCache | None = None,
        seats: Seats | None = None,
    ):
        self.config = config
        self.pool = pool
        self.prefix = prefix or PrefixCache(pool, enabled=False)
        self.policy = POLICIES[config.scheduling_policy]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions: Counter[str] = Counter()
        self._live: dict[str, Request] = {}
        self._seats = seats or make_seats(config, pool)
        self._free_slots = list(self._seats.slots)  # a heap: low slots first
        self._page_table = self._seats.page_table
        # Plans that are not committed, and their result rows.
        self._planned: deque[tuple[int, list[Request]]] = deque()
        self._num_plans = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or a plan awaits its commit."""
        return bool(self._live or self._planned)

    @property
    def num_preemptions(self) -> int:
        """Rows that gave way so far."""
        return self.preemptions.total()

    def check(self, spec: RequestSpec) -> None:
        """Refuses a request that could never run; reads limits only, so any thread may ask.

        Raises:
          RequestRefused: with what was got and what would fit.
        """
        check_spec(spec, self.config, self.pool)

    def add(self, spec: RequestSpec) -> Request:
        """Puts a request in the queue, after those that are as important.

        Raises:
          RequestRefused: see `check`; also when its id is in use.
        """
        self.check(spec)
        if spec.request_id in self._live:
            raise RequestRefused(f"request_id {spec.request_id!r} is in use")
        return self.enqueue(self.make_request(spec))

    def make_request(self, spec: RequestSpec) -> Request:
        """Returns a request that came now and is in no queue."""
        return Request(spec, rank=(self.policy.rank(spec, self.config.ageing), next(self._seats.serial)))

    def enqueue(self, request: Request) -> Request:
        """Puts a request in the queue, after those that are as important."""
        self._live[request.spec.request_id] = request
        insort(self.waiting, request, key=_rank)
        return request

    def release(self, request: Request) -> Request:
        """Takes a request out of the queue, for another scheduler of the same seats."""
        self.waiting.remove(request)
        return self._live.pop(request.spec.request_id)

    def schedule(self, now: float = 0.0, num_steps: int | None = None) -> Plan | None:
        """Makes the next plan.

        Args:
          now: seconds on the engine's clock. num_steps: of decode, None for as many as `choose_num_steps` says.

        Returns:
          The plan, which must be run and committed after those before it, or None when nothing can run
          before a commit, or before `next_time`.
        """
        candidates = self._candidates(now)
        num_steps = num_steps or self.choose_num_steps(now)
        decode, pieces, sampled = self._plan_running(num_steps)
        admitted = self._admit(candidates, len(decode), pieces, sampled) if num_steps == 1 else []
        if not decode and not pieces:
            return None
        for request in self.running if self.prefix.enabled else ():
            if request.num_written // self.pool.page_size > request.prefix.num_registered:
                self.prefix.register(request)  # from here on, for later plans
        saves, loads = self.prefix.host.take_orders()
        plan = Plan(
            self._num_plans,
            tuple(admitted),
            tuple(decode),
            tuple(pieces),
            num_steps,
            self._page_table,
            saves,
            loads,
        )
        self._num_plans += 1
        self._planned.append((plan.step, sampled))
        return plan

    def next_time(self) -> float | None:
        """Returns when to ask again if `schedule` gave None and nothing is in flight: when the next ferry leaves."""
        if self.config.scheduling_policy != "ferry" or not self.waiting:
            return None
        return self.waiting[0].spec.arrival + self.config.window

    def commit(self, plan: Plan, tokens: Sequence[list[int]]) -> list[Update]:
        """Takes the sampled ids of the oldest plan that is not committed.

        Args:
          plan: that plan. tokens: a list of ``num_decode_steps`` ids for each of its result rows.

        Returns:
          One update a request that still ran; those that ended have their ``finish_reason``.
        """
        if not self._planned or self._planned[0][0] != plan.step or len(tokens) != len(self._planned[0][1]):
            raise ValueError(
                f"plan {plan.step} with {len(tokens)} rows is not the oldest that awaits its commit"
            )
        updates = []
        for row, request in enumerate(self._planned.popleft()[1]):
            if request.finish_reason is not None:
                continue  # it ended after this plan was made: its token is nobody's
            updates.append(Update(request, row, request.append(tokens[row])))
            if request.finish_reason is not None:
                self._drop(request)
        return updates

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request now, whatever it is doing, or corrects why it ended."""
        running = request.finish_reason is None
        request.finish_reason, request.stop_reason = reason, stop_reason
        if running:
            self._drop(request)

    def check_invariants(self) -> None:
        """Checks that pages are conserved, that slots are held once and that the table says what requests hold.

        Raises:
          RuntimeError: with what disagrees.
        """
        self.pool.check_conserved(request.pages for request in self.running)
        self.prefix.check_invariants()
        slots = sorted([request.slot for request in self.running] + self._free_slots)
        if slots != list(self._seats.slots):
            raise RuntimeError(f"slots held and free are {slots}")
        table = np.full_like(self._page_table, self.pool.num_pages)
        for request in self.running:
            table[request.slot, : len(request.pages)] = request.pages
        if not np.array_equal(table[slots], self._page_table[slots]):
            raise RuntimeError(f"page table {self._page_table[slots]} should be {table[slots]}")

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free_slots)

    def _candidates(self, now: float) -> Sequence[Request]:
        """Who is offered a row, in order; nobody when there is none."""
        if not self.waiting or not self._free_slots:
            return ()
        config = self.config
        moment = Moment(
            now,
            len(self.running),
            config.max_num_seqs,
            config.ageing,
            config.window,
            self.prefix.cached_tokens,
        )
        return self.policy.order(self.waiting, moment)

    def choose_num_steps(self, now: float) -> int:
        """Several tokens a row only when no prefill wants the device, all rows have them left and pages are free."""
        num_steps = self.config.num_decode_steps
        if num_steps == 1 or ((first := self._candidates(now)) and self._fits(first[0], self._spare_pages())):
            return 1
        num_pages = 0
        for request in self.running:
            left = request.num_left
            if request.num_written < request.num_prefill or 0 < left < num_steps:
                return 1
            if left:
                num_pages += self.pool.pages_for(request.num_written + num_steps) - len(request.pages)
        return num_steps if num_pages <= self.pool.num_free else 1

    def _plan_running(self, num_steps: int) -> tuple[list[DecodeRow], list[PrefillPiece], list[Request]]:
        """Plans the rows that run, the most important first; those at the end may have to give up their pages."""
        decode: list[DecodeRow] = []
        pieces: list[PrefillPiece] = []
        sampled: list[Request] = []
        ended_prefills: list[Request] = []
        running, index, num_decode = self.running, 0, 0
        if any(r.num_written < r.num_prefill for r in running):  # who else would ask
            num_decode = sum(r.num_written >= r.num_prefill and r.num_left > 0 for r in running)
        while index < len(running):  # it shrinks while it is walked
            request = running[index]
            index += 1
            position = request.num_written
            if position < request.num_prefill:
                budget = self._prefill_budget(num_decode, pieces)
                if budget and self._add_piece(request, budget, pieces):
                    ended_prefills.append(request)
            elif request.num_left > 0 and (
                position + num_steps <= len(request.pages) * self.pool.page_size  # most often, and fast
                or self._grow(request, position + num_steps)
            ):
                decode.append(DecodeRow(request.slot, request.spec.request_id, position))
                sampled.append(request)
                request.num_written = position + num_steps
                request.num_inflight += num_steps
        return decode, pieces, sampled + ended_prefills

    def _prefill_budget(self, num_decode: int, pieces: list[PrefillPiece]) -> int:
        if self.config.max_prefill_pieces is not None and len(pieces) >= self.config.max_prefill_pieces:
            return 0
        planned = sum(len(piece.tokens) for piece in pieces)
        budget = self.config.max_num_batched_tokens - num_decode - planned
        if num_decode:
            budget = min(budget, self.config.mixed_tokens(len(self.waiting) > 1) - planned)
        return budget

    def _admit(
        self,
        candidates: Sequence[Request],
        num_decode: int,
        pieces: list[PrefillPiece],
        sampled: list[Request],
    ) -> list[Admission]:
        """Gives slots to candidates while slots, pages and the step's budget last."""
        admitted: list[Admission] = []
        budget = self._prefill_budget(num_decode, pieces)
        if not candidates or (budget <= 0 and not self.policy.whole):
            return admitted
        spare = self._spare_pages()
        passed = 0
        for request in tuple(candidates):
            match = self.prefix.match(request)
            if not self.policy.whole and self.prefix.is_coming(request, match):
                passed += 1  # those behind it may go first, for it waits of its own will
                if passed == MOST_PASSED:
                    break
                continue
            if not self._fits(request, spare, match):
                break
            free = self.pool.num_free
            self._seat(request, match)
            admitted.append(_admission(request, request.known_tokens(0, request.num_written)))
            spare -= free - self.pool.num_free + self._pages_ahead(request)
            if budget > 0 and self._add_piece(request, budget, pieces):
                sampled.append(request)
            budget = self._prefill_budget(num_decode, pieces)
            if not self._free_slots or (budget <= 0 and not self.policy.whole):
                break
        return admitted

    def _seat(self, request: Request, match: Match) -> None:
        """Moves a request from the queue to a slot, with the pages that the prefix cache has of it."""
        self.waiting.remove(request)
        request.slot = heapq.heappop(self._free_slots)
        request.num_prefill = request.num_known
        self.prefix.take(request, match)
        self._page_table[request.slot, : len(request.pages)] = request.pages
        insort(self.running, request, key=_rank)

    def _fits(self, request: Request, spare: int, match: Match | None = None) -> bool:
        """Whether a waiting request may start: a slot, its tokens known, and pages for them and the next one."""
        if not self._free_slots or request.num_inflight:
            return False
        match = match or self.prefix.match(request)
        needed = self.pool.pages_for(min(request.num_known + 1, request.spec.num_positions))
        return needed - match.num_held <= spare

    def _spare_pages(self) -> int:
        """Free pages beyond what the running rows will soon want, see `_pages_ahead`."""
        return self.pool.num_free - sum(self._pages_ahead(request) for request in self.running)

    def _pages_ahead(self, request: Request) -> int:
        """Pages a running row lacks for its prefill and a page more.

        Without them a newcomer would be thrown out again as soon as its elders grow.
        """
        num_tokens = max(request.num_prefill, request.num_written) + self.pool.page_size
        return self.pool.pages_for(min(num_tokens, request.spec.num_positions)) - len(request.pages)

    def _add_piece(self, request: Request, budget: int, pieces: list[PrefillPiece]) -> bool:
        """Plans the next piece of a prefill; returns whether it is the last, which samples a token."""
        start, total = request.num_written, request.num_prefill
        stop = min(total, start + min(budget, self.config.prefill_chunk or budget))
        if not self._grow(request, stop):
            return False
        next_token = -1 if stop == total else request.known_tokens(stop, stop + 1)[0]
        tokens = request.known_tokens(start, stop)
        pieces.append(PrefillPiece(request.slot, request.spec.request_id, start, tokens, total, next_token))
        request.num_written = stop
        request.num_inflight += stop == total
        return stop == total

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Gives a row pages for ``num_tokens`` tokens, if need be by preempting; False if it went itself."""
        have = len(request.pages)
        need = -(-num_tokens // self.pool.page_size) - have
        if need <= 0:
            return True
        while self.pool.num_free < need:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        pages = self.pool.alloc(need)
        request.pages += pages
        self._page_table[request.slot, have : have + need] = pages
        return True

    def _preempt(self, request: Request) -> None:
        """Sends a row back to its place in the queue; its tokens in flight still count when they come."""
        swapped = self.config.preemption_mode == "swap" and self.prefix.save(request)
        self.preemptions["swap" if swapped else "recompute"] += 1
        self._leave(request, ended=False)
        insort(self.waiting, request, key=_rank)

    def _leave(self, request: Request, *, ended: bool) -> None:
        """Takes slot and pages from a running row."""
        self.running.remove(request)
        self._page_table[request.slot, : len(request.pages)] = self.pool.num_pages
        heapq.heappush(self._free_slots, request.slot)
        self.prefix.leave(request, ended=ended)
        request.slot, request.num_written = -1, 0

    def _drop(self, request: Request) -> None:
        """Forgets a request that ended, running or waiting."""
        del self._live[request.spec.request_id]
        if request.slot >= 0:
            self.prefix.register(request)  # the next turn of a conversation begins with this one
            self._leave(request, ended=True)
        else:
            self.waiting.remove(request)
            self.prefix.end(request)
        if request.finish_reason == "error":
            self.prefix.forget(request)


_rank = attrgetter("rank")


def _admission(request: Request, cached: tuple[int, ...]) -> Admission:
    spec = request.spec
    return Admission(
        request.slot,
        spec.request_id,
        spec.params,
        spec.stop_ids,
        len(spec.prompt),
        spec.choice,
        spec.seed,
        spec.pooling,
        cached,
    )
