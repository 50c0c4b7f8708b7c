"""A long text as windows that a model reads one by one."""

from __future__ import annotations

from collections.abc import Sequence


def cut_windows(ids: Sequence[int], length: int, bos_id: int | None) -> list[list[int]]:
    """Returns ids cut into windows that do not overlap; where they begin with BOS, every window does.

    Args:
      ids: of the whole text. length: of a window without its BOS, at least 1.
      bos_id: the tokenizer's, None for one without.
    """
    bos = list(ids[:1]) if ids and ids[0] == bos_id else []
    body = ids[len(bos) :]
    return [bos + list(body[at : at + length]) for at in range(0, len(body), length)]
