"""What a server chooses: names, keys, limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

MIB = 2**20


@dataclass(frozen=True)
class ServerConfig:
    """Everything a server chooses beside the run of its engine.

    Attributes:
      model_names: what requests may call the model; the first is what answers call it.
      api_keys: any of them opens the API; empty asks for none.
      cors_origins: pages that may call from a browser, ``*`` for any; empty allows none.
      max_body_bytes: longest request body, 413 beyond it; reading JSON holds the others up, 30 ms a megabyte.
      max_choices: most choices of one request, prompts times ``best_of`` or ``n``.
      drain_seconds: how long running requests may go on after SIGTERM.
      timeout: seconds that a request may take where it gives no ``timeout`` itself, None for as long as it takes.
      access_log: a line for each request, without its prompt; none for health checks, metrics and the live view.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * MIB
    max_choices: int = 1024
    drain_seconds: float = 30.0
    timeout: float | None = None
    access_log: bool = True

    def __post_init__(self) -> None:
        for name in ("model_names", "api_keys", "cors_origins"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
                raise ValueError(f"server.{name}: got {value!r}, must be a list of texts that are not empty")
        if not self.model_names:
            raise ValueError("server.model_names: got none, must be at least one")
        for name in ("max_body_bytes", "max_choices"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"server.{name}: got {value!r}, must be a whole number of at least 1")
        for name in ("drain_seconds", "timeout"):
            value = getattr(self, name)
            if name == "timeout" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"server.{name}: got {value!r}, must be seconds, 0 or more")
        if not isinstance(self.access_log, bool):
            raise ValueError(f"server.access_log: got {self.access_log!r}, must be true or false")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of all choices."""
        return tuple(f.name for f in fields(cls))


# What the section ``server`` of a configuration file may hold: where to listen, keys in a file, and the above.
KEYS = ("host", "port", "api_key_file", *ServerConfig.names())
