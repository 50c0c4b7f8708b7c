"""What every test leans on: the CPU backend, and the real models by name."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax

from pathlib import Path

import pytest

from jaxinfer.weights.fetch import resolve_model

# What takes minutes: begun first, so that no worker is left with it alone at the end.
LONG = ("mesh", "acceptance", "hosts", "replicas", "quality")

# XLA's flags for code that is made quickly. The fast suite compiles thousands of small programs and runs each a few
# times: better code would cost it near twice the time and give the same numbers.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def pytest_configure(config: pytest.Config) -> None:
    """Makes code quickly where only the fast suite is asked for, in its workers and their children too."""
    if config.getoption("markexpr") == "not slow":
        os.environ.setdefault("XLA_FLAGS", QUICK)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts what takes long before the rest."""
    folders = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    items.sort(key=lambda item: LONG.index(folders[item]) if folders[item] in LONG else len(LONG))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2 135M Instruct's GGUF file, fetched where it is not in the cache."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M's GGUF file, fetched where it is not in the cache."""
    return resolve_model("gemma3-270m")
