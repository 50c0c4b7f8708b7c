"""Finds copies of weights and of the cache that a compiled program makes in the device's memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.aot.cost import fused, updated_in_place
from jaxinfer.aot.hlo import Array, Computation, Instruction, Module, Type, flatten

# What computes something else of its operands, so that no copy of them comes out.
_ENDS = frozenset(
    """dot convolution reduce reduce-window sort custom-call compare rng rng-bit-generator iota constant
    all-reduce reduce-scatter select-and-scatter""".split()  # noqa: SIM905
)
# What gives its operands, or parts of them, other names.
_NAMES = frozenset(
    """parameter tuple get-tuple-element bitcast while conditional call optimization-barrier after-all
    call-start call-update async-update""".split()  # noqa: SIM905
)

Origins = frozenset[str]
Flow = Origins | tuple["Flow", ...]
NOTHING: Origins = frozenset()


@dataclass(frozen=True)
class Stored:
    """An argument of a program that is not to be copied.

    Attributes:
      bits: of an element of the array that holds it: 8 where two numbers of 4 bits share a byte.
      least: elements of the smallest piece whose copy counts: one layer's matrix, or one layer's pages.
    """

    bits: int
    least: int


@dataclass(frozen=True)
class Copy:
    """A copy of an argument in the device's memory.

    Attributes:
      argument: its name. instruction: what makes the copy. array: the copy.
      is_wider: whether its elements take more bits than the stored ones.
    """

    argument: str
    instruction: str
    array: Array
    is_wider: bool

    def __str__(self) -> str:
        dims = ",".join(map(str, self.array.dims))
        kind = "wider copy" if self.is_wider else "copy"
        return f"{kind} of {self.argument}: {self.array.dtype}[{dims}] by {self.instruction}"


def find_copies(module: Module, stored: Mapping[str, Stored]) -> list[Copy]:
    """Finds the copies that a program makes of arguments.

    A copy is an array in the device's memory that (1) has at least as many elements as the smallest piece of an
    argument that counts, (2) comes from that argument by moves, conversions and elementwise arithmetic only, such as
    slices, transpositions, gathers and scales: products and sums end the trail; and (3) is written, in memory of its
    own, by an instruction outside of any fusion: inside, nothing reaches memory. An update in place writes the argument
    itself. What lies on the chip (a TPU brings weights there ahead of their product) is no copy in memory.

    Args:
      module: from `hlo.parse`.
      stored: arguments by name, as `argument_name` gives it.
    """
    return _Trail(module, stored).find()


def argument_name(parameter: Instruction) -> str:
    """Returns an entry parameter's name, in letters, digits and underscores: ``params__embed____tokens__``."""
    noted = re.search(r'op_name="([^"]*)"', parameter.attributes)
    return clean_name(noted.group(1).replace("\\", "") if noted else re.sub(r"\.\d+$", "", parameter.name))


def clean_name(name: str) -> str:
    """Returns a name with all but letters, digits and underscores as underscores, as XLA writes some."""
    return re.sub(r"\W", "_", name)


