"""TOML files and --set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.build import RunConfig
from jaxinfer.cli.flags import UsageError
from jaxinfer.cli.settings import RUN_SECTIONS, read_settings, read_value
from jaxinfer.cli.start import params_of
from jaxinfer.llm import read_run_config

ROOT = Path(__file__).parent.parent.parent


def test_every_choice_of_a_run_has_one_place():
    placed = sorted(name for keys in RUN_SECTIONS.values() for name in keys.values())
    assert placed == sorted(RunConfig.names())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("sampling.top_p", "0.9", 0.9),
        ("sampling.top_k", "40", 40),
        ("sampling.ignore_eos", "true", True),
        ("sampling.ignore_eos", "True", True),
        ("sampling.max_tokens", "none", None),
        ("sampling.stop", "END", "END"),
        ("sampling.stop", '["a", "b\\n"]', ["a", "b\n"]),
        ("sampling.stop", '"5"', "5"),
        ("sampling.logit_bias", "{5 = -1.5}", {"5": -1.5}),
        ("model.name", "123", "123"),
        ("model.name", '"123"', "123"),
        ("model.policy", "weights=bfloat16,compute=float32", "weights=bfloat16,compute=float32"),
        ("cache.kv_memory", "25%", "25%"),
        ("run.prefill_buckets", "[[1, 64]]", [[1, 64]]),
        ("chat.system", "true", "true"),
    ],
)
def test_assignments_are_typed(name: str, text: str, value: Any):
    got = read_value(name, text)
    assert got == value
    assert type(got) is type(value)


def test_sections_map_onto_the_run_and_later_sources_win(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "a"\n[cache]\npage_size = 8\n[run]\nprefill_buckets = [[1, 64]]\n'
        "[sampling]\nmax_new_tokens = 7\ntop_p = 0.5\n"
    )
    settings = read_settings(str(path), ["cache.page_size=32", "sampling.max_tokens=9"])
    assert read_run_config(settings.run) == RunConfig(model="a", page_size=32, prefill_buckets=((1, 64),))
    params = params_of(settings.sampling)
    assert (params.max_tokens, params.top_p) == (9, 0.5)


def test_default_of_max_tokens_leaves_room_for_min_tokens():
    assert params_of({"min_tokens": 100}).max_tokens == 256


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("[model\n", ValueError, "not a TOML file"),
        ("page_size = 8\n", UsageError, "outside a section"),
        ("[modell]\nname = 'a'\n", UsageError, "did you mean model"),
        ("[cache]\npage_sise = 8\n", UsageError, "did you mean page_size"),
        ("[chat]\nsystm = 'a'\n", UsageError, "did you mean system"),
        ("[sampling]\nmax_tokens = 1\nmax_new_tokens = 2\n", UsageError, "one spelling"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, error: type[Exception], says: str):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(error, match=says):
        read_settings(str(path), [])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_configs_are_settings_and_open_with_their_command(path: Path):
    settings = read_settings(str(path), [])
    read_run_config(settings.run)
    params_of(settings.sampling)
    assert f"--config configs/{path.name}" in path.read_text().splitlines()[0]
