"""The door to XLA: kernels as typed custom calls of its CPU backend, on the threads of its own pool.

A kernel is a job of pieces. Whoever is free takes the next piece: the calling thread at once, the pool's threads as
they wake up. Nobody waits for a thread that has not begun, so calls on a busy pool cannot lock each other out, and a
pool of one thread works too. Pieces come in two phases; those of the second wait until all of the first are done, which
other threads then hold, so this wait ends as well.

Source: xla/ffi/api/c_api.h, versions 0.3 (jaxlib 0.10) to 0.5 (jaxlib 0.12), which lay these records out alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from jaxinfer.kernels.native.code import F32, I32, I64, PTR, Code, Value

API_VERSION = (0, 3)
DTYPES = {"float16": 10, "float32": 11, "bfloat16": 16}  # XLA's numbers of them
# Byte offsets in the records of c_api.h.
_FRAME = {"extension": 8, "api": 16, "context": 24, "args": 72, "results": 112, "attrs": 160}
_API = {"destroy_error": 64, "schedule": 136, "num_threads": 144}
_EXTENSION = {"type": 8, "metadata": 24}
_METADATA_EXTENSION = 1
_METADATA = {"major": 24, "minor": 28, "traits": 32}
_BUFFER = {"dtype": 16, "data": 24, "dims": 40}
_SCALAR_VALUE = 8
# Our job: counters first, a cache line each, as threads write them; then the kernel's own slots of 8 bytes.
_NEXT, _DONE, _REFS, _FIRST, _TOTAL, _SLOTS = 0, 64, 128, 136, 144, 192


@dataclass(frozen=True)
class Frame:
    """A call, as the kernel's `prepare` sees it.

    Attributes:
      code: being written. raw: XLA's call frame.
    """

    code: Code
    raw: Value

    def _buffer(self, which: str, index: int) -> Value:
        return self.raw.at(_FRAME[which]).load(PTR).at(index, PTR).load(PTR)

    def arg(self, index: int) -> Value:
        """Returns where an operand's numbers lie."""
        return self._buffer("args", index).at(_BUFFER["data"]).load(PTR)

    def result(self, index: int) -> Value:
        """Returns where a result's numbers go."""
        return self._buffer("results", index).at(_BUFFER["data"]).load(PTR)

    def dim(self, index: int, axis: int) -> Value:
        """Returns a dimension of an operand."""
        return self._buffer("args", index).at(_BUFFER["dims"]).load(PTR).at(axis, I64).load(I64)

    def result_dim(self, index: int, axis: int) -> Value:
        """Returns a dimension of a result."""
        return self._buffer("results", index).at(_BUFFER["dims"]).load(PTR).at(axis, I64).load(I64)

    def dtype(self, index: int) -> Value:
        """Returns the number of an operand's dtype in XLA's list, see `DTYPES`."""
        return self._buffer("args", index).at(_BUFFER["dtype"]).load(I32)

    def result_dtype(self, index: int) -> Value:
        """Returns the number of a result's dtype."""
        return self._buffer("results", index).at(_BUFFER["dtype"]).load(I32)

    def attr(self, index: int, kind: ir.Type = F32) -> Value:
        """Returns a scalar attribute, counted in alphabetical order."""
        scalar = self.raw.at(_FRAME["attrs"]).load(PTR).at(index, PTR).load(PTR)
        return scalar.at(_SCALAR_VALUE).load(PTR).load(kind)


Slots = dict[str, Value]
Phase = Callable[[Code, Slots, Value], None]


@dataclass(frozen=True)
class Kernel:
    """What a kernel is made of.

    Attributes:
      name: of the custom call.
      prepare: writes code that reads a call and returns the job's slots by name and how many pieces each of the two
        phases has.
      phases: two writers of code that does one piece, given the slots and the piece's number.
      local: writes code that tells how many bytes of its own a thread needs while it works; they lie at slot ``local``,
        on a cache line.
    """

    name: str
    prepare: Callable[[Frame], tuple[Slots, tuple[Value, Value]]]
    phases: tuple[Phase, Phase]
    local: Callable[[Code, Slots], Value] = lambda code, slots: code.int(0)


def write_handler(kernel: Kernel) -> ir.Module:
    """Returns a module with a kernel's handler, a function of its name."""
    module = ir.Module(kernel.name)
    handler = Code(module, kernel.name, [PTR], PTR)
    (raw,) = handler.args
    extension = raw.at(_FRAME["extension"]).load(PTR)
    null = handler.constant(PTR, None)
    with handler.when(handler.cast(extension, I64, "ptrtoint").differs(0)):
        _answer_metadata(handler, extension)
        handler.builder.ret(null.raw)
    slots, (first, second) = kernel.prepare(Frame(handler, raw))
    types = {name: slot.type for name, slot in slots.items()}
    run, task = _write_run(module, kernel, types), f"{kernel.name}_task"
    _write_task(module, task, run)
    job = handler.call("malloc", PTR, handler.int(_SLOTS + 8 * len(slots)))
    total = first + second
    extra = handler.max(handler.min(_num_threads(handler, raw), total) - 1, 0)
    for place, value in ((_NEXT, 0), (_DONE, 0), (_REFS, extra + 1), (_FIRST, first), (_TOTAL, total)):
        job.at(place).store(handler.int(value))
    for i, slot in enumerate(slots.values()):
        job.at(_SLOTS + 8 * i).store(slot)
    handler.builder.fence("release")
    with handler.loop(0, extra):
        _schedule(handler, raw, task, job)
    handler.call(run, ir.VoidType(), job)
    with handler.forever() as stop_if:
        stop_if(_read(handler, job, _DONE) >= total)
        _pause(handler)
    handler.call(f"{task}_release", ir.VoidType(), job)
    handler.done(null)
    return module


