"""Laying queries, keys and values out for native attention, from pages of every format."""

from __future__ import annotations

from jaxinfer.kernels.attention.form import Form, Room, Task, place_of, read_int, whole_vectors
from jaxinfer.kernels.native.code import F32, I8, I16, I32, I64, Code, Value, vec
from jaxinfer.kernels.native.ffi import Slots
from jaxinfer.kernels.native.floats import BF16, load_floats, load_nibbles, transpose


def lay_queries(code: Code, form: Form, slots: Slots, task: Task, head: Value, room: Room) -> None:
    """Lays a tile's queries as rows of left sides, the group's heads of a query one after the other."""
    with code.loop(0, task.live) as t, code.loop(0, form.group) as g:
        source = place_of(form, slots, task.row, task.query + t, head, g)
        target = room.q.at((t * form.group + g) * form.depth, I32)
        for at in range(0, form.depth, form.lanes):
            lanes = min(form.lanes, form.depth - at)
            if form.in_pairs:
                numbers = slots["q"].at(source + 2 * at, I16).load(vec(I32, lanes))
            else:
                numbers = load_floats(code, slots["q"], source + at, form.queries, lanes)
            target.at(at, I32).store(numbers)


def lay_block(
    code: Code,
    form: Form,
    slots: Slots,
    task: Task,
    head: Value,
    room: Room,
    first: Value,
    num_keys: Value,
) -> None:
    """Lays a block of a head's keys and values, from the row's token ``first``; the last one fills a vector."""
    _list_tokens(code, form, slots, task, room, first, num_keys)
    if form.scales_apart:
        with code.loop(0, whole_vectors(form, num_keys)) as i:
            place = room.tokens.at(i, I64).load(I64) * slots["K"] + head
            room.k_scale.at(i, F32).store(_load_scale(code, form, slots["k_scale"], place))
            room.v_scale.at(i, F32).store(_load_scale(code, form, slots["v_scale"], place))
    with code.loop(0, num_keys, form.lanes) as at:
        tokens = [room.tokens.at(at + i, I64).load(I64) for i in range(form.lanes)]
        _lay_keys(code, form, slots, head, room, at, tokens)
    with code.loop(0, whole_vectors(form, num_keys), form.pair) as at:
        tokens = [room.tokens.at(at + i, I64).load(I64) for i in range(form.pair)]
        _lay_values(code, form, slots, head, room, at, tokens)


def _list_tokens(
    code: Code, form: Form, slots: Slots, task: Task, room: Room, first: Value, num_keys: Value
) -> None:
    """Writes which of the pool's tokens the keys of a block are, page by page."""
    P, Z = slots["P"], slots["Z"]
    done = code.variable(code.int(0))
    with code.forever() as stop_if:
        now = done.get()
        stop_if(now >= num_keys)
        column, offset = (first + now) / Z, (first + now) % Z
        page = read_int(code, slots["pages"], task.row * slots["W"] + code.min(column, slots["W"] - 1))
        page = slots["layer"] * P + code.max(code.min(page, P - 1), 0)
        count = code.min(Z - offset, num_keys - now)
        with code.loop(0, count) as i:
            room.tokens.at(now + i, I64).store(page * Z + offset + i)
        done.set(now + count)
    last = room.tokens.at(num_keys - 1, I64).load(I64)
    with code.loop(num_keys, whole_vectors(form, num_keys)) as i:
        room.tokens.at(i, I64).store(last)


def _load_scale(code: Code, form: Form, scales: Value, index: Value) -> Value:
    """Returns a scale as `pages.read_scales` does, float32."""
    kind = form.format.kind
    if kind == "mxfp4":
        bits = code.cast(scales.at(index).load(I8), I32, "zext") << 23
        return code.bits(bits, F32) * 0.5
    if kind == "nvfp4":
        return load_floats(code, scales, index, "fp8_e4m3", 1)[0] * 0.5
    return load_floats(code, scales, index, "bfloat16", 1)[0]


