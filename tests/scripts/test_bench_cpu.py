import json
import sys
from pathlib import Path

import pytest

from scripts import bench_cpu, bench_machine, bench_peers, bench_table
from scripts.bench_process import BenchError, EngineSpec, Worker

# An engine that answers as `bench_peers` does: a token takes a millisecond, ids past 1,000 are refused.
FAKE = """
import json, sys
print("loading", file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    usage = {"cpu_seconds": 0.0, "peak_bytes": 5_000_000}
    if request["op"] == "load":
        answer = {"versions": {sys.argv[1]: "1.0"}, "weight_bytes": 4_000_000}
    elif request["op"] == "prefill":
        answer = {"seconds": 1e-3 * len(request["prompt"]), "tokens": [7]}
    elif request["op"] == "decode":
        count = len(request["prompts"]) * (request["num_tokens"] - 1)
        answer = {"seconds": 1e-3 * count, "count": count, "tokens": [7] * len(request["prompts"])}
    elif request["op"] == "prepare":
        with open(request["folder"] + "/source", "a") as file:
            print(request["source"], file=file)
        answer = {}
    elif request["op"] == "die":
        sys.exit(3)
    else:
        answer = {"error": "ValueError: no such thing"}
    print(json.dumps({**answer, **usage}), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


@pytest.fixture
def worker(tmp_path: Path, fake: Path):
    with Worker(EngineSpec("llama.cpp", sys.executable), tmp_path / "log", fake) as worker:
        yield worker


def test_worker_answers_request_by_request(worker: Worker):
    assert worker.ask("load", model="m", threads=2)["versions"] == {"llama.cpp": "1.0"}
    assert bench_cpu.measure(worker, "prefill", 8)[0] == pytest.approx(1000)
    rate, answer = bench_cpu.measure(worker, "x16", 9)
    assert (rate, answer["count"]) == (pytest.approx(1000), 16 * 8)
    assert worker.peak_bytes == 5_000_000


@pytest.mark.parametrize(
    ("op", "message"), [("boil", "llama.cpp: boil: ValueError: no such thing"), ("die", "the process ended")]
)
def test_engine_that_fails_or_dies_is_named_with_its_log(worker: Worker, op: str, message: str):
    with pytest.raises(BenchError, match=message) as caught:
        worker.ask(op)
    assert str(worker.log) in str(caught.value)


def test_real_worker_reports_errors_and_keeps_stdout_clean(tmp_path: Path):
    """The script of the protocol itself, with an interpreter that has no engine: what is wrong comes as an answer."""
    with (
        Worker(EngineSpec("llama.cpp", sys.executable), tmp_path / "log") as worker,
        pytest.raises(BenchError, match=r"llama.cpp: load: ModuleNotFoundError: No module named 'llama_cpp'"),
    ):
        worker.ask("load", model="m", threads=1)


def test_run_with_fake_engines_measures_compares_and_reports(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def make(spec: EngineSpec, log: Path) -> Worker:
        return Worker(spec, log, fake)

    model = tmp_path / "SmolLM2-135M.gguf"
    model.touch()
    (tmp_path / model.stem).mkdir()
    (tmp_path / model.stem / "done").touch()
    monkeypatch.setattr(bench_cpu, "Worker", make)
    monkeypatch.setattr(bench_cpu, "can_import", lambda python, modules: modules != ("llama_cpp",))
    monkeypatch.setattr(bench_cpu, "wait_until_idle", lambda limit: True)
    monkeypatch.setattr(bench_cpu, "busy_seconds", lambda: None)
    monkeypatch.setattr(bench_cpu, "read_bandwidth", lambda num_bytes, threads: 8e9)
    output = tmp_path / "out.json"
    flags = [
        "--model",
        str(model),
        "--cases",
        "prefill,x1,x16",
        "--policies",
        "float32",
        "--repetitions",
        "2",
    ]
    bench_cpu.main([*flags, "--work_dir", str(tmp_path), "--output", str(output)])
    record = json.loads(output.read_text())
    assert list(record["samples"]) == [
        "jaxinfer float32",
        "transformers float32",
        "transformers bfloat16",
        "openvino int8",
    ]
    assert record["samples"]["jaxinfer float32"]["x16"] == pytest.approx([1000, 1000])
    assert record["versions"] == {"jaxinfer": "1.0", "transformers": "1.0", "openvino": "1.0"}
    assert [(ratio["case"], ratio["least"]) for ratio in record["ratios"]] == [
        ("prefill", 1.0),
        ("x1", 1.5),
        ("x16", 2.0),
        ("prefill", None),  # OpenVINO's, in 8 bits, is no target of these policies
        ("x1", None),
        ("x16", None),
    ]
    converted = tmp_path / model.stem / "openvino-int8"
    assert (converted / "source").read_text() == f"{tmp_path / model.stem / 'float32'}\n"
    assert (converted / "done").exists()
    assert any("llama.cpp" in note and "has no llama_cpp" in note for note in record["notes"])
    text = capsys.readouterr().out
    assert "transformers bfloat16: 16 of 16 first tokens as jaxinfer float32" in text
    verdicts = {line.split()[0]: line.split()[-1] for line in text.splitlines() if ">=" in line}
    assert "openvino int8: 16 of 16 first tokens as jaxinfer float32" in text
    assert verdicts == {"prefill": "pass", "x1": "FAIL", "x16": "FAIL"}


def test_ratios_take_the_best_engine_of_each_side_by_median():
    samples = {
        "jaxinfer float32": {"x1": [10.0, 40.0, 20.0]},
        "jaxinfer bfloat16": {"x1": [15.0]},
        "transformers float32": {"x1": [5.0]},
        "transformers bfloat16": {"x1": [8.0, 8.0, 100.0]},
        "llama.cpp": {"prefill": [1.0]},
    }
    (ratio,) = bench_table.compare(samples, bench_table.targets_of("SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert ratio == bench_table.Ratio("x1", "jaxinfer float32", "transformers bfloat16", 2.5, 1.5)


def test_start_times_have_targets_too():
    samples = {
        "jaxinfer float32": {"start_cold": [9.0], "start_warm": [3.0]},
        "llama.cpp": {"start_warm": [1.0]},
    }
    text = bench_table.format_ratios([], samples, has_targets=True)
    assert [line.split()[-1] for line in text.splitlines()[1:]] == ["FAIL", "pass"]
    assert "llama.cpp" not in text


def test_figures_show_median_and_range():
    samples = {
        "jaxinfer float32": {"x1": [12.0, 10.04, 11.0], "start_cold": [1.5]},
        "llama.cpp": {"x1": [150.0]},
    }
    lines = bench_table.format_figures(samples, {"llama.cpp": 249e6}).splitlines()
    assert "11.0 (10.0-12.0)" in lines[1]
    assert "1.50 (1.50-1.50)" in lines[1]
    assert lines[1].endswith("-")  # whose memory was not measured
    assert lines[2].split() == ["llama.cpp", "150", "(150-150)", "-", "249"]


def test_limit_is_weights_over_bandwidth():
    assert bench_table.limit_rate("x8", 270e6, 27e9) == pytest.approx(800)


def test_gemma_is_held_to_transformers_only():
    assert {target.peer for target in bench_table.targets_of("gemma-3-270m-q4_k_m.gguf")} == {"transformers"}
    assert bench_table.targets_of("qwen3.gguf") == ()


def test_disturbed_turn_is_taken_again_and_counted(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 1000, 5))  # others work five seconds between any two looks
    monkeypatch.setattr(bench_cpu, "wait_until_idle", lambda limit: True)
    monkeypatch.setattr(bench_cpu, "busy_seconds", lambda: float(next(clock)))
    values = iter([1.0, 2.0, 3.0, 4.0])
    gate = bench_cpu.Gate(10.0)
    assert gate.take(lambda: (next(values), 0.0)) == 3.0
    assert (gate.disturbed, gate.busy) == (1, 0)


def test_machine_that_never_rests_is_waited_for_once_and_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_cpu, "wait_until_idle", lambda limit: False)
    monkeypatch.setattr(bench_cpu, "busy_seconds", lambda: 0.0)
    gate = bench_cpu.Gate(10.0)
    assert gate.take(lambda: (1.0, 0.0)) == 1.0
    assert gate.busy == 1


@pytest.mark.parametrize(
    ("busy", "own", "wall", "disturbed"),
    [(None, 0.0, 1.0, False), (2.0, 1.95, 1.0, False), (2.0, 1.0, 1.0, True), (0.08, 0.0, 0.1, True)],
)
def test_work_of_others_is_what_the_measured_process_did_not_do(
    busy: float | None, own: float, wall: float, disturbed: bool
):
    assert bench_machine.is_disturbed(busy, own, wall) is disturbed


def test_idle_wait_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(1000))
    monkeypatch.setattr(bench_machine, "busy_seconds", lambda: float(next(clock)))
    assert bench_machine.wait_until_idle(0.0, window=0.0) is False
    monkeypatch.setattr(bench_machine, "busy_seconds", lambda: 1.0)
    assert bench_machine.wait_until_idle(0.0, window=0.0) is True
    monkeypatch.setattr(bench_machine, "busy_seconds", lambda: None)
    assert bench_machine.wait_until_idle(0.0, window=0.0) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cases", "prefill,x2"], "got 'x2', must be among prefill,x1,x8,x16,start"),
        (["--peers", "vllm"], "got 'vllm'"),
        (["--rep", "3"], "unrecognized arguments"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench_cpu.make_parser().parse_args(flags)
    assert message in capsys.readouterr().err


def test_settings_are_json_or_text():
    assert bench_cpu.parse_setting("max_model_len=1024") == ("max_model_len", 1024)
    assert bench_cpu.parse_setting("kv_memory=64MiB") == ("kv_memory", "64MiB")
    with pytest.raises(BenchError, match="NAME=VALUE"):
        bench_cpu.parse_setting("fast")


def test_every_peer_has_the_engine_that_the_worker_knows():
    assert {*bench_cpu.PEER_MODULES, bench_table.OURS} == set(bench_peers.PEERS)
