"""A model run over prompts in one way or another, with what every layer made of every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.sharding import num_shards, partition
from jaxinfer.build import default_stack_size
from jaxinfer.config import ModelConfig
from jaxinfer.kernels.attention.api import choose_attention
from jaxinfer.kernels.matmul.api import choose_matmul
from jaxinfer.model.cache import init_cache
from jaxinfer.model.decoder import Block, Static, forward, stack_sizes, unembed
from jaxinfer.model.layout import Layout, lay_out, make_cache, partition_cache, partition_params
from jaxinfer.steps.compiled import StepTable
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.state import make_state, stack_params
from jaxinfer.steps.steps import DecodeRows, PrefillRows

PAGE = 4  # tokens a page: few, so that short prompts lie in several


class Subject(Protocol):
    """What is run: a `weights.model.Model`, or a `Toy`."""

    @property
    def name(self) -> str: ...
    @property
    def cfg(self) -> ModelConfig: ...
    @property
    def settle(self) -> Callable[[Policy], tuple[Policy, tuple[str, ...]]]: ...
    @property
    def load(self) -> Callable[[Policy, Layout | None, Any], Any]: ...


@dataclass(frozen=True)
class Way:
    """How a model is run.

    Attributes:
      policy: number formats. attention, matmul: names of kernels, or ``auto``. mesh: of devices, None for one.
      chunk: tokens of a row that run at once, 0 for all: 1 reads all that came before from the cache.
      solo: whether each row runs alone.
    """

    policy: Policy
    attention: str = "auto"
    matmul: str = "xla"
    mesh: Mesh | None = None
    chunk: int = 0
    solo: bool = False


@dataclass(frozen=True)
class Prompts:
    """Rows of tokens.

    Attributes:
      tokens: ``[B, T]`` ids. lengths: ``[B]`` tokens that count, each at least 1.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    @property
    def live(self) -> np.ndarray:
        """``[B, T]``: which tokens count."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]


class Trace(NamedTuple):
    """What came of a run, in float32.

    Attributes:
      streams: ``[L + 1, B, T, D]``: as the tokens are embedded, and as each layer leaves them.
      logits: ``[B, T, V]``.
    """

    streams: np.ndarray
    logits: np.ndarray


def make_prompts(vocab_size: int, num_rows: int, num_tokens: int, seed: int = 0) -> Prompts:
    """Returns random prompts of different lengths, the first of ``num_tokens`` and the last of 1."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(num_tokens, 1, num_rows).astype(np.int32)
    return Prompts(rng.integers(0, vocab_size, (num_rows, num_tokens), dtype=np.int32), lengths)


def trace(subject: Subject, prompts: Prompts, way: Way) -> Trace:
    """Runs a model, its layers one by one, and keeps what each leaves behind.

    Args:
      subject: the model. prompts: over a mesh, whose shares of the rows divide them. way: how.

    Raises:
      ValueError: the model cannot be run so, and why.
    """
    cfg, (B, T) = subject.cfg, prompts.tokens.shape
    run = _Run(subject, way, prompts, 1)
    pages = run.table
    rows = 1 if way.solo else B
    chunk = way.chunk or T
    cache: Any = run.make_cache()
    first = run.block(prompts.tokens[:rows, :chunk], np.zeros(rows), np.zeros(rows), pages[:rows])
    step = run.compile(cache, first)
    streams = np.zeros((cfg.num_layers + 1, B, T, cfg.d_model), np.float32)
    logits = np.zeros((B, T, cfg.vocab_size), np.float32)
    for row in range(0, B, rows):
        at = slice(row, row + rows)
        for start in range(0, T, chunk):
            span = slice(start, min(start + chunk, T))
            tokens = prompts.tokens[at, span]
            count = tokens.shape[1]
            tokens = np.pad(tokens, ((0, 0), (0, chunk - count)))
            length = np.clip(prompts.lengths[at] - start, 0, count)
            kept, out, cache = step(
                run.params, cache, run.block(tokens, np.full(rows, start), length, pages[at])
            )
            kept = np.asarray(kept, np.float32).reshape(len(streams), rows, chunk, -1)
            streams[:, at, span] = kept[:, :, :count]
            logits[at, span] = np.asarray(out).reshape(rows, chunk, -1)[:, :count, : cfg.vocab_size]
    return Trace(streams, logits)


