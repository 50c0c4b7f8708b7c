"""Devices to compile for that are not here: TPUs by libtpu, GPUs by CUDA's compiler."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxinfer.arrays.sharding import parse_mesh

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """A kind of device, as its maker describes it.

    Attributes:
      memory_bytes: that a program may take; TPUs' are libtpu's limits. bandwidth: bytes a second of that memory.
      flops: 16-bit products a second, an addition and a multiplication each.
      gpu: what CUDA's compiler asks of a GPU beside these, None for a TPU.
    """

    memory_bytes: float
    bandwidth: float
    flops: float
    gpu: Gpu | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU, as `nvidia-smi` and CUDA's device properties describe it.

    Attributes:
      name: as the driver calls it. major: of its compute capability. accelerated: with instructions of its own.
      cores: multiprocessors. lanes: 32-bit units of each.
      shared: bytes of shared memory of each, of which a block may take all but 1 KiB. l2: bytes of cache. clock: GHz.
    """

    name: str
    major: int
    accelerated: bool
    cores: int
    lanes: int
    shared: int
    l2: int
    clock: float


_HOPPER = {
    "major": 9,
    "accelerated": True,
    "cores": 132,
    "lanes": 128,
    "shared": 233472,
    "l2": 52428800,
    "clock": 1.98,
}
_AMPERE = {
    "major": 8,
    "accelerated": False,
    "cores": 108,
    "lanes": 64,
    "shared": 167936,
    "l2": 41943040,
    "clock": 1.41,
}
CHIPS = {
    "v4": Chip(15.25 * GIB, 1.2e12, 275e12),
    "v5e": Chip(15.75 * GIB, 819e9, 197e12),
    "v5p": Chip(95.73 * GIB, 2.765e12, 459e12),
    "v6e": Chip(31.24 * GIB, 1.64e12, 918e12),
    "h100": Chip(84942979072, 3.352e12, 989e12, Gpu("NVIDIA H100 80GB HBM3", **_HOPPER)),
    "h200": Chip(150754820096, 4.8e12, 989e12, Gpu("NVIDIA H200", **_HOPPER)),
    "a100": Chip(85100068864, 2.039e12, 312e12, Gpu("NVIDIA A100-SXM4-80GB", **_AMPERE)),
}


@dataclass(frozen=True)
class Target:
    """Devices that a program is compiled for.

    Attributes:
      platform: ``tpu`` or ``gpu``. chip: a key of `CHIPS`.
      topology: how they are joined: of TPUs the sides of their grid, of GPUs slices, hosts and GPUs a host.
    """

    platform: str
    chip: str
    topology: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Target:
        """Returns the target that a string names.

        Args:
          text: ``tpu:v6e:2x4``, ``gpu:h100:1x1x8``, ``gpu:h100:8`` (on one host) or ``gpu:h100`` (one).

        Raises:
          ValueError: another form, or an unknown chip, with those that there are.
        """
        found = re.fullmatch(r"(tpu|gpu):(\w+)(?::(\d+(?:x\d+)*))?", text.strip().lower())
        known = {
            platform: [name for name, chip in CHIPS.items() if (chip.gpu is None) == (platform == "tpu")]
            for platform in ("tpu", "gpu")
        }
        if not found or found.group(2) not in known[found.group(1)]:
            raise ValueError(
                f"target: got {text!r}; must be tpu:CHIP:AxB with a chip of {', '.join(known['tpu'])}, such as "
                f"tpu:v6e:2x4, or gpu:CHIP:COUNT with one of {', '.join(known['gpu'])}, such as gpu:h100:8"
            )
        platform, chip, sides = found.groups()
        topology = tuple(int(side) for side in (sides or "1").split("x"))
        if min(topology) < 1:
            raise ValueError(f"target: got {text!r}, whose topology holds no device")
        if platform == "gpu":
            topology = (1,) * (3 - len(topology)) + topology
        elif len(topology) != (2 if chip in ("v5e", "v6e") else 3) and topology != (1,):
            grid = "2x4" if chip in ("v5e", "v6e") else "2x2x2"
            raise ValueError(
                f"target: got {text!r}; the grid of a {chip} is written as {grid}, one chip as 1"
            )
        return cls(platform, chip, topology)

    @property
    def num_devices(self) -> int:
        """How many devices it has."""
        return math.prod(self.topology)

    @property
    def described(self) -> Chip:
        """Its chip."""
        return CHIPS[self.chip]

    def __str__(self) -> str:
        return f"{self.platform}:{self.chip}:{'x'.join(map(str, self.topology))}"


def open_target(target: Target) -> Sequence[Any]:
    """Returns a target's devices, which compile and cannot run.

    Raises:
      ValueError: what compiles for it is not installed, or refuses the topology.
    """
    # Without these libtpu asks the cloud what it runs on, locks itself for one process and fills a folder with logs.
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_LOG_DIR", "disabled"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(name, value)
    name = "x".join(map(str, target.topology))
    options: dict[str, Any]
    try:
        if target.platform == "gpu":
            return topologies.get_topology_desc(
                "", platform="cuda", topology=name, target_config=gpu_description(target.described)
            ).devices
        if target.topology == (1,):
            sides = "1x1" if target.chip in ("v5e", "v6e") else "1x1x1"
            options = {"chips_per_host_bounds": [1, 1, 1]}
            return topologies.get_topology_desc(
                platform="tpu", topology_name=f"{target.chip}:{sides}", **options
            ).devices
        # Eight chips of these are one host's; else libtpu takes four a host.
        options = {"chips_per_host_bounds": [2, 4, 1]} if target.topology == (2, 4) else {}
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target.chip}:{name}", **options
        ).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        needs = "libtpu" if target.platform == "tpu" else "jax-cuda13-plugin"
        raise ValueError(
            f"target {target}: cannot be compiled for here; it needs {needs} (pip install 'jaxinfer[aot]'): {error}"
        ) from error


def single_mesh(devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of the first of some devices."""
    return Mesh(np.array(devices[:1]), ("one",))


def make_mesh(devices: Sequence[Any], text: str) -> Mesh:
    """Returns the mesh of a string over some devices, `single_mesh` for none.

    Args:
      devices: of `open_target`. text: as `parse_mesh` reads it, "" for one device.

    Raises:
      ValueError: another form, or more devices than there are.
    """
    return parse_mesh(text, devices) or single_mesh(devices)


def gpu_description(chip: Chip) -> str:
    """Returns a GPU as XLA's compiler reads it (``GpuTargetConfigProto`` in text form).

    Raises:
      ValueError: the chip is no GPU.
    """
    gpu = chip.gpu
    if gpu is None:
        raise ValueError("a TPU has no description for CUDA's compiler")
    features = " feature_extension: ACCELERATED_FEATURES" if gpu.accelerated else ""
    return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {gpu.major}{features} }}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared} shared_memory_per_block_optin: {gpu.shared - 1024}
  core_count: {gpu.cores} fpus_per_core: {gpu.lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth:.0f} l2_cache_size: {gpu.l2} clock_rate_ghz: {gpu.clock}
  device_memory_size: {chip.memory_bytes:.0f}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.name}"
"""
