"""What the host offers, read from the operating system: no jax."""

from __future__ import annotations

import os
import re
from pathlib import Path

NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # x86 and Arm names of bfloat16 multiply instructions


def host_memory_bytes() -> int:
    """Returns the bytes of memory that this process may hope for: what is available, within a container's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if found:
            available = int(found.group(1)) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        available = min(available, int(limit.read_text()))
    return available


def cpu_features() -> frozenset[str]:
    """Returns the processor's feature flags as the kernel names them; empty where it does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def has_native_bfloat16() -> bool:
    """Returns whether this processor multiplies bfloat16 itself."""
    return not cpu_features().isdisjoint(NATIVE_BFLOAT16)
