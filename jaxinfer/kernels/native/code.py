"""A small language for kernels: Python that writes LLVM's intermediate code, with numbers that know their operators.

A kernel is a Python function that runs once and leaves instructions behind. Its Python `for` unrolls, `Code.loop` makes
a loop; a Python number beside a `Value` becomes a constant of its type, spread over the lanes of a vector. Integers are
signed and wrap; comparisons of floats are false for NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
PTR = ir.PointerType()
VOID = ir.VoidType()


def vec(kind: ir.Type, lanes: int) -> ir.Type:
    """Returns the type of a vector."""
    return ir.VectorType(kind, lanes)


class Value:
    """A number, pointer or vector that exists when the kernel runs."""

    __slots__ = ("code", "raw")

    def __init__(self, code: Code, raw: Any) -> None:
        self.code, self.raw = code, raw

    @property
    def type(self) -> Any:
        """Its LLVM type."""
        return self.raw.type

    @property
    def is_float(self) -> bool:
        """Whether it is a float or a vector of floats."""
        return element(self.type) == F32

    def _with(self, other: Any, on_int: str, on_float: str) -> Value:
        builder = self.code.builder
        op = getattr(builder, on_float if self.is_float else on_int)
        return self.code.value(op(self.raw, self.code.like(other, self).raw))

    def __add__(self, other: Any) -> Value:
        return self._with(other, "add", "fadd")

    def __sub__(self, other: Any) -> Value:
        return self._with(other, "sub", "fsub")

    def __mul__(self, other: Any) -> Value:
        return self._with(other, "mul", "fmul")

    def __truediv__(self, other: Any) -> Value:
        return self._with(other, "sdiv", "fdiv")

    def __floordiv__(self, other: Any) -> Value:
        return self._with(other, "sdiv", "fdiv")

    def __mod__(self, other: Any) -> Value:
        return self._with(other, "srem", "frem")

    def __and__(self, other: Any) -> Value:
        return self._with(other, "and_", "")

    def __or__(self, other: Any) -> Value:
        return self._with(other, "or_", "")

    def __xor__(self, other: Any) -> Value:
        return self._with(other, "xor", "")

    def __lshift__(self, other: Any) -> Value:
        return self._with(other, "shl", "")

    def __rshift__(self, other: Any) -> Value:
        """Shifts zeros in."""
        return self._with(other, "lshr", "")

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Value:
        return self.code.like(other, self) - self

    def _compare(self, op: str, other: Any) -> Value:
        builder = self.code.builder
        compare = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return self.code.value(compare(op, self.raw, self.code.like(other, self).raw))

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Any) -> Value:
        """Returns whether both are equal, lane by lane."""
        return self._compare("==", other)

    def differs(self, other: Any) -> Value:
        """Returns whether both differ, lane by lane."""
        return self._compare("!=", other)

    def at(self, offset: Any, kind: ir.Type = I8) -> Value:
        """Returns this pointer moved by ``offset`` elements of ``kind``."""
        builder = self.code.builder
        return self.code.value(builder.gep(self.raw, [self.code.int(offset).raw], source_etype=kind))

    def load(self, kind: ir.Type, align: int = 1) -> Value:
        """Returns what lies at this pointer."""
        return self.code.value(self.code.builder.load(self.raw, typ=kind, align=align))

    def store(self, value: Value, align: int = 1) -> None:
        """Writes to this pointer."""
        self.code.builder.store(value.raw, self.raw, align=align)

    def __getitem__(self, lane: int) -> Value:
        return self.code.value(self.code.builder.extract_element(self.raw, ir.Constant(I32, lane)))


def element(kind: Any) -> Any:
    """Returns the type of a vector's numbers; of another type, itself."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


class Variable:
    """A place for a number that loops change; it ends up in a register."""

    def __init__(self, code: Code, kind: ir.Type) -> None:
        self._place, self._code, self._kind = code.stack(kind), code, kind

    def get(self) -> Value:
        """Returns what it holds now."""
        return self._place.load(self._kind)

    def set(self, value: Value) -> None:
        """Gives it another number."""
        self._place.store(value)


