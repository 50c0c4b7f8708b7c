"""A policy held against a checkpoint: which weights lie in few bits as the file has them, and which are made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.quantized import fit_format
from jaxinfer.arrays.specs import FLOAT32_ROLES, ParamSpec, flatten_specs
from jaxinfer.weights.place import Recipe, hold
from jaxinfer.weights.tensors import TensorSource

# What takes the place of a format that none of ours holds (GGUF's K-quants, act-order): 8 bits under scales as fine as
# theirs add an error of a twentieth of a 4-bit step.
SPARE = Format("int8", 32)
JOINED = ("q", "k", "v")  # of one layer, which the decoder may join into one matrix


@dataclass(frozen=True)
class Held:
    """How a checkpoint has a parameter.

    Attributes:
      name: of its number format, as the file says it.
      is_coded: whether it lies in codes and scales. format: of ours that holds them as they are, None where none does.
    """

    name: str
    is_coded: bool
    format: Format | None


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

    Raises:
      ValueError: see `settle_formats`.
    """

    def look(path: str, spec: ParamSpec) -> Held:
        infos = [source.tensors[name] for name in recipes[path].names if name in source.tensors]
        coded = hold(source, recipes[path], spec)
        names = "/".join(sorted({info.dtype for info in infos}))
        return Held(names, any(info.is_coded for info in infos), None if coded is None else coded.format)

    settled, notes = settle_formats(policy, specs, look)
    return settled, (*source.notes, *notes)


def settle_formats(
    policy: Policy, specs: Any, look: Callable[[str, ParamSpec], Held]
) -> tuple[Policy, tuple[str, ...]]:
    """Returns what `settle` does, for a checkpoint of any kind.

    Args:
      policy: as the user gave it. specs: the tree that is loaded.
      look: says how the checkpoint has a parameter.

    Raises:
      ValueError: the policy names what the model does not have, see `Policy.check_model`.
    """
    whole = dict(flatten_specs(specs))
    policy.check_model(whole, tied=all(spec.role != "head" for spec in whole.values()))
    leaves = {path: spec for path, spec in whole.items() if spec.role not in FLOAT32_ROLES}
    held = {path: look(path, spec) for path, spec in leaves.items()}
    formats = {path: _choose(policy, path, spec, held[path]) for path, spec in leaves.items()}
    _join(leaves, formats)
    kept: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for path, fmt in formats.items():
        if held[path].format == fmt:
            kept[str(_name(policy, path, leaves[path], fmt))] += 1
        elif held[path].is_coded:
            made[f"{held[path].name} as {_name(policy, path, leaves[path], fmt)}"] += 1
    notes = [f"weights kept as the checkpoint has them: {_listing(kept)}"] if kept else []
    notes += [f"weights expanded and made anew: {_listing(made)}"] if made else []
    return _policy_of(policy, leaves, formats), tuple(notes)


def _choose(policy: Policy, path: str, spec: ParamSpec, held: Held) -> Format:
    wanted = policy.format_of(path, spec)
    if policy.keeps(path, spec):
        return held.format or (fit_format(spec, SPARE) if held.is_coded else wanted)
    wanted = fit_format(spec, wanted)
    return held.format if held.format is not None and _base(held.format) == _base(wanted) else wanted


def _join(leaves: Mapping[str, ParamSpec], formats: dict[str, Format]) -> None:
    """Gives the q, k and v of each layer one dtype of scales where nothing else tells them apart.

    The decoder joins those of one format into one matrix; of several it multiplies by each, which rounds nothing anew.
    """
    for first in [path for path in leaves if path.endswith(".attn.q")]:
        paths = [path for name in JOINED if (path := first[:-1] + name) in leaves]
        found = {formats[path] for path in paths}
        own = {fmt for fmt in found if fmt.scale}
        if len(found) > 1 and len({_base(fmt) for fmt in found}) == 1:
            formats.update(dict.fromkeys(paths, own.pop() if len(own) == 1 else _base(found.pop())))


def _policy_of(policy: Policy, leaves: Mapping[str, ParamSpec], formats: Mapping[str, Format]) -> Policy:
    """Returns the policy that says these formats: the most common of each role, and the others by their paths."""
    formats = {path: _name(policy, path, leaves[path], fmt) for path, fmt in formats.items()}
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


def _name(policy: Policy, path: str, spec: ParamSpec, fmt: Format) -> Format:
    """Returns a parameter's format as it is said of all of its role: a rotation that suits it goes without a size."""
    if fmt.rotation is None and policy.format_of(path, spec).rotation is None:
        return fmt
    loose = replace(fmt, rotation=0)
    return loose if fit_format(spec, loose) == fmt else fmt


def _base(fmt: Format) -> Format:
    return replace(fmt, scale="")


def _listing(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())
