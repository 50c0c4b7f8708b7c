"""`jaxinfer bench` from the command line: nothing is compiled, nobody waits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.server import Script, Server, serving, tokens
from tests.cli.conftest import CommandLine

USAGE = {"prompt_tokens": 9, "completion_tokens": 2}


class FreeClock:
    """Waits for nobody: the command reads a clock of its own."""

    now = 0.0

    async def set_and_show(self, _: float, show: object) -> None:
        assert callable(show)
        show()
        await asyncio.sleep(0)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server in a thread of its own, that answers all but prompts of 13 words."""

    def answer(path: str, body: dict) -> Script:
        if path == "/v1/models":
            return Script([(0.0, {"data": [{"id": "served"}]})])
        if len(body["prompt"]) == 13:
            return Script([(0.0, {"error": {"message": "unlucky"}})], status=503)
        return Script(
            tokens(*[0.0] * body["max_tokens"], usage=USAGE | {"completion_tokens": body["max_tokens"]})
        )

    ready, made = threading.Event(), []
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with serving(answer) as server:
            server.clock = FreeClock()  # pyright: ignore[reportAttributeAccessIssue]
            server.done = asyncio.Event()  # pyright: ignore[reportAttributeAccessIssue]
            made.append(server)
            ready.set()
            await server.done.wait()  # pyright: ignore[reportAttributeAccessIssue]

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    yield made[0]
    loop.call_soon_threadsafe(made[0].done.set)
    thread.join()
    loop.close()


