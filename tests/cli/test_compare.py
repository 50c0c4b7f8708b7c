"""`jaxinfer score --policies` and `jaxinfer quantize` on a toy, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxinfer.cli.main import main
from tests.acceptance.engines import TOY_VOCAB, write_toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"w{3 + i * i % (TOY_VOCAB - 3)}" for i in range(300)))
    return path


def test_policies_are_compared_and_written(
    toy: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    picture, record = tmp_path / "it.png", tmp_path / "it.json"
    words = ["--text", str(text), "--model", str(toy), "--policies", "float32; weights=int8,compute=float32"]
    words += ["--policies", "weights=int4:g32,kv=int8,compute=float32", "--without_speed"]
    assert main(["score", *words, "--output", str(picture), "--output", str(record)]) == 0
    out, err = capsys.readouterr()
    _, *lines = out.splitlines()
    policies = ["float32", "weights=int8,compute=float32", "weights=int4:g32,kv=int8,compute=float32"]
    assert [line.split()[0] for line in lines] == policies
    assert "scoring: 6 of 6 chunks" in err
    found = json.loads(record.read_text())
    assert [one["policy"] for one in found["policies"]] == policies
    assert 0 == found["policies"][0]["kl"] < found["policies"][1]["kl"] < found["policies"][2]["kl"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_calibrated_checkpoint_is_written_and_compared_with_its_source(
    toy: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made, policy = tmp_path / "made", "weights=int4:g32,compute=float32"
    words = ["--model", str(toy), "--text", str(text), "--policy", policy, "--output", str(made)]
    assert main(["quantize", *words]) == 0
    assert "rounding: 2 of 2 layers" in capsys.readouterr().err
    words = ["--text", str(text), "--model", str(made), "--policies", "auto", "--json", "--without_speed"]
    assert main(["score", *words, "--reference", "float32", "--reference_model", str(toy)]) == 0
    source, own = json.loads(capsys.readouterr().out)["policies"]
    assert (source["model"], own["model"]) == (str(toy), str(made))
    assert 0 == source["kl"] < own["kl"]
    assert own["formats"].startswith("weights=int4:g32")
    assert main(["score", "--text", str(text), "--model", str(toy), "--policies", f"float32; {policy}"]) == 0
    assert f"{own['kl']:.5f}" not in capsys.readouterr().out  # rounded to nearest is something else


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policies", "float32,w8a8,w4a16"], "several policies have ; between them"),
        (["--policies", "float32; int9"], "unknown format"),
        (["--policies", "float32", "--reference_model", "x"], "--reference_model needs --reference"),
    ],
)
def test_policies_that_cannot_be_are_refused_before_anything_runs(
    toy: Path, text: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["score", "--text", str(text), "--model", str(toy), *words]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "chunks" not in err


@pytest.mark.parametrize(
    ("policy", "says"),
    [("w8a16", "for weights of 4 bits"), ("weights=checkpoint", "for weights of 4 bits"), ("w4a99", "w4a99")],
)
def test_calibration_is_for_four_bits(
    toy: Path, text: Path, tmp_path: Path, policy: str, says: str, capsys: pytest.CaptureFixture[str]
):
    made = tmp_path / "made"
    words = ["--model", str(toy), "--text", str(text), "--policy", policy, "--output", str(made)]
    assert main(["quantize", *words]) == 1
    assert says in capsys.readouterr().err
    assert not made.exists()


def test_a_short_text_calibrates_nothing(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text, made = tmp_path / "short.txt", tmp_path / "made"
    text.write_text("w5 w6 w7")
    words = ["--model", str(toy), "--text", str(text), "--policy", "w4a16", "--output", str(made)]
    assert main(["quantize", *words]) == 1
    assert "needs at least 256" in capsys.readouterr().err
    assert not made.exists()
