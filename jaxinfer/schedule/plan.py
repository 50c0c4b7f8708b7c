"""What one step is to do, as frozen records: the scheduler's answer and the runner's order.

A slot is a request's row of device state (token history, sampling settings), its own from admission to its end
or preemption. A position is an index into prompt plus output, from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from jaxinfer.schedule.limits import SchedulerConfig
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.request import Pooling
from jaxinfer.schedule.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that takes a slot with this plan, before anything else of the plan runs.

    Attributes:
      slot: row of device state, whose former content is dead. request_id: whose it is now.
      params: sampling settings. stop_ids: ids that end it, masked until ``params.min_tokens`` are out (empty when
      nothing but length ends it). prompt_len: tokens of the prompt; a position at or beyond it is output, also
      when a preempted request computes its own output anew. choice: index among the ``n`` of one prompt.
      seed: drawn once for the request when ``params.seed`` is None, so it survives preemption.
      pooling: see `RequestSpec`.
      cached: ids at positions 0 and on whose KV is there already: no piece will bring them to the slot's history.
    """

    slot: int
    request_id: str
    params: SamplingParams
    stop_ids: frozenset[int]
    prompt_len: int
    choice: int
    seed: int
    pooling: Pooling | None = None
    cached: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """A run of known tokens of one request: written to its history and its pages.

    Attributes:
      slot: row of device state. request_id: whose tokens these are.
      start: position of the first token; everything before it is already written.
      tokens: ids at positions ``start .. start + len(tokens) - 1``.
      total: tokens to prefill in all (prompt, and output so far after a preemption).
      next_token: the known id that follows this piece, -1 when the piece is the last.
    """

    slot: int
    request_id: str
    start: int
    tokens: tuple[int, ...]
    total: int
    next_token: int

    @property
    def is_last(self) -> bool:
        """Whether the piece ends the prefill, so that its last position samples a token."""
        return self.start + len(self.tokens) == self.total


class DecodeRow(NamedTuple):
    """A row that reads its last token from the slot's history and samples the next (a tuple: made 64 a step).

    Attributes:
      slot: row of device state. request_id: whose row it is.
      position: of the input token, which is the number of tokens whose KV is written before this step.
    """

    slot: int
    request_id: str
    position: int


@dataclass(frozen=True)
class Seats:
    """What schedulers of one engine share, each with slots of its own.

    Attributes:
      slots: that this one fills. page_table: of all slots, see `Plan`. serial: counts requests in the order they came.
    """

    slots: range
    page_table: np.ndarray
    serial: Iterator[int]


def make_seats(config: SchedulerConfig, pool: PagePool) -> Seats:
    """Returns the seats of a scheduler that shares nothing."""
    shape = (config.max_num_seqs, pool.pages_for(config.max_len))
    return Seats(range(config.max_num_seqs), np.full(shape, pool.num_pages, np.int32), count())


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: copies of pages, admissions, then decode rows and prefill pieces together.

    Attributes:
      step: counts plans from 0; they are committed in this order.
      admitted: slots to fill before the step. decode, prefill: the rows.
      num_decode_steps: tokens that each decode row makes without return to the host; above 1 only when
        ``prefill`` is empty.
      page_table: int32 ``[max_num_seqs, max_pages]``, row = slot, entry i = page of positions ``i*Z .. i*Z+Z-1``,
        counted in the slot's share of the pages, ``num_pages`` (out of range) where there is none. It is the
        scheduler's own array: copy the rows that are wanted before the next `Scheduler.schedule`.
      saves: ``(page, host slot)`` copies to the host's memory, before anything else.
      loads: ``(host slot, page)`` copies back, after the saves.
    """

    step: int
    admitted: tuple[Admission, ...]
    decode: tuple[DecodeRow, ...]
    prefill: tuple[PrefillPiece, ...]
    num_decode_steps: int
    page_table: np.ndarray
    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()

    @property
    def num_result_rows(self) -> int:
        """Rows of the step's result: every decode row in order, then every last prefill piece in order."""
        return len(self.decode) + sum(piece.is_last for piece in self.prefill)
