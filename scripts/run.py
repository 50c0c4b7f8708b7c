"""Set up jaxinfer from a clone and run it, with nothing but Python and pip.

python3 scripts/run.py generate --prompt "The capital of France is"    any command of jaxinfer
python3 scripts/run.py test                                            every check and test
python3 scripts/run.py --venv .venv313 test tests/text -m "not slow"   pytest's arguments after `test`
python3 scripts/run.py test tests/aot -n 1                             all steps for TPUs and GPUs, in 10 minutes

The first run makes the environment; later ones start at once.
"""

from __future__ import annotations  # an older Python must get as far as the error that names the right one

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
STAMP = "jaxinfer.json"
TEST_EXTRAS = ("cpu", "hub", "plots", "ray", "serve", "test")
# The compilers for TPUs and GPUs; there are none for other machines, where tests that need them are skipped.
if sys.platform == "linux" and platform.machine() == "x86_64":
    TEST_EXTRAS = ("aot", *TEST_EXTRAS)
COMMAND_EXTRAS = {"serve": ("serve",), "bench": ("plots",)}  # beside `cpu`, which every run profits from
TEST_MODELS = ("smollm2-135m", "gemma3-270m")


def main() -> None:
    """Makes the environment ready and runs what the command line asks for in it."""
    if sys.version_info < (3, 11):  # noqa: UP036 (it may be any Python that starts this file)
        fail(f"Python {sys.version.split()[0]} is too old: jaxinfer needs 3.11 or newer")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment (default .venv)")
    parser.add_argument("command", help="`test`, or a command of jaxinfer, such as `generate`")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args()
    if options.command == "test":
        run_tests(prepare(options.venv, TEST_EXTRAS), options.args)
    else:
        python = prepare(options.venv, ("cpu", *COMMAND_EXTRAS.get(options.command, ())))
        sys.exit(run([python, "-m", "jaxinfer", options.command, *options.args]))


def run_tests(python: Path, pytest_args: Sequence[str]) -> NoReturn:
    """Runs format, lint, types and tests, and exits; pytest comes last and closes the output.

    Args:
        python: the environment's interpreter.
        pytest_args: when given, only pytest runs, with these.
    """
    os.chdir(ROOT)
    if not pytest_args:
        step("format, lint and types", [python, "-m", "ruff", "format", "--check", "."])
        step(None, [python, "-m", "ruff", "check", "."])
        step(None, [python, "-m", "basedpyright", "--pythonpath", python])
        # Here and not inside a test, so that the progress of the downloads is seen.
        resolve = (
            "import sys; from jaxinfer.weights.fetch import resolve_model as r; [r(n) for n in sys.argv[1:]]"
        )
        step("models", [python, "-c", resolve, *TEST_MODELS])
    # A file stays in one worker, so that what its tests share is compiled once. Files come in the order of
    # tests/conftest.py: xdist would begin with those of most tests, which are not the longest.
    pytest = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    if pytest_args:
        say("tests")
        sys.exit(run([*pytest, *pytest_args]))
    # Two runs, as the fast suite's code is made quickly and that of real models well. The second is for a sound
    # first: so the last line that pytest prints is the verdict.
    code = 0
    suites = {"the fast tests": "not slow and not ahead", "the slow tests, on real models": "slow"}
    for title, which in suites.items():
        if not code:
            say(title)
            code = run([*pytest, "-m", which])
    sys.exit(code)


def prepare(venv: Path, extras: Sequence[str]) -> Path:
    """Makes an environment that holds jaxinfer with the extras, unless it is there already.

    Returns:
        The environment's interpreter.
    """
    venv = Path(os.path.abspath(venv))
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    made_for = f"{ROOT} {sys.version_info[:2]} {(ROOT / 'pyproject.toml').read_text()}"
    digest = hashlib.sha256(made_for.encode()).hexdigest()
    installed = read_stamp(venv, digest) if python.exists() else None
    if installed is not None and installed.issuperset(extras):
        return python
    if installed is None:
        create(venv, python)
    wanted = sorted((installed or set()).union(extras))
    say(f"installing jaxinfer and what it needs in {venv}")
    target = f"{ROOT}[{','.join(wanted)}]" if wanted else str(ROOT)
    step(None, [python, "-m", "pip", "install", *quiet_pip(), "--editable", target])
    (venv / STAMP).write_text(json.dumps({"digest": digest, "extras": wanted}))
    return python


def read_stamp(venv: Path, digest: str) -> set[str] | None:
    """Returns the extras in a finished environment of this digest, or None where there is none."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return set(stamp["extras"]) if stamp["digest"] == digest else None


def create(venv: Path, python: Path) -> None:
    """Makes an empty environment with pip in it, in place of a broken one."""
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        fail(f"{venv} is not a Python environment: name another folder with --venv, or remove it")
    say(f"creating the environment {venv} with Python {sys.version.split()[0]}")
    if find_spec("ensurepip"):
        step(None, [sys.executable, "-m", "venv", "--clear", venv])
        return
    # Debian splits ensurepip off into python3-venv; the pip at hand can put itself into the new environment.
    if not find_spec("pip"):
        fail(
            "this Python has neither ensurepip nor pip: install one (on Debian: apt-get install python3-venv)"
        )
    step(None, [sys.executable, "-m", "venv", "--clear", "--without-pip", venv])
    step(None, [sys.executable, "-m", "pip", "--python", python, "install", *quiet_pip(), "pip"])


def quiet_pip() -> list[str]:
    """Returns pip's options: progress bars for a person, errors only for a log."""
    return ["--disable-pip-version-check", *([] if sys.stderr.isatty() else ["--quiet"])]


def step(title: str | None, command: Sequence[str | Path]) -> None:
    """Runs a command that must succeed, with its output on stderr: stdout is for the answer alone."""
    if title:
        say(title)
    code = run(command, stdout=sys.stderr)
    if code:
        fail(f"failed with exit code {code}: {' '.join(map(str, command))}")


def run(command: Sequence[str | Path], stdout=None) -> int:
    """Runs a command and returns its exit code."""
    try:
        return subprocess.run([str(part) for part in command], check=False, stdout=stdout).returncode
    except KeyboardInterrupt:
        return 130


def say(text: str) -> None:
    """Tells on stderr what happens now."""
    print(f"jaxinfer: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """Ends the run with an error."""
    sys.exit(f"jaxinfer: error: {text}")


if __name__ == "__main__":
    main()
