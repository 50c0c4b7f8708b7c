"""Settings by section: a TOML file and `--set section.key=value` over it."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxinfer.bench.config import KEYS as BENCH_KEYS
from jaxinfer.cli.flags import UsageError
from jaxinfer.schedule.param_checks import SamplingParamsError
from jaxinfer.schedule.param_names import translate
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.server.config import KEYS as SERVER_KEYS

# Where each choice of a run lives, by its key in the section. RunConfig's own names but for the model's.
RUN_SECTIONS: dict[str, dict[str, str]] = {
    "model": {"name": "model", "policy": "policy", "max_model_len": "max_model_len"},
    "cache": {
        "page_size": "page_size",
        "kv_memory": "kv_memory",
        "enable_prefix_caching": "enable_prefix_caching",
        "host_cache_bytes": "host_cache_bytes",
    },
    "schedule": {
        "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "mixed_prefill_tokens": "mixed_prefill_tokens",
        "num_decode_steps": "num_decode_steps",
        "scheduling_policy": "scheduling_policy",
        "ageing_s": "ageing_s",
        "window_ms": "window_ms",
        "max_num_waiting": "max_num_waiting",
        "preemption_mode": "preemption_mode",
    },
    "run": {
        "attention": "attention",
        "matmul": "matmul",
        "mesh": "mesh",
        "stack_size": "stack_size",
        "prefill_buckets": "prefill_buckets",
        "draws": "draws",
        "compile_cache": "compile_cache",
        "bundle": "bundle",
    },
}
CHAT_KEYS = ("system", "template", "template_kwargs")
SECTIONS = (*RUN_SECTIONS, "chat", "sampling", "server", "bench")
# Keys whose value is text as it stands, so that `--set model.name=123` needs no quotes.
_TEXTS = {
    "model.name",
    "model.policy",
    "cache.kv_memory",
    "cache.host_cache_bytes",
    "schedule.scheduling_policy",
    "schedule.preemption_mode",
    "run.attention",
    "run.matmul",
    "run.mesh",
    "run.bundle",
    "chat.system",
    "chat.template",
}
_TEXTS |= {"bench.input_len", "bench.output_len"}  # 10:30 is a time of day in newer TOML
_TEXTS |= {"server.host", "server.api_key_file"}
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True)
class Settings:
    """What a file and the command line choose, ready for the records that check it.

    Attributes:
      run: by RunConfig's names. sampling: by SamplingParams' names. chat: see `CHAT_KEYS`.
      server: see `SERVER_KEYS`. bench: of a load, by its own keys.
    """

    run: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)


def read_settings(config: str | None, assignments: Sequence[str]) -> Settings:
    """Reads a TOML file and assignments over it.

    Args:
      config: the file, None for none. assignments: ``section.key=value`` each, the later over the earlier.

    Raises:
      UsageError: an unknown section or key, or an assignment of another form.
      ValueError: the file is no TOML.
    """
    settings = Settings()
    if config is not None:
        for section, table in _read_toml(Path(config)).items():
            if not isinstance(table, Mapping):
                raise UsageError(
                    f"{config}: {section!r} stands outside a section; sections are {_listed(SECTIONS)}"
                )
            _put(settings, section, table, config)
    for text in assignments:
        name, equals, value = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise UsageError(f"--set {text}: expected SECTION.KEY=VALUE, such as sampling.top_p=0.9")
        _put(settings, section, {key: read_value(f"{section}.{key}", value)}, f"--set {text}")
    return settings


def read_value(name: str, text: str) -> Any:
    """Returns an assignment's value: TOML's number, boolean, list, table or quoted text, else the text itself."""
    if name in _TEXTS and text[:1] not in ('"', "'"):
        return text
    if text.strip().lower() in _WORDS:
        return _WORDS[text.strip().lower()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(settings: Settings, section: str, table: Mapping[str, Any], where: str) -> None:
    """Adds a section's values, and refuses what is unknown before a model is loaded for it."""
    if section == "sampling":
        try:
            settings.sampling.update(read_sampling(table))
        except SamplingParamsError as error:
            raise UsageError(f"{where}: {error}") from None
        return
    if section not in SECTIONS:
        raise UsageError(f"{where}: no section {section!r}; {_close(section, SECTIONS)}")
    for key, value in table.items():
        if section == "chat" and key in CHAT_KEYS:
            settings.chat[key] = value
        elif section == "server" and key in SERVER_KEYS:
            settings.server[key] = value
        elif section == "bench" and key in BENCH_KEYS:
            settings.bench[key] = value
        elif key in RUN_SECTIONS.get(section, ()):
            settings.run[RUN_SECTIONS[section][key]] = value
        else:
            raise UsageError(f"{where}: no key {key!r} in [{section}]; {_elsewhere(key, section)}")


def read_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling fields under our names, so that one source can go over another whatever its spelling."""
    return translate(given, [field.name for field in fields(SamplingParams)])


def _elsewhere(key: str, section: str) -> str:
    for other, keys in RUN_SECTIONS.items():
        if key in keys:
            return f"it belongs to [{other}]"
    own = {"chat": CHAT_KEYS, "server": SERVER_KEYS, "bench": BENCH_KEYS}
    return _close(key, own.get(section) or RUN_SECTIONS[section])


def _close(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {_listed(known)}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
