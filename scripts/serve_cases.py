"""The measurements of `bench_serve.py`, a function each: what issue 3 promises of speed and memory."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jaxinfer.bench.config import BenchConfig
from jaxinfer.bench.endpoint import Endpoint
from jaxinfer.bench.inprocess import InProcess
from jaxinfer.bench.report import Report, Stats, percentile
from jaxinfer.bench.results import Client, Result
from jaxinfer.bench.run import Target, run_bench
from jaxinfer.engine.engine import Engine
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.request import RequestSpec
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.schedule.scheduler import Scheduler, SchedulerConfig
from scripts.bench_host import InstantRunner, Letters, time_steps
from scripts.serve_bed import GREEDY, SHAPES, check, measure_here, run_here, send_load
from scripts.serve_peers import PacedRunner, Pausing, serve_llama_cpp, serve_ours, serve_paced


@dataclass
class Finding:
    """A number beside its target.

    Attributes:
      what: the number's name. got: its value. unit: of it.
      most, least: the target; None where there is none.
    """

    what: str
    got: float
    unit: str = ""
    most: float | None = None
    least: float | None = None

    @property
    def passed(self) -> bool | None:
        """Whether it keeps its target; None where there is none."""
        if self.most is None and self.least is None:
            return None
        return (self.most is None or self.got <= self.most) and (self.least is None or self.got >= self.least)


@dataclass
class Outcome:
    """What a case came to: its findings, what to know of them, and the reports that they are from."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reports: dict[str, Any] = field(default_factory=dict)


def stats(values: Stats | None) -> Stats:
    """Returns statistics that must be there."""
    if values is None:
        raise RuntimeError("no request was measured")
    return values


