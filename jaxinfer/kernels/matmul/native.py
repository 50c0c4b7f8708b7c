"""Rows rounded to int8 times codes of 8 or 4 bits on x86 processors: written for LLVM, run through XLA's custom calls.

Phase 1 rounds rows of ``x`` to int8, rotated first where the weight is (`arrays.rotation`). In phase 2 a piece is
blocks of outputs: the codes of a block are laid so that a vector holds 4 inputs of each of 16 outputs (8 with 256-bit
vectors), and every row then meets them with one instruction for 64 products, 4 inputs of the row beside all outputs.
Laying costs 4 instructions for 64 bytes of codes: a single row waits for memory longer than that, and many rows share
it.

Integers make it exact: ``sum(x * w)`` is ``sum(x * (w + 128)) - 128 * sum(x)``, as the instruction wants one operand
without sign. A row gives the same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.arrays.quantized import Quantized
from jaxinfer.kernels.native.code import F32, I1, I8, I16, I32, Code, Value, Variable, vec
from jaxinfer.kernels.native.ffi import DTYPES, Frame, Kernel, Slots
from jaxinfer.kernels.native.floats import each_dtype, load_floats, prefetch, reduce, store_floats, transpose
from jaxinfer.kernels.native.machine import Machine

PIECES = 8  # of outputs, about; more would have threads read memory in turns
ROWS = 4  # of x that are rounded in a piece
VECTORS = 2  # of outputs in a block
TINY = 1.1754943508222875e-38
ONE_127TH = 0.007874015718698502  # 1 / 127 in float32: XLA divides by multiplying with the inverse, here too


@dataclass(frozen=True)
class Form:
    """One kernel: which codes, and which instructions.

    Attributes:
      bits: of a code. grouped: whether scales are by groups of inputs; else one an output.
      machine: the instructions.
    """

    bits: int
    grouped: bool
    machine: Machine

    @property
    def name(self) -> str:
        """Of the custom call."""
        return f"jaxinfer_int{self.bits}_{'groups' if self.grouped else 'channel'}_{self.machine.name}"

    @property
    def lanes(self) -> int:
        """Numbers of 32 bits in a vector."""
        return self.machine.lanes

    @property
    def block(self) -> int:
        """Outputs in a block."""
        return VECTORS * self.lanes

    @property
    def tiles(self) -> Sequence[int]:
        """Numbers of rows that meet a block at once; the first fills the registers, the others take what it leaves."""
        most = (12 if self.lanes == 16 else 4) // (2 if self.grouped else 1)
        return [most, *(tile for tile in (8, 4, 2, 1) if tile < most)]

    def takes(self, num_in: int, num_out: int, groups: int) -> bool:
        """Returns whether a weight of ``[num_out, num_in]`` can go this way; small and odd ones cannot."""
        whole = num_in % groups == 0 and num_in // groups % 16 == 0
        return whole and num_out >= self.block and num_in * self.bits // 8 >= 4 * self.lanes


def form_of(w: Quantized, machine: Machine) -> Form | None:
    """Returns the kernel for a weight ``[out, in]``, or None where there is none: it is small, odd, or of floats."""
    (num_out, groups), num_in = w.scale.shape, w.shape[1]
    form = Form(w.format.bits, w.format.bits == 4 or groups > 1, machine)
    return form if w.format.is_integer and form.takes(num_in, num_out, groups) else None


def kernel(form: Form) -> Kernel:
    """Returns the kernel of a form.

    Operands: ``x [M, in]`` float32 or bfloat16, ``codes [out, in]`` (4 bits: ``[out, in / 2]``), ``scale [out, G]``,
    ``offset`` like it, or empty, and ``rotation [0, block]``, a block of 0 for none. Results: ``y [M, out]`` float32 or
    bfloat16, and `scratch_bytes` of scratch.
    """

    def prepare(frame: Frame) -> tuple[Slots, tuple[Value, Value]]:
        M, K, N, G = frame.dim(0, 0), frame.dim(0, 1), frame.dim(1, 0), frame.dim(2, 1)
        scratch = frame.result(1)
        slots = {
            "x": frame.arg(0), "codes": frame.arg(1), "scale": frame.arg(2), "offset": frame.arg(3),
            "y": frame.result(0), "M": M, "K": K, "N": N, "G": G,
            "x_dtype": frame.dtype(0), "scale_dtype": frame.dtype(2), "y_dtype": frame.result_dtype(0),
            "has_offset": frame.dim(3, 0).differs(0), "rotation": (R := frame.dim(4, 1)), "run": R & (0 - R),
            "rows": scratch, "row_scale": scratch.at(M * K), "row_sum": scratch.at(M * K + M * 4),
        }  # fmt: skip
        slots["blocks"] = blocks = (N + (form.block - 1)) // form.block
        slots["share"] = share = (blocks + (PIECES - 1)) // PIECES
        return slots, ((M + (ROWS - 1)) // ROWS, (blocks + (share - 1)) // share)

    def local(code: Code, slots: Slots) -> Value:
        return slots["K"] * form.block + slots["G"] * (8 * form.block)

    def round_piece(code: Code, slots: Slots, piece: Value) -> None:
        with code.loop(piece * ROWS, code.min(piece * ROWS + ROWS, slots["M"])) as m:
            _round_row(code, form, slots, m)

    def multiply_piece(code: Code, slots: Slots, piece: Value) -> None:
        first = piece * slots["share"]
        with code.loop(first, code.min(first + slots["share"], slots["blocks"])) as block:
            multiply_block(code, slots, block)

    def multiply_block(code: Code, slots: Slots, block: Value) -> None:
        # The last block begins early enough to be whole: what two blocks both write is the same.
        n = code.min(block * form.block, slots["N"] - form.block)
        _lay_codes(code, form, slots, n)
        _lay_scales(code, form, slots, n)
        m = code.variable(code.int(0))
        for tile in form.tiles:
            with code.loop(m.get(), slots["M"] - (tile - 1), tile) as first:
                _multiply_tile(code, form, slots, first, n, tile)
                m.set(first + tile)

    return Kernel(form.name, prepare, (round_piece, multiply_piece), local)


def scratch_bytes(num_rows: int, num_in: int, groups: int) -> int:
    """Returns the bytes of scratch that a product needs: rounded rows, their scales and the sums of their groups."""
    return num_rows * (num_in + 4 + 4 * groups)


def _round_row(code: Code, form: Form, slots: Slots, m: Value) -> None:
    """Rounds one row as `quant.round_rows` does: bit for bit, NaN included, which a row's scale hands on."""
    K, ints = slots["K"], vec(I32, 16)
    size = code.variable(code.constant(ints, 0))

    def measure(x: Value) -> None:
        # As whole numbers, magnitudes keep their order and NaN is the largest.
        size.set(code.max(size.get(), code.bits(x, ints) & 0x7FFFFFFF))

    def widen(dtype: str) -> None:
        with code.loop(0, K, 16) as k:
            x = load_floats(code, slots["x"], m * K + k, dtype, 16)
            _wide_row(code, slots).at(k, F32).store(x)
            measure(x)

    each_dtype(code, slots["x_dtype"], ("float32", "bfloat16"), widen)
    # Of a rotated row the numbers are left larger by a constant, which its scale makes good.
    constant = code.variable(code.constant(F32, 1.0))
    with code.when(slots["rotation"].differs(0)):
        size.set(code.constant(ints, 0))
        _rotate_row(code, slots, measure)
        run = code.cast(slots["run"], F32, "sitofp")
        constant.set(code.constant(F32, 1.0) / code.intrinsic("sqrt", run))
    scale = code.bits(reduce(code, size.get(), code.max), F32) * ONE_127TH
    slots["row_scale"].at(m, F32).store(scale * constant.get())
    inverse = code.splat(code.select(scale < TINY, 0.0, code.constant(F32, 1.0) / scale), 16)
    group = K / slots["G"]
    with code.loop(0, slots["G"]) as g:
        total = code.variable(code.constant(ints, 0))
        with code.loop(g * group, g * group + group, 16) as k:
            y = _wide_row(code, slots).at(k, F32).load(vec(F32, 16)) * inverse
            # Adding 1.5 * 2**23 rounds to even and leaves the whole number in the low bits, -127 to 127; any other in
            # rows that are not finite, whose scale is not either.
            q = code.bits(y + 12582912.0, ints) - 0x4B400000
            total.set(total.get() + q)
            q = code.cast(q, vec(I8, 16), "trunc")
            if form.bits == 4:  # a vector of codes holds the even numbers of 8 first, then the odd ones
                q = code.shuffle(q, None, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15])
            slots["rows"].at(m * K + k).store(q)
        row_sum = reduce(code, total.get(), lambda x, y: x + y)
        slots["row_sum"].at(m * slots["G"] + g, I32).store(row_sum)


