"""`jaxinfer serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.flags import CommandFlags, UsageError
from jaxinfer.cli.progress import say
from jaxinfer.cli.settings import Settings
from jaxinfer.cli.start import open_model_of, run_on_hosts, settings_of, tell_unused
from jaxinfer.schedule.param_checks import SamplingParamsError
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.config import ServerConfig
from jaxinfer.weights.fetch import DEFAULT_MODEL

if TYPE_CHECKING:
    from jaxinfer.engine.hosts import Hosts
    from jaxinfer.server.service import Service

HOST, PORT = "127.0.0.1", 8000
KEY_VARIABLE = "JAXINFER_API_KEY"


def make_flags() -> CommandFlags:
    """Returns the flags of the command."""
    flags = CommandFlags(
        "serve",
        "answer OpenAI's API over HTTP; SIGTERM lets what runs end, then exits with 0",
        (
            "--model smollm2-135m --port 8000",
            "--config configs/serve.toml --host 0.0.0.0",
            "--set server.api_key_file=keys.txt --set cache.kv_memory=2GiB",
            "--num_processes 2 --process_id 0 --coordinator 10.0.0.1:8476",
        ),
    )
    flags.add_model()
    flags.add("host", "ADDRESS", f"where to listen, 0.0.0.0 for everybody (default {HOST})")
    flags.add(
        "port", "N", f"0 takes a free one (default {PORT})", "integer", lower_bound=0, upper_bound=65535
    )
    about = f"opens the API; may be repeated; also server.api_key_file, a key a line, and ${KEY_VARIABLE}"
    flags.add("api_key", "KEY", about, "texts")
    flags.add("max_num_seqs", "ROWS", "requests that run at once", "integer", lower_bound=1)
    flags.add("drain", "SECONDS", "for running requests after SIGTERM (default 30)", "number", lower_bound=0)
    flags.add_hosts()
    flags.add_bundle()
    flags.add_settings()
    return flags


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    flags = make_flags()
    if not flags.parse(args):
        return 0
    settings = settings_of(flags)
    if flags["max_num_seqs"] is not None:
        settings.run["max_num_seqs"] = flags["max_num_seqs"]
    given = {"host": flags["host"], "port": flags["port"], "drain_seconds": flags["drain"]}
    settings.server.update({name: value for name, value in given.items() if value is not None})
    check_sampling(settings)
    tell_unused([f"chat.{name}" for name in settings.chat])
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise ValueError(f"serving needs {', '.join(missing)}: pip install 'jaxinfer[serve]'")
    config = server_config(settings, flags["api_key"])
    return run_on_hosts(flags, lambda hosts: _serve(settings, config, hosts))


def server_config(settings: Settings, api_keys: Sequence[str]) -> ServerConfig:
    """Returns what the server chooses, API keys from everywhere they may stand.

    Raises:
      UsageError: a setting of the wrong form.
    """
    given = {name: value for name, value in settings.server.items() if name in ServerConfig.names()}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    given.setdefault("model_names", (settings.run.get("model", DEFAULT_MODEL),))
    keys = [*api_keys, *given.get("api_keys", ()), *_lines(os.environ.get(KEY_VARIABLE, ""))]
    if (path := settings.server.get("api_key_file")) is not None:
        listed = _lines(Path(path).expanduser().read_text(encoding="utf-8"))
        if not listed:
            raise UsageError(f"server.api_key_file: {path} holds no key; write one a line")
        keys += listed
    try:
        return ServerConfig(**{**given, "api_keys": tuple(dict.fromkeys(keys))})
    except ValueError as error:
        raise UsageError(str(error)) from None


def make_service(settings: Settings, config: ServerConfig, say: Callable[[str], None]) -> Service:
    """Loads the model that settings name and returns its service, with sampling defaults of both."""
    # jax and FastAPI take seconds to import; a wrong flag need not wait for them.
    from jaxinfer.build import build_engine
    from jaxinfer.engine.aio import AsyncEngine
    from jaxinfer.llm import read_run_config
    from jaxinfer.server.service import Service

    model = open_model_of(settings)
    name = settings.run.get("model", DEFAULT_MODEL)
    engine = build_engine(read_run_config({**settings.run, "model": name}), model, say)
    sampling = {**dict(model.defaults.sampling), **settings.sampling}
    return Service(AsyncEngine(engine), config, tuple(sampling.items()), model.cfg.family)


def _serve(settings: Settings, config: ServerConfig, hosts: Hosts | None) -> int:
    from jaxinfer.server.run import bind, serve, url_of

    _write_logs(config)
    host, port = settings.server.get("host", HOST), settings.server.get("port", PORT)
    if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int):
        raise UsageError(
            f"server.host and server.port: got {host!r} and {port!r}, must be a text and a number"
        )
    with bind(host, port) as taken:  # before the model, so that a port that is taken is heard of at once
        if host not in ("127.0.0.1", "localhost", "::1") and not config.api_keys:
            say(f"anybody who reaches {host} may use the API: no API key is set")
        service = make_service(settings, config, say)
        if hosts is not None:
            # SIGTERM to any process drains, and only once: a second one would end what runs.
            hosts.on_stop = lambda: None if service.engine.draining else os.kill(os.getpid(), signal.SIGTERM)
        line = f"serving {config.model_names[0]} at {url_of(taken)}"
        serve(service, taken, lambda: print(line, flush=True))
    return 0


def check_sampling(settings: Settings) -> None:
    """Refuses a wrong sampling field of settings: requests that give none have it, and are not to hear of it.

    Raises:
      UsageError: the field, and what is wrong with it.
    """
    given: dict[str, Any] = settings.sampling
    try:
        SamplingParams(**given)
    except SamplingParamsError as error:
        raise UsageError(f"sampling.{error}") from None


def _write_logs(config: ServerConfig) -> None:
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("jaxinfer.access").setLevel(logging.INFO if config.access_log else logging.WARNING)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
