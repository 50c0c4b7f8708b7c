"""Paged attention on a TPU, in Pallas: pages come by DMA from where they lie, in every format, for any queries.

One program a row and tile of queries, one after the other. Each goes over its row's pages a block at a time: while one
block is multiplied the next is on its way, and during a row's last block it is the next row's first, so that decode
rows never wait for memory alone. Only pages that a query sees are read, by their own ids.

A page is ``[Z, C]`` with the heads of a token side by side in lanes. Heads of 128 or 256 numbers are slices of whole
vectors. Others (64, 96, or the halves that 4 bits are packed by) share vectors: then the queries of such neighbours
lie in one matrix, each in its own head's lanes with zeros around it, and one product serves them all. Tokens too short
for a vector share it (`arrays.pages.value_slab`): a block is then opened by their places in it, first those of all
rows that come first, so its tokens are in another order, which softmax does not mind.

Codes meet queries as they are where a head has one scale: scales multiply the scores and the weights, a row of each.
Smaller groups are multiplied out before the product. Scales lie as `arrays.pages.scale_slab` lays them; matrices of
zeros and ones bring them to where they are needed, exactly, in the matrix unit.

What jax ships (0.12, `ops.tpu.ragged_paged_attention`) takes keys and values interleaved in one array, one scale a
tensor, heads of 128, a window known when it is traced, no 4 bits, and cannot be interpreted; tokamax has none.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import (
    group_size,
    padded_groups,
    padded_lanes,
    scale_slab,
    to_slab,
    token_widths,
)
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.reference import MASKED

LANES = 128
BLOCK = 512  # tokens of context at a time
BLOCK_BYTES = 2 * 2**20  # of the keys of a block, at most; two blocks of keys and values lie in VMEM
TILE_ROWS = 512  # queries times heads of a group that meet a block at once
TILE_BYTES = 2 * 2**20  # of a tile's sums in float32
VMEM_BYTES = 48 * 2**20  # the limit that a kernel asks for
TABLE_BYTES = 768 * 2**10  # of page ids, that lie in the scalar memory of 1 MiB


@dataclass(frozen=True)
class Plan:
    """What is known when a kernel is traced.

    Attributes:
      fmt: of pages. dtype: that products are made in.
      page_size: Z. num_heads: K. group: G. head_dim: H.
      tile: queries of a row at a time. pages_a_block: pages at a time.
      softcap: or None. slab: rows and lanes of a page's scales, or None. values: rows and lanes of its numbers.
    """

    fmt: Format
    dtype: Any
    page_size: int
    num_heads: int
    group: int
    head_dim: int
    tile: int
    pages_a_block: int
    softcap: float | None
    slab: tuple[int, int] | None
    values: tuple[int, int]

    @property
    def fold(self) -> int:
        """Tokens that share a row of a page's numbers."""
        return max(1, self.values[1] // self.token_lanes)

    @property
    def token_lanes(self) -> int:
        """Lanes of a token's numbers where it shares a row."""
        return padded_lanes(token_widths(self.fmt, self.num_heads, self.head_dim)[0])

    @property
    def has_slabs(self) -> bool:
        """Whether a page's numbers are not a row a token."""
        return self.values[0] != self.page_size or self.fold > 1

    @property
    def page_slots(self) -> int:
        """Places of tokens in a page as it is opened: Z, and those that fill up a slab."""
        return self.values[0] * self.fold

    def places(self, shape: tuple[int, int], axis: int):
        """Returns of which page of a block, and of which token of it, each of its places on an axis is."""
        place = lax.broadcasted_iota(jnp.int32, shape, axis)
        rows = self.values[0]
        row = lax.rem(place, self.pages_a_block * rows)
        return lax.div(row, rows), lax.rem(row, rows) * self.fold + lax.div(place, self.pages_a_block * rows)

    @property
    def planes(self) -> int:
        """Into how many parts a head's numbers are cut: two where a byte holds one of each half."""
        return 2 if self.fmt.bits == 4 else 1

    @property
    def width(self) -> int:
        """Lanes of a head in a page."""
        return self.head_dim // self.planes

    @property
    def together(self) -> int:
        """Heads that share whole vectors of lanes."""
        return min(self.num_heads, math.lcm(self.width, LANES) // self.width)

    @property
    def bundles(self) -> int:
        """Groups of such heads; the last may lack some."""
        return -(-self.num_heads // self.together)

    @property
    def rows(self) -> int:
        """Rows of a bundle's matrix of queries, to whole tiles of 16-bit vectors."""
        return -(-self.together * self.tile * self.group // 16) * 16

    @property
    def is_scaled_after(self) -> bool:
        """Whether scales multiply scores and weights."""
        return not self.fmt.is_plain and group_size(self.fmt, self.head_dim) == self.head_dim

    def lanes(self, bundle: int) -> slice:
        """Returns where a bundle's heads lie in a page."""
        first = bundle * self.together
        return slice(first * self.width, min(first + self.together, self.num_heads) * self.width)


def paged_attention_tpu(
    q: jax.Array,
    kv: PagedKV,
    pages: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    softcap: float | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `paged_attention_reference`.

    Args:
      interpret: what `pallas_call` takes: True runs the kernel in XLA, on any backend.

    Raises:
      ValueError: a table of pages that the scalar memory cannot hold.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    B, T, N, _ = q.shape
    P = kv.k.shape[1]
    if pages.size * 4 > TABLE_BYTES:
        raise ValueError(
            f"attention=tpu: a table of {list(pages.shape)} page ids takes {pages.size * 4} bytes of scalar memory, "
            f"which holds {TABLE_BYTES}; take larger pages (page_size {kv.page_size} now) or fewer rows"
        )
    plan = make_plan(q, kv, pages.shape[1], softcap)
    tiles = -(-T // plan.tile)
    queries = _lay_queries(q * jnp.asarray(scale, q.dtype), plan, tiles)
    pools = [kv.k, kv.v]
    if plan.slab is not None:
        pools += [to_slab(each, plan.slab) for each in (kv.k_scale, kv.v_scale)]
    reach = 0 if window is None else window
    scalars = (
        jnp.stack([jnp.asarray(each, jnp.int32) for each in (kv.layer, reach)]),
        start.astype(jnp.int32),
        length.astype(jnp.int32),
        jnp.clip(pages, 0, P - 1).astype(jnp.int32).reshape(-1),
    )
    block = (1, 1, *queries.shape[2:])
    spec = pl.BlockSpec(block, lambda b, t, *_: (b, t, 0, 0, 0))
    column = np.arange(plan.rows)[:, None]
    per_head = plan.tile * plan.group
    marks = np.concatenate([column % per_head // plan.group, column // per_head], 1).astype(np.int32)
    S = plan.pages_a_block * plan.page_size
    paged = [pltpu.VMEM((2, plan.pages_a_block, *pool.shape[2:]), pool.dtype) for pool in pools]
    whole = [pltpu.VMEM((2, S, pool.shape[3]), pool.dtype) for pool in pools[:2]]
    buffers = paged if plan.has_slabs else [*whole, *paged[2:]]
    state = (plan.bundles, plan.rows, 1)
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan, num_pools=len(pools)),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B, tiles),
            in_specs=[
                pl.BlockSpec(marks.shape, lambda b, t, *_: (0, 0)),
                spec,
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in pools),
            ],
            out_specs=spec,
            scratch_shapes=[
                *buffers,
                pltpu.VMEM(state, jnp.float32),
                pltpu.VMEM(state, jnp.float32),
                pltpu.VMEM(queries.shape[2:], jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_estimate(q, pools, pages, plan),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, jnp.asarray(marks), queries, *pools)
    return _take_heads(out, plan)[:, :T, :N]


def interpret_attention_tpu(*operands: Any, **options: Any) -> jax.Array:
    """As `paged_attention_tpu`, its kernel run in XLA on whatever backend there is: slow, to check it without a TPU."""
    return paged_attention_tpu(*operands, **options, interpret=True)


def make_plan(q: jax.Array, kv: PagedKV, table_width: int, softcap: float | None) -> Plan:
    """Returns how a block of queries goes over pages.

    Args:
      q: ``[B, T, N, H]``. kv: of a stack. table_width: W. softcap: or None.
    """
    _, T, N, H = q.shape
    Z = kv.page_size
    K = kv.count_heads(H)
    rows, lanes = kv.k.shape[2:]
    most = max(1, min(BLOCK // Z, BLOCK_BYTES // (rows * lanes * kv.k.dtype.itemsize)))
    slab = None if kv.format.is_plain else scale_slab(kv.format, K, H, Z)
    options = (kv.format, q.dtype, Z, K, N // K, H)
    plan = Plan(*options, 1, min(most, table_width), softcap, slab, (rows, lanes))
    room = TILE_BYTES // (4 * plan.bundles * plan.planes * plan.together * plan.width)
    tile = min(T, max(1, min(TILE_ROWS, room) // (plan.together * plan.group)))
    return replace(plan, tile=tile)


def _lay_queries(q: jax.Array, plan: Plan, tiles: int) -> jax.Array:
    """Returns queries ``[B, tiles, bundles * planes, rows, lanes]``, each in its own head's lanes."""
    B, T, _, _ = q.shape
    many = plan.together
    q = q.reshape(B, T, plan.num_heads, plan.group, plan.planes, plan.width)
    spare = plan.bundles * many - plan.num_heads
    q = jnp.pad(q, ((0, 0), (0, tiles * plan.tile - T), (0, spare), (0, 0), (0, 0), (0, 0)))
    q = q.reshape(B, tiles, plan.tile, plan.bundles, many, plan.group, plan.planes, plan.width)
    q = q.transpose(0, 1, 3, 6, 4, 2, 5, 7)  # [B, tiles, bundles, planes, many, tile, G, width]
    if many > 1:
        own = np.eye(many, dtype=bool)[:, None, None, :, None]
        q = jnp.where(own, q[..., None, :], 0)
    q = q.reshape(B, tiles, plan.bundles * plan.planes, many * plan.tile * plan.group, many * plan.width)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, plan.rows - q.shape[3]), (0, 0)))


def _take_heads(out: jax.Array, plan: Plan) -> jax.Array:
    """Returns ``[B, tiles * tile, heads, H]`` of what a kernel made, which lies as `_lay_queries` lays."""
    B, tiles = out.shape[:2]
    many = plan.together
    out = out[:, :, :, : many * plan.tile * plan.group]
    out = out.reshape(B, tiles, plan.bundles, plan.planes, many, plan.tile, plan.group, many, plan.width)
    if many > 1:
        own = np.eye(many, dtype=bool)[:, None, None, :, None]
        out = jnp.where(own, out, 0).sum(-2)
    else:
        out = out[..., 0, :]
    out = out.transpose(0, 1, 5, 2, 4, 6, 3, 7)
    return out.reshape(B, tiles * plan.tile, plan.bundles * many * plan.group, plan.head_dim)


def _estimate(q: jax.Array, pools: list[jax.Array], pages: jax.Array, plan: Plan) -> pl.CostEstimate:
    """Returns what a call does: decode rows read every page of the table, chunks of several tiles half of it."""
    B, T, N, H = q.shape
    context, tiles = pages.shape[1] * plan.page_size, -(-T // plan.tile)
    seen = context if tiles == 1 else context / 2
    page = sum(math.prod(pool.shape[2:]) * pool.dtype.itemsize for pool in pools)
    passes = tiles * seen / context
    return pl.CostEstimate(
        flops=int(4 * B * T * N * H * seen),
        transcendentals=int(B * T * N * seen),
        bytes_accessed=int(pages.size * page * passes + 2 * q.size * q.dtype.itemsize),
    )


def _kernel(info, start, length, table, marks, q_ref, *refs: Any, plan: Plan, num_pools: int) -> None:
    """One tile of a row's queries.

    Args:
      info: layer and window. start, length: ``[B]``. table: ``[B * W]`` page ids; these four are scalars.
      marks: ``[rows, 2]`` which query of the tile, and which head of the bundle, a row is.
      q_ref: ``[1, 1, bundles * planes, rows, lanes]``.
      refs: the pools; the result, as q; two buffers for each pool; the running largest score and sum ``[bundles,
        rows, 1]``, the running output as q; which buffer is next and whether it is being filled; semaphores.
    """
    pools, o_ref = refs[:num_pools], refs[num_pools]
    buffers = refs[num_pools + 1 : 2 * num_pools + 1]
    m_ref, l_ref, acc_ref, state, sem = refs[2 * num_pools + 1 :]
    b, t, tiles = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    Z, step, width = plan.page_size, plan.pages_a_block, table.shape[0] // start.shape[0]
    layer, window = info[0], info[1]

    def reach(b, t):
        """Returns a tile's first position, and the columns of the table that its queries see: from, to."""
        first = start[b] + t * plan.tile
        count = jnp.clip(length[b] - t * plan.tile, 0, plan.tile)
        oldest = jnp.where(window > 0, jnp.maximum(first - window + 1, 0), 0)
        low = lax.div(oldest, Z)
        high = jnp.minimum(lax.div(first + count + Z - 1, Z), width)
        return first, low, jnp.where(count > 0, jnp.maximum(high, low), low)

    def move(b, low, high, i, slot, act):
        """Starts or awaits the copies of a block of pages."""

        def each(j, carry):
            page = table[b * width + low + i * step + j]
            for n, (pool, buffer) in enumerate(zip(pools, buffers, strict=True)):
                is_flat = n < 2 and not plan.has_slabs
                to = buffer.at[slot, pl.ds(j * Z, Z)] if is_flat else buffer.at[slot, j]
                act(pltpu.make_async_copy(pool.at[layer, page], to, sem.at[slot]))
            return carry

        lax.fori_loop(0, jnp.minimum(high - low - i * step, step), each, 0)

    def begin(b, low, high, i, slot):
        move(b, low, high, i, slot, lambda copy: copy.start())

    @pl.when((b == 0) & (t == 0))
    def _():
        # What was never read must be finite: it is multiplied by 0.
        for buffer in buffers:
            buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)
        state[0] = 0
        state[1] = 0

    first, low, high = reach(b, t)
    blocks = lax.div(high - low + step - 1, step)
    first_slot = state[0]

    @pl.when((blocks > 0) & (state[1] == 0))
    def _():
        begin(b, low, high, 0, first_slot)

    is_last = t + 1 == tiles
    next_b, next_t = jnp.where(is_last, b + 1, b), jnp.where(is_last, 0, t + 1)
    safe_b = jnp.minimum(next_b, pl.num_programs(0) - 1)
    _, next_low, next_high = reach(safe_b, next_t)
    has_next = (blocks > 0) & (next_b < pl.num_programs(0)) & (next_high > next_low)
    state[0] = lax.rem(first_slot + blocks, 2)
    state[1] = has_next.astype(jnp.int32)
    m_ref[...] = jnp.full(m_ref.shape, MASKED, jnp.float32)
    l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
    acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def body(i, carry):
        slot = lax.rem(first_slot + i, 2)

        @pl.when(i + 1 < blocks)
        def _():
            begin(b, low, high, i + 1, 1 - slot)

        @pl.when((i + 1 == blocks) & has_next)
        def _():
            begin(safe_b, next_low, next_high, 0, 1 - slot)

        move(b, low, high, i, slot, lambda copy: copy.wait())
        page, place = plan.places((1, step * plan.page_slots), 1)
        token = (low + i * step + page) * Z + place
        position = first + marks[:, :1]
        x_mask = (token <= position) & ((token > position - window) | (window == 0)) & (place < Z)
        _attend(plan, q_ref, marks, x_mask, [buffer.at[slot] for buffer in buffers], m_ref, l_ref, acc_ref)
        return carry

    lax.fori_loop(0, blocks, body, 0)
    for bundle in range(plan.bundles):
        lanes = plan.lanes(bundle)
        total = jnp.maximum(l_ref[bundle], 1e-30)
        for n in range(bundle * plan.planes, (bundle + 1) * plan.planes):
            part = slice(0, lanes.stop - lanes.start)
            o_ref[0, 0, n, :, part] = (acc_ref[n, :, part] / total).astype(o_ref.dtype)


def _attend(plan: Plan, q_ref, marks, x_mask, block, m_ref, l_ref, acc_ref) -> None:
    """Adds a block of context to a tile's running softmax."""
    spread = [_spread_scales(each, plan) for each in block[2:]]
    after = [_by_head(each, plan) for each in spread] if plan.is_scaled_after else None
    head = marks[:, 1:]

    def scales_of(n: int, bundle: int):
        """Returns a row of scales for every row of queries, ``[rows or 1, S]``."""
        assert after is not None
        first = bundle * plan.together
        out = after[n][first : first + 1]
        for i in range(1, min(plan.together, plan.num_heads - first)):
            out = jnp.where(head == i, after[n][first + i : first + i + 1], out)
        return out

    for bundle in range(plan.bundles):
        lanes = plan.lanes(bundle)
        part = slice(0, lanes.stop - lanes.start)
        numbers = range(bundle * plan.planes, (bundle + 1) * plan.planes)
        keys, values = (_open(plan, block[n], spread[n] if spread else None, bundle) for n in range(2))
        scores = sum(_product(q_ref[0, 0, n, :, part], key, 1) for n, key in zip(numbers, keys, strict=True))
        if after is not None:
            scores = scores * scales_of(0, bundle)
        if plan.softcap is not None:
            scores = plan.softcap * jnp.tanh(scores / plan.softcap)
        scores = jnp.where(x_mask, scores, MASKED)
        top = m_ref[bundle]
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        shrink = jnp.exp(top - new_top)
        m_ref[bundle] = new_top
        l_ref[bundle] = l_ref[bundle] * shrink + weights.sum(-1, keepdims=True)
        if after is not None:
            weights = weights * scales_of(1, bundle)
        weights = weights.astype(plan.dtype)
        for n, value in zip(numbers, values, strict=True):
            acc_ref[n, :, part] = acc_ref[n, :, part] * shrink + _product(weights, value, 0)


def _product(x, y, axis: int):
    """Returns ``x`` times ``y`` over the last axis of x and an axis of y, in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _open(plan: Plan, stored, spread, bundle: int) -> list[Any]:
    """Returns a bundle's numbers in a block ``[S, C]``, a matrix for each plane, without scales that follow later."""
    lanes = plan.lanes(bundle)
    bits = stored[...].reshape(-1, plan.values[1]) if plan.has_slabs else stored[:, lanes]
    planes = [_read_codes(bits, plan.fmt, plane, plan.dtype) for plane in range(plan.planes)]
    if plan.has_slabs:
        firsts = [i * plan.token_lanes + lanes.start for i in range(plan.fold)]
        size = lanes.stop - lanes.start
        planes = [jnp.concatenate([x[:, first : first + size] for first in firsts]) for x in planes]
    if plan.fmt.is_plain or plan.is_scaled_after:
        return planes
    per_head = plan.head_dim // group_size(plan.fmt, plan.head_dim)
    size = lanes.stop - lanes.start
    shape = (spread.shape[1], size)
    which = lax.rem(
        lax.broadcasted_iota(jnp.int32, shape, 0), padded_groups(plan.fmt, plan.num_heads, plan.head_dim)
    )
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    out = []
    for plane, codes in enumerate(planes):
        number = plane * plan.width + lax.rem(lane, plan.width)
        wanted = (bundle * plan.together + lax.div(lane, plan.width)) * per_head
        wanted = wanted + lax.div(number, group_size(plan.fmt, plan.head_dim))
        scale = _product(spread, (which == wanted).astype(jnp.bfloat16), 0)
        out.append((codes.astype(jnp.float32) * scale).astype(plan.dtype))
    return out


def _spread_scales(stored, plan: Plan):
    """Returns a block's scales in bfloat16, ``[S, lanes]``: each token's own lanes of its page's slab, 0 in others."""
    assert plan.slab is not None
    rows, lanes = plan.slab
    S = plan.pages_a_block * plan.page_slots
    groups = padded_groups(plan.fmt, plan.num_heads, plan.head_dim)
    tokens_a_row = lanes // groups
    slab = _read_scales(stored[...], plan.fmt).reshape(plan.pages_a_block * rows, lanes)
    page, place = plan.places((S, 1), 0)
    mine = page * rows + lax.div(place, tokens_a_row)
    pick = lax.broadcasted_iota(jnp.int32, (S, plan.pages_a_block * rows), 1) == mine
    spread = _product(pick.astype(jnp.bfloat16), slab, 0)
    lane = lax.broadcasted_iota(jnp.int32, (S, lanes), 1)
    own = lax.div(lane, groups) == lax.rem(place, tokens_a_row)
    return jnp.where(own, spread, 0.0).astype(jnp.bfloat16)


def _by_head(spread, plan: Plan):
    """Returns scales by kv head, ``[K and more, S]`` float32."""
    groups = padded_groups(plan.fmt, plan.num_heads, plan.head_dim)
    shape = (-(-plan.num_heads // 16) * 16, spread.shape[1])
    lane = lax.rem(lax.broadcasted_iota(jnp.int32, shape, 1), groups)
    pick = lane == lax.broadcasted_iota(jnp.int32, shape, 0)
    return _product(pick.astype(jnp.bfloat16), spread, 1)


def _read_codes(bits, fmt: Format, plane: int, dtype):
    """Returns stored numbers or codes in a dtype that holds them, those of fp4 doubled."""
    if fmt.kind == "float16":
        # TPUs have no float16. Its bits, moved to float32's places, lack a factor; the smallest are whole numbers.
        x = bits.astype(jnp.int32)
        size = lax.bitcast_convert_type((x & 0x7FFF) << 13, jnp.float32) * 2.0**112
        size = jnp.where(x & 0x7C00 == 0, (x & 0x3FF).astype(jnp.float32) * 2.0**-24, size)
        return jnp.where(x < 0x8000, size, -size).astype(dtype)
    if fmt.bits == 4:
        x = bits.astype(jnp.int32)
        if fmt.kind == "int4":
            return ((x << (28 - 4 * plane)) >> 28).astype(jnp.float32).astype(dtype)
        x = (x >> (4 * plane)) & 15
        size = x & 7
        size = jnp.where(size < 4, size, (2 + (size & 1)) << jnp.maximum((size >> 1) - 1, 0))
        return jnp.where(x < 8, size, -size).astype(jnp.float32).astype(dtype)
    if fmt.is_integer or bits.dtype == fmt.dtype:
        return bits.astype(dtype)
    return lax.bitcast_convert_type(bits, fmt.dtype).astype(dtype)


def _read_scales(bits, fmt: Format):
    """Returns scales in bfloat16, which holds them all; those of fp4 halved, as its codes are doubled."""
    if fmt.kind == "mxfp4":
        exponent = bits.astype(jnp.int32) << 23
        return (lax.bitcast_convert_type(exponent, jnp.float32) * 0.5).astype(jnp.bfloat16)
    if fmt.kind == "nvfp4":
        scale = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
        return (scale * 0.5).astype(jnp.bfloat16)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
