"""A policy held against a checkpoint: which weights lie in few bits as the file has them, and which are made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import Quantized, fit_format
from jaxinfer.arrays.specs import FLOAT32_ROLES, ParamSpec, flatten_specs
from jaxinfer.weights.place import Recipe, hold
from jaxinfer.weights.tensors import TensorSource

# What takes the place of a format that none of ours holds (GGUF's K-quants, act-order): 8 bits under scales as fine as
# theirs add an error of a twentieth of a 4-bit step.
SPARE = Format("int8", 32)
JOINED = ("q", "k", "v")  # of one layer, which the decoder may join into one matrix


def settle(
    policy: Policy, source: TensorSource, specs: Any, recipes: Mapping[str, Recipe]
) -> tuple[Policy, tuple[str, ...]]:
    """Returns a policy that names the very format of every parameter, and what is to be said of it.

    A weight that the file holds in the format that is asked for (or in any, where the policy says
    ``weights=checkpoint``) keeps it with the file's own scales; others are rounded anew.

    Args:
      policy: as the user gave it.
      source: the opened checkpoint.
      specs: the tree of `ParamSpec` that is loaded.
      recipes: for every leaf, by its dotted path.
    """
    formats: dict[str, Format] = {}
    kept: Counter[str] = Counter()
    made: Counter[str] = Counter()
    leaves = {path: spec for path, spec in flatten_specs(specs) if spec.role not in FLOAT32_ROLES}
    held = {path: hold(source, recipes[path], spec) for path, spec in leaves.items()}
    for path, spec in leaves.items():
        formats[path] = _choose(policy, path, spec, held[path], _is_coded(source, recipes[path]))
    _join(policy, leaves, formats)
    for path in leaves:
        coded, fmt = held[path], formats[path]
        if coded is not None and coded.format == fmt:
            kept[str(fmt)] += 1
        elif _is_coded(source, recipes[path]):
            dtypes = sorted({source.tensors[name].dtype for name in recipes[path].names})
            made[f"{'/'.join(dtypes)} as {fmt}"] += 1
    notes = [*source.notes]
    if kept:
        notes.append("kept as the checkpoint has them: " + _listing(kept))
    if made:
        notes.append("expanded and rounded anew: " + _listing(made))
    return _policy_of(policy, leaves, formats), tuple(notes)


def _choose(policy: Policy, path: str, spec: ParamSpec, held: Quantized | None, coded: bool) -> Format:
    wanted = policy.format_of(path, spec)
    if policy.keeps(path, spec):
        if held is not None:
            return held.format
        return fit_format(spec, SPARE) if coded else wanted
    wanted = fit_format(spec, wanted)
    if held is not None and _base(held.format) == _base(wanted):
        return held.format
    return wanted


def _join(policy: Policy, leaves: Mapping[str, ParamSpec], formats: dict[str, Format]) -> None:
    """Gives the q, k and v of each layer one format where only the checkpoint told them apart."""
    for first in [path for path in leaves if path.endswith(".attn.q")]:
        paths = [first[:-1] + name for name in JOINED]
        found = {formats[path] for path in paths}
        if len(found) == 1 or any(path not in leaves for path in paths):
            continue
        if len({_base(fmt) for fmt in found}) == 1:
            own = {fmt for fmt in found if fmt.scale}
            common = own.pop() if len(own) == 1 else _base(found.pop())
        elif all(policy.keeps(path, leaves[path]) for path in paths):
            common = fit_format(leaves[first], SPARE)
        else:
            continue  # the user told them apart
        formats.update(dict.fromkeys(paths, common))


def _policy_of(policy: Policy, leaves: Mapping[str, ParamSpec], formats: Mapping[str, Format]) -> Policy:
    """Returns the policy that says these formats: the most common of each role, and the others by their paths."""
    common: dict[str, Format] = {}
    for role in ("matrix", "embedding", "head"):
        counts = Counter(formats[path] for path, spec in leaves.items() if spec.role == role)
        common[role] = counts.most_common(1)[0][0] if counts else common.get("embedding", policy.weights)
    exceptions = tuple(
        (path, formats[path]) for path, spec in leaves.items() if formats[path] != common[spec.role]
    )
    return replace(
        policy,
        weights=common["matrix"],
        embedding=common["embedding"],
        head=common["head"],
        exceptions=exceptions,
        keep=False,
    )


def _base(fmt: Format) -> Format:
    return replace(fmt, scale="")


def _is_coded(source: TensorSource, recipe: Recipe) -> bool:
    return any(name in source.tensors and source.tensors[name].is_coded for name in recipe.names)


def _listing(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())
