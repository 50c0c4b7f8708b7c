"""Measures what serving is for: memory that is not wasted, prompts that are shared, streams that do not stall.

    python scripts/bench_serve.py                          # every case, minutes each on two cores
    python scripts/bench_serve.py --cases waste,host,http  # seconds; these need no model
    python scripts/bench_serve.py --cases llama_server --llama_server PATH/llama-server --output serve.json

waste: cache pages in use but not filled. prefix: TTFT of 64 prompts that begin with the same 512 tokens. stall: a long
prompt among eight streams. ferry: continuous batching beside the dynamic batch. llama_server: 16 clients at our server
and at llama.cpp's. host: the scheduler's own time. http: what HTTP adds to TTFT. Prints a table of numbers beside
their targets; the load generator's flags for other loads are those of `jaxinfer bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from jaxinfer.bench.run import versions
from jaxinfer.bench.table import align
from jaxinfer.hardware import describe
from scripts.bench_cpu import parse_setting
from scripts.serve_bed import Bed
from scripts.serve_cases import CASES, record_of, rows_of

SCHEMA = "jaxinfer.bench_serve/1"


def say(line: str) -> None:
    """Tells the person who waits."""
    print(line, file=sys.stderr, flush=True)


def read_cases(text: str) -> list[str]:
    """Returns the names of cases from a list with commas."""
    names = [name for name in text.split(",") if name] or [text]
    wrong = [name for name in names if name not in CASES]
    if wrong:
        raise argparse.ArgumentTypeError(f"got {wrong[0]!r}, must be of {','.join(CASES)}")
    return names


def make_parser() -> argparse.ArgumentParser:
    """Returns the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--cases", type=read_cases, default=list(CASES), help=f"some of {','.join(CASES)}")
    add("--model", default="smollm2-135m", help="registered name, or a GGUF file")
    add(
        "--set",
        action="append",
        default=[],
        type=parse_setting,
        metavar="NAME=VALUE",
        help="a setting of LLM",
    )
    add("--repetitions", type=int, default=3, help="of what is compared, in turn")
    add("--share", type=float, default=1.0, help="of the requests of each load; targets hold for 1")
    add("--url", help="our server; one is started when none is given")
    add("--peer_url", help="the server to compare with")
    add("--llama_server", help="llama.cpp's server, to start")
    add(
        "--llama_cpp_python",
        default=sys.executable,
        help="an interpreter that has llama_cpp, to start its server",
    )
    add(
        "--bias_eos",
        action="store_true",
        help="keep a server without ignore_eos from ending early (SmolLM2's end)",
    )
    add("--verbose", action="store_true", help="tell what is loaded and compiled")
    add("--output", metavar="FILE.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and reports; returns 1 when a case failed to run."""
    args = make_parser().parse_args(argv)
    args.say = say if args.verbose else lambda _: None
    args.bed = Bed(args.model, dict(args.set), args.say)
    args.scale = lambda count: max(16, round(args.share * count))
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *(sys.argv[1:] if argv is None else argv)])
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "hardware": describe(),
        "versions": versions(),
        "cases": {},
    }
    rows, notes, failed = [["case", "number", "got", "target", ""]], [], False
    for name in args.cases:
        start = time.monotonic()
        try:
            outcome = CASES[name](args)
        except Exception as error:  # the other cases' numbers are not for it to lose
            failed = True
            notes.append(f"{name}: did not run: {type(error).__name__}: {error}")
            say(notes[-1])
            continue
        found = list(rows_of(name, outcome))
        say(
            f"{name}: {time.monotonic() - start:.0f} s\n{align(found)}"
        )  # what follows may take long, or be ended
        rows += found
        notes += [f"{name}: {note}" for note in outcome.notes]
        record["cases"][name] = record_of(outcome)
    hardware = record["hardware"]
    print(f"{args.model} on {hardware['cores']} cores of {hardware['processor']}; {hardware['system']}")
    print(" ".join(f"{name} {number}" for name, number in record["versions"].items()))
    print(f"$ {command}\n\n{align(rows)}\n")
    print("\n".join(f"note: {note}" for note in notes))
    if args.output:
        Path(args.output).write_text(json.dumps(record | {"notes": notes}, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
