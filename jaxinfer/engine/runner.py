"""The bridge: a Plan of the host tower becomes calls of compiled steps, and sampled ids come back one step late.

Nothing crosses but packed int32 buffers going in (one explicit `device_put` each) and small result arrays coming out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.calls import Buckets, Call, pack_decode, pack_prefill, place_rows, split_plan
from jaxinfer.engine.device import Device, Operation, forward_of
from jaxinfer.engine.host_pages import HostPages
from jaxinfer.engine.protocol import StepResult, TokenLogprobs
from jaxinfer.schedule.plan import Admission, DecodeRow, Plan, PrefillPiece
from jaxinfer.schedule.request import Pooling
from jaxinfer.steps.compiled import StepTable, count_compilations
from jaxinfer.steps.sampling import Sampled
from jaxinfer.steps.slots import Slots, pack_row

Order = tuple[Operation, Callable[[Any], None]]  # and where what it computes goes


@dataclass(frozen=True)
class Draws:
    """What one block of rows draws.

    Attributes:
      rows: whose draws they are. places: where each of them is among the draws.
      found: on the device, `Sampled` or the ids alone of greedy rows.
      scored: whether a row wants log-probabilities.
    """

    rows: tuple[DecodeRow | PrefillPiece, ...]
    places: tuple[int, ...]
    found: Any
    scored: bool


@dataclass(frozen=True)
class Pending:
    """A dispatched plan, unread.

    Attributes:
      plan: what runs.
      draws: what its blocks draw, in the order of the calls.
      scores, pooled: what was computed of prompts, by index of the plan's pieces: ``(TokenLogprobs, row)``, and
        ``(hidden states, row)``.
    """

    plan: Plan
    draws: list[Draws]
    scores: dict[int, tuple[Any, int]]
    pooled: dict[int, tuple[Any, int]]


class DeviceRunner:
    """Runs plans through a `StepTable`.

    Args:
      params, cache, slots: device state; cache and slots are consumed and replaced by every call.
      table: compiled steps. buckets: their shapes.
      host_pages: where pages are copied to, None where plans copy none.
      guard: makes any implicit transfer while serving an error.

    Attributes:
      device: the state. compilations: names of functions that were compiled while plans ran; none should be.
      buckets: as given; fewer of them may be named between plans.
    """

    def __init__(
        self,
        params: Any,
        cache: Any,
        slots: Slots,
        table: StepTable,
        buckets: Buckets,
        host_pages: HostPages | None = None,
        guard: bool = True,
    ) -> None:
        self.device = Device(params, cache, slots, table)
        self._table, self.buckets = table, buckets
        self._host_pages = host_pages
        self._guard = guard
        self.compilations: list[str] = []
        self._plain: set[int] = set()
        self._wants: set[int] = set()
        self._wants_prompt: set[int] = set()
        self._pooling: dict[int, Pooling | None] = {}

    def dispatch(self, plan: Plan) -> Pending:
        """Starts a plan and returns at once."""
        pending = Pending(plan, [], {}, {})
        with self._guarded(), count_compilations(self.compilations):
            self._copy_pages(plan)
            orders = [order for admission in plan.admitted for order in self._admit(admission)]
            for call in split_plan(plan, self.buckets, self._table.num_shares):
                orders += self._order(call, pending)
            self.start(orders)
        return pending

    def start(self, orders: Sequence[Order]) -> None:
        """Starts operations, and hands on what they compute."""
        for (_, take), found in zip(orders, self.device.run([one for one, _ in orders]), strict=True):
            take(found)

    def repeat(self, operations: Sequence[Operation]) -> None:
        """Starts the operations of a step that another host has planned and reads."""
        with self._guarded(), count_compilations(self.compilations):
            self.device.run(operations)

    def collect(self, pending: Pending) -> StepResult:
        """Waits for one dispatched plan, oldest first, and brings its draws to the host."""
        with self._guarded():
            if self._host_pages is not None:
                self._host_pages.settle()
            return self._collect(pending)

    def _copy_pages(self, plan: Plan) -> None:
        """Starts what the plan orders copied to the host and back."""
        if not plan.saves and not plan.loads:
            return
        if self._host_pages is None:
            raise RuntimeError("a plan copies pages to the host, and this runner was given no room there")
        device = self.device
        self._host_pages.save(device.cache, plan.saves)
        if plan.loads:
            device.cache = self._host_pages.load(device.cache, plan.loads)

    def _guarded(self) -> contextlib.AbstractContextManager[None]:
        """Makes implicit transfers an error, either way; `jax.device_put` and `jax.device_get` are explicit."""
        return jax.transfer_guard("disallow") if self._guard else contextlib.nullcontext()

    def _collect(self, pending: Pending) -> StepResult:
        plan = pending.plan
        row_of = {row.slot: i for i, row in enumerate(plan.decode)}
        last = [piece.slot for piece in plan.prefill if piece.is_last]
        row_of |= {slot: len(plan.decode) + i for i, slot in enumerate(last)}
        tokens = np.zeros((plan.num_result_rows, plan.num_decode_steps), np.int32)
        scored: list[tuple[list[int], list[int], Sampled]] = []
        for draws in pending.draws:
            ended = [not isinstance(row, PrefillPiece) or row.is_last for row in draws.rows]
            drawn = [place for place, ends in zip(draws.places, ended, strict=True) if ends]
            target = [row_of[row.slot] for row, ends in zip(draws.rows, ended, strict=True) if ends]
            found = draws.found
            ids = jax.device_get(found.tokens if isinstance(found, Sampled) else found)
            tokens[target] = ids.reshape(plan.num_decode_steps, -1)[:, drawn].T
            if draws.scored and drawn:
                scored.append((drawn, target, found))
        logprobs = _gather_logprobs(scored, tokens.shape) if scored else None
        pieces = range(len(plan.prefill))
        prompts = tuple(self._prompt_logprobs(pending, i) for i in pieces) if pending.scores else ()
        pooled = tuple(_vectors(pending, i) for i in pieces) if pending.pooled else ()
        return StepResult(tokens, logprobs, prompts, pooled)

    def _admit(self, admission: Admission) -> Iterator[Order]:
        """Yields what gives a slot to a request, and notes what the request wants."""
        slots = self.device.slots
        row = pack_row(
            admission.params,
            slots.caps,
            vocab_size=slots.vocab_size,
            prompt_len=admission.prompt_len,
            stop_ids=admission.stop_ids,
            seed=admission.seed,
            choice=admission.choice,
        )
        slot = admission.slot
        yield Operation("install", (), (np.array(slot, np.int32), *jax.tree.leaves(row))), _drop
        if admission.cached:
            known = np.array(slot, np.int32), np.array(admission.cached, np.int32)
            yield Operation("recall", (), known), _drop
        params = admission.params
        self._pooling[slot] = admission.pooling
        for slots, asked in (
            (self._plain, params.is_plain_greedy),
            (self._wants, params.logprobs is not None),
            (self._wants_prompt, params.prompt_logprobs is not None),
        ):
            (slots.add if asked else slots.discard)(slot)

    def _order(self, call: Call, pending: Pending) -> Iterator[Order]:
        """Yields the operations of one call, and where what they compute goes."""
        plan, shape, prefill = pending.plan, call.shape, call.shape.prefill
        shares, table = self._table.num_shares, plan.page_table
        packed: list[np.ndarray] = []
        if shape.decode:
            packed.append(pack_decode(call.decode, shape.decode, table, shares).packed)
        if prefill[0]:
            packed.append(pack_prefill(call.prefill, *prefill, table, shares).packed)
        forward, counts = forward_of(shape, *packed), shape.draws(shares)
        if shape.num_steps > 1:
            yield forward, self._take_draws(pending, call.decode, counts[0])
            return
        yield forward, _drop
        index = {(piece.slot, piece.start): i for i, piece in enumerate(plan.prefill)}
        places = place_rows(call.prefill, prefill[0], len(table), shares)
        rows = [
            (index[piece.slot, piece.start], row, piece)
            for row, piece in zip(places, call.prefill, strict=True)
        ]
        if wanted := [(i, row) for i, row, piece in rows if piece.slot in self._wants_prompt]:
            yield Operation("score"), partial(_put_rows, pending.scores, wanted)
        if wanted := [(i, row) for i, row, piece in rows if self._pools(piece)]:
            yield Operation("embed"), partial(_put_rows, pending.pooled, wanted)
        for number, (block, count) in enumerate(zip(call.blocks, counts, strict=True)):
            greedy = {row.slot for row in block} <= self._plain
            yield Operation("draw", (number, int(greedy))), self._take_draws(pending, block, count)

    def _pools(self, piece: PrefillPiece) -> bool:
        """Whether the hidden states of a piece are wanted: of every piece for a mean."""
        pooling = self._pooling.get(piece.slot)
        return pooling == "mean" or (pooling == "last" and piece.is_last)

    def _take_draws(
        self, pending: Pending, rows: Sequence[DecodeRow | PrefillPiece], num_rows: int
    ) -> Callable[[Any], None]:
        """Returns what notes the draws of one block among ``num_rows``."""
        places = place_rows(rows, num_rows, len(pending.plan.page_table), self._table.num_shares)
        scored = any(row.slot in self._wants for row in rows)
        return lambda found: pending.draws.append(Draws(tuple(rows), places, found, scored))

    def _prompt_logprobs(self, pending: Pending, piece: int) -> TokenLogprobs | None:
        if piece not in pending.scores:
            return None
        scored, row = pending.scores[piece]
        length = len(pending.plan.prefill[piece].tokens)
        return _logprobs(jax.tree.map(lambda leaf: leaf[row, :length], jax.device_get(scored)))


def _drop(found: Any) -> None:
    """Takes what an operation computes that nobody reads."""


def _put_rows(into: dict[int, tuple[Any, int]], wanted: list[tuple[int, int]], found: Any) -> None:
    into.update((i, (found, row)) for i, row in wanted)


def _vectors(pending: Pending, piece: int) -> np.ndarray | None:
    if piece not in pending.pooled:
        return None
    pooled, row = pending.pooled[piece]
    return jax.device_get(pooled)[row]


def _logprobs(found: Any) -> TokenLogprobs:
    return TokenLogprobs(found.logprob, found.rank, found.top_ids, found.top_logprobs)


def _gather_logprobs(
    drawn: list[tuple[list[int], list[int], Sampled]], shape: tuple[int, int]
) -> TokenLogprobs:
    """Returns the draws' log-probabilities laid out ``[rows, steps]`` as `StepResult` has them."""
    parts = [_logprobs(jax.device_get(sampled)) for _, _, sampled in drawn]
    whole = TokenLogprobs(
        *(np.zeros((*shape, *_by_row(a, shape).shape[2:]), a.dtype) for a in _fields(parts[0]))
    )
    for (source, target, _), part in zip(drawn, parts, strict=True):
        for into, leaf in zip(_fields(whole), _fields(part), strict=True):
            into[target] = _by_row(leaf, shape)[source]
    return whole


def _fields(logprobs: TokenLogprobs) -> tuple[np.ndarray, ...]:
    return (logprobs.chosen, logprobs.ranks, logprobs.top_ids, logprobs.top)


def _by_row(leaf: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """``[B, ...]`` of one step or ``[n, B, ...]`` of several as ``[B, n, ...]``."""
    return leaf[:, None] if shape[1] == 1 else np.swapaxes(leaf, 0, 1)
