"""The shapes that every implementation of paged attention is held to, in tests and in benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """One problem: rows of ragged lengths over shuffled pages.

    Attributes:
      name: says what is special. T: query tokens a row. heads: ``(N, K, H)``.
      context: tokens before the block, a row each. length: queries that count, a row each.
      window, softcap: as the kernel takes them. page_size: Z.
    """

    name: str
    T: int
    heads: tuple[int, int, int]
    context: tuple[int, ...]
    length: tuple[int, ...]
    window: int | None = None
    softcap: float | None = None
    page_size: int = 16


CASES = (
    Case("decode", 1, (9, 3, 64), (0, 15, 16, 300), (1, 1, 1, 1)),
    Case("decode one kv head", 1, (4, 1, 256), (511, 3), (1, 1)),
    Case("decode many heads", 1, (8, 8, 32), (40, 7, 1), (1, 1, 1)),
    Case("decode with padding rows", 1, (4, 2, 16), (20, 0, 33, 0), (1, 0, 1, 0)),
    Case("decode window", 1, (4, 2, 16), (5, 31, 290, 700), (1, 1, 1, 1), window=8),
    Case("decode softcap", 1, (4, 2, 16), (5, 31), (1, 1), softcap=5.0),
    Case("prefill whole", 33, (4, 2, 16), (0, 0), (33, 17)),
    Case("prefill chunk", 16, (9, 3, 64), (48, 16, 0), (16, 9, 1)),
    Case("prefill window", 47, (4, 2, 16), (10, 0), (47, 30), window=8),
    Case("prefill long context", 16, (4, 2, 16), (600, 129), (16, 16), window=200),
    Case("prefill softcap", 20, (4, 2, 16), (7,), (20,), softcap=2.0, window=16),
    Case("prefill padding row", 16, (4, 2, 16), (0, 0), (16, 0)),
    Case("verify rows", 5, (6, 2, 32), (63, 64, 65), (5, 5, 2)),
    Case("small pages", 4, (4, 2, 16), (9, 30), (4, 4), page_size=4),
)


def make_inputs(case: Case, dtype: np.typing.DTypeLike = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a case's arrays: ``q k v pages start length``, with large numbers wherever nothing may be read.

    ``k`` and ``v`` are ``[P, Z, K*H]``; pages are handed out shuffled, spare table columns point out of range.
    """
    rng = np.random.default_rng(seed)
    N, K, H = case.heads
    B, Z = len(case.context), case.page_size
    end = [c + n for c, n in zip(case.context, case.length, strict=True)]
    needed = [-(-e // Z) for e in end]
    P = sum(needed) + 3
    free = list(rng.permutation(P))
    width = max(needed) + 2
    pages = np.full((B, width), P, np.int32)
    k = np.full((P, Z, K, H), 1e4, np.float32)
    v = k.copy()
    for row in range(B):
        for i in range(needed[row]):
            page = pages[row, i] = free.pop()
            live = min(Z, end[row] - i * Z)
            k[page, :live] = rng.standard_normal((live, K, H))
            v[page, :live] = rng.standard_normal((live, K, H))
    q = rng.standard_normal((B, case.T, N, H))
    start, length = np.array(case.context, np.int32), np.array(case.length, np.int32)
    return {
        "q": q.astype(dtype),
        "k": k.reshape(P, Z, K * H).astype(dtype),
        "v": v.reshape(P, Z, K * H).astype(dtype),
        "pages": pages,
        "start": start,
        "length": length,
    }
