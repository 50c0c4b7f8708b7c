"""Rows times weights of floats on x86 processors: written for LLVM, run through XLA's custom calls.

A piece is blocks of outputs. Of a block, a chunk of inputs at a time is laid so that a vector holds one input (two of
bfloat16) of each of 16 outputs (8 with 256-bit vectors) and stays in the first cache; every row then meets it, up to 14
rows at once, with one instruction for 16 or 32 products. Laying costs 4 instructions for 64 bytes of weights: a single
row waits for memory longer than that, and many rows share it.

An output's sum adds up its inputs one after the other in float32, whatever the rows, tiles and threads: a row gives the
same bits alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from jaxinfer.kernels.matmul.native import PIECES, VECTORS, store_result
from jaxinfer.kernels.native.code import F32, I16, I32, Code, Value, vec
from jaxinfer.kernels.native.ffi import Frame, Kernel, Slots
from jaxinfer.kernels.native.floats import BF16, HALF, prefetch
from jaxinfer.kernels.native.machine import Machine

CHUNK = 256  # inputs that are laid at once, about: 16 KiB of bfloat16, 32 KiB of float32
ROWS = 512  # that meet a block before the next ones: their sums take 64 KiB
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a weight


@dataclass(frozen=True)
class FloatForm:
    """One kernel: which weights, and which instructions.

    Attributes:
      weights: their dtype.
      has_dots: whether one instruction adds up products of two bfloat16 (avx512_bf16); rows are bfloat16 then, else
        float32.
      machine: the instructions.
    """

    weights: str
    has_dots: bool
    machine: Machine

    @property
    def name(self) -> str:
        """Of the custom call."""
        return f"jaxinfer_{self.weights}_{'dots' if self.has_dots else 'fma'}_{self.machine.lanes}"

    @property
    def rows(self) -> str:
        """The dtype of rows."""
        return "bfloat16" if self.has_dots else "float32"

    @property
    def lanes(self) -> int:
        """Numbers of 32 bits in a vector."""
        return self.machine.lanes

    @property
    def block(self) -> int:
        """Outputs in a block."""
        return VECTORS * self.lanes

    @property
    def tile(self) -> int:
        """The most rows that meet a block at once: their sums fill the registers but for a few."""
        return 14 if self.lanes == 16 else 6

    @property
    def few(self) -> Sequence[int]:
        """Numbers of rows that meet weights as they are laid, one vector of outputs at a time."""
        return (1, 2, 4, 8, 12, 16) if self.lanes == 16 else (1, 2, 4, 8)

    @property
    def least(self) -> int:
        """The fewest rows of a tile where rows are more than few and tiles alike."""
        more = range(self.few[-1] + 1, ROWS + 1)
        return min(rows // -(-rows // self.tile) for rows in more)

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return _WIDTH[self.weights]

    @property
    def step(self) -> int:
        """Inputs in a laid vector."""
        return 2 if self.has_dots else 1

    @property
    def reach(self) -> int:
        """Inputs in a vector as it lies in memory."""
        return 4 * self.lanes // self.width

    def takes(self, num_in: int, num_out: int) -> bool:
        """Returns whether a weight of ``[num_out, num_in]`` can go this way; small and odd ones cannot."""
        return num_in % 2 == 0 and num_in >= self.reach and num_out >= self.block


def kernel(form: FloatForm) -> Kernel:
    """Returns the kernel of a form.

    Operands: ``x [M, in]`` of the form's rows (few must be as many as `FloatForm.few` has), ``w [out, in]`` of its
    weights. Result: ``y [M, out]`` float32 or bfloat16.
    """

    def prepare(frame: Frame) -> tuple[Slots, tuple[Value, Value]]:
        K, N = frame.dim(0, 1), frame.dim(1, 0)
        slots = {
            "x": frame.arg(0), "w": frame.arg(1), "y": frame.result(0), "y_dtype": frame.result_dtype(0),
            "M": frame.dim(0, 0), "K": K, "N": N,
        }  # fmt: skip
        # Chunks are alike: 576 inputs are three times 192.
        num_chunks = (K + (CHUNK - 1)) // CHUNK
        slots["chunk"] = ((K + num_chunks - 1) // num_chunks + (form.reach - 1)) // form.reach * form.reach
        slots["blocks"] = blocks = (N + (form.block - 1)) // form.block
        slots["share"] = share = (blocks + (PIECES - 1)) // PIECES
        return slots, (frame.code.int(0), (blocks + (share - 1)) // share)

    def local(code: Code, slots: Slots) -> Value:
        return slots["chunk"] * _input_bytes(form) + (_margin(form) + ROWS * form.block * 4)

    def nothing(code: Code, slots: Slots, piece: Value) -> None:
        pass

    def multiply_piece(code: Code, slots: Slots, piece: Value) -> None:
        first = piece * slots["share"]
        end = code.min(first + slots["share"], slots["blocks"])
        row_bytes = slots["K"] * form.width
        with code.loop(0, row_bytes * form.block, 64) as at:
            prefetch(code, slots["w"].at(first * form.block * row_bytes + at))
        with code.loop(first, end) as block:
            # The last block begins early enough to be whole: what two blocks both write is the same.
            n = code.min(block * form.block, slots["N"] - form.block)
            # The next block's weights come while this one is multiplied; another thread may have what follows a piece.
            ahead = code.select(block + 1 < end, row_bytes * form.block, 0)
            is_few = slots["M"] <= form.few[-1]
            with code.when(is_few):
                _multiply_few(code, form, slots, n, ahead)
            num_parts = (slots["M"] + (ROWS - 1)) // ROWS
            with code.unless(is_few), code.loop(0, num_parts) as part:
                rows = _share(code, slots["M"], num_parts, part)
                _multiply_block(code, form, slots, rows, n, ahead)

    return Kernel(form.name, prepare, (nothing, multiply_piece), local)


def _input_bytes(form: FloatForm) -> int:
    """Returns the bytes that an input of a block takes when it is laid."""
    return form.block * 4 // form.step


def _margin(form: FloatForm) -> int:
    """Returns bytes before a laid chunk, for what its last vector holds of the chunk before."""
    return form.reach * _input_bytes(form)


def _multiply_few(code: Code, form: FloatForm, slots: Slots, n: Value, ahead: Value) -> None:
    """Multiplies all rows, which are few, by the block of outputs from ``n``."""
    lanes = form.lanes
    kept = slots["local"].at(_margin(form))
    with code.loop(n, n + form.block, lanes) as first:
        for rows in form.few:
            with code.when(slots["M"].equals(rows)):
                _stream_tile(code, form, slots, first, ahead, rows)
        with code.loop(0, slots["M"]) as m:
            total = kept.at(m * (4 * lanes)).load(vec(F32, lanes))
            store_result(code, slots, m * slots["N"] + first, total)


def _stream_tile(code: Code, form: FloatForm, slots: Slots, n: Value, ahead: Value, rows: int) -> None:
    """Multiplies ``rows`` rows by a vector of outputs from ``n``, laid a vector of each output's at a time."""
    floats = vec(F32, form.lanes)
    K, width = slots["K"], 4 * form.lanes
    sums = [code.variable(code.constant(floats, 0.0)) for _ in range(rows)]
    with code.loop(0, K, form.reach) as at:
        # The last vectors begin early enough to be whole; what they hold of those before is passed over.
        k = code.min(at, K - form.reach)
        for i, each in enumerate(_load_laid(code, form, slots, n, k, ahead)):
            slots["local"].at(i * width).store(each, width)
        x = [slots["x"].at((k + K * i) * _WIDTH[form.rows]) for i in range(rows)]
        with code.loop((at - k) // form.step, form.reach // form.step) as i:
            vector = slots["local"].at(i * width).load(floats, width)
            for place, total in zip(x, sums, strict=True):
                total.set(_dot(code, form, total.get(), vector, _splat_input(code, form, place.at(i * 4))))
    for i, total in enumerate(sums):
        slots["local"].at(_margin(form) + i * width).store(total.get())


def _share(code: Code, total: Value, num_parts: Value, part: Value) -> tuple[Value, Value]:
    """Returns where a part begins and how many there are in it; parts are alike, 16 rows are twice 8."""
    size, spare = total // num_parts, total % num_parts
    return part * size + code.min(part, spare), code.select(part < spare, size + 1, size)


def _multiply_block(
    code: Code, form: FloatForm, slots: Slots, some: tuple[Value, Value], n: Value, ahead: Value
) -> None:
    """Multiplies rows, from the first so many, at most `ROWS`, by the block of outputs from ``n``."""
    first, num_rows = some
    num_tiles = (num_rows + (form.tile - 1)) // form.tile
    kept = slots["local"].at(_margin(form) + slots["chunk"] * _input_bytes(form))
    with code.loop(0, slots["K"], slots["chunk"]) as k:
        stop = code.min(k + slots["chunk"], slots["K"])
        _lay(code, form, slots, n, k, stop, ahead)
        with code.loop(0, num_tiles) as tile:
            m, own = _share(code, num_rows, num_tiles, tile)
            for rows in range(form.least, form.tile + 1):
                with code.when(own.equals(rows)):
                    place = kept.at(m * (form.block * 4))
                    _multiply_tile(code, form, slots, (first + m, place), (k, stop), rows)
    with code.loop(0, num_rows) as m:
        for v in range(VECTORS):
            total = kept.at((m * VECTORS + v) * form.lanes * 4).load(vec(F32, form.lanes))
            store_result(code, slots, (first + m) * slots["N"] + n + v * form.lanes, total)


def _lay(
    code: Code, form: FloatForm, slots: Slots, n: Value, start: Value, stop: Value, ahead: Value
) -> None:
    """Lays inputs ``start`` to ``stop`` of the block of outputs from ``n``: ``[inputs / step][outputs][step]``."""
    lanes, K = form.lanes, slots["K"]
    with code.loop(start, stop, form.reach) as at:
        # The last vectors begin early enough to be whole.
        k = code.min(at, K - form.reach)
        target = slots["local"].at((k - start) * _input_bytes(form) + _margin(form))
        for v in range(VECTORS):
            for i, each in enumerate(_load_laid(code, form, slots, n + v * lanes, k, ahead)):
                target.at((i * VECTORS + v) * 4 * lanes).store(each)


def _load_laid(
    code: Code, form: FloatForm, slots: Slots, n: Value, k: Value, ahead: Value
) -> Iterator[Value]:
    """Yields inputs from ``k`` of a vector of outputs from ``n``, and has those at ``ahead`` fetched.

    Of every 16 bytes a vector takes those of 4 outputs from each fourth, so that what is left to exchange lies within
    16 bytes, and few registers are in use at a time: the sums of 16 rows hold the others.
    """
    lanes = form.lanes
    rows = [slots["w"].at(((n + lane) * slots["K"] + k) * form.width) for lane in range(lanes)]
    for row in rows:
        prefetch(code, row.at(ahead))
    for quarter in range(0, 4 * lanes, 16):
        fours = [[row.at(quarter).load(vec(I32, 4)) for row in rows[i::4]] for i in range(4)]
        a, b, c, d = (_join(code, parts) for parts in fours)
        pairs = [(_lace(code, a, c, i), _lace(code, b, d, i)) for i in range(2)]
        for each in (_lace(code, *pair, i) for pair in pairs for i in range(2)):
            yield from _expand(code, form, each)


def _join(code: Code, parts: Sequence[Value]) -> Value:
    """Returns vectors one behind the other."""
    while len(parts) > 1:
        width = range(2 * parts[0].type.count)
        parts = [code.shuffle(x, y, width) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _lace(code: Code, x: Value, y: Value, half: int) -> Value:
    """Returns in every 4 lanes those of the lower or upper half of ``x`` and ``y`` in turns."""
    lanes = x.type.count
    picked = (at + 2 * half + i for at in range(0, lanes, 4) for i in range(2))
    return code.shuffle(x, y, [place for at in picked for place in (at, lanes + at)])


def _expand(code: Code, form: FloatForm, packed: Value) -> Sequence[Value]:
    """Returns the vectors that meet rows, out of one as it lies in memory."""
    floats = vec(F32, form.lanes)
    if form.has_dots or form.weights == "float32":
        return (packed,)
    if form.weights == "bfloat16":
        return [code.bits(half, floats) for half in (packed << 16, packed & -0x10000)]
    halves, shorts = vec(HALF, form.lanes), vec(I16, form.lanes)
    parts = (code.bits(code.cast(half, shorts, "trunc"), halves) for half in (packed, packed >> 16))
    return [code.cast(part, floats, "fpext") for part in parts]


def _multiply_tile(
    code: Code, form: FloatForm, slots: Slots, at: Sequence[Value], inputs: Sequence[Value], rows: int
) -> None:
    """Adds the products of ``rows`` rows with the laid inputs to their sums.

    Args:
      at: the first row, and where its sums are kept. inputs: the first that is laid, and the one behind the last.
    """
    (first, kept), (start, stop), K = at, inputs, slots["K"]
    floats = vec(F32, form.lanes)
    sums = [[code.variable(code.constant(floats, 0.0)) for _ in range(VECTORS)] for _ in range(rows)]
    laid = slots["local"].at(_margin(form))
    places = [[kept.at((i * VECTORS + v) * form.lanes * 4) for v in range(VECTORS)] for i in range(rows)]
    with code.when(start > 0):
        for i, v in product(range(rows), range(VECTORS)):
            sums[i][v].set(places[i][v].load(floats))
    x = [slots["x"].at(((first + i) * K + start) * _WIDTH[form.rows]) for i in range(rows)]
    with code.loop(0, (stop - start) // form.step) as k:
        vectors = [laid.at((k * VECTORS + v) * form.lanes * 4).load(floats) for v in range(VECTORS)]
        for i in range(rows):
            number = _splat_input(code, form, x[i].at(k * 4))
            for v, vector in enumerate(vectors):
                sums[i][v].set(_dot(code, form, sums[i][v].get(), vector, number))
    for i, v in product(range(rows), range(VECTORS)):
        places[i][v].store(sums[i][v].get())


def _splat_input(code: Code, form: FloatForm, place: Value) -> Value:
    """Returns one input of a row, or two of bfloat16, in every lane."""
    return code.splat(place.load(I32 if form.has_dots else F32), form.lanes)


def _dot(code: Code, form: FloatForm, total: Value, w: Value, x: Value) -> Value:
    """Adds the products in each lane."""
    if not form.has_dots:
        return code.intrinsic("fma", w, x, total)
    pairs = vec(BF16, 2 * form.lanes)
    return code.call(
        "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, code.bits(w, pairs), code.bits(x, pairs)
    )
