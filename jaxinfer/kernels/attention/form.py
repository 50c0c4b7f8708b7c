"""What a native attention kernel is made for, how its work is cut, and where its parts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.arrays.formats import Format
from jaxinfer.kernels.native.code import I32, I64, Code, Value
from jaxinfer.kernels.native.ffi import Slots
from jaxinfer.kernels.native.machine import Machine

KEYS = 128  # of a block: with SmolLM2's heads, keys and values of a block are a core's first cache
ROWS = 6  # that meet a vector at once: with 4 vectors (2 of AVX2's) they fill the registers
TILE_ROWS = 96  # of queries times heads of a group, about, that share a block laid out
SPANS, LEAST_SPAN = 8, 2  # most pieces of a row's context, and the fewest blocks in one
SHORT = 8  # most queries of a row whose context is cut
PIECES = 16  # that the work is shared out in
LINE = 64  # bytes
ALONE = 8  # blocks of keys times kv heads and queries that one thread does alone


@dataclass(frozen=True)
class Form:
    """One kernel: which numbers, which heads, which instructions.

    Attributes:
      format: of pages. scales: of each token's head, 0 where the format is plain.
      queries: dtype of queries and results. group: G. head_dim: H.
      machine: the instructions.
    """

    format: Format
    scales: int
    queries: str
    group: int
    head_dim: int
    machine: Machine

    @property
    def name(self) -> str:
        """Of the custom call."""
        pages = f"{self.format.kind}x{self.scales}"
        how = f"{self.machine.name}{'_bf16' * self.in_pairs}"
        return f"jaxinfer_attention_{pages}_{self.queries}_{self.group}x{self.head_dim}_{how}"

    @property
    def in_pairs(self) -> bool:
        """Whether products are of pairs of bfloat16."""
        return (
            self.machine.has_bf16
            and self.queries == "bfloat16"
            and self.format.kind not in ("float32", "float16")
        )

    @property
    def lanes(self) -> int:
        """Numbers of 32 bits in a vector."""
        return self.machine.lanes

    @property
    def vectors(self) -> int:
        """Of the right side of a product at once."""
        return 4 if self.lanes == 16 else 2

    @property
    def panel(self) -> int:
        """Keys that rows meet at once."""
        return self.vectors * self.lanes

    @property
    def pair(self) -> int:
        """Numbers in 32 bits of the left side."""
        return 2 if self.in_pairs else 1

    @property
    def depth(self) -> int:
        """Of the product of queries and keys, in 32 bits."""
        return -(-self.head_dim // self.pair)

    @property
    def width(self) -> int:
        """Numbers of a value, made whole vectors."""
        return -(-self.head_dim // self.lanes) * self.lanes

    @property
    def tile(self) -> int:
        """Queries in a unit of work."""
        return max(SHORT, TILE_ROWS // self.group)

    @property
    def problem(self) -> str | None:
        """Why there is no such kernel, None where there is."""
        H, whole = self.head_dim, f"whole vectors of {self.lanes} numbers"
        if H % 2:
            return f"its heads are of an even number of numbers, not of {H}"
        if self.format.bits == 4 and H // 2 % self.lanes:
            return f"halves of heads in {self.format} pages must be {whole}, they are {H // 2}"
        if self.scales > 1 and H // self.scales % self.lanes:
            return f"numbers that share a scale must be {whole}, they are {H // self.scales}"
        return None

    @property
    def row_counts(self) -> Sequence[int]:
        """Numbers of rows that meet a panel at once; the first fills the registers, the others take what it leaves."""
        return sorted({ROWS, self.group % ROWS, 1} - {0}, reverse=True)

    @property
    def scales_apart(self) -> bool:
        """Whether a key's or value's one scale multiplies scores and weights; several multiply the codes."""
        return self.scales == 1


def read_int(code: Code, numbers: Value, index: Value | int) -> Value:
    """Returns an int32 of an array."""
    return code.cast(numbers.at(index, I32).load(I32), I64, "sext")


class Task(NamedTuple):
    """A tile of a row's queries.

    Attributes:
      row: b. query: t of the first. live: queries that count, none below 1. position: of the first in the row.
      first, last: blocks of keys that they see, up to and without ``last``. step: blocks in a span. spans: of them.
    """

    row: Value
    query: Value
    live: Value
    position: Value
    first: Value
    last: Value
    step: Value
    spans: Value

    @classmethod
    def of(cls, code: Code, form: Form, slots: Slots, row: Value, query: Value) -> Task:
        """Returns the task of a tile that begins at ``query``."""
        live = code.min(read_int(code, slots["length"], row) - query, form.tile)
        position = read_int(code, slots["start"], row) + query
        oldest = code.max(position - slots["window"] + 1, 0)
        first = code.select(slots["window"].equals(0), 0, oldest / KEYS)
        last = (position + live + (KEYS - 1)) / KEYS
        blocks = last - first
        step = code.max((blocks + (SPANS - 1)) / SPANS, LEAST_SPAN)
        step = code.max(code.select(slots["T"] > SHORT, blocks, step), 1)
        return cls(row, query, live, position, first, last, step, (blocks + step - 1) / step)


class Room(NamedTuple):
    """Where the parts of a thread's own memory lie.

    Attributes:
      q: ``[rows, depth]``, queries of a tile as left sides. keys: panels ``[depth, panel]``.
      values: ``[KEYS, width]``, of pairs half as many. out: ``[rows, width]`` float32.
      scores: ``[ROWS, KEYS]`` float32. weights: as left sides.
      top, total: ``[rows]``, largest score and sum of weights. shrink: ``[ROWS]``.
      k_scale, v_scale: ``[KEYS]`` float32. tokens: ``[KEYS]`` int64, which token of the pool each key is.
    """

    q: Value
    keys: Value
    values: Value
    out: Value
    scores: Value
    weights: Value
    top: Value
    total: Value
    shrink: Value
    k_scale: Value
    v_scale: Value
    tokens: Value

    @staticmethod
    def of(form: Form) -> tuple[list[int], int]:
        """Returns where each part begins, and the bytes of all."""
        rows = form.tile * form.group
        sizes = (
            rows * form.depth, KEYS * form.depth, KEYS // form.pair * form.width, rows * form.width, ROWS * KEYS,
            ROWS * KEYS // form.pair, rows, rows, ROWS, KEYS, KEYS, 2 * KEYS,
        )  # fmt: skip
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-4 * size // LINE) * LINE)
        return places[:-1], places[-1]


def whole_vectors(form: Form, keys: Value) -> Value:
    """Returns a number of keys made whole vectors."""
    return (keys + (form.lanes - 1)) / form.lanes * form.lanes


def place_of(form: Form, slots: Slots, row: Value, query: Value, head: Value, member: Value) -> Value:
    """Returns where a query head's numbers begin in ``q`` and in the result."""
    return ((row * slots["T"] + query) * slots["N"] + head * form.group + member) * form.head_dim
