"""What a benchmark needs to know of its machine: whether it is idle, and how fast it reads memory."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

IDLE_CORES = 0.1  # of processor time that may be used on an idle machine, in cores
WINDOW = 0.3  # seconds over which that is looked at

_STAT = Path("/proc/stat")


def busy_seconds() -> float | None:
    """Returns the seconds that the cores worked, or were lent elsewhere, since the start; None where unknown."""
    if not _STAT.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, _STAT.read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_idle(limit: float, window: float = WINDOW) -> bool | None:
    """Waits until the machine has nothing to do, at most ``limit`` seconds.

    Returns:
      Whether it had nothing to do in the end; None where this cannot be known.
    """
    end = time.monotonic() + limit
    while (before := busy_seconds()) is not None:
        time.sleep(window)
        if (busy_seconds() or before) - before <= IDLE_CORES * window:
            return True
        if time.monotonic() >= end:
            return False
    return None


def is_disturbed(busy: float | None, own: float, wall: float) -> bool:
    """Tells whether others worked during a measurement.

    Args:
      busy: seconds that all cores worked, None where unknown. own: those of the measured process. wall: its duration.
    """
    return busy is not None and busy - own > max(IDLE_CORES * wall, 0.05)  # the kernel counts in 0.01 s


def read_bandwidth(num_bytes: int, threads: int, repetitions: int = 9) -> float:
    """Returns the median bytes a second at which threads read a buffer, as steps read their weights."""
    parts = np.array_split(np.ones(max(num_bytes // 4, threads), np.float32), threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            start = time.perf_counter()
            list(pool.map(lambda part: float(part.dot(part)), parts))
            times.append(time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / float(np.median(times))
