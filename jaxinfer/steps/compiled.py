"""Steps compiled ahead of serving, one executable a bucket, with a table of what that cost.

Buckets are sorted; the smallest that fits is taken. Serving calls executables only: a shape that has none is an
error, never a compilation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.model.decoder import Static
from jaxinfer.steps.slots import install_row
from jaxinfer.steps.steps import DecodeRows, PrefillRows, decode_steps, serve_step


@dataclass(frozen=True, order=True)
class Shape:
    """The shape of one executable.

    Attributes:
      decode: B decode rows, 0 for none.
      prefill: ``(b, T)`` prefill rows and tokens a row, ``(0, 0)`` for none.
      num_steps: decode steps without return to the host (1 with prefill rows).
    """

    decode: int = 0
    prefill: tuple[int, int] = (0, 0)
    num_steps: int = 1

    def __str__(self) -> str:
        parts = [f"decode {self.decode}"] if self.decode else []
        parts += ["prefill {}x{}".format(*self.prefill)] if self.prefill[0] else []
        return " + ".join(parts) + (f" x{self.num_steps} steps" if self.num_steps > 1 else "")


@dataclass(frozen=True)
class Compiled:
    """An executable and what it cost.

    Attributes:
      call: ``(params, cache, slots, *packed) -> (StepOutput, cache, slots)``; cache and slots are donated.
      seconds: to lower and compile, or to load. temp_bytes: memory it needs beside its arguments and results.
    """

    call: Callable[..., Any]
    seconds: float
    temp_bytes: int


class StepTable:
    """The executables of a run, by shape.

    Args:
      static: what steps are compiled for.
      params, cache, slots: the state, or `jax.ShapeDtypeStruct` trees with its shapes and shardings.
      width: W, page ids a row.
    """

    def __init__(self, static: Static, params: Any, cache: Any, slots: Any, width: int) -> None:
        self.static, self.width = static, width
        self._state = jax.tree.map(_abstract, (params, cache, slots))
        self.steps: dict[Shape, Compiled] = {}
        self._install: Callable[..., Any] | None = None

    def compile(self, shapes: Iterable[Shape], say: Callable[[str], None] = lambda line: None) -> None:
        """Compiles every shape that has no executable yet, and the filling of a slot.

        Args:
          shapes: wanted.
          say: is told of each finished one.
        """
        if self._install is None:
            slots = self._state[2]
            row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), slots.packed)
            index = jax.ShapeDtypeStruct((), jnp.int32)
            self._install = jax.jit(install_row, donate_argnums=0).lower(slots, index, row).compile()
        for shape in shapes:
            if shape not in self.steps:
                self.steps[shape] = done = self._compile_step(shape)
                say(f"compiled {shape} in {done.seconds:.1f} s, {done.temp_bytes / 2**20:.0f} MiB temporary")

    @property
    def install(self) -> Callable[..., Any]:
        """``(slots, slot, row) -> slots``, compiled; slots are donated."""
        if self._install is None:
            raise RuntimeError("StepTable.install was used before compile")
        return self._install

    def __getitem__(self, shape: Shape) -> Callable[..., Any]:
        """Returns the executable of ``shape``.

        Raises:
          KeyError: it was not compiled ahead, with the shapes that were.
        """
        if shape not in self.steps:
            raise KeyError(f"no executable for {shape}; compiled: {'; '.join(map(str, sorted(self.steps)))}")
        return self.steps[shape].call

    def _compile_step(self, shape: Shape) -> Compiled:
        began = time.perf_counter()
        int32 = jnp.int32
        B, (b, T) = shape.decode, shape.prefill
        rows = DecodeRows(jax.ShapeDtypeStruct((B, 3 + self.width), int32)) if B else None
        chunk = PrefillRows(jax.ShapeDtypeStruct((b, 4 + T + self.width), int32)) if b else None
        static, width = self.static, self.width

        def run(params, cache, slots, *packed):
            if shape.num_steps > 1:
                return decode_steps(params, cache, slots, packed[0], static, width, shape.num_steps)
            decode_rows = packed[0] if B else None
            prefill_rows = packed[-1] if b else None
            return serve_step(params, cache, slots, decode_rows, prefill_rows, static, width)

        packed = tuple(p for p in (rows, chunk) if p is not None)
        compiled = jax.jit(run, donate_argnums=(1, 2)).lower(*self._state, *packed).compile()
        memory = compiled.memory_analysis()
        temp = int(memory.temp_size_in_bytes) if memory is not None else 0
        return Compiled(compiled, time.perf_counter() - began, temp)

    def describe(self) -> str:
        """Returns the table of executables: shape, seconds to compile, temporary memory."""
        rows = [
            f"{s!s:32s} {c.seconds:7.2f} s {c.temp_bytes / 2**20:9.1f} MiB" for s, c in self.steps.items()
        ]
        return "\n".join([f"{'executable':32s} {'compile':>9s} {'temporary':>13s}", *rows])


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