def _rotate_row(code: Code, slots: Slots, measure: Callable[[Value], None]) -> None:
    """Rotates the thread's wide row in place, without the constant, and measures its numbers."""
    K, run, row = slots["K"], slots["run"], _wide_row(code, slots)
    floats = vec(F32, 16)

    def place(at: Value) -> Value:
        return row.at(at, F32)

    def mix(together: int) -> None:
        """Mixes runs of so many vectors, in registers: low + high, low - high."""
        with code.loop(0, K, 16 * together) as k:
            parts = [_mix_lanes(code, place(k + 16 * i).load(floats)) for i in range(together)]
            for bit in (1 << n for n in range(together.bit_length() - 1)):
                parts = [
                    parts[i ^ bit] - part if i & bit else part + parts[i ^ bit]
                    for i, part in enumerate(parts)
                ]
            for i, part in enumerate(parts):
                place(k + 16 * i).store(part)

    step = code.variable(code.select(run < 64, code.int(16), 64))
    with code.when(run < 64):
        mix(1)
    with code.when(run >= 64):
        mix(4)
    with code.forever() as stop_if:
        span = step.get() * 2
        stop_if(span > run)
        with code.loop(0, K, span) as first, code.loop(first, first + step.get(), 16) as k:
            low, high = place(k), place(k + step.get())
            x, y = low.load(floats), high.load(floats)
            low.store(x + y)
            high.store(x - y)
        step.set(span)
    runs = slots["rotation"] / run
    # A single run has no others to be mixed with: nothing is taken off.
    share = code.select(runs > 1, code.constant(F32, 2.0) / code.cast(runs, F32, "sitofp"), 0.0)
    with code.loop(0, K, slots["rotation"]) as block, code.loop(block, block + run, 16) as first:
        total = code.variable(code.constant(floats, 0.0))
        with code.loop(first, first + slots["rotation"], run) as k:
            total.set(total.get() + place(k).load(floats))
        common = total.get() * code.splat(share, 16)
        with code.loop(first, first + slots["rotation"], run) as k:
            x = place(k).load(floats) - common
            place(k).store(x)
            measure(x)


