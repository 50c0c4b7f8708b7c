"""What `serve run configs/ray.yaml` runs on one machine, and `serve deploy` on a cluster: see that file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from jaxinfer.cli.serve import check_sampling, make_service, server_config
from jaxinfer.cli.settings import read_settings
from jaxinfer.replicas.front import Front
from jaxinfer.replicas.replica import Replica
from jaxinfer.run_config import RunConfig

_WAITING = 2**20  # requests that a replica takes: the engine's own limit (max_num_waiting) answers 503


@dataclass(frozen=True)
class ReplicaConfig:
    """The arguments of the application.

    Attributes:
      config: a TOML file as `jaxinfer serve` takes, found on every node. set: ``section.key=value`` over it.
      min_replicas, max_replicas: engines; between them they follow the number of requests.
      target_requests: requests that a replica should have, running and waiting; more start another. None for its
        rows (schedule.max_num_seqs), so that a replica is added when requests wait for a row.
      upscale_delay_s, downscale_delay_s: how long it must have been too many or too few.
      ray_actor_options: what a replica takes of its node, such as ``{num_gpus: 8}`` or ``{resources: {TPU: 8}}``.
    """

    config: str | None = None
    set: tuple[str, ...] = ()
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float | None = None
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    ray_actor_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ReplicaConfig:
        """Returns the arguments of a Serve configuration.

        Raises:
          ValueError: an argument that there is not, or of the wrong form.
        """
        names = [f.name for f in fields(cls)]
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(f"args: got {', '.join(unknown)}, there are {', '.join(names)}")
        values = dict(given)
        if isinstance(values.get("set", ()), str):
            raise ValueError(f"args.set: got {values['set']!r}, must be a list of section.key=value")
        values["set"] = tuple(values.get("set", ()))
        self = cls(**values)
        for name in ("min_replicas", "max_replicas"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"args.{name}: got {value!r}, must be a whole number of at least 1")
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"args.min_replicas: got {self.min_replicas}, must be at most max_replicas = {self.max_replicas}"
            )
        return self


def app(args: dict[str, Any]) -> Application:
    """Returns the application that a Serve configuration's ``args`` describe: see `ReplicaConfig`."""
    given = ReplicaConfig.read(args)
    settings = read_settings(given.config, given.set)
    check_sampling(settings)
    server = server_config(settings, ())
    num_rows = settings.run.get("max_num_seqs", RunConfig.max_num_seqs)
    # Ray's types take its records' fields and its decorators for others than they are.
    router = RequestRouterConfig(
        request_router_class="jaxinfer.replicas.router:PrefixRouter",  # pyright: ignore[reportArgumentType]
        request_router_kwargs={"slack": num_rows},
    )
    replicas: Any = serve.deployment(
        Replica,
        name="replica",
        autoscaling_config=AutoscalingConfig(
            min_replicas=given.min_replicas,
            max_replicas=given.max_replicas,
            target_ongoing_requests=given.target_requests or num_rows,
            upscale_delay_s=given.upscale_delay_s,
            downscale_delay_s=given.downscale_delay_s,
        ),
        max_ongoing_requests=_WAITING,
        request_router_config=router,
        ray_actor_options=dict(given.ray_actor_options),
        graceful_shutdown_timeout_s=server.drain_seconds + 5,
    )
    holder: Any = serve.ingress(_make_front)(_Holder)
    front: Any = serve.deployment(holder, name="front", max_ongoing_requests=_WAITING)
    return front.bind(replicas.bind(partial(make_service, settings, server, print)), server.max_body_bytes)


class _Holder:
    """Keeps what Serve gives the front's deployment for `_make_front`."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int):
        self.front = Front(replicas, max_body_bytes)


def _make_front() -> Any:
    """Returns the ASGI application of the front; Serve makes it before it has the handle of the replicas."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":  # nothing to start or to end
            while (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        holder: Any = serve.get_replica_context().servable_object
        await holder.front(scope, receive, send)

    return call
