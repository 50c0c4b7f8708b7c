"""A JAX functional inference stack; what is exported is loaded when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.llm import LLM, AsyncLLM
    from jaxinfer.schedule.sampling_params import SamplingParams

__version__ = "0.1.0.dev0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "jaxinfer.llm",
    "AsyncLLM": "jaxinfer.llm",
    "SamplingParams": "jaxinfer.schedule.sampling_params",
}


def __getattr__(name: str) -> Any:
    # Loading jax takes a second, which `jaxinfer --help` and users of the host rooms do not owe.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
