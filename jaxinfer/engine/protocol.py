"""What the engine asks of a runner, and what a runner answers: the only words between host and device tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxinfer.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of tokens and of the likeliest alternatives.

    Attributes:
      chosen: float32 ``[...]``, of the token itself. ranks: int32 ``[...]``, 1 = the likeliest.
      top_ids: int32 ``[..., C]``, likeliest first. top: float32 ``[..., C]``, of ``top_ids``.
      C is at least the largest count that a row of the plan asks for; a row reads its own first columns.
    """

    chosen: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought back; rows are decode rows in plan order, then the last prefill pieces in plan order.

    Attributes:
      tokens: int32 ``[rows, num_decode_steps]``; a row of a last prefill piece holds its token in column 0.
      logprobs: ``[rows, num_decode_steps]`` leading, None when no row of the plan asks for any.
      prompt_logprobs: one entry a piece of ``plan.prefill`` (empty when none asks): None, or leading ``[T]`` for
        the tokens at positions ``start + 1 .. start + T``, each given all before it; entries at or beyond the
        prompt's length are not read.
      pooled: one entry a piece of ``plan.prefill`` (empty when none asks): None, or float32 ``[2, D]``, the hidden
        state of the piece's last position and the sum over all of them. With ``last`` only the last piece has one.
    """

    tokens: np.ndarray
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    pooled: tuple[np.ndarray | None, ...] = ()


class Runner(Protocol):
    """Runs plans on the device, in the order in which they are dispatched."""

    def dispatch(self, plan: Plan) -> Any:
        """Starts a plan and returns at once; what comes back is handed to `collect` unread."""
        ...

    def collect(self, pending: Any) -> StepResult:
        """Waits for one dispatched plan, oldest first."""
        ...