def _load_numbers(
    code: Code, form: Form, slots: Slots, which: str, head: Value, token: Value, at: int, lanes: int
) -> Value:
    """Returns a head's numbers from ``at`` as float32, codes under several scales multiplied by theirs."""
    H, kind = form.head_dim, form.format.kind
    place = (token * slots["K"] + head) * H
    if form.format.bits == 4:
        high = at >= H // 2
        byte = (token * slots["K"] + head) * (H // 2) + (at - H // 2 * high)
        x = load_nibbles(code, slots[which], byte, kind, lanes, high=high)
    else:
        x = load_floats(code, slots[which], place + at, kind, lanes)
    if form.scales > 1:
        index = (token * slots["K"] + head) * form.scales + at * form.scales // H
        x = x * code.splat(_load_scale(code, form, slots[f"{which}_scale"], index), lanes)
        if form.in_pairs:
            x = _to_bf16(code, x)
    return x


def _to_bf16(code: Code, x: Value) -> Value:
    """Returns float32 numbers rounded to bfloat16, as float32."""
    lanes = x.type.count
    bits = code.bits(code.cast(x, vec(BF16, lanes), "fptrunc"), vec(I16, lanes))
    return code.bits(code.cast(bits, vec(I32, lanes), "zext") << 16, vec(F32, lanes))


def _lay_keys(
    code: Code, form: Form, slots: Slots, head: Value, room: Room, at: Value, tokens: list[Value]
) -> None:
    """Lays a vector's worth of keys, from key ``at`` of the block, turned round into their panel."""
    target = room.keys.at(at / form.panel * (form.panel * form.depth) + at % form.panel, I32)
    for first in range(0, form.depth, form.lanes):
        lanes = min(form.lanes, form.depth - first)
        rows = [_load_left(code, form, slots, head, token, first, lanes) for token in tokens]
        for i, column in enumerate(transpose(code, rows)[:lanes]):
            target.at((first + i) * form.panel, I32).store(column, 4 * form.lanes)


def _load_left(
    code: Code, form: Form, slots: Slots, head: Value, token: Value, first: int, lanes: int
) -> Value:
    """Returns 32-bit parts of a key from ``first``, a whole vector of which ``lanes`` count."""
    if not form.in_pairs:
        x = code.bits(_load_numbers(code, form, slots, "k", head, token, first, lanes), vec(I32, lanes))
    elif form.format.kind == "bfloat16":
        place = (token * slots["K"] + head) * form.head_dim + 2 * first
        x = slots["k"].at(place, I16).load(vec(I32, lanes))
    else:
        # bfloat16 is the upper half of float32, which codes fill no further.
        halves = [
            _load_numbers(code, form, slots, "k", head, token, 2 * first + i * lanes, lanes) for i in (0, 1)
        ]
        low, high = (code.bits(half, vec(I16, 2 * lanes)) for half in halves)
        x = code.bits(code.shuffle(low, high, range(1, 4 * lanes, 2)), vec(I32, lanes))
    if lanes == form.lanes:
        return x
    return code.shuffle(x, None, [*range(lanes)] + [0] * (form.lanes - lanes))


def _lay_values(
    code: Code, form: Form, slots: Slots, head: Value, room: Room, at: Value, tokens: list[Value]
) -> None:
    """Lays one value, or a pair of them number by number, from value ``at`` of the block."""
    target = room.values.at(at / form.pair * form.width, I32)
    for first in range(0, form.head_dim, form.lanes):
        lanes = min(form.lanes, form.head_dim - first)
        numbers = [_load_numbers(code, form, slots, "v", head, token, first, lanes) for token in tokens]
        x = code.bits(numbers[0], vec(I32, lanes))
        if form.in_pairs:
            x = (x >> 16) | code.bits(numbers[1], vec(I32, lanes))
        if lanes < form.lanes:
            x = code.shuffle(x, code.constant(x.type, 0), [*range(lanes)] + [lanes] * (form.lanes - lanes))
        target.at(first, I32).store(x, 4 * form.lanes)
