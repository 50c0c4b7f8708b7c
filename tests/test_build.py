"""What a run chooses: memory, shapes, number formats; and what it refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.arrays.precision import Policy
from jaxinfer.build import (
    RunConfig,
    choose_buckets,
    choose_policy,
    extras_of,
    mixed_tokens,
    plan_memory,
    warn_of_widening,
)
from jaxinfer.cli.settings import read_settings
from jaxinfer.config import AttentionConfig, LayerKind, MlpConfig, ModelConfig, RopeConfig
from jaxinfer.engine.budget import AUTO_KV_BYTES, count_host_pages, kv_pages
from jaxinfer.llm import read_run_config
from jaxinfer.model.stacks import Static
from jaxinfer.steps.compiled import StepTable
from tests.steps.kept_run import POLICY, TINY, make_state

ROOT = Path(__file__).parents[1]
GIB = 2**30
CFG = ModelConfig(
    family="llama",
    vocab_size=97,
    d_model=32,
    max_len=1024,
    layers=(LayerKind(),) * 3,
    attention=AttentionConfig(4, 2, 8, 8**-0.5),
    mlp=MlpConfig(48),
    ropes=(RopeConfig(1e4, 8),),
)
PAGE_BYTES = 2 * 3 * 16 * 2 * 8 * 4  # K and V, layers, tokens, kv heads, head dim, float32


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("1000 pages", 1000),
        ("1 page", 1),
        ("64KiB", 64),
        ("64kb", 62),
        ("1.5 MiB", 1536),
        ("2000B", 1),
        ("25%", 256 * 2**10),
        ("auto", 64),  # all that the requests can need
    ],
)
def test_memory_is_given_in_bytes_pages_or_shares(text: str, pages: int):
    assert kv_pages(text, 1024, 64, 8, GIB) == pages


def test_auto_takes_a_fixed_share_one_long_request_or_half_the_device():
    assert kv_pages("auto", 1024, 10**9, 8, 64 * GIB) == AUTO_KV_BYTES // 1024
    assert kv_pages("auto", 1024, 10**9, 10**6, 64 * GIB) == 10**6
    assert kv_pages("auto", 1024, 10**9, 10**6, GIB) == GIB // 2048


@pytest.mark.parametrize(
    "text", ["", "lots", "12", "1.2.3MB", "-5MB", "0 pages", "10B", "0%", "101%", "5 pagess", ".MB", "5iB"]
)
def test_memory_of_another_form_or_too_little_is_refused(text: str):
    with pytest.raises(ValueError, match="kv_memory"):
        kv_pages(text, 1024, 64, 8, GIB)


def test_memory_of_the_host_buys_whole_pages():
    assert [count_host_pages(text, 1024) for text in (0, "0", "1KiB", 4095, "1 MiB")] == [0, 0, 1, 3, 1024]


@pytest.mark.parametrize("text", ["lots", "-1", "25%", 1023, "1000B"])
def test_memory_of_the_host_that_would_keep_nothing_is_refused(text: str | int):
    with pytest.raises(ValueError, match=r"host_cache_bytes: got .*(1024|must be bytes)"):
        count_host_pages(text, 1024)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
        ({"page_size": True}, "page_size: got True"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 8}, "must exceed max_num_seqs = 8"),
        ({"max_model_len": 1}, "max_model_len: got 1"),
        ({"stack_size": -1}, "stack_size: got -1"),
        (
            {"prefill_buckets": ((0, 16),)},
            r"prefill_buckets: got \(0, 16\), rows and tokens must be at least 1",
        ),
        ({"prefill_buckets": (16,)}, "prefill_buckets: got 16, must be pairs"),
        ({"prefill_buckets": ((1, 2, 3),)}, "must be pairs"),
        ({"prefill_buckets": (("a", 2),)}, "must be pairs"),
        ({"draws": ("score",)}, "draws"),
        ({"draws": ("greedy", "dice")}, "draws"),
    ],
)
def test_runs_that_cannot_be_are_refused_at_once(given: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        RunConfig(**given)


def test_one_row_may_take_a_token_a_step():
    assert RunConfig(max_num_seqs=1, max_num_batched_tokens=1).max_num_batched_tokens == 1


@pytest.mark.parametrize(
    ("given", "most", "mixing"),
    [
        ({}, 64, ((1, 32), (1, 64), (2, 32))),
        ({"mixed_prefill_tokens": 1}, 1, ((1, 1),)),
        ({"mixed_prefill_tokens": 9999}, 512, ((1, 256), (1, 512), (2, 256))),
        ({"mixed_prefill_tokens": 0}, None, ((1, 64), (1, 512), (8, 64))),
        ({"prefill_buckets": ((4, 128),)}, None, ((4, 128),)),  # pieces of 64 would be computed as 512 tokens
        ({"prefill_buckets": ((4, 128),), "mixed_prefill_tokens": 128}, 128, ((4, 128),)),
    ],
)
def test_prompts_beside_decode_rows_have_a_limit_that_their_shapes_fit(
    given: dict[str, Any], most: int | None, mixing: tuple[tuple[int, int], ...]
):
    config = RunConfig(**given)
    assert (mixed_tokens(config), choose_buckets(config, 1024).mixing) == (most, mixing)


def test_policies_are_chosen_or_parsed():
    assert str(choose_policy("bf16")[0]) == "bfloat16"
    policy, reason = choose_policy("auto")
    assert str(policy) in ("bfloat16", "float32")
    assert reason.startswith("auto: this processor")


def test_the_start_warns_of_codes_that_a_cpu_widens():
    (line,) = warn_of_widening(Policy.parse("w8a16,compute=bf16"))
    assert line == "a CPU widens int8 weights to bfloat16 at every step, act=int8 multiplies them as they lie"
    assert warn_of_widening(Policy.parse("weights=mxfp4")) == [
        "a CPU widens mxfp4 weights to float32 at every step"
    ]
    assert not warn_of_widening(Policy.parse("w8a8"))
    assert not warn_of_widening(Policy.parse("bf16,kv8"))


SETTINGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 5000),
        "max_num_batched_tokens": st.integers(5001, 9000),
        "page_size": st.sampled_from([1, 4, 16, 100, 256, 1024]),
        "num_decode_steps": st.sampled_from([1, 4]),
    }
)


@settings(derandomize=True, deadline=None)
@given(SETTINGS, st.integers(2, 10**5))
def test_shapes_hold_every_row_and_the_longest_sequence(given: dict[str, Any], max_len: int):
    config = RunConfig(**given)
    buckets = choose_buckets(config, max_len)
    assert buckets.decode[-1] == max(config.max_num_seqs, 2)
    assert list(buckets.decode) == sorted(set(buckets.decode))
    assert max_len <= buckets.width * config.page_size < max_len + config.page_size
    assert all(b >= 1 and T >= 1 for b, T in buckets.prefill)
    assert max(T for _, T in buckets.prefill) == config.max_num_batched_tokens
    assert len(buckets.decode) <= 13


def test_an_accelerator_compiles_sixteen_executables_to_draw_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxinfer.build.backend", lambda: "tpu")
    buckets = choose_buckets(RunConfig(max_num_seqs=64, max_num_batched_tokens=2048), 2048)
    assert buckets.decode == (8, 64)
    assert buckets.prefill == ((1, 2048), (32, 64))
    assert buckets.mixed == (64,)
    shapes = buckets.shapes()
    rows = {count for shape in shapes for count in shape.draws()}
    assert len(shapes) + 2 * len(rows) + len(("install", "recall")) == 16
    few = choose_buckets(RunConfig(max_num_seqs=3), 2048)
    assert few.decode == (3,)


@pytest.mark.parametrize("name", ["gpu_8x", "tpu_v5e_8", "tpu_v5p_16", "tpu_v6e_8"])
def test_an_accelerators_configuration_takes_at_most_sixteen_executables(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jaxinfer.build.backend", lambda: name[:3])
    run = read_settings(str(ROOT / "configs" / f"{name}.toml"), []).run
    config = read_run_config(run)
    assert config.mesh == "tensor=8"  # one share of the rows
    assert config.max_model_len is not None
    shapes = choose_buckets(config, config.max_model_len).shapes()
    table = StepTable(Static(TINY, POLICY), *make_state(TINY))
    assert 10 < len(table.lowerings(shapes, config.draws, extras_of(config))) <= 16


def test_prefill_shapes_can_be_given():
    buckets = choose_buckets(RunConfig(prefill_buckets=((4, 16), (1, 64), (4, 16))), 128)
    assert buckets.prefill == ((1, 64), (4, 16))


def plan(**given: Any) -> tuple[tuple[int, int], list[str]]:
    said: list[str] = []
    return plan_memory(RunConfig(**given), CFG, choose_policy("float32")[0], said.append), said


def test_the_start_says_what_the_memory_buys():
    (pages, max_len), said = plan(max_num_seqs=4, kv_memory="200 pages", max_model_len=512)
    assert (pages, max_len) == (200, 512)
    mib = 200 * PAGE_BYTES / 2**20
    assert f"200 pages of 16 tokens = 3200 tokens in {mib:.0f} MiB" in said[-1]
    assert "6 requests at the full length of 512" in said[-1]


def test_the_context_is_cut_to_what_the_cache_holds_unless_it_was_asked_for():
    (pages, max_len), said = plan(kv_memory="10 pages")
    assert (pages, max_len) == (10, 160)
    assert "cut from the model's 1024" in said[0]
    with pytest.raises(
        ValueError, match=f"raise kv_memory to {32 * PAGE_BYTES} bytes or lower max_model_len to 160"
    ):
        plan(kv_memory="10 pages", max_model_len=512)


def test_the_context_may_not_exceed_the_model_s():
    with pytest.raises(ValueError, match="max_model_len: got 2048, but the model was made for 1024"):
        plan(max_model_len=2048)
