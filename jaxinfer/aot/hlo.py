"""XLA's text of a compiled program, read into records: what runs, how often, and over which arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "s8": 8, "u8": 8, "bf16": 16, "c64": 64, "c128": 128}
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
# What gives its operand, or a part of it, another name.
_VIEWS = ("bitcast", "get-tuple-element", "copy-done", "optimization-barrier")


@dataclass(frozen=True)
class Array:
    """The type of an array.

    Attributes:
      dtype: as XLA writes it, such as ``bf16``. dims: its shape.
      space: memory space; 0 is the device's memory, others are on the chip.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bits(self) -> int:
        """Bits of a number."""
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        found = re.match(r"[a-z]+(\d+)", self.dtype)  # f32, s8, f8e4m3fn
        return int(found.group(1)) if found else 0  # token[] holds nothing

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> float:
        """Bytes in the device's memory: none where it lies on the chip."""
        return 0 if self.space else self.size * self.bits / 8


Type = Array | tuple["Type", ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: unique in its computation. opcode: what it does. type: of its result.
      operands: names. text: what stands between its parentheses. attributes: what follows them.
    """

    name: str
    opcode: str
    type: Type
    operands: tuple[str, ...]
    text: str
    attributes: str

    @property
    def arrays(self) -> list[Array]:
        """The arrays of its result, those of a tuple in order."""
        return list(flatten(self.type))

    @property
    def called(self) -> list[str]:
        """Names of computations it runs, those of a branch last."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return _CALLED.findall(self.attributes) + (_NAME.findall(branches.group(1)) if branches else [])

    def get(self, name: str) -> str | None:
        """Returns an attribute that is a word, a list in braces or a computation's name, or None."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|%?[\w.\-<>?]+)", self.attributes)
        return found.group(1).strip("{}%") if found else None


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of their run; the last that is marked so is its result."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @cached_property
    def parameters(self) -> list[Instruction]:
        """Its parameters, by number."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.text))

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that an instruction reads."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def source_of(self, name: str) -> Instruction:
        """Returns what a name stands for, behind bitcasts."""
        found = self.instructions[name]
        while found.opcode in ("bitcast", "reshape", "copy", "convert") and found.operands:
            found = self.instructions[found.operands[0]]
        return found


@dataclass(frozen=True)
class Module:
    """A compiled program: computations by name, and the one that is the whole."""

    computations: dict[str, Computation]
    entry: Computation

    def trips(self, loop: Instruction) -> int | None:
        """Returns how often a while loop runs its body, None where only the run can tell.

        XLA notes it, or the condition compares a counter from 0 with a constant.
        """
        noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if noted:
            return int(noted.group(1))
        condition = self.computations[loop.get("condition") or ""]
        every = [condition]
        every += [self.computations[name] for i in condition.instructions.values() for name in i.called]
        for computation in every:
            for i in computation.instructions.values():
                if i.opcode == "compare" and i.get("direction") == "LT":
                    bound = computation.instructions[i.operands[1]]
                    return int(bound.text) if bound.opcode == "constant" else None
        return None


def flatten(kind: Type) -> Iterator[Array]:
    """Yields the arrays of a type, those of a tuple in order."""
    if isinstance(kind, Array):
        yield kind
    else:
        for part in kind:
            yield from flatten(part)


def parse(text: str) -> Module:
    """Reads ``compiled.as_text()``.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    name, lines, root = "", {}, ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, lines, root = head.group(2), {}, ""
            entry = name if head.group(1) else entry
        elif line.startswith("}") and name:  # an execution thread may follow
            computations[name] = Computation(name, lines, root)
            name = ""
        elif name and " = " in line:
            found = _parse_line(line)
            lines[found.name] = found
            if line.lstrip().startswith("ROOT "):
                root = found.name
    if not entry:
        raise ValueError("not a compiled program's text: it has no ENTRY computation")
    return Module(computations, computations[entry])


def _parse_line(line: str) -> Instruction:
    left, _, rest = line.partition(" = ")
    kind, end = _parse_type(rest, 0)
    opcode, _, _ = rest[end:].partition("(")
    begin = end + len(opcode)
    close = _closing(rest, begin)
    inside = rest[begin + 1 : close]
    name = left.strip().removeprefix("ROOT ").lstrip("%")
    operands = () if opcode.strip() in ("constant", "parameter") else tuple(_NAME.findall(inside))
    return Instruction(name, opcode.strip(), kind, operands, inside, rest[close + 1 :])


def _parse_type(text: str, at: int) -> tuple[Type, int]:
    """Returns the type that begins at a place of a text, and where it ends."""
    if text[at] != "(":
        found = _ARRAY.match(text, at)
        if not found:
            raise ValueError(f"no type of an array: {text[at : at + 80]!r}")
        space = re.search(r"S\((\d+)\)", found.group(3) or "")
        dims = tuple(int(d) for d in found.group(2).split(",") if d)
        return Array(found.group(1), dims, int(space.group(1)) if space else 0), found.end()
    at += 1
    parts: list[Type] = []
    while text[at] != ")":
        if skip := re.compile(r"(?:,|\s|/\*index=\d+\*/)+").match(text, at):
            at = skip.end()
            continue
        part, at = _parse_type(text, at)
        parts.append(part)
    return tuple(parts), at + 1


def _closing(text: str, at: int) -> int:
    """Returns where the parenthesis that opens at a place closes, strings left out."""
    depth, quoted = 0, False
    for place in range(at, len(text)):
        c = text[place]
        if c == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (c == "(") - (c == ")")
            if depth == 0:
                return place
    return len(text) - 1
