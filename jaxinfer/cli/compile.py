"""`jaxinfer compile`: whether a model fits devices that are not here, and what its steps need of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import say


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "compile",
        "compile serving steps for TPUs or GPUs that are not here, from a model's configuration alone",
        (
            "--target tpu:v6e:2x4 --model llama-3-8b --policy w8a16,kv8",
            "--target gpu:h100 --model my-model/config.json --rows 32 --context 8192 --json",
        ),
    )
    flags.add("target", "PLATFORM:CHIP:TOPOLOGY", "the devices: tpu:v6e:2x4, tpu:v5p:1, gpu:h100:8")
    flags.add_model()
    flags.add("rows", "N", "sequences that decode together (64)", "integer", lower_bound=1)
    flags.add("context", "TOKENS", "tokens of each (2048)", "integer", lower_bound=2)
    flags.add(
        "prefill", "TOKENS", "tokens of the prompt of the prefill step (2048)", "integer", lower_bound=1
    )
    flags.add("page_size", "TOKENS", "tokens a KV page (16)", "integer", lower_bound=1)
    flags.add("json", "", "write one JSON object", "switch")
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 1 where a step does not fit."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    if flags["target"] is None or flags["model"] is None:
        raise UsageError("give --target, the devices, and --model, a name or a config.json")
    import jax

    jax.config.update(
        "jax_platforms", "cpu"
    )  # what is here is not asked: it would be taken from who serves with it
    from jaxinfer.aot.models import read_model
    from jaxinfer.aot.report import Workload, compile_step
    from jaxinfer.aot.table import describe_step, tell
    from jaxinfer.aot.targets import Target, open_target, single_mesh
    from jaxinfer.arrays.precision import Policy

    target = Target.parse(flags["target"])
    cfg = read_model(flags["model"])
    policy = Policy.parse(flags["policy"] or "bfloat16", base="bfloat16")
    mesh = single_mesh(open_target(target))
    say(
        f"{flags['model']} ({cfg.family}, {cfg.num_layers} layers), policy {policy}, on one device of {target}"
    )
    given = {name: flags[name] for name in ("rows", "context", "page_size") if flags[name] is not None}
    decode = Workload(**given)
    prefill = dataclasses.replace(decode, prefill=min(flags["prefill"] or 2048, decode.context))
    reports = {}
    for workload in (decode, prefill):
        report = compile_step(cfg, policy, target, mesh, workload)
        reports[str(workload)] = report
        if not flags["json"]:
            print(tell(str(workload), report, target))
    if flags["json"]:
        head = {"model": flags["model"], "policy": str(policy), "target": str(target), "jax": jax.__version__}
        print(json.dumps(head | {"steps": {name: describe_step(r) for name, r in reports.items()}}))
    return 0 if all(report.fits for report in reports.values()) else 1
