"""What a person sees on stderr while something runs; a log gets few lines and no bars."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm

_LOG_LINES = 10  # for a whole run


def say(line: str) -> None:
    """Writes a line to stderr; stdout is for the answer alone."""
    print(f"jaxinfer: {line}", file=sys.stderr, flush=True)


class Progress:
    """Counts what is done: a bar on a terminal, else a line for each tenth.

    Args:
      title: what runs. total: how many. unit: of what.
    """

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._is_bar = sys.stderr.isatty()
        self._bar = tqdm(desc=title, total=total, unit=unit, disable=not self._is_bar, file=sys.stderr)
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self) -> None:
        """Counts one more."""
        self._bar.update()
        self._done += 1
        tenths = self._done * _LOG_LINES // self._total
        if not self._is_bar and tenths > (self._done - 1) * _LOG_LINES // self._total:
            say(f"{self._title}: {self._done} of {self._total} {self._unit}s")

    def write(self, text: str) -> None:
        """Writes lines of the answer to stdout, above the bar."""
        self._bar.write(text, file=sys.stdout)
        sys.stdout.flush()
