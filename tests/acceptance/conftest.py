"""The engines that the acceptance tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.llm import LLM
from tests.acceptance.bigram import Table, Words, write_bigram
from tests.acceptance.engines import renew, write_toy

# Eight rows; the pool holds three of them at full length, so that a full house preempts.
TOY_SETTINGS = {
    "policy": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "kv_memory": "24 pages",
    "prefill_buckets": [[4, 16]],
    "host_cache_bytes": "1MiB",
}


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """TOY, ready to serve in chunks of 16; tests take what they run on from `renew`."""
    return open_toy(tmp_path_factory.mktemp("toy"))


def open_toy(folder: Path, **settings: Any) -> LLM:
    return LLM(str(write_toy(folder)), **(TOY_SETTINGS | settings))


@pytest.fixture(scope="session")
def toy_whole(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """TOY in a run that is built otherwise: whole prompts, four decode steps at once."""
    changed = {"prefill_buckets": [[1, 128]], "max_num_batched_tokens": 160, "num_decode_steps": 4}
    return open_toy(tmp_path_factory.mktemp("toy"), max_num_seqs=4, **changed)


BIGRAM_VOCAB = 320
OpenBigram = Callable[..., LLM]


@pytest.fixture(scope="session")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """BIGRAM of `BIGRAM_VOCAB` tokens, ready to serve four rows; `open_bigram` gives it tables."""
    folder = Words().write(tmp_path_factory.mktemp("bigram"))
    return LLM(
        str(write_bigram(folder, Table(BIGRAM_VOCAB))),
        policy="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        prefill_buckets=[[2, 16]],
    )


@pytest.fixture
def open_bigram(bigram: LLM, tmp_path: Path) -> OpenBigram:
    """Returns a function that writes a BIGRAM checkpoint and opens it by the public loader.

    Its arguments: the table; the words (None where the folder holds a tokenizer already) with the keys of
    tokenizer_config.json; generation_config.json; further keys of config.json.
    """

    def open_one(
        table: Table,
        words: Words | None = None,
        tokenizer: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> LLM:
        if words is not None:
            words.write(tmp_path, **(tokenizer or {}))
        return renew(bigram, write_bigram(tmp_path, table, generation, **config))

    return open_one


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> LLM:
    """SmolLM2, four rows, four short prompts at once or one in chunks of 256."""
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
        kv_memory="140 pages",
        prefill_buckets=[[4, 64], [1, 256]],
    )
