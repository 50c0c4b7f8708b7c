"""The runner of process 0 where a run has several: every step goes to the others before it starts here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.device import Operation
from jaxinfer.engine.hosts import Hosts
from jaxinfer.engine.protocol import StepResult
from jaxinfer.engine.runner import DeviceRunner, Order, Pending
from jaxinfer.engine.wire import Frame
from jaxinfer.schedule.plan import Plan

BUILD, STEP = "build", "step"  # kinds of frames: a run to build, operations to start


class LeadingRunner(DeviceRunner):
    """A `DeviceRunner` whose steps all hosts take; one that fails ends them all, for the others cannot be called back.

    Args:
      hosts: of the run. state: see `DeviceRunner`.
    """

    def __init__(self, hosts: Hosts, *state: Any) -> None:
        super().__init__(*state)
        self._hosts = hosts

    def dispatch(self, plan: Plan) -> Pending:
        """Starts a plan on all hosts and returns at once."""
        with self._hosts.ending_all():
            return super().dispatch(plan)

    def collect(self, pending: Pending) -> StepResult:
        """Waits for one dispatched plan, oldest first, and brings its draws to the host."""
        with self._hosts.ending_all():
            return super().collect(pending)

    def start(self, orders: Sequence[Order]) -> None:
        """Has the other hosts start operations, starts them here, and hands on what they compute."""
        operations = [operation for operation, _ in orders]
        heads = [(one.kind, one.sizes, len(one.arrays)) for one in operations]
        self._hosts.send(STEP, heads, tuple(array for one in operations for array in one.arrays))
        super().start(orders)


def read_step(frame: Frame) -> list[Operation]:
    """Returns the operations of a frame that `LeadingRunner.start` sent."""
    arrays = iter(frame.arrays)
    return [
        Operation(kind, tuple(sizes), tuple(next(arrays) for _ in range(count)))
        for kind, sizes, count in frame.content
    ]
