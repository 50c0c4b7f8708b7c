"""Where a process stands in a run of several: by flags, or by what Slurm or Cloud TPU tells it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jax._src import clusters, hardware_utils  # what `jax.distributed.initialize` goes by, and does not tell

START_SECONDS = 300  # for all processes to come: machines and images start minutes apart


@dataclass(frozen=True)
class Place:
    """Where a process stands in a run.

    Attributes:
      index: of this process. count: of all. coordinator: ``host:port`` at process 0, free there.
      local_devices: of this machine's, those that this process takes; None takes all.
    """

    index: int
    count: int
    coordinator: str
    local_devices: tuple[int, ...] | None = None


def find_place(
    count: int | None = None, index: int | None = None, coordinator: str | None = None
) -> Place | None:
    """Returns where this process stands: as it was told, else as Slurm or Cloud TPU tells by the environment.

    Slurm: ``SLURM_JOB_ID``, ``SLURM_STEP_NODELIST``, ``SLURM_NTASKS``, ``SLURM_PROCID`` and ``SLURM_LOCALID``, set in a
    step that srun started. Cloud TPU: ``TPU_WORKER_HOSTNAMES`` and ``TPU_WORKER_ID`` on GKE, the metadata server on
    a TPU VM, where chips are. These are jax's own rules (`jax.distributed.initialize` without arguments).

    Args:
      count, index, coordinator: all three, or none of them.

    Returns:
      None where there is one process.

    Raises:
      ValueError: some of the three without the others, or an index that is none.
    """
    given = {"num_processes": count, "process_id": index, "coordinator": coordinator}
    missing = [name for name, value in given.items() if value is None]
    if count is not None and index is not None and coordinator is not None:
        if not 0 <= index < count:
            raise ValueError(f"process_id: got {index} of num_processes = {count}, must be 0 to {count - 1}")
        host, _, port = coordinator.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise ValueError(
                f"coordinator: got {coordinator!r}, must be HOST:PORT of process 0, as 10.0.0.1:8476"
            )
        return Place(index, count, coordinator) if count > 1 else None
    if len(missing) < 3:
        raise ValueError(
            f"{', '.join(missing)}: missing; give num_processes, process_id and coordinator together, or none of them "
            "where Slurm or Cloud TPU tells"
        )
    cluster = next((one for one in _clusters() if one.is_env_present()), None)
    if cluster is None or (count := cluster.get_process_count()) < 2:
        return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    return Place(
        cluster.get_process_id(),
        count,
        cluster.get_coordinator_address(START_SECONDS, port),
        _share_of_node(count),
    )


def _clusters() -> list[type[clusters.ClusterEnv]]:
    """Returns what may tell a process its place; TPU's only where chips are, else it asks a metadata server in vain."""
    found: list[type[clusters.ClusterEnv]] = [clusters.SlurmCluster]
    if hardware_utils.num_available_tpu_chips_and_device_id()[0]:
        found += [clusters.GkeTpuCluster, clusters.GceTpuCluster]
    return found


def _share_of_node(num_tasks: int) -> tuple[int, ...] | None:
    """Returns the GPU of this process where Slurm runs several on a node, one each; None takes all of the machine."""
    num_nodes = os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES"))
    if num_nodes is None or num_tasks <= int(num_nodes):
        return None
    return (int(os.environ["SLURM_LOCALID"]),)
