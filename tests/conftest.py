"""What every test leans on: the CPU backend, and the real models by name."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax

import gc
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxinfer.weights.fetch import resolve_model

# What takes minutes: begun first, so that no worker is left with it alone at the end.
LONG = ("mesh", "acceptance", "hosts", "replicas", "quality")

# XLA's flags for code that is made quickly. The fast suite compiles thousands of small programs and runs each a few
# times: better code would cost it three times the time and give the same numbers.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jax").startswith("0.10."):  # later ones know no other way
    QUICK += " --xla_cpu_use_fusion_emitters=false"
# A tenth of the time went into looking for garbage among what jax keeps.
gc.set_threshold(100_000, 50, 50)


def pytest_configure(config: pytest.Config) -> None:
    """Makes code quickly where only the fast suite is asked for, in its workers and their children too."""
    if "not slow" in str(config.getoption("markexpr")):
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