def _mix_lanes(code: Code, x: Value) -> Value:
    """Returns the lanes of a vector times the Hadamard matrix of 16."""
    for step in (1, 2, 4, 8):
        sign = code.constant(x.type, [-1.0 if lane & step else 1.0 for lane in range(16)])
        x = code.intrinsic("fma", x, sign, code.shuffle(x, None, [lane ^ step for lane in range(16)]))
    return x


def _lay_codes(code: Code, form: Form, slots: Slots, n: Value) -> None:
    """Lays the codes of a block of outputs, from output ``n``: ``[in / 4][outputs][4]`` bytes without sign."""
    lanes = form.lanes
    width = 4 * lanes  # bytes of a vector
    row_bytes = slots["K"] if form.bits == 8 else slots["K"] // 2
    per_byte = 8 // form.bits
    stride = form.block * 4  # bytes of 4 inputs
    with code.loop(0, row_bytes, width) as at:
        # The last vectors begin early enough to be whole.
        first = code.min(at, row_bytes - width)
        target = slots["local"].at(first / 4 * (stride * per_byte))
        for v in range(VECTORS):
            rows = []
            for lane in range(lanes):
                place = slots["codes"].at((n + (v * lanes + lane)) * row_bytes + first)
                prefetch(code, place.at(row_bytes * form.block))
                rows.append(place.load(vec(I32, lanes)))
            for i, each in enumerate(transpose(code, rows)):
                for part, unsigned in enumerate(_unpack(code, form, slots, each)):
                    target.at((i * per_byte + part) * stride + v * width).store(unsigned)


def _unpack(code: Code, form: Form, slots: Slots, packed: Value) -> list[Value]:
    """Returns codes as bytes without sign (AVX2 takes them with theirs); of 4 bits, even numbers and odd ones."""
    if form.bits == 8:
        return [packed ^ -0x7F7F7F80 if form.machine.has_vnni else packed]
    flip = code.splat(code.select(slots["has_offset"], code.int(0, I32), 0x08080808), form.lanes)
    return [(half & 0x0F0F0F0F) ^ flip for half in (packed, packed >> 4)]


def _wide_row(code: Code, slots: Slots) -> Value:
    """Returns the thread's own place for a row of ``x`` as float32."""
    return slots["local"]


def _scale_place(slots: Slots, form: Form) -> Value:
    return slots["local"].at(slots["K"] * form.block)


def _offset_place(slots: Slots, form: Form) -> Value:
    return _scale_place(slots, form).at(slots["G"] * (4 * form.block))


def _lay_scales(code: Code, form: Form, slots: Slots, n: Value) -> None:
    """Lays the scales of a block of outputs, and offsets where there are: ``[groups][outputs]`` float32."""
    G = slots["G"]

    def lay(source: Value, target: Value) -> None:
        def write(dtype: str) -> None:
            with code.loop(0, form.block) as out, code.loop(0, G) as g:
                number = load_floats(code, source, (n + out) * G + g, dtype, 1)
                target.at(g * form.block + out, F32).store(number)

        each_dtype(code, slots["scale_dtype"], tuple(DTYPES), write)

    lay(slots["scale"], _scale_place(slots, form))
    with code.when(slots["has_offset"]):
        lay(slots["offset"], _offset_place(slots, form))


