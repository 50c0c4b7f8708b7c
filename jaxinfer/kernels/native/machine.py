"""From LLVM's intermediate code to machine code in this process, registered with XLA: for x86 with AVX2 and better."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import jax

from jaxinfer.hardware import cpu_features

if TYPE_CHECKING:
    from jaxinfer.kernels.native.ffi import Kernel


@dataclass(frozen=True)
class Machine:
    """Instructions that kernels are written for.

    Attributes:
      name: in the names of kernels. lanes: numbers of 32 bits in a vector.
      has_vnni: whether one instruction adds up products of four bytes.
      has_bf16: whether one adds up products of two numbers of bfloat16, in vectors of 512 bits.
    """

    name: str
    lanes: int
    has_vnni: bool
    has_bf16: bool = False


MACHINES = (
    (("avx512_vnni", "avx512bw", "avx512vl"), Machine("avx512vnni", 16, True)),
    (("avx_vnni",), Machine("avxvnni", 8, True)),
    (("avx2", "fma", "f16c"), Machine("avx2", 8, False)),
)


def this_machine() -> tuple[Machine | None, str]:
    """Returns the instructions to write for, or None, and why."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None, f"native kernels are for x86 processors, this is {platform.machine()}"
    if find_spec("llvmlite") is None:
        return None, "native kernels need llvmlite (pip install 'jaxinfer[cpu]')"
    features = cpu_features()
    for needed, machine in MACHINES:
        if features.issuperset(needed):
            machine = replace(machine, has_bf16=machine.lanes == 16 and "avx512_bf16" in features)
            return machine, f"llvmlite is there and the processor has {', '.join(needed)}"
    return None, "native kernels need a processor with avx2"


class CodeStore(Protocol):
    """Where machine code is kept between runs, by the names of kernels."""

    def read_code(self, name: str) -> bytes | None:
        """Returns what was kept for this machine, version and source, or None."""
        ...

    def write_code(self, name: str, code: bytes) -> None:
        """Keeps a kernel's code."""
        ...


_LOCK = threading.Lock()
_ENGINES: dict[str, Any] = {}  # by kernel; an engine owns the code that XLA calls
_STORES: list[CodeStore | None] = [None]  # of the latest run


def keep_code(store: CodeStore | None) -> None:
    """Names where kernels made from now on are kept, None for nowhere: half a second each at every start."""
    _STORES[0] = store


def register(kernels: Iterable[Kernel]) -> None:
    """Makes kernels and gives them to XLA's CPU backend under their names, once a process."""
    with _LOCK:
        for kernel in kernels:
            if kernel.name in _ENGINES:
                continue
            engine, address = load_code(kernel.name, make_code(kernel, _STORES[0]))
            _ENGINES[kernel.name] = engine
            new = ctypes.pythonapi.PyCapsule_New
            new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
            jax.ffi.register_ffi_target(kernel.name, new(address, None, None), platform="cpu", api_version=1)


def make_code(kernel: Kernel, store: CodeStore | None) -> bytes:
    """Returns a kernel's machine code as an object file: what the store has of it, else made anew and kept there."""
    if store is not None and (kept := store.read_code(kernel.name)) is not None:
        return kept
    from jaxinfer.kernels.native.ffi import write_handler

    code = _compile(str(write_handler(kernel)))
    if store is not None:
        store.write_code(kernel.name, code)
    return code


def load_code(name: str, code: bytes) -> tuple[Any, int]:
    """Returns an engine that holds machine code, and the address of one of its functions."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine, engine.get_function_address(name)


def _compile(text: str) -> bytes:
    """Returns a module's machine code as an object file."""
    import llvmlite.binding as llvm

    machine = _target()
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    # What a kernel wants unrolled it unrolls itself; more of it and its sums no longer fit the registers.
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = tuning.loop_vectorization = tuning.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


def _target() -> Any:
    """Returns a machine to make code for; a new one each time, for an engine owns its own and frees it."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)
