"""`jaxinfer serve`: flags and settings, keys, what is built and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jaxinfer.build
import jaxinfer.server.run
from jaxinfer.cli.flags import UsageError
from jaxinfer.cli.serve import server_config
from jaxinfer.cli.settings import Settings, read_settings
from jaxinfer.server.service import Service
from tests.cli.conftest import CommandLine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(jaxinfer_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> list[Service]:
    """What would be served; nothing is, and every engine is closed."""
    services: list[Service] = []

    def serve(service: Service, taken: Any, on_ready: Any) -> None:
        services.append(service)
        on_ready()
        service.async_engine.close()

    monkeypatch.setattr(jaxinfer.build, "build_engine", jaxinfer_cli.build)
    monkeypatch.setattr(jaxinfer.server.run, "serve", serve)
    return services


def test_one_line_says_where_it_serves(jaxinfer_cli: CommandLine, served: list[Service]):
    code, out, err = jaxinfer_cli(
        "serve", "--model", "tiny", "--port", "0", "--max_num_seqs", "3", "--drain", "5"
    )
    assert code == 0, err
    assert out.startswith("serving tiny at http://127.0.0.1:")
    assert len(out.splitlines()) == 1
    (service,) = served
    assert service.config.model_names == ("tiny",)
    assert service.config.drain_seconds == 5
    assert jaxinfer_cli.runs[0].max_num_seqs == 3


def test_sampling_settings_hold_for_requests_that_give_none(jaxinfer_cli: CommandLine, served: list[Service]):
    jaxinfer_cli.defaults = (("top_k", 5), ("temperature", 0.5))
    code, _, err = jaxinfer_cli("serve", "--port", "0", "--set", "sampling.temperature=0.25")
    assert code == 0, err
    assert dict(served[0].defaults) == {"top_k": 5, "temperature": 0.25}


def test_a_server_for_everybody_without_a_key_is_told_of(jaxinfer_cli: CommandLine, served: list[Service]):
    _, _, err = jaxinfer_cli("serve", "--port", "0", "--host", "0.0.0.0")
    assert "no API key" in err
    _, _, err = jaxinfer_cli("serve", "--port", "0", "--host", "0.0.0.0", "--api_key", "k")
    assert "no API key" not in err
    assert served[1].config.api_keys == ("k",)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--port", "99999"], "port"),
        (["--set", "server.prot=1"], "did you mean port"),
        (["--set", "server.drain_seconds=-1"], "server.drain_seconds"),
        (["--set", "server.port=eighty"], "server.port"),
        (["--set", "server.cors_origins=5"], "server.cors_origins"),
        (["--set", "sampling.temperature=-1"], "sampling.temperature"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_meant_is_refused(jaxinfer_cli: CommandLine, served: list[Service], args, says: str):
    code, out, err = jaxinfer_cli("serve", *args)
    assert (code, out) == (2, "")
    assert says in err
    assert served == []


def test_a_file_of_keys_that_is_not_there(jaxinfer_cli: CommandLine, served: list[Service]):
    code, _, err = jaxinfer_cli("serve", "--set", "server.api_key_file=/no/such/file")
    assert code == 1
    assert "/no/such/file" in err


def test_keys_come_from_flags_settings_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "keys"
    file.write_text("third\n\n fourth \n")
    monkeypatch.setenv("JAXINFER_API_KEY", "fifth")
    settings = Settings(server={"api_keys": ["second"], "api_key_file": str(file)})
    assert server_config(settings, ["first"]).api_keys == ("first", "second", "fifth", "third", "fourth")
    file.write_text("\n")
    with pytest.raises(UsageError, match="holds no key"):
        server_config(settings, [])


def test_the_configuration_in_configs_is_read():
    settings = read_settings(str(ROOT / "configs" / "serve.toml"), [])
    assert server_config(settings, []).model_names == ("smollm2-135m",)
    assert settings.server["port"] == 8000
