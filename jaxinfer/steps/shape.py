"""What a forward executable is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.steps.steps import MIN_DRAWS


@dataclass(frozen=True, order=True)
class Shape:
    """The shape of one forward executable.

    Attributes:
      decode: B decode rows, 0 for none.
      prefill: ``(b, T)`` prefill rows and tokens a row, ``(0, 0)`` for none.
      width: W, page ids a row, which bounds the context.
      num_steps: decode steps, draws included, without return to the host (1 with prefill rows).
    """

    decode: int
    prefill: tuple[int, int]
    width: int
    num_steps: int = 1

    def draws(self, num_shares: int = 1) -> tuple[int, ...]:
        """Returns how many rows of logits each block leaves behind, decode rows first.

        Args:
          num_shares: into which a mesh cuts the rows, which they divide.
        """
        rows = (count for count in (self.decode, self.prefill[0]) if count)
        return tuple(num_shares * max(MIN_DRAWS, count // num_shares) for count in rows)

    def __str__(self) -> str:
        parts = [f"decode {self.decode}"] if self.decode else []
        parts += ["prefill {}x{}".format(*self.prefill)] if self.prefill[0] else []
        steps = f" x{self.num_steps} steps" if self.num_steps > 1 else ""
        return f"{' + '.join(parts)} over {self.width} pages{steps}"
