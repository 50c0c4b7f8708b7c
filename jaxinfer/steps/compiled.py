"""Steps compiled ahead of serving, with a table of what that cost.

Buckets are sorted; the smallest that fits is taken. Serving calls executables only: a shape that has none is an
error, never a compilation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.arrays.sharding import gather_shards, num_shards, partition, put_shards, spans_hosts
from jaxinfer.model.cache import copy_widths, read_pages, replace_pages
from jaxinfer.model.decoder import Static
from jaxinfer.model.stages import Flow, plan_flow
from jaxinfer.schedule.sampling_params import DRAWS
from jaxinfer.steps.embed import embed_prompt
from jaxinfer.steps.keep import ExecutableStore, announce, devices_of
from jaxinfer.steps.shape import Shape
from jaxinfer.steps.slots import install_row, recall_history
from jaxinfer.steps.steps import (
    Ahead,
    DecodeRows,
    PrefillRows,
    decode_steps,
    draw,
    draw_greedy,
    forward_step,
    score_prompt,
)

Say = Callable[[str], None]
COPY_PAGES = 16  # pages that one copy between device and host moves
EXTRAS = ("recall", "copies")
_ROWS = partition(("rows",))
_CONTENT = partition((None, "page_content"))
# The last stage has the stream: each stage gives back its own, side by side.
_AHEAD = Ahead(partition(("rows", "vocab")), _ROWS, partition(("rows", "layers")))  # type: ignore[arg-type]
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Compiled:
    """An executable and what it cost.

    Attributes:
      call: the executable.
      seconds: to lower and compile, or to load. temp_bytes: memory it needs beside its arguments and results.
      is_loaded: whether an earlier run compiled and kept it.
    """

    call: Callable[..., Any]
    seconds: float
    temp_bytes: int
    is_loaded: bool = False

    def __str__(self) -> str:
        how = "loaded" if self.is_loaded else "compiled"
        return f"{how} in {self.seconds:.1f} s, {self.temp_bytes / 2**20:.0f} MiB temporary"


class StepTable:
    """The executables of a run, by name, each with its seconds and bytes.

    Args:
      static: what steps are compiled for: under a mesh, one device's share (`Layout.local`).
      params, cache, slots: the state, or `jax.ShapeDtypeStruct` trees with its shapes and shardings.
      store: where executables are kept between runs, None for nowhere.
      mesh: that the state lies over, None for one device.
    """

    def __init__(
        self,
        static: Static,
        params: Any,
        cache: Any,
        slots: Any,
        store: ExecutableStore | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.static, self._mesh = static, mesh
        self._spans = spans_hosts(mesh)  # no host can read all of what is cut over all
        self._results = partition(()) if self._spans else _ROWS
        self._state = jax.tree.map(_abstract, (params, cache, slots))
        self._devices = devices_of(self._state)
        self._store = store if self._devices is not None else None
        self.executables: dict[str, Compiled] = {}

    def compile(
        self,
        shapes: Iterable[Shape],
        draws: Collection[str] = DRAWS,
        say: Say = lambda line: None,
        extras: Collection[str] = (),
    ) -> None:
        """Compiles what serving these shapes needs and is not there yet, as many at once as there are cores.

        Args:
          shapes: of the forward steps. draws: of `DRAWS`, those that requests may ask for.
          say: is told of each finished executable.
          extras: of `EXTRAS`: ``recall`` where prefixes are found again, ``copies`` where pages move to the host.
        """
        shapes, around = list(shapes), jax.sharding.get_abstract_mesh()
        flows = {str(shape): f"; {self.flow(shape)}" for shape in shapes if self.num_stages > 1}
        every = self.lowerings(shapes, draws, extras)
        wanted = {name: make for name, make in every.items() if name not in self.executables}
        keys: dict[str, str] = {}
        if self._store and self._devices:
            keys = announce(self._store, wanted, self.static, self._state, self._mesh, self._devices)

        def build(name: str) -> tuple[str, Compiled]:
            with nullcontext() if around.empty else jax.sharding.use_abstract_mesh(around):  # of this thread
                return name, self._load_or_compile(keys.get(name, ""), wanted[name])

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for name, done in pool.map(build, wanted):
                self.executables[name] = done
                say(f"{name}: {done}{flows.get(name, '')}")
        if self._store:
            self._store.trim()

    def lowerings(
        self, shapes: Iterable[Shape], draws: Collection[str] = DRAWS, extras: Collection[str] = ()
    ) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Returns how each executable that `compile` would make is lowered, by name; arguments as there."""
        return self._wanted(list(shapes), draws) | self._wanted_extras(extras)

    def _load_or_compile(self, key: str, lower: Callable[[], Any]) -> Compiled:
        began = time.perf_counter()
        kept = self._store.load(key, self._devices or ()) if self._store else None
        call = kept or lower().compile()
        memory = call.memory_analysis()
        temp = int(memory.temp_size_in_bytes) if memory is not None else 0
        compiled = Compiled(call, time.perf_counter() - began, temp, kept is not None)
        if self._store and not kept:
            self._store.save(key, call)
        return compiled

    @property
    def num_shares(self) -> int:
        """How many shares of rows and pages there are, 1 without a mesh."""
        return 1 if self._mesh is None else num_shards("rows", mesh=self._mesh)

    @property
    def num_stages(self) -> int:
        """How many stages a pipeline has, 1 without a mesh."""
        return 1 if self._mesh is None else num_shards("layers", mesh=self._mesh)

    def flow(self, shape: Shape) -> Flow:
        """Returns how a forward step's rows flow through the stages."""
        blocks = [(rows // self.num_shares, T) for rows, T in ((shape.decode, 1), shape.prefill) if rows]
        return plan_flow(self.num_stages, blocks, shape.num_steps)

    def put(self, tree: Any, *axes: str | None) -> Any:
        """Brings host arrays to the devices that the executables run on: whole, or cut along the axes named."""
        over = self._over(*axes)
        if over is None or not self._spans:
            return jax.device_put(tree) if over is None else jax.device_put(tree, over)
        return jax.tree.map(lambda array: put_shards(array, over), tree)

    def forward(self, shape: Shape) -> Callable[..., Any]:
        """``(params, cache, slots, *packed)``: see `forward_step`, or `decode_steps` for several steps."""
        return self._get(str(shape))

    def draw(self, num_rows: int, *, greedy: bool) -> Callable[..., Any]:
        """``(slots, logits, rows)``: see `draw` and `draw_greedy`."""
        cheap = f"greedy {num_rows}"
        return self._get(cheap if greedy and cheap in self.executables else f"draw {num_rows}")

    def score(self, shape: Shape) -> Callable[..., Any]:
        """``(params, x, prefill_rows)``: see `score_prompt`."""
        return self._get(_score_name(shape))

    def embed(self, shape: Shape) -> Callable[..., Any]:
        """``(x, prefill_rows)``: see `embed_prompt`."""
        return self._get(_embed_name(shape))

    @property
    def install(self) -> Callable[..., Any]:
        """``(slots, slot, row)``: see `install_row`."""
        return self._get("install")

    @property
    def recall(self) -> Callable[..., Any]:
        """``(slots, slot, tokens, count)``: see `recall_history`."""
        return self._get("recall")

    @property
    def read_pages(self) -> Callable[..., Any]:
        """``(cache, pages)``, `COPY_PAGES` of them: see `read_pages`."""
        return self._get("read pages")

    @property
    def replace_pages(self) -> Callable[..., Any]:
        """``(cache, pages, content)``, `COPY_PAGES` of them: see `replace_pages`."""
        return self._get("replace pages")

    def _get(self, name: str) -> Callable[..., Any]:
        if name not in self.executables:
            raise KeyError(
                f"no executable {name!r} was compiled ahead; there are: {'; '.join(self.executables)}"
            )
        return self.executables[name].call

    def _wanted(self, shapes: Sequence[Shape], draws: Collection[str]) -> dict[str, Callable[[], Any]]:
        """Returns how each executable is lowered, the slowest first."""
        single = [shape for shape in shapes if shape.num_steps == 1]
        counts = sorted({count for shape in single for count in shape.draws(self.num_shares)})
        wanted: dict[str, Callable[[], Any]] = {str(shape): partial(self.lower, shape) for shape in shapes}
        if "sample" in draws:
            wanted |= {f"draw {n}": partial(self._lower_draw, draw, n) for n in counts}
        if "greedy" in draws:
            wanted |= {f"greedy {n}": partial(self._lower_draw, draw_greedy, n) for n in counts}
        if "score" in draws:
            wanted |= {
                _score_name(shape): partial(self._lower_score, shape) for shape in single if shape.prefill[0]
            }
        if "embed" in draws:
            wanted |= {
                _embed_name(shape): partial(self._lower_embed, shape) for shape in single if shape.prefill[0]
            }
        return wanted | {"install": self._lower_install}

    def _wanted_extras(self, extras: Collection[str]) -> dict[str, Callable[[], Any]]:
        wanted: dict[str, Callable[[], Any]] = {}
        if "copies" in extras:
            wanted |= {"read pages": self._lower_read, "replace pages": self._lower_replace}
        if "recall" in extras:
            wanted["recall"] = self._lower_recall
        return wanted

    def _lower_read(self) -> Any:
        return self._lower(read_pages, (self._state[1], self._ints(COPY_PAGES)), _CONTENT)

    def _lower_replace(self) -> Any:
        cache = self._state[1]
        content = tuple(
            jax.ShapeDtypeStruct((COPY_PAGES, width), dtype, sharding=self._over(None, "page_content"))
            for width, dtype in copy_widths(cache)
        )
        return self._lower(
            replace_pages, (cache, self._ints(COPY_PAGES), content), _specs(cache), donate=(0,)
        )

    def _lower_recall(self) -> Any:
        slots = self._state[2]
        tokens = self._ints(slots.history.shape[1])
        args = (slots, self._ints(), tokens, self._ints())
        return self._lower(recall_history, args, _specs(slots), donate=(0,))

    def lower(self, shape: Shape) -> jax.stages.Lowered:
        """Returns the forward step of a shape, lowered and not yet compiled."""
        B, b = shape.decode, shape.prefill[0]
        rows = DecodeRows(self._ints(B, 3 + shape.width, over="rows")) if B else None
        packed = tuple(p for p in (rows, self._prefill_rows(shape) if b else None) if p is not None)
        static, width = self.static, shape.width

        def run(params: Any, cache: Any, slots: Any, *packed: Any) -> Any:
            if shape.num_steps > 1:
                args = params, cache, slots, packed[0], static, width, shape.num_steps
                drawn, cache, slots = decode_steps(*args)
                return self._for_all(drawn, 1), cache, slots
            decode_rows = packed[0] if B else None
            prefill_rows = packed[-1] if b else None
            return forward_step(params, cache, slots, decode_rows, prefill_rows, static, width)

        several = partition(()) if self._spans else partition((None, "rows"))
        drawn = tuple(_AHEAD for _ in packed) if shape.num_steps == 1 else several
        outs = (drawn, *(_specs(part) for part in self._state[1:]))
        return self._lower(run, (*self._state, *packed), outs, donate=(1, 2))

    def _lower_draw(self, fn: Callable[..., Any], num_rows: int) -> Any:
        vocab_size = self.static.cfg.vocab_size * (num_shards("vocab", mesh=self._mesh) if self._mesh else 1)
        over = self._over("rows", "vocab")
        logits = jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32, sharding=over)
        args = (self._state[2], logits, self._ints(num_rows, 3, over="rows"))

        def run(slots: Any, logits: jax.Array, rows: jax.Array) -> Any:
            drawn, slots = fn(slots, logits, rows)
            return self._for_all(drawn), slots

        return self._lower(run, args, (self._results, _specs(self._state[2])), donate=(0,))

    def _lower_score(self, shape: Shape) -> Any:
        params, slots = self._state[0], self._state[2]
        static, width, vocab_size = self.static, shape.width, slots.vocab_size

        def run(params: Any, x: jax.Array, rows: PrefillRows) -> Any:
            return self._for_all(score_prompt(params, x, rows, static, width, vocab_size))

        return self._lower(run, (params, self._stream(shape), self._prefill_rows(shape)), self._results)

    def _lower_embed(self, shape: Shape) -> Any:
        def run(x: jax.Array, rows: PrefillRows) -> Any:
            return self._for_all(embed_prompt(x, rows))

        return self._lower(run, (self._stream(shape), self._prefill_rows(shape)), self._results)

    def _for_all(self, found: Any, dim: int = 0) -> Any:
        """Returns results by row as the host that schedules can read them: all of them, where hosts have some each.

        Args:
          found: of this share. dim: of the rows.
        """
        return jax.tree.map(lambda x: gather_shards(x, "rows", dim), found) if self._spans else found

    def _stream(self, shape: Shape) -> jax.ShapeDtypeStruct:
        """``[b, S * T, D]``: the normed stream of the prefill rows, as each stage has it."""
        b, T = shape.prefill
        return jax.ShapeDtypeStruct(
            (b, self.num_stages * T, self.static.cfg.d_model),
            self.static.policy.compute_dtype,
            sharding=self._over("rows", "layers"),
        )

    def _lower_install(self) -> Any:
        slots = self._state[2]
        whole = self._over()
        row = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=whole), slots.packed
        )
        return self._lower(install_row, (slots, self._ints(), row), _specs(slots), donate=(0,))

    def _prefill_rows(self, shape: Shape) -> PrefillRows:
        b, T = shape.prefill
        return PrefillRows(self._ints(b, 4 + T + shape.width, over="rows"))

    def _ints(self, *shape: int, over: str | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._over(over) if over else self._over())

    def _over(self, *axes: str | None) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, partition(axes))

    def _lower(
        self, fn: Callable[..., Any], args: tuple[Any, ...], outs: Any, donate: tuple[int, ...] = ()
    ) -> jax.stages.Lowered:
        """Lowers a step; under a mesh every device runs it on its share, and ``outs`` says how results lie."""
        if self._mesh is not None:
            ins = _specs(args)
            fn = jax.shard_map(fn, mesh=self._mesh, in_specs=ins, out_specs=outs, check_vma=False)
        return jax.jit(fn, donate_argnums=donate).lower(*args)


@contextmanager
def count_compilations(into: list[str] | None = None) -> Iterator[list[str]]:
    """Gathers the names of functions that XLA compiles meanwhile, in any thread; loading what was kept is none.

    Args:
      into: where names are added, a new list when None.
    """
    names = [] if into is None else into

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            names.append(str(kwargs.get("fun_name", "a function")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _score_name(shape: Shape) -> str:
    return "score {}x{} over {} pages".format(*shape.prefill, shape.width)


def _embed_name(shape: Shape) -> str:
    return "embed {}x{} over {} pages".format(*shape.prefill, shape.width)


def _specs(tree: Any) -> Any:
    """Returns how the arrays of a tree lie over their mesh; nothing of those that lie over none."""
    return jax.tree.map(lambda leaf: getattr(leaf.sharding, "spec", PartitionSpec()), tree)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
