"""Ray Serve's choice of a replica: the one that has the prompt's beginning, unless others wait there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxinfer.replicas.prefixes import PrefixMap


class PrefixRouter(RequestRouter):
    """Sends a call with ``key=TEXT`` to the replica that was sent the longest beginning of that text before."""

    def initialize_state(self, *, slack: int, **kwargs: Any) -> None:
        """Takes ``request_router_kwargs``: see `PrefixMap.order`."""
        self._slack = slack
        self._prefixes: PrefixMap[ReplicaID] = PrefixMap()

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas one by one, the best first: Serve takes the first that is not full."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        self._prefixes.keep(replicas)
        loads = {name: self.replica_queue_len_cache.get(name) or 0 for name in replicas}
        key = "" if pending_request is None else _key_of(pending_request)
        return [[replicas[name]] for name in self._prefixes.order(key, loads, self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers who got it."""
        self._prefixes.note(_key_of(pending_request), replica_id)


def _key_of(request: PendingRequest) -> str:
    return request.kwargs.get("key", "")
