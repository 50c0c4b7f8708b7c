"""Vectors of float32 in kernels: from and to the ways that numbers lie in memory, turned round, summed, raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from jaxinfer.kernels.native.code import F32, I8, I16, I32, VOID, Code, Value, vec
from jaxinfer.kernels.native.ffi import DTYPES

HALF = ir.HalfType()
# exp(r) = 1 + r + r * r * (...) for |r| <= ln(2) / 2, highest power first. Source: Cephes, expf.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LN2_HIGH, _LN2_LOW = (
    0.693359375,
    -2.12194440e-4,
)  # the first has 9 bits, so that times a whole number it is exact
LEAST_EXPONENT = -87.0  # of `exp`: what is below gives 0, as numbers too small for float32's usual form would


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BF16 = _Bfloat()


def load_floats(code: Code, x: Value, offset: Value, kind: str, lanes: int) -> Value:
    """Returns ``lanes`` numbers as float32.

    Args:
      x: where they lie. offset: of the first, in numbers. kind: float32, bfloat16, float16, int8, fp8_e4m3 or fp8_e5m2;
        codes come as they are, without scales.
    """
    floats = vec(F32, lanes)
    if kind == "float32":
        return x.at(offset, F32).load(floats)
    if kind == "int8":
        return code.cast(x.at(offset).load(vec(I8, lanes)), floats, "sitofp")
    if kind in ("bfloat16", "float16"):
        bits = x.at(offset, I16).load(vec(I16, lanes))
        if kind == "bfloat16":
            return code.bits(code.cast(bits, vec(I32, lanes), "zext") << 16, floats)
        return code.cast(code.bits(bits, vec(HALF, lanes)), floats, "fpext")
    # Floats of 8 bits are the beginnings of float16's; e4m3 has another exponent, 8 less.
    bits = code.cast(x.at(offset).load(vec(I8, lanes)), vec(I16, lanes), "zext")
    if kind == "fp8_e5m2":
        return code.cast(code.bits(bits << 8, vec(HALF, lanes)), floats, "fpext")
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return code.cast(code.bits(bits, vec(HALF, lanes)), floats, "fpext") * 256.0


def load_nibbles(code: Code, x: Value, offset: Value, kind: str, lanes: int, *, high: bool) -> Value:
    """Returns the lower or the upper halves of ``lanes`` bytes as float32: int4, or twice what e2m1 stands for."""
    ints = vec(I32, lanes)
    bits = code.cast(x.at(offset).load(vec(I8, lanes)), ints, "zext")
    bits = bits >> 4 if high else bits & 15
    if kind == "int4":
        return code.cast((bits ^ 8) - 8, vec(F32, lanes), "sitofp")
    size = bits & 7
    shift = code.max((size >> 1) - 1, 0)
    size = code.select(size < 4, size, ((size & 1) + 2) << shift)
    return code.cast(code.select(bits < 8, size, 0 - size), vec(F32, lanes), "sitofp")


def store_floats(code: Code, y: Value, offset: Value, numbers: Value, kind: str) -> None:
    """Writes a vector of float32 as float32, bfloat16 or float16, rounded to even."""
    lanes = numbers.type.count
    if kind == "float32":
        y.at(offset, F32).store(numbers)
    elif kind == "float16":
        y.at(offset, I16).store(code.bits(code.cast(numbers, vec(HALF, lanes), "fptrunc"), vec(I16, lanes)))
    else:
        bits = code.bits(numbers, vec(I32, lanes))
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = code.select(is_nan, (bits >> 16) | 0x40, rounded)
        y.at(offset, I16).store(code.cast(rounded, vec(I16, lanes), "trunc"))


def each_dtype(code: Code, dtype: Value, names: Sequence[str], write: Callable[[str], None]) -> None:
    """Writes code for each dtype that the numbers may have, of which one will run."""
    for name in names:
        with code.when(dtype.equals(DTYPES[name])):
            write(name)


def reduce(code: Code, x: Value, op: Callable[[Value, Value], Value]) -> Value:
    """Returns one number out of all lanes."""
    lanes = x.type.count
    while lanes > 1:
        lanes //= 2
        x = op(code.shuffle(x, None, range(lanes)), code.shuffle(x, None, range(lanes, 2 * lanes)))
    return x[0]


def transpose(code: Code, rows: list[Value]) -> list[Value]:
    """Returns a square of 32-bit numbers with rows and columns exchanged."""
    size = len(rows)
    step = 1
    while step < size:
        low = [i if not i & step else size + i - step for i in range(size)]
        high = [i + step if not i & step else size + i for i in range(size)]
        new = list(rows)
        for i in range(size):
            if not i & step:
                new[i] = code.shuffle(rows[i], rows[i + step], low)
                new[i + step] = code.shuffle(rows[i], rows[i + step], high)
        rows, step = new, step * 2
    return rows


def prefetch(code: Code, place: Value) -> None:
    """Asks for the cache line at a place."""
    numbers = (code.int(n, I32) for n in (0, 3, 1))  # to read, into all caches, data
    code.call("llvm.prefetch.p0", VOID, place, *numbers)


def fma(code: Code, x: Value, y: Value | float, z: Value | float) -> Value:
    """Returns ``x * y + z``, rounded once."""
    return code.intrinsic("fma", x, code.like(y, x), code.like(z, x))


def exp(code: Code, x: Value) -> Value:
    """Returns ``e ** x`` for ``x <= 88``, within 1.5 units in the last place; 0 below -87, 1 of 0, NaN of NaN."""
    kind = x.type
    ints = vec(I32, kind.count)
    # Adding 1.5 * 2**23 rounds to even and leaves the whole number in the low bits.
    shifted = fma(code, x, 1.4426950408889634, 12582912.0)
    n = shifted - 12582912.0
    r = fma(code, n, -_LN2_LOW, fma(code, n, -_LN2_HIGH, x))
    y = code.constant(kind, _EXP[0])
    for coefficient in _EXP[1:]:
        y = fma(code, y, r, coefficient)
    y = fma(code, y, r * r, r + 1.0)
    power = code.bits((code.bits(shifted, ints) - (0x4B400000 - 127)) << 23, kind)
    return code.select(x < LEAST_EXPONENT, 0.0, y * power)


def tanh(code: Code, x: Value) -> Value:
    """Returns the hyperbolic tangent, within 1.5e-7; NaN of NaN."""
    x = code.select(x > 10.0, 10.0, code.select(x < -10.0, -10.0, x))
    e = exp(code, x + x)
    return (e - 1.0) / (e + 1.0)
