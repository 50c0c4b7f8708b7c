"""What the host offers, read from the operating system: no jax."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # x86 and Arm names of bfloat16 multiply instructions
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")


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


def describe() -> dict[str, Any]:
    """Returns the processor, its cores and features, memory in bytes, and the system, as a benchmark notes them."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    features = cpu_features()
    return {
        "processor": name.group(1) if name else platform.processor(),
        "cores": os.cpu_count(),
        "features": [feature for feature in _FEATURES if feature in features],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Device:
    """What a device can do, from its maker's data sheet, or a guess where there is none.

    Attributes:
      flops: multiplies and adds of 16-bit numbers a second. host_bandwidth: bytes a second to and from the host.
    """

    flops: float
    host_bandwidth: float


# By the beginning of what jax calls the device.
DEVICES = {
    "TPU v4": Device(275e12, 16e9),
    "TPU v5 lite": Device(197e12, 16e9),
    "TPU v5e": Device(197e12, 16e9),
    "TPU v5p": Device(459e12, 16e9),
    "TPU v5": Device(459e12, 16e9),
    "TPU v6": Device(918e12, 32e9),
    "NVIDIA A100": Device(312e12, 25e9),
    "NVIDIA H100": Device(989e12, 50e9),
    "NVIDIA H200": Device(989e12, 50e9),
}
_CORE_FLOPS, _COPY_BANDWIDTH = 50e9, 5e9  # of a processor's core, in float32; of copies within its memory


def describe_device(backend: str, kind: str) -> Device:
    """Returns what a device can do.

    Args:
      backend: ``cpu``, ``gpu`` or ``tpu``. kind: what jax calls the device.
    """
    if backend == "cpu":
        return Device(_CORE_FLOPS * (os.cpu_count() or 1), _COPY_BANDWIDTH)
    return next((device for name, device in DEVICES.items() if kind.startswith(name)), Device(100e12, 16e9))
