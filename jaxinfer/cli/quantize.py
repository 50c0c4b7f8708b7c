"""`jaxinfer quantize`: a checkpoint in few bits, rounded for what its weights multiply on a text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.cli.convert import tell_written
from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import Progress, say
from jaxinfer.cli.start import read_text
from jaxinfer.weights.fetch import DEFAULT_MODEL

TOKENS = 8192
_WINDOW = 512
_LEAST = 256  # fewer inputs than that say little of a matrix


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "quantize",
        "write a checkpoint of 4-bit weights, rounded for a text, to give as --model",
        (
            "--text sample.txt --policy w4a16 --output my-int4",
            "--text sample.txt --policy weights=int4:g32 --output my-g32",
        ),
    )
    flags.add("text", "FILE", "what the model reads meanwhile, in UTF-8: text of the kind that it will serve")
    flags.add("output", "FOLDER", "the folder to make; it must not exist")
    about = f"of the text that are read, spread over it in windows of {_WINDOW} (default {TOKENS})"
    flags.add("tokens", "COUNT", about, "integer", lower_bound=_LEAST)
    flags.add_model()
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    for name in ("text", "policy", "output"):
        if flags[name] is None:
            raise UsageError(f"give --{name}; see the examples")
    output = Path(flags["output"])
    if output.exists():
        raise ValueError(f"--output {output}: exists already; name a new folder, or remove it")
    text = read_text(flags["text"])
    quantize(flags["model"] or DEFAULT_MODEL, flags["policy"], text, flags["tokens"] or TOKENS, output)
    return 0


def quantize(name: str, policy_name: str, text: str, num_tokens: int, output: Path) -> None:
    """Reads a model, rounds its weights layer by layer and writes them.

    Args:
      name: see `open_model`. policy_name: see `Policy.parse`; weights of 4 bits. text: to calibrate on.
      num_tokens: of it, at most. output: the folder to make.
    """
    from jaxinfer.arrays.precision import Policy
    from jaxinfer.arrays.specs import flatten_specs
    from jaxinfer.build import choose_policy
    from jaxinfer.model.decoder import param_specs
    from jaxinfer.quality.calibrate import calibrate, pick_windows
    from jaxinfer.weights import store
    from jaxinfer.weights.model import open_model

    started = time.monotonic()
    policy, _ = choose_policy(policy_name)
    leaves = dict(flatten_specs(param_specs((model := open_model(name)).cfg)))
    if policy.keep or all(policy.format_of(path, spec).bits != 4 for path, spec in leaves.items()):
        raise ValueError(
            f"--policy {policy_name}: calibration is for weights of 4 bits, as w4a16 or weights=int4:g32; "
            "jaxinfer convert writes the others"
        )
    policy.check_model(leaves, model.cfg.tied)
    if model.source is None:
        raise ValueError(f"model {model.name} is converted already; calibrate its source")
    ids = model.tokenizer.encode(text)
    if len(ids) < _LEAST:
        raise ValueError(f"--text has {len(ids)} tokens, calibration needs at least {_LEAST}: give more")
    length = min(_WINDOW, model.cfg.max_len)
    windows = pick_windows(ids, length, -(-num_tokens // length), model.tokenizer.bos_id)
    say(f"calibrating {model.name} ({model.cfg.family}) on {windows.size} tokens; policy {policy}")
    if any(kind.moe for kind in model.cfg.layers):
        say("experts: scales are searched, errors are not fed back: each sees tokens of its own")
    params = model.load(model.settle(Policy.parse("float32"))[0], None, None)
    with Progress("rounding", model.cfg.num_layers, "layer") as progress:
        rounded = calibrate(model.cfg, params, policy, windows, progress.advance)
    store.save(output, rounded, model.cfg, model.defaults, model.source, str(policy))
    tell_written(output, started)
