"""What lies on the devices, and the operations that change it: the same ones, in the same order, on every host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.steps.compiled import StepTable
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.slots import Slots
from jaxinfer.steps.steps import Ahead, DecodeRows, PrefillRows


@dataclass(frozen=True)
class Operation:
    """One call of an executable.

    Attributes:
      kind: which, of `Device`. sizes: that tell it from others of its kind. arrays: what the host gives to it.
    """

    kind: str
    sizes: tuple[int, ...] = ()
    arrays: tuple[np.ndarray, ...] = ()


def forward_of(shape: Shape, *packed: np.ndarray) -> Operation:
    """Returns the forward step of a shape over its packed rows, decode rows first."""
    return Operation("forward", (shape.decode, *shape.prefill, shape.width, shape.num_steps), packed)


class Device:
    """The state of a run on the devices of this process, and its executables.

    Args:
      params, cache, slots: of `make_state`; cache and slots are consumed and replaced by operations.
      table: compiled steps.

    Attributes:
      params, cache, slots, table: as they are now.
    """

    def __init__(self, params: Any, cache: Any, slots: Slots, table: StepTable) -> None:
        self.params, self.cache, self.slots, self.table = params, cache, slots, table
        self._ahead: tuple[Ahead, ...] = ()
        self._shape, self._rows = Shape(0, (0, 0), 0), None  # of the forward step that left ``_ahead``
        self._row_tree = jax.tree.structure(slots.packed)
        self._kinds = {
            "install": self._install,
            "recall": self._recall,
            "forward": self._forward,
            "draw": self._draw,
            "score": self._score,
            "embed": self._embed,
        }

    def run(self, operations: Sequence[Operation]) -> list[Any]:
        """Starts operations and returns at once what each computes, on the devices, or None."""
        found = [self._kinds[one.kind](one.sizes, one.arrays) for one in operations]
        self._ahead = ()
        return found

    def _install(self, sizes: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> None:
        """A request's settings for a slot: its number, then the leaves of what `pack_row` gives."""
        slot, *row = arrays
        row = jax.tree.unflatten(self._row_tree, row)
        self.slots = self.table.install(self.slots, self.table.put(slot), self.table.put(row))

    def _recall(self, sizes: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> None:
        """Tokens of a prompt whose pages were found: slot and tokens."""
        slot, found = arrays
        tokens = np.zeros(self.slots.history.shape[1], np.int32)
        tokens[: len(found)] = found
        known = self.table.put((slot, tokens, np.array(len(found), np.int32)))
        self.slots = self.table.recall(self.slots, *known)

    def _forward(self, sizes: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> Any:
        """See `forward_of`; returns the draws of several steps, or leaves what `draw` and its kin take."""
        self._ahead = ()
        B, b, T, width, num_steps = sizes
        shape = Shape(B, (b, T), width, num_steps)
        kinds = [kind for kind, there in ((DecodeRows, B), (PrefillRows, b)) if there]
        rows = self.table.put(tuple(kind(array) for kind, array in zip(kinds, arrays, strict=True)), "rows")
        step = self.table.forward(shape)
        found, self.cache, self.slots = step(self.params, self.cache, self.slots, *rows)
        if num_steps > 1:
            return found
        self._ahead, self._shape, self._rows = found, shape, rows[-1]
        return None

    def _draw(self, sizes: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> Any:
        """Draws for a block of the forward step before: its number, 1 where the likeliest tokens will do."""
        block, greedy = sizes
        ahead = self._ahead[block]
        draw = self.table.draw(len(ahead.rows), greedy=bool(greedy))
        drawn, self.slots = draw(self.slots, ahead.logits, ahead.rows)
        return drawn

    def _score(self, sizes: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> Any:
        """Scores the prompts of the forward step before."""
        return self.table.score(self._shape)(self.params, self._ahead[-1].x, self._rows)

    def _embed(self, sizes: tuple[int, ...], arrays: tuple[np.ndarray, ...]) -> Any:
        """Pools the prompts of the forward step before."""
        return self.table.embed(self._shape)(self._ahead[-1].x, self._rows)
