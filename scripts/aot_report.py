"""README's table of steps compiled for TPUs and GPUs that are not here.

    python scripts/aot_report.py                                   Llama-3-8B and 70B on TPUs: 72 steps
    python scripts/aot_report.py --models llama-3-8b --chips v6e --meshes tensor=8 --policies bfloat16 --steps decode
    python scripts/aot_report.py --models llama-3-8b --chips h100,v6e --meshes one --policies w8a16,w8a16+kv8

Needs the extra `aot`. A mesh takes as many chips as it has places; `one` is no mesh: one of them has it all. `--targets
tpu:v6e:4x4/tensor=16,gpu:h100` names devices and meshes one by one instead. In a policy or a mesh `+` stands for the
comma. A step takes 5 to 60 seconds to compile. What misses its bound (`aot.table.find_misses`) is named at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import jax

jax.config.update("jax_platforms", "cpu")

from jaxinfer.aot.models import read_model  # noqa: E402
from jaxinfer.aot.report import StepReport, Workload, compile_step  # noqa: E402
from jaxinfer.aot.table import COLUMNS, find_misses, row_of  # noqa: E402
from jaxinfer.aot.targets import CHIPS, Target, make_mesh, open_target  # noqa: E402
from jaxinfer.arrays.precision import Policy  # noqa: E402

MESHES = {"llama-3-8b": "one,tensor=8", "llama-3-70b": "tensor=8,tensor=16"}
FLAT = {1: "1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
CUBES = {1: "1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}


def main() -> None:
    """Compiles every step asked for and prints a table in Markdown, a row as soon as it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MESHES))
    parser.add_argument("--chips", default="v5e,v6e,v5p", help=f"of {', '.join(CHIPS)}")
    parser.add_argument("--meshes", help=f"by default {MESHES}, and one device of other models")
    parser.add_argument("--targets", help="in place of chips and meshes: TARGET or TARGET/MESH, ..")
    parser.add_argument("--policies", default="bfloat16,w8a16+kv8,w4a16+kv4")
    parser.add_argument("--steps", default="decode,prefill")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    versions = ", ".join(f"{name} {_version(name)}" for name in ("jax", "libtpu", "jax-cuda13-plugin"))
    print(f"{args.rows} rows of {args.context} tokens, figures of one device; {versions}\n")
    head = ["model", "target", "mesh", "policy", "step", "bytes / bfloat16's", *COLUMNS]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    missed = []
    for names, report, ratio in compile_all(args):
        print(f"| {' | '.join([*names, ratio, *row_of(report)])} |", flush=True)
        misses = find_misses(report, is_prefill=names[-1] == "prefill")
        missed += [f"{' '.join(names)}: {', '.join(misses)}"] if misses else []
    print("\nBounds missed: " + ("; ".join(missed) if missed else "none"))


def compile_all(args: argparse.Namespace) -> Iterator[tuple[list[str], StepReport, str]]:
    """Yields each step's names, its report, and its arguments' bytes over those of bfloat16, where these are known."""
    decode = Workload(rows=args.rows, context=args.context)
    steps = {"decode": decode, "prefill": dataclasses.replace(decode, prefill=args.context)}
    for model in args.models.split(","):
        cfg = read_model(model)
        for target, mesh_text in list_places(args, model):
            mesh = make_mesh(open_target(target), mesh_text)
            plain = dict.fromkeys(steps, 0)
            for policy in (text.replace("+", ",") for text in args.policies.split(",")):
                for step in args.steps.split(","):
                    report = compile_step(
                        cfg, Policy.parse(policy, base="bfloat16"), target, mesh, steps[step]
                    )
                    size = report.weights + report.cache + report.rest
                    plain[step] = size if policy == "bfloat16" else plain[step]
                    ratio = f"{size / plain[step]:.3f}" if plain[step] else "-"
                    yield [model, str(target), mesh_text or "one", policy, step], report, ratio


def list_places(args: argparse.Namespace, model: str) -> Iterator[tuple[Target, str]]:
    """Yields the devices and meshes asked for, those of `MESHES` where none are."""
    if args.targets:
        for name in args.targets.split(","):
            text, _, mesh_text = name.partition("/")
            yield Target.parse(text), mesh_text.replace("+", ",")
        return
    for name in (args.meshes or MESHES.get(model, "one")).split(","):
        mesh_text = "" if name == "one" else name.replace("+", ",")
        for chip in args.chips.split(","):
            yield find_target(chip, math.prod(map(int, re.findall(r"=(\d+)", mesh_text)))), mesh_text


def find_target(chip: str, count: int) -> Target:
    """Returns so many chips of a kind.

    Raises:
      ValueError: an unknown chip, or a number of TPUs that no grid here has.
    """
    if chip in CHIPS and CHIPS[chip].gpu is not None:
        return Target.parse(f"gpu:{chip}:{count}")
    grids = FLAT if chip in ("v5e", "v6e") else CUBES
    if count not in grids:
        raise ValueError(f"a mesh of {count} places: there are grids of {', '.join(map(str, grids))} TPUs")
    return Target.parse(f"tpu:{chip}:{grids[count]}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
