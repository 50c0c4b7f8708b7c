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

from jaxinfer.engine.host_pages import HostPages
from jaxinfer.engine.protocol import StepResult, TokenLogprobs
from jaxinfer.schedule.plan import Admission, DecodeRow, Plan, PrefillPiece
from jaxinfer.schedule.request import Pooling
from jaxinfer.steps.compiled import Shape, StepTable, count_compilations
from jaxinfer.steps.sampling import Sampled
from jaxinfer.steps.slots import Slots, pack_row
from jaxinfer.steps.steps import Ahead, DecodeRows, PrefillRows

CALL_TOKENS = 16  # what a call costs beside its tokens, in tokens: it reads all weights


@dataclass(frozen=True)
class Buckets:
    """The shapes that a run compiles.

    Attributes:
      decode: rows, ascending. prefill: ``(rows, tokens a row)``.
      width: W, page ids a row, enough for the longest sequence: attention walks no more of them than rows have.
      mixed: rows of decode that a mixed step may hold, ascending; empty never mixes.
      mixed_prefill: shapes of prefill that are mixed with them; None for all.
      num_steps: decode steps of the multi-step executables, 1 for none.
    """

    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    width: int
    mixed: tuple[int, ...] = ()
    num_steps: int = 1
    mixed_prefill: tuple[tuple[int, int], ...] | None = None

    def shapes(self) -> tuple[Shape, ...]:
        """Returns every forward step of the run."""
        W = self.width
        shapes = [Shape(0, p, W) for p in self.prefill]
        shapes += [Shape(b, (0, 0), W) for b in self.decode]
        shapes += [Shape(b, p, W) for b in self.mixed for p in self.mixing]
        shapes += [Shape(b, (0, 0), W, self.num_steps) for b in self.decode if self.num_steps > 1]
        return tuple(shapes)

    @property
    def mixing(self) -> tuple[tuple[int, int], ...]:
        """Shapes of prefill that a mixed step may have."""
        return self.prefill if self.mixed_prefill is None else self.mixed_prefill


@dataclass(frozen=True)
class Call:
    """One executable call of a plan: its shape and the rows that fill it."""

    shape: Shape
    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillPiece, ...]

    @property
    def blocks(self) -> list[tuple[DecodeRow, ...] | tuple[PrefillPiece, ...]]:
        """The rows of each block of the shape, decode rows first."""
        return [
            rows
            for rows, there in ((self.decode, self.shape.decode), (self.prefill, self.shape.prefill[0]))
            if there
        ]


