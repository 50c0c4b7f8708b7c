"""A Ray cluster of one machine with the application of `jaxinfer.replicas`, until standard input ends.

A line ``NAME`` ends the process of a replica as a crash would.
"""

from __future__ import annotations

import json
import sys

import ray
from ray import serve

from jaxinfer.replicas.app import app


def main(port: int, args: str) -> None:
    """Serves at a port what ``args`` describe, in JSON."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(json.loads(args)), name="here")
        print("serving", flush=True)
        for name in map(str.strip, sys.stdin):
            ray.kill(ray.get_actor(f"SERVE_REPLICA::here#replica#{name}", namespace="serve"))
            print("killed", name, flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
