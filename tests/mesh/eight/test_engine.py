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


def generate(
    folder: Path, mesh: str, num_pages: int, greedy: bool, **settings: Any
) -> tuple[list[list[int]], LLM]:
    draws: dict[str, Any] = {"draws": ["greedy"]} if greedy else {}
    llm = LLM(str(folder), mesh=mesh, kv_memory=f"{num_pages} pages", **(SETTINGS | draws | settings))
    outputs = llm.generate(make_prompts(), [make_params(i, greedy) for i in range(NUM_PROMPTS)])
    assert isinstance(llm.engine.runner, DeviceRunner)
    assert llm.engine.runner.compilations == []
    llm.engine.scheduler.check_invariants()
    return [list(output.outputs[0].token_ids) for output in outputs], llm


SWAP = {"host_cache_bytes": "4MiB", "preemption_mode": "swap", "num_decode_steps": 4}


@pytest.mark.parametrize(
    ("case", "mesh", "num_shares", "policy", "settings"),
    [
        ("llama", "data=2,tensor=2,stage=2", 2, "float32", {"draws": ["sample"]}),
        ("qwen3_moe", "tensor=2,stage=2,expert=2", 2, "float32", {"num_decode_steps": 4}),
        ("gemma3", "tensor=2,stage=2", 1, "float32,kv=int8", SWAP),
    ],
)
def test_tokens_are_those_of_one_device(
    tmp_path: Path, case: str, mesh: str, num_shares: int, policy: str, settings: dict[str, Any]
):
    folder, greedy = write_toy(tmp_path / case, case), "draws" not in settings
    wanted, _ = generate(folder, "", 24, greedy, policy=policy)
    got, llm = generate(folder, mesh, 20 // num_shares, greedy, policy=policy, **settings)
    assert got == wanted
    assert set(llm.engine.scheduler.preemptions) == {settings.get("preemption_mode", "recompute")}
    assert llm.engine.scheduler.prefix.counts.hits


@pytest.mark.parametrize(
    ("mesh", "settings", "says"),
    [
        ("tensor=16", {}, "takes 16 devices, there are 8"),
        ("stage=4", {}, "4 stages, and the model has 2 layers"),
        ("expert=2", {}, "the model has no experts"),
        ("data=3", {}, "max_num_seqs: got 8 with mesh 'data=3'"),
        ("data=2", {"host_cache_bytes": "1MiB"}, "host_cache_bytes: got '1MiB'"),
        ("data=8", {}, "prefill_buckets: got"),
    ],
)
def test_a_mesh_that_cannot_work_is_refused_at_start(
    tmp_path: Path, mesh: str, settings: dict[str, Any], says: str
):
    with pytest.raises(ValueError, match=says):
        LLM(str(write_toy(tmp_path)), mesh=mesh, **(SETTINGS | settings))