class _Trail:
    """Follows arguments through a program."""

    def __init__(self, module: Module, stored: Mapping[str, Stored]) -> None:
        self._module, self._stored = module, stored
        self._found: dict[tuple[str, str], Copy] = {}

    def find(self) -> list[Copy]:
        entry = self._module.entry
        names = [argument_name(p) for p in entry.parameters]
        self._run(entry, [frozenset([n]) if n in self._stored else NOTHING for n in names], is_fused=False)
        return list(self._found.values())

    def _run(self, computation: Computation, arguments: Sequence[Flow], *, is_fused: bool) -> Flow:
        """Returns the origins of a computation's result, and notes the copies made on the way."""
        flows: dict[str, Flow] = {}
        for i in computation.instructions.values():
            if i.opcode == "parameter":
                flows[i.name] = arguments[int(i.text)] if int(i.text) < len(arguments) else NOTHING
                continue
            flows[i.name] = self._flow(computation, i, [flows.get(name, NOTHING) for name in i.operands])
            if not is_fused and i.opcode not in _NAMES and not i.opcode.endswith("-done"):
                self._note(i, flows[i.name], self._written(computation, i))
        return flows[computation.root]

    def _flow(self, computation: Computation, i: Instruction, operands: list[Flow]) -> Flow:
        if i.opcode in _ENDS:
            return NOTHING
        if i.opcode == "tuple":
            return tuple(operands)
        if i.opcode == "get-tuple-element":
            place = int(i.get("index") or 0)
            return operands[0][place] if isinstance(operands[0], tuple) and operands[0] else _all(operands)
        if i.opcode == "while":
            return self._loop(i, operands[0])
        if i.opcode in ("call", "conditional"):
            passed = operands if i.opcode == "call" else operands[1:]
            outs = [
                self._run(
                    self._module.computations[name],
                    passed[n : n + 1] if i.opcode == "conditional" else passed,
                    is_fused=False,
                )
                for n, name in enumerate(i.called)
            ]
            return _join(outs)
        if i.opcode == "copy-start":
            return (operands[0], operands[0], NOTHING)
        if (inner := fused(self._module, i)) is not None:
            out = self._run(inner, operands, is_fused=True)
            return out if i.opcode == "fusion" else (tuple(operands), out, NOTHING)
        if i.opcode.endswith("-done"):
            return _done(operands[0]) if operands else NOTHING
        if i.opcode.endswith("-start") and isinstance(i.type, tuple):
            return (tuple(operands), _all(operands), NOTHING)
        if i.opcode in ("gather", "dynamic-slice", "dynamic-update-slice", "scatter"):
            return operands[0]  # indices move nothing, and updates are new
        if i.opcode == "optimization-barrier":
            return operands[0]
        return _all(operands)

    def _loop(self, i: Instruction, carried: Flow) -> Flow:
        body = self._module.computations[i.get("body") or ""]
        for _ in range(8):  # until what goes round stays as it is
            after = _join([carried, self._run(body, [carried], is_fused=False)])
            if after == carried:
                break
            carried = after
        return carried

    def _written(self, computation: Computation, i: Instruction) -> list[Array]:
        """Returns the arrays in memory that an instruction makes, those updated in place left out (as empty)."""
        inner = fused(self._module, i)
        if inner is None:
            if updated_in_place(computation, i) is not None:
                return []
            if i.opcode == "copy-start":
                return i.arrays[:1]
            return list(flatten(_started(i.type))) if i.opcode.endswith("-start") else i.arrays
        root = inner.instructions[inner.root]
        results = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        kind = i.type if i.opcode == "fusion" else _started(i.type)
        nothing = Array("token", (0,))
        return [
            nothing if updated_in_place(inner, result) is not None else array
            for result, array in zip(results, flatten(kind), strict=False)
        ]

    def _note(self, i: Instruction, flow: Flow, arrays: list[Array]) -> None:
        if i.opcode == "copy-start" and isinstance(flow, tuple):
            flow = flow[0]
        elif i.opcode.endswith("-start") and isinstance(flow, tuple) and len(flow) > 1:
            flow = flow[1]
        flows = list(flow) if isinstance(flow, tuple) else [flow] * len(arrays)
        for array, each in zip(arrays, flows, strict=False):
            origins = _all([each])
            least = max((self._stored[name].least for name in origins), default=0)
            for name in origins:  # of codes and their scales it is the codes that are copied
                stored = self._stored[name]
                if array.space == 0 and array.size >= stored.least == least:
                    self._found[i.name, name] = Copy(name, i.name, array, array.bits > stored.bits)


def _all(flows: Sequence[Flow]) -> Origins:
    """Returns every origin in some flows."""
    out = NOTHING
    for flow in flows:
        out |= _all(flow) if isinstance(flow, tuple) else flow
    return out


def _join(flows: Sequence[Flow]) -> Flow:
    """Returns what any of some flows of one type holds, part by part."""
    first, *rest = flows
    for other in rest:
        if isinstance(first, tuple) and isinstance(other, tuple) and len(first) == len(other):
            first = tuple(_join(pair) for pair in zip(first, other, strict=True))
        else:
            first = _all([first, other])
    return first


def _started(kind: Type) -> Type:
    """Returns the type of the result of what is started, of ``(operands, result, ...)``."""
    return kind[1] if isinstance(kind, tuple) and len(kind) > 1 else kind


def _done(flow: Flow) -> Flow:
    """Returns the result of what was started: of (operands, result, ...), or of a copy's (result, operand, ...)."""
    if not isinstance(flow, tuple) or len(flow) < 2:
        return flow
    return flow[1]
