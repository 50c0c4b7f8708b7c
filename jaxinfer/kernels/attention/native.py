"""Paged attention on x86 processors, written for LLVM: one custom call a layer, which reads pages where they lie.

A unit of work is a row, a tile of its queries, a kv head and a span of its context; threads take units as they come.
All queries of the tile and of the head's group meet a block of keys together: its keys are laid out once so that a
vector holds the same numbers of 16 keys (8 with 256-bit vectors), its values so that one holds 16 numbers of a value,
and both products then are the same small kernel, a number of the left side beside a vector of the right, up to `ROWS`
rows at a time. Where the processor has it (avx512_bf16), numbers of bfloat16 meet in pairs; else all are float32.

Blocks begin at multiples of `KEYS` whatever the tile, and what a query does not see counts as exactly nothing: a query
has the same bits alone and in any batch, and in chunks of any length above `SHORT` as in one. Rows of few queries cut a
long context into `SPANS`, by its own length alone, which a second phase joins.

Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); FlashDecoding, Dao et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxinfer.kernels.attention.form import (
    ALONE,
    KEYS,
    LINE,
    PIECES,
    SHORT,
    SPANS,
    Form,
    Room,
    Task,
    place_of,
    read_int,
    whole_vectors,
)
from jaxinfer.kernels.attention.lay import lay_block, lay_queries
from jaxinfer.kernels.attention.reference import MASKED
from jaxinfer.kernels.native.code import F32, I16, I32, Code, Value, Variable, vec
from jaxinfer.kernels.native.ffi import Frame, Kernel, Slots
from jaxinfer.kernels.native.floats import BF16, exp, fma, reduce, store_floats, tanh


def kernel(form: Form) -> Kernel:
    """Returns the kernel of a form.

    Operands: ``q [B, T, N, H]``, pages ``k v k_scale v_scale`` as `PagedKV` has them (scales ``[0]`` where there are
    none), ``pages [B, W]``, ``start [B]``, ``length [B]`` and ``[layer, window]``, int32. Attributes: scale, softcap (0
    for none), float32. Results: like ``q``, and `scratch_bytes` of scratch.
    """

    def prepare(frame: Frame) -> tuple[Slots, tuple[Value, Value]]:
        code = frame.code
        B, T, N = (frame.dim(0, axis) for axis in range(3))
        settings = frame.arg(8)
        slots = {
            "q": frame.arg(0), "k": frame.arg(1), "v": frame.arg(2), "k_scale": frame.arg(3), "v_scale": frame.arg(4),
            "pages": frame.arg(5), "start": frame.arg(6), "length": frame.arg(7), "out": frame.result(0),
            "scratch": frame.result(1), "T": T, "N": N, "K": N / form.group, "P": frame.dim(1, 1),
            "Z": frame.dim(1, 2), "W": frame.dim(5, 1), "layer": read_int(code, settings, 0),
            "window": read_int(code, settings, 1), "scale": frame.attr(0), "softcap": frame.attr(1),
        }  # fmt: skip
        slots["tiles"] = (T + (form.tile - 1)) / form.tile
        spans, work = code.variable(code.int(1)), code.variable(code.int(0))
        with code.loop(0, B) as row:
            task = Task.of(code, form, slots, row, code.int(0))
            with code.when(task.live > 0):
                spans.set(code.max(spans.get(), task.spans))
                work.set(work.get() + (task.last - task.first) * T)
        slots["spans"] = spans.get()
        slots["units"] = units = B * slots["tiles"] * slots["spans"] * slots["K"]
        # A few blocks are done before another thread has begun.
        pieces = code.select(work.get() * slots["K"] < ALONE, code.int(1), PIECES)
        slots["share"] = share = (units + pieces - 1) / pieces
        return slots, ((units + share - 1) / share, code.select(slots["spans"] > 1, B, 0))

    def attend_piece(code: Code, slots: Slots, piece: Value) -> None:
        first = piece * slots["share"]
        with code.loop(first, code.min(first + slots["share"], slots["units"])) as unit:
            K, spans, tiles = slots["K"], slots["spans"], slots["tiles"]
            rest = unit / K
            # The last tiles see most keys: they go first.
            tile, row = tiles - 1 - rest / spans % tiles, rest / spans / tiles
            task = Task.of(code, form, slots, row, tile * form.tile)
            _attend(code, form, slots, task, unit % K, rest % spans)

    return Kernel(
        form.name, prepare, (attend_piece, _write_join(form)), lambda code, slots: code.int(Room.of(form)[1])
    )


def scratch_bytes(form: Form, B: int, T: int, N: int) -> int:
    """Returns the bytes of scratch that a call needs: results of spans before they are joined."""
    return B * SPANS * T * N * _partial_bytes(form) if T <= SHORT else 0


def _partial_bytes(form: Form) -> int:
    return 4 * form.width + LINE  # a result, then its largest score and the sum of its weights


def _attend(code: Code, form: Form, slots: Slots, task: Task, head: Value, span: Value) -> None:
    """Does a unit: a tile of queries, one kv head, one span of blocks."""
    G, H, T = form.group, form.head_dim, slots["T"]
    room = Room(*(slots["local"].at(place) for place in Room.of(form)[0]))
    begin = task.first + span * task.step
    end = code.min(begin + task.step, task.last)
    with code.when((task.live > 0) & (begin < end)):
        rows = task.live * G
        lay_queries(code, form, slots, task, head, room)
        with code.loop(0, rows) as row:
            room.top.at(row, F32).store(code.constant(F32, MASKED))
            room.total.at(row, F32).store(code.constant(F32, 0.0))
            for at in range(0, form.width, form.lanes):
                room.out.at(row * form.width + at, F32).store(
                    code.constant(vec(F32, form.lanes), 0.0), LINE // 2
                )
        with code.loop(begin, end) as block:
            first = block * KEYS
            num_keys = code.min(task.position + task.live - first, KEYS)
            lay_block(code, form, slots, task, head, room, first, num_keys)
            row = code.variable(code.int(0))
            for count in form.row_counts:
                with code.loop(row.get(), rows - (count - 1), count) as each:
                    _attend_rows(code, form, slots, room, count, each, task.position - first, num_keys)
                    row.set(each + count)
        with code.when(task.spans > 1):
            _keep_partial(code, form, slots, task, head, span, room)
        with code.unless(task.spans > 1), code.loop(0, rows) as row:
            place = place_of(form, slots, task.row, task.query + row / G, head, row % G)
            total = room.total.at(row, F32).load(F32)
            for at in range(0, H, form.lanes):
                lanes = min(form.lanes, H - at)
                out = room.out.at(row * form.width + at, F32).load(vec(F32, lanes))
                store_floats(code, slots["out"], place + at, out / code.splat(total, lanes), form.queries)
    with (
        code.when(span.equals(0)),
        code.loop(code.max(task.live, 0), code.min(T - task.query, form.tile)) as t,
        code.loop(0, G * H) as i,
    ):
        zero = code.constant(vec(F32, 1), 0.0)
        place = place_of(form, slots, task.row, task.query + t, head, code.int(0))
        store_floats(code, slots["out"], place + i, zero, form.queries)


def _attend_rows(
    code: Code, form: Form, slots: Slots, room: Room, count: int, row: Value, before: Value, num_keys: Value
) -> None:
    """Has ``count`` rows meet a block.

    Args:
      row: the first. before: position of the tile's first query less that of the block's first key. num_keys: laid out.
    """
    seen = code.min(before + (row + (count - 1)) / form.group + 1, num_keys)
    with code.when(seen > 0):
        live = whole_vectors(form, seen)
        with code.loop(0, live, form.panel) as at:
            sums = _multiply(
                code, form, count, form.vectors, room.q.at(row * form.depth, I32), form.depth,
                room.keys.at(at * form.depth, I32), form.panel, code.int(form.depth),
            )  # fmt: skip
            for i in range(count):
                for v in range(form.vectors):
                    place = room.scores.at(at + (i * KEYS + v * form.lanes), F32)
                    place.store(sums[i][v].get(), 4 * form.lanes)
        with code.loop(0, count) as i:
            _weigh_row(code, form, slots, room, i, row + i, before + (row + i) / form.group, live)
        shrink = [code.splat(room.shrink.at(i, F32).load(F32), form.lanes) for i in range(count)]
        for at in range(0, form.width, form.panel):
            vectors = min(form.vectors, (form.width - at) // form.lanes)

            def result(i: int, v: int, at: int = at) -> Value:
                return room.out.at((row + i) * form.width + (at + v * form.lanes), F32)

            def first(i: int, v: int, result: Callable[[int, int], Value] = result) -> Value:
                return result(i, v).load(vec(F32, form.lanes), 4 * form.lanes) * shrink[i]

            sums = _multiply(
                code, form, count, vectors, room.weights, KEYS // form.pair, room.values.at(at, I32), form.width,
                live / form.pair, first,
            )  # fmt: skip
            for i in range(count):
                for v in range(vectors):
                    result(i, v).store(sums[i][v].get(), 4 * form.lanes)


def _multiply(
    code: Code,
    form: Form,
    rows: int,
    vectors: int,
    left: Value,
    left_stride: int,
    right: Value,
    right_stride: int,
    depth: Value,
    first: Callable[[int, int], Value] | None = None,
) -> list[list[Variable]]:
    """Returns the products of ``rows`` rows with ``vectors`` columns of vectors, over ``depth``, added to ``first``."""
    floats = vec(F32, form.lanes)
    zero = code.constant(floats, 0.0)
    sums = [
        [code.variable(zero if first is None else first(i, v)) for v in range(vectors)] for i in range(rows)
    ]
    with code.loop(0, depth) as d:
        columns = [
            right.at(d * right_stride + v * form.lanes, I32).load(vec(I32, form.lanes), 4 * form.lanes)
            for v in range(vectors)
        ]
        for i in range(rows):
            x = code.splat(left.at(d + i * left_stride, I32).load(I32), form.lanes)
            for column, total in zip(columns, sums[i], strict=True):
                total.set(_dot(code, form, total.get(), column, x))
    return sums


def _dot(code: Code, form: Form, total: Value, x: Value, y: Value) -> Value:
    """Adds the products of each lane."""
    if form.in_pairs:
        pairs = vec(BF16, 2 * form.lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * form.lanes}"
        return code.call(name, total.type, total, code.bits(x, pairs), code.bits(y, pairs))
    return fma(code, code.bits(x, total.type), code.bits(y, total.type), total)


def _weigh_row(
    code: Code, form: Form, slots: Slots, room: Room, i: Value, row: Value, newest: Value, live: Value
) -> None:
    """Makes weights of a row's scores, against the largest so far, and notes by how much earlier ones shrink.

    Args:
      i: of the rows that meet the block. row: of the tile's. newest: the last key it sees, from the block's first.
      live: keys, whole vectors.
    """
    lanes = form.lanes
    floats, ints = vec(F32, lanes), vec(I32, lanes)
    steps = code.constant(ints, list(range(lanes)))
    window = slots["window"]
    # A key beyond int32 of the block is as far as one just outside it.
    oldest = code.select(window.equals(0), -1, code.max(newest - window, -1))
    newest = code.splat(code.cast(code.min(newest, KEYS), I32, "trunc"), lanes)
    oldest = code.splat(code.cast(code.min(oldest, KEYS), I32, "trunc"), lanes)
    scale = code.splat(slots["scale"], lanes)
    best = code.variable(code.constant(floats, MASKED))
    with code.loop(0, live, lanes) as at:
        place = room.scores.at(i * KEYS + at, F32)
        score = place.load(floats, 4 * lanes) * scale
        if form.scales_apart:
            score = score * room.k_scale.at(at, F32).load(floats, 4 * lanes)
        capped = code.variable(score)
        with code.when(slots["softcap"] > 0.0):
            cap = code.splat(slots["softcap"], lanes)
            capped.set(cap * tanh(code, score / cap))
        key = code.splat(code.cast(at, I32, "trunc"), lanes) + steps
        score = code.select((key <= newest) & (key > oldest), capped.get(), MASKED)
        place.store(score, 4 * lanes)
        best.set(code.max(best.get(), score))
    old = room.top.at(row, F32).load(F32)
    top = code.max(reduce(code, best.get(), code.max), old)
    tops = code.splat(top, lanes)
    total = code.variable(code.constant(floats, 0.0))
    with code.loop(0, live, lanes) as at:
        score = room.scores.at(i * KEYS + at, F32).load(floats, 4 * lanes)
        weight = code.select(score.equals(MASKED), 0.0, exp(code, score - tops))
        if form.scales_apart:
            total.set(total.get() + weight)
            weight = weight * room.v_scale.at(at, F32).load(floats, 4 * lanes)
        place = room.weights.at((i * KEYS + at) * 4 // form.pair)
        if form.in_pairs:
            bits = code.bits(code.cast(weight, vec(BF16, lanes), "fptrunc"), vec(I16, lanes))
            place.store(bits, 2 * lanes)
            weight = code.bits(code.cast(bits, ints, "zext") << 16, floats)
        else:
            place.store(weight, 4 * lanes)
        if not form.scales_apart:  # summed as they are multiplied, rounded
            total.set(total.get() + weight)
    shrink = exp(code, code.splat(old - top, lanes))[0]
    room.shrink.at(i, F32).store(shrink)
    room.top.at(row, F32).store(top)
    added = reduce(code, total.get(), lambda x, y: x + y)
    room.total.at(row, F32).store(room.total.at(row, F32).load(F32) * shrink + added)


def _partial(form: Form, slots: Slots, row: Value, span: Value, query: Value, head: Value) -> Value:
    """Returns where a query head's result over a span lies."""
    index = ((row * SPANS + span) * slots["T"] + query) * slots["N"] + head
    return slots["scratch"].at(index * _partial_bytes(form))


