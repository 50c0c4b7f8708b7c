"""Where a process stands among several, by flags or by what Slurm and Cloud TPU set, and what they agree on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from jaxinfer.engine import cluster, hosts
from jaxinfer.engine.cluster import Place, find_place
from jaxinfer.engine.hosts import Hosts
from jaxinfer.engine.wire import unpack_frame
from tests.hosts.processes import ROOT, free_port

SLURM = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_NODELIST": "node[003-006],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}
GKE = {"TPU_WORKER_HOSTNAMES": "localhost,elsewhere", "TPU_WORKER_ID": "1"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster tells anything."""
    for name in (*SLURM, *GKE, "SLURM_NNODES", "JAX_COORDINATOR_PORT", "MEGASCALE_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_flags_tell():
    assert find_place(2, 1, "10.0.0.1:8476") == Place(1, 2, "10.0.0.1:8476")
    assert find_place(2, 0, "[::1]:8476") == Place(0, 2, "[::1]:8476")
    assert find_place(1, 0, "localhost:8476") is None
    assert find_place() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((2, None, None), "process_id, coordinator: missing"),
        ((None, 0, "a:1"), "num_processes: missing"),
        ((2, 2, "a:1"), "process_id: got 2 of num_processes = 2, must be 0 to 1"),
        ((2, 0, "a"), "coordinator: got 'a'"),
        ((2, 0, "a:http"), "coordinator: got 'a:http'"),
        ((2, 0, "a:0"), "coordinator: got 'a:0'"),
    ],
)
def test_flags_that_cannot_be_are_refused(given: tuple[int | None, int | None, str | None], says: str):
    with pytest.raises(ValueError, match=says):
        find_place(*given)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, Place(2, 4, "node003:61540")),
        ({"JAX_COORDINATOR_PORT": "8476"}, Place(2, 4, "node003:8476")),
        ({"SLURM_STEP_NODELIST": "one,two"}, Place(2, 4, "one:61540")),
        # A process a GPU takes its own.
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}, Place(2, 4, "node003:61540", (1,))),
        # One task, or a shell within an allocation that srun did not start.
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_STEP_NODELIST": None}, None),
    ],
)
def test_slurm_tells(changed: dict[str, str | None], wanted: Place | None, monkeypatch: pytest.MonkeyPatch):
    for name, value in (SLURM | changed).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert find_place() == wanted
    assert find_place(2, 1, "flags:1") == Place(1, 2, "flags:1")  # go before what the cluster says


def test_cloud_tpu_tells_where_chips_are(monkeypatch: pytest.MonkeyPatch):
    for name, value in GKE.items():
        monkeypatch.setenv(name, value)
    assert find_place() is None
    monkeypatch.setattr(cluster.hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (4, "v6e"))
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.get_tpu_env_value", os.environ.get)
    assert find_place() == Place(1, 2, "localhost:8482")


JOIN = """
import sys
from jaxinfer.engine.hosts import Place, join
with join(Place(int(sys.argv[1]), 2, "localhost:" + sys.argv[2]), start_seconds=1):
    raise SystemExit("joined alone")
"""


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_whose_others_never_come_says_so_and_ends(index: int):
    port = str(free_port())
    command = [sys.executable, "-c", JOIN, str(index), port]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == hosts.LOST
    assert f"process {index} of 2 ends: not all 2 came to localhost:{port} within 1 s" in done.stderr


SILENT = """
import socket, threading
from jaxinfer.engine.hosts import Hosts
from jaxinfer.engine.wire import Link
with socket.create_server(("127.0.0.1", 0)) as server:
    other = socket.create_connection(server.getsockname())  # takes all that comes, and sends nothing
    hosts = Hosts(0, 2)
    hosts._add(1, Link(server.accept()[0], silence=0.2))
    hosts._watch()
    threading.Event().wait()
"""


def test_a_process_that_hangs_is_lost_though_its_connection_stays():
    command = [sys.executable, "-c", SILENT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == hosts.LOST
    assert "process 0 of 2 ends: process 1 is lost: nothing came from it for 0.2 s" in done.stderr


def test_beats_come_well_within_the_silence_that_ends_a_run():
    assert 3 * hosts.BEAT_SECONDS < hosts.SILENCE_SECONDS < 30 - hosts._GRACE_SECONDS


@pytest.fixture
def pair() -> list[Hosts]:
    """Two processes' views, in one process, with queues in place of connections."""
    both = [Hosts(0, 2), Hosts(1, 2)]

    class Wire:
        def __init__(self, target: Hosts, source: int):
            self.target, self.source = target, source

        def send_packed(self, frame: bytes) -> None:
            head = int.from_bytes(frame[:4], "little")
            self.target._inboxes[self.source].put(unpack_frame(frame[8 : 8 + head], frame[8 + head :]))

    for mine, other in ((0, 1), (1, 0)):
        both[mine]._add(other, Wire(both[other], mine))  # type: ignore[arg-type]
    return both


def test_all_gather_the_values_of_all_and_refuse_what_differs(pair: list[Hosts]):
    found: list[object] = [None, None]

    def run(index: int) -> None:
        mine = pair[index]
        found[index] = mine.gather("memory", 10 * index)
        mine.require_same(policy="float32")
        try:
            mine.require_same(policy="float32", pages=str(index))
        except ValueError as error:
            found.append(str(error))

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[:2] == [[0, 10], [0, 10]]
    assert len(found) == 4
    assert found[2] == found[3]
    assert "pages: process 1 has 1, process 0 has 0" in str(found[2])
