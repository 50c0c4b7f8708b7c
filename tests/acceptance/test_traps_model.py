"""Known traps of rotary tables, windows, head sizes and tied heads: the logits of transformers through the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.runner import DeviceRunner
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from tests.acceptance.engines import renew
from tests.families.cases import Case, load_case, write_checkpoint
from tests.text.vocabularies import word_level

GREEDY = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def write(folder: Path, case: Case, config: dict[str, Any], **arrays: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    word_level(folder, ["<unk>"])
    return write_checkpoint(folder, case.make_arrays() | arrays, config)


def open_case(folder: Path, case: Case, config: dict[str, Any], **arrays: np.ndarray) -> LLM:
    """An engine of two rows and chunks of 16 that scores prompts and takes the likeliest tokens."""
    settings: dict[str, Any] = {"max_num_seqs": 2, "prefill_buckets": [[2, 16]], "draws": ["greedy", "score"]}
    return LLM(str(write(folder, case, config, **arrays)), policy="float32", **settings)


def assert_logits_are_the_references(llm: LLM, case: Case) -> None:
    """Scores the case's rows together; then tokens that were decoded must be the likeliest when they are scored."""
    prompts = [row.tolist() for row in case.rows]
    outputs = llm.generate(prompts, GREEDY)
    for row, logits, output in zip(prompts, case.logits, outputs, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None
        wanted = log_softmax(logits)
        got = [(entry or {})[token].logprob for entry, token in zip(entries[1:], row[1:], strict=True)]
        np.testing.assert_allclose(got, wanted[np.arange(len(row) - 1), row[1:]], atol=2e-4)
        assert output.outputs[0].token_ids == [int(wanted[-1].argmax())]
    starts = [prompt[:30] for prompt in prompts]
    decoded = llm.generate(starts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    grown = [ids + output.outputs[0].token_ids for ids, output in zip(starts, decoded, strict=True)]
    for ids, output in zip(grown, llm.generate(grown, GREEDY), strict=True):
        entries = output.prompt_logprobs or []
        assert [(entries[i] or {})[ids[i]].rank for i in range(len(ids) - 6, len(ids))] == [1] * 6


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("llama_llama3", "rope_parameters"),  # trap 19
        ("llama_llama3", "type"),
        ("mistral_yarn", "rope_parameters"),  # trap 20
        ("gemma3", "rope_parameters"),  # trap 21
        ("qwen2_window", "rope_parameters"),
        ("llama_head_dim", "rope_parameters"),  # trap 22
    ],
)
def test_traps_19_to_22_logits_are_those_of_transformers(name: str, spelling: str, tmp_path: Path):
    case = load_case(name)
    config = dict(case.config)
    if spelling == "type":
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = {"type": rope.pop("rope_type")} | rope
    assert_logits_are_the_references(open_case(tmp_path, case, config), case)


def test_trap_19_an_unknown_rope_type_is_refused(tmp_path: Path):
    case = load_case("llama")
    with pytest.raises(ValueError, match="spiral"):
        open_case(
            tmp_path, case, case.config | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "spiral"}}
        )


@pytest.mark.parametrize("head_dim", [16, None, "absent"])
def test_trap_22_pages_have_the_checkpoint_s_own_head_size(head_dim: Any, tmp_path: Path):
    case = load_case("llama")
    config = {key: value for key, value in case.config.items() if key != "head_dim"}
    llm = open_case(tmp_path, case, config if head_dim == "absent" else config | {"head_dim": head_dim})
    assert isinstance(llm.engine.runner, DeviceRunner)
    assert llm.engine.runner.device.cache[0].k.shape[-1] == 2 * 16
    assert_logits_are_the_references(llm, case)


def test_trap_23_a_tied_model_may_hold_a_head(tmp_path: Path):
    """Without one, with an equal copy beside tables that nobody needs, and with another one, which is then the head."""
    case = load_case("llama_tied")
    llm = open_case(tmp_path / "none", case, case.config)
    assert_logits_are_the_references(llm, case)
    embedding = case.make_arrays()["model.embed_tokens.weight"]
    extra = {
        "lm_head.weight": embedding,
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    assert_logits_are_the_references(renew(llm, write(tmp_path / "equal", case, case.config, **extra)), case)
    mirrored = replace(case, logits=tuple(logits[:, ::-1] for logits in case.logits))
    other = open_case(tmp_path / "other", case, case.config, **{"lm_head.weight": embedding[::-1].copy()})
    assert_logits_are_the_references(other, mirrored)