def _keep_partial(
    code: Code, form: Form, slots: Slots, task: Task, head: Value, span: Value, room: Room
) -> None:
    """Keeps a unit's results until those of the other spans are there."""
    with code.loop(0, task.live * form.group) as row:
        member = head * form.group + row % form.group
        place = _partial(form, slots, task.row, span, task.query + row / form.group, member)
        for at in range(0, form.width, form.lanes):
            place.at(at, F32).store(room.out.at(row * form.width + at, F32).load(vec(F32, form.lanes)))
        place.at(form.width, F32).store(room.top.at(row, F32).load(F32))
        place.at(form.width + 1, F32).store(room.total.at(row, F32).load(F32))


def _write_join(form: Form) -> Callable[[Code, Slots, Value], None]:
    """Returns what joins the spans of one row."""
    H, lanes = form.head_dim, form.lanes

    def join(code: Code, slots: Slots, row: Value) -> None:
        task = Task.of(code, form, slots, row, code.int(0))
        # A row of no live queries has spans of nothing, and none of its queries is joined.
        with code.when(task.spans > 1), code.loop(0, task.live) as query, code.loop(0, slots["N"]) as head:
            join_head(code, slots, task, query, head)

    def join_head(code: Code, slots: Slots, task: Task, query: Value, head: Value) -> None:
        def part(span: Value, number: int) -> Value:
            place = _partial(form, slots, task.row, span, query, head)
            return place.at(form.width + number, F32).load(F32)

        top = code.variable(code.constant(F32, MASKED))
        with code.loop(0, task.spans) as span:
            top.set(code.max(top.get(), part(span, 0)))
        total = code.variable(code.constant(F32, 0.0))
        sums = [code.variable(code.constant(vec(F32, lanes), 0.0)) for _ in range(0, form.width, lanes)]
        with code.loop(0, task.spans) as span:
            share = exp(code, code.splat(part(span, 0) - top.get(), lanes))
            total.set(total.get() + part(span, 1) * share[0])
            for i, place in enumerate(sums):
                numbers = _partial(form, slots, task.row, span, query, head).at(i * lanes, F32)
                place.set(place.get() + numbers.load(vec(F32, lanes)) * share)
        target = (task.row * slots["T"] + query) * slots["N"] * H + head * H
        for i, place in enumerate(sums):
            numbers = place.get() / code.splat(total.get(), lanes)
            if (rest := H - i * lanes) < lanes:
                numbers = code.shuffle(numbers, None, range(rest))
            store_floats(code, slots["out"], target + i * lanes, numbers, form.queries)

    return join
