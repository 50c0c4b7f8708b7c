"""README's table of steps compiled for TPUs and GPUs that are not here.

    python scripts/aot_report.py --model llama-3-8b --targets tpu:v6e,gpu:h100 --policies bfloat16,w8a16+kv8

Needs the extra `aot`. Of a policy's settings `+` stands for the comma. A step takes 5 to 60 seconds to compile.
"""

from __future__ import annotations

import argparse
import dataclasses
from importlib.metadata import PackageNotFoundError, version

import jax

jax.config.update("jax_platforms", "cpu")

from jaxinfer.aot.models import read_model  # noqa: E402
from jaxinfer.aot.report import Workload, compile_step  # noqa: E402
from jaxinfer.aot.table import COLUMNS, row_of  # noqa: E402
from jaxinfer.aot.targets import Target, open_target, single_mesh  # noqa: E402
from jaxinfer.arrays.precision import Policy  # noqa: E402


def main() -> None:
    """Compiles every step asked for and prints a table in Markdown, a row as soon as it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--targets", default="tpu:v5p,tpu:v6e,gpu:h100")
    parser.add_argument("--policies", default="bfloat16,w8a16+kv8")
    parser.add_argument("--steps", default="decode,prefill")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    cfg = read_model(args.model)
    versions = ", ".join(f"{name} {_version(name)}" for name in ("jax", "libtpu", "jax-cuda13-plugin"))
    print(f"{args.model}, {args.rows} rows of {args.context} tokens, one device; {versions}\n")
    head = ["target", "policy", "step", *COLUMNS]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    decode = Workload(rows=args.rows, context=args.context)
    steps = {"decode": decode, "prefill": dataclasses.replace(decode, prefill=args.context)}
    for name in args.targets.split(","):
        target = Target.parse(name)
        mesh = single_mesh(open_target(target))
        for text in args.policies.split(","):
            policy = Policy.parse(text.replace("+", ","), base="bfloat16")
            for step in args.steps.split(","):
                report = compile_step(cfg, policy, target, mesh, steps[step])
                row = [name, text.replace("+", ","), step, *row_of(report)]
                print(f"| {' | '.join(row)} |", flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