def serve(subject: Subject, prompts: Prompts, way: Way) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``[B, V]`` logits after each row's last token, by the steps that an engine would compile.

    Returns:
      Those of a prefill of the prompts, and those of a decode step that runs the last token once more.
    """
    cfg, (B, T) = subject.cfg, prompts.tokens.shape
    run = _Run(subject, way, prompts, default_stack_size(subject.cfg))
    width, num = run.table.shape[1], run.num_shares
    sizes, layout = run.sizes, run.layout
    state = make_state(cfg, run.static.policy, sizes, (B * width // num, PAGE), (B, T + PAGE), layout)
    table = StepTable(run.static, state.shapes, state.cache, state.slots, mesh=way.mesh)
    table.compile([Shape(0, (B, T), width), Shape(B, (0, 0), width)], draws=())
    slot, last = np.arange(B), prompts.lengths - 1
    columns = [slot, 0 * slot, prompts.lengths, 0 * slot - 1, *prompts.tokens.T, *run.table.T]
    rows = table.put(PrefillRows(np.stack(columns, 1).astype(np.int32)), "rows")
    (prefill,), cache, slots = table.forward(Shape(0, (B, T), width))(
        run.params, state.cache, state.slots, rows
    )
    columns = [slot, last, 0 * slot + 1, *run.table.T]
    rows = table.put(DecodeRows(np.stack(columns, 1).astype(np.int32)), "rows")
    (decode,), *_ = table.forward(Shape(B, (0, 0), width))(run.params, cache, slots, rows)

    def take(logits: Any) -> np.ndarray:  # shares of a row are filled up to two
        each = np.asarray(logits).reshape(num, -1, logits.shape[-1])
        return each[:, : B // num].reshape(B, -1)[:, : cfg.vocab_size]

    return take(prefill.logits), take(decode.logits)


class _Run:
    """A model made ready to run in a way: its parameters, and where its rows' pages lie.

    Args:
      subject, way, prompts: as `trace` has them. stack_size: layers a scan.
    """

    def __init__(self, subject: Subject, way: Way, prompts: Prompts, stack_size: int) -> None:
        cfg, mesh = subject.cfg, way.mesh
        policy, _ = subject.settle(way.policy)
        self.layout = lay_out(cfg, policy, mesh) if mesh is not None else None
        self.num_shares = num_shards("rows", mesh=mesh) if mesh is not None else 1
        B, T = prompts.tokens.shape
        if B % self.num_shares:
            raise ValueError(f"{B} rows are not divided by the mesh's {self.num_shares} shares of rows")
        num_devices = mesh.size if mesh is not None else 1
        own = self.layout.local if self.layout else cfg
        matmul, _ = choose_matmul(way.matmul, policy, num_devices)
        attention, _ = choose_attention(way.attention, own.attention, policy, num_devices)
        self.static = Static(own, replace(policy, matmul=matmul), attention, T)
        self.sizes = stack_sizes(cfg, stack_size, policy)
        self.params = stack_params(subject.load(policy, self.layout, None), self.sizes, self.layout)
        # Pages of a share are counted by it alone, and lie in no order.
        width, each = -(-T // PAGE), B // self.num_shares
        shuffled = np.random.default_rng(1).permutation(each * width).astype(np.int32)
        self.table = np.tile(shuffled.reshape(each, width), (self.num_shares, 1))

    def make_cache(self) -> Any:
        """Returns empty pages for all rows."""
        num_pages = self.table.size
        if self.layout is None:
            return init_cache(self.static.cfg, self.static.policy, self.sizes, num_pages, PAGE)
        return make_cache(self.layout, self.static.policy, self.sizes, num_pages, PAGE)

    def block(self, tokens: np.ndarray, start: np.ndarray, length: np.ndarray, pages: np.ndarray) -> Block:
        """Returns rows on their devices."""
        over = None if self.layout is None else NamedSharding(self.layout.mesh, partition(("rows",)))
        return Block(*(jax.device_put(np.asarray(x, np.int32), over) for x in (tokens, start, length, pages)))

    def compile(self, cache: Any, block: Block) -> Callable[..., Any]:
        """Returns ``step(params, cache, block)``: streams ``[L + 1, M, D]``, logits ``[M, V]`` and the cache."""
        static = self.static

        def step(params: Any, cache: Any, block: Block) -> Any:
            keep: list[jax.Array] = []
            x, cache = forward(params, cache, [block], static, keep)
            return jnp.stack(keep), unembed(params, static, x), cache

        if self.layout is not None:
            rows, cut = partition(("rows",)), partition_cache(cache)
            step = jax.shard_map(
                step,
                mesh=self.layout.mesh,
                in_specs=(partition_params(self.params, self.layout.whole), cut, rows),
                out_specs=(partition((None, "rows")), partition(("rows", "vocab")), cut),
                check_vma=False,
            )
        return jax.jit(step, donate_argnums=1).lower(self.params, cache, block).compile()
