"""Executables kept between runs: loaded where nothing changed, compiled anew where anything did or a file is bad."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.steps import keep
from jaxinfer.steps.compiled import count_compilations
from jaxinfer.steps.keep import ExecutableStore, devices_of, key_of
from tests.steps.kept_run import make_table, run

ROOT = Path(__file__).parents[2]
NUM_EXECUTABLES = 6  # prefill, draw, greedy, score, embed, install


def run_apart(folder: Path) -> list[str]:
    """Runs the tiny model in another process: how many executables it loaded, its logits and its token."""
    command = [sys.executable, "-m", "tests.steps.kept_run", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def num_loaded(folder: Path, **changes) -> int:
    table = make_table(ExecutableStore(folder), **changes)
    return sum(compiled.is_loaded for compiled in table.executables.values())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the tiny model's executables."""
    folder = tmp_path_factory.mktemp("cache") / "executables"
    assert num_loaded(folder) == 0
    return folder


def test_another_process_loads_and_computes_the_same(kept: Path):
    logits, token = run(make_table(None))
    assert run_apart(kept) == [str(NUM_EXECUTABLES), logits.tobytes().hex(), str(token)]


def test_loading_compiles_nothing_and_tells_the_memory(kept: Path):
    with count_compilations() as seen:
        table = make_table(ExecutableStore(kept))
        ours = [name for name in seen if "run" in name or "draw" in name or "install" in name]
    assert ours == []
    assert table.executables["prefill 1x8 over 2 pages"].temp_bytes > 0
    assert [str(made).split(" in ")[0] for made in table.executables.values()] == ["loaded"] * NUM_EXECUTABLES


def test_a_loaded_step_consumes_its_state(kept: Path):
    table = make_table(ExecutableStore(kept))
    logits, _ = run(table)
    again, _ = run(table)
    np.testing.assert_array_equal(logits, again)
    call: Any = table.executables["prefill 1x8 over 2 pages"].call
    memory = call.memory_analysis()
    assert memory.alias_size_in_bytes > 0


def test_another_configuration_is_compiled(kept: Path):
    assert num_loaded(kept, embed_scale=2.0) == 0
    assert num_loaded(kept) == NUM_EXECUTABLES


def test_damaged_files_are_compiled_anew_and_replaced(kept: Path, tmp_path: Path):
    folder = tmp_path / "executables"
    folder.mkdir(mode=0o700)
    for i, file in enumerate(sorted(kept.iterdir())):
        content = file.read_bytes()
        one_bit = content[:-1] + bytes([content[-1] ^ 1])
        (folder / file.name).write_bytes([b"", b"\0" * 4096, content[:-1], one_bit][i % 4])
    said: list[str] = []
    table = make_table(ExecutableStore(folder, said.append))
    assert not any(compiled.is_loaded for compiled in table.executables.values())
    assert len(said) == NUM_EXECUTABLES
    assert all("compiled anew" in line for line in said)
    assert num_loaded(folder) == NUM_EXECUTABLES


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no POSIX permissions")
def test_a_folder_that_others_may_write_to_is_not_read(kept: Path):
    kept.chmod(0o777)
    said: list[str] = []
    try:
        store = ExecutableStore(kept, said.append)
        table = make_table(store)
    finally:
        kept.chmod(0o700)
    assert not any(compiled.is_loaded for compiled in table.executables.values())
    assert len(said) == 1
    assert "others may write" in said[0]


def test_a_new_folder_is_its_users_alone(tmp_path: Path):
    ExecutableStore(tmp_path / "deep" / "executables")
    assert (tmp_path / "deep" / "executables").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path):
    (tmp_path / "file").touch()
    said: list[str] = []
    store = ExecutableStore(tmp_path / "file" / "executables", said.append)
    assert store.load("0" * 64, jax.devices()[:1]) is None
    assert len(said) == 1


def test_the_least_recently_used_go_first(tmp_path: Path):
    folder = tmp_path / "executables"
    store = ExecutableStore(folder, max_bytes=250)
    (folder / "someone's.bin").write_bytes(b"x" * 1000)
    (folder / "folder").mkdir()
    for age, name in enumerate("dcba"):
        path = folder / f"{name}.executable"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    store.trim()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["c.executable", "d.executable", "folder", "someone's.bin"]


def test_every_module_that_a_step_is_traced_from_is_part_of_its_key():
    """Imports are followed from the steps; what `schedule` imports in turn checks requests and traces nothing."""
    package = Path(keep.__file__).parent.parent
    covered = [package / name for name in keep._SOURCES]
    files = [f for path in covered for f in (path.rglob("*.py") if path.is_dir() else [path])]
    outside = set()
    for file in (f for f in files if f.parent.name != "schedule"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxinfer."):
                module = package.parent / (node.module or "").replace(".", "/")
                path = module if module.is_dir() else module.with_suffix(".py")
                if not any(path.is_relative_to(place) for place in covered):
                    outside.add(f"{file.name}: {node.module}")
    assert outside == set()


def test_keys_tell_parts_apart():
    assert key_of("a", "b") == key_of("a", "b")
    assert len({key_of("a", "b"), key_of("b", "a"), key_of("ab"), key_of("a\n'b'")}) == 4


def test_devices_are_known_or_nothing_is_kept():
    assert devices_of([np.zeros(2)]) == jax.devices()[:1]
    assert devices_of(jax.device_put(np.zeros(2))) == jax.devices()[:1]
