"""The executables of a run compiled ahead into a bundle, for devices of this machine or for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.aot.models import Described
from jaxinfer.aot.targets import make_mesh
from jaxinfer.build import extras_of, lay_run, settle_policy
from jaxinfer.kernels.native.machine import keep_code
from jaxinfer.run_config import RunConfig
from jaxinfer.steps.bundle import BundleWriter
from jaxinfer.steps.compiled import Compiled, StepTable
from jaxinfer.steps.state import describe_state
from jaxinfer.weights.records import to_json

_OF_A_PROCESS = ("bundle", "compile_cache")


def write_bundle(
    folder: Path,
    config: RunConfig,
    model: Described,
    devices: Sequence[Any],
    device_bytes: int | None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Compiled]:
    """Compiles every executable of a run into a bundle, and returns them by name; nothing of a model's weights is read.

    Args:
      folder: to make. config: the run. model: that it runs.
      devices: of this process, or of `open_target`. device_bytes: memory of one, None for what is free here.
      say: is told what was chosen and why, and of each executable.

    Raises:
      ValueError: the run cannot be on these devices, does not fit one, or takes several hosts. FileExistsError:
        ``folder`` holds something.
    """
    mesh = make_mesh(devices, config.mesh)
    if (hosts := len({device.process_index for device in mesh.devices.flat})) > 1:
        raise ValueError(
            f"mesh: got {config.mesh!r}, whose devices are {hosts} hosts'; a bundle is of one process: take one host's"
        )
    writer = BundleWriter(folder)
    keep_code(writer)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        policy = settle_policy(config, model.cfg, model.settle, model.policy, say)
        laid = lay_run(config, model.cfg, policy, say, devices, device_bytes)
        state = describe_state(
            model.cfg,
            policy,
            laid.sizes,
            (laid.num_pages, config.page_size),
            (config.max_num_seqs, laid.max_len),
            laid.layout or NamedSharding(mesh, PartitionSpec()),
        )
        table = StepTable(laid.static, *state, writer, laid.layout and laid.layout.mesh)
        try:
            table.compile(laid.buckets.shapes(), config.draws, say, extras_of(config))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(f"a step does not fit a device: {str(error).splitlines()[0]}") from error
    # As it came out, so that a run that takes its settings from here asks for the same whatever memory it finds.
    fixed = replace(config, kv_memory=f"{laid.num_pages} pages", max_model_len=laid.max_len)
    run = {name: value for name, value in to_json(fixed).items() if name not in _OF_A_PROCESS}
    writer.finish(table.executables, run)
    return table.executables
