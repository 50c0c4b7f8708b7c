"""The bridge: a Plan of the host tower becomes calls of compiled steps, and sampled ids come back one step late.

Nothing crosses but packed int32 buffers going in (one explicit `device_put` each) and small result arrays coming out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.protocol import StepResult, TokenLogprobs
from jaxinfer.schedule.plan import Admission, DecodeRow, Plan, PrefillPiece
from jaxinfer.steps.compiled import Shape, StepTable
from jaxinfer.steps.slots import Slots, pack_row
from jaxinfer.steps.steps import DecodeRows, PrefillRows


@dataclass(frozen=True)
class Buckets:
    """The shapes that a run compiles.

    Attributes:
      decode: rows, ascending. prefill: ``(rows, tokens a row)``, ascending by their product.
      mixed: rows of decode that a mixed step may hold, ascending; empty never mixes.
      num_steps: decode steps of the multi-step executables, 1 for none.
    """

    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    mixed: tuple[int, ...] = ()
    num_steps: int = 1

    def shapes(self) -> tuple[Shape, ...]:
        """Returns every executable of the run."""
        shapes = [Shape(prefill=p) for p in self.prefill] + [Shape(decode=b) for b in self.decode]
        shapes += [Shape(b, p) for b in self.mixed for p in self.prefill]
        shapes += [Shape(b, num_steps=self.num_steps) for b in self.decode if self.num_steps > 1]
        return tuple(shapes)


@dataclass(frozen=True)
class Call:
    """One executable call of a plan: its shape and the rows that fill it."""

    shape: Shape
    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillPiece, ...]


@dataclass(frozen=True)
class Pending:
    """A dispatched plan, unread: calls, their outputs on the device, and whether anybody wants log-probabilities."""

    plan: Plan
    calls: tuple[tuple[Call, Any], ...]
    wants_logprobs: bool
    wants_prompt: frozenset[int]


class DeviceRunner:
    """Runs plans through a `StepTable`.

    Args:
      params, cache, slots: device state; cache and slots are consumed and replaced by every call.
      table: compiled steps. buckets: their shapes.
      guard: makes any implicit transfer while serving an error.
    """

    def __init__(
        self,
        params: Any,
        cache: Any,
        slots: Slots,
        table: StepTable,
        buckets: Buckets,
        guard: bool = True,
    ) -> None:
        self._params, self._cache, self._slots = params, cache, slots
        self._table, self._buckets = table, buckets
        self._guard = guard
        self._wants: set[int] = set()
        self._wants_prompt: set[int] = set()

    def dispatch(self, plan: Plan) -> Pending:
        """Starts a plan and returns at once."""
        with jax.transfer_guard("disallow") if self._guard else contextlib.nullcontext():
            for admission in plan.admitted:
                self._admit(admission)
            calls = tuple(
                (call, self._run(call, plan.page_table)) for call in split_plan(plan, self._buckets)
            )
        wants = any(row.slot in self._wants for row in (*plan.decode, *plan.prefill))
        prompts = frozenset(i for i, piece in enumerate(plan.prefill) if piece.slot in self._wants_prompt)
        return Pending(plan, calls, wants, prompts)

    def collect(self, pending: Pending) -> StepResult:
        """Waits for one dispatched plan, oldest first, and brings its draws to the host."""
        plan = pending.plan
        rows = {row.slot: i for i, row in enumerate(plan.decode)}
        last = [piece.slot for piece in plan.prefill if piece.is_last]
        rows |= {slot: len(plan.decode) + i for i, slot in enumerate(last)}
        tokens = np.zeros((plan.num_result_rows, plan.num_decode_steps), np.int32)
        drawn: list[tuple[list[int], list[int], Any]] = []
        for call, out in pending.calls:
            source, target = _result_rows(call, rows)
            if source:
                tokens[target] = np.asarray(out.sampled.tokens)[:, source].T
                drawn.append((source, target, out.sampled))
        logprobs = _gather_logprobs(drawn, tokens.shape) if pending.wants_logprobs and drawn else None
        return StepResult(tokens, logprobs, self._prompt_logprobs(pending))

    def _admit(self, admission: Admission) -> None:
        row = pack_row(
            admission.params,
            self._slots.caps,
            vocab_size=self._slots.vocab_size,
            prompt_len=admission.prompt_len,
            stop_ids=admission.stop_ids,
            seed=admission.seed,
            choice=admission.choice,
        )
        slot = admission.slot
        self._slots = self._table.install(self._slots, jax.device_put(np.int32(slot)), jax.device_put(row))
        for wanting, asked in (
            (self._wants, admission.params.logprobs),
            (self._wants_prompt, admission.params.prompt_logprobs),
        ):
            (wanting.discard if asked is None else wanting.add)(slot)

    def _run(self, call: Call, page_table: np.ndarray) -> Any:
        packed = []
        if call.shape.decode:
            packed.append(pack_decode(call.decode, call.shape.decode, page_table))
        if call.shape.prefill[0]:
            packed.append(pack_prefill(call.prefill, *call.shape.prefill, page_table))
        buffers = jax.device_put(tuple(packed))
        step = self._table[call.shape]
        out, self._cache, self._slots = step(self._params, self._cache, self._slots, *buffers)
        return out

    def _prompt_logprobs(self, pending: Pending) -> tuple[TokenLogprobs | None, ...]:
        if not pending.wants_prompt:
            return ()
        index = {(piece.slot, piece.start): i for i, piece in enumerate(pending.plan.prefill)}
        found: list[TokenLogprobs | None] = [None] * len(index)
        for call, out in pending.calls:
            wanted = {row: index[piece.slot, piece.start] for row, piece in enumerate(call.prefill)}
            wanted = {row: i for row, i in wanted.items() if i in pending.wants_prompt}
            scores = jax.device_get(out.prompt) if wanted else None
            for row, i in wanted.items():
                found[i] = _cut(scores, row, len(call.prefill[row].tokens))
        return tuple(found)


def split_plan(plan: Plan, buckets: Buckets) -> list[Call]:
    """Returns the calls that run a plan: as few as the buckets allow, decode rows with the first prefill chunk.

    Pieces are taken longest first; each call takes the smallest bucket that holds the most of what is left.

    Raises:
      ValueError: more decode rows, or a longer piece, than any bucket holds.
    """
    calls: list[Call] = []
    decode = plan.decode
    left = sorted(plan.prefill, key=lambda piece: -len(piece.tokens))
    while left:
        longest = len(left[0].tokens)
        fitting = [shape for shape in buckets.prefill if shape[1] >= longest]
        if not fitting:
            raise ValueError(f"a prefill piece of {longest} tokens, but the buckets are {buckets.prefill}")
        b, T = min(fitting, key=lambda shape: (-(-len(left) // shape[0]) * shape[0] * shape[1], shape))
        taken, left = tuple(left[:b]), left[b:]
        mixed = [B for B in buckets.mixed if B >= len(decode) > 0]
        calls.append(Call(Shape(min(mixed, default=0), (b, T)), decode if mixed else (), taken))
        decode = () if mixed else decode
    if decode:
        fitting_rows = [B for B in buckets.decode if len(decode) <= B]
        if not fitting_rows:
            raise ValueError(f"{len(decode)} decode rows, but the buckets are {buckets.decode}")
        calls.append(Call(Shape(fitting_rows[0], num_steps=plan.num_decode_steps), decode, ()))
    return calls


def pack_decode(rows: Sequence[DecodeRow], num_rows: int, page_table: np.ndarray) -> DecodeRows:
    """Returns `DecodeRows` of ``num_rows`` on the host: slot, position, live, pages."""
    packed = np.zeros((num_rows, 3 + page_table.shape[1]), np.int32)
    packed[:, 0] = len(page_table)  # padding reads the slot that asks for nothing
    if rows:
        slots = [row.slot for row in rows]
        n = len(rows)
        packed[:n, 0] = slots
        packed[:n, 1] = [row.position for row in rows]
        packed[:n, 2] = 1
        packed[:n, 3:] = page_table[slots]
    return DecodeRows(packed)


def pack_prefill(
    pieces: Sequence[PrefillPiece], num_rows: int, num_tokens: int, page_table: np.ndarray
) -> PrefillRows:
    """Returns `PrefillRows` of ``[num_rows, num_tokens]`` on the host."""
    packed = np.zeros((num_rows, 4 + num_tokens + page_table.shape[1]), np.int32)
    packed[:, 0] = len(page_table)
    for i, piece in enumerate(pieces):
        n = len(piece.tokens)
        packed[i, :4] = piece.slot, piece.start, n, piece.next_token
        packed[i, 4 : 4 + n] = piece.tokens
        packed[i, 4 + num_tokens :] = page_table[piece.slot]
    return PrefillRows(packed)


def _result_rows(call: Call, rows: dict[int, int]) -> tuple[list[int], list[int]]:
    """Returns the rows of a call that hold a draw, and the rows of the result that they go to."""
    source = list(range(len(call.decode)))
    target = [rows[row.slot] for row in call.decode]
    for i, piece in enumerate(call.prefill):
        if piece.is_last:
            source.append(call.shape.decode + i)
            target.append(rows[piece.slot])
    return source, target


def _cut(scores: Any, row: int, length: int) -> TokenLogprobs:
    return _logprobs(jax.tree.map(lambda leaf: leaf[row, :length], scores))


def _logprobs(found: Any) -> TokenLogprobs:
    return TokenLogprobs(found.logprob, found.rank, found.top_ids, found.top_logprobs)


def _gather_logprobs(drawn: list[tuple[list[int], list[int], Any]], shape: tuple[int, int]) -> TokenLogprobs:
    """Returns the draws' log-probabilities laid out ``[rows, steps]`` as `StepResult` has them."""
    gathered: TokenLogprobs | None = None
    for source, target, sampled in drawn:
        part = _logprobs(jax.device_get(sampled))
        if gathered is None:
            fields = (part.chosen, part.ranks, part.top_ids, part.top)
            gathered = TokenLogprobs(*(np.zeros(shape + a.shape[2:], a.dtype) for a in fields))
        for name in ("chosen", "ranks", "top_ids", "top"):
            getattr(gathered, name)[target] = np.swapaxes(getattr(part, name)[:, source], 0, 1)
    if gathered is None:
        raise ValueError("log-probabilities were asked for, but the plan draws no token")
    return gathered
