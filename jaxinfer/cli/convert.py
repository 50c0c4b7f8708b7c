"""`jaxinfer convert`: a checkpoint as Orbax keeps it, tokenizer and all, which starts faster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import say
from jaxinfer.weights.fetch import DEFAULT_MODEL


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "convert",
        "write a checkpoint that starts faster than its source; give the folder as --model afterwards",
        (
            "--model smollm2-135m --output smollm2",
            "--model my-model/ --output my-model-bf16 --policy bfloat16",
            "--model my-model/ --output my-model-int8 --policy w8a8",
            "--model my-gptq/ --output my-4bit --policy weights=checkpoint",
        ),
    )
    flags.add("output", "FOLDER", "the folder to make; it must not exist")
    flags.add_model()
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    if flags["output"] is None:
        raise UsageError("give --output, the folder to make")
    output = Path(flags["output"])
    if output.exists():
        raise ValueError(f"--output {output}: exists already; name a new folder, or remove it")
    convert(flags["model"] or DEFAULT_MODEL, flags["policy"] or "auto", output)
    return 0


def convert(name: str, policy_name: str, output: Path) -> None:
    """Reads a model and writes it in the formats that a policy stores.

    Args:
      name: see `open_model`. policy_name: see `RunConfig`. output: the folder to make.
    """
    import jax

    from jaxinfer.arrays.quantized import is_quantized
    from jaxinfer.build import choose_policy
    from jaxinfer.weights import store
    from jaxinfer.weights.model import open_model

    started = time.monotonic()
    policy, reason = choose_policy(policy_name)
    model = open_model(name)
    if model.source is None:
        raise ValueError(f"model {name} is converted already; convert its source again for another policy")
    say(f"converting {model.name} ({model.cfg.family}); policy {policy} ({reason})")
    settled, notes = model.settle(policy)
    for note in notes:
        say(note)
    params = model.load(settled, None, None)
    coded = any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))
    store.save(output, params, model.cfg, model.defaults, model.source, str(policy) if coded else None)
    tell_written(output, started)


def tell_written(output: Path, started: float) -> None:
    """Says how large a new checkpoint is, how long it took since ``started`` (monotonic), and what it is for."""
    num_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    say(f"wrote {num_bytes / 2**20:.0f} MiB to {output} in {time.monotonic() - started:.1f} s")
    say(f"use it: jaxinfer generate --model {output}")
