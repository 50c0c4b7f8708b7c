"""Embeddings: what the pieces of a prompt leave becomes one vector."""

from __future__ import annotations

import math

import numpy as np

from jaxinfer.schedule.request import Pooling
from jaxinfer.schedule.sampling_params import SamplingParams

# A prompt that is embedded is a request like any other; the token that it must make is not shown.
PARAMS = SamplingParams(max_tokens=1, temperature=0, detokenize=False, seed=0)


class Pooled:
    """Gathers the hidden states of one prompt, piece by piece.

    Args:
      pooling: ``last`` or ``mean``. length: tokens of the prompt.
    """

    def __init__(self, pooling: Pooling, length: int):
        self._pooling = pooling
        self._length = length
        self._last: np.ndarray | None = None
        self._sum = np.zeros(1)
        self._num_seen = 0

    def add(self, vectors: np.ndarray, start: int, count: int) -> None:
        """Takes in a piece; one that begins the prompt anew, as after a preemption, forgets those before.

        Args:
          vectors: float32 ``[2, D]``: of the last position, and the sum. start: position of the first token.
          count: tokens of the piece.

        Raises:
          ValueError: numbers that are not finite.
          RuntimeError: a mean of which a piece is missing.
        """
        if not np.isfinite(vectors).all():
            raise ValueError("the model's hidden states are not finite; try policy=float32")
        if start == 0:
            self._sum, self._num_seen = np.zeros(vectors.shape[1]), 0
        if self._pooling == "mean" and start != self._num_seen:
            raise RuntimeError(
                f"positions {self._num_seen} to {start - 1} of the prompt are missing from its mean"
            )
        self._sum = self._sum + vectors[1]  # in float64
        self._num_seen = start + count
        if self._num_seen == self._length:
            self._last = vectors[0]

    def vector(self, *, normalize: bool) -> list[float]:
        """Returns the embedding, of length 1 where that is asked for.

        Raises:
          RuntimeError: the prompt has not run to its end.
        """
        if self._last is None:
            raise RuntimeError(f"{self._num_seen} of {self._length} tokens of the prompt have run")
        found = self._last.astype(np.float64) if self._pooling == "last" else self._sum / self._length
        norm = math.sqrt(found @ found)
        return (found / norm if normalize and norm else found).tolist()
