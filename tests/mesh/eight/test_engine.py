"""Engines over meshes: the tokens of one device, and refusals at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.runner import DeviceRunner
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.engines import write_toy

SETTINGS: dict[str, Any] = {
    "policy": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 96,
    "prefill_buckets": [[4, 16]],
    "draws": ["greedy", "sample"],
    "compile_cache": False,
}
NUM_PROMPTS, NUM_TOKENS = 12, 30


def make_prompts() -> list[list[int]]:
    """Prompts that begin alike, for two pages."""
    rng = np.random.default_rng(0)
    stem = rng.integers(3, 120, 33).tolist()
    return [stem + rng.integers(3, 120, int(n)).tolist() for n in rng.integers(1, 12, NUM_PROMPTS)]


def make_params(i: int, greedy: bool) -> SamplingParams:
    """Greedy for half of the requests, and for the others most settings together."""
    if greedy or i % 2:
        return SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        seed=i,
        temperature=1.0,
        top_p=0.9 if i % 3 else 1.0,
        top_k=5 if i % 4 == 0 else 0,
        logprobs=3,
        repetition_penalty=1.2,
        logit_bias={5: 2.0},
        allowed_token_ids=list(range(3, 100)) if i == 6 else None,
    )


def generate(folder: Path, case: str, mesh: str, num_pages: int, greedy: bool) -> tuple[list[list[int]], LLM]:
    draws: dict[str, Any] = {"draws": ["greedy"]} if greedy else {}
    llm = LLM(str(folder), mesh=mesh, kv_memory=f"{num_pages} pages", **(SETTINGS | draws))
    outputs = llm.generate(make_prompts(), [make_params(i, greedy) for i in range(NUM_PROMPTS)])
    assert isinstance(llm.engine.runner, DeviceRunner)
    assert llm.engine.runner.compilations == []
    llm.engine.scheduler.check_invariants()
    return [list(output.outputs[0].token_ids) for output in outputs], llm


@pytest.mark.parametrize(
    ("case", "mesh", "num_shares", "greedy"),
    [("llama", "tensor=2,data=2", 2, False), ("qwen3_moe", "tensor=2,expert=2", 2, True)],
)
def test_tokens_are_those_of_one_device(tmp_path: Path, case: str, mesh: str, num_shares: int, greedy: bool):
    folder = write_toy(tmp_path / case, case)
    wanted, _ = generate(folder, case, "", 24, greedy)
    got, llm = generate(folder, case, mesh, 20 // num_shares, greedy)
    assert got == wanted
    assert llm.engine.scheduler.num_preemptions
    assert llm.engine.scheduler.prefix.counts.hits


@pytest.mark.parametrize(
    ("mesh", "settings", "says"),
    [
        ("tensor=16", {}, "takes 16 devices, there are 8"),
        ("tensor=2,stage=2", {}, "pipelines are not built"),
        ("expert=2", {}, "the model has no experts"),
        ("data=3", {}, "max_num_seqs: got 8 with mesh 'data=3'"),
        ("data=2", {"num_decode_steps": 4}, "num_decode_steps: got 4"),
        ("data=2", {"host_cache_bytes": "1MiB"}, "host_cache_bytes: got '1MiB'"),
        ("data=8", {}, "prefill_buckets: got"),
    ],
)
def test_a_mesh_that_cannot_work_is_refused_at_start(
    tmp_path: Path, mesh: str, settings: dict[str, Any], says: str
):
    with pytest.raises(ValueError, match=says):
        LLM(str(write_toy(tmp_path)), mesh=mesh, **(SETTINGS | settings))