def waste(args: argparse.Namespace) -> Outcome:
    """Pages in use and what of them is filled, step by step, at mixed lengths; the scheduler's, so on no device."""
    num_rows, max_len, page_size = 16, SHAPES["max_model_len"], 16
    config = SchedulerConfig(max_num_seqs=num_rows, max_len=max_len, max_num_batched_tokens=512)
    scheduler = Scheduler(config, PagePool(num_rows * max_len // page_size, page_size))
    engine = Engine(scheduler, InstantRunner(), Letters(), vocab_size=128, eos_ids=())
    load = BenchConfig.read({"requests": args.scale(400), "input_len": "16:512", "output_len": "16:256"})
    for shot in load.draw(lambda rng, count: rng.choices(range(10, 120), k=count), 0):
        engine.submit(list(shot.prompt), GREEDY.replace(max_tokens=shot.max_tokens))  # pyright: ignore
    allocated = filled = reserved = planned = 0
    while engine.has_work:
        engine.step()
        for request in scheduler.running:
            allocated += len(request.pages) * page_size
            filled += request.num_written
            reserved += max_len
            planned += request.spec.num_positions
    return Outcome(
        [
            Finding("unfilled of pages in use", 100 * (1 - filled / allocated), "%", most=4.0),
            Finding(
                f"unfilled if {max_len} tokens a row were preallocated", 100 * (1 - filled / reserved), "%"
            ),
            Finding("unfilled if prompt and output were preallocated", 100 * (1 - filled / planned), "%"),
        ],
        [
            f"{args.scale(400)} requests, prompts of 16 to 512 and answers of 16 to 256 tokens, 16 rows, pages of 16"
        ],
    )


def prefix(args: argparse.Namespace) -> Outcome:
    """What a shared beginning saves, and what looking for one costs where there is none."""
    shared = {
        "requests": args.scale(64),
        "arrivals": "all",
        "input_len": "8:24",
        "output_len": 8,
        "prefix_share": 1.0,
        "prefix_len": 512,
    }
    apart = {"requests": args.scale(32), "arrivals": "closed:16", "input_len": 128, "output_len": 32}
    outcome = Outcome()
    cached: dict[bool, Report] = {}
    plain: dict[bool, list[Report]] = {True: [], False: []}
    for caching in (True, False):
        cached[caching] = measure_here(args, shared, enable_prefix_caching=caching)
    for repetition in range(args.repetitions):
        for caching in (True, False) if repetition % 2 else (False, True):
            plain[caching].append(measure_here(args, apart, repetition, enable_prefix_caching=caching))
    means = {caching: 1e3 * stats(report.ttft).mean for caching, report in cached.items()}
    slower = sorted(on.seconds / off.seconds for on, off in zip(plain[True], plain[False], strict=True))
    outcome.findings += [
        Finding("mean TTFT with the cache", means[True], "ms"),
        Finding("mean TTFT without", means[False], "ms"),
        Finding("ratio", means[False] / means[True], "x", least=5.0),
        Finding("prompt tokens from the cache", 100 * (cached[True].rates()["hit_rate"] or 0.0), "%"),
        Finding("time more when nothing is shared", 100 * (slower[len(slower) // 2] - 1), "%", most=2.0),
    ]
    outcome.notes.append(
        f"nothing shared: {', '.join(f'{100 * (s - 1):+.1f} %' for s in slower)} by pair of runs"
    )
    outcome.reports = {"cached": cached[True].to_json(), "uncached": cached[False].to_json()}
    return outcome


def stall(args: argparse.Namespace) -> Outcome:
    """What a prompt of 1,500 tokens does to eight streams, cut to chunks and whole."""
    outcome = Outcome()
    whole = {
        "max_num_batched_tokens": 2048,
        "mixed_prefill_tokens": 0,
        "prefill_buckets": ((1, 64), (1, 2048)),
    }
    for name, settings in (("chunks", {}), ("whole", whole)):
        gaps, seconds = asyncio.run(_stall(args, settings))
        got = stats(Stats.of(gaps))
        target = 3.0 if name == "chunks" else None
        outcome.findings += [
            Finding(f"{name}: median ITL", 1e3 * got.p50, "ms"),
            Finding(f"{name}: p99 ITL", 1e3 * got.p99, "ms"),
            Finding(f"{name}: p99 / median", got.p99 / got.p50, "x", most=target),
            Finding(f"{name}: TTFT of the long prompt", 1e3 * seconds, "ms"),
        ]
    outcome.notes.append("gaps of 8 streams over the 80 tokens after the long prompt came")
    return outcome


async def _stall(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[list[float], float]:
    """Returns the streams' gaps after the long prompt came, and the seconds to its first token."""
    async with args.bed.open(**settings) as llm:
        client = InProcess(llm, GREEDY, time.monotonic)
        await send_load(client, {"requests": 2, "input_len": 1500, "output_len": 2})
        config = BenchConfig.read({"requests": 9, "input_len": 32, "output_len": 112})
        *streams, last = config.draw(client.make_tokens, 0)
        long = BenchConfig.read({"requests": 1, "input_len": 1500, "output_len": 4}).draw(
            client.make_tokens, 5
        )[0]
        results = [Result(shot.index) for shot in streams]
        tasks = [asyncio.create_task(client.send(s, r)) for s, r in zip(streams, results, strict=True)]
        while min(len(result.times) for result in results) < 32:
            await asyncio.sleep(0.01)
        arrived = Result(last.index)
        await client.send(long, arrived)
        await asyncio.gather(*tasks)
        gaps = [
            gap
            for result in results
            for gap, end in zip(result.gaps, result.times[1:], strict=True)
            if end > arrived.sent
        ]
    return gaps, arrived.ttft


def ferry(args: argparse.Namespace) -> Outcome:
    """Continuous batching beside the classic dynamic batch, at saturating arrivals.

    Counted are the seconds in which requests wait: the last rows of a load run nearly alone under every policy. The
    classic batch is computed with all its rows to the end, as one that knows nothing of rows; beside it our `ferry`,
    whose ended rows leave the shapes that are computed.
    """
    # 96 requests are six full batches.
    load = {"requests": args.scale(96), "arrivals": "all", "input_len": "8:256", "output_len": "8:256"}
    runs: dict[str, dict[str, Any]] = {
        "continuous": {"scheduling_policy": "priority"},
        "classic batch": {"scheduling_policy": "ferry", "whole_batch": True},
        "ferry": {"scheduling_policy": "ferry"},
    }
    tps: dict[str, list[float]] = {name: [] for name in runs}
    outcome = Outcome()
    for repetition in range(args.repetitions):
        for name in runs if repetition % 2 == 0 else reversed(runs):
            results = run_here(args, load, repetition, **runs[name])
            outcome.reports[f"{name} {repetition}"] = check(results).to_json()
            tps[name].append(saturated_tps(results))
    outcome.findings += [Finding(f"TPS, {name}", _median(values), "tok/s") for name, values in tps.items()]
    for name in list(runs)[1:]:
        ratios = [a / b for a, b in zip(tps["continuous"], tps[name], strict=True)]
        outcome.findings.append(Finding(f"ratio to {name}", _median(ratios), "x", least=1.5))
    return outcome


def saturated_tps(results: Sequence[Result]) -> float:
    """Returns the tokens a second from the first request to the last one's first token: while requests wait."""
    until = max(result.times[0] for result in results)
    made = sum(time <= until for result in results for time in result.times)
    return made / (until - min(result.sent for result in results))


def llama_server(args: argparse.Namespace) -> Outcome:
    """Sixteen clients at `jaxinfer serve` and at llama.cpp's server, in turn."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        peer = args.peer_url
        if peer is None:
            peer, note = stack.enter_context(serve_llama_cpp(args))
            outcome.notes.append(note)
        ours = args.url or stack.enter_context(serve_ours(args, SHAPES))
        given = {
            "url": [ours, peer],
            "requests": args.scale(48),
            "arrivals": "closed:16",
            "input_len": 128,
            "output_len": 64,
            "repeat": args.repetitions,
            # llama-cpp-python's server knows no ignore_eos; a bias against the end does the same for SmolLM2.
            "fields": {"logit_bias": {"2": -100}} if args.bias_eos else {},
        }
        targets = asyncio.run(measure_endpoints(BenchConfig.read(given)))
    for target in targets:
        outcome.reports[target.name] = [report.to_json() for report in target.reports]
        outcome.notes += [f"{target.name}: {note}" for note in target.notes]
        rate = _median([report.rates()["system_tps"] or 0.0 for report in target.reports])
        outcome.findings.append(
            Finding(f"system TPS, {'ours' if target is targets[0] else 'peer'}", rate, "tok/s")
        )
    ratio = outcome.findings[0].got / outcome.findings[1].got
    outcome.findings.append(Finding("ratio", ratio, "x", least=1.2))
    return outcome


async def measure_endpoints(config: BenchConfig) -> list[Target]:
    """Returns the endpoints of a bench, measured."""
    targets = []
    for url in config.urls:
        endpoint = Endpoint(url, config.options, time.monotonic)
        await endpoint.prepare()
        targets.append(Target(url, endpoint, notes=endpoint.abilities.lacks()))
    await run_bench(targets, config)
    for target in targets:
        target.client.close()  # pyright: ignore[reportAttributeAccessIssue]
    return targets


def host(args: argparse.Namespace) -> Outcome:
    """The host's share of a step, in processor time, on a device that answers at once."""
    whole, streams = (
        time_steps(128, 1000, 2000, SamplingParams(max_tokens=1500), stream=stream)
        for stream in (False, True)
    )
    plans = time_plans(128, 1000, 2000)
    return Outcome(
        [
            Finding("scheduler: plan and commit, mean", float(plans.mean()), "ms"),
            Finding("scheduler and bookkeeping, mean", float(whole.mean()), "ms", most=1.0),
            Finding("the same with text for 128 streams, mean", float(streams.mean()), "ms"),
            Finding("the last at p99", percentile(sorted(streams.tolist()), 0.99), "ms"),
        ],
        ["128 rows decode, 2,000 wait; processor time of the thread that steps"],
    )


def time_plans(num_rows: int, num_steps: int, num_waiting: int) -> np.ndarray:
    """Returns the processor milliseconds of each `Scheduler.schedule` and `Scheduler.commit` at full rows."""
    config = SchedulerConfig(max_num_seqs=num_rows, max_len=2048, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, PagePool(num_rows * 128, 16))
    for number in range(num_rows + num_waiting):
        spec = RequestSpec(str(number), (1,) * 100, GREEDY, max_new_tokens=1500)
        scheduler.add(spec)
    times = []
    while len(times) < num_steps:
        start = time.thread_time()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, [[97]] * plan.num_result_rows)
        if len(plan.decode) == num_rows:
            times.append(1e3 * (time.thread_time() - start))
    return np.array(times)


def http(args: argparse.Namespace) -> Outcome:
    """What HTTP adds to TTFT at 16 clients, on a device that takes 20 ms a step and no processor.

    Counted is all between the client's write and its read of the first text: both processes, which share the
    machine's cores, and the kernel. In process the same clients wait for the same engine by `AsyncLLM.stream`.
    """
    load = {"requests": args.scale(320), "arrivals": "closed:16", "input_len": 64, "output_len": "6:12"}
    pauses = {"": 2.0, ", all sent as a step ends": 0.0}
    ttft: dict[tuple[str, str], list[float]] = {}
    with serve_paced() as url:

        async def main() -> None:
            config = BenchConfig.read({**load, "url": url})
            endpoint = Endpoint(url, config.options, time.monotonic)
            await endpoint.prepare()
            async with PacedRunner.open() as llm:
                clients: dict[str, Client] = {
                    "http": endpoint,
                    "here": InProcess(llm, GREEDY, time.monotonic),
                }
                for repetition in range(max(args.repetitions, 4)):
                    for (kind, steps), (name, client) in itertools.product(pauses.items(), clients.items()):
                        pausing = Pausing(client, steps, repetition)
                        results = await send_load(pausing, load, repetition, warmup=16)
                        check(results)
                        ttft.setdefault((name, kind), []).extend(1e3 * result.ttft for result in results)
            endpoint.close()

        asyncio.run(main())
    means = {key: float(np.mean(values)) for key, values in ttft.items()}
    errors = {key: np.var(values) / len(values) for key, values in ttft.items()}
    outcome = Outcome(notes=["the server in a process of its own; a paced runner in place of a model"])
    for kind in pauses:
        outcome.findings += [
            Finding(f"mean TTFT over HTTP{kind}", means["http", kind], "ms"),
            Finding(f"mean TTFT in process{kind}", means["here", kind], "ms"),
            Finding(
                f"HTTP adds{kind}",
                means["http", kind] - means["here", kind],
                "ms",
                most=None if kind else 2.0,
            ),
        ]
        error = (errors["http", kind] + errors["here", kind]) ** 0.5
        outcome.notes.append(f"standard error of what HTTP adds{kind}: {error:.2f} ms")
    return outcome


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


CASES: dict[str, Callable[[argparse.Namespace], Outcome]] = {
    case.__name__: case for case in (waste, prefix, stall, ferry, llama_server, host, http)
}


def rows_of(name: str, outcome: Outcome) -> Iterator[list[str]]:
    """Yields a table's lines of one case."""
    for finding in outcome.findings:
        target = f"<= {finding.most:g}" if finding.most is not None else ""
        target = f">= {finding.least:g}" if finding.least is not None else target
        verdict = {None: "", True: "pass", False: "FAIL"}[finding.passed]
        digits = 1 if finding.got >= 100 else 2
        yield [name, finding.what, f"{finding.got:.{digits}f} {finding.unit}", target, verdict]
        name = ""


def record_of(outcome: Outcome) -> dict[str, Any]:
    """Returns a case for JSON."""
    findings = [asdict(finding) | {"passed": finding.passed} for finding in outcome.findings]
    return {"findings": findings, "notes": outcome.notes, "reports": outcome.reports}
