"""A bench: the same load to each target in turn, repetition by repetition, and the record of it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jaxinfer.bench.config import BenchConfig
from jaxinfer.bench.drive import Drive
from jaxinfer.bench.load import Shot
from jaxinfer.bench.report import Report, compare_reports, notes_on, report_run
from jaxinfer.bench.results import Client, Clock, RequestFailed, Result
from jaxinfer.hardware import describe

SCHEMA = "jaxinfer.bench/1"
_LIBRARIES = ("jaxinfer", "jax", "jaxlib", "numpy")


@dataclass
class Target:
    """Something to measure.

    Attributes:
      name: for people. client: sends to it. about: what it is, for the record.
      shares_process: whether it runs in the load generator's process.
      runs: results of each repetition. reports: their numbers. notes: what a reader should know.
    """

    name: str
    client: Client
    about: dict[str, Any] = field(default_factory=dict)
    shares_process: bool = False
    runs: list[list[Result]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def run_bench(
    targets: Sequence[Target],
    config: BenchConfig,
    on_done: Callable[[Target, Result], None] = lambda *_: None,
    clock: Clock = time.monotonic,
) -> None:
    """Measures targets: warms each up, then gives each its load, ``repeat`` times, in turn (A B, B A, ...).

    Args:
      targets: get runs, reports and notes. config: see there. on_done: told of every measured request.
      clock: the clients'.

    Raises:
      RequestFailed, OSError: a target that does not answer even its warm-up.
    """
    for target in targets:
        await _warm_up(target, config, clock)
    for repetition in range(config.repeat):
        for target in targets if repetition % 2 == 0 else targets[::-1]:
            shots = config.draw(target.client.make_tokens, repetition)
            drive = Drive(
                target.client,
                clock,
                timeout=config.timeout,
                on_done=lambda result, t=target: on_done(t, result),
            )
            worked = time.process_time()
            results = await drive.run(shots, config.num_clients)
            worked = time.process_time() - worked
            seconds = max((result.end for result in results), default=0.0)
            cores = None if target.shares_process or not seconds else worked / seconds
            target.runs.append(results)
            target.reports.append(report_run(results, config.slo, cores))
            asked = {shot.index: shot.max_tokens for shot in shots}
            for note in notes_on(results, asked, config.shares_prefixes):
                target.notes.append(note if config.repeat == 1 else f"run {repetition + 1}: {note}")


async def _warm_up(target: Target, config: BenchConfig, clock: Clock) -> None:
    """Sends some of the load's own kind at once, so that nothing happens for the first time later."""
    shots = config.draw(target.client.make_tokens, -1)[: config.warmup]
    if not shots:
        return
    at_once = [Shot(shot.index, 0.0, shot.prompt, shot.max_tokens, shot.num_prompt) for shot in shots]
    results = await Drive(target.client, clock, timeout=config.timeout).run(at_once, None)
    if all(result.error for result in results):
        first = results[0]
        raise RequestFailed(f"{target.name}: {first.error}", f"{first.detail} (in the warm-up)")


def make_record(targets: Sequence[Target], config: BenchConfig, command: str) -> dict[str, Any]:
    """Returns all that was measured, for JSON.

    Args:
      targets: measured. config: of the bench. command: what was typed.
    """
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": describe(),
        "versions": versions(),
        "load": dict(config.given),
        "targets": [_record_target(target) for target in targets],
    }
    if len(targets) == 2:
        ratios = compare_reports(targets[0].reports, targets[1].reports)
        record["ratios"] = {
            name: dict(zip(("median", "least", "most"), three, strict=True)) for name, three in ratios.items()
        }
    return record


def _record_target(target: Target) -> Mapping[str, Any]:
    runs = [
        {"report": report.to_json(), "requests": [_record_result(result) for result in results]}
        for report, results in zip(target.reports, target.runs, strict=True)
    ]
    return {"name": target.name, **target.about, "notes": target.notes, "runs": runs}


def _record_result(result: Result) -> dict[str, Any]:
    """Times to the microsecond: the first token's, then the gaps."""
    fields = {name: value for name, value in asdict(result).items() if value is not None and name != "times"}
    for name in ("sent", "late", "end"):
        fields[name] = round(fields[name], 6)
    if result.times:
        fields["ttft"], fields["itl"] = round(result.ttft, 6), [round(gap, 6) for gap in result.gaps]
    return fields


def versions() -> dict[str, str]:
    """Returns Python's version and those of the libraries that a measurement depends on."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
