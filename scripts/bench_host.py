"""Measures what the host does in one engine step, with a device that answers at once.

    python scripts/bench_host.py            # 64 rows: under 1 ms a step on one core

Prints a decode step's processor time (a busy machine does not count), mean and percentiles, for streams, for whole
answers, and for rows with stop strings.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.protocol import StepResult
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.plan import Plan
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.schedule.scheduler import Scheduler, SchedulerConfig
from jaxinfer.text import Tokenizer


class Letters(Tokenizer):
    """Token ids are ASCII."""

    def __init__(self):
        self._table = [bytes([token]) for token in range(128)]

    @property
    def strips_space(self) -> bool:
        """Never."""
        return False

    @property
    def special_ids(self) -> frozenset[int]:
        """None."""
        return frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """The letter."""
        return self._table[token_id]


class InstantRunner:
    """Answers every row with the same token, at once."""

    def dispatch(self, plan: Plan) -> StepResult:
        """Gathers the rows' pages as a real runner does, and answers."""
        plan.page_table[np.fromiter((row.slot for row in plan.decode), np.int32, len(plan.decode))]
        return StepResult(np.full((plan.num_result_rows, plan.num_decode_steps), 97, np.int32))

    def collect(self, pending: StepResult) -> StepResult:
        """Returns what `dispatch` made."""
        return pending


def time_steps(
    num_rows: int, num_steps: int, num_waiting: int, params: SamplingParams, *, stream: bool
) -> np.ndarray:
    """Returns the processor milliseconds of each decode step with ``num_rows`` rows."""
    config = SchedulerConfig(max_num_seqs=num_rows, max_len=2048, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, PagePool(num_rows * 128, 16))
    engine = Engine(scheduler, InstantRunner(), Letters(), vocab_size=128, eos_ids=())
    for _ in range(num_rows + num_waiting):
        engine.submit([1] * 100, params, stream=stream)
    while len(scheduler.running) < num_rows:
        engine.step()
    times = np.empty(num_steps)
    for i in range(num_steps):
        start = time.thread_time()
        engine.step()
        times[i] = 1e3 * (time.thread_time() - start)
    return times


def main() -> None:
    """Prints one line a case."""
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    cases = {
        "streams": (0, SamplingParams(max_tokens=1500), True),
        "whole answers": (0, SamplingParams(max_tokens=1500), False),
        "with stop strings": (0, SamplingParams(max_tokens=1500, stop=["xyz", "\n\n"]), True),
        "2,000 waiting": (2000, SamplingParams(max_tokens=1500), True),
    }
    for name, (num_waiting, params, stream) in cases.items():
        times = time_steps(num_rows, 1000, num_waiting, params, stream=stream)
        p50, p99 = np.percentile(times, [50, 99])
        print(f"{num_rows} rows, {name:18} mean {times.mean():.3f} ms  p50 {p50:.3f}  p99 {p99:.3f}")


if __name__ == "__main__":
    main()
