"""The loop: submit requests, step, read what came; the only place that drives scheduler and runner together."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Unpack

from jaxinfer.engine.choice import Choice
from jaxinfer.engine.errors import EngineDraining, EngineError
from jaxinfer.engine.handle import Handle
from jaxinfer.engine.intake import Check, Intake, Prompt, check_room
from jaxinfer.engine.interrupts import hold_interrupts
from jaxinfer.engine.metrics import EngineMetrics, EngineStats
from jaxinfer.engine.options import RequestOptions
from jaxinfer.engine.outputs import Delta, PositionLogprobs, RequestOutput
from jaxinfer.engine.protocol import Runner, StepResult
from jaxinfer.engine.views import count_step, explain, read_stats
from jaxinfer.schedule.plan import Plan
from jaxinfer.schedule.request import FinishReason, Request, RequestRefused, Update
from jaxinfer.schedule.sampling_params import DRAWS, SamplingParams
from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.schedule.shares import SharedScheduler
from jaxinfer.text import Tokenizer

_log = logging.getLogger(__name__)
NUM_EXPLAINED = 1000  # requests, the latest, of which `explain_prefix` can tell


class Engine:
    """Turns prompts into tokens, any number of them together.

    `submit` and `abort` may be called from any thread; everything else belongs to the thread that steps.

    Args:
      scheduler: decides each step. runner: does it.
      tokenizer: the model's. vocab_size: ids below it may be given and drawn.
      eos_ids: the model's end tokens. draws: of `DRAWS`, what requests may ask for.
      check: refuses settings and end ids that the device cannot hold, such as `SlotCaps.check`; None refuses none.
      clock: seconds, monotonic. sleep: waits for some of them.

    Attributes:
      draining: set to take nothing new. wake_at: when a step may have something to do again, None when it has now.
    """

    def __init__(
        self,
        scheduler: Scheduler | SharedScheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        draws: Collection[str] = DRAWS,
        check: Check | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.scheduler, self.runner, self.tokenizer = scheduler, runner, tokenizer
        self.vocab_size, self.eos_ids, self.draws = vocab_size, tuple(eos_ids), tuple(draws)
        max_len = scheduler.config.max_len
        self._intake = Intake(tokenizer, vocab_size, self.eos_ids, self.draws, check, max_len, clock)
        self.clock, self._sleep = clock, sleep
        self.metrics = EngineMetrics()
        self.failure: BaseException | None = None
        self.draining = False
        self.wake_at: float | None = None
        self._live: set[str] = set()  # the scheduler's ids of choices, from submission to the end
        self._door = threading.Lock()  # held by who submits, never by who steps
        self._deadlines: list[tuple[float, int, Handle]] = []  # a heap
        self._recent: OrderedDict[str, Request] = OrderedDict()
        self._serial = itertools.count()
        self._handles: dict[str, Handle] = {}  # by request id, from submission to the end
        self._rows: dict[str, tuple[Handle, Choice]] = {}  # by the scheduler's id
        self._inbox: deque[Handle | str] = deque()  # requests to add, ids to abort
        self._flight: deque[tuple[Plan, object]] = deque()  # dispatched, not committed
        self._touched: dict[Handle, None] = {}  # in order; what the step brought something for

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.failure is None and bool(self._inbox or self._flight or self.scheduler.has_work)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Handle:
        """Checks a request and queues it.

        Args:
          prompt: text, or token ids as they are to run.
          params: sampling settings, vLLM's defaults when None.
          stream: keep what every step adds in ``deltas``.
          options: see `RequestOptions`.

        Raises:
          ValueError: a request that could never run, with what was got and what would work.
          QueueFull: as many wait as may; a ValueError too.
          EngineError: the engine failed earlier, or is draining.
        """
        handle = self.prepare(prompt, params, stream=stream, **options)
        self.enqueue(handle)
        return handle

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Handle:
        """Checks a request as `submit` does, and does not queue it."""
        self._check_open()
        handle = self._intake.read(prompt, params, stream, options)
        self.scheduler.check(handle.choices[0].spec)
        return handle

    def enqueue(self, handle: Handle) -> None:
        """Queues what `prepare` returned, once.

        Raises:
          RequestRefused: its request id is that of a live request. QueueFull: as many wait as may.
          EngineError: the engine failed earlier, or is draining.
        """
        name = handle.request_id
        with self._door:
            check_room(self.scheduler.config, len(handle.choices), len(self._live), self.metrics.e2e)
            if self._handles.setdefault(name, handle) is not handle:
                raise RequestRefused(f"request_id: {name!r} is that of a live request, give another")
            try:
                self._check_open()  # again, for the loop may have failed since `prepare`
            except EngineError:
                self._handles.pop(name, None)
                raise
            self._live.update(choice.spec.request_id for choice in handle.choices)
            self._inbox.append(handle)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise EngineError("the engine failed earlier and takes no requests") from self.failure
        if self.draining:
            raise EngineDraining("the engine is shutting down and takes no requests")

    def is_live(self, request_id: str) -> bool:
        """Returns whether a request has this name; one that was aborted keeps it until the next step."""
        return request_id in self._handles

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step, keeping what came so far; a name that is not live is ignored."""
        self._inbox.append(request_id)

    def step(self) -> list[Handle]:
        """Starts the next plan, then takes in the tokens of the one before it.

        Ctrl-C in the main thread waits for its end: nobody could go on from half a step.

        Returns:
          The handles that something came for: tokens, or an end.

        Raises:
          EngineError: the scheduler or the runner failed; every request in flight has ended with ``error``.
        """
        if self.failure is not None:
            raise EngineError("the engine failed earlier") from self.failure
        self._touched = {}
        try:
            with hold_interrupts():
                self._empty_inbox()
                self._expire()
                self._advance()
        except Exception as error:
            self._fail(error)
            raise EngineError(
                f"a step failed, all requests in flight ended with 'error': {_describe(error)}"
            ) from error
        return list(self._touched)

    def run_until_done(self) -> None:
        """Steps until nothing is left to do."""
        while self.has_work:
            self.step()
            self._rest()

    def stream(self, handle: Handle) -> Generator[Delta, None, None]:
        """Steps and yields what comes for one request submitted with ``stream=True``; leaving early aborts it."""
        try:
            while True:
                finished = handle.finished
                while handle.deltas:
                    yield handle.deltas.popleft()
                if finished:
                    return
                self.step()
                self._rest()
        finally:
            if not handle.finished:
                self.abort(handle.request_id)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[Handle], None] | None = None,
    ) -> list[RequestOutput]:
        """Runs prompts to their ends; all are checked before the first runs.

        Args:
          prompts: texts or lists of token ids. params: one for all, or one each.
          on_finish: called with each handle as it ends.

        Returns:
          The results in the order of ``prompts``.
        """
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"params: got {len(each)} for {len(prompts)} prompts, give one or as many")
        handles = [self.prepare(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        self.run(handles, on_finish=on_finish)
        return [handle.output() for handle in handles]

    def run(self, handles: Sequence[Handle], *, on_finish: Callable[[Handle], None] | None = None) -> None:
        """Runs what `prepare` returned to its end; leaving early aborts it. ``on_finish``: see `generate`."""
        mine: dict[Handle, None] = {}  # queued: a name that was refused is another request's
        try:
            for handle in handles:
                self.enqueue(handle)
                mine[handle] = None
            while not all(handle.finished for handle in handles):
                for handle in self.step():
                    if on_finish is not None and handle.finished and handle in mine:
                        on_finish(handle)
                self._rest()
        finally:  # Ctrl-C, or an error of `on_finish`: nobody is left to read the others
            for handle in mine:
                if not handle.finished:
                    self.abort(handle.request_id)

    def stats(self) -> EngineStats:
        """Returns counts of this moment; any thread may ask."""
        queued = sum(len(item.choices) for item in tuple(self._inbox) if isinstance(item, Handle))
        return read_stats(self.scheduler, queued, len(getattr(self.runner, "compilations", ())))

    def page_states(self) -> bytes:
        """Returns a byte a page: 0 free, 1 in use, 2 shared, 3 cached; any thread may ask."""
        return self.scheduler.pool.states()

    def explain_prefix(self, request_id: str) -> dict[str, object] | None:
        """Returns what the prefix cache did for one of the latest requests, and why not more; None for others."""
        request = self._recent.get(request_id)
        return None if request is None else explain(request)

    def _rest(self) -> None:
        """Waits where a step has nothing to do yet."""
        if self.wake_at is not None and not self._inbox:
            self._sleep(max(0.0, self.wake_at - self.clock()))

    def _expire(self) -> None:
        """Ends what has run out of time."""
        if len(self._deadlines) > 64 + 2 * len(self._handles):  # most have ended long before their time
            self._deadlines = sorted(one for one in self._deadlines if not one[2].finished)
        while self._deadlines and (self._deadlines[0][2].finished or self._deadlines[0][0] <= self.clock()):
            handle = heapq.heappop(self._deadlines)[2]
            if not handle.finished:
                self._end(handle, "timeout")

    def _empty_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Handle):
                for choice in item.choices:
                    choice.request = self.scheduler.add(choice.spec)
                    self._rows[choice.spec.request_id] = item, choice
                self.metrics.prompt_tokens += len(item.prompt_token_ids)
                self._recent[item.request_id] = item.choices[0].request
                if len(self._recent) > NUM_EXPLAINED:
                    self._recent.popitem(last=False)
                if item.deadline is not None:
                    heapq.heappush(self._deadlines, (item.deadline, next(self._serial), item))
            elif item in self._handles:
                self._end(self._handles[item], "abort")

    def _advance(self) -> None:
        now = self.clock()
        plan = self.scheduler.schedule(now)
        self.wake_at = None
        if plan is None and not self._flight and self.scheduler.has_work:
            times = [self.scheduler.next_time(), self._deadlines[0][0] if self._deadlines else None]
            self.wake_at = min((time for time in times if time is not None), default=None)
        if plan is not None:
            self._flight.append((plan, self.runner.dispatch(plan)))
            for admission in plan.admitted:
                handle, _ = self._rows[admission.request_id]
                if handle.first_scheduled is None:
                    handle.first_scheduled = now
        if len(self._flight) > 1 or (plan is None and self._flight):
            self._take_in(*self._flight[0])

    def _take_in(self, plan: Plan, pending: object) -> None:
        """Commits the oldest plan in flight and hands its tokens on."""
        result = self.runner.collect(pending)
        self._flight.popleft()
        now = self.clock()
        for piece, entries, vectors in itertools.zip_longest(
            plan.prefill, result.prompt_logprobs, result.pooled
        ):
            if (entries is not None or vectors is not None) and piece.request_id in self._rows:
                handle, choice = self._rows[piece.request_id]
                try:
                    if entries is not None:
                        choice.add_prompt_logprobs(entries, piece.start)
                    if vectors is not None and choice.pooled is not None:
                        choice.pooled.add(vectors, piece.start, len(piece.tokens))
                except Exception as error:
                    self._spoil(choice, error)
                    self._report(handle, choice, "", 0, None)
        for update in self.scheduler.commit(plan, result.tokens.tolist()):
            handle, choice = self._rows[update.request.spec.request_id]
            self._hand_on(handle, choice, update, result, now)
        count_step(self.metrics, plan, self.scheduler)

    def _hand_on(
        self, handle: Handle, choice: Choice, update: Update, result: StepResult, now: float
    ) -> None:
        """Makes text and entries of one request's new tokens; what goes wrong here ends this request only."""
        request = update.request
        before = len(request.output) - update.num_tokens
        text, entries = "", None
        try:
            text = choice.decode()
            if choice.matched_stop is not None:
                self.scheduler.finish(request, "stop", choice.matched_stop)
            entries = choice.add_logprobs(result.logprobs, update.row)
        except Exception as error:
            self._spoil(choice, error)
        count = len(request.output) - before if choice.pooled is None else 0  # nobody sees an embedding's
        choice.times += [now] * count
        self.metrics.add_tokens(choice.times, count, handle.arrival)
        self.metrics.output_tokens += count
        self._report(handle, choice, text, count, entries)

    def _end(self, handle: Handle, reason: FinishReason) -> None:
        """Ends every choice that still runs or waits."""
        for choice in handle.choices:
            if choice.spec.request_id in self._rows:
                self.scheduler.finish(choice.request, reason)
                text = ""
                try:
                    text = choice.decode()  # what was held back is shown
                except Exception as error:
                    self._spoil(choice, error)
                self._report(handle, choice, text, 0, None)

    def _report(
        self, handle: Handle, choice: Choice, text: str, count: int, entries: list[PositionLogprobs] | None
    ) -> None:
        """Tells the handle what is new, and lets go of what ended."""
        if handle.stream:
            handle.deltas.append(choice.delta(handle.request_id, text, count, entries))
        self._touched[handle] = None
        reason = choice.request.finish_reason
        if reason is None:
            return
        self.metrics.finished[reason] += 1
        now = self.clock()
        self.metrics.add_end(choice.times, handle.arrival, handle.first_scheduled, now)
        self._live.discard(choice.spec.request_id)
        self._rows.pop(choice.spec.request_id, None)
        if all(one.request.finish_reason is not None for one in handle.choices):
            self._handles.pop(handle.request_id, None)
            handle.finished_at = now  # last: who reads it may count on everything else

    def _spoil(self, choice: Choice, error: Exception) -> None:
        _log.warning("request %s ended with an error", choice.spec.request_id, exc_info=error)
        choice.error = _describe(error)
        self.scheduler.finish(choice.request, "error")

    def _fail(self, error: Exception) -> None:
        """Ends everything that lives; the scheduler's and the device's state cannot be trusted any more."""
        self.failure = error
        for handle in list(self._handles.values()):
            for choice in handle.choices:
                if choice.request.finish_reason is None:
                    choice.error = _describe(error)
                    choice.request.finish_reason = "error"
                    self._report(handle, choice, "", 0, None)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
