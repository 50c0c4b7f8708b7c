"""The cases that need no model, and the table and record around all of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import pytest

from jaxinfer.bench.load import Shot
from jaxinfer.bench.results import Result
from jaxinfer.llm import LLM
from scripts import bench_serve, serve_bed, serve_cases, serve_peers
from scripts.serve_cases import Finding, Outcome


@pytest.fixture
def args() -> argparse.Namespace:
    args = bench_serve.make_parser().parse_args([])
    args.say, args.scale = lambda _: None, lambda count: max(16, count // 10)
    return args


def test_findings_are_held_to_their_targets():
    assert Finding("a", 4.0, most=4.0).passed is True
    assert Finding("a", 4.1, most=4.0).passed is False
    assert Finding("a", 1.2, least=1.2).passed is True
    assert Finding("a", 1.1, least=1.2).passed is False
    assert Finding("a", 9.9).passed is None


def test_waste_is_counted_from_the_scheduler(args: argparse.Namespace):
    """Half a page a row is unfilled on average: 8 of some 300 tokens; a row of the context wastes most of it."""
    pages, context, planned = (finding.got for finding in serve_cases.waste(args).findings)
    assert 1.0 < pages < 4.0
    assert pages < planned < context < 95.0


def test_plans_are_timed_at_full_rows():
    times = serve_cases.time_plans(4, 20, 30)
    assert times.shape == (20,)
    assert (times > 0).all()


def test_bed_changes_the_scheduler_and_keeps_the_executables(monkeypatch: pytest.MonkeyPatch):
    opened: list[dict[str, object]] = []

    def open_llm(model: str, *, say: object, **settings: object) -> LLM:
        opened.append(settings)
        return LLM.from_engine(serve_peers.PacedRunner.make_engine())

    monkeypatch.setattr(serve_bed, "LLM", open_llm)
    bed = serve_bed.Bed("m", {"page_size": 32}, lambda _: None)
    first = bed.open()
    second = bed.open(enable_prefix_caching=False, scheduling_policy="ferry", window_ms=20)
    third = bed.open(max_num_seqs=4)
    for llm in (first, second, third):
        llm.close()
    assert second.engine.runner is first.engine.runner
    assert second.engine.scheduler.config.scheduling_policy == "ferry"
    assert second.engine.scheduler.config.window == 0.02
    assert first.engine.scheduler.config.scheduling_policy != "ferry"
    assert second.engine.scheduler.pool is not first.engine.scheduler.pool
    assert third.engine.runner is not first.engine.runner
    assert [settings["max_num_seqs"] for settings in opened] == [16, 4]
    assert opened[0]["page_size"] == 32


def test_only_the_time_in_which_requests_wait_is_counted():
    first = Result(0, sent=0.0, times=[1.0, 2.0, 3.0, 9.0])
    last = Result(1, sent=0.0, times=[4.0, 5.0])
    assert serve_cases.saturated_tps([first, last]) == 4 / 4.0


def test_paced_engine_answers_any_prompt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve_peers, "STEP_SECONDS", 0.0)
    engine = serve_peers.PacedRunner.make_engine()
    (output,) = engine.generate([[31_999, 5]], serve_cases.GREEDY.replace(max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4


def test_other_cases_go_on_when_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def fail(_: argparse.Namespace) -> Outcome:
        raise RuntimeError("no server")

    monkeypatch.setitem(serve_cases.CASES, "http", fail)
    monkeypatch.setitem(
        serve_cases.CASES, "host", lambda _: Outcome([Finding("mean", 1.5, "ms", most=1.0)], ["a note"])
    )
    path = tmp_path / "serve.json"
    assert bench_serve.main(["--cases", "http,host", "--output", str(path)]) == 1
    out = capsys.readouterr().out
    assert "note: http: did not run: RuntimeError: no server" in out
    assert "note: host: a note" in out
    line = next(line for line in out.splitlines() if line.startswith("host"))
    assert line.split() == ["host", "mean", "1.50", "ms", "<=", "1", "FAIL"]
    record = json.loads(path.read_text())
    assert record["schema"] == bench_serve.SCHEMA
    assert record["cases"]["host"]["findings"][0]["passed"] is False
    assert "http" not in record["cases"]


@pytest.mark.parametrize("text", ["", "waste,speed"])
def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str], text: str):
    with pytest.raises(SystemExit):
        bench_serve.main(["--cases", text])
    assert "must be of waste,prefix,stall,ferry,llama_server,host,http" in capsys.readouterr().err


def test_settings_reach_our_server(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    @contextlib.contextmanager
    def start(command: list[str], _: int):
        commands.append(command)
        yield

    monkeypatch.setattr(serve_peers, "_process", start)
    monkeypatch.setattr(serve_peers, "_read_url", lambda _: "http://x")
    args.set = [("policy", "bfloat16"), ("max_model_len", 512)]
    with serve_peers.serve_ours(
        args, {"max_num_seqs": 16, "max_model_len": 2048, "draws": ("greedy",)}
    ) as url:
        assert url == "http://x"
    given = {one for flag, one in itertools.pairwise(commands[0]) if flag == "--set"}
    asked = {
        "schedule.max_num_seqs=16",
        "model.max_model_len=512",
        "run.draws=['greedy']",
        "model.policy=bfloat16",
    }
    assert given == asked | {"server.access_log=false"}


def test_pauses_are_drawn_and_do_not_count():
    class Sink:
        make_tokens = staticmethod(lambda rng, count: [1] * count)

        async def send(self, shot: Shot, result: Result) -> None:
            result.sent = 1.0

    async def main() -> list[float]:
        asked: list[float] = []

        async def sleep(seconds: float) -> None:
            asked.append(seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve_peers.asyncio, "sleep", sleep)
            pausing = serve_peers.Pausing(Sink(), 2.0, seed=1)
            for index in range(50):
                result = Result(index)
                await pausing.send(Shot(index, None, [1], 1), result)
                assert result.sent == 1.0
        return asked

    asked = asyncio.run(main())
    assert asked == asyncio.run(main())
    assert 0 <= min(asked) < 0.01
    assert 0.03 < max(asked) <= 0.04
