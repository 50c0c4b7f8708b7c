"""`jaxinfer selfcheck`: whether the devices here compute a model as they should; the first to run on new ones."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import Progress, say

if TYPE_CHECKING:
    from jaxinfer.quality.selfcheck import Finding, SelfCheck

_WIDTH = 110


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "selfcheck",
        "compare logits, layer by layer: kernels with the oracle, meshes with one device, chunked with whole, cached "
        "with not, batched with alone, served steps with layers, number formats with float32; exits with 1 where one "
        "strays",
        ("", "--model smollm2-135m --mesh 'tensor=4; data=2,tensor=2'", "--toys llama --json"),
    )
    about = "registered model, local folder or file, or hf:org/name[@revision] (default small random ones)"
    flags.add("model", "NAME", about)
    flags.add("toys", "NAME,NAME", "which of the small random models: llama, gemma3, qwen3_moe (all)")
    about = "meshes, ; between them (default a few over all devices), or none; may be repeated"
    flags.add("mesh", "AXIS=N,..;AXIS=N,..", about, "texts")
    flags.add(
        "policies", "FORMAT;FORMAT", "number formats to check (default one of each kind), or none", "texts"
    )
    about = "number formats of the oracle and of what must equal it (float32); bfloat16 takes half the memory"
    flags.add("reference", "FORMAT", about)
    flags.add("tokens", "N", "tokens of the longest prompt (23)", "integer", lower_bound=2)
    flags.add("json", "", "write one JSON object", "switch")
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code: 1 where a check strays or fails."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    if flags["model"] is not None and flags["toys"] is not None:
        raise UsageError("--model names a model and --toys random ones: give one of the two")
    checks = _prepare(flags)
    listed = [(check, each) for check in checks for each in check.checks()]
    findings: list[Finding] = []
    with Progress("checking", len(listed), "check") as progress:
        for _, (_, run) in listed:
            findings.append(run())
            progress.advance()
            if not flags["json"]:
                progress.write(tell(findings[-1]))
    wrong = [one for one in findings if not one.is_ok]
    if flags["json"]:
        print(json.dumps(_head() | {"ok": not wrong, "checks": [describe(one) for one in findings]}))
    else:
        print(tell_verdict(findings))
    return 1 if wrong else 0


def _prepare(flags: CommandFlags) -> list[SelfCheck]:
    """Returns the checks of each model, everything that a person wrote being read first."""
    import jax  # takes a second to import

    from jaxinfer.arrays.precision import Policy
    from jaxinfer.arrays.sharding import parse_mesh
    from jaxinfer.quality.selfcheck import PRECISION_BOUNDS, SelfCheck, natural_meshes
    from jaxinfer.quality.toys import TOYS, Toy
    from jaxinfer.weights.model import open_model

    meshes, policies = _parts(flags["mesh"]), _parts(flags["policies"])
    for text in meshes or ():
        parse_mesh(text)
    for text in policies or ():
        Policy.parse(text, base="bfloat16")
    names = list(TOYS) if flags["toys"] is None else flags["toys"].split(",")
    if unknown := [name for name in names if name not in TOYS]:
        raise UsageError(f"--toys: got {unknown[0]!r}; there are: {', '.join(TOYS)}")
    subjects: list[Any] = [Toy(name, TOYS[name]) for name in names]
    if flags["model"] is not None:
        subjects = [open_model(flags["model"])]
    devices = jax.devices()
    say(f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), jax {jax.__version__}")
    return [
        SelfCheck(
            subject,
            natural_meshes(subject.cfg, len(devices)) if meshes is None else meshes,
            tuple(PRECISION_BOUNDS) if policies is None else policies,
            flags["reference"] or "float32",
            flags["tokens"] or 23,
        )
        for subject in subjects
    ]


def _parts(texts: Sequence[str]) -> list[str] | None:
    """Returns what stands between semicolons, nothing of ``none``, and None where nothing was given."""
    parts = [part.strip() for text in texts for part in text.split(";") if part.strip()]
    if not parts:
        return None
    return [] if parts == ["none"] else parts


def tell(one: Finding) -> str:
    """Returns a finding in a line, and the errors of its places below."""
    if one.note:
        return f"{'FAILED' if one.is_failure else 'skipped':<8}{one.model}: {one.check}: {one.note}"
    place, error = one.largest
    line = f"{'ok' if one.is_ok else 'BEYOND':<8}{one.model}: {one.check}: {error:.1e} at {place}, bound {one.bound:g}"
    if not one.is_ok:
        line += f"; first strays at {one.strays}: {one.errors[one.strays or place]:.1e}"
    values = " ".join(f"{name.removeprefix('layer ')}:{value:.0e}" for name, value in one.errors.items())
    return "\n".join(
        [line, *textwrap.wrap(values, _WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)]
    )


def tell_verdict(findings: Sequence[Finding]) -> str:
    """Returns what all findings come to."""
    wrong = [one for one in findings if not one.is_ok]
    skipped = sum(bool(one.note) and not one.is_failure for one in findings)
    counted = f"{len(findings) - skipped} checks" + (f", {skipped} not for this machine" if skipped else "")
    if not wrong:
        return f"ok: {counted}"
    names = "; ".join(f"{one.model}: {one.check} ({one.strays or 'failed'})" for one in wrong)
    return f"NOT ok: {len(wrong)} of {counted}: {names}"


def describe(one: Finding) -> dict[str, Any]:
    """Returns a finding as plain values; an error that is not finite is null."""
    verdict = (
        "skipped"
        if one.note and not one.is_failure
        else "failed"
        if one.note
        else "ok"
        if one.is_ok
        else "beyond"
    )
    return {
        "model": one.model,
        "check": one.check,
        "verdict": verdict,
        "bound": one.bound,
        "first_stray": one.strays,
        "errors": {name: value if value < float("inf") else None for name, value in one.errors.items()},
        "note": one.note,
    }


def _head() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    return {
        "jax": jax.__version__,
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }
