"""Commands, flags, help and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import jaxinfer.cli.generate
from jaxinfer.cli.main import main
from tests.cli.conftest import CommandLine

# Of a run over several devices and hosts, or from executables compiled ahead.
HOST_FLAGS = {"mesh", "num_processes", "process_id", "coordinator", "bundle"}
COMMANDS = ("generate", "score", "serve", "bench", "convert", "quantize")


def test_help_lists_every_command_in_a_line(jaxinfer_cli: CommandLine):
    code, out, _ = jaxinfer_cli("--help")
    assert code == 0
    assert all(re.search(rf"^  {command} +\w.+$", out, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_its_own_flags_only(jaxinfer_cli: CommandLine, command: str):
    code, out, _ = jaxinfer_cli(command, "--help")
    flags = re.findall(r"^  --(\w+)", out, re.MULTILINE)
    assert code == 0
    assert "model" in flags
    assert len(set(flags) - HOST_FLAGS) <= 11
    assert not {"logtostderr", "verbosity", "helpfull", "flagfile"} & set(flags)
    assert max(map(len, out.splitlines()[2:])) <= 80


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["genrate"], "did you mean generate"),
        (["generate", "--promt", "x"], "did you mean --prompt"),
        (["generate", "--max-tokens", "3"], "did you mean --max_tokens"),
        (["generate", "--prompt", "a", "--prompt", "b"], "already"),
        (["generate", "--prompt"], "--prompt"),
        (["generate", "--prompt", "a", "--max_tokens", "0"], "max_tokens"),
        (["generate", "--prompt", "a", "--max_tokens", "two"], "two"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature: got -1.0"),
        (["generate", "The capital"], "'The capital' belongs to no flag"),
        (["generate"], "give --prompt"),
        (["generate", "--prompt", "a", "--output", "b"], "--output needs --input"),
        (["generate", "--input", "a"], "--input needs --output"),
        (["generate", "--input", "a", "--output", "b", "--chat"], "leave out"),
        (["generate", "--prompt", "a", "--set", "cahe.page_size=8"], "did you mean cache"),
        (["generate", "--prompt", "a", "--set", "cache.page_sise=8"], "did you mean page_size"),
        (["generate", "--prompt", "a", "--set", "cache.max_num_seqs=8"], "belongs to [schedule]"),
        (["generate", "--prompt", "a", "--set", "sampling.topp=1"], "top_p"),
        (["generate", "--prompt", "a", "--set", "page_size=8"], "expected SECTION.KEY=VALUE"),
        (["generate", "--prompt", "a", "--set", "cache.page_size"], "expected SECTION.KEY=VALUE"),
        (["score"], "give --text"),
        (["score", "--text", "a", "--policies", "bf16;"], "must be named once"),
        (["score", "--text", "a", "--policies", "bf16", "--policies", "bf16"], "must be named once"),
        (["score", "--text", "a", "--policies", "bf16", "--policy", "bf16"], "give one of the two"),
        (["score", "--text", "a", "--reference", "bf16"], "give --policies too"),
        (["score", "--text", "a", "--policies", "bf16", "--output", "a.txt"], "must end in .json"),
        (["quantize", "--policy", "w4a16", "--output", "absent"], "give --text"),
    ],
    ids=" ".join,
)
def test_wrong_command_lines_name_the_cure(jaxinfer_cli: CommandLine, args: list[str], says: str):
    code, out, err = jaxinfer_cli(*args)
    assert code == 2
    assert says in err
    assert "--help" in err
    assert out == ""
    assert not jaxinfer_cli.runs  # nothing was loaded for it


def test_no_command_shows_them(jaxinfer_cli: CommandLine):
    code, out, err = jaxinfer_cli()
    assert (code, out) == (2, "")
    assert "generate" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "--prompt", "a", "--config", "absent.toml"], "absent.toml"),
        (["generate", "--input", "absent.jsonl", "--output", "b"], "absent.jsonl"),
        (["generate", "--prompt", "a", "--set", "schedule.max_num_seqs=0"], "max_num_seqs"),
        (["generate", "--prompt", "a", "--set", "schedule.max_num_seqs=many"], "max_num_seqs: got 'many'"),
        (["generate", "--prompt", "a" * 1024], "prompt tokens: got 1024"),
        (["generate", "--prompt", "a", "--set", "sampling.stop_token_ids=[1000]"], "stop_token_ids"),
        (["score", "--text", "absent.txt"], "error: absent.txt: No such file or directory\n"),
        (["generate", "--chat", "--prompt", "a", "--set", "chat.template_kwargs=5"], "kwargs: got int"),
        (["generate", "--chat", "--prompt", "a", "--set", "chat.template_kwargs={tools=[]}"], "got tools"),
    ],
    ids=lambda value: " ".join(value)[:80] if isinstance(value, list) else None,
)
def test_what_fails_is_a_line_and_no_traceback(jaxinfer_cli: CommandLine, args: list[str], says: str):
    code, out, err = jaxinfer_cli(*args)
    assert code == 1
    assert says in err
    assert "Traceback" not in err
    assert out == ""


def test_unknown_model_is_a_line(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "--prompt", "a", "--model", "smollm2-135"]) == 1
    assert "smollm2-135m" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(jaxinfer_cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(jaxinfer.cli.generate, "complete", interrupt)
    code, _, err = jaxinfer_cli("generate", "--prompt", "a")
    assert code == 130
    assert "Traceback" not in err


def test_a_bug_keeps_its_traceback(jaxinfer_cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object):
        raise TypeError("a bug")

    monkeypatch.setattr(jaxinfer.cli.generate, "complete", fail)
    with pytest.raises(TypeError, match="a bug"):
        jaxinfer_cli("generate", "--prompt", "a")


def test_module_runs_and_help_does_not_load_jax():
    program = (
        "import sys; sys.argv = ['jaxinfer', 'generate', '--help']; import runpy\n"
        "try: runpy.run_module('jaxinfer', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.stdout.endswith("\n0 False\n"), done.stderr


def test_reader_that_goes_away_is_no_error():
    program = "import sys; from jaxinfer.cli.main import main; sys.exit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