@dataclass(frozen=True)
class Draws:
    """What one block of rows draws.

    Attributes:
      rows: whose draws they are, in order. found: on the device, `Sampled` or the ids alone of greedy rows.
      scored: whether a row wants log-probabilities.
    """

    rows: tuple[DecodeRow | PrefillPiece, ...]
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
      compilations: names of functions that were compiled while plans ran; none should be.
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
        self._params, self._cache, self._slots = params, cache, slots
        self._table, self._buckets = table, buckets
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
            for admission in plan.admitted:
                self._admit(admission)
            for call in split_plan(plan, self._buckets):
                self._run(call, pending)
        return pending

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
        self._host_pages.save(self._cache, plan.saves)
        if plan.loads:
            self._cache = self._host_pages.load(self._cache, plan.loads)

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
            drawn = [
                i for i, row in enumerate(draws.rows) if not isinstance(row, PrefillPiece) or row.is_last
            ]
            target = [row_of[draws.rows[i].slot] for i in drawn]
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
        if admission.cached:
            tokens = np.zeros(self._slots.history.shape[1], np.int32)
            tokens[: len(admission.cached)] = admission.cached
            known = jax.device_put((np.int32(slot), tokens, np.int32(len(admission.cached))))
            self._slots = self._table.recall(self._slots, *known)
        params = admission.params
        self._pooling[slot] = admission.pooling
        for slots, asked in (
            (self._plain, params.is_plain_greedy),
            (self._wants, params.logprobs is not None),
            (self._wants_prompt, params.prompt_logprobs is not None),
        ):
            (slots.add if asked else slots.discard)(slot)

    def _run(self, call: Call, pending: Pending) -> None:
        """Starts one call, and notes what it draws and computes of prompts."""
        plan, shape, prefill = pending.plan, call.shape, call.shape.prefill
        packed: list[Any] = []
        if shape.decode:
            packed.append(pack_decode(call.decode, shape.decode, plan.page_table))
        if prefill[0]:
            packed.append(pack_prefill(call.prefill, *prefill, plan.page_table))
        buffers = jax.device_put(tuple(packed))
        forward = self._table.forward(shape)
        if shape.num_steps > 1:
            drawn, self._cache, self._slots = forward(self._params, self._cache, self._slots, *buffers)
            scored = any(row.slot in self._wants for row in call.decode)
            pending.draws.append(Draws(call.decode, drawn, scored))
            return
        ahead, self._cache, self._slots = forward(self._params, self._cache, self._slots, *buffers)
        index = {(piece.slot, piece.start): i for i, piece in enumerate(plan.prefill)}
        rows = [(index[piece.slot, piece.start], row, piece) for row, piece in enumerate(call.prefill)]
        if wanted := [(i, row) for i, row, piece in rows if piece.slot in self._wants_prompt]:
            scored = self._table.score(shape)(self._params, ahead[-1].x, buffers[-1])
            pending.scores.update((i, (scored, row)) for i, row in wanted)
        if wanted := [(i, row) for i, row, piece in rows if self._pools(piece)]:
            pooled = self._table.embed(shape)(ahead[-1].x, buffers[-1])
            pending.pooled.update((i, (pooled, row)) for i, row in wanted)
        pending.draws.extend(self._draw(one, block) for one, block in zip(ahead, call.blocks, strict=True))

    def _pools(self, piece: PrefillPiece) -> bool:
        """Whether the hidden states of a piece are wanted: of every piece for a mean."""
        pooling = self._pooling.get(piece.slot)
        return pooling == "mean" or (pooling == "last" and piece.is_last)

    def _draw(self, ahead: Ahead, rows: Sequence[DecodeRow | PrefillPiece]) -> Draws:
        """Starts the draws of one block, the cheap ones where no row asks for more than the likeliest token."""
        slots = {row.slot for row in rows}
        draw = self._table.draw(len(ahead.rows), greedy=slots <= self._plain)
        drawn, self._slots = draw(self._slots, ahead.logits, ahead.rows)
        return Draws(tuple(rows), drawn, not self._wants.isdisjoint(slots))

    def _prompt_logprobs(self, pending: Pending, piece: int) -> TokenLogprobs | None:
        if piece not in pending.scores:
            return None
        scored, row = pending.scores[piece]
        length = len(pending.plan.prefill[piece].tokens)
        return _logprobs(jax.tree.map(lambda leaf: leaf[row, :length], jax.device_get(scored)))


def split_plan(plan: Plan, buckets: Buckets) -> list[Call]:
    """Returns the calls that run a plan: with little padding, then few; decode rows with the first prefill chunk.

    Pieces are taken longest first; each call takes the bucket that would run what is left in the fewest tokens, padding
    included, and of those the one with most rows.

    Raises:
      ValueError: more decode rows, or a longer piece, than any bucket holds.
    """
    calls: list[Call] = []
    decode = plan.decode
    left = sorted(plan.prefill, key=lambda piece: -len(piece.tokens))
    while left:
        mixed = min((B for B in buckets.mixed if decode and len(decode) <= B), default=0)
        shape = _prefill_shape(left, buckets.mixing) if mixed else None
        mixed = mixed if shape else 0
        shape = shape or _prefill_shape(left, buckets.prefill)
        if shape is None:
            raise ValueError(
                f"a prefill piece of {len(left[0].tokens)} tokens, but the buckets are {buckets.prefill}"
            )
        taken, left = tuple(left[: shape[0]]), left[shape[0] :]
        calls.append(Call(Shape(mixed, shape, buckets.width), decode if mixed else (), taken))
        decode = () if mixed else decode
    if decode:
        rows = [B for B in buckets.decode if len(decode) <= B]
        if not rows:
            raise ValueError(f"{len(decode)} decode rows, but the buckets are {buckets.decode}")
        calls.append(Call(Shape(rows[0], (0, 0), buckets.width, plan.num_decode_steps), decode, ()))
    return calls


def _prefill_shape(left: Sequence[PrefillPiece], shapes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the shape that would run pieces, longest first, for least; None where the longest fits none."""
    fitting = [shape for shape in shapes if shape[1] >= len(left[0].tokens)]

    def cost(shape: tuple[int, int]) -> tuple[int, int]:
        b, T = shape
        return -(-len(left) // b) * (b * T + CALL_TOKENS), -b

    return min(fitting, key=cost, default=None)


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
