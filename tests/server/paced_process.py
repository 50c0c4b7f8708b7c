"""A server process over a script that says ``a`` for ever, 100 times a second: starts in a second, has no model."""

from __future__ import annotations

import sys
import time

from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.protocol import StepResult
from jaxinfer.schedule.plan import Plan
from jaxinfer.server.config import ServerConfig
from jaxinfer.server.run import bind, serve, url_of
from jaxinfer.server.service import Service
from tests.engine.fakes import ScriptRunner, make_engine
from tests.server.conftest import ChatTokenizer

STEP_SECONDS = 0.01


class PacedRunner(ScriptRunner):
    """Takes as long for a step as a small model does."""

    def collect(self, pending: tuple[Plan, StepResult]) -> StepResult:
        time.sleep(STEP_SECONDS)
        return super().collect(pending)


def main(port: int, drain_seconds: float) -> None:
    """Serves until a signal ends it."""
    engine, _ = make_engine(b"a", ChatTokenizer(), max_len=400_000, num_pages=25_000)
    engine.runner = PacedRunner(lambda *_: b"a")
    config = ServerConfig(("fake",), drain_seconds=drain_seconds, access_log=False)
    with bind("127.0.0.1", port) as taken:
        url = url_of(taken)
        serve(
            Service(AsyncEngine(engine), config), taken, lambda: print(f"serving fake at {url}", flush=True)
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
