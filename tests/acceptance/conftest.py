"""The engines that the acceptance tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.llm import LLM
from tests.acceptance.engines import write_toy

# Eight rows; the pool holds three of them at full length, so that a full house preempts.
TOY_SETTINGS = {
    "policy": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "kv_memory": "24 pages",
    "prefill_buckets": [[4, 16]],
}


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """TOY, ready to serve in chunks of 16; tests take what they run on from `renew`."""
    return LLM(str(write_toy(tmp_path_factory.mktemp("toy"))), **TOY_SETTINGS)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> LLM:
    """SmolLM2, four rows, prompts in chunks of 64."""
    return open_real_model(smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3(gemma3_gguf: Path) -> LLM:
    """Gemma 3, likewise."""
    return open_real_model(gemma3_gguf)


def open_real_model(path: Path) -> LLM:
    return LLM(
        str(path),
        policy="float32",
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_model_len=2048,
        prefill_buckets=[[4, 64]],
    )