def _multiply_tile(code: Code, form: Form, slots: Slots, m: Value, n: Value, tile: int) -> None:
    """Multiplies ``tile`` rows from ``m`` by the block of outputs from ``n``, which the thread has laid."""
    floats = vec(F32, form.lanes)
    zeros = code.constant(floats, 0.0)
    sums = [[code.variable(zeros) for _ in range(VECTORS)] for _ in range(tile)]
    if form.grouped:
        with code.loop(0, slots["G"]) as g:
            _add_group(code, form, slots, m, g, sums)
    else:
        _add_group(code, form, slots, m, code.int(0), sums)
    for i in range(tile):
        scale = code.splat(slots["row_scale"].at(m + i, F32).load(F32), form.lanes)
        for v in range(VECTORS):
            place = (m + i) * slots["N"] + n + v * form.lanes
            store_result(code, slots, place, sums[i][v].get() * scale)


def _add_group(code: Code, form: Form, slots: Slots, m: Value, g: Value, sums: list[list[Variable]]) -> None:
    """Adds one group of inputs, scaled, to the sums of a tile: a row's products as integers first."""
    lanes, stride = form.lanes, form.block * 4
    ints, floats = vec(I32, lanes), vec(F32, lanes)
    K, G = slots["K"], slots["G"]
    group = K / G if form.grouped else K
    totals = [
        code.splat(slots["row_sum"].at((m + i) * G + g, I32).load(I32), lanes) for i in range(len(sums))
    ]
    bias = _bias(code, form, slots)
    counts = [[code.variable(total * bias) for _ in range(VECTORS)] for total in totals]
    rows = [slots["rows"].at((m + i) * K + g * group) for i in range(len(sums))]
    codes = slots["local"].at(g * (group / 4 * stride))
    with code.loop(0, group / 4) as k:
        vectors = [codes.at(k * stride + v * 4 * lanes).load(ints, 4 * lanes) for v in range(VECTORS)]
        for row, count in zip(rows, counts, strict=True):
            x = code.splat(row.at(k * 4).load(I32), lanes)
            for each, place in zip(vectors, count, strict=True):
                place.set(_dot(code, form, place.get(), each, x))
    for v in range(VECTORS):
        at = (g * form.block + v * lanes) * 4
        scale = _scale_place(slots, form).at(at).load(floats)
        for i, count in enumerate(counts):
            products = code.cast(count[v].get(), floats, "sitofp") * scale
            sums[i][v].set(sums[i][v].get() + products if form.grouped else products)
    with code.when(slots["has_offset"]):
        for v in range(VECTORS):
            offset = _offset_place(slots, form).at((g * form.block + v * lanes) * 4).load(floats)
            for i, total in enumerate(totals):
                sums[i][v].set(sums[i][v].get() + code.cast(total, floats, "sitofp") * offset)


def _bias(code: Code, form: Form, slots: Slots) -> Value:
    """Returns what a row's sum counts for where codes were made unsigned: minus what was added to each code."""
    if form.bits == 8:
        return code.constant(vec(I32, form.lanes), -128 if form.machine.has_vnni else 0)
    return code.splat(code.select(slots["has_offset"], code.int(0, I32), -8), form.lanes)


def _dot(code: Code, form: Form, total: Value, codes: Value, x: Value) -> Value:
    """Adds the products of 4 bytes in each lane: codes without sign, ``x`` with its sign."""
    width = 4 * form.lanes
    ints, shorts, chars = vec(I32, form.lanes), vec(I16, 2 * form.lanes), vec(I8, width)
    codes, x = code.bits(codes, chars), code.bits(x, chars)
    if form.machine.has_vnni:
        return code.call(f"llvm.x86.avx512.vpdpbusd.{8 * width}", ints, total, codes, x)
    if form.bits == 8:  # pairs of products fit 16 bits only so: |w| * (x with w's sign)
        x = code.call("llvm.x86.avx2.psign.b", chars, x, codes)
        codes = code.call("llvm.abs.v32i8", chars, codes, code.int(False, I1))
    pairs = code.call("llvm.x86.avx2.pmadd.ub.sw", shorts, codes, x)
    return total + code.call("llvm.x86.avx2.pmadd.wd", ints, pairs, code.constant(shorts, 1))


def store_result(code: Code, slots: Slots, place: Value, numbers: Value) -> None:
    """Writes a vector of float32 into the result ``y``, in its dtype."""

    def store(dtype: str) -> None:
        store_floats(code, slots["y"], place, numbers, dtype)

    each_dtype(code, slots["y_dtype"], ("float32", "bfloat16"), store)
