"""What a compiled program does in one run: bytes, products and collectives, each as often as its loop runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.aot.hlo import Array, Computation, Instruction, Module, flatten

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# Names for what is there already, and waits for what was counted when it began.
FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier
    add-dependency iota""".split()  # noqa: SIM905
)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass
class Cost:
    """What one run of a program does.

    Attributes:
      num_bytes: read from and written to the device's memory. flops: additions and multiplications of products.
      collectives: runs by opcode. collective_bytes: by opcode, on one device the larger of what it gives and gets.
      host_calls: runs of calls to the host.
    """

    num_bytes: float = 0
    flops: float = 0
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: Counter[str] = field(default_factory=Counter)
    host_calls: int = 0


def measure(module: Module, dynamic_trips: float = 1) -> Cost:
    """Counts what one run of a program does; XLA's own analysis counts the body of a loop once.

    A fusion reads its operands and writes its result, but of what it slices or updates in place only the part. What
    lies on the chip moves nothing. Bytes are those of the arrays: tiles may pad them. A kernel of our own says itself
    what it reads, writes and multiplies.

    Args:
      module: from `hlo.parse`.
      dynamic_trips: how often a loop runs whose end only the run can tell, such as that over the context.
    """
    cost = Cost()
    for computation, instruction, times in walk(module, dynamic_trips):
        name = instruction.opcode.removesuffix("-start")
        for within, each in _collectives(module, computation, instruction):
            kind = each.opcode.removesuffix("-start")
            cost.collectives[kind] += round(times)
            cost.collective_bytes[kind] += round(times * _crossing(within, each))
        if name == "custom-call" and re.search(r'target="[^"]*(callback|host)', instruction.attributes, re.I):
            cost.host_calls += round(times)
        cost.num_bytes += times * _bytes_of(module, computation, instruction)
        cost.flops += times * _flops_of(module, computation, instruction)
    return cost


