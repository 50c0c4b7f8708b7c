"""Pages of the KV cache as counted property: who holds a page, which are free, and which are worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Hands out page ids ``0 .. num_pages - 1``; a page is free again when its last holder lets go.

    A page whose content is worth keeping (`remember`) is then cached: still counted as free, but taken last, the one
    let go longest ago first.

    Args:
      num_pages: P, pages that the device holds.
      page_size: Z, tokens a page.

    Attributes:
      on_evict: told of each cached page that is handed out for new content.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] = lambda page: None
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 goes first, the warmest page next
        self._remembered: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()  # remembered and held by nobody, oldest first
        self._num_shared = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose content is remembered."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.num_free

    @property
    def num_shared(self) -> int:
        """Pages that more than one holds."""
        return self._num_shared

    def pages_for(self, num_tokens: int) -> int:
        """Returns how many pages ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def count(self, page: int) -> int:
        """Returns how many hold a page."""
        return self._counts[page]

    def alloc(self, count: int) -> list[int]:
        """Takes ``count`` pages that nobody holds, each held once; cached ones are forgotten for it.

        Raises:
          ValueError: when fewer are free; nothing is taken then.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"asked for {count} pages, {self.num_free} of {self.num_pages} are free")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in taken:
            self._counts[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that somebody holds already or that are cached."""
        for page in pages:
            self._check_held(page, or_cached=True)
            self._counts[page] += 1
            if self._counts[page] == 1:
                del self._cached[page]
            self._num_shared += self._counts[page] == 2

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from each page; the last one frees it.

        The last page of the list counts as let go longest ago: what follows from a page is of no use without it.
        """
        for page in reversed(pages):
            self._check_held(page)
            self._counts[page] -= 1
            self._num_shared -= self._counts[page] == 1
            if self._counts[page]:
                continue
            if page in self._remembered:
                self._cached[page] = None
            else:
                self._free.append(page)

    def remember(self, page: int) -> None:
        """Marks a held page as worth keeping when its last holder lets go."""
        self._check_held(page)
        self._remembered.add(page)

    def forget(self, page: int) -> None:
        """Takes the mark back; a cached page is plainly free then."""
        self._remembered.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def states(self) -> bytes:
        """Returns a byte a page for a picture: 0 free, 1 held, 2 held by several, 3 cached."""
        states = bytearray(min(count, 2) for count in self._counts)
        for page in tuple(self._cached):
            states[page] = 3
        return bytes(states)

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
        unheld = sorted([*self._free, *self._cached])
        if unheld != [p for p in range(self.num_pages) if not held[p]]:
            raise RuntimeError(f"free and cached pages {unheld} are not the set of unheld pages")
        if not self._remembered.issuperset(self._cached):
            raise RuntimeError(f"cached pages {sorted(self._cached)} are not all remembered")
        if self._num_shared != sum(count > 1 for count in held):
            raise RuntimeError(f"{self._num_shared} pages counted as shared, counts are {held}")

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._remembered.discard(page)
        self.on_evict(page)
        return page

    def _check_held(self, page: int, or_cached: bool = False) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is out of range, pages are 0..{self.num_pages - 1}")
        if not self._counts[page] and not (or_cached and page in self._cached):
            raise ValueError(f"page {page} is free already")