def _write_run(module: ir.Module, kernel: Kernel, types: dict[str, ir.Type]) -> str:
    """Writes the function that does pieces of a job until none is left; returns its name."""
    code = Code(module, f"{kernel.name}_run", [PTR])
    (job,) = code.args
    slots = {name: job.at(_SLOTS + 8 * i).load(kind) for i, (name, kind) in enumerate(types.items())}
    first, total = job.at(_FIRST).load(I64), job.at(_TOTAL).load(I64)
    own = code.call("malloc", PTR, kernel.local(code, slots) + 64)
    slots["local"] = own.at(code.int(64) - (code.cast(own, I64, "ptrtoint") & 63))
    with code.forever() as stop_if:
        piece = _add(code, job, _NEXT, 1)
        stop_if(piece >= total)
        with code.builder.if_else((piece < first).raw) as (early, late):
            with early:
                kernel.phases[0](code, slots, piece)
            with late:
                with code.forever() as stop_waiting_if:
                    stop_waiting_if(_read(code, job, _DONE) >= first)
                    _pause(code)
                kernel.phases[1](code, slots, piece - first)
        _add(code, job, _DONE, 1)
    code.call("free", ir.VoidType(), own)
    code.done()
    return code.function.name


def _write_task(module: ir.Module, name: str, run: str) -> None:
    """Writes what a thread of the pool does with a job, and how a job is let go by the last who holds it."""
    release = Code(module, f"{name}_release", [PTR])
    (job,) = release.args
    with release.when(_add(release, job, _REFS, -1).equals(1)):
        release.call("free", ir.VoidType(), job)
    release.done()
    task = Code(module, name, [PTR])
    task.call(run, ir.VoidType(), task.args[0])
    task.call(f"{name}_release", ir.VoidType(), task.args[0])
    task.done()


def _answer_metadata(code: Code, extension: Value) -> None:
    """Tells XLA, which asks when a kernel is registered, for which version of its interface this is written."""
    with code.when(extension.at(_EXTENSION["type"]).load(I32).equals(_METADATA_EXTENSION)):
        metadata = extension.at(_EXTENSION["metadata"]).load(PTR)
        for field, value in zip(("major", "minor", "traits"), (*API_VERSION, 0), strict=True):
            metadata.at(_METADATA[field]).store(code.int(value, I32))


def _record(code: Code, *fields: Value) -> Value:
    """Returns an argument record on the stack: its size, no extension, and the fields."""
    place = code.stack(ir.ArrayType(I64, 2 + len(fields)))
    for i, field in enumerate((code.int(8 * (2 + len(fields))), code.int(0), *fields)):
        place.at(i, I64).store(field)
    return place


def _api_call(code: Code, frame: Value, name: str, *fields: Value) -> Value:
    """Calls XLA and returns whether that worked."""
    api = frame.at(_FRAME["api"]).load(PTR)
    error = code.call_pointer(api.at(_API[name]).load(PTR), PTR, _record(code, *fields))
    failed = code.cast(error, I64, "ptrtoint").differs(0)
    with code.when(failed):
        code.call_pointer(api.at(_API["destroy_error"]).load(PTR), ir.VoidType(), _record(code, error))
    return failed ^ True


def _num_threads(code: Code, frame: Value) -> Value:
    """Returns how many threads XLA's pool has; 1 where there is no pool."""
    place = code.stack(I64)
    place.store(code.int(1))
    context = frame.at(_FRAME["context"]).load(PTR)
    worked = _api_call(code, frame, "num_threads", context, place)
    return code.select(worked, place.load(I64), 1)


def _schedule(code: Code, frame: Value, task: str, job: Value) -> None:
    """Hands a job to a thread of the pool; one that cannot be handed over is let go."""
    context = frame.at(_FRAME["context"]).load(PTR)
    function = code.value(code.module.globals[task])
    worked = _api_call(code, frame, "schedule", context, function, job)
    with code.when(worked ^ True):
        code.call(f"{task}_release", ir.VoidType(), job)


def _add(code: Code, job: Value, place: int, number: int) -> Value:
    """Adds to a counter that threads share and returns what it was."""
    return code.value(code.builder.atomic_rmw("add", job.at(place).raw, code.int(number).raw, "acq_rel"))


def _read(code: Code, job: Value, place: int) -> Value:
    return code.value(code.builder.load_atomic(job.at(place).raw, "acquire", 8, typ=I64))


def _pause(code: Code) -> None:
    code.call("llvm.x86.sse2.pause", ir.VoidType())
