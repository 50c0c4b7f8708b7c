"""`jaxinfer bench`: load for endpoints, or for an engine in this process, and how it went."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.bench.config import DEFAULTS, BenchConfig
from jaxinfer.bench.endpoint import Endpoint
from jaxinfer.bench.results import RequestFailed, Result
from jaxinfer.bench.run import Target, make_record, run_bench
from jaxinfer.bench.table import format_reports
from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import Progress, say
from jaxinfer.cli.settings import Settings, read_settings
from jaxinfer.cli.start import draws_of, open_llm, open_model_of, power_of_two, tell_unused

if TYPE_CHECKING:
    from jaxinfer.llm import AsyncLLM
    from jaxinfer.weights.model import Model

_FLAGS = ("url", "requests", "arrivals", "input_len", "output_len", "slo", "repeat")
PICTURES = (".png", ".svg", ".pdf")
_LEAST_LEN = 512


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "bench",
        "measure latency and throughput of endpoints, or of an engine in this process",
        (
            "--model smollm2-135m --arrivals closed:16",
            "--url http://127.0.0.1:8000 --arrivals poisson:4 --slo ttft=1s",
            "--url http://A:8000 --url http://B:8080 --repeat 3",
        ),
    )
    flags.add("url", "URL", "OpenAI-compatible endpoint; two are compared; none runs --model here", "texts")
    flags.add(
        "requests", "COUNT|FILE.jsonl", f"how many, or a trace of them (default {DEFAULTS['requests']})"
    )
    flags.add(
        "arrivals",
        "FORM",
        f"closed:CLIENTS, poisson:RATE, fixed:RATE or all (default {DEFAULTS['arrivals']})",
    )
    forms = "COUNT, LEAST:MOST or lognormal:MEDIAN:SIGMA[:MOST]"
    flags.add("input_len", "TOKENS", f"of prompts: {forms} (default {DEFAULTS['input_len']})")
    flags.add("output_len", "TOKENS", f"to write, likewise (default {DEFAULTS['output_len']})")
    flags.add("slo", "LIMITS", "what a good request keeps, such as ttft=500ms,itl=60ms")
    flags.add("repeat", "COUNT", "loads to each target, in turn", "integer", lower_bound=1)
    flags.add("output", "FILE", "the record as .json, a plot as .png; may be repeated", "texts")
    flags.add("model", "NAME", "model to run here, or its name to the endpoint (default its first)")
    flags.add_settings()
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    settings = read_settings(flags["config"], flags["set"])
    given = {name: flags[name] for name in _FLAGS if flags[name] not in (None, [])}
    if given.get("requests", "").isdecimal():
        given["requests"] = int(given["requests"])
    check_outputs(flags["output"])
    settings.bench.update(given)
    if flags["model"] is not None:
        settings.run["model"] = flags["model"]
    config = BenchConfig.read(settings.bench, settings.run.get("model"), settings.sampling)
    return measure(config, settings, flags["output"], shlex.join(["jaxinfer", "bench", *args]))


def check_outputs(paths: Sequence[str]) -> None:
    """Refuses outputs that cannot be written, before anything is measured."""
    for path in paths:
        if Path(path).suffix not in (".json", *PICTURES):
            raise UsageError(f"--output {path}: must end in .json, {', '.join(PICTURES)}")
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--output {path}: no such folder, make it first")


def measure(config: BenchConfig, settings: Settings, outputs: Sequence[str], command: str) -> int:
    """Measures, and writes the table to stdout and the rest where it is asked for.

    Returns:
      1 when a target answered nothing.
    """
    tell_unused([f"chat.{name}" for name in settings.chat])
    try:
        targets = asyncio.run(_measure_endpoints(config) if config.urls else _measure_here(config, settings))
    except RequestFailed as error:
        raise ValueError(str(error)) from None
    print(format_reports({target.name: target.reports for target in targets}), flush=True)
    for target in targets:
        for note in target.notes:
            say(f"{target.name}: {note}")
    for path in outputs:
        _write(path, targets, config, command)
    return int(any(not sum(report.num_ok for report in target.reports) for target in targets))


def _write(path: str, targets: Sequence[Target], config: BenchConfig, command: str) -> None:
    if Path(path).suffix in PICTURES:
        from jaxinfer.bench.plot import draw_plot

        draw_plot(targets, path)
    else:
        record = make_record(targets, config, command)
        Path(path).write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    say(f"wrote {path}")


async def _measure_endpoints(config: BenchConfig) -> list[Target]:
    endpoints = [Endpoint(url, config.options, time.monotonic) for url in config.urls]
    targets = []
    try:
        for endpoint in endpoints:
            try:
                await endpoint.prepare()
            except OSError as error:
                raise ValueError(f"--url {endpoint.url}: {error}; is a server running there?") from None
            except RequestFailed as error:
                raise ValueError(f"--url {endpoint.url}: {error}") from None
            about = {"url": endpoint.url, "model": endpoint.model, "lacks": endpoint.abilities.lacks()}
            targets.append(Target(endpoint.url, endpoint, about))
            say(f"{endpoint.url} serves {endpoint.model}")
            for lack in endpoint.abilities.lacks():
                say(f"{endpoint.url}: {lack}")
        await _run(targets, config)
    finally:
        for endpoint in endpoints:
            endpoint.close()
    return targets


async def _measure_here(config: BenchConfig, settings: Settings) -> list[Target]:
    from jaxinfer.bench.inprocess import InProcess
    from jaxinfer.schedule.sampling_params import SamplingParams

    model = open_model_of(settings)
    filled: dict[str, Any] = {"temperature": 0, "ignore_eos": config.options.ignore_eos, **settings.sampling}
    params = SamplingParams(**filled)
    fitted = {"max_model_len": _fit_length(config, model), "draws": draws_of(model, params)}
    async with _open_async(settings, model, fitted) as llm:
        target = Target(model.name, InProcess(llm, params, time.monotonic), {"model": model.name}, True)
        await _run([target], config)
    return [target]


def _open_async(settings: Settings, model: Model, fitted: dict[str, Any]) -> AsyncLLM:
    from jaxinfer.llm import AsyncLLM

    return AsyncLLM.from_engine(open_llm(settings, model, **fitted).engine, model.defaults, say)


def _fit_length(config: BenchConfig, model: Model) -> int:
    """Returns a context that holds the longest request, a power of two so that other runs compile the same."""
    from jaxinfer.text import encode_chat

    longest = 0
    for repetition in range(-1, config.repeat if config.trace is None else 1):
        for shot in config.draw(lambda _, count: [0] * count, repetition):
            prompt: Any = shot.prompt
            if isinstance(prompt, str):
                prompt = model.tokenizer.encode(prompt)
            elif isinstance(prompt[0], dict):
                prompt = encode_chat(model.tokenizer, prompt)
            longest = max(longest, len(prompt) + shot.max_tokens)
    if longest > model.cfg.max_len:
        raise ValueError(
            f"the longest request has {longest} tokens of prompt and output, {model.name} at most {model.cfg.max_len}: "
            "lower input_len or output_len"
        )
    return min(max(power_of_two(longest), _LEAST_LEN), model.cfg.max_len)


async def _run(targets: Sequence[Target], config: BenchConfig) -> None:
    num_requests = len(config.draw(lambda _, count: [0] * count, 0))
    with Progress("measuring", len(targets) * config.repeat * num_requests, "request") as progress:

        def count(_: Target, __: Result) -> None:
            progress.advance()

        await run_bench(targets, config, count)
