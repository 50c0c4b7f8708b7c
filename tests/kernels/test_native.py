"""Machine code of native kernels: made once, kept, and loaded instead of being made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.kernels.native import machine
from jaxinfer.kernels.native.ffi import Kernel
from jaxinfer.kernels.native.machine import load_code, make_code, this_machine
from jaxinfer.steps.keep import ExecutableStore

HERE, WHY = this_machine()
pytestmark = pytest.mark.skipif(HERE is None, reason=WHY)


def some_kernel() -> Kernel:
    from jaxinfer.kernels.matmul.native import Form, kernel

    assert HERE is not None
    return kernel(Form(8, False, HERE))


def test_kept_code_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = some_kernel()
    code = make_code(kernel, ExecutableStore(tmp_path))

    def never(text: str) -> bytes:
        raise AssertionError("compiled")

    monkeypatch.setattr(machine, "_compile", never)
    assert make_code(kernel, ExecutableStore(tmp_path)) == code
    engine, address = load_code(kernel.name, code)
    assert address
    del engine


def test_damaged_code_is_made_anew_and_said(tmp_path: Path):
    kernel, said = some_kernel(), []
    store = ExecutableStore(tmp_path, said.append)
    code = make_code(kernel, store)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert make_code(kernel, store) == code
    assert len(said) == 1
    assert "is compiled anew: it is damaged" in said[0]
    assert make_code(kernel, store) == code
    assert len(said) == 1


def test_kernels_have_names_of_their_own(tmp_path: Path):
    from jaxinfer.kernels.matmul.native import Form, kernel

    assert HERE is not None
    store = ExecutableStore(tmp_path)
    codes = {make_code(kernel(Form(bits, True, HERE)), store) for bits in (8, 4)}
    assert len(codes) == len(list(tmp_path.iterdir())) == 2
