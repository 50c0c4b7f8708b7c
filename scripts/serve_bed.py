"""The model that `bench_serve.py` measures, loaded once for all its schedulers, and what sends a load to it."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from jaxinfer.bench.config import BenchConfig
from jaxinfer.bench.drive import Drive
from jaxinfer.bench.inprocess import InProcess
from jaxinfer.bench.load import Shot
from jaxinfer.bench.report import Report, report_run
from jaxinfer.bench.results import Client, Result
from jaxinfer.engine.calls import Buckets
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.runner import DeviceRunner
from jaxinfer.llm import LLM, AsyncLLM
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.prefix import PrefixCache
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.schedule.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
# One set of shapes for all cases, so that the first compiles for the rest.
SHAPES: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "draws": ("greedy",),
}


class Bed:
    """A model whose executables are loaded once for all that is measured with the same shapes.

    Args:
      model: its name. settings: of `LLM`, over each case's own. say: told what is loaded.
    """

    # Settings that only the scheduler has, by its names for them: another scheduler serves the same executables.
    HOST: ClassVar = {"scheduling_policy": "scheduling_policy", "window_ms": "window"}

    def __init__(self, model: str, settings: dict[str, Any], say: Callable[[str], None]) -> None:
        self._model, self._settings, self._say = model, settings, say
        self._shapes: dict[str, Any] | None = None
        self._engine: Engine | None = None
        self._buckets: Buckets | None = None

    def open(self, whole_batch: bool = False, **settings: Any) -> AsyncLLM:
        """Returns a door to an engine with an empty queue and cache.

        Args:
          whole_batch: whether decode rows take the largest shape however few they are, as in a batch whose rows stay
            in it when they have ended. settings: of `LLM`.
        """
        given = {**SHAPES, **settings, **self._settings}
        caching = given.pop("enable_prefix_caching", True)
        host = {name: given.pop(name) for name in self.HOST if name in given}
        if self._engine is None or self._shapes != given:
            self._engine = None  # before the next takes as much memory
            self._engine, self._shapes = LLM(self._model, say=self._say, **given).engine, given
            self._buckets = None
        old = self._engine
        if isinstance(old.runner, DeviceRunner):
            every = self._buckets = self._buckets or old.runner.buckets
            old.runner.buckets = replace(every, decode=every.decode[-1:]) if whole_batch else every
        changes = {
            self.HOST[name]: value / 1e3 if name == "window_ms" else value for name, value in host.items()
        }
        pool = PagePool(old.scheduler.pool.num_pages, old.scheduler.pool.page_size)
        limits = replace(old.scheduler.config, **changes)
        engine = Engine(
            Scheduler(limits, pool, PrefixCache(pool, 0, caching)),
            old.runner,
            old.tokenizer,
            vocab_size=old.vocab_size,
            eos_ids=old.eos_ids,
            draws=old.draws,
        )
        return AsyncLLM.from_engine(engine)


async def send_load(
    client: Client, load: dict[str, Any], repetition: int = 0, warmup: int = 2
) -> list[Result]:
    """Sends one repetition of a load after a warm-up, and returns what became of each request."""
    config = BenchConfig.read({**load, "warmup": warmup})
    drive = Drive(client, time.monotonic, timeout=config.timeout)
    first = config.draw(client.make_tokens, -1 - repetition)[:warmup]
    await drive.run([Shot(s.index, 0.0, s.prompt, 4, s.num_prompt) for s in first], None)
    drive = Drive(client, time.monotonic, timeout=config.timeout)
    return await drive.run(config.draw(client.make_tokens, repetition), config.num_clients)


def measure_here(
    args: argparse.Namespace, load: dict[str, Any], repetition: int = 0, **settings: Any
) -> Report:
    """Returns the report of a load to a model in this process, opened for it."""
    return check(run_here(args, load, repetition, **settings))


def run_here(
    args: argparse.Namespace, load: dict[str, Any], repetition: int = 0, **settings: Any
) -> list[Result]:
    """Returns what became of a load to a model in this process, opened for it."""

    async def main() -> list[Result]:
        async with args.bed.open(**settings) as llm:
            return await send_load(InProcess(llm, GREEDY, time.monotonic), load, repetition)

    return asyncio.run(main())


def check(results: Sequence[Result]) -> Report:
    """Returns the report of results of which none failed."""
    report = report_run(results, None)
    if report.errors:
        failed = next(result for result in results if result.error)
        raise RuntimeError(f"requests failed: {report.errors}, such as: {failed.detail}")
    return report
