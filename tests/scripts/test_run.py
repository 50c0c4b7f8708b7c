import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import run

ROOT = Path(__file__).parent.parent.parent


def test_readme_and_ci_start_the_same_script():
    """What a person is told to run is what CI runs."""
    readme = (ROOT / "README.md").read_text()
    assert "python3 scripts/run.py test\n" in readme
    assert "python3 scripts/run.py generate --prompt" in readme
    assert "python3 scripts/run.py --venv .venv-ci test\n" in (ROOT / ".ci" / "run").read_text()


def test_folder_that_is_no_environment_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [sys.executable, "scripts/run.py", "--venv", str(tmp_path), "test"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert f"{tmp_path} is not a Python environment: name another folder with --venv" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the script would run; the one that makes an environment makes its interpreter."""
    ran: list[list[str]] = []

    def record(command: list, stdout: object = None) -> int:
        words = [str(part) for part in command]
        ran.append(words)
        if words[1:3] == ["-m", "venv"]:
            python = Path(words[-1]) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
            python.parent.mkdir(parents=True)
            python.touch()
        return 0

    monkeypatch.setattr(run, "run", record)
    return ran


def test_environment_is_made_once_and_grows_by_extras(tmp_path: Path, commands: list[list[str]]):
    venv = tmp_path / "venv"
    python = run.prepare(venv, ())
    assert [words[1:3] for words in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert commands[-1][-2:] == ["--editable", str(ROOT)]
    commands.clear()
    assert run.prepare(venv, ()) == python
    assert commands == []
    run.prepare(venv, ("hub", "test"))
    assert [words[-1] for words in commands] == [f"{ROOT}[hub,test]"]
    commands.clear()
    run.prepare(venv, ("test",))
    assert commands == []


def test_environment_of_another_project_file_is_made_anew(tmp_path: Path, commands: list[list[str]]):
    python = run.prepare(tmp_path, ())
    stamp = json.loads((tmp_path / run.STAMP).read_text())
    (tmp_path / run.STAMP).write_text(json.dumps({**stamp, "digest": "another"}))
    (tmp_path / "pyvenv.cfg").touch()
    python.unlink()
    python.parent.rmdir()
    commands.clear()
    run.prepare(tmp_path, ())
    assert [words[1:3] for words in commands] == [["-m", "venv"], ["-m", "pip"]]


def test_interrupted_install_is_started_over(tmp_path: Path, commands: list[list[str]]):
    run.prepare(tmp_path / "venv", ())
    (tmp_path / "venv" / run.STAMP).write_text("{")
    assert run.read_stamp(tmp_path / "venv", "any") is None


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        (
            ["generate", "--prompt", "a b", "--venv", "x"],
            ["-m", "jaxinfer", "generate", "--prompt", "a b", "--venv", "x"],
        ),
        (
            ["test", "-m", "not slow"],
            ["-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow"],
        ),
    ],
    ids=["a command of jaxinfer", "pytest's arguments"],
)
def test_arguments_are_handed_on(
    words: list[str], ran: list[str], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run, "prepare", lambda venv, extras: Path("python"))
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as done:
        run.main()
    assert done.value.code == 0
    assert commands == [["python", *ran]]


@pytest.mark.parametrize(
    ("code", "runs"), [(0, ["not slow and not ahead", "slow"]), (1, ["not slow and not ahead"])]
)
def test_all_tests_are_the_fast_ones_and_then_the_slow_ones(
    code: int, runs: list[str], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    record = run.run

    def fail_tests(command: list, stdout: object = None) -> int:
        return record(command, stdout) or (code if "pytest" in command else 0)

    monkeypatch.setattr(run, "run", fail_tests)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as done:
        run.run_tests(Path("python"), [])
    assert done.value.code == code
    assert [words[-1] for words in commands if "pytest" in words] == runs