def _collectives(
    module: Module, computation: Computation, i: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yields an instruction that crosses devices, or those in its fusion, each with its computation."""
    if i.opcode.removesuffix("-start") in COLLECTIVES:
        yield computation, i
    elif (inner := fused(module, i)) is not None:
        for each in inner.instructions.values():
            yield from _collectives(module, inner, each)


def _crossing(computation: Computation, i: Instruction) -> float:
    """Returns the bytes of a collective: of its operands, or of its results where these are more."""
    kind = i.type
    if i.opcode != "all-reduce-start" and i.opcode.endswith("-start") and isinstance(kind, tuple):
        kind = kind[1]  # of (operands, results, ...)
    given = [array for operand in computation.operands_of(i) for array in operand.arrays]
    return max(sum(a.size * a.bits / 8 for a in arrays) for arrays in (given, list(flatten(kind))))


def walk(module: Module, dynamic_trips: float = 1) -> Iterator[tuple[Computation, Instruction, float]]:
    """Yields every instruction that runs, with its computation and how often it runs; not those inside of fusions.

    Of a conditional's branches each is taken to run, which is too much.
    """

    def visit(computation: Computation, times: float) -> Iterator[tuple[Computation, Instruction, float]]:
        for i in computation.instructions.values():
            if i.opcode in ("while", "call", "call-start", "conditional"):
                trips = 1.0
                if i.opcode == "while":
                    known = module.trips(i)
                    trips = dynamic_trips if known is None else known
                for name in i.called:
                    yield from visit(module.computations[name], times * trips)
            elif i.opcode not in FREE and not i.opcode.endswith(("-done", "-update")):
                yield computation, i, times

    yield from visit(module.entry, 1)


def fused(module: Module, instruction: Instruction) -> Computation | None:
    """Returns the computation that a fusion runs as one, None for what is no fusion."""
    name = instruction.get("calls")
    is_fusion = instruction.opcode in ("fusion", "fusion-start", "async-start")
    return module.computations[name] if is_fusion and name else None


def _bytes_of(module: Module, computation: Computation, i: Instruction) -> float:
    operands = computation.operands_of(i)
    results = i.arrays
    if (said := _estimated(i, "bytes_accessed")) is not None:
        # It cannot know what XLA brought onto the chip before: that was counted when it came.
        near = [a for each in (*operands, i) for a in each.arrays if a.space]
        return max(0.0, said - sum(a.size * a.bits / 8 for a in near))
    if i.opcode == "copy-start":
        return results[0].num_bytes + results[1].num_bytes
    if (inner := fused(module, i)) is not None:
        reads = (
            _read(module, inner, parameter) if not _is_on_chip(operand) else 0
            for parameter, operand in zip(inner.parameters, operands, strict=False)
        )
        spaces = [a.space for a in (results if i.opcode == "fusion" else [])]
        return sum(reads) + _written(inner, spaces)
    if i.opcode in ("slice-start", "dynamic-slice-start") and isinstance(i.type, tuple):
        part = next(flatten(i.type[1]))
        return part.size * part.bits / 8 + part.num_bytes
    if i.opcode in _SLICES:
        return 2 * results[0].num_bytes
    if i.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * operands[-1 if i.opcode == "scatter" else 1].arrays[0].num_bytes
    read = sum(a.num_bytes for operand in operands for a in operand.arrays)
    return read + sum(a.num_bytes for a in results)


def _estimated(i: Instruction, name: str) -> float | None:
    """Returns what a kernel of our own says that it takes: it is given whole pools and reads some of their pages."""
    if i.opcode != "custom-call":
        return None
    # A TPU's call says it in JSON, a GPU's in a string of it (`kernels.attention.gpu`), whose quotes XLA writes as \22.
    found = re.search(rf'"cost_estimate":\{{[^}}]*"{name}":"(\d+)"', i.attributes)
    found = found or re.search(rf'serialized_metadata = "[^"]*\\22{name}\\22: \\22(\d+)\\22', i.attributes)
    return float(found.group(1)) if found else None


def _is_on_chip(i: Instruction) -> bool:
    return all(a.space for a in i.arrays)


def _read(module: Module, inner: Computation, parameter: Instruction) -> float:
    """Returns the bytes of a parameter that a fusion reads: all, or only what it slices, nothing that it replaces."""
    total, bits = 0.0, parameter.arrays[0].bits
    whole = sum(a.size * a.bits / 8 for a in parameter.arrays)
    names = [parameter.name]
    while names:
        name = names.pop()
        if name == inner.root:
            return whole
        for user in inner.instructions.values():
            if name not in user.operands:
                continue
            place = user.operands.index(name)
            if _only_moves(module, user):  # a slice may follow
                names.append(user.name)
            elif user.opcode in _SLICES and place == 0:
                total += user.arrays[0].size * bits / 8
            elif user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
                continue
            elif (nested := fused(module, user)) is not None:
                total += _read(module, nested, nested.parameters[place])
            else:
                return whole
    return min(total, whole)


def _only_moves(module: Module, i: Instruction) -> bool:
    """Returns whether an instruction of a fusion gives its operand in another form, all of it where all is wanted."""
    if (nested := fused(module, i)) is not None:
        return len(i.operands) == 1 and all(
            _only_moves(module, each) for each in nested.instructions.values()
        )
    return i.opcode in ("parameter", "bitcast", "reshape", "convert", "bitcast-convert", "copy", "transpose")


def _written(inner: Computation, spaces: list[int]) -> float:
    """Returns the bytes that a fusion writes: its results, of one updated in place only the update."""
    root = inner.instructions[inner.root]
    results = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for place, result in enumerate(results):
        source = updated_in_place(inner, result)
        if place < len(spaces) and spaces[place]:
            continue
        total += sum(a.num_bytes for a in (source or result).arrays)
    return total


def updated_in_place(computation: Computation, result: Instruction) -> Instruction | None:
    """Returns the update where a result is its operand with a part replaced, else None."""
    while result.opcode in ("bitcast", "reshape") and result.operands:
        result = computation.instructions[result.operands[0]]
    if result.opcode not in ("dynamic-update-slice", "scatter"):
        return None
    return computation.instructions[result.operands[-1 if result.opcode == "scatter" else 1]]


def _flops_of(module: Module, computation: Computation, i: Instruction) -> float:
    if (said := _estimated(i, "flops")) is not None:
        return said
    if i.opcode == "dot":
        return _dot(
            computation.instructions[i.operands[0]].arrays[0], i.arrays[0], i.get("lhs_contracting_dims")
        )
    if i.opcode == "convolution":
        lhs, rhs = (computation.instructions[name].arrays[0] for name in i.operands[:2])
        return _convolution(lhs, rhs, i)
    if i.opcode == "custom-call" and "gemm" in i.attributes:
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
        lhs = computation.instructions[i.operands[0]].arrays[0]
        return _dot(lhs, i.arrays[0], dims.group(1).replace('"', "") if dims else "")
    inner = fused(module, i)
    return sum(_flops_of(module, inner, each) for each in inner.instructions.values()) if inner else 0


def _dot(lhs: Array, result: Array, contracting: str | None) -> float:
    return (
        2.0 * result.size * math.prod(lhs.dims[int(d)] for d in (contracting or "").split(",") if d.strip())
    )


def _convolution(lhs: Array, rhs: Array, i: Instruction) -> float:
    """Counts a product that a TPU writes as a convolution; a batch of products is one whose padding and strides leave a
    single number under each window."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.get("dim_labels") or "")
    if not labels:
        raise ValueError(f"convolution {i.name} has no dim_labels: {i.attributes[:200]}")
    left, right, out = (labels.group(n) for n in (1, 2, 3))
    result = i.arrays[0]
    pairs = 1.0
    window = _window(i.attributes)
    for place, label in enumerate(c for c in out if c.isdigit()):
        sizes = lhs.dims[left.index(label)], rhs.dims[right.index(label)], result.dims[out.index(label)]
        pairs *= _taps(*sizes, {name: values[place] for name, values in window.items()})
    batch, features = result.dims[out.index("b")], result.dims[out.index("f")]
    return 2.0 * batch * features * rhs.dims[right.index("i")] * pairs


def _window(attributes: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    return {
        name: value.split("x")
        for name, _, value in (part.partition("=") for part in (found.group(1) if found else "").split())
    }


def _taps(lhs: int, rhs: int, out: int, window: dict[str, str]) -> float:
    """Returns how many pairs of a result and a number of the kernel meet a number of the left side in one dimension."""
    low = int(window.get("pad", "0_0").split("_")[0])
    stride, dilate = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    spread = int(window.get("rhs_dilate", 1))
    at = np.arange(out)[:, None] * stride + np.arange(rhs)[None] * spread - low
    return float(((at >= 0) & (at % dilate == 0) & (at // dilate < lhs)).sum())
