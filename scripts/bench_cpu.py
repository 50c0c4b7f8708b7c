"""Measures jaxinfer beside llama.cpp, transformers and OpenVINO GenAI on one CPU, all in one run, and compares.

    python scripts/bench_cpu.py --llama_cpp_python P --transformers_python P --openvino_python P --output cpu.json
    python scripts/bench_cpu.py --quick --cases prefill,x16 --policies bfloat16 --peers ""

Prefill is 512 tokens to the first; decode is 1, 8 and 16 sequences, 128 tokens each after 64 of prompt, without the
prefill; a start is a process of its own from nothing to the first token, for jaxinfer with an empty cache and with
what that left. Engines take turns (A B C, A B C, ...), each turn waits for an idle machine, and a turn during which
others worked is taken again. A peer that is not installed is left out, and named. Each lives in the interpreter given
for it (pip install llama-cpp-python; torch, transformers, gguf and accelerate; these with openvino-genai and
optimum-intel); llama.cpp runs the GGUF file as it is, transformers its weights expanded once into --work_dir, OpenVINO
what optimum-intel makes of those in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from jaxinfer.hardware import describe
from jaxinfer.weights.fetch import resolve_model
from scripts.bench_machine import busy_seconds, is_disturbed, read_bandwidth, wait_until_idle
from scripts.bench_process import BenchError, EngineSpec, Worker, can_import, start_ours
from scripts.bench_table import OURS, RATES, compare, format_figures, format_limits, format_ratios, targets_of

CASES = (*RATES, "start")
PROMPT, PREFILL, LEAST_VOCAB = 64, 512, 32_000
# What an interpreter must be able to import.
_EXPANDING = ("transformers", "torch", "gguf", "accelerate")
PEER_MODULES = {
    "llama.cpp": ("llama_cpp",),
    "transformers": _EXPANDING,
    "openvino": ("openvino_genai", "optimum.intel", *_EXPANDING),
}
DTYPES = ("float32", "bfloat16")
RETAKES = 2


@dataclass
class Gate:
    """Waits for an idle machine, a number of seconds in all, and counts what went on regardless."""

    seconds_left: float
    busy: int = 0
    disturbed: int = 0

    def take(self, measure: Callable[[], tuple[float, float]]) -> float:
        """Returns a value measured while nothing else ran, as far as that can be had.

        Args:
          measure: returns the value and the processor seconds that getting it took.
        """
        value, disturbed = self._take_once(measure)
        for _ in range(RETAKES):
            if not disturbed:
                return value
            value, disturbed = self._take_once(measure)
        self.disturbed += disturbed
        return value

    def _take_once(self, measure: Callable[[], tuple[float, float]]) -> tuple[float, bool]:
        """Returns a value, and whether another try may give a better one."""
        start = time.monotonic()
        idle = wait_until_idle(max(self.seconds_left, 0.0))
        self.seconds_left -= time.monotonic() - start
        self.busy += idle is False
        before, start = busy_seconds(), time.monotonic()
        value, own = measure()
        after = busy_seconds()
        busy = None if before is None or after is None else after - before
        return value, idle is not False and is_disturbed(busy, own, time.monotonic() - start)


class Bench:
    """A run: engines in turn over cases.

    Attributes:
      samples: values by engine and case. info: what each engine said at loading. first: first tokens of 16 prompts.
    """

    def __init__(self, args: argparse.Namespace, model: Path):
        self.args, self.model = args, model
        self.gate = Gate(args.idle_seconds)
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.info: dict[str, dict[str, Any]] = {}
        self.first: dict[str, list[int]] = {}
        self.peaks: dict[str, float] = {}
        self.missing: list[str] = []

    def log_of(self, spec: EngineSpec) -> Path:
        """Returns where an engine's messages go."""
        return Path(self.args.work_dir) / f"{spec.name.replace(' ', '-')}.log"

    def run(self, specs: Sequence[EngineSpec]) -> None:
        """Loads what loads, measures the rates in one set of processes, and starts in new ones."""
        rates = [case for case in RATES if case in self.args.cases]
        with ExitStack() as stack:
            workers = []
            for spec in specs if rates else ():
                worker = stack.enter_context(Worker(spec, self.log_of(spec)))
                if self._load(worker):
                    workers.append(worker)
            for case in rates:
                self._take_turns(workers, case)
            self.peaks = {worker.spec.name: worker.peak_bytes for worker in workers}
        if "start" in self.args.cases:
            for _ in range(self.args.repetitions):
                for spec in specs:
                    self._measure_start(spec)

    def _load(self, worker: Worker) -> bool:
        spec = worker.spec
        say(f"loading {spec.name}")
        try:
            self.info[spec.name] = worker.ask(
                "load", model=str(self.model), threads=self.args.threads, **spec.options
            )
        except BenchError as error:
            if spec.kind == OURS:
                raise
            self.missing.append(str(error))
            return False
        self.samples.setdefault(spec.name, {})
        return True

    def _take_turns(self, workers: Sequence[Worker], case: str) -> None:
        for worker in workers:
            measure(worker, case, 8)  # so that nothing happens for the first time
        for _ in range(self.args.repetitions):
            for worker in workers:
                name = worker.spec.name

                def once(worker: Worker = worker, name: str = name) -> tuple[float, float]:
                    rate, answer = measure(worker, case, self.args.num_tokens)
                    if case == "x16":
                        self.first[name] = answer["tokens"]
                    return rate, answer["cpu_seconds"]

                rate = self.gate.take(once)
                self.samples[name].setdefault(case, []).append(rate)
                say(f"{case:8} {name:24} {rate:8.1f} tok/s")

    def _measure_start(self, spec: EngineSpec) -> None:
        starts = self.samples.setdefault(spec.name, {})
        if spec.kind != OURS:  # they keep nothing between runs
            seconds = self.gate.take(lambda: self._start_worker(spec))
            starts.setdefault("start_warm", []).append(seconds)
            say(f"start    {spec.name:24} {seconds:8.2f} s")
            return
        with tempfile.TemporaryDirectory(prefix="cache-", dir=self.args.work_dir) as cache:
            for case in ("start_cold", "start_warm"):
                seconds = self.gate.take(lambda: start_ours(spec, self.model, Path(cache), self.log_of(spec)))
                starts.setdefault(case, []).append(seconds)
                say(f"{case:8} {spec.name:24} {seconds:8.2f} s")

    def _start_worker(self, spec: EngineSpec) -> tuple[float, float]:
        start = time.perf_counter()
        with Worker(spec, self.log_of(spec)) as worker:
            loaded = worker.ask("load", model=str(self.model), threads=self.args.threads, **spec.options)
            answer = worker.ask("prefill", prompt=make_prompts(1, 8)[0])
            seconds = time.perf_counter() - start
        self.info.setdefault(spec.name, loaded)
        return seconds, loaded["cpu_seconds"] + answer["cpu_seconds"]


