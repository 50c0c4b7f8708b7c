"""README's table of steps compiled for TPUs and GPUs that are not here.

    python scripts/aot_report.py --model llama-3-8b --targets tpu:v6e,gpu:h100 --policies bfloat16,w8a16+kv8
    python scripts/aot_report.py --model llama-3-70b --targets tpu:v6e:2x4/tensor=8,tpu:v6e:4x4/tensor=16

Needs the extra `aot`. What stands behind a target's `/` is a mesh of its devices; without it one of them is taken. In a
policy or a mesh `+` stands for the comma. A step takes 5 to 60 seconds to compile.
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
from jaxinfer.aot.targets import Target, make_mesh, open_target  # noqa: E402
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
    print(f"{args.model}, {args.rows} rows of {args.context} tokens, figures of a device; {versions}\n")
    head = ["target", "policy", "step", *COLUMNS]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    decode = Workload(rows=args.rows, context=args.context)
    steps = {"decode": decode, "prefill": dataclasses.replace(decode, prefill=args.context)}
    for name in args.targets.split(","):
        text, _, mesh_text = name.partition("/")
        target = Target.parse(text)
        mesh = make_mesh(open_target(target), mesh_text.replace("+", ","))
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
