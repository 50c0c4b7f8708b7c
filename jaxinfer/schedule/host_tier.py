"""Pages that lie in the host's memory: which key is where, and the copies that the next plan has to make."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from jaxinfer.schedule.request import Request


class HostTier:
    """A map from keys to host slots ``0 .. num_slots - 1``, the key used longest ago giving way first.

    Copies are orders, carried out by the runner at the start of a plan: all saves, then all loads.

    Args:
      num_slots: pages that fit; 0 keeps nothing.
    """

    def __init__(self, num_slots: int):
        if num_slots < 0:
            raise ValueError(f"num_slots must be at least 0, got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the latest used last
        self._pins: dict[bytes, set[Request]] = {}
        self._pinned: dict[Request, list[bytes]] = {}
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._busy: set[int] = set()  # slots that this plan's loads read: a save before them would spoil them
        self._fresh: set[int] = (
            set()
        )  # pages that this plan's loads fill: a save before them would read rubbish

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def save(self, key: bytes, page: int, request: Request | None = None) -> bool:
        """Orders a copy of a page, if there is none and there is room, or can be made.

        Args:
          key: of the page. page: where it lies now. request: for whom it must stay, None for nobody.

        Returns:
          Whether the host has or will have it.
        """
        if key not in self._slot_of:
            slot = None if page in self._fresh else self._take_slot()
            if slot is None:
                return False
            self._slot_of[key] = slot
            self._saves.append((page, slot))
        self._slot_of.move_to_end(key)
        if request is not None:
            self._pins.setdefault(key, set()).add(request)
            self._pinned.setdefault(request, []).append(key)
        return True

    def hold(self, keys: Iterable[bytes]) -> None:
        """Keeps what is about to be loaded from giving way within this plan."""
        for key in keys:
            self._slot_of.move_to_end(key)
            self._busy.add(self._slot_of[key])

    def load(self, key: bytes, page: int) -> None:
        """Orders a copy of a key that is held back to a page of the device; the host keeps its own."""
        self._loads.append((self._slot_of[key], page))
        self._fresh.add(page)

    def unpin(self, request: Request) -> None:
        """Lets what was kept for a request give way like everything else."""
        for key in self._pinned.pop(request, ()):
            self._pins[key].discard(request)
            if not self._pins[key]:
                del self._pins[key]

    def discard(self, key: bytes) -> None:
        """Forgets a key that nothing is kept for; the slot is free for later plans."""
        if key in self._slot_of and key not in self._pins:
            self._free.append(self._slot_of.pop(key))

    def clear(self) -> None:
        """Forgets all that is not kept for a request."""
        for key in list(self._slot_of):
            self.discard(key)

    def take_orders(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Returns and forgets the copies of a plan: ``(page, slot)`` to save, then ``(slot, page)`` to load."""
        orders = tuple(self._saves), tuple(self._loads)
        self._saves, self._loads = [], []
        self._busy.clear()
        self._fresh.clear()
        return orders

    @property
    def has_orders(self) -> bool:
        """Whether the next plan has something to copy."""
        return bool(self._saves or self._loads)

    def check_invariants(self) -> None:
        """Checks that every slot is free or has one key.

        Raises:
          RuntimeError: with what disagrees.
        """
        slots = sorted([*self._free, *self._slot_of.values()])
        if slots != list(range(self.num_slots)):
            raise RuntimeError(f"host slots free and taken are {slots}, there are {self.num_slots}")
        if not self._pins.keys() <= self._slot_of.keys():
            raise RuntimeError("a key is kept for a request and is not there")

    def _take_slot(self) -> int | None:
        if self._free and self._free[-1] not in self._busy:
            return self._free.pop()
        for key in self._candidates():
            return self._slot_of.pop(key)
        return None

    def _candidates(self) -> Iterator[bytes]:
        """Keys that may give way, the one used longest ago first."""
        for key, slot in self._slot_of.items():
            if key not in self._pins and slot not in self._busy:
                yield key
