"""KV pages in the host's memory: copies out of and back into the cache, as a plan orders them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.steps.compiled import COPY_PAGES, StepTable


class HostPages:
    """Room for pages, a host slot each; memory is taken as slots are first written.

    Args:
      num_slots: pages that fit. widths: numbers and dtype of a page, for each dtype (`copy_widths`).
      num_pages: P, an id that no page has. table: holds the executables.
    """

    def __init__(
        self, num_slots: int, widths: Sequence[tuple[int, Any]], num_pages: int, table: StepTable
    ) -> None:
        self._room = [np.empty((num_slots, width), dtype) for width, dtype in widths]
        self._num_pages = num_pages
        self._table = table
        self._coming: list[tuple[list[int], tuple[jax.Array, ...]]] = []  # slots and what is to lie there

    def save(self, cache: Any, saves: Sequence[tuple[int, int]]) -> None:
        """Starts copies ``(page, slot)`` out of the cache; `settle` ends them."""
        for pages, slots in _batches(saves, self._num_pages):
            self._coming.append((slots, self._table.read_pages(cache, self._table.put(pages))))

    def load(self, cache: Any, loads: Sequence[tuple[int, int]]) -> Any:
        """Returns the cache, which is consumed, with copies ``(slot, page)`` in it."""
        self.settle()
        for pages, slots in _batches([(page, slot) for slot, page in loads], self._num_pages):
            taken = (slots + slots[:1] * COPY_PAGES)[:COPY_PAGES]  # what fills up goes to no page
            content = tuple(room[taken] for room in self._room)
            content = self._table.put(content, None, "page_content")
            cache = self._table.replace_pages(cache, self._table.put(pages), content)
        return cache

    def settle(self) -> None:
        """Waits for what was saved and puts it into its slots, in the order in which it was asked for."""
        for slots, content in self._coming:
            for room, part in zip(self._room, jax.device_get(content), strict=True):
                for slot, row in zip(slots, part, strict=False):
                    room[slot] = row
        self._coming.clear()


def _batches(copies: Sequence[tuple[int, int]], no_page: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Page ids filled up to `COPY_PAGES` with one that no page has, and the host slots beside them."""
    for start in range(0, len(copies), COPY_PAGES):
        batch = copies[start : start + COPY_PAGES]
        pages = np.full(COPY_PAGES, no_page, np.int32)
        pages[: len(batch)] = [page for page, _ in batch]
        yield pages, [slot for _, slot in batch]