def make_prompts(count: int, length: int) -> list[list[int]]:
    """Returns ids that any model has, the same in every run."""
    rng = random.Random(0)
    return [[rng.randrange(1000, LEAST_VOCAB) for _ in range(length)] for _ in range(count)]


def measure(worker: Worker, case: str, num_tokens: int) -> tuple[float, dict[str, Any]]:
    """Returns the tokens a second of a case, and the worker's answer."""
    if case == "prefill":
        answer = worker.ask("prefill", prompt=make_prompts(1, PREFILL)[0])
        return PREFILL / answer["seconds"], answer
    prompts = make_prompts(int(case.removeprefix("x")), PROMPT)
    answer = worker.ask("decode", prompts=prompts, num_tokens=num_tokens)
    return answer["count"] / answer["seconds"], answer


def say(line: str) -> None:
    """Tells the person who waits."""
    print(line, file=sys.stderr, flush=True)


def choose_engines(args: argparse.Namespace, model: Path) -> tuple[list[EngineSpec], list[str]]:
    """Returns the engines to measure, ours first, and what is missing, a line each."""
    settings = dict(parse_setting(text) for text in args.set)
    specs = [
        EngineSpec(f"{OURS} {policy}", sys.executable, {"policy": policy, **settings})
        for policy in args.policies
    ]
    missing = []
    for peer in args.peers:
        python = getattr(args, f"{peer.replace('.', '_')}_python")
        if not can_import(python, PEER_MODULES[peer]):
            missing.append(f"{peer}: {python} has no {' or no '.join(PEER_MODULES[peer])}")
        elif peer == "llama.cpp":
            specs.append(EngineSpec(peer, python))
        elif peer == "openvino":
            specs.append(
                EngineSpec(f"{peer} int8", python, {"folder": prepare_openvino(args, model, python)})
            )
        else:
            folders = prepare_folders(args, model, python)
            for name in args.transformers:
                dtype, _, cache = name.partition("-")
                options = {"dtype": dtype, "cache": cache or "dynamic", "folder": folders[dtype]}
                specs.append(EngineSpec(f"{peer} {name}", python, options))
    return specs, missing


def prepare_folders(args: argparse.Namespace, model: Path, python: str) -> dict[str, str]:
    """Returns transformers' checkpoint of each dtype, written where it is not there yet."""
    if model.is_dir():
        return dict.fromkeys(DTYPES, str(model))
    base = Path(args.work_dir) / model.stem
    folders = {dtype: str(base / dtype) for dtype in DTYPES}
    done = base / "done"
    if not done.exists():
        say(f"expanding {model.name} for transformers into {base}")
        with Worker(EngineSpec("transformers", python), Path(args.work_dir) / "prepare.log") as worker:
            worker.ask("prepare", model=str(model), folders=folders)
        done.touch()
    return folders


