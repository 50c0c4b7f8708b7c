"""Paged attention on a GPU, in Pallas by way of Triton: it reads pages where they lie, in every format, any queries.

A program takes the queries of one row that share a kv head, a tile of tokens at a time, and goes over the row's pages a
block of tokens at a time with a running softmax: each token's page by its id, of which it reads its own head's numbers
alone. Where rows and heads are too few to fill a GPU, several programs share a row's context, each with sums of its
own, which are joined afterwards (Flash-Decoding).

A head is cut into parts that lie in one half of their bytes and are a power of two wide, as Triton wants its arrays:
128 numbers are one part, 96 are 64 and 32. Up to four scales of a head have parts of their own: 128 numbers of 4 bits
in groups of 32 are four, two in the lower bits and two in the upper. Their codes meet queries as they are, and scales
multiply the scores and the weights. More parts took ten times as long to compile: codes of smaller groups are
multiplied out first.

What jax ships (0.12, `ops.gpu.paged_attention`) reads 16-bit pages of one layer for decode rows, with neither windows
nor scales nor several queries a row; the kernels of tokamax read no pages.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxinfer.arrays.formats import Format
from jaxinfer.arrays.pages import double_fp4, from_slab, group_size, open_float8, read_scales, token_widths
from jaxinfer.kernels.attention.paged import PagedKV
from jaxinfer.kernels.attention.reference import MASKED

LEAST = 16  # rows, columns and inner numbers of the smallest product
TILE_ROWS = 128  # queries times heads of a group that meet a block at once
TILE_BYTES = 64 * 2**10  # of a tile's sums in float32, which lie in registers
BLOCK_BYTES = 16 * 2**10  # of a block's keys as they are multiplied; three blocks are under way
PROGRAMS = 264  # that run side by side: two on each multiprocessor of an H100 or H200
LEAST_BLOCKS = 2  # of context that a program of its own is worth
MOST_SCALES = 4  # of a head that multiply scores and weights
LOG2_E = math.log2(math.e)


class Part(NamedTuple):
    """Numbers of a head that are multiplied together.

    Attributes:
      plane: which half of their bytes they lie in; 0 where a number has its own. lane: the first, from the head's first
        element in a page. number: the first, of the head's. width: how many.
      scale: the first of the head's scales that are theirs. num_scales: how many of these; none of plain numbers.
    """

    plane: int
    lane: int
    number: int
    width: int
    scale: int
    num_scales: int

    @property
    def padded(self) -> int:
        """Width of its arrays."""
        return max(LEAST, self.width)


@dataclass(frozen=True)
class Plan:
    """What is known when a kernel is traced.

    Attributes:
      fmt: of pages. dtype: that products are made in.
      group: G. head_dim: H. tile: queries of a row at a time. block: tokens of context at a time.
      splits: programs that share a row's context.
      scale: of scores. softcap: or None. is_windowed: whether there is a window.
    """

    fmt: Format
    dtype: Any
    group: int
    head_dim: int
    tile: int
    block: int
    splits: int
    scale: float
    softcap: float | None
    is_windowed: bool

    @property
    def rows(self) -> int:
        """Rows of a tile's matrix of queries."""
        return max(LEAST, _power_of_2(self.tile * self.group))

    @property
    def num_scales(self) -> int:
        """Scales of a head, 0 for plain numbers."""
        return 0 if self.fmt.is_plain else self.head_dim // group_size(self.fmt, self.head_dim)

    @property
    def width(self) -> int:
        """Elements of a head in a page."""
        return self.head_dim // self.planes

    @property
    def planes(self) -> int:
        """Numbers that share an element."""
        return 2 if self.fmt.bits == 4 else 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """Into what a head is cut."""
        size = self.head_dim if self.fmt.is_plain else group_size(self.fmt, self.head_dim)
        step = size if self.num_scales <= MOST_SCALES or self.width % size else self.head_dim
        cuts = sorted({*range(0, self.head_dim, step), *range(0, self.head_dim, self.width), self.head_dim})
        parts = []
        for first, last in itertools.pairwise(cuts):
            while first < last:
                left = last - first
                width = left if left < LEAST else 1 << (left.bit_length() - 1)
                scales = 0 if self.fmt.is_plain else max(1, width // size)
                where = first // self.width, first % self.width
                parts.append(Part(*where, first, width, first // size, scales))
                first += width
        return tuple(parts)


def paged_attention_gpu(
    q: jax.Array,
    kv: PagedKV,
    pages: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `paged_attention_reference`.

    Args:
      interpret: runs the kernel in XLA, on any backend.

    Raises:
      ValueError: pages of one byte a number that take between 2 and 4 GiB, whose places Triton's offsets cannot say.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); splits, Dao et al. 2023 (Flash-Decoding).
    """
    B, T, N, H = q.shape
    Z = kv.page_size
    K = kv.count_heads(H)
    check_size(kv.k.size, kv.k.dtype)
    plan = make_plan(q, kv, pages.shape[1], scale=scale, softcap=softcap, is_windowed=window is not None)
    width, num_scales = token_widths(kv.format, K, H)
    pools = [from_slab(each, Z, width) for each in (kv.k, kv.v)]
    if num_scales:
        pools += [from_slab(each, Z, num_scales) for each in (kv.k_scale, kv.v_scale)]
    scalars = jnp.stack(
        [jnp.asarray(each, jnp.int32) for each in (kv.layer, 0 if window is None else window)]
    )
    rows = (each.astype(jnp.int32) for each in (start, length, pages))
    tiles = -(-T // plan.tile)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if plan.splits > 1:
        shapes = [
            jax.ShapeDtypeStruct((plan.splits, *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((plan.splits, B, T, N), jnp.float32),
        ]
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan, num_pools=len(pools)),
        out_shape=shapes,
        grid=(K, tiles * plan.splits, B),
        in_specs=[whole] * (5 + len(pools)),
        out_specs=[whole] * len(shapes),
        compiler_params=plgpu.CompilerParams(num_warps=8 if plan.rows > 64 else 4, num_stages=3),
        metadata=_estimate(q, pools, pages, plan),
        interpret=interpret,
        name="paged_attention",
    )(scalars, *rows, q, *pools)
    return out[0] if plan.splits == 1 else _join(*out).astype(q.dtype)


def check_size(size: int, dtype: jnp.dtype) -> None:
    """Raises the error of a pool whose places cannot be said.

    Pallas counts a pool's elements in 32 bits up to 4 GiB and Triton takes them as signed: of 2-byte elements these are
    enough, of single bytes only up to 2 GiB, and from 4 GiB on it counts in 64.
    """
    if dtype.itemsize == 1 and 2**31 < size <= 2**32:
        raise ValueError(
            f"attention=gpu: a layer's pages take {size} bytes, whose places Triton's 32-bit offsets cannot say: it "
            "takes up to 2 GiB, or more than 4, of pages in 8 or 4 bits; take less kv_memory, or attention=blocked"
        )


def make_plan(
    q: jax.Array, kv: PagedKV, table_width: int, *, scale: float, softcap: float | None, is_windowed: bool
) -> Plan:
    """Returns how a block of queries goes over pages.

    Args:
      q: ``[B, T, N, H]``. kv: of a stack. table_width: W. scale, softcap: of scores. is_windowed: is there a window.
    """
    B, T, N, H = q.shape
    K = kv.count_heads(H)
    G, padded = N // K, _power_of_2(H)
    most = max(1, min(TILE_ROWS, TILE_BYTES // (4 * padded)) // G)
    tile = min(T, most)
    context = table_width * kv.page_size
    block = min(BLOCK_BYTES // (padded * q.dtype.itemsize), 128, _power_of_2(context))
    block = max(LEAST, block)
    programs = B * K * -(-T // tile)
    splits = min(-(-PROGRAMS // programs), max(1, context // (LEAST_BLOCKS * block)))
    return Plan(kv.format, q.dtype, G, H, tile, block, splits, scale, softcap, is_windowed)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _join(out: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the attention of whole contexts.

    Args:
      out: ``[splits, B, T, N, H]`` of parts of them. total: ``[splits, B, T, N]`` logarithms to base 2 of their sums.
    """
    share = jnp.exp2(total - total.max(0))[..., None]
    return (out * share).sum(0) / share.sum(0)


def _estimate(q: jax.Array, pools: list[jax.Array], pages: jax.Array, plan: Plan) -> dict[str, str]:
    """Returns what a call does, where `aot.cost` reads it: Triton's calls carry no estimate of their own.

    Pages count once: the tiles of a row run side by side and meet them in the cache, as those of XLA's own products do,
    which are counted likewise. Chunks see half of their table.
    """
    B, T, N, H = q.shape
    context = pages.shape[1] * pools[0].shape[2]
    is_whole = plan.tile == T
    seen = context if is_whole else context / 2
    page = sum(math.prod(pool.shape[2:]) * pool.dtype.itemsize for pool in pools)
    results = q.size * q.dtype.itemsize if plan.splits == 1 else 4 * plan.splits * (q.size + B * T * N)
    moved = pages.size * (page + 4) + q.size * q.dtype.itemsize + results
    return {"flops": str(int(4 * B * T * N * H * seen)), "bytes_accessed": str(int(moved))}


def _kernel(info, start_ref, length_ref, table, q_ref, *refs: Any, plan: Plan, num_pools: int) -> None:
    """One kv head's share of a tile of a row's queries, over the context or a part of it.

    Args:
      info: layer and window. start_ref, length_ref: ``[B]``. table: ``[B, W]`` page ids.
      q_ref: ``[B, T, N, H]``.
      refs: the pools; the result, as q; or of each split its result, in float32, and ``[splits, B, T, N]`` the
        logarithm of its sum.
    """
    pools, outs = refs[:num_pools], refs[num_pools:]
    k, b = pl.program_id(0), pl.program_id(2)
    # The last tiles see most: they begin first.
    tile = lax.div(pl.num_programs(1) - 1 - pl.program_id(1), plan.splits)
    split = lax.rem(pl.program_id(1), plan.splits)
    T = q_ref.shape[1]
    row = jnp.arange(plan.rows, dtype=jnp.int32)
    t = tile * plan.tile + lax.div(row, plan.group)
    head = k * plan.group + lax.rem(row, plan.group)
    row_mask = (row < plan.tile * plan.group) & (t < T)
    start, window = start_ref[b], info[1]
    position = start + t
    first = start + tile * plan.tile
    count = jnp.clip(length_ref[b] - tile * plan.tile, 0, plan.tile)
    end = first + count
    low = jnp.where(window > 0, jnp.maximum(first - window + 1, 0), 0) if plan.is_windowed else 0
    low = lax.div(low, plan.block)
    blocks = jnp.where(count > 0, lax.div(end + plan.block - 1, plan.block) - low, 0)
    share = lax.div(blocks + plan.splits - 1, plan.splits)
    low, high = low + jnp.minimum(split * share, blocks), low + jnp.minimum((split + 1) * share, blocks)

    def lanes(part: Part):
        """Returns a part's numbers, and which of its padded ones they are: None for all."""
        lane = jnp.arange(part.padded, dtype=jnp.int32)
        return lane, None if part.padded == part.width else lane < part.width

    def number_mask(mask, part: Part):
        """Returns rows of a mask over a part's numbers."""
        mask = jnp.broadcast_to(mask[:, None], (mask.shape[0], part.padded))
        own = lanes(part)[1]
        return mask if own is None else mask & own[None]

    def of_rows(part: Part):
        return b, t[:, None], head[:, None], part.number + lanes(part)[0][None]

    queries = [
        plgpu.load(q_ref.at[of_rows(part)], mask=number_mask(row_mask, part), other=0.0)
        for part in plan.parts
    ]

    def body(i, carry):
        top, total, sums = carry
        token = i * plan.block + jnp.arange(plan.block, dtype=jnp.int32)
        page, place, live = _find(token, end, b, table, pools[0])

        def read(pool, part: Part):
            lane = k * plan.width + part.lane + lanes(part)[0]
            at = pool.at[info[0], page[:, None], place[:, None], lane[None]]
            bits = plgpu.load(at, mask=number_mask(live, part), other=jnp.zeros((), pool.dtype))
            if part.num_scales < 2:
                return _open(bits, plan.fmt, part.plane, plan.dtype)
            codes = _open(bits, plan.fmt, part.plane, jnp.float32)
            codes = codes.reshape(plan.block, part.num_scales, -1) * scales_of(pool, part)[:, :, None]
            return codes.reshape(bits.shape).astype(plan.dtype)

        def scales_of(pool, part: Part):
            """Returns a part's scales, ``[S, scales]``, or ``[S]`` of its one."""
            pool = pools[2] if pool is pools[0] else pools[3]
            n, own, mask = k * plan.num_scales + part.scale, (page, place), live
            if part.num_scales > 1:
                n, own = (
                    n + jnp.arange(part.num_scales, dtype=jnp.int32)[None],
                    (page[:, None], place[:, None]),
                )
                mask = jnp.broadcast_to(mask[:, None], (plan.block, part.num_scales))
            bits = plgpu.load(pool.at[(info[0], *own, n)], mask=mask, other=jnp.zeros((), pool.dtype))
            return read_scales(bits, plan.fmt)

        by_scale: dict[int, list[tuple[Part, Any]]] = {}
        for each in zip(plan.parts, queries, strict=True):
            by_scale.setdefault(each[0].scale if each[0].num_scales == 1 else -1, []).append(each)
        scores = 0
        for n, each in by_scale.items():
            product = sum(_product(rows, read(pools[0], part), 1) for part, rows in each)
            scores += product if n < 0 else product * scales_of(pools[0], each[0][0])[None]
        if plan.softcap is None:
            scores = scores * (plan.scale * LOG2_E)
        else:
            scores = jnp.tanh(scores * (plan.scale / plan.softcap)) * (plan.softcap * LOG2_E)
        x_mask = live[None] & (token[None] <= position[:, None])
        if plan.is_windowed:
            x_mask &= (token[None] > position[:, None] - window) | (window == 0)
        scores = jnp.where(x_mask, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(1))
        weights = jnp.exp2(scores - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(1)
        added = {}
        for n, each in by_scale.items():
            scaled = weights if n < 0 else weights * scales_of(pools[1], each[0][0])[None]
            for part, _ in each:
                added[part] = _product(scaled.astype(plan.dtype), read(pools[1], part), 0)
        sums = (each * shrink[:, None] + added[part] for part, each in zip(plan.parts, sums, strict=True))
        return new_top, total, tuple(sums)

    sums = tuple(jnp.zeros((plan.rows, part.padded), jnp.float32) for part in plan.parts)
    nothing = jnp.full(plan.rows, MASKED, jnp.float32), jnp.zeros(plan.rows, jnp.float32), sums
    top, total, sums = lax.fori_loop(low, high, body, nothing)
    total = jnp.maximum(total, 1e-30)
    kept = jnp.where(top > MASKED, 1 / total, 0)  # of a query that saw no key every weight was 1
    which = () if plan.splits == 1 else (split,)
    for part, each in zip(plan.parts, sums, strict=True):
        mixed = (each * kept[:, None]).astype(outs[0].dtype)
        plgpu.store(outs[0].at[(*which, *of_rows(part))], mixed, mask=number_mask(row_mask, part))
    if plan.splits > 1:
        plgpu.store(outs[1].at[split, b, t, head], top + jnp.log2(total), mask=row_mask)


def _find(token, end, b, table, pool):
    """Returns the pages of tokens, their places in them, and which of them are there to be read."""
    P, Z = pool.shape[1:3]
    column = lax.div(token, Z)
    live = (token < end) & (column < table.shape[1])
    page = plgpu.load(table.at[b, column], mask=live, other=jnp.int32(-1))
    live &= (page >= 0) & (page < P)
    return jnp.where(live, page, 0), lax.rem(token, Z), live


def _product(x, y, axis: int):
    """Returns ``x`` times ``y`` over the last axis of x and an axis of y, in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _open(bits, fmt: Format, plane: int, dtype):
    """Returns stored numbers or codes in a dtype that holds them, those of fp4 doubled."""
    if fmt.bits == 4:
        x = lax.bitcast_convert_type(bits, jnp.int8)
        if fmt.kind == "int4":
            return (((x << 4) if plane == 0 else x) >> 4).astype(dtype)
        return double_fp4((x >> (4 * plane)) & 15).astype(dtype)
    if fmt.bits == 8 and not fmt.is_integer:
        return open_float8(bits, fmt.kind).astype(dtype)
    if bits.dtype == fmt.dtype:
        return bits.astype(dtype)
    return lax.bitcast_convert_type(bits, fmt.dtype).astype(dtype)
