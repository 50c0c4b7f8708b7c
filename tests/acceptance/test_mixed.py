"""Many requests of every kind at once: nothing compiles, nothing crosses unasked, and each is as it is alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from jaxinfer.engine.engine import EngineError, Handle
from jaxinfer.engine.runner import DeviceRunner
from jaxinfer.llm import LLM
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.steps.compiled import count_compilations
from tests.acceptance.conftest import open_toy
from tests.acceptance.engines import TOY_EOS, TOY_VOCAB, renew
from tests.acceptance.mixed import MixedRequest, logprobs_of, make_requests, serve, tokens_of, unused_fields


def toy_requests(count: int) -> list[MixedRequest]:
    vocab = [i for i in range(TOY_VOCAB) if i != TOY_EOS]
    return make_requests(count, vocab, lambda i: f"w{i}", longest=100, eos=TOY_EOS)


def assert_each_equals_itself_alone(
    handles: Sequence[Handle], requests: Sequence[MixedRequest], llm: LLM
) -> None:
    """Compares requests that were served together with each in a fresh engine."""
    for i, (handle, (prompt, params)) in enumerate(zip(handles, requests, strict=True)):
        if params.seed is None and not params.is_greedy:
            continue
        together = handle.output()
        (alone,) = renew(llm).generate([prompt], params)
        assert tokens_of(together) == tokens_of(alone), (i, params)
        for ours, theirs in zip(logprobs_of(together), logprobs_of(alone), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-3, err_msg=f"{i}: {params}")
        for choice in together.outputs if handle.stream else ():
            deltas = [delta for delta in handle.deltas if delta.index == choice.index]
            assert "".join(delta.text for delta in deltas) == choice.text
            assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids


def test_200_mixed_requests_compile_nothing_and_equal_themselves_alone(toy: LLM):
    requests = toy_requests(200)
    assert unused_fields(requests) == set()
    llm = renew(toy)
    with count_compilations() as compiled:
        handles = serve(llm.engine, requests, random.Random(1))
    assert compiled == []
    scheduler = llm.engine.scheduler
    assert scheduler.num_preemptions > 0  # how many hangs on the draws of requests without a seed
    assert scheduler.pool.num_used == 0
    assert {one.finish_reason for handle in handles for one in handle.output().outputs} == {"stop", "length"}
    assert_each_equals_itself_alone(handles, requests, toy)


@pytest.mark.parametrize("moved", ["params", "buffers"])
def test_an_implicit_transfer_while_serving_is_an_error(
    toy: LLM, moved: str, monkeypatch: pytest.MonkeyPatch
):
    """What the runner guards against, let in: parameters on the host, and step buffers not put on the device."""
    llm = renew(toy)
    runner = llm.engine.runner
    assert isinstance(runner, DeviceRunner)
    if moved == "params":
        runner.device.params = jax.tree.map(np.asarray, runner.device.params)
    else:
        monkeypatch.setattr(jax, "device_put", lambda tree: tree)
    with pytest.raises(EngineError, match="Disallowed host-to-device transfer"):
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0))


@pytest.fixture(scope="module")
def toy_scanned(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """TOY in chunks of 64 through one scan over its layers, with the attention that is the oracle."""
    changed = {"prefill_buckets": [[2, 64]], "stack_size": 2, "attention": "reference"}
    return open_toy(tmp_path_factory.mktemp("toy"), max_num_seqs=4, **changed)


@pytest.mark.parametrize("variant", ["toy_whole", "toy_scanned"])
def test_tokens_do_not_depend_on_how_a_run_is_built(toy: LLM, variant: str, request: pytest.FixtureRequest):
    """Chunks of 16, of 64 and none; one and four decode steps; unrolled and scanned; both kinds of attention."""
    other = renew(request.getfixturevalue(variant))
    requests = [one for one in toy_requests(60) if one.params.seed is not None or one.params.is_greedy]
    ours = serve(renew(toy).engine, requests, random.Random(1))
    with count_compilations() as compiled:
        theirs = serve(other.engine, requests, random.Random(2))
    assert compiled == []
    for i, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        assert tokens_of(one.output()) == tokens_of(two.output()), (i, requests[i])


@pytest.mark.slow
def test_mixed_requests_on_a_real_model_equal_themselves_alone(smollm2: LLM):
    tokenizer = smollm2.get_tokenizer()
    vocab = tokenizer.encode(
        "".join(f" {chr(97 + i)}{chr(97 + j)}" for i in range(26) for j in range(0, 26, 3))
    )
    words = list(dict.fromkeys(vocab))
    requests = [
        request._replace(
            params=request.params.replace(max_tokens=request.params.max_tokens or 24)
        )  # not 2,000
        for request in make_requests(24, words, lambda i: tokenizer.decode([i]), longest=40, eos=2, seed=3)
    ]
    llm = renew(smollm2)
    with count_compilations() as compiled:
        handles = serve(llm.engine, requests, random.Random(1))
    assert compiled == []
    assert_each_equals_itself_alone(handles, requests, smollm2)
