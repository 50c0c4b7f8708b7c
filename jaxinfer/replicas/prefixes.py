"""Who has the beginning of a prompt: what was sent to whom, by blocks of text. No Ray, no engine."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
BLOCK = 64  # characters: about a page of 16 tokens
CAPACITY = 2**18  # blocks that are remembered, 100 bytes each
# What of a body makes the pages that it could share; in this order, for these stand before the text in a prompt.
_FIELDS = ("cache_salt", "tools", "messages", "prompt", "input")


def text_of(body: bytes) -> str:
    """Returns what of a request's body its pages come from, equal where two prompts begin alike; "" for none."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(given, dict):
        return ""
    parts = (given[name] for name in _FIELDS if given.get(name) is not None)
    # Without the brackets that close a list: a longer conversation goes on where they stand.
    return "\n".join(part if isinstance(part, str) else json.dumps(part).rstrip('"}]') for part in parts)


class PrefixMap(Generic[Name]):
    """Remembers which texts went where, the latest of them.

    Args:
      block: characters that are compared at a time. capacity: blocks that are remembered.
    """

    def __init__(self, block: int = BLOCK, capacity: int = CAPACITY):
        if block < 1 or capacity < 1:
            raise ValueError(f"block and capacity: got {block} and {capacity}, must be at least 1")
        self._block, self._capacity = block, capacity
        self._holders: OrderedDict[bytes, dict[Name, None]] = (
            OrderedDict()
        )  # by all the text up to a block's end
        self._sent: Counter[Name] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, text: str, name: Name) -> None:
        """Remembers that a text went to a name."""
        self._sent[name] += 1
        for key in reversed(self._keys(text)):  # so that the beginning is the last to be forgotten
            self._holders.setdefault(key, {})[name] = None
            self._holders.move_to_end(key)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def matches(self, text: str) -> Counter[Name]:
        """Returns how many blocks from the beginning each name has, of those that have any."""
        found: Counter[Name] = Counter()
        for count, key in enumerate(self._keys(text), 1):
            holders = [name for name in self._holders.get(key, ()) if found[name] == count - 1]
            if not holders:
                break
            found.update(holders)
        return +found

    def order(self, text: str, loads: Mapping[Name, int], slack: int) -> list[Name]:
        """Returns the names of ``loads``, the best for a text first.

        Args:
          text: of `text_of`. loads: requests that each name has. slack: how many more than the least loaded a name may
            have and still be taken for what it holds: waiting for a row costs more than a prefix saves.

        Returns:
          First those within the slack, the longest match first; then the least loaded, then who was sent the fewest.
        """
        least, found = min(loads.values(), default=0), self.matches(text)

        def rank(name: Name) -> tuple[bool, int, int, int]:
            return loads[name] > least + slack, -found[name], loads[name], self._sent[name]

        return sorted(loads, key=rank)

    def keep(self, names: Mapping[Name, object]) -> None:
        """Forgets all names but these: whoever comes back has an empty cache."""
        if not self._sent.keys() <= names.keys():
            self._sent = Counter({name: count for name, count in self._sent.items() if name in names})
            left = ((key, {n: None for n in held if n in names}) for key, held in self._holders.items())
            self._holders = OrderedDict((key, held) for key, held in left if held)

    def _keys(self, text: str) -> list[bytes]:
        keys, chain = [], hashlib.blake2b(digest_size=16)
        for start in range(0, len(text) - self._block + 1, self._block):
            chain.update(text[start : start + self._block].encode("utf-8", "surrogatepass"))
            keys.append(chain.digest())
        return keys
