"""A JAX functional inference stack; what is exported is loaded when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.llm import LLM, AsyncLLM
    from jaxinfer.schedule.sampling_params import SamplingParams

    __version__: str

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "jaxinfer.llm",
    "AsyncLLM": "jaxinfer.llm",
    "SamplingParams": "jaxinfer.schedule.sampling_params",
}


def __getattr__(name: str) -> Any:
    # Loading jax takes a second, which `jaxinfer --help` and users of the host rooms do not owe.
    if name == "__version__":
        value = import_module("importlib.metadata").version("jaxinfer")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