class Code:
    """Writes one function."""

    def __init__(self, module: ir.Module, name: str, args: Sequence[ir.Type], result: ir.Type = VOID) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, args), name)
        self.function.attributes.add("nounwind")
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.args = [self.value(arg) for arg in self.function.args]

    def value(self, raw: ir.Value) -> Value:
        """Returns LLVM's value as ours."""
        return Value(self, raw)

    def constant(self, kind: Any, number: Any) -> Value:
        """Returns a constant; on a vector type a number goes to every lane."""
        if isinstance(kind, ir.VectorType) and not isinstance(number, list | tuple):
            number = [number] * kind.count
        return self.value(ir.Constant(kind, number))

    def int(self, number: Any, kind: ir.Type = I64) -> Value:
        """Returns a Python integer as a constant, and a value as it is."""
        return number if isinstance(number, Value) else self.constant(kind, number)

    def like(self, number: Any, other: Value) -> Value:
        """Returns a Python number as a constant of ``other``'s type, and a value as it is."""
        return number if isinstance(number, Value) else self.constant(other.type, number)

    def cast(self, value: Value, kind: Any, how: str) -> Value:
        """Converts by LLVM's instruction ``how`` (sext, zext, trunc, bitcast, sitofp ...)."""
        return self.value(getattr(self.builder, how)(value.raw, kind))

    def bits(self, value: Value, kind: ir.Type) -> Value:
        """Returns the same bits as another type."""
        return self.cast(value, kind, "bitcast")

    def splat(self, value: Value, lanes: int) -> Value:
        """Returns a vector with ``value`` in every lane."""
        kind = vec(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value.raw, ir.Constant(I32, 0))
        return self.shuffle(self.value(one), None, [0] * lanes)

    def shuffle(self, x: Value, y: Value | None, lanes: Sequence[int]) -> Value:
        """Returns lanes picked from ``x`` and then ``y``, by number."""
        other = ir.Constant(x.type, ir.Undefined) if y is None else y.raw
        mask = ir.Constant(vec(I32, len(lanes)), list(lanes))
        return self.value(self.builder.shuffle_vector(x.raw, other, mask))

    def select(self, condition: Value, yes: Any, no: Any) -> Value:
        """Returns ``yes`` where the condition holds and ``no`` elsewhere."""
        like = yes if isinstance(yes, Value) else no
        return self.value(
            self.builder.select(condition.raw, self.like(yes, like).raw, self.like(no, like).raw)
        )

    def call(self, name: str, result: ir.Type, *args: Value) -> Value:
        """Calls a function or intrinsic by name."""
        known = self.module.globals.get(name)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(result, [arg.type for arg in args]), name)
        return self.value(self.builder.call(known, [arg.raw for arg in args]))

    def call_pointer(self, pointer: Value, result: ir.Type, *args: Value) -> Value:
        """Calls the function that a pointer points to."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        # llvmlite's builder leaves out this cast, which only it needs.
        typed = ir.instructions.CastInstr(self.builder.block, "bitcast", pointer.raw, kind.as_pointer(), "")
        self.builder._insert(typed)
        return self.value(self.builder.call(typed, [arg.raw for arg in args]))

    def intrinsic(self, name: str, *args: Value) -> Value:
        """Calls LLVM's generic intrinsic ``llvm.<name>`` for the first argument's type, which is its result's too."""
        kind = args[0].type
        scalar = element(kind)
        letter = f"f{32}" if scalar == F32 else f"i{scalar.width}"
        suffix = f"v{kind.count}{letter}" if isinstance(kind, ir.VectorType) else letter
        return self.call(f"llvm.{name}.{suffix}", kind, *args)

    def min(self, x: Value, y: Any) -> Value:
        """Returns the smaller integer."""
        y = self.like(y, x)
        return self.select(x < y, x, y)

    def max(self, x: Value, y: Any) -> Value:
        """Returns the larger number."""
        y = self.like(y, x)
        return self.select(x > y, x, y)

    def stack(self, kind: ir.Type, align: int | None = None) -> Value:
        """Returns a pointer to room for a ``kind`` on the stack, held until the function returns."""
        with self.builder.goto_entry_block():
            place: Any = self.builder.alloca(kind)
        place.type, place.align = PTR, align
        return self.value(place)

    def variable(self, first: Value) -> Variable:
        """Returns a place that holds ``first``."""
        place = Variable(self, first.type)
        place.set(first)
        return place

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """Runs its body for an index from ``start`` up to ``stop``, which may be none at all."""
        index = self.variable(self.int(start))
        stop = self.int(stop)
        test, body, after = (self.function.append_basic_block(name) for name in ("test", "body", "after"))
        self.builder.branch(test)
        self.builder.position_at_end(test)
        now = index.get()
        self.builder.cbranch((now < stop).raw, body, after)
        self.builder.position_at_end(body)
        yield now
        index.set(now + step)
        self.builder.branch(test)
        self.builder.position_at_end(after)

    @contextmanager
    def forever(self) -> Iterator[Any]:
        """Runs its body until it calls what it is given with a condition that holds."""
        body, after = (self.function.append_basic_block(name) for name in ("again", "after"))
        self.builder.branch(body)
        self.builder.position_at_end(body)

        def stop_if(condition: Value) -> None:
            more = self.function.append_basic_block("more")
            self.builder.cbranch(condition.raw, after, more)
            self.builder.position_at_end(more)

        yield stop_if
        self.builder.branch(body)
        self.builder.position_at_end(after)

    @contextmanager
    def unless(self, condition: Value) -> Iterator[None]:
        """Runs its body where the condition does not hold."""
        with self.when(condition ^ True):
            yield

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Runs its body where the condition holds."""
        with self.builder.if_then(condition.raw):
            yield

    def done(self, result: Value | None = None) -> None:
        """Returns from the function."""
        if result is None:
            self.builder.ret_void()
        else:
            self.builder.ret(result.raw)
