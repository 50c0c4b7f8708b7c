"""Amounts of memory as people write them, and the KV pages that they buy."""

from __future__ import annotations

import re

import jax

from jaxinfer.engine.hosts import current_hosts
from jaxinfer.hardware import describe_device, host_memory_bytes
from jaxinfer.schedule.limits import PreemptionMode

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# What `auto` takes of any device, or one request at full length where that is more.
AUTO_KV_BYTES = 512 * 2**20


def kv_pages(
    text: str, bytes_a_page: int, pages_for_all: int, pages_for_one: int, device_bytes: int | None = None
) -> int:
    """Returns how many pages a memory budget buys.

    Args:
      text: ``auto``, ``512MiB`` (also B, kB, MB, GB, KiB, GiB), ``25%`` of the device, or ``1000 pages``.
      bytes_a_page: over all layers.
      pages_for_all: that ``max_num_seqs`` requests of full length need; never more are taken unless asked for.
      pages_for_one: that one such request needs.
      device_bytes: memory of the device that is free; None asks this process's.

    Raises:
      ValueError: not one of these forms, or less than a page.
    """
    if device_bytes is None:
        device_bytes = device_memory_bytes()
    if text == "auto":
        wanted = max(AUTO_KV_BYTES // bytes_a_page, pages_for_one)
        return max(1, min(wanted, pages_for_all, device_bytes // 2 // bytes_a_page))
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|pages?|b|[kmg]i?b)\s*", text.lower(), re.ASCII)
    if not found or (found.group(2) == "%" and float(found.group(1)) > 100):
        raise ValueError(
            f"kv_memory: got {text!r}; must be auto, bytes as 512MiB or 2GB, a share as 25%, or 1000 pages"
        )
    number, unit = float(found.group(1)), found.group(2)
    if unit.startswith("page"):
        pages = int(number)
    else:
        budget = device_bytes * number / 100 if unit == "%" else number * _UNITS[unit]
        pages = int(budget // bytes_a_page)
    if pages < 1:
        raise ValueError(
            f"kv_memory: {text!r} is less than one page of {bytes_a_page} bytes; give at least that"
        )
    return pages


def read_bytes(name: str, text: str | int) -> int:
    """Returns a number of bytes written as ``1GiB`` or as a plain number.

    Raises:
      ValueError: another form, with the setting's name.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(b|[kmg]i?b)?\s*", str(text).lower(), re.ASCII)
    if not found:
        raise ValueError(f"{name}: got {text!r}; must be bytes, such as 1GiB, 500MB or 0")
    return int(float(found.group(1)) * _UNITS[found.group(2) or "b"])


def count_host_pages(text: str | int, bytes_a_page: int) -> int:
    """Returns how many pages ``host_cache_bytes`` buys, 0 for 0.

    Raises:
      ValueError: another form, or less than a page, which would keep nothing.
    """
    budget = read_bytes("host_cache_bytes", text)
    if 0 < budget < bytes_a_page:
        raise ValueError(
            f"host_cache_bytes: got {text!r}, less than one page of {bytes_a_page} bytes; give at least that, or 0"
        )
    return budget // bytes_a_page


def choose_preemption(
    mode: str, page_size: int, host_pages: int, page_bytes: int, num_weights: int
) -> tuple[PreemptionMode, str]:
    """Returns what becomes of rows that give way, and the reason in words.

    Args:
      mode: ``auto``, ``recompute`` or ``swap``, as the run asks. page_size: Z.
      host_pages: that fit into the host's memory. page_bytes: over all layers.
      num_weights: numbers of the model that multiply, each twice a token.

    Raises:
      ValueError: swapping without memory to swap to.
    """
    if mode == "swap" and not host_pages:
        raise ValueError(
            "preemption_mode: swap needs memory of the host; set host_cache_bytes, or take recompute"
        )
    if mode == "recompute":
        return "recompute", "asked for"
    if mode == "swap":
        return "swap", "asked for"
    if not host_pages:
        return "recompute", "auto: host_cache_bytes is 0"
    device = describe_device(jax.default_backend(), jax.devices()[0].device_kind)
    compute = 2 * num_weights * page_size / device.flops
    move = 2 * page_bytes / device.host_bandwidth
    chosen: PreemptionMode = "swap" if move < compute else "recompute"
    return (
        chosen,
        f"auto: a page moves there and back in {1e3 * move:.2f} ms, is computed in {1e3 * compute:.2f} ms",
    )


def device_memory_bytes() -> int:
    """Returns the free memory of a device: the host's on CPU, what the allocator may still take elsewhere.

    Of several hosts, that of the one which has least.
    """
    device = jax.local_devices()[0]
    free = host_memory_bytes()
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ValueError(f"kv_memory: {device.device_kind} does not tell its memory; give bytes or pages")
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    hosts = current_hosts()
    return free if hosts is None else min(hosts.gather("memory", free))