def prepare_openvino(args: argparse.Namespace, model: Path, python: str) -> str:
    """Returns OpenVINO's 8-bit form of the model, written where it is not there yet."""
    folder = Path(args.work_dir) / model.stem / "openvino-int8"
    if not (folder / "done").exists():
        source = prepare_folders(args, model, python)["float32"]
        say(f"converting {model.name} for OpenVINO into {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        with Worker(EngineSpec("openvino", python), Path(args.work_dir) / "prepare.log") as worker:
            worker.ask("prepare", source=source, folder=str(folder))
        (folder / "done").touch()
    return str(folder)


def parse_setting(text: str) -> tuple[str, Any]:
    """Returns a setting of LLM from ``name=value``, the value as JSON or else as it stands."""
    name, equals, value = text.partition("=")
    if not equals:
        raise BenchError(f"--set {text}: expected NAME=VALUE, such as max_model_len=1024")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def report(bench: Bench, command: str) -> tuple[str, dict[str, Any]]:
    """Returns the run in words and as what goes into JSON."""
    hardware = describe()
    targets = targets_of(bench.model.name)
    ratios = compare(bench.samples, targets)
    weights = {name: said["weight_bytes"] for name, said in bench.info.items() if "weight_bytes" in said}
    bandwidths = {name: read_bandwidth(size, bench.args.threads) for name, size in weights.items()}
    versions = dict(kv for said in bench.info.values() for kv in said["versions"].items())
    notes = list(bench.missing)
    if bench.gate.busy:
        notes.append(f"{bench.gate.busy} turns began on a machine that was not idle")
    if bench.gate.disturbed:
        notes.append(f"{bench.gate.disturbed} turns were disturbed {1 + RETAKES} times and kept")
    for name, tokens in bench.first.items():
        reference = next(iter(bench.first.values()))
        equal = sum(a == b for a, b in zip(tokens, reference, strict=True))
        notes.append(f"{name}: {equal} of {len(tokens)} first tokens as {next(iter(bench.first))}")
    lines = [
        f"{bench.model.name} on {hardware['cores']} cores of {hardware['processor']} "
        f"({' '.join(hardware['features'])}), {bench.args.threads} threads; {hardware['system']}",
        " ".join(f"{name} {number}" for name, number in versions.items()),
        f"$ {command}",
        "",
        format_figures(bench.samples, bench.peaks),
        "",
        format_ratios(ratios, bench.samples, bool(targets)),
        "",
        *([format_limits(bench.samples, weights, bandwidths), ""] if weights else []),
        *(f"note: {note}" for note in notes),
    ]
    record = {
        "model": bench.model.name,
        "command": command,
        "hardware": hardware,
        "versions": versions,
        "samples": bench.samples,
        "peak_bytes": bench.peaks,
        "ratios": [asdict(ratio) for ratio in ratios],
        "weight_bytes": weights,
        "read_bytes_per_second": bandwidths,
        "notes": notes,
    }
    return "\n".join(lines), record


def make_parser() -> argparse.ArgumentParser:
    """Returns the flags."""

    def words(allowed: Sequence[str] = ()) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            found = [word for word in text.split(",") if word]
            if wrong := [word for word in found if allowed and word not in allowed]:
                raise argparse.ArgumentTypeError(f"got {wrong[0]!r}, must be among {','.join(allowed)}")
            return found

        return read

    caches = [*DTYPES, *(f"{dtype}-static" for dtype in DTYPES)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="registered name or GGUF file")
    add("--cases", type=words(CASES), default=list(CASES), help=f"some of {','.join(CASES)}")
    add("--policies", type=words(), default=list(DTYPES), help="jaxinfer's, with commas")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of jaxinfer's LLM")
    add("--peers", type=words(tuple(PEER_MODULES)), default=list(PEER_MODULES))
    add("--transformers", type=words(caches), default=list(DTYPES), help=f"some of {','.join(caches)}")
    for peer in PEER_MODULES:
        add(f"--{peer.replace('.', '_')}_python", default=sys.executable, help=f"interpreter that has {peer}")
    add("--threads", type=int, default=os.cpu_count())
    add("--repetitions", type=int, default=3)
    add("--num_tokens", type=int, default=128, help="new tokens a sequence")
    add("--quick", action="store_true", help="2 repetitions of 32 tokens")
    add("--idle_seconds", type=float, default=180.0, help="most to wait for an idle machine, in all")
    add("--work_dir", default=str(Path(tempfile.gettempdir()) / "jaxinfer-bench"))
    add("--output", metavar="FILE.json")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    args = make_parser().parse_args(argv)
    if args.quick:
        args.repetitions, args.num_tokens = 2, 32
    Path(args.work_dir).mkdir(parents=True, exist_ok=True)
    model = resolve_model(args.model)
    try:
        specs, missing = choose_engines(args, model)
        bench = Bench(args, model)
        bench.missing += missing
        try:
            bench.run(specs)
        except KeyboardInterrupt:
            bench.missing.append("interrupted: what follows was measured until then")
    except BenchError as error:
        raise SystemExit(f"bench_cpu: {error}") from None
    text, record = report(bench, shlex.join(["python", "scripts/bench_cpu.py", *(argv or sys.argv[1:])]))
    print(text)
    if args.output:
        Path(args.output).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
