"""A device in plain Python whose KV cells remember what they were computed from.

The cell of position p is a hash chained over the ids at 0..p, read through the page table as a real cache is. A
row that reads a page that was never written, was written by someone else, or was written from other tokens finds
a broken chain. Its sampled id depends on the whole chain and the seed, so outputs prove what was read.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxinfer.schedule.plan import Plan

VOCAB = 23
EOS = 0


def extend(chain: int, token: int) -> int:
    """The cell after a cell and a token (a hash of integers is the same in every process)."""
    return hash((chain, token, 1))


def sample(chain: int, seed: int) -> int:
    """The id drawn after a cell."""
    return hash((chain, seed, 2)) % VOCAB


def solo(prompt: tuple[int, ...], seed: int, count: int, stop_ids: frozenset[int]) -> list[int]:
    """What a request alone in the world generates."""
    chain, output = 0, []
    for token in prompt:
        chain = extend(chain, token)
    while len(output) < count:
        output.append(sample(chain, seed))
        if output[-1] in stop_ids:
            break
        chain = extend(chain, output[-1])
    return output


class FakeDevice:
    """Runs plans at once and returns token rows; `AssertionError` is a fault of the scheduler."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int, num_host_pages: int = 0):
        self.page_size = page_size
        self.cells = np.zeros((num_pages, page_size), object)
        self.host = np.zeros((num_host_pages, page_size), object)
        self.histories: list[list[int]] = [[] for _ in range(num_slots)]
        self.seeds = [0] * num_slots
        self.num_tokens = 0

    def run(self, plan: Plan) -> list[list[int]]:
        table = plan.page_table.copy()
        slots = [row.slot for row in (*plan.decode, *plan.prefill)]
        assert len(set(slots)) == len(slots), "a slot runs twice in one plan"
        holders = Counter(page for slot in slots for page in table[slot] if page < len(self.cells))
        for page, slot in plan.saves:
            self.host[slot] = self.cells[page]
        for slot, page in plan.loads:
            self.cells[page] = self.host[slot]
        for admission in plan.admitted:
            self.histories[admission.slot] = list(admission.cached)
            self.seeds[admission.slot] = admission.seed
        # What a row finds must be there before the plan writes anything: nobody may count on this very plan.
        for slot, start in [(r.slot, r.position) for r in plan.decode] + [
            (p.slot, p.start) for p in plan.prefill
        ]:
            self._verified(table[slot], slot, start - 1)
        for piece in plan.prefill:
            history = self.histories[piece.slot]
            assert piece.start == len(history)
            assert piece.tokens
            history.extend(piece.tokens)
        reads = [(row.slot, row.position) for row in plan.decode]
        reads += [
            (piece.slot, piece.start + len(piece.tokens) - 1) for piece in plan.prefill if piece.is_last
        ]
        results: list[list[int]] = [[] for _ in reads]
        for substep in range(plan.num_decode_steps):
            writes = [(row.slot, row.position + substep) for row in plan.decode]
            if substep == 0:
                writes += [(p.slot, p.start + i) for p in plan.prefill for i in range(len(p.tokens))]
            self.num_tokens += len(writes)
            for slot, position in writes:
                chain = self._cell(table[slot], position - 1) if position else 0
                page = table[slot, position // self.page_size]
                assert page < len(self.cells), f"slot {slot} has no page for position {position}"
                assert holders[page] == 1, f"slot {slot} writes to a page that another row reads"
                self.cells[page, position % self.page_size] = extend(chain, self.histories[slot][position])
            for result, (slot, position) in zip(results, reads, strict=True):
                token = sample(self._verified(table[slot], slot, position + substep), self.seeds[slot])
                assert len(self.histories[slot]) == position + substep + 1
                self.histories[slot].append(token)
                result.append(token)
        return results

    def _cell(self, pages: np.ndarray, position: int) -> int:
        return self.cells[pages[position // self.page_size], position % self.page_size]

    def _verified(self, pages: np.ndarray, slot: int, last: int) -> int:
        chain = 0
        for position in range(last + 1):
            chain = extend(chain, self.histories[slot][position])
            assert self._cell(pages, position) == chain, f"slot {slot} reads a foreign cell at {position}"
        return chain
