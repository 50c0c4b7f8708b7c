"""The prefix cache: full pages found again by the tokens that they and all before them hold.

A page's key is a hash chained over its tokens and its predecessor's key, so that equal keys mean equal tokens at equal
positions, and the same salt. Only full pages have keys, and full pages never change: what is shared needs no copy on
write. A page is registered once the plan that fills it is made; plans run in order, so every later plan may read it.

Pages live in two tiers. On the device a registered page stays when its last holder lets go, until the pool wants it
for something else; then it moves to the host's memory, if there is room, and comes back when it is asked for.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from jaxinfer.schedule.host_tier import HostTier
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.request import PrefixReport, Request

NUM_REMEMBERED_EVICTIONS = 65536  # keys, so that a miss can be told to be an eviction


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the key of a page after its predecessor's key: 16 bytes that no other content has."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def root_key(salt: str | None) -> bytes:
    """Returns what stands before the first page: nothing, or what a salt makes different from every other."""
    return b"" if salt is None else blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Match(NamedTuple):
    """What the cache holds of a request.

    Attributes:
      pages: ids on the device, -1 for a page that lies in the host's memory. num_held: of these, in use by others.
      limit: full pages that might have been found.
    """

    pages: list[int]
    num_held: int
    limit: int


@dataclass(slots=True)
class PrefixCounts:
    """Running totals: tokens of prompts looked up, and of these found."""

    queries: int = 0
    hits: int = 0


class PrefixCache:
    """Full pages by content, over a pool.

    Args:
      pool: the pages. num_host_pages: pages that fit into the host's memory.
      enabled: whether requests share pages; else a request only finds its own again, after a preemption.
    """

    def __init__(self, pool: PagePool, num_host_pages: int = 0, enabled: bool = True):
        self.pool = pool
        self.enabled = enabled
        self.host = HostTier(num_host_pages)
        self.counts = PrefixCounts()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._filling: dict[bytes, Request] = {}  # pages that a running prefill will fill, and whose it is
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        pool.on_evict = self._evict

    def match(self, request: Request) -> Match:
        """Returns the longest run of full pages from the start; at least the last known token is left to compute."""
        limit = 0 if request.needs_every_position else (request.num_known - 1) // self.pool.page_size
        pages: list[int] = []
        if not limit or not (self._page_of or self.host):
            return Match(pages, 0, limit)
        for key in self._keys(request, limit)[:limit]:
            page = self._page_of.get(key, -1)
            if page < 0 and key not in self.host:
                break
            pages.append(page)
        return Match(pages, sum(page >= 0 and self.pool.count(page) > 0 for page in pages), limit)

    def cached_tokens(self, request: Request) -> int:
        """Returns how many of a request's tokens need not be computed."""
        return len(self.match(request).pages) * self.pool.page_size

    def is_coming(self, request: Request, match: Match) -> bool:
        """Whether a running row is about to fill the first page that is missing: waiting costs less than computing."""
        found = len(match.pages)
        if not self._filling or found == match.limit:
            return False
        return self._keys(request, match.limit)[found] in self._filling

    def take(self, request: Request, match: Match) -> None:
        """Gives a request the pages of its match, and notes those that its prefill will fill."""
        keys = self._keys(request, match.limit)
        # First of all, or what `alloc` evicts might be these very pages, or take their place on the host.
        self.pool.retain([page for page in match.pages if page >= 0])
        self.host.hold([key for key, page in zip(keys, match.pages, strict=False) if page < 0])
        for key, page in zip(keys, match.pages, strict=False):
            if page < 0:
                (page,) = self.pool.alloc(1)
                self.host.load(key, page)
                self._register(key, page)
            request.pages.append(page)
        request.prefix.num_registered = len(match.pages)
        request.num_written = len(match.pages) * self.pool.page_size
        self.host.unpin(request)
        if request.prefix.report is None:
            self._report(request, match)
        if self.enabled:
            full = request.num_prefill // self.pool.page_size
            for key in self._keys(request, full)[len(match.pages) : full]:
                self._filling.setdefault(key, request)

    def register(self, request: Request) -> None:
        """Enters the pages that the plans made so far fill, as far as their tokens are known."""
        if self.enabled:
            self._enter(request)

    def save(self, request: Request) -> bool:
        """Copies a running request's full pages to the host's memory and keeps them there until it runs again.

        Returns:
          Whether there were any and all were copied; what found no room will be computed anew.
        """
        if request.needs_every_position:
            return False  # it could not use them
        self._enter(request)
        keys = request.prefix.keys[: request.prefix.num_registered]
        saved = [self.host.save(key, self._page_of[key], request) for key in keys if key in self._page_of]
        return bool(saved) and all(saved)

    def leave(self, request: Request, *, ended: bool) -> None:
        """Takes a request's pages from it, when it ends or gives way."""
        for key in request.prefix.keys[request.prefix.num_registered :]:
            if self._filling.get(key) is request:
                del self._filling[key]
        self.pool.release(request.pages)
        request.pages = []
        request.prefix.num_registered = 0
        if ended:
            self.end(request)

    def end(self, request: Request) -> None:
        """Forgets what nobody but this request could find."""
        self.host.unpin(request)
        if not self.enabled:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Forgets what lies under the keys of a request that has ended; nobody finds it, who holds it keeps it."""
        for key in request.prefix.keys:
            self.host.discard(key)
            page = self._page_of.pop(key, None)
            if page is not None:
                del self._key_of[page]
                self.pool.forget(page)

    def clear(self) -> None:
        """Forgets all that nobody holds."""
        for key, page in list(self._page_of.items()):
            if not self.pool.count(page):
                del self._page_of[key], self._key_of[page]
                self.pool.forget(page)
        self.host.clear()

    def check_invariants(self) -> None:
        """Checks that both maps agree with each other, and the host's tier with itself.

        Raises:
          RuntimeError: with what disagrees.
        """
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise RuntimeError(f"pages by key {self._page_of} and keys by page {self._key_of} disagree")
        self.host.check_invariants()

    def _enter(self, request: Request) -> None:
        full = min(request.num_written, request.num_known) // self.pool.page_size
        state = request.prefix
        if full <= state.num_registered:
            return
        keys = self._keys(request, full)
        for index in range(state.num_registered, full):
            self._filling.pop(keys[index], None)
            if keys[index] not in self._page_of:  # else two computed the same at once; one copy is enough
                self._register(keys[index], request.pages[index])
        state.num_registered = full

    def _register(self, key: bytes, page: int) -> None:
        self._page_of[key] = page
        self._key_of[page] = key
        self.pool.remember(page)
        self._evicted.pop(key, None)

    def _evict(self, page: int) -> None:
        key = self._key_of.pop(page)
        del self._page_of[key]
        self.host.save(key, page)
        self._evicted[key] = None
        if len(self._evicted) > NUM_REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Returns the request's keys, at least ``count`` of them; each is computed once."""
        keys, Z = request.prefix.keys, self.pool.page_size
        while len(keys) < count:
            parent = keys[-1] if keys else self._root(request)
            start = len(keys) * Z
            keys.append(page_key(parent, request.known_tokens(start, start + Z)))
        return keys

    def _root(self, request: Request) -> bytes:
        if self.enabled:
            return root_key(request.spec.cache_salt)
        return b"private" + request.rank[1].to_bytes(8, "little")

    def _report(self, request: Request, match: Match) -> None:
        """Notes what a request found when it first ran, and why not more."""
        found, Z = len(match.pages), self.pool.page_size
        num_prompt = len(request.spec.prompt)
        if self.enabled:
            self.counts.queries += num_prompt
            self.counts.hits += found * Z
        missing = found if found < match.limit else None
        request.prefix.report = PrefixReport(num_prompt, found * Z, missing, self._reason(request, match))

    def _reason(self, request: Request, match: Match) -> str:
        found, Z, salt = len(match.pages), self.pool.page_size, request.spec.cache_salt
        if not self.enabled:
            return "the prefix cache is off (enable_prefix_caching)"
        if request.needs_every_position:
            return "every position is wanted (prompt_logprobs, or the mean of an embedding)"
        if not match.limit:
            return f"no full page before the last token: {request.num_known} tokens, {Z} a page"
        if found == match.limit:
            return "hit: every full page before the last token"
        if self._keys(request, match.limit)[found] in self._evicted:
            return "evicted: the first missing page was there and made room for others"
        if salt is not None and not found:
            plain = page_key(root_key(None), request.known_tokens(0, Z))
            if plain in self._page_of or plain in self.host:
                return "cache_salt: the first page is there without this request's salt"
        return f"new: nothing seen before has the same tokens up to position {(found + 1) * Z}"
