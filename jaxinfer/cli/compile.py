"""`jaxinfer compile`: whether a model fits devices that are not here, and what its steps need of them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import say
from jaxinfer.cli.settings import read_settings


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "compile",
        "compile serving steps for TPUs or GPUs that are not here, from a model's configuration alone",
        (
            "--target tpu:v6e:2x4 --model llama-3-70b --mesh tensor=8 --policy w8a16,kv8",
            "--target gpu:h100 --model my-model/config.json --rows 32 --context 8192 --json",
            "--target cpu --config configs/serve.toml --bundle smollm2.bundle",
        ),
    )
    about = "the devices: tpu:v6e:2x4, tpu:v5p:1, gpu:h100:8; cpu, this machine, for a bundle"
    flags.add("target", "PLATFORM:CHIP:TOPOLOGY", about)
    flags.add("mesh", "AXIS=N,..", "how they share the model, such as tensor=8 (one of them has it all)")
    flags.add_model()
    flags.add("rows", "N", "sequences that decode together (64)", "integer", lower_bound=1)
    flags.add("context", "TOKENS", "tokens of each (2048)", "integer", lower_bound=2)
    flags.add(
        "prefill", "TOKENS", "tokens of the prompt of the prefill step (2048)", "integer", lower_bound=1
    )
    flags.add("page_size", "TOKENS", "tokens a KV page (16)", "integer", lower_bound=1)
    flags.add(
        "table", "", "compile every step that serving would, and count them and their seconds", "switch"
    )
    about = "write the executables of a run to a new folder, from which serve, generate and LLM load them (--bundle)"
    flags.add("bundle", "DIR", about)
    flags.add_settings()
    flags.add("json", "", "write one JSON object", "switch")
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 1 where a step does not fit."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    if flags["bundle"] is not None:
        return _write_bundle(flags)
    if flags["config"] or flags["set"]:
        raise UsageError("--config and --set choose the run of --bundle; without it give --model and its kin")
    if flags["target"] is None or flags["model"] is None:
        raise UsageError("give --target, the devices, and --model, a name or a config.json")
    import jax

    jax.config.update(
        "jax_platforms", "cpu"
    )  # what is here is not asked: it would be taken from who serves with it
    from jaxinfer.aot.models import read_model
    from jaxinfer.aot.report import Workload, compile_step, compile_table
    from jaxinfer.aot.table import describe_executables, describe_step, tell, tell_table
    from jaxinfer.aot.targets import Target, make_mesh, open_target
    from jaxinfer.arrays.precision import Policy

    target = Target.parse(flags["target"])
    cfg = read_model(flags["model"])
    policy = Policy.parse(flags["policy"] or "bfloat16", base="bfloat16")
    mesh = make_mesh(open_target(target), flags["mesh"] or "")
    where = f"mesh {flags['mesh']} of {target}" if flags["mesh"] else f"one device of {target}"
    say(f"{flags['model']} ({cfg.family}, {cfg.num_layers} layers), policy {policy}, on {where}")
    given = {name: flags[name] for name in ("rows", "context", "page_size") if flags[name] is not None}
    decode = Workload(**given)
    prefill = dataclasses.replace(decode, prefill=min(flags["prefill"] or 2048, decode.context))
    reports, record = {}, {}
    for workload in (decode, prefill):
        report = compile_step(cfg, policy, target, mesh, workload)
        reports[str(workload)] = report
        if not flags["json"]:
            print(tell(str(workload), report, target), flush=True)
    fits = all(report.fits for report in reports.values())
    if flags["table"] and fits:
        began = time.perf_counter()
        executables = compile_table(cfg, policy, mesh, prefill, say)
        seconds = time.perf_counter() - began
        record["executables"] = describe_executables(executables, seconds)
        if not flags["json"]:
            print(tell_table(executables, seconds))
    if flags["json"]:
        head = {
            "model": flags["model"],
            "policy": str(policy),
            "target": str(target),
            "mesh": flags["mesh"] or "",
        }
        steps = {"jax": jax.__version__, "steps": {name: describe_step(r) for name, r in reports.items()}}
        print(json.dumps(head | steps | record))
    return 0 if fits else 1


def _write_bundle(flags: CommandFlags) -> int:
    """Compiles the run that the settings choose into a bundle."""
    run = read_settings(flags["config"], flags["set"]).run
    named = {
        **{name: name for name in ("model", "policy", "mesh")},
        "rows": "max_num_seqs",
        "context": "max_model_len",
        "prefill": "max_num_batched_tokens",
        "page_size": "page_size",
    }
    run |= {ours: flags[name] for name, ours in named.items() if flags[name] is not None}
    if flags["target"] is None or "model" not in run:
        raise UsageError("give --target, the devices, and --model or a --config that names one")
    import jax

    jax.config.update("jax_platforms", "cpu")  # see main
    from jaxinfer.aot.bundle import write_bundle
    from jaxinfer.aot.models import describe_model
    from jaxinfer.aot.table import describe_executables, tell_table
    from jaxinfer.aot.targets import Target, open_target
    from jaxinfer.llm import read_run_config

    config = read_run_config({**run, "bundle": ""})
    devices, memory = jax.devices(), None
    if flags["target"] != "cpu":
        target = Target.parse(flags["target"])
        devices, memory = open_target(target), int(target.described.memory_bytes)
    began = time.perf_counter()
    folder = Path(flags["bundle"]).expanduser()
    made = write_bundle(folder, config, describe_model(config.model), devices, memory, say)
    seconds = time.perf_counter() - began
    if flags["json"]:
        record = {"bundle": str(folder), "target": flags["target"], "jax": jax.__version__}
        print(json.dumps(record | {"executables": describe_executables(made, seconds)}))
    else:
        print(tell_table(made, seconds))
        print(f"bundle {folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 2**20:.1f} MiB")
    return 0
