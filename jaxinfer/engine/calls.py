"""A plan cut into calls of compiled shapes, and the buffers that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.schedule.plan import DecodeRow, Plan, PrefillPiece
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.steps import DecodeRows, PrefillRows

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

    def times(self, num_shares: int) -> Buckets:
        """Returns the shapes of several shares of rows that run side by side."""

        def more(shapes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            return tuple((num_shares * rows, tokens) for rows, tokens in shapes)

        decode, mixed = (tuple(num_shares * rows for rows in counts) for counts in (self.decode, self.mixed))
        mixing = None if self.mixed_prefill is None else more(self.mixed_prefill)
        return Buckets(decode, more(self.prefill), self.width, mixed, self.num_steps, mixing)

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


def split_plan(plan: Plan, buckets: Buckets, num_shares: int = 1) -> list[Call]:
    """Returns the calls that run a plan: with little padding, then few; decode rows with the first prefill chunk.

    Pieces are taken longest first; each call takes the bucket that would run what is left in the fewest tokens, padding
    included, and of those the one with most rows. Where a mesh cuts the rows of a call, each share has as many of them,
    and takes rows of its own slots only.

    Raises:
      ValueError: more decode rows, or a longer piece, than any bucket holds.
    """
    calls: list[Call] = []
    decode, num_slots = plan.decode, len(plan.page_table)
    most = num_shares * max(_by_share(decode, num_slots, num_shares), default=0)
    left = sorted(plan.prefill, key=lambda piece: -len(piece.tokens))
    while left:
        mixed = min((B for B in buckets.mixed if decode and most <= B), default=0)
        crowd = num_shares * max(_by_share(left, num_slots, num_shares))
        shape = _prefill_shape(left, crowd, buckets.mixing) if mixed else None
        mixed = mixed if shape else 0
        shape = shape or _prefill_shape(left, crowd, buckets.prefill)
        if shape is None:
            raise ValueError(
                f"a prefill piece of {len(left[0].tokens)} tokens, but the buckets are {buckets.prefill}"
            )
        taken, left = _take(left, shape[0] // num_shares, num_slots, num_shares)
        calls.append(Call(Shape(mixed, shape, buckets.width), decode if mixed else (), taken))
        decode = () if mixed else decode
    if decode:
        rows = [B for B in buckets.decode if most <= B]
        if not rows:
            raise ValueError(f"{len(decode)} decode rows, but the buckets are {buckets.decode}")
        calls.append(Call(Shape(rows[0], (0, 0), buckets.width, plan.num_decode_steps), decode, ()))
    return calls


def _by_share(rows: Sequence[DecodeRow | PrefillPiece], num_slots: int, num_shares: int) -> list[int]:
    """Returns how many rows each share of the slots has."""
    if num_shares == 1:
        return [len(rows)]
    counts = [0] * num_shares
    for row in rows:
        counts[row.slot * num_shares // num_slots] += 1
    return counts


def _take(
    left: list[PrefillPiece], num_rows: int, num_slots: int, num_shares: int
) -> tuple[tuple[PrefillPiece, ...], list[PrefillPiece]]:
    """Returns the first ``num_rows`` pieces of each share, and the rest."""
    if num_shares == 1:
        return tuple(left[:num_rows]), left[num_rows:]
    counts = [0] * num_shares
    taken: list[PrefillPiece] = []
    rest: list[PrefillPiece] = []
    for piece in left:
        share = piece.slot * num_shares // num_slots
        counts[share] += 1
        (taken if counts[share] <= num_rows else rest).append(piece)
    return tuple(taken), rest


def place_rows(
    rows: Sequence[DecodeRow | PrefillPiece], num_rows: int, num_slots: int, num_shares: int = 1
) -> tuple[int, ...]:
    """Returns where rows go among ``num_rows``: in order, and where these are shares, each in its slot's share.

    Args:
      rows: that fit. num_rows: of the buffer. num_slots: R. num_shares: which divide both.
    """
    if num_shares == 1:
        return tuple(range(len(rows)))
    size = num_rows // num_shares
    following = [share * size for share in range(num_shares)]
    places = []
    for row in rows:
        share = row.slot * num_shares // num_slots
        places.append(following[share])
        following[share] += 1
    return tuple(places)


def _prefill_shape(
    left: Sequence[PrefillPiece], num_rows: int, shapes: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """Returns the shape that would run pieces, longest first, for least; None where the longest fits none."""
    fitting = [shape for shape in shapes if shape[1] >= len(left[0].tokens)]

    def cost(shape: tuple[int, int]) -> tuple[int, int]:
        b, T = shape
        return -(-num_rows // b) * (b * T + CALL_TOKENS), -b

    return min(fitting, key=cost, default=None)


def pack_decode(
    rows: Sequence[DecodeRow], num_rows: int, page_table: np.ndarray, num_shares: int = 1
) -> DecodeRows:
    """Returns `DecodeRows` of ``num_rows`` on the host, placed by `place_rows`: slot, position, live, pages."""
    packed = np.zeros((num_rows, 3 + page_table.shape[1]), np.int32)
    packed[:, 0] = len(page_table)  # padding reads the slot that asks for nothing
    if rows:
        slots = [row.slot for row in rows]
        at: Any = slice(0, len(rows))
        if num_shares > 1:
            at = list(place_rows(rows, num_rows, len(page_table), num_shares))
        packed[at, 0] = slots
        packed[at, 1] = [row.position for row in rows]
        packed[at, 2] = 1
        packed[at, 3:] = page_table[slots]
    return DecodeRows(packed)


def pack_prefill(
    pieces: Sequence[PrefillPiece],
    num_rows: int,
    num_tokens: int,
    page_table: np.ndarray,
    num_shares: int = 1,
) -> PrefillRows:
    """Returns `PrefillRows` of ``[num_rows, num_tokens]`` on the host, placed by `place_rows`."""
    packed = np.zeros((num_rows, 4 + num_tokens + page_table.shape[1]), np.int32)
    packed[:, 0] = len(page_table)
    for i, piece in zip(place_rows(pieces, num_rows, len(page_table), num_shares), pieces, strict=True):
        n = len(piece.tokens)
        packed[i, :4] = piece.slot, piece.start, n, piece.next_token
        packed[i, 4 : 4 + n] = piece.tokens
        packed[i, 4 + num_tokens :] = page_table[piece.slot]
    return PrefillRows(packed)