def test_endpoint_is_measured_and_recorded(jaxinfer_cli: CommandLine, server: Server, tmp_path: Path):
    record, plot = tmp_path / "run.json", tmp_path / "run.png"
    args = ["--requests", "6", "--arrivals", "closed:2", "--input_len", "9", "--output_len", "2:5"]
    outputs = ["--output", str(record), "--output", str(plot)]
    code, out, err = jaxinfer_cli("bench", "--url", server.url, *args, "--slo", "ttft=100s", *outputs)
    assert code == 0, err
    assert "serves served" in err
    assert "6 of 6" in out
    assert "good requests/s" in out
    written = json.loads(record.read_text())
    assert written["schema"] == "jaxinfer.bench/1"
    assert written["command"].startswith("jaxinfer bench --url http")
    (target,) = written["targets"]
    assert target["model"] == "served"
    (run,) = target["runs"]
    assert run["report"]["num_ok"] == run["report"]["num_good"] == 6
    assert run["report"]["prompt_tokens"] == 54
    assert all(len(r["itl"]) == r["output_tokens"] - 1 for r in run["requests"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_two_endpoints_are_compared(jaxinfer_cli: CommandLine, server: Server):
    urls = ["--url", server.url, "--url", server.url.replace("127.0.0.1", "localhost")]
    code, out, err = jaxinfer_cli(
        "bench", *urls, "--requests", "3", "--input_len", "9", "--output_len", "3", "--repeat", "2"
    )
    assert code == 0, err
    assert "first / second (least-most)" in out
    assert "median of 2 runs" in out
    assert out.count("6 of 6") == 2


def test_errors_are_counted_and_told(jaxinfer_cli: CommandLine, server: Server):
    args = ["--url", server.url, "--requests", "40", "--input_len", "12:13", "--output_len", "2"]
    args += ["--set", "bench.warmup=0"]
    code, out, err = jaxinfer_cli("bench", *args)
    assert code == 0
    failed = 40 - int(out.split("answered")[1].split()[0])
    assert 0 < failed < 40
    assert f"{failed} failed by HTTP 503, such as: unlucky" in err


def test_model_runs_here_without_an_endpoint(jaxinfer_cli: CommandLine, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "abc", "max_tokens": 3}\n{"prompt": "defg", "max_tokens": 700}\n')
    code, out, err = jaxinfer_cli(
        "bench", "--requests", str(trace), "--set", "sampling.top_k=5", "--set", "bench.warmup=0"
    )
    assert code == 0, err
    assert "2 of 2" in out
    assert jaxinfer_cli.runs[0].max_model_len == 1024
    assert jaxinfer_cli.prompts == ["abc", "defg"]
    assert all(admission.params.top_k == 5 for admission in jaxinfer_cli.runners[0].admitted)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--output", "run.csv"], "must end in .json"),
        (["--arrival", "all"], "did you mean --arrivals"),
        (["--set", "bench.prefix_length=3"], "did you mean prefix_len"),
        (["--repeat", "0"], "repeat"),
    ],
    ids=" ".join,
)
def test_wrong_command_lines_name_the_cure(jaxinfer_cli: CommandLine, args: list[str], says: str):
    code, out, err = jaxinfer_cli("bench", *args)
    assert (code, out) == (2, "")
    assert says in err
    assert not jaxinfer_cli.runs


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--requests", "0"], "requests: got 0"),
        (["--requests", "-5"], "requests: got '-5'"),
        (["--requests", "absent.jsonl"], "neither a count nor a file"),
        (["--arrivals", "closed"], "arrivals: got 'closed', must be closed:CLIENTS"),
        (["--input_len", "9:3"], "input_len: got '9:3'"),
        (["--output_len", "x"], "output_len: got 'x'"),
        (["--slo", "fast"], "slo: got 'fast'"),
        (["--set", "bench.prefix_share=2"], "prefix_share: got 2, must be a number from 0 to 1"),
        (["--set", "bench.prefix_share=0.5"], "give both, or neither"),
        (["--set", "bench.warmup=-1"], "warmup: got -1"),
        (["--set", "bench.api=assistants"], "api: got 'assistants', must be completions or chat"),
        (["--set", "bench.prompts=ids", "--set", "bench.api=chat"], "prompts: got 'ids'"),
        (["--set", "bench.fields=5"], "fields: got 5"),
        (["--set", "bench.ignore_eos=1"], "ignore_eos: got 1"),
        (["--set", "bench.timeout=0"], "timeout: got 0"),
        (["--set", "bench.seed=a"], "seed: got 'a'"),
        (["--set", "bench.api_key_env=NO_SUCH_KEY"], "the environment has no 'NO_SUCH_KEY'"),
        (["--url", "a", "--url", "b", "--url", "c"], "url: got a, b, c; give one, or two"),
        (["--url", "http://a", "--url", "http://a"], "two different ones to compare"),
        (["--url", "localhost:8000"], "url: got 'localhost:8000', must be http://"),
        (["--url", "http://127.0.0.1:1"], "is a server running there?"),
        (["--output", "absent/run.json"], "no such folder"),
        (["--input_len", "5000"], "the longest request has 5064 tokens"),
        (["--config", "absent.toml"], "absent.toml"),
    ],
    ids=" ".join,
)
def test_what_fails_is_a_line(jaxinfer_cli: CommandLine, args: list[str], says: str):
    code, out, err = jaxinfer_cli("bench", *args)
    assert (code, out) == (1, "")
    assert says in err
    assert "Traceback" not in err
    assert not jaxinfer_cli.runs


def test_a_file_of_settings_holds_a_load(jaxinfer_cli: CommandLine, server: Server, tmp_path: Path):
    config = tmp_path / "load.toml"
    config.write_text(
        f'[bench]\nurl = "{server.url}"\nrequests = 5\narrivals = "all"\ninput_len = 20\noutput_len = "1:2"\n'
        "prefix_share = 1.0\nprefix_len = 8\n[bench.fields]\ntop_p = 0.5\n"
    )
    code, out, err = jaxinfer_cli("bench", "--config", str(config), "--requests", "7")
    assert code == 0, err
    assert "7 of 7" in out
    bodies = [body for path, body in server.requests if path.endswith("completions")][-7:]
    assert len({tuple(body["prompt"][:8]) for body in bodies}) == 1
    assert all(body["top_p"] == 0.5 and len(body["prompt"]) == 28 for body in bodies)
