"""Pages of the KV cache as counted property: who holds a page, and which are free."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Hands out page ids ``0 .. num_pages - 1``; a page is free again when its last holder lets go.

    Args:
      num_pages: P, pages that the device holds.
      page_size: Z, tokens a page.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 goes first, the warmest page next

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Returns how many pages ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def alloc(self, count: int) -> list[int]:
        """Takes ``count`` free pages, each held once.

        Raises:
          ValueError: when fewer are free; nothing is taken then.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"asked for {count} pages, {len(self._free)} of {self.num_pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._counts[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that somebody holds already."""
        for page in pages:
            self._check_held(page)
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder from each page; the last one frees it."""
        for page in pages:
            self._check_held(page)
            self._counts[page] -= 1
            if not self._counts[page]:
                self._free.append(page)

    def check_conserved(self, holdings: Iterable[Iterable[int]]) -> None:
        """Checks that the counts are exactly what ``holdings`` (the pages of every holder) add up to.

        Raises:
          RuntimeError: naming every page that is leaked, over-held, or free and held at once.
        """
        held = [0] * self.num_pages
        for pages in holdings:
            for page in pages:
                held[page] += 1
        wrong = {p: (self._counts[p], held[p]) for p in range(self.num_pages) if self._counts[p] != held[p]}
        if wrong:
            raise RuntimeError(f"page counts (counted, held) that disagree: {wrong}")
        if sorted(self._free) != [p for p in range(self.num_pages) if not held[p]]:
            raise RuntimeError(f"free list {sorted(self._free)} is not the set of unheld pages")

    def _check_held(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is out of range, pages are 0..{self.num_pages - 1}")
        if not self._counts[page]:
            raise ValueError(f"page {page} is free already")
