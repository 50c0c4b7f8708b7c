"""What a bench is asked for: the section ``bench`` of the settings, checked."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.bench.endpoint import EndpointOptions
from jaxinfer.bench.load import Arrivals, Lengths, Load, MakeTokens, Prefixes, Shot
from jaxinfer.bench.report import Slo
from jaxinfer.bench.trace import has_arrivals, read_trace

# Every key with the value it has when nothing is said; what it means is told in `BenchConfig` and `HELP`.
DEFAULTS: dict[str, Any] = {
    "url": [],
    "requests": 64,
    "arrivals": "closed:8",
    "input_len": 128,
    "output_len": 64,
    "slo": "",
    "repeat": 1,
    "warmup": 2,
    "seed": 0,
    "prefix_share": 0.0,
    "prefix_len": 0,
    "num_prefixes": 1,
    "api": "completions",
    "prompts": "auto",
    "ignore_eos": True,
    "timeout": 600.0,
    "api_key_env": "",
    "fields": {},
}
KEYS = tuple(DEFAULTS)
APIS, PROMPTS = ("completions", "chat"), ("auto", "ids", "words")


@dataclass(frozen=True)
class BenchConfig:
    """A bench.

    Attributes:
      urls: endpoints; none takes an engine in this process. load: what to send, and what to warm up with.
      trace: a file to send instead. output_len: of its lines without ``max_tokens``.
      arrivals: of the trace, None for its own. slo: None states none.
      repeat: times that every target gets its load. warmup: requests before that, which do not count.
      timeout: most seconds a request may take. options: of endpoints.
      given: every key of the section with its value.
    """

    urls: tuple[str, ...]
    load: Load
    trace: str | None
    output_len: Lengths
    arrivals: Arrivals | None
    slo: Slo | None
    repeat: int
    warmup: int
    timeout: float
    options: EndpointOptions
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls, given: Mapping[str, Any], model: str | None = None, sampling: Mapping[str, Any] | None = None
    ) -> BenchConfig:
        """Checks the section.

        Args:
          given: by `KEYS`; what is missing has its default.
          model, sampling: the name, and the sampling fields, to send to endpoints.

        Raises:
          ValueError: what is wrong, by name.
        """
        values = {**DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
        if unknown := [key for key in values if key not in DEFAULTS]:
            close = difflib.get_close_matches(unknown[0], KEYS, n=3)
            raise ValueError(f"bench.{unknown[0]}: no such key; there are {', '.join(close or KEYS)}")
        urls = [values["url"]] if isinstance(values["url"], str) else values["url"]
        if not isinstance(urls, list | tuple) or not all(isinstance(url, str) for url in urls):
            raise ValueError(f"url: got {urls!r}, must be a URL, or a list of them")
        if len(urls) > 2 or len(set(urls)) < len(urls):
            raise ValueError(f"url: got {', '.join(urls)}; give one, or two different ones to compare")
        output_len = Lengths.parse("output_len", values["output_len"])
        arrivals = Arrivals.parse("arrivals", values["arrivals"])
        trace = _trace_of(values["requests"])
        own_times = trace is not None and given.get("arrivals") is None and has_arrivals(trace)
        return cls(
            urls=tuple(urls),
            load=_load_of(values, arrivals, output_len, trace),
            trace=trace,
            output_len=output_len,
            arrivals=None if own_times else arrivals,
            slo=Slo.parse(values["slo"]) if values["slo"] else None,
            repeat=_whole(values, "repeat", 1),
            warmup=_whole(values, "warmup", 0),
            timeout=_number(values, "timeout", 0.001, float("inf")),
            options=_options_of(values, model, sampling or {}),
            given=values,
        )

    @property
    def num_clients(self) -> int | None:
        """Clients of a closed loop; None where requests come by the clock."""
        return int(self.arrivals.number) if self.arrivals and self.arrivals.kind == "closed" else None

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts may have something in common."""
        return self.trace is not None or bool(self.load.prefixes.share and self.load.prefixes.length)

    def draw(self, make_tokens: MakeTokens, repetition: int) -> list[Shot]:
        """Returns the requests of one repetition; see `Load.draw`. Repetition -1 is the warm-up's."""
        if self.trace is None or repetition < 0:
            return self.load.draw(make_tokens, repetition)
        return read_trace(self.trace, self.output_len, self.arrivals, self.given["seed"])


def _trace_of(requests: Any) -> str | None:
    """The file that ``requests`` names, None when it is a count."""
    if isinstance(requests, int) and not isinstance(requests, bool) and requests >= 1:
        return None
    if isinstance(requests, str) and requests and not requests.lstrip("-").isdigit():
        if not Path(requests).is_file():
            raise ValueError(f"requests: got {requests!r}, which is neither a count nor a file of requests")
        return requests
    raise ValueError(f"requests: got {requests!r}, must be a count of at least 1 or a JSONL file")


def _load_of(values: Mapping[str, Any], arrivals: Arrivals, output_len: Lengths, trace: str | None) -> Load:
    prefixes = Prefixes(
        _number(values, "prefix_share", 0.0, 1.0),
        _whole(values, "prefix_len", 0),
        _whole(values, "num_prefixes", 1),
    )
    if bool(prefixes.share) != bool(prefixes.length):
        raise ValueError(
            f"prefix_share: got {prefixes.share:g} with prefix_len {prefixes.length}; give both, or neither"
        )
    input_len = Lengths.parse("input_len", values["input_len"])
    count = values["requests"] if trace is None else _whole(values, "warmup", 0)
    return Load(count, arrivals, input_len, output_len, prefixes, _whole(values, "seed", 0))


def _options_of(values: Mapping[str, Any], model: str | None, sampling: Mapping[str, Any]) -> EndpointOptions:
    for name, allowed in (("api", APIS), ("prompts", PROMPTS)):
        if values[name] not in allowed:
            raise ValueError(f"{name}: got {values[name]!r}, must be {' or '.join(allowed)}")
    if values["api"] == "chat" and values["prompts"] == "ids":
        raise ValueError("prompts: got 'ids' with api 'chat', which takes text: must be auto or words")
    if not isinstance(values["fields"], Mapping):
        raise ValueError(f"fields: got {values['fields']!r}, must be a table of fields of the request's body")
    if not isinstance(values["ignore_eos"], bool):
        raise ValueError(f"ignore_eos: got {values['ignore_eos']!r}, must be true or false")
    headers = {}
    if name := values["api_key_env"]:
        if not os.environ.get(name):
            raise ValueError(f"api_key_env: the environment has no {name!r}; put the key there")
        headers["Authorization"] = f"Bearer {os.environ[name]}"
    return EndpointOptions(
        api=values["api"],
        model=model,
        prompts=values["prompts"],
        fields={"temperature": 0, **sampling, **values["fields"]},
        headers=headers,
        ignore_eos=values["ignore_eos"],
    )


def _whole(values: Mapping[str, Any], name: str, least: int) -> int:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: got {value!r}, must be a whole number of at least {least}")
    return value


def _number(values: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = values[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: got {value!r}, must be a number from {least:g} to {most:g}")
    return float(value)
