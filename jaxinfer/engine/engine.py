"""The loop: submit requests, step, read what came; the only place that drives scheduler and runner together."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence

from jaxinfer.engine.choice import Choice
from jaxinfer.engine.handle import Handle
from jaxinfer.engine.intake import Prompt, bind_params, check_draws, make_specs, read_prompt
from jaxinfer.engine.interrupts import hold_interrupts
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.outputs import Delta, PositionLogprobs, RequestOutput
from jaxinfer.engine.pooled import PARAMS as POOLING_PARAMS
from jaxinfer.engine.protocol import Runner, StepResult
from jaxinfer.schedule.plan import Plan
from jaxinfer.schedule.request import Pooling, RequestRefused
from jaxinfer.schedule.sampling_params import DRAWS, SamplingParams
from jaxinfer.schedule.scheduler import Scheduler, Update
from jaxinfer.text import Tokenizer

_log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The loop itself failed: requests in flight ended with ``error``, and the engine takes no more."""


class Engine:
    """Turns prompts into tokens, any number of them together.

    `submit` and `abort` may be called from any thread; everything else belongs to the thread that steps.

    Args:
      scheduler: decides each step. runner: does it.
      tokenizer: the model's. vocab_size: ids below it may be given and drawn.
      eos_ids: the model's end tokens. draws: of `DRAWS`, what requests may ask for.
      check: refuses settings and end ids that the device cannot hold, such as `SlotCaps.check`; None refuses none.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        draws: Collection[str] = DRAWS,
        check: Callable[[SamplingParams, Collection[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self.draws = tuple(draws)
        self._check = check
        self.clock = clock
        self.metrics = EngineMetrics()
        self.failure: BaseException | None = None
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
        request_id: str | None = None,
        stream: bool = False,
        priority: int = 0,
        pooling: Pooling | None = None,
    ) -> Handle:
        """Checks a request and queues it.

        Args:
          prompt: text, or token ids as they are to run.
          params: sampling settings, vLLM's defaults when None.
          request_id: a name that no live request has; made up when None.
          stream: keep what every step adds in ``deltas``.
          priority: lower is more important: admitted first and preempted last.
          pooling: ask for the prompt's hidden state and no tokens, see `Handle.embedding`; without ``params``.

        Raises:
          ValueError: a request that could never run, with what was got and what would work.
          EngineError: the engine failed earlier.
        """
        handle = self.prepare(
            prompt, params, request_id=request_id, stream=stream, priority=priority, pooling=pooling
        )
        self.enqueue(handle)
        return handle

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        priority: int = 0,
        pooling: Pooling | None = None,
    ) -> Handle:
        """Checks a request as `submit` does, and does not queue it."""
        if self.failure is not None:
            raise EngineError("the engine failed earlier and takes no requests") from self.failure
        max_len = self.scheduler.config.max_len
        name = request_id if request_id is not None else f"request-{next(self._serial)}"
        text, ids = read_prompt(prompt, self.tokenizer, self.vocab_size)
        if pooling is not None and params is not None:
            raise RequestRefused("params: got some with pooling, which makes no tokens; leave them out")
        bound = bind_params(
            params or (SamplingParams() if pooling is None else POOLING_PARAMS), self.tokenizer
        )
        check_draws(bound, self.draws, pooling)
        bound.validate_for(self.vocab_size, max_len, len(ids), self.eos_ids)
        # The serial number keeps a name that is used again apart from a plan still in flight under its first use.
        names = (f"{name}/{next(self._serial)}" for _ in itertools.count())
        specs = make_specs(
            names,
            ids,
            bound,
            eos_ids=self.eos_ids,
            max_len=max_len,
            priority=priority,
            arrival=self.clock(),
            pooling=pooling,
        )
        if self._check is not None:
            self._check(bound, specs[0].stop_ids)
        self.scheduler.check(specs[0])
        return Handle(name, text, specs, self.tokenizer, stream=stream)

    def enqueue(self, handle: Handle) -> None:
        """Queues what `prepare` returned, once.

        Raises:
          RequestRefused: its request id is that of a live request.
          EngineError: the engine failed earlier.
        """
        if self._handles.setdefault(handle.request_id, handle) is not handle:
            raise RequestRefused(f"request_id: {handle.request_id!r} is that of a live request, give another")
        if self.failure is not None:  # again, for the loop may have failed since `prepare`
            self._handles.pop(handle.request_id, None)
            raise EngineError("the engine failed earlier and takes no requests") from self.failure
        self._inbox.append(handle)

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
        finally:  # Ctrl-C, or an error of `on_finish`: nobody is left to read the others
            for handle in mine:
                if not handle.finished:
                    self.abort(handle.request_id)

    def _empty_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Handle):
                for choice in item.choices:
                    choice.request = self.scheduler.add(choice.spec)
                    self._rows[choice.spec.request_id] = item, choice
                self.metrics.prompt_tokens += len(item.prompt_token_ids)
            elif item in self._handles:
                self._abort(self._handles[item])

    def _advance(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self._flight.append((plan, self.runner.dispatch(plan)))
            for admission in plan.admitted:
                handle, _ = self._rows[admission.request_id]
                if handle.first_scheduled is None:
                    handle.first_scheduled = self.clock()
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
        self.metrics.num_steps += 1

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
        count = len(request.output) - before
        choice.times += [now] * count
        self.metrics.output_tokens += count
        self._report(handle, choice, text, count, entries)

    def _abort(self, handle: Handle) -> None:
        for choice in handle.choices:
            if choice.spec.request_id in self._rows:
                self.scheduler.finish(choice.request, "abort")
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
        self._rows.pop(choice.spec.request_id, None)
        if all(one.request.finish_reason is not None for one in handle.choices):
            self._handles.pop(handle.request_id, None)
            handle.finished_at = self.clock()  # last: who reads it may count on everything else

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
